"""Which recipe fits? `plan`: those that do, and why the others do not; `panel`: the same with controls."""

from .panel import panel
from .recipes import OPTIMIZERS, Recipe, predicted, recipes
from .search import Option, instead, of_card, plan, smallest, table

__all__ = ["OPTIMIZERS", "Option", "Recipe", "instead", "of_card", "panel", "plan", "predicted", "recipes"]
__all__ += ["smallest", "table"]

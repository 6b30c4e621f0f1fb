"""`plan`: the recipes that fit, the least work first, and why the others do not.

The memory of each is predicted, for the largest micro-batch that fits.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from .. import machine, models, predict
from ..check import accept
from ..figures import Table, size
from ..measure import ROLES
from .recipes import Recipe, predicted, recipes

FEW = (2, 3)  # layers, of a model that is predicted in a tenth of the time
NEAR = 0.97  # times a guess: fewer texts never need less
SHOWN = {"weights": "weights", "gradients": "gradients", "state": "optimizer state", "activations": "activations"}
NOT_HERE = ", not installed"
# Whose activations pass the largest number of fp16, and the issue of transformers that tells it.
OVERFLOWS = {"gemma3_text": 36822, "t5": 5651}


@dataclass(frozen=True)
class Option:
    """A recipe on a card. micro_batch: the largest that fits, 0 where not even one text does.

    prediction: of a step with that micro-batch, or with one text; None where `why` says that it was not asked for.
    why: why it does not fit or does not come into question; empty where it fits.
    """

    recipe: Recipe
    micro_batch: int = 0
    prediction: predict.Prediction | None = None
    why: str = ""


def plan(
    model: str,
    card: str,
    length: int,
    effective_batch: int,
    *,
    whole: bool = False,
    exact: bool = False,
    no_new_dependency: bool = False,
    each: Callable[[Callable, list], Iterable] = map,
) -> list[Option]:
    """Every recipe on that card, those that fit first, and of these the least work first.

    model: a name of facts/models.toml. card: a GPU of facts/gpus.toml, or a size such as "6 GiB".
    length: tokens of the longest text; effective_batch: texts of one optimizer step.
    whole: all parameters are trained. exact: the plain loop's step, but for rounding in fp32. no_new_dependency: no
    package that the course does without. What needs one that is not installed comes into no question. each: a `map`,
    for example of several processes.
    """
    accept(
        type(effective_batch) is int and 1 <= effective_batch <= 4096, "effective_batch", effective_batch, "1 to 4096"
    )
    longest = models.positions(models.config(model)) or predict.MOST
    accept(type(length) is int and 4 <= length <= longest, "length", length, f"4 to {longest:,}, what this model takes")
    gpu, step = machine.gpu(card), dict(model=model, length=length, card=card)
    options, alike = {}, {}  # alike: but for the optimizer
    for recipe in recipes(_half(gpu), models.head_share(model)):
        lacks = [name for name in recipe.needs if no_new_dependency or not importlib.util.find_spec(name)]
        reasons = {"trains adapters, not all parameters": whole and not recipe.whole,
                   "takes another step than the plain loop": exact and not recipe.exact,
                   f"needs {' and '.join(lacks)}{'' if no_new_dependency else NOT_HERE}": lacks}  # fmt: skip
        against = [reason for reason, holds in reasons.items() if holds]
        options[recipe.name] = Option(recipe, why="; ".join(against))
        if not against:
            others = {**recipe.choices, "optimizer": None, "adapters": recipe.adapters}
            alike.setdefault(str(sorted(others.items())), []).append(recipe)
    longest_first = sorted(alike.values(), key=_most_work, reverse=True)
    for found in each(_Largest(step, effective_batch, gpu), longest_first):
        options |= {option.recipe.name: option for option in found}
    for name, option in options.items():
        if _overflows(option.recipe, model, gpu) and option.prediction:
            told = f"https://github.com/huggingface/transformers/issues/{OVERFLOWS[models.config(model).model_type]}"
            why = f"{option.why}; overflows in fp16: {told}"
            options[name] = replace(option, why=why.removeprefix("; "))
    return sorted(options.values(), key=lambda option: bool(option.why))


@dataclass(frozen=True)
class _Largest:
    """A function of a recipe that other processes can be given."""

    step: dict
    effective_batch: int
    gpu: machine.Gpu

    def __call__(self, recipes: list[Recipe]) -> list[Option]:
        """Of recipes that are alike but for the optimizer: the forward and the backward pass of all are one."""
        few = cache(partial(self._with, recipes))
        likely = [self._likely(lambda *of, place=place: few(*of)[place]) for place in range(len(recipes))]
        following = [next(sizes, 1) for sizes in likely]  # of each recipe; where none is likely, one text says why
        options = [None] * len(recipes)
        while None in options:
            left = [place for place, option in enumerate(options) if option is None]
            n = max(following[place] for place in left)
            asked = [place for place in left if following[place] == n]
            for place, report in zip(asked, self._with([recipes[place] for place in asked], n)):
                following[place] = next(likely[place], 1)
                if report.fits:
                    options[place] = Option(recipes[place], n, report)
                elif n == 1:
                    options[place] = Option(recipes[place], 0, *self._why(report))
        return options

    def _likely(self, report_of: Callable[..., predict.Prediction]) -> Iterator[int]:
        """The micro-batches that may fit, the largest first. report_of: a function of one and of a few layers."""
        *smaller, whole = [n for n in range(1, self.effective_batch + 1) if self.effective_batch % n == 0]
        if self._at_least(report_of, whole) <= self.gpu.usable:  # it has no gradients of micro-batches before
            yield whole
        for n in reversed(smaller):
            guess = self._at_least(report_of, whole, n / whole)
            if guess <= self.gpu.usable or NEAR * guess <= self.gpu.usable >= self._at_least(report_of, n):
                yield n

    def _at_least(self, report_of: Callable[..., predict.Prediction], n: int, share: float = 1.0) -> float:
        """Bytes of the card. A phase's peak is the highest of lines over the layers: above the line through two.

        share: of the n texts. Below 1 it is a guess: that what the passes compute goes with the texts, and that they
        meet the gradients of micro-batches before. What is the same for all texts makes it too low.
        """
        more = models.config(self.step["model"]).num_hidden_layers - FEW[-1]
        lines = zip(*(_peaks(report_of(n, layers), share) for layers in FEW))
        return max(high + (high - low) * more for low, high in lines) + predict.context(self.gpu)

    def _with(self, recipes, micro_batch, layers=None):
        accumulate = 1 if micro_batch == self.effective_batch else 2  # from two on the memory is the same
        return predicted(recipes, batch=micro_batch, accumulate=accumulate, layers=layers, **self.step)

    def _why(self, one: predict.Prediction) -> tuple[predict.Prediction, str]:
        most = " and ".join(sorted(one.parts, key=lambda role: -one.parts[role])[:2])
        return one, f"one text needs {size(one.card_bytes)} of {size(self.gpu.usable)}, above all for {most}"


def _most_work(alike: list[Recipe]) -> tuple:
    """To know them, as far as it can be told before: more techniques fit more texts, and are tried with more."""
    return len(alike), len(alike[0].choices), alike[0].operations


def _peaks(report: predict.Prediction, share: float) -> list[float]:
    """In bytes, of the forward pass, the backward pass and the optimizer's step; of that share of the texts."""
    highest = dict.fromkeys(("forward", "backward", "optimizer"), 0)
    gradients, activations, temporary = map(ROLES.index, ("gradients", "activations", "temporary"))
    every = max(held[gradients] for held in report.timeline)
    for phase, held in zip(report.phases, report.timeline):
        count = sum(held)
        if share < 1 and phase != "optimizer":
            count += every - held[gradients] - (1 - share) * (held[activations] + held[temporary])
        highest[phase] = max(highest.get(phase, 0), count)
    return [*highest.values()]


def _half(gpu: machine.Gpu) -> str:
    """Its half precision, and the kind of kernels that it has."""
    return "bf16" if gpu.capability and gpu.capability >= (8, 0) else "fp16"


def _overflows(recipe: Recipe, model: str, gpu: machine.Gpu) -> bool:
    return _half(gpu) == "fp16" and "precision" in recipe.choices and models.config(model).model_type in OVERFLOWS


def of_card(gpu: machine.Gpu) -> list[str]:
    """What a plan does not say of a card, a line each."""
    old, nan = gpu.capability and gpu.capability < (7, 5), "GTX 16" in gpu.name
    said = {
        "Only torch for CUDA 12.6, up to 2.14, knows this card: https://github.com/pytorch/pytorch/issues/190385": old,
        "On this card fp16 gives NaN in some networks: https://github.com/pytorch/pytorch/issues/77955": nan,
    }
    return [text for text, holds in said.items() if holds]


def smallest(
    options: list[Option], model: str, card: str, length: int, effective_batch: int, **_
) -> tuple[machine.Gpu, Recipe] | None:
    """Where no recipe fits: the card of facts/gpus.toml with the least memory that would do, and with which.

    options: of `plan` for that card, in the order of its recipes, as they are where none fits.
    """
    known, needed = {place: option.prediction for place, option in enumerate(options) if option.prediction}, {}
    for gpu in sorted(machine.gpus().values(), key=lambda gpu: gpu.usable):
        every, half = recipes(_half(gpu), models.head_share(model)), _half(gpu)
        largest = _Largest(dict(model=model, length=length, card=gpu.name), effective_batch, gpu)
        for place, one in known.items():
            least = one.parts["weights"] + one.parts["optimizer state"]  # which no kernel changes
            if least > gpu.usable or _overflows(every[place], model, gpu):
                continue
            few = cache(lambda *of, recipe=every[place], largest=largest: largest._with([recipe], *of)[0])
            # By all texts at once, which meet no gradients of others, or by one; for cards of a kind about the same.
            if (half, place) not in needed:
                either = (largest._at_least(few, effective_batch, share) for share in (1, 1 / effective_batch))
                needed[half, place] = min(either) - predict.context(gpu)
            near = NEAR * needed[half, place] + predict.context(gpu) <= gpu.usable
            if near and any(largest._at_least(few, n) <= gpu.usable and few(n).fits for n in {1, effective_batch}):
                return gpu, every[place]


def instead(options: list[Option], found: tuple[machine.Gpu, Recipe] | None) -> str:
    """Where no recipe fits: what `smallest` has found, in a sentence, and what `of_card` says of it."""
    last = next((option for option in reversed(options) if option.prediction), None)
    if any(option.why.endswith(NOT_HERE) for option in options):
        return "No recipe fits with what is installed here: others need bitsandbytes or peft (the table says which)."
    if last is None:
        return "No recipe keeps what was asked for: ask for less."
    if found is None:
        return f"No card of tutorial_utils/facts/gpus.toml would do: {last.recipe.name}, {last.why}."
    gpu, recipe = found
    return " ".join([f"The smallest card that would do: {gpu.name}, with {recipe.name}.", *of_card(gpu)])


def table(options: list[Option]) -> Table:
    """Of a plan: an option a row. A card's bytes are at most, the roles' those of the peak."""
    rows = []
    for option in options:
        report = option.prediction or predict.Prediction(0, dict.fromkeys(ROLES, 0), [], [], card_bytes=0)
        held = {name: report.parts[role] for name, role in SHOWN.items()}
        shown = {"card": report.card_bytes, **held, "rest": sum(report.parts.values()) - sum(held.values())}
        rows.append({
            "recipe": option.recipe.name, "texts": option.micro_batch or "–",
            **{name: size(count) if option.prediction else "–" for name, count in shown.items()},
            "operations": f"× {option.recipe.operations:.2f}",
            "lessons": " ".join(option.recipe.lessons), "why not": option.why,
        })  # fmt: skip
    return Table(rows)

"""`plan`: the recipes that fit, the least work first, and why the others do not.

The memory of each is predicted, for the largest micro-batch that fits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

from .. import machine, models, predict
from ..check import accept
from ..figures import Table, size
from ..measure import ROLES
from .recipes import Recipe, predicted, recipes


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
    package that the course does without. each: a `map`, for example of several processes.
    """
    accept(
        type(effective_batch) is int and 1 <= effective_batch <= 4096, "effective_batch", effective_batch, "1 to 4096"
    )
    longest = models.positions(models.config(model))
    accept(longest is None or length <= longest, "length", length, f"up to {longest}, the positions this model has")
    gpu, step = machine.gpu(card), dict(model=model, length=length, card=card)
    half = "bf16" if gpu.capability and gpu.capability >= (8, 0) else "fp16"
    options, alike = {}, {}  # alike: but for the optimizer
    for recipe in recipes(half, models.head_share(model)):
        reasons = {"trains adapters, not all parameters": whole and not recipe.whole,
                   "takes another step than the plain loop": exact and not recipe.exact,
                   f"needs {' and '.join(recipe.needs)}": no_new_dependency and recipe.needs}  # fmt: skip
        against = [reason for reason, holds in reasons.items() if holds]
        options[recipe.name] = Option(recipe, why="; ".join(against))
        if not against:
            others = {**recipe.choices, "optimizer": None, "adapters": recipe.adapters}
            alike.setdefault(str(sorted(others.items())), []).append(recipe)
    longest_first = sorted(alike.values(), key=_most_work, reverse=True)
    for found in each(_Largest(step, effective_batch, gpu), longest_first):
        options |= {option.recipe.name: option for option in found}
    return sorted(options.values(), key=lambda option: bool(option.why))


@dataclass(frozen=True)
class _Largest:
    """A function of a recipe that other processes can be given."""

    step: dict
    effective_batch: int
    gpu: machine.Gpu

    def __call__(self, recipes: list[Recipe]) -> list[Option]:
        """Of recipes that are alike but for the optimizer: the forward and the backward pass of all are one."""
        reports = cache(partial(self._with, recipes))
        found = []
        for place, recipe in enumerate(recipes):  # what fits beside AdamW's state fits beside a smaller one
            begin = found[0].micro_batch if found else 1
            found.append(self._option(recipe, begin or 1, lambda n, place=place: reports(n)[place]))
        return found

    def _option(self, recipe: Recipe, best: int, report_of: Callable[[int], predict.Prediction]) -> Option:
        """best: a micro-batch to begin with, which is likely to fit."""
        known = {1: report_of(1), best: report_of(best)}
        if not known[1].fits:
            return Option(recipe, 0, *self._why(known[1]))
        best = best if known[best].fits else 1
        sizes = [n for n in range(self.effective_batch, 0, -1) if self.effective_batch % n == 0]
        too_many = sizes[0] + 1
        while wanted := [n for n in sizes if best < n < too_many and self._at_least(known, n) <= self.gpu.usable]:
            n = next((n for n in wanted if self._guessed(known[best], best, n) <= self.gpu.usable), wanted[-1])
            report = report_of(n)
            if report.fits:
                best, known[n] = n, report
            else:
                too_many = n
        return Option(recipe, best, known[best])

    def _at_least(self, known: dict[int, predict.Prediction], n: int) -> float:
        """Bytes of the card: a phase's peak is the highest of many lines, and above the line through two before it."""
        below = sorted(size for size in known if size < n)[-2:]
        (first, one), (last, two) = ((size, known[size]) for size in (below[0], below[-1]))
        if first < last:
            lines = zip(_peaks(one), _peaks(two))
            peak = max(high + (high - low) / (last - first) * (n - last) for low, high in lines)
        else:
            peak = two.peak + two.parts["activations"] / last / 2 * (n - last)
        kept = two.parts["gradients"] if n == self.effective_batch else 0  # of the micro-batches before
        return peak - kept + predict.context(self.gpu)

    def _guessed(self, report: predict.Prediction, of: int, n: int) -> float:
        """Bytes of the card, if activations go with the texts and nothing else does."""
        activations = [held[ROLES.index("activations")] for held in report.timeline]
        peak = max(sum(held) + more / of * (n - of) for held, more in zip(report.timeline, activations))
        return peak + report.card_bytes - report.peak

    def _with(self, recipes, micro_batch):
        accumulate = 1 if micro_batch == self.effective_batch else 2  # from two on the memory is the same
        return predicted(recipes, batch=micro_batch, accumulate=accumulate, **self.step)

    def _why(self, one: predict.Prediction) -> tuple[predict.Prediction, str]:
        held = sorted(one.parts.items(), key=lambda part: -part[1])[:2]
        parts = " and ".join(f"{name} {size(count)}" for name, count in held)
        return one, f"one text needs {size(one.card_bytes)} of {size(self.gpu.usable)}, above all for {parts}"


def _most_work(alike: list[Recipe]) -> tuple:
    """To know them, as far as it can be told before: more techniques fit more texts, and are tried with more."""
    return len(alike), len(alike[0].choices), alike[0].operations


def _peaks(report: predict.Prediction) -> list[int]:
    """Of the forward pass, the backward pass and the optimizer's step, in bytes."""
    highest = dict.fromkeys(("forward", "backward", "optimizer"), 0)
    for phase, held in zip(report.phases, report.timeline):
        highest[phase] = max(highest.get(phase, 0), sum(held))
    return [*highest.values()]


def instead(options: list[Option], model: str, length: int, effective_batch: int, **_) -> str:
    """Where no recipe fits: the card of facts/gpus.toml with the least memory that would do, in a sentence."""
    known = sorted((option for option in options if option.prediction), key=lambda option: option.recipe.operations)
    if not known:
        return "No recipe keeps what was asked for: ask for less."
    step = dict(model=model, batch=1, length=length, accumulate=1 if effective_batch == 1 else 2)
    for gpu in sorted(machine.gpus().values(), key=lambda gpu: gpu.usable):
        for option in known:
            near = gpu.usable >= 0.9 * option.prediction.card_bytes  # a card with other kernels may need less
            if near and predicted([option.recipe], card=gpu.name, **step)[0].fits:
                return f"The smallest card that would do: {gpu.name}, with {option.recipe.name}."
    return f"No card of facts/gpus.toml would do: {known[-1].recipe.name}, {known[-1].why}."


def table(options: list[Option]) -> Table:
    """Of a plan: an option a row."""
    rows = []
    for option in options:
        report = option.prediction
        rows.append({
            "recipe": option.recipe.name, "texts at a time": option.micro_batch or "–",
            "card, at most": size(report.card_bytes) if report else "–",
            "operations": f"× {option.recipe.operations:.2f}",
            "lessons": " ".join(option.recipe.lessons), "why not": option.why,
        })  # fmt: skip
    return Table(rows)

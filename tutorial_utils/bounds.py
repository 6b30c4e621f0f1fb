"""Is the figure where it is expected to be on this machine?

facts/bounds.toml holds, for every figure of every lesson, why it is bounded and the lowest and
highest value for each backend class. A special case ("cuda-bf16") has those of its class ("cuda")
unless it has its own. A figure that has none for a class is not expected there, and one that
`needs` packages only where they are installed. A figure in bytes is bounded more tightly, by
`tolerance` around a recording of this very machine and these versions
(facts/bounds/<machine>.json, written by `make record` alone), or without one around the prediction.
"""

import importlib.util
import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from . import machine
from .figures import Table, size

FACTS = Path(__file__).parent / "facts"
_AGAIN = "write it again with `make record`"


@dataclass(frozen=True)
class Bound:
    """One figure with its bound. source: the backend class, "recorded" or "predicted"."""

    figure: str
    value: float
    low: float
    high: float
    source: str
    why: str

    @property
    def inside(self) -> bool:
        return self.low <= self.value <= self.high


class Verdict(Table):
    """The figures of a lesson with their bounds."""

    def __init__(self, lesson: str, bounds: list[Bound]):
        self.lesson, self.bounds, rows = lesson, bounds, []
        for bound in bounds:
            name = bound.figure.removesuffix("_bytes").replace("_", " ")
            form = size if bound.figure.endswith("_bytes") else "{:.3g}".format
            value, low, high = map(form, (bound.value, bound.low, bound.high))
            rows.append({"figure": name, "value": value, "bound": f"{low} to {high}", "by": bound.source})
        super().__init__(rows)

    def require(self):
        """Print "inside" for each figure. AssertionError, naming figures and bounds, if one is not."""
        outside = [
            f"{self.lesson}: {b.figure} is {b.value:,.4g}, outside {b.low:,.4g} to {b.high:,.4g} ({b.source}: {b.why})"
            for b in self.bounds
            if not b.inside
        ]
        if outside:
            raise AssertionError("; ".join(outside))
        for bound in self.bounds:
            print(f"{bound.figure}: inside")


def compare(lesson: str, figures: dict[str, float], predicted: dict[str, float] | None = None) -> Verdict:
    """Put each figure of a lesson beside its bound.

    figures: names ending in _bytes are absolute, in bytes; the others are ratios or shares.
    predicted: the prediction for this machine of each figure in bytes.
    ValueError where a figure has no bound, a bound no figure, or a recording lacks one.
    """
    here = machine.facts()
    _report(lesson, figures, None)
    expected = _expected(lesson, here)
    if set(expected) != set(figures):
        raise ValueError(
            f"{lesson} reports {sorted(figures)}; bounds.toml bounds {sorted(expected)}: "
            f"each figure needs its bound there"
        )
    sources = {"recorded": _recorded(lesson, here, figures), "predicted": predicted or {}}
    bounds = [_bound(name, value, expected[name], here.backend, sources) for name, value in figures.items()]
    _report(lesson, figures, all(bound.inside for bound in bounds))
    return Verdict(lesson, bounds)


def _bounds(lesson: str) -> dict:
    return tomllib.loads((FACTS / "bounds.toml").read_text()).get(lesson, {})


def _expected(lesson: str, here) -> dict:
    """The bounds that this machine can meet, with its `range`: of its class, and of packages that are installed."""
    expected = {}
    for name, bound in _bounds(lesson).items():
        limits = bound.get(here.backend) or bound.get(here.backend.partition("-")[0])
        installed = all(map(importlib.util.find_spec, bound.get("needs", "").split()))
        if installed and (limits or name.endswith("_bytes")):
            expected[name] = {**bound, "range": limits}
    return expected


def load(path: Path) -> dict:
    """A bounds file. ValueError where it is not one."""
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON ({error}): {_AGAIN}") from None
    for key in ("machine", "versions", "date", "lessons"):
        if key not in content:
            raise ValueError(f"{path.name} has no {key!r}; it has {sorted(content)}: {_AGAIN}")
    return content


def folder() -> Path:
    """Where recordings are read from and written to: COURSE_BOUNDS, or the package's own."""
    return Path(os.environ.get("COURSE_BOUNDS") or FACTS / "bounds")


def recordings() -> list[dict]:
    """Every committed recording, the CPU's first."""
    files = sorted((FACTS / "bounds").glob("*.json"), key=lambda path: (path.stem != "cpu", path.stem))
    return [load(path) for path in files]


def recorded_on_gpus(lesson: str) -> dict[str, dict[str, float]]:
    """The figures of a lesson by GPU name, from every committed recording on one."""
    return {
        content["machine"]["name"]: content["lessons"][lesson]["figures"]
        for content in recordings()
        if content["machine"]["device"] == "cuda" and lesson in content["lessons"]
    }


def _recorded(lesson: str, here, figures) -> dict[str, float]:
    path = folder() / f"{here.slug}.json"
    if os.environ.get("COURSE_RECORDING") or not path.exists():
        return {}
    content = load(path)
    same = all(content["versions"].get(name) == here.versions[name] for name in ("torch", "transformers"))
    if not same or lesson not in content["lessons"]:
        return {}
    values = content["lessons"][lesson]["figures"]
    for name in figures:
        if name not in values:
            raise ValueError(f"{path.name} has no figure {name!r} for {lesson}; it has {sorted(values)}: {_AGAIN}")
    return values


def _bound(name: str, value: float, expected: dict, backend: str, sources: dict[str, dict]) -> Bound:
    why = expected["why"]
    if not name.endswith("_bytes"):
        return Bound(name, value, *expected["range"], backend, why)
    for source, values in sources.items():
        if name in values:
            slack = expected[f"{source}_tolerance"] * values[name]
            return Bound(name, value, values[name] - slack, values[name] + slack, source, why)
    raise ValueError(f"{name} is in bytes and this machine has no recording of it: pass its prediction in `predicted`")


def _report(lesson: str, figures: dict, inside: bool | None):
    """For the course runner: the figures, to the file that it named."""
    if path := os.environ.get("COURSE_REPORT"):
        write(Path(path), {"lesson": lesson, "figures": figures, "inside": inside})


def write(path: Path, content: dict):
    """Write JSON whole or not at all."""
    text = json.dumps(content, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def claims(lesson: str, measured: dict[str, float], predicted: dict[str, float]) -> list[dict]:
    """A row for each claim of facts/claims.toml about a lesson: claimed, measured, recorded, verdict.

    measured, predicted: by the figure's name; predicted is for the claim's own model and sizes.
    The verdict is on the strongest evidence: a recording on a GPU, else the prediction, else what
    was measured here. It holds within a fifth of the claim, or `above` or `below` it where that is
    all it says. GPU is – for what lessons only predict. Without evidence the verdict is open, with
    what the claim `needs`; ValueError where it needs nothing.
    """
    every = tomllib.loads((FACTS / "claims.toml").read_text()).values()
    return [_claim(claim, measured, predicted) for claim in every if claim["lesson"] == lesson]


def _claim(claim: dict, measured: dict[str, float], predicted: dict[str, float]) -> dict:
    name, lesson = claim["figure"], claim["lesson"]
    recorded = {gpu: figures[name] for gpu, figures in recorded_on_gpus(lesson).items() if name in figures}
    here = {how: by[name] for how, by in (("measured", measured), ("predicted", predicted)) if name in by}
    evidence = [*recorded.values(), *reversed(here.values())]  # the strongest first
    gpus = ", ".join(f"{gpu} {value:.3g}" for gpu, value in recorded.items())
    return {
        "claim": f"{claim['claim']} ({claim['source']})",
        "claimed": f"{claim['claimed']:.3g}",
        "here": ", ".join(f"{value:.3g} {how}" for how, value in here.items()) or "–",
        "GPU": gpus or ("not yet" if name in _bounds(lesson) else "–"),
        "verdict": _verdict(claim, evidence),
    }


def _verdict(claim: dict, evidence: list[float]) -> str:
    if not evidence and "needs" not in claim:
        raise ValueError(f"claim on {claim['figure']!r}: neither measured, predicted nor recorded")
    if not evidence:
        return f"open: needs {claim['needs']}"
    strongest, claimed = evidence[0], claim["claimed"]
    if claim.get("above") or claim.get("below"):
        right_side = strongest > claimed if claim.get("above") else strongest < claimed
        return "holds" if right_side else "does not hold"
    if abs(strongest - claimed) <= 0.2 * claimed:
        return "holds"
    return "lower here" if strongest < claimed else "higher here"

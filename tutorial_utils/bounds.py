"""Is the figure where it is expected to be on this machine?

facts/lessons/<lesson>.toml holds, for every figure, why it is bounded and the lowest and highest value
for each backend class, or an empty list where too few such machines were recorded. A class that is left
out cannot have the figure. A special case ("cuda-bf16", "cpu-slow-bf16") has those of its class unless it
has its own, and so has a GPU where lessons train the tiny model ("cuda-tiny", also where it is virtual)
or BERT-base ("cuda-base"); but times of "cpu-other" are not judged by those of "cpu", unless its cores
are few and the time has no bound of its own for "cpu-slow-bf16", as one has in which bf16 counts. Figures of
`bytes` are judged within 2 % of what was recorded, on GPUs and at real size on virtual ones
(facts/bounds/real-size). A figure that has none for a class is not expected there, and one that
`needs` packages only where they are installed; one that is `virtual` only where a virtual GPU
computes these values. A figure in bytes is bounded more tightly, by
`tolerance` around a recording of this very machine and these versions (facts/bounds/<machine>.json,
written by `make record` alone), or without one around the prediction.
"""

import importlib.util
import json
import math
import numbers
import operator
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from . import check, machine, packages
from .figures import Table, size
from .times import Figure

FACTS = Path(__file__).parent / "facts"
BUSY = "not judged: this machine is busy"
UNRECORDED = "not judged: this class of machine has no bound yet"
VIRTUAL = "no times on a virtual GPU"
SMALLER = {"tiny": "cuda-tiny", "bert-base-uncased": "cuda-base"}  # classes of GPUs that train less than BERT-large
UNJUDGED = (BUSY, UNRECORDED, VIRTUAL)
EVIDENCE = ("recorded", "predicted", "measured")
# What a claim on a ratio says, and is judged by: what is saved; what comes on top of a cost (overhead) or of a speed
# (gain); or the figure itself.
JUDGED = {
    "saving": lambda ratio: 1 - ratio,
    "overhead": lambda ratio: ratio - 1,
    "gain": lambda ratio: ratio - 1,
    "value": lambda value: value,
}
# What bounds a figure in bytes, where its lesson says nothing else.
BYTES = {
    "why": "tensor memory of one step does not depend on the weights or the texts",
    "recorded_tolerance": 0.005,
    "predicted_tolerance": 0.02,
}


@dataclass(frozen=True)
class Bound:
    """One figure with its bound. source: the backend class whose range it is, "recorded" or "predicted"."""

    figure: str
    value: float
    low: float
    high: float
    source: str
    why: str

    @property
    def verdict(self) -> str:
        """ "inside", "outside", BUSY or UNRECORDED. Where figures are the point, an unsettled time is outside."""
        settled = getattr(self.value, "settled", True)
        if self.source == VIRTUAL:
            return VIRTUAL
        if not settled and os.environ.get("COURSE_STRICT"):  # a GPU runner of one's own, and a recording
            return "outside"
        if self.source == UNRECORDED:
            return UNRECORDED
        if not settled:
            return BUSY
        return "inside" if self.low <= self.value <= self.high else "outside"


def guess(given, right: float, within: float = 0.0) -> str:
    """What an exercise says of a reader's guess: nothing where it is right, within that share of the right number."""
    given = given.item() if getattr(given, "ndim", None) == 0 else given  # a tensor's or an array's only number
    if not isinstance(given, numbers.Real):
        return f"not yet: your guess is {given}, and should be a number"
    if abs(given - right) <= within * right:
        return ""
    said = f"{given:,}" if isinstance(given, int) else f"{given:,.6g}"
    return f"not yet: you guessed {said}, which is too {'high' if given > right else 'low'}"


def recording() -> bool:
    """Whether this run's figures are to be the recording: then the one that is there does not count."""
    return bool(os.environ.get("COURSE_RECORDING"))


class Verdict(Table):
    """The figures of a lesson with their bounds."""

    def __init__(self, lesson: str, bounds: list[Bound]):
        self.lesson, self.bounds, rows = lesson, bounds, []
        for bound in bounds:
            name = bound.figure.removesuffix("_bytes").replace("_", " ")
            form = size if bound.figure.endswith("_bytes") else "{:.3g}".format
            value, low, high = map(form, (bound.value, bound.low, bound.high))
            judged = bound.verdict in ("inside", "outside")
            limits = "–" if bound.source in (UNRECORDED, VIRTUAL) else f"{low} to {high}"
            source = "counted" if bound.source == "recorded" and "VIRTUAL_GPU" in os.environ else bound.source
            by = source if judged else bound.verdict
            rows.append({"figure": name, "value": value, "bound": limits, "by": by})
        super().__init__(rows)

    @property
    def outside(self) -> list[Bound]:
        """Those that were judged and are not inside."""
        return [bound for bound in self.bounds if bound.verdict == "outside"]

    def require(self):
        """Print a verdict for each figure. AssertionError, naming figures and bounds, if one is outside."""
        if self.outside:
            raise AssertionError("; ".join(f"{self.lesson}: {_why_outside(bound)}" for bound in self.outside))
        for bound in self.bounds:
            print(f"{bound.figure}: {bound.verdict}")


def _why_outside(bound: Bound) -> str:
    if not getattr(bound.value, "settled", True):
        return f"{bound.figure} did not settle (COURSE_STRICT is set): run it on a machine that does nothing else"
    limits = f"{bound.low:,.4g} to {bound.high:,.4g}"
    return f"{bound.figure} is {bound.value:,.4g}, outside {limits} ({bound.source}: {bound.why})"


def compare(lesson: str, figures: dict[str, float], predicted: dict[str, float] | None = None) -> Verdict:
    """Put each figure of a lesson beside its bound.

    figures: names ending in _bytes are absolute, in bytes; the others are ratios or shares. None for one that this
    machine cannot give.
    predicted: the prediction for this machine of each figure in bytes.
    ValueError where a figure has no bound, or a bound no figure. What a recording lacks is judged as without one.
    """
    here = machine.facts()
    if here.virtual == "small":  # which computes no numbers: what is made of bytes is right
        bounds = _bounds(lesson).items()  # what such a card counts is due: it is left out where it is absent
        known = [name for name, bound in bounds if name in figures or bound.get("virtual") != "small"]
        figures = {name: figures.get(name) if name in of_bytes(lesson) else None for name in known}
    check.figures("figures", figures)
    check.figures("predicted", {} if predicted is None else predicted)
    cannot = {name for name, value in figures.items() if value is None}
    figures = {name: value for name, value in figures.items() if name not in cannot}
    _report(lesson, figures)
    expected = {name: bound for name, bound in _expected(lesson, here).items() if name not in cannot}
    way = f"{', '.join(expected)}: each figure needs its bound, and each bound its figure"
    for name in [*figures, *expected]:
        check.accept(name in expected and name in figures, f"a figure of {lesson}", name, way)
    sources = {"recorded": _recorded(lesson, here), "predicted": predicted or {}}
    bounds = [_bound(name, value, expected[name], here, sources) for name, value in figures.items()]
    verdict = Verdict(lesson, bounds)
    _report(lesson, figures, verdict)
    return verdict


def lessons() -> list[str]:
    """Those that have facts, by name."""
    return sorted(path.stem for path in (FACTS / "lessons").glob("*.toml"))


def facts(lesson: str) -> dict:
    """What facts/lessons says of a lesson: its title and the like, its figures with their bounds, its claims."""
    check.one_of(lessons(), "lesson", lesson)
    text = (FACTS / "lessons" / f"{lesson}.toml").read_text(encoding="utf-8")
    return {"figures": {}, "claims": {}} | tomllib.loads(text)


def _bounds(lesson: str) -> dict:
    figures = facts(lesson)["figures"]
    return {name: (BYTES if name.endswith("_bytes") else {}) | bound for name, bound in figures.items()}


def of_bytes(lesson: str) -> set[str]:
    """The figures of a lesson that are made of bytes alone: no loss, no time and no choice has a part in them."""
    return {name for name, bound in _bounds(lesson).items() if name.endswith("_bytes") or bound.get("bytes")}


def _expected(lesson: str, here) -> dict:
    """The bounds that this machine can meet, with the `range`, and the class it is `of`: of packages that are there."""
    smaller = here.device == "cuda" and SMALLER.get(machine.preset(here).model)
    classes = [smaller, here.backend, here.backend.partition("-")[0]]
    expected = {}
    for name, bound in _bounds(lesson).items():
        kind, limits = next(((kind, bound[kind]) for kind in classes if kind in bound), (None, None))
        here_too = all(map(importlib.util.find_spec, bound.get("needs", "").split()))
        here_too = here_too and bound.get("virtual", here.virtual) == here.virtual
        if here_too and (limits is not None or name.endswith("_bytes")):
            expected[name] = {**bound, "range": limits, "of": kind}
    return expected


def load(path: Path) -> dict:
    """A bounds file. ValueError where it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        parts = operator.itemgetter("versions", "date", "seconds", "figures")
        _ = content["machine"], *map(parts, content["lessons"].values())  # what lacks one is none
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        why = f"({type(error).__name__}: {error})"
        raise ValueError(f"{path.name} is no recording {why}: write it again with `make record`") from None
    return content


def folder() -> Path:
    """Where recordings are read from and written to: COURSE_BOUNDS, or the package's own."""
    return Path(os.environ.get("COURSE_BOUNDS") or FACTS / "bounds")


def recordings(kind: str = "") -> list[dict]:
    """Every committed recording, the CPU's first; with "real-size", those of virtual GPUs that computed no numbers."""
    files = sorted((FACTS / "bounds" / kind).glob("*.json"), key=lambda path: (path.stem != "cpu", path.stem))
    return [load(path) for path in files]


def recorded_on_gpus(lesson: str) -> dict[str, dict[str, float]]:
    """The figures of a lesson by GPU name, from every committed recording on a real one."""
    return {
        card["name"]: lessons[lesson]["figures"]
        for card, lessons in ((content["machine"], content["lessons"]) for content in recordings())
        if card["device"] == "cuda" and not card.get("virtual") and lesson in lessons
    }


def elsewhere(lesson: str) -> Table:
    """What a lesson's step took of BERT-large, before and after: recorded on GPUs, counted on virtual ones."""
    rows = []
    for content in [*recordings(), *recordings("real-size")]:
        card, run = content["machine"], content["lessons"].get(lesson)
        if run and card["device"] == "cuda" and card["memory_bytes"] > machine.LARGE and card.get("virtual") != "all":
            figures = run["figures"]
            how = "counted" if card.get("virtual") else f"recorded {run['date']}"
            row = {"GPU": f"{card['name'].replace('NVIDIA ', '')}, {how}"}
            for name in ("baseline", "technique"):
                row[name] = size(figures[f"{name}_peak_bytes"]) if f"{name}_peak_bytes" in figures else "–"
            for name in ("memory", "time"):
                row[name] = f"× {figures[f'{name}_ratio']:.2f}" if f"{name}_ratio" in figures else "–"
            rows.append(row)
    known = {name for row in rows for name in row if row[name] != "–"}
    return Table([{name: row[name] for name in row if name in known} for row in rows])


def _recorded(lesson: str, here) -> dict[str, float]:
    path = folder() / f"{here.slug}.json"
    if recording() or not path.exists():
        return {}
    recorded = load(path)["lessons"].get(lesson)
    if not recorded or any(recorded["versions"].get(name) != here.versions[name] for name in ("torch", "transformers")):
        return {}
    return recorded["figures"]


def _bound(name: str, value: float, expected: dict, here, sources: dict[str, dict]) -> Bound:
    why, backend = expected["why"], here.backend
    if here.virtual and isinstance(value, Figure):
        return Bound(name, value, 0.0, math.inf, VIRTUAL, why)
    if not name.endswith("_bytes"):
        unlike = here.cores > machine.FEW_CORES or "cpu-slow-bf16" in expected  # those that recorded, in this figure
        other_times = backend == "cpu-other" and unlike and backend not in expected and isinstance(value, Figure)
        if other_times or not expected["range"]:
            return Bound(name, value, 0.0, math.inf, UNRECORDED, why)
        return Bound(name, value, *expected["range"], expected["of"], why)
    for source, values in sources.items():
        if name in values:
            slack = expected[f"{source}_tolerance"] * values[name]
            bound = Bound(name, value, values[name] - slack, values[name] + slack, source, why)
            if bound.verdict == "inside" and recording():  # then this very run becomes the recording
                slack = expected["recorded_tolerance"] * value
                return Bound(name, value, value - slack, value + slack, "recorded", why)
            return bound
    raise ValueError(f"{name} is in bytes and this machine has no recording of it: pass its prediction in `predicted`")


def _report(lesson: str, figures: dict, verdict: Verdict | None = None):
    """For the course runner: the figures, to the file that it named; before and after they were judged."""
    if path := os.environ.get("COURSE_REPORT"):
        bounds = verdict.bounds if verdict else []
        not_judged = {bound.figure: bound.verdict for bound in bounds if bound.verdict in UNJUDGED}
        judged = {"inside": verdict and not verdict.outside, "not_judged": not_judged, "left_out": packages.left_out}
        times = [name for name, value in figures.items() if isinstance(value, Figure)]
        write(Path(path), {"lesson": lesson, "figures": figures, "times": times, **judged})


def write(path: Path, content: dict):
    """Write JSON whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str):
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def claims(lesson: str, measured: dict[str, float], predicted: dict[str, float]) -> list[dict]:
    """A row for each claim of a lesson's facts: claimed, measured, recorded, verdict.

    figure: its name in the lesson and in recordings; claimed: as published, a ratio to the source's own baseline
    unless the claim says so; of: what it claims, of JUDGED, and tolerance, in the same unit; above: it says no more
    than that it is more; by: the evidence that fits its set-up, of EVIDENCE, all of it by default.

    measured, predicted: by the figure's name; predicted is for the claim's own model and sizes. What is predicted alone
    is no recording, on whatever machine it was predicted.
    The verdict is on the strongest evidence that fits: a recording on a GPU, else the prediction, else what was
    measured here. GPU is – for what lessons only predict. Without evidence the verdict is open, with what the claim
    `needs`; ValueError where it needs nothing.
    """
    every = facts(lesson)["claims"].values()
    check.figures("measured", measured)
    check.figures("predicted", predicted)
    return [_claim(lesson, claim, measured, predicted) for claim in every]


def _claim(lesson: str, claim: dict, measured: dict[str, float], predicted: dict[str, float]) -> dict:
    name = claim["figure"]
    calculated = name in predicted and name not in measured
    found = {} if calculated else recorded_on_gpus(lesson)
    recorded = {gpu: figures[name] for gpu, figures in found.items() if name in figures}
    here = {how: by[name] for how, by in (("measured", measured), ("predicted", predicted)) if name in by}
    evidence = [("recorded", value) for value in recorded.values()] + list(reversed(here.items()))  # strongest first
    return {
        "claim": f"{claim['claim']} ({claim['source']})",
        "claimed": _number(claim["claimed"]),
        "here": ", ".join(f"{_number(value)} {how}" for how, value in here.items()) or "–",
        "GPU": ", ".join(f"{gpu} {_number(value)}" for gpu, value in recorded.items())
        or ("not yet" if name in _bounds(lesson) and not calculated else "–"),
        "verdict": _verdict(claim, evidence),
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _verdict(claim: dict, evidence: list[tuple[str, float]]) -> str:
    fitting = [(how, value) for how, value in evidence if how in claim.get("by", EVIDENCE)]
    check.accept(fitting or "needs" in claim, "claim on", claim["figure"], "what is measured, predicted or recorded")
    if not fitting:
        return f"open: needs {claim['needs']}"
    (how, strongest), of = fitting[0], claim["of"]
    more = JUDGED[of](strongest) - JUDGED[of](claim["claimed"])
    if claim.get("above"):  # more than that by the tolerance, or it says nothing
        return f"{'holds' if more >= claim['tolerance'] else 'does not hold'} ({how})"
    apart = "more" if more > 0 else "less"
    return f"{'holds' if abs(more) <= claim['tolerance'] else f'{apart} {of}'} ({how})"

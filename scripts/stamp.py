"""Stamp what is generated into the lessons and README: badges, cards, the setup cell, the tables.

The course's public address is one setting, `repository` under [tool.course] in pyproject.toml, empty
where there is none. Run it after changing that, a lesson's facts, a recording or the comparison of predictors:
python scripts/stamp.py [--check]   (--check writes nothing and fails where something is stale)
"""

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import record_predictions  # noqa: E402

from tutorial_utils import bounds  # noqa: E402
from tutorial_utils.figures import size  # noqa: E402

SETUP = Path(__file__).with_name("setup_cell.py")
COMPARED = ROOT / "tutorial_utils" / "facts" / "predictions" / "compared.json"
DECISIONS, PUBLISHED = COMPARED.with_name("decisions.json"), COMPARED.with_name("published.json")
RECIPE = COMPARED.with_name("recipe.json")
PREDICTORS = {
    "step_memory": "`predict.step_memory`",
    "MemTracker": "PyTorch's `MemTracker`",
    "VRAMGuard": "torch-preflight's `VRAMGuard`",
    "predict_memory": "torch-kitsune's `predict_memory`",
    "estimate-memory": "accelerate's `estimate-memory`",
    "LLMem": "LLMem",
}


def repository() -> str:
    """For example https://github.com/owner/name, or an empty string."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["course"]["repository"].rstrip(
        "/"
    )


def title(course: dict, name: str, address: str) -> str:
    lines = [f"# {name[:2]} · {course['title']}", "", f"**{course['promise']}**"]
    if address:
        file = f"blob/main/notebooks/{name}.ipynb"
        colab = address.replace("https://github.com", "https://colab.research.google.com/github")
        lines += [
            "",
            f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab}/{file}) "
            f"[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]"
            f"(https://kaggle.com/kernels/welcome?src={address}/{file})",
        ]
    return "\n".join(lines)


def recorded(name: str) -> list[tuple[dict, dict]]:
    """(machine, run) of each machine's recording of a lesson; of virtual GPUs those at real size."""
    real = [recording for recording in bounds.recordings() if not recording["machine"].get("virtual")]
    shown = [*real, *bounds.recordings("real-size")]
    runs = [(r["machine"], r["lessons"][name]) for r in shown if name in r["lessons"]]
    return [(run.get("machine", there), run) for there, run in runs]


def linked(text: str, address: str) -> str:
    """A lesson's prose, with a link at each number of another lesson: "lesson 03", "lessons 02, 04 and 11"."""
    files = {path.name[:2]: path.name for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}
    place = f"{address}/blob/main/notebooks/" if address else ""

    def link(found):
        return f"[{found[0]}]({place}{files[found[1]]})" if found[1] in files else found[0]

    plain = re.sub(r"\[((?:[Ll]esson )?(\d\d))\]\([^)]*\2_\w+\.ipynb\)", r"\1", text)
    many = re.sub(r"\b[Ll]essons \d\d(?:(?:, | and | or | to )\d\d)+", lambda m: re.sub(r"(\d\d)", link, m[0]), plain)
    return re.sub(r"\b[Ll]esson (\d\d)\b", link, many)


def card(course: dict, name: str) -> str:
    """What you will learn, need to know, and what it takes on each recorded machine and on a virtual T4."""
    both = "technique_peak_bytes" in course["figures"]
    peak = "peak memory of a step: plain → with the technique" if both else "peak memory of the plain step"
    lines = [
        "**You will learn**",
        "",
        *(f"- {item}" for item in course["learn"]),
        "",
        f"**You need to know** {', '.join(course['know'])}.",
        "",
        f"| machine | minutes | download | {peak} |",
        "|---|---|---|---|",
    ]
    rows, note = [], []
    for there, run in recorded(name):
        if there["device"] != course.get("device", there["device"]):  # where its processes do not run
            continue
        cores, minutes = f"{there['cores']} cores, ", f"{run['seconds'] / 60:.1f}"
        if there.get("virtual"):
            if there["name"] != "virtual Tesla T4":  # the card that readers have: one is enough here
                continue
            cores, minutes = "", "–"  # they are those of the CPU that computes for it
            note = ["", "virtual: counted by PyTorch's allocator on a GPU that is not there"]
        what = f"{there['name']}, {cores}torch {run['versions']['torch']} ({run['date']})"
        steps = (run["figures"].get(f"{step}_peak_bytes") for step in ("baseline", "technique"))
        peaks = " → ".join(size(peak) for peak in steps if peak)
        rows.append(f"| {what} | {minutes} | 0 MB | {peaks} |")
    return "\n".join(lines + (rows or ["| none recorded yet | – | 0 MB | – |"]) + note)


def setup(address: str) -> str:
    return SETUP.read_text(encoding="utf-8").strip("\n").replace('REPOSITORY = ""', f'REPOSITORY = "{address}"')


def lessons_table(names: list[str]) -> str:
    """A row a lesson: what it saves of BERT-large on a T4, its time on the first real GPU, and what it changes."""
    columns = ["lesson", "what it does", "memory", "time", "what it changes", "where it does not help"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name in names:
        course = bounds.facts(name)
        cells = [f"[{name[:2]} {course['title']}](notebooks/{name}.ipynb)", course["promise"]]
        of = f", of {course['model']}" if "model" in course else ""
        counted = not course.get("small")  # else memory_ratio and time_ratio are of a small model, on any machine
        cells += [memory_of(recorded(name), counted) + of, time_of(recorded(name)) if counted else "–"]
        cells += [course["changes"], course["no_help"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cheat_sheet(names: list[str]) -> str:
    """The copied cell of each lesson, what it is for, and what it saves."""
    parts = []
    for name in names:
        course = bounds.facts(name)
        counted, of = not course.get("small"), f", of {course['model']}" if "model" in course else ""
        memory, time = memory_of(recorded(name), counted), time_of(recorded(name)) if counted else "–"
        cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        copied = ["".join(cell["source"]) for cell in cells if cell["id"] in ("copy", *course.get("copy_too", ()))]
        saves = " It saves no memory by itself." if memory == "–" else f" Memory {memory}{of}."
        saves += "" if time == "–" else f" Time {time}."
        parts.append(
            f"## [{name[:2]} {course['title']}]({name}.ipynb)\n\n{course['promise']}{saves}\n\n"
            f"- When: {course['when']}.\n- When not: {course['no_help']}.\n- What it changes: {course['changes']}.\n\n"
            "```python\n" + "\n\n\n".join(copied) + "\n```"
        )
    return "\n\n".join(parts)


def memory_of(runs: list[tuple[dict, dict]], counted: bool = True) -> str:
    """Counted on a virtual T4; else predicted for BERT-large."""
    for there, run in runs:
        if counted and there["name"] == "virtual Tesla T4" and "memory_ratio" in run["figures"]:
            return f"× {run['figures']['memory_ratio']:.2f}"
    predicted = [run["figures"]["bert_large_memory_ratio"] for _, run in runs
                 if "bert_large_memory_ratio" in run["figures"]]  # fmt: skip
    return f"× {predicted[0]:.2f}, predicted" if predicted else "–"


def time_of(runs: list[tuple[dict, dict]]) -> str:
    """On a real GPU where one recorded it, else on a CPU."""
    timed = [(there, run["figures"]["time_ratio"]) for there, run in runs if "time_ratio" in run["figures"]]
    timed.sort(key=lambda both: both[0]["device"] == "cpu")
    return f"× {timed[0][1]:.2f}, {timed[0][0]['name'].removeprefix('NVIDIA ').split()[0]}" if timed else "–"


def decisions_table(content: dict) -> str:
    """What scripts/decide.py found: the largest micro-batch of each set of techniques."""
    parts = []
    for cases in content["answers"].values():
        parts += ["| techniques | " + " | ".join(cases) + " |", "|---|" + "---|" * len(cases)]
        for technique in next(iter(cases.values())):
            cells = []
            for answers in cases.values():
                found = answers[technique]
                batch = found["micro_batch"]
                cells.append(f"{batch} ({size(found['card_bytes'])})" if batch else f"– ({size(found['card_bytes'])})")
            parts.append("| " + " | ".join([technique, *cells]) + " |")
        parts.append("")
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return "\n".join([*parts, f"Predicted on {content['date']}, with {versions}: `python scripts/decide.py`."])


def predictors_table(content: dict) -> str:
    """What scripts/compare_predictors.py found."""
    lines = [
        "| predictor | answered | median error | worst error | published error | seconds for BERT-large | cannot say |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, shown in PREDICTORS.items():
        found = content["summary"][name]
        published = found.get("published", "–")
        if "not_run" in found:
            cells = [shown, f"not run: {found['not_run']}", "–", "–", published, "–", "–"]
        else:
            cells = [shown, f"{found['answered']} of {found['cases']}", *errors(found), published]
            seconds = found["seconds_bert_large"]
            cells += ["–" if seconds is None else f"{seconds:.1f}", "; ".join(found["cannot_say"])]
        lines.append("| " + " | ".join(cells) + " |")
    formula, margin = (
        "median {}, worst {}".format(*errors(content["summary"][name]))
        for name in ("estimate_config", "predict_memory with its margin")
    )
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines += [
        "",
        f"torch-preflight's formula, `estimate_config`: {formula}. `predict_memory` with its margin of 15 %: {margin}.",
        "",
        f"Compared on a CPU on {content['date']}, with {versions}. "
        f"[How each was asked, and each case]({COMPARED.relative_to(ROOT).as_posix()}).",
    ]
    return "\n".join(lines)


def predictions_table(recordings: list[dict]) -> str:
    """What scripts/record_predictions.py measured, a row for each GPU."""
    lines = [
        "| GPU | steps | tensors: median error, worst | reserved: median, worst | above the card's bound | "
        "the bound's margin | versions | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for content in recordings:
        found = content["summary"]
        versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        cells = [content["machine"]["name"], f"{found['measured']} of {found['cells']}"]
        for name in ("tensors", "reserved"):
            both = (found[kind].get(name) for kind in ("median_error", "worst_error"))
            cells.append(", ".join(percent(value) for value in both))
        cells += [str(found["above_the_card_bound"]), percent(found["median_margin"]), versions, content["date"]]
        lines.append("| " + " | ".join(cells) + " |")
    if all("virtual" in content["machine"]["name"] for content in recordings):
        lines.append("| any real one | open until measured: `make record-predictions` | – | – | – | – | – | – |")
    return "\n".join(lines)


def published_table(recordings: list[dict]) -> str:
    """What was published of a V100 in 2022, beside what today's versions reserve for the same steps, in MiB."""
    counted = {}
    for content in recordings:
        rows = {json.dumps(choices(row), sort_keys=True): row for row in content["cells"]}
        rows = [rows.get(json.dumps(cell, sort_keys=True), {}) for cell, _ in record_predictions.OF_THE_GUIDE]
        if any(map(record_predictions.is_measured, rows)):
            counted[content["machine"]["name"]] = rows
    lines = ["| BERT-large, 4 × 512 | published | " + " | ".join(f"{name} | predicted" for name in counted) + " |",
             "|---" * (2 + 2 * len(counted)) + "|"]  # fmt: skip
    for number, (cell, published) in enumerate(record_predictions.OF_THE_GUIDE):
        kept = [f"{name} {value}" for name, value in cell.items() if name not in ("model", "length", "attention")]
        cells = [", ".join(kept), f"{published:,}"]
        for rows in counted.values():
            both = (rows[number].get(kind, {}).get("reserved") for kind in ("measured", "predicted"))
            cells += [f"{value / 2**20:,.0f}" if value else "–" for value in both]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sdpa_table(published: dict) -> str:
    """Of each step the published figure, the counted one with its difference, and the predicted one, in MB."""
    lines = ["| BERT-base in fp16 | attention | published | counted | | predicted |", "|---" * 6 + "|"]
    for row in rows_of(published, "SDPA in BERT"):
        cells = [f"{row['batch']} × {row['length']}", row["attention"], f"{row['published']:,.0f}",
                 f"{row['measured']:,.0f}", f"{row['measured'] / row['published'] - 1:+.1%}",
                 f"{row['predicted']:,.0f}"]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mrpc_table(published: dict) -> str:
    """What more texts took, beyond the first row of each precision: the context is in both, and drops out. In MiB."""
    lines = ["| BERT-base, length 128 | precision | published | counted | predicted |", "|---" * 5 + "|"]
    rows = rows_of(published, "MRPC")
    for row in rows:
        first = next(other for other in rows if other["precision"] == row["precision"])
        if row is not first:
            more = [f"{row[kind] - first[kind]:,.0f}" for kind in ("published", "measured", "predicted")]
            batches = f"batch {row['batch']} instead of {first['batch']}"
            lines.append("| " + " | ".join([batches, row["precision"], *more]) + " |")
    return "\n".join(lines)


def rows_of(published: dict, table: str) -> list[dict]:
    return [row for row in published["rows"] if row["table"] == table]


def savings_table(found: dict) -> str:
    """What scripts/recipe.py counted without each technique."""
    files = {name[:2]: name for name in bounds.lessons()}
    lines = ["| the recipe | tensors | card |", "|---|---|---|", f"| with all of them | {counted(found['all'])} |"]
    for name, one in found["without"].items():
        link = f"[{one['lesson']}]({files[one['lesson']]}.ipynb)"
        lines.append(f"| without {name} ({link}) | {counted(one['counted'])} |")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join(
        [*lines, "", f"Counted on a {found['machine']} on {found['date']}, with {versions}: `make recipe`."]
    )


def counted(bytes_of: dict | str) -> str:
    return "– | does not fit" if isinstance(bytes_of, str) else " | ".join(map(size, bytes_of.values()))


def tokens_table(found: dict) -> str:
    names = {"fixed": "all texts padded to 512", "07": "each batch to its longest text (lesson 07)",
             "08": "and texts of like lengths in a batch (lesson 08)"}  # fmt: skip
    lines = ["| padding | tokens | of which are text |", "|---|---|---|"]
    for key, name in names.items():
        count = found["tokens"][key]
        lines.append(f"| {linked(name, '')} | {count:,} | {found['tokens']['texts'] / count:.0%} |")
    return "\n".join(lines)


def choices(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in ("predicted", "measured", "left_out")}


def errors(found: dict) -> list[str]:
    return [percent(found[name]) for name in ("median_error", "worst_error")]


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.{1 if share >= 0.001 else 3}f} %"


def between(text: str, name: str, content: str) -> str:
    """The text with this content between its markers of that name."""
    before, rest = text.split(f"<!-- {name} -->")
    _, after = rest.split(f"<!-- /{name} -->")
    return f"{before}<!-- {name} -->\n{content}\n<!-- /{name} -->{after}"


def stamped(address: str) -> dict[Path, str]:
    """The text that each generated file should have."""
    texts = {}
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        content = json.loads(path.read_text(encoding="utf-8"))
        course = bounds.facts(path.stem)
        for cell in content["cells"]:
            tags = cell["metadata"].get("tags", [])
            for tag, text in (
                ("title", title(course, path.stem, address)),
                ("card", card(course, path.stem)),
                ("setup", setup(address)),
            ):
                if tag in tags and (cell["cell_type"] == "code") == (tag == "setup"):
                    cell["source"] = text.splitlines(keepends=True)
            if cell["cell_type"] == "markdown":
                cell["source"] = linked("".join(cell["source"]), address).splitlines(keepends=True)
        texts[path] = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    recording = ROOT / "notebooks" / "record_on_your_gpu.ipynb"
    texts[recording] = re.sub(
        r'REPOSITORY = \\".*?\\"', lambda _: f'REPOSITORY = \\"{address}\\"', recording.read_text(encoding="utf-8")
    )
    readme = ROOT / "README.md"
    texts[readme] = between(readme.read_text(encoding="utf-8"), "lessons", lessons_table(bounds.lessons()))
    for path, name, table in ((COMPARED, "predictors", predictors_table), (DECISIONS, "decisions", decisions_table)):
        if path.exists():  # else what was found elsewhere stays
            texts[readme] = between(texts[readme], name, table(json.loads(path.read_text(encoding="utf-8"))))
    own = {COMPARED.name, DECISIONS.name, PUBLISHED.name, RECIPE.name}
    recordings = [
        json.loads(p.read_text(encoding="utf-8")) for p in sorted(COMPARED.parent.glob("*.json")) if p.name not in own
    ]
    texts[readme] = between(texts[readme], "predictions", predictions_table(recordings))
    page = ROOT / "notebooks" / "recipe.md"
    found = json.loads(RECIPE.read_text(encoding="utf-8"))
    script = f"```python\n{page.with_suffix('.py').read_text(encoding='utf-8')}```"
    texts[page] = page.read_text(encoding="utf-8")
    for name, content in (("savings", savings_table(found)), ("tokens", tokens_table(found)), ("script", script)):
        texts[page] = between(texts[page], name, content)
    sheet = ROOT / "notebooks" / "cheat_sheet.md"
    texts[sheet] = between(sheet.read_text(encoding="utf-8"), "cells", cheat_sheet(bounds.lessons()))
    beside = ROOT / "virtual_gpu" / "README.md"
    texts[beside] = between(beside.read_text(encoding="utf-8"), "guide", published_table(recordings))
    for name, table in (("sdpa", sdpa_table), ("mrpc", mrpc_table)):
        texts[beside] = between(texts[beside], name, table(json.loads(PUBLISHED.read_text(encoding="utf-8"))))
    return texts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    stale = [(path, text) for path, text in stamped(repository()).items() if path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        print(f"{'stale' if check else 'stamped'}: {path.relative_to(ROOT)}")
        if not check:
            bounds.write_text(path, text)
    return bool(stale and check)


if __name__ == "__main__":
    sys.exit(main())

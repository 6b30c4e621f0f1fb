"""Stamp what is generated into the lessons and README: badges, cards, the setup cell, the table.

The course's public address is one setting, `repository` under [tool.course] in pyproject.toml, empty
where there is none. Run it after changing that, a lesson's metadata or a recording:
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
from tutorial_utils import bounds  # noqa: E402
from tutorial_utils.figures import size  # noqa: E402

SETUP = Path(__file__).with_name("setup_cell.py")


def repository() -> str:
    """For example https://github.com/owner/name, or an empty string."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["course"]["repository"].rstrip("/")


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


def card(course: dict, name: str) -> str:
    """What you will learn, need to know, and what it takes on each recorded machine."""
    lines = [
        "**You will learn**",
        "",
        *(f"- {item}" for item in course["learn"]),
        "",
        f"**You need to know** {', '.join(course['know'])}.",
        "",
        "| machine | minutes | download | peak memory of the lesson's step |",
        "|---|---|---|---|",
    ]
    rows = [
        f"| {content['machine']['name']}, {content['machine']['cores']} cores, torch "
        f"{content['versions']['torch']} ({content['date']}) | {content['lessons'][name]['seconds'] / 60:.1f} "
        f"| 0 MB | {size(content['lessons'][name]['figures']['baseline_peak_bytes'])} |"
        for content in bounds.recordings()
        if name in content["lessons"]
    ]
    return "\n".join(lines + (rows or ["| none recorded yet | – | 0 MB | – |"]))


def setup(address: str) -> str:
    return SETUP.read_text().strip("\n").replace('REPOSITORY = ""', f'REPOSITORY = "{address}"')


def readme_table(notebooks: dict[str, dict]) -> str:
    lines = ["| lesson | what it does | memory | time | recorded on |", "|---|---|---|---|---|"]
    for name, content in notebooks.items():
        course = content["metadata"]["course"]
        link = f"[{name[:2]} {course['title']}](notebooks/{name}.ipynb)"
        found = [r for r in bounds.recordings() if name in r["lessons"]]
        for position, recording in enumerate(found or [None]):
            figures = recording["lessons"][name]["figures"] if recording else {}
            ratios = [f"× {figures[k]:.2f}" if k in figures else "–" for k in ("memory_ratio", "time_ratio")]
            where = f"{recording['machine']['name']}, {recording['date']}" if recording else "not yet"
            first = [link, course["promise"]] if position == 0 else ["", ""]
            lines.append("| " + " | ".join([*first, *ratios, where]) + " |")
    return "\n".join(lines)


def stamped(address: str) -> dict[Path, str]:
    """The text that each generated file should have."""
    texts, notebooks = {}, {}
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        content = json.loads(path.read_text())
        course = content["metadata"]["course"]
        for cell in content["cells"]:
            tags = cell["metadata"].get("tags", [])
            for tag, text in (
                ("title", title(course, path.stem, address)),
                ("card", card(course, path.stem)),
                ("setup", setup(address)),
            ):
                if tag in tags and (cell["cell_type"] == "code") == (tag == "setup"):
                    cell["source"] = text.splitlines(keepends=True)
        notebooks[path.stem] = content
        texts[path] = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    recording = ROOT / "notebooks" / "record_on_your_gpu.ipynb"
    texts[recording] = re.sub(
        r'REPOSITORY = \\".*?\\"', lambda _: f'REPOSITORY = \\"{address}\\"', recording.read_text()
    )
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split("<!-- lessons -->")
    _, after = rest.split("<!-- /lessons -->")
    texts[readme] = f"{before}<!-- lessons -->\n{readme_table(notebooks)}\n<!-- /lessons -->{after}"
    return texts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    stale = [(path, text) for path, text in stamped(repository()).items() if path.read_text() != text]
    for path, text in stale:
        print(f"{'stale' if check else 'stamped'}: {path.relative_to(ROOT)}")
        if not check:
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(text)
            unfinished.replace(path)
    return bool(stale and check)


if __name__ == "__main__":
    sys.exit(main())

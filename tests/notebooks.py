"""The lessons as the tests read them."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


class Lesson:
    def __init__(self, path: Path):
        self.path, self.name = path, path.stem
        self.content = json.loads(path.read_text())
        self.course = self.content["metadata"]["course"]
        self.cells = self.content["cells"]
        self.code = [cell for cell in self.cells if cell["cell_type"] == "code"]

    def tagged(self, tag: str) -> list[dict]:
        return [cell for cell in self.code if tag in tags(cell)]

    def source(self, tag: str) -> str:
        """The source of the code cells with a tag, one after the other."""
        return "\n".join(source(cell) for cell in self.tagged(tag))

    def headings(self) -> list[str]:
        lines = (line for cell in self.cells if cell["cell_type"] == "markdown" for line in source(cell).splitlines())
        return [line.removeprefix("## ").strip() for line in lines if line.startswith("## ")]


def source(cell) -> str:
    return "".join(cell["source"])


def tags(cell) -> list[str]:
    return cell["metadata"].get("tags", [])


def printed(cell) -> str:
    """What a cell printed or showed as text."""
    texts = []
    for output in cell["outputs"]:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        texts.append("".join(text))
    return "\n".join(texts)


def lessons() -> list[Lesson]:
    return [Lesson(path) for path in LESSONS]

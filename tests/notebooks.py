"""The lessons as the tests read and run them."""

import ast
import contextlib
import io
import itertools
import json
import linecache
import re
import symtable
from pathlib import Path

from tutorial_utils import bounds

ROOT = Path(__file__).resolve().parents[1]
_numbers = itertools.count()
LESSONS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def code_lines(source: str, with_docstrings: bool = False) -> int:
    """Lines that hold code: no blanks, no comments, and of the package's no docstrings."""
    tree, docstrings = ast.parse(source), set()
    for node in () if with_docstrings else ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
        if documented:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and number not in docstrings for number, line in lines)


class Lesson:
    def __init__(self, path: Path):
        self.path, self.name = path, path.stem
        self.content = json.loads(path.read_text())
        self.course = bounds.facts(path.stem)
        self.cells = self.content["cells"]
        self.code = [cell for cell in self.cells if cell["cell_type"] == "code"]
        # The evidence, folded, is the second of two parts.
        start = next((place for place, cell in enumerate(self.cells) if cell["id"] == "evidence"), None)
        self.part_one = self.cells[:start]

    def tagged(self, tag: str) -> list[dict]:
        """The code cells with a tag, or the one of that name."""
        return [cell for cell in self.code if tag == cell["id"] or tag in tags(cell)]

    def source(self, tag: str) -> str:
        """The source of the code cells with a tag, one after the other."""
        return "\n".join(source(cell) for cell in self.tagged(tag))

    def fenced(self, part: str) -> str:
        """The one block of Python in the prose that holds this."""
        texts = [source(cell) for cell in self.cells if cell["cell_type"] == "markdown"]
        (found,) = [
            block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.S) if part in block
        ]
        return found

    def headings(self) -> list[str]:
        lines = (line for cell in self.cells if cell["cell_type"] == "markdown" for line in source(cell).splitlines())
        return [line.removeprefix("## ").strip() for line in lines if line.startswith("## ")]

    def under(self, heading: str) -> list[dict]:
        """The cells from one heading to the next."""
        starts = {place: line for place, cell in enumerate(self.cells) if cell["cell_type"] == "markdown"
                  for line in source(cell).splitlines() if line.startswith("## ")}  # fmt: skip
        first = next((place for place, line in starts.items() if line == f"## {heading}"), len(self.cells))
        return self.cells[first : min((place for place in starts if place > first), default=None)]

    def needed_for(self, tag: str) -> list[dict]:
        """The cell with a tag, and before it those that define what it uses, and what they use."""
        *before, last = self.code[: self.code.index(self.tagged(tag)[0]) + 1]
        needed, (_, uses) = [last], names(source(last))
        for cell in reversed(before):
            defines, used = names(source(cell))
            if defines & uses or "setup" in tags(cell):
                needed.insert(0, cell)
                uses = (uses - defines) | used
        return needed


class Generators(ast.NodeTransformer):
    """Every comprehension as a generator: from Python 3.12 on the others' variables are the cell's."""

    def visit_ListComp(self, node):
        self.generic_visit(node)
        return ast.GeneratorExp(node.elt, node.generators)

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node):
        self.generic_visit(node)
        return ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)


def names(code: str) -> tuple[set[str], set[str]]:
    """(the global names that a cell defines, those that it takes from the cells before it)"""
    module = symtable.symtable(ast.unparse(Generators().visit(ast.parse(code))), "<cell>", "exec")
    defines = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    reads, tables = {s.get_name() for s in module.get_symbols() if s.is_referenced()}, module.get_children()
    while tables:
        table = tables.pop()
        reads |= {s.get_name() for s in table.get_symbols() if s.is_global()}
        tables += table.get_children()
    return defines, reads - defines


def copied(lesson: "Lesson") -> dict:
    """What the copy cell defines when it runs alone in an empty namespace."""
    namespace = {}
    _execute(lesson.source("copy"), namespace, f"{lesson.name}: copy")
    return namespace


def proof_fails(lesson: "Lesson", old: str, new: str):
    """Run a lesson's proof with `old` replaced by `new` in the cells that it needs. It must fail, and only there."""
    *before, proof = lesson.needed_for("proof")
    before = [source(cell) for cell in before]
    assert any(old in code for code in before), f"{lesson.name} has no {old!r}: change the fault with it"
    namespace = {}
    for code in before:
        run(code.replace(old, new), namespace)
    try:
        run(source(proof), namespace)
    except AssertionError:
        return
    raise AssertionError(f"{lesson.name}: with {new!r} in place of {old!r} the proof still holds")


def answer_to_exercise(lesson: "Lesson", *changes: tuple[str, str]) -> str:
    """What the exercise says of its own solution, changed: (what is replaced, by what)."""
    needed, namespace = [*lesson.needed_for("exercise"), *lesson.needed_for("solution")], {}
    for cell in (cell for cell in lesson.code if cell in needed[:-1]):
        run(source(cell), namespace)
    code = source(needed[-1])
    for old, new in changes:
        assert old in code, f"{lesson.name}'s solution has no {old!r}: change the wrong answer with it"
        code = code.replace(old, new)
    return run(code, namespace)


def run(code: str, namespace: dict) -> str:
    """What the code printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        _execute(code, namespace, "cell")
    return output.getvalue()


def _execute(code: str, namespace: dict, name: str):
    """Run it. As in a kernel, its functions know their source."""
    file = f"<{name} {next(_numbers)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), namespace)


def source(cell) -> str:
    return "".join(cell["source"])


def definition(cell, name: str) -> str:
    """The source of a function or a class of the cell."""
    (found,) = (node for node in ast.parse(source(cell)).body if getattr(node, "name", None) == name)
    return ast.get_source_segment(source(cell), found)


def tags(cell) -> list[str]:
    return cell["metadata"].get("tags", [])


def printed(cell) -> str:
    """What a cell printed or showed as text."""
    texts = []
    for output in cell["outputs"]:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        texts.append("".join(text).removesuffix("\n"))  # a slow cell's lines are streams of their own
    return "\n".join(texts)


def lessons() -> list[Lesson]:
    return [Lesson(path) for path in LESSONS]


def lesson(number: str) -> Lesson:
    return next(Lesson(path) for path in LESSONS if path.stem.startswith(number))

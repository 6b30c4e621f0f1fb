"""The project's own promises: sizes, pins, imports, stamps, pictures."""

import ast
import subprocess
import sys
import tomllib

import pytest
import stamp

from notebooks import ROOT, code_lines
from tutorial_utils import figures, measure

PACKAGE = sorted((ROOT / "tutorial_utils").rglob("*.py"))
MOST, MOST_OF_A_MODULE = 1850, 300
# Packages of their own: all their lines, and the order in which one room imports another, the last what they offer.
ROOMS = {
    "predict": (790, ["fake", "rules", "patches", "allocator", "__init__"]),
    "planner": (311, ["recipes", "search", "panel", "__init__"]),
}
MOST_OF_A_ROOM = 200


def pins(lines) -> list[str]:
    return [line.strip().removeprefix("- ") for line in lines if "==" in line]


def test_environment_equals_requirements():
    import yaml

    requirements = pins((ROOT / "requirements.txt").read_text().splitlines())
    *_, conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert conda["pip"] == requirements


def test_pins_are_inside_the_supported_ranges():
    from tutorial_utils.machine import OLDEST

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={OLDEST['python']}"
    assert project["dependencies"] == [f"torch>={OLDEST['torch']}", f"transformers>={OLDEST['transformers']}"]


def test_the_packages_are_thin():
    lines = {path.relative_to(ROOT): code_lines(path.read_text()) for path in PACKAGE}
    of = {path: path.parent.name for path in lines}
    for name, (most, _) in {"tutorial_utils": (MOST, None), **ROOMS}.items():
        found = sum(count for path, count in lines.items() if of[path] == name)
        assert found <= most, f"{name} has {found} lines of code, more than {most}"
    for path, count in lines.items():
        most = MOST_OF_A_ROOM if of[path] in ROOMS else MOST_OF_A_MODULE
        assert count <= most, f"{path} has {count} lines of code, more than {most}"


def test_code_lines_are_counted():
    assert code_lines('"""A\n\nb."""\n\n# c\nx = 1\n\n\ndef f():\n    """d"""\n    return x\n') == 3


@pytest.mark.alone
def test_importing_adds_little_to_torch_and_transformers(second):
    names = ", ".join(path.stem for path in PACKAGE if path.parent.name == "tutorial_utils" and path.stem != "__init__")
    code = ("import time, torch, transformers; started = time.perf_counter(); "
            f"from tutorial_utils import {names}; print(time.perf_counter() - started)")  # fmt: skip
    runs = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
            for _ in range(3)]  # fmt: skip
    seconds = min(map(float, runs))
    assert seconds <= 0.3 * second, f"importing tutorial_utils took {seconds:.2f} s"


def test_dependencies_point_one_way():
    order = ["check", "kernels", "times", "packages", "machine", "measure", "data", "models", "shapes", "names",
             "predict", "figures", "bounds", "virtual", "explorer", "planner"]  # fmt: skip
    modules = {path.stem for path in PACKAGE if path.parent.name not in ROOMS}
    assert modules | set(ROOMS) == {*order, "__init__"}
    for path in PACKAGE:
        room = path.parent.name if path.parent.name in ROOMS else None
        assert not room or path.stem in ROOMS[room][1], path
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            inside = room and node.level == 1
            ranks = ROOMS[room][1] if inside else order
            own = ranks.index(room if room and not inside else path.stem)
            for name in [node.module] if node.module else [alias.name for alias in node.names]:
                if name != "figures":  # shown only when a table is wanted
                    assert ranks.index(name) < own, f"{path} imports {name}"


def test_nothing_private_is_tracked():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.is_file() and path.suffix in (".py", ".md", ".toml", ".yml", ".json", ".ipynb", ".txt"):
            assert str(ROOT) + "/" not in path.read_text(), f"{name} names a folder of this machine"
        assert path.suffix not in (".bin", ".pt", ".pkl", ".pickle"), f"{name}: weights are safetensors"


@pytest.mark.parametrize("address", ["", "https://github.com/someone/course"])
def test_the_public_address_is_one_setting(address):
    texts = stamp.stamped(address)
    for path, text in texts.items():
        if path.suffix == ".ipynb":
            badge = f"colab.research.google.com/github/someone/course/blob/main/notebooks/{path.stem}"
            has_badge = bool(address) and path.stem[0].isdigit()
            assert (badge in text) is has_badge
            assert ("colab-badge.svg" in text) is has_badge, f"{path.name}: badges go with the address"
            assert f'REPOSITORY = \\"{address}\\"' in text
    assert ("kernels/welcome?src=https://github.com/someone" in str(texts.values())) is bool(address)


def test_pictures_read_on_light_and_dark_and_are_not_wider_than_a_phone_scales():
    import io

    import matplotlib.image

    shown = []
    report = measure.Memory(10, dict.fromkeys(measure.ROLES, 1), [(1,) * 6, (2,) * 6], ["start", "forward"])
    import IPython.display

    original, IPython.display.display = IPython.display.display, shown.append
    try:
        figures.memory_bars({"a": report}, card=20)
        figures.timeline(report)
        figures.bars({"a": 1.0, "b": 2.0}, "MiB")
        figures.lines({"a": {1: 2.0, 2: 3.0}, "b": {1: 1.0, 4: 2.0}}, "batch", "MiB", logarithmic=True)
        figures.strips({"a": [(10, "tokens", "ten"), (3, "padding")], "b": [(4, ""), (9, "gradients")]}, "tokens")
    finally:
        IPython.display.display = original
    assert len(shown) == 5
    for image in shown:
        pixels = matplotlib.image.imread(io.BytesIO(image.data))
        assert pixels.shape[1] == 2 * image.width == 960
        assert pixels[0, 0, 3] == 0, "the background must be transparent"
    luminance = sum(int(figures._TEXT[i : i + 2], 16) / 255 for i in (1, 3, 5)) / 3
    assert 0.4 < luminance < 0.6


def test_tables_escape_and_align():
    table = figures.Table([{"a": "<b>", "long name": 1}, {"a": "x", "long name": 22}])
    assert "&lt;b&gt;" in table._repr_html_() and "<b>" not in table._repr_html_()
    assert str(table).splitlines() == ["a    long name", "<b>  1", "x    22"]


def test_sizes():
    assert figures.size(3 * 2**20) == "3.0 MiB" and figures.size(2**30) == "1.00 GiB"


def test_a_difference_and_a_table_of_times():
    def before(x):
        y = x + 1
        return y

    def after(x):
        y = x + 2
        return y

    assert str(figures.difference(before, after)).splitlines() == [
        "- def before(x):", "-     y = x + 1", "+ def after(x):", "+     y = x + 2", "      return y"]  # fmt: skip
    taken = measure.Timing({"a": [0.1, 0.2, 0.3], "b": [0.2, 0.4, 0.6]})
    assert [list(row.values()) for row in figures.time_table(taken, 8, to="a").rows] == [
        ["a", "200", "100 to 300", "40", "1.00"], ["b", "400", "200 to 600", "20", "2.00"]]  # fmt: skip

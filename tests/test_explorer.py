"""The panels of lessons 00 and 22: in a real JupyterLab and a real browser, and where there are no widgets."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import browser
import nbformat
import pytest
from browser import needs_a_browser
from nbclient import NotebookClient

from notebooks import ROOT
from tutorial_utils import explorer, planner

CELL = "from tutorial_utils import explorer\nexplorer.panel('tiny', batch=8, length=64)"
PLAN = "from tutorial_utils import planner\nplanner.panel('tiny', length=64, effective_batch=16)"


def test_without_widgets_it_prints_the_verdict(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explorer.panel("tiny", batch=8, length=64)
    shown = capsys.readouterr().out
    assert re.search(r"^Fits: at most [\d.]+ MiB on the card .* that a Tesla T4 gives a process\.$", shown, re.M)
    assert "ipywidgets is not installed: no panel" in shown


def test_a_page_without_widgets_keeps_verdict_and_picture():
    """As GitHub shows a notebook: it needs `state` in the saved metadata, and outputs that are not widgets."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, kernel_name="python3", extra_arguments=["--log-level=ERROR"]).execute(
        env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    (widgets,) = notebook.metadata["widgets"].values()
    assert widgets["state"] and widgets["version_major"] == 2
    controls, verdict, picture = (output["data"] for output in notebook.cells[0].outputs)
    assert controls["application/vnd.jupyter.widget-view+json"]["model_id"] in widgets["state"]
    assert "Run this cell in Jupyter" in controls["text/html"]
    assert verdict["text/plain"].startswith("Fits: ") and verdict["text/plain"][:20] in verdict["text/html"]
    assert picture["image/png"].startswith("iVBOR")


def test_a_page_without_widgets_says_what_the_planners_controls_do():
    lesson = json.loads((ROOT / "notebooks" / "22_which_technique_when.ipynb").read_text())
    (cell,) = (cell for cell in lesson["cells"] if "planner.panel()" in "".join(cell["source"]))
    controls, verdict, found = (output["data"] for output in cell["outputs"])
    assert "Run this cell in Jupyter" in "".join(controls["text/html"])
    assert "".join(verdict["text/html"]) == "<p>Choose, and press plan.</p>" and not "".join(found["text/plain"])


def test_the_committed_lesson_shows_it_without_widgets():
    lesson = json.loads((ROOT / "notebooks" / "00_memory_anatomy.ipynb").read_text())
    (cell,) = (cell for cell in lesson["cells"] if "explorer.panel()" in "".join(cell["source"]))
    controls, verdict, picture = (output["data"] for output in cell["outputs"])
    assert "".join(verdict["text/html"]).startswith("<p>Fits: ") and picture["image/png"]
    (widgets,) = lesson["metadata"]["widgets"].values()
    assert controls["application/vnd.jupyter.widget-view+json"]["model_id"] in widgets["state"]


def test_without_widgets_the_planner_says_how_to_ask(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    planner.panel("tiny", length=64)
    assert capsys.readouterr().out == (
        "ipywidgets is not installed: no panel. planner.table(planner.plan('tiny', 'Tesla T4', 64, 32))\n"
    )


@pytest.fixture
def lab(tmp_path, request):
    """The address of a JupyterLab on a folder with a notebook of one cell."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(request.param)], metadata=kernel)
    nbformat.write(notebook, tmp_path / "panel.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1",
               "--ServerApp.port_retries=0", "--IdentityProvider.token=panel", f"--ServerApp.root_dir={tmp_path}",
               "--LabApp.expose_app_in_browser=True", "--LabApp.news_url="]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/api?token=panel", timeout=1)
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()[-2000:]
                time.sleep(0.5)
        yield f"{address}/lab/tree/panel.ipynb?token=panel&reset"
    finally:
        server.terminate()
        server.wait(20)


@contextmanager
def cell_run_in(lab):
    """A page of a browser in which the notebook's cell was run."""
    with browser.page() as page:
        page.goto(lab, timeout=60_000)
        # Before the kernel is there, JupyterLab drops a request to run a cell without a word.
        page.wait_for_function(
            "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=90_000
        )
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-cell')")
        yield page


@needs_a_browser
@pytest.mark.alone
@pytest.mark.parametrize("lab", [CELL], indirect=True, ids=["lesson 00"])
def test_controls_change_picture_and_verdict_in_a_browser(lab):
    def changed(locator, attribute, before):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            now = locator.get_attribute(attribute) if attribute else locator.inner_text()
            if now != before:
                return now
            time.sleep(0.05)
        raise AssertionError(f"nothing changed: {before[:200]}")

    with cell_run_in(lab) as page:
        picture = page.locator(".jp-OutputArea-output img").last
        picture.wait_for(timeout=90_000)
        verdict = page.locator(".jp-OutputArea-output p", has_text=" on the card ").last
        first, image = verdict.inner_text(), picture.get_attribute("src")
        assert first.startswith("Fits: at most ") and page.locator("select").count() >= 5

        batch = page.locator(".widget-hslider", has_text="batch").locator(".noUi-handle")
        batch.focus()
        page.keyboard.press("ArrowRight")
        started = time.monotonic()
        second = changed(verdict, None, first)
        image = changed(picture, "src", image)
        assert time.monotonic() - started < 2, "a change should show within a second"
        assert first.split(" of ")[-1] == second.split(" of ")[-1], "another batch is not another card"

        page.locator(".widget-dropdown", has_text="model").locator("select").select_option("llama-2-7b")
        third = changed(verdict, None, second)
        changed(picture, "src", image)
        assert third.startswith("Does not fit: "), third


@needs_a_browser
@pytest.mark.parametrize("lab", [PLAN], indirect=True, ids=["lesson 22"])
def test_the_planner_plans_in_a_browser(lab):
    with cell_run_in(lab) as page:
        button = page.get_by_role("button", name="plan", exact=True)
        button.wait_for(timeout=90_000)
        button.click()
        page.locator("p", has_text="of 6 groups of recipes predicted").wait_for(timeout=60_000)
        page.locator("p", has_text="The least work: LoRA, fp16, 16 texts at a time.").wait_for(timeout=120_000)
        assert page.locator(".jp-OutputArea-output table tbody tr").count() == 10

        page.get_by_label("exact gradients").check()
        page.locator(".widget-text", has_text="length").locator("input").fill("513")
        page.keyboard.press("Tab")
        button.click()
        page.locator("p", has_text="No plan: length was 513; accepted: 4 to 512").wait_for(timeout=60_000)
        page.locator(".widget-text", has_text="length").locator("input").fill("32")
        page.keyboard.press("Tab")
        button.click()
        page.locator("p", has_text="The least work: fp32, AdamW, 16 texts at a time.").wait_for(timeout=120_000)

"""The grid that a GPU measures: what can be known without one."""

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import record_predictions
import stamp
import torch
import truth

from tutorial_utils import machine, measure, predict

H200, LAPTOP = machine.gpu("NVIDIA H200"), machine.gpu("6 GiB")
SMALL = {"model": "tiny", "batch": 4, "length": 64}


def test_the_grid_is_large_and_has_each_technique():
    cells = record_predictions.grid()
    assert len(cells) >= 60 and len({str(cell) for cell in cells}) == len(cells)
    assert {"accumulate", "attention", "checkpointing", "freeze_layers", "lora", "optimizer", "padded",
            "precision"} <= {name for cell in cells for name in cell}  # fmt: skip
    assert {cell["precision"] for cell in cells if "precision" in cell} == {"fp16", "bf16", "bf16-pure"}


def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match="no GPU that this torch can use: run it where one is"):
        record_predictions.main(["--into", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_what_is_forked_by_a_process_that_used_its_threads_ends():
    code = """import torch, record_predictions
torch.set_num_threads(2)
def product(): return float((torch.ones(1000, 1000) @ torch.ones(1000, 1000)).mean())
product()
print(record_predictions.alone(product))"""
    command, folder = [sys.executable, "-c", code], Path(record_predictions.__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)
    assert done.stdout == "1000.0\n", done.stderr


@pytest.mark.parametrize(
    "cell",
    [
        {},
        {"padded": True, "precision": "bf16", "lora": 8},
        {"optimizer": "sgd", "accumulate": 2, "freeze_layers": 2},
        {"precision": "fp16", "checkpointing": 1},
        {"model": "roberta-base", "sizes": truth.SMALL | {"max_position_embeddings": 80}},
        {"model": "t5-base", "sizes": {"num_layers": 2, "num_decoder_layers": 2, "d_model": 64, "vocab_size": 500}},
    ],
    ids=str,
)
def test_the_measured_step_is_the_predicted_one(cell):
    """On a CPU: the grid's own training, beside the prediction of the same choices."""
    cell = SMALL | cell
    step, model, optimizer, inputs = record_predictions.training(cell, "cpu")
    real = measure.memory(step, model, optimizer, inputs).peak
    choices = {name: value for name, value in cell.items() if name != "sizes"}
    if "sizes" in cell:
        choices["model"] = model.config
    assert predict.step_memory(**choices, device="cpu").peak == pytest.approx(real, rel=0.01)


def pretended(cell):
    """In place of a measurement; by its name the process that measures finds it."""
    if cell["batch"] == 2:
        raise torch.OutOfMemoryError
    found = record_predictions.in_bytes(predict.step_memory(**cell, card=H200))
    return found | {"tensors": round(found["tensors"] / 1.02), "card": found["card"] + (cell["batch"] == 8)}


def test_a_recording(monkeypatch, tmp_path):
    cells = [SMALL, SMALL | {"batch": 8}, SMALL | {"batch": 2}, SMALL | {"precision": "bf16"}, SMALL | {"batch": 4096}]
    monkeypatch.setattr(record_predictions, "measured", pretended)
    rows = record_predictions.record(cells, H200, bf16=False, minutes=1)
    assert rows[2]["measured"] == "out of memory" and rows[3]["left_out"] == "no bf16 in hardware"
    assert "left_out" not in rows[4]
    found = record_predictions.summary(rows)
    assert (found["cells"], found["measured"], found["above_the_card_bound"]) == (5, 3, 2)
    assert found["median_error"] == pytest.approx({"tensors": 0.02, "allocated": 0, "reserved": 0}, rel=0.01)
    assert json.dumps(rows) and found["median_margin"] <= 0
    small = record_predictions.record([SMALL | {"batch": 4096}], LAPTOP, bf16=False, minutes=1)
    assert small[0]["left_out"] == "predicted not to fit"
    late = record_predictions.record(cells[:1], H200, bf16=True, minutes=-1)
    assert late[0]["left_out"] == "later than -1 minutes"
    row = stamp.predictions_table([{"machine": {"name": "A card"}, "versions": {"torch": "2"}, "date": "2026-01-01",
                                    "summary": found}])  # fmt: skip
    assert "| A card | 3 of 5 | 2.0 %, 2.0 % | 0.000 %, 0.000 % | 2 | 0.000 % | torch 2 | 2026-01-01 |" in row


def test_what_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr(record_predictions.importlib.util, "find_spec", lambda name: None)
    cells = [SMALL | {"optimizer": "adamw8bit"}, SMALL | {"lora": 8}]
    assert record_predictions.predictions(cells, H200) == [({}, False)] * 2
    reasons = [record_predictions.why_not(cell, False, True) for cell in cells]
    assert reasons == ["bitsandbytes is not installed", "peft is not installed"]


def test_without_a_recording_the_table_says_open():
    assert "open until measured" in stamp.predictions_table([])


def test_a_virtual_gpu_counts_what_a_real_one_held():
    """Each step that was recorded on a card, and on a virtual one of that name with those versions: to the byte.

    Both in one process, which is what the real one was recorded in.
    """
    paths = record_predictions.FOLDER.rglob("*-h100-80gb-hbm3.json")
    recordings = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    compared = 0
    for real, virtual in itertools.product(recordings, repeat=2):
        versions = [[content["versions"][name] for name in ("torch", "transformers")] for content in (real, virtual)]
        if versions[0] == versions[1] and virtual["machine"]["name"] == f"virtual {real['machine']['name']}":
            rows = [measured_by_step(content) for content in (real, virtual)]
            common = rows[0].keys() & rows[1].keys()
            apart = {step: (rows[0][step], rows[1][step]) for step in common}
            assert all(one["tensors"] == other["tensors"] for one, other in apart.values()), apart
            reserved = [abs(other["reserved"] / one["reserved"] - 1) for one, other in apart.values()]
            assert statistics.median(reserved) < 0.001 and max(reserved) < 0.07
            compared += len(common)
    assert compared >= 90, "record the virtual card with the versions of the real one's recording"


def measured_by_step(recording):
    rows = filter(record_predictions.is_measured, recording["cells"])
    return {json.dumps(stamp.choices(row)): row["measured"] for row in rows}


def test_what_was_published_stands_beside_it():
    step, published = record_predictions.OF_THE_GUIDE[0]
    assert step in record_predictions.grid() and published == 13_606
    found = {"reserved": 10 * 2**30}
    content = {"machine": {"name": "A card"}, "cells": [step | {"predicted": found, "measured": found}]}
    table = stamp.published_table([content, {"machine": {"name": "Another"}, "cells": []}])
    assert "| batch 4 | 13,606 | 10,240 | 10,240 |" in table and "Another" not in table


def test_of_sdpa_in_bert_what_is_counted_is_what_was_published():
    """On another torch, and a real A100. scripts/published.py writes both again."""
    published = json.loads(stamp.PUBLISHED.read_text(encoding="utf-8"))
    rows = stamp.rows_of(published, "SDPA in BERT")
    assert len(rows) == 12
    for row in rows:
        assert abs(row["measured"] / row["published"] - 1) < 0.015, row
        assert abs(row["predicted"] / row["measured"] - 1) < 0.005, row
    for row in stamp.rows_of(published, "MRPC"):
        assert abs(row["predicted"] / row["measured"] - 1) < 0.01, row

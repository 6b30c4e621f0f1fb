import importlib.util
import inspect
import os
import socket
import subprocess
import sys

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import ROOT, copied, lesson, names, proof_fails, run, source, tags
from tutorial_utils import packages

LESSON = lesson("16")
deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
ONLY = '["DDP", "FSDP2", *stages]', '["stage 3"]'


@deepspeed
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.backward(loss)\n        model.step()", "model.backward(loss)"),
        ("sampler=DistributedSampler(rows, world, rank, shuffle=False)", "shuffle=False"),
        ('"gradient_accumulation_steps": accumulate', '"gradient_accumulation_steps": 1'),
        ('"gradient_clipping": max_norm', '"gradient_clipping": 0.0'),
    ],
    ids=["never stepped", "the same texts in each process", "not accumulated", "never clipped"],
)
def test_proof_can_fail(old, new, monkeypatch):
    """With stage 3 alone, for the time it takes."""
    monkeypatch.setattr(LESSON, "needed_for", only_stage_3(LESSON.needed_for))
    proof_fails(LESSON, old, new)


def quick(code):
    return code.replace("rounds=5", "rounds=1, warmup=0").replace("for _ in range(2):", "for _ in range(1):")


def only_stage_3(needed_for):
    """The cells that the proof needs, with the first stage of three and without timing."""

    def needed(tag):
        cells = needed_for(tag)
        assert any(ONLY[0] in source(cell) for cell in cells)
        return [{**cell, "source": quick(source(cell).replace(*ONLY))} for cell in cells]

    return needed


def untrained():
    """In evaluation mode, as from_pretrained leaves a model, and without dropout, which differs by process."""
    model = regressor().eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


STRANGER = """
import json, os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
import deepspeed
deepspeed.ops.__compatible_ops__ = {}
from stranger import Ratings, regressor
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("gloo")
data = Ratings(32)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
engine, optimizer, losses = train_zero(untrained(), loader, {"stage": 3, "reduce_bucket_size": 1e5})
assert engine.module.training
state = sum(t.numel() for values in optimizer.optimizer.state.values() for t in values.values())
parameters = list(engine.module.parameters())
with deepspeed.zero.GatheredParameters(parameters):
    torch.save([p.detach().clone() for p in parameters], sys.argv[1] + str(dist.get_rank()))
print("STATE", state, flush=True)
dist.destroy_process_group()
"""


@deepspeed
def test_copied(tmp_path):
    """A DistilBERT, a regression: two processes train the weights of one, and hold half of the state each."""
    script = tmp_path / "script.py"
    script.write_text(f"{LESSON.source('copy')}\n\n{inspect.getsource(untrained)}\n{STRANGER}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    where |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    where["CUDA_VISIBLE_DEVICES"] = ""
    processes = [
        subprocess.Popen([sys.executable, str(script), str(tmp_path / "weights")],
                         stdout=(tmp_path / f"{rank}.log").open("w"), stderr=subprocess.STDOUT,
                         env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]  # fmt: skip
    for process in processes:
        process.wait(120)
    outputs = [(tmp_path / f"{rank}.log").read_text() for rank in (0, 1)]
    assert all("STATE" in output for output in outputs), outputs[0][-2000:]

    namespace = {}
    run(LESSON.source("baseline"), namespace)
    plain, before = untrained(), untrained()
    namespace["train"](plain, DataLoader(Ratings(32), batch_size=8))
    assert plain.training
    first, second = (torch.load(tmp_path / f"weights{rank}", weights_only=True) for rank in (0, 1))
    changed = sum((a - b).norm() for a, b in zip(plain.parameters(), before.parameters(), strict=True))
    apart = sum((a - b).norm() for a, b in zip(plain.parameters(), first, strict=True))
    assert changed > 0 and apart < 1e-3 * changed
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    every = sum(p.numel() for p in plain.parameters())
    state = [int(output.split("STATE")[1].split()[0]) for output in outputs]
    assert all(count == pytest.approx(every, rel=0.01) for count in state)  # two means, of half of the parameters


def test_copied_needs_deepspeed_only_when_called():
    assert "train_zero" in copied(LESSON)


def test_a_process_that_dies_when_it_is_ending_has_done_its_work(capsys):
    """Its result counts, with a line of warning; without a result it is a failure."""
    namespace = {}
    for cell in LESSON.code:
        if names(source(cell))[0] & {"LESSON", "FOLDER", "HEADER", "environment", "launch"} or "setup" in tags(cell):
            run(source(cell), namespace)
    ending = "if dist.is_initialized():"
    assert ending in namespace["FOOTER"]
    namespace |= {"DEEPSPEED": False, "FOOTER": namespace["FOOTER"].replace(ending, "os.abort()\n" + ending)}
    run("def main():\n    return RANK", namespace)
    said = run("found = launch(main, START='0')", namespace)
    assert namespace["found"] == [0, 1] and "warning: a process died when it was ending" in said
    run("def main():\n    raise ValueError('before its end')", namespace)
    with pytest.raises(RuntimeError, match="before its end"):
        run("launch(main, START='0')", namespace)


def test_without_deepspeed(monkeypatch):
    """The package is missing (imitated): one line, and torch's own ways are still proved."""
    monkeypatch.setattr(packages, "left_out", {})
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    printed, namespace = [], {}
    for cell in LESSON.needed_for("proof"):
        printed.append(run(quick(source(cell)), namespace))
    assert sum("left out: its stages" in text for text in printed) == 1
    assert printed[-1].split("\n")[:2] == ["DDP: equal", "FSDP2: equal"] and "stage" not in printed[-1]

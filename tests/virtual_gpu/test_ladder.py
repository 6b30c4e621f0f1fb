"""Lesson 21's ladder on a card of 4 GiB, each row counted by PyTorch's own allocator: the published ones, and ours."""

import json

import pytest
from test_card import ROOT, on, pytestmark  # noqa: F401

NEEDED = ("copy", "loop", "predicted", "ladder")
SOURCES = {
    cell["id"]: "".join(cell["source"])
    for cell in json.loads((ROOT / "notebooks" / "21_bert_large_in_4gb.ipynb").read_text(encoding="utf-8"))["cells"]
}
CELLS = [SOURCES[name] for name in NEEDED]
BEGIN = """
from transformers.optimization import Adafactor
from tutorial_utils import models, names, predict

CARD = "GTX 1650"

def nothing(*_):
    pass

def adafactor(parameters):
    return Adafactor(parameters, lr=2e-5, scale_parameter=False, relative_step=False)

for cell in {cells}:
    exec(cell)

def texts(batch, length):
    found = {{"input_ids": torch.ones(batch, length, dtype=torch.long), "labels": torch.zeros(batch, dtype=torch.long)}}
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    found["attention_mask"][:, length * 3 // 4 :] = 0
    return {{name: tensor.cuda() for name, tensor in found.items()}}

def counted(step):
    torch.cuda.reset_peak_memory_stats()
    try:
        step()
        step()
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - 2 * predict.allocator.WORKSPACE
"""
PUBLISHED = """
row = LADDER[{row!r}]
predicted = predict.step_memory(
    LARGE, row.micro, row.length, attention="eager", padded=True, card=CARD, accumulate=32 // row.micro,
    prepare=lambda model: prepare_row(model, row),
    optimizer=one_by_one if row.optimizer == "adamw" else row.optimizer)

def train():
    with torch.device("cuda"):
        model = models.build(LARGE, attention="eager")
    prepare_row(model, row)
    trained = [p for p in model.parameters() if p.requires_grad]
    made = torch.optim.AdamW(trained, foreach=False) if row.optimizer == "adamw" else torch.optim.Adafactor(trained)
    batch = texts(row.micro, row.length)

    def step():
        for _ in range(min(3, 32 // row.micro)):  # the third micro-batch finds what the 32nd finds
            inputs = {{name: tensor for name, tensor in batch.items() if name != "labels"}}
            torch.nn.functional.cross_entropy(model(**inputs).logits, batch["labels"]).backward()
        made.step()
        made.zero_grad()

    return counted(step)

try:
    found = train()
except torch.OutOfMemoryError:
    found = None
print((predicted.peak, predicted.fits, found))
"""
OURS = """
micro, checkpoint = {row}
prepare = names.checkpoint_layers if checkpoint else nothing
predicted = predicted_small(LARGE, micro, prepare)
with torch.device("cuda"):
    model = models.build(LARGE).to(torch.float16)
prepare(model)
optimizer, steps = adafactor(model.parameters()), 32 // micro
step_in_backward(optimizer, 4096.0)
parts = [texts(micro, 128) for _ in range(steps)]
loss_of = lambda model, batch: model(**batch).loss
print((predicted.peak, predicted.fits,
       counted(lambda: train_small(model, optimizer, parts, loss_of, nothing, steps, 4096.0))))
"""


def both(code, tolerance, **row):
    begin = BEGIN.format(cells=CELLS)
    predicted, fits, found = eval(on("GTX 1650", begin + code.format(**row)).strip().splitlines()[-1])
    assert fits is (found is not None), (predicted, found)
    assert found is None or abs(predicted / found - 1) < tolerance, (predicted, found)
    return fits


@pytest.mark.parametrize(
    ("row", "fits"),
    [
        ("batch 32 × 128", False),
        ("1 × 32", False),
        ("+ checkpoints", False),
        ("+ Adafactor", True),
        ("+ freeze encoder", True),
        ("+ freeze all but head", True),
        ("+ length 64", True),
    ],
)
def test_as_published(row, fits):
    assert both(PUBLISHED, 0.001, row=row) is fits


@pytest.mark.parametrize(("micro", "checkpoint"), [(16, False), (8, False), (32, True)])
def test_as_ours(micro, checkpoint):
    assert both(OURS, 0.005, row=(micro, checkpoint))

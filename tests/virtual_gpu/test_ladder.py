"""Lesson 21's ladder on a card of 4 GiB, each row counted by PyTorch's own allocator: the published ones, and ours."""

import json

import pytest
from test_card import ROOT, on, pytestmark  # noqa: F401

NEEDED = ("def checkpoints(", "class StepInBackward", "class AsOne", "def predicted_small(", "LADDER = {")
CELLS = [
    "".join(cell["source"])
    for cell in json.loads((ROOT / "notebooks" / "21_bert_large_in_4gb.ipynb").read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code" and any(text in "".join(cell["source"]) for text in NEEDED)
]
BEGIN = """
from types import SimpleNamespace
from tutorial_utils import figures, models, names, predict
LARGE, GiB, size, CARD = "chinese-macbert-large", 2**30, figures.size, "GTX 1650"
for cell in {cells}:
    exec(cell.replace('card="4 GiB"', "card=CARD"))

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
_, micro, length, checkpoint, optimizer, freeze = LADDER[{row!r}]
prepare = prepared_by(freeze, checkpoint)
choices = dict(attention="eager", padded=True, card=CARD, accumulate=32 // micro, prepare=prepare)
predicted = predict.step_memory(
    LARGE, micro, length, optimizer=one_by_one if optimizer == "adamw" else optimizer, **choices)

def train():
    with torch.device("cuda"):
        model = models.build(LARGE, attention="eager")
    prepare(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    made = torch.optim.AdamW(trained, foreach=False) if optimizer == "adamw" else torch.optim.Adafactor(trained)
    batch = texts(micro, length)

    def step():
        for _ in range(min(3, 32 // micro)):  # the third micro-batch finds what the 32nd finds
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
predicted = predicted_small(dtype=torch.float16, micro=micro, prepare=checkpoints if checkpoint else None)
with torch.device("cuda"):
    model = models.build(LARGE)
if checkpoint:
    checkpoints(model)
trainer, batch = StepInBackward(model, torch.float16, micro_batches=32 // micro, scale=4096.0), texts(32, 128)
print((predicted.peak, predicted.fits, counted(lambda: train_step(model, trainer, batch))))
"""


def both(code, tolerance, **row):
    begin = BEGIN.format(cells=CELLS)
    made = "\ndef one_by_one(model):\n    return torch.optim.AdamW(model.parameters(), foreach=False)\n"
    predicted, fits, found = eval(on("GTX 1650", begin + made + code.format(**row)).strip().splitlines()[-1])
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
        ("+ length 32", True),
    ],
)
def test_as_published(row, fits):
    assert both(PUBLISHED, 0.001, row=row) is fits


@pytest.mark.parametrize(("micro", "checkpoint"), [(16, False), (8, False), (32, True)])
def test_as_ours(micro, checkpoint):
    assert both(OURS, 0.005, row=(micro, checkpoint))

"""What fits, and how: the largest micro-batch of each set of techniques: python scripts/decide.py [--picture]

Everything is predicted, on any machine, in a few minutes. It writes tutorial_utils/facts/predictions/decisions.json,
whose tables scripts/stamp.py puts into README.md, and the picture that README opens with; --picture: that alone.
"""

import argparse
import sys
import warnings
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tutorial_utils import bounds, figures, machine, planner, predict  # noqa: E402

TARGET = ROOT / "tutorial_utils" / "facts" / "predictions" / "decisions.json"
PICTURE = ROOT / "notebooks" / "one_step.png"
BATCH = 32  # texts a step, in micro-batches of a power of two
FULL = {
    "fp32, AdamW": dict(),
    "fp16": dict(precision="fp16"),
    "fp16, 8-bit AdamW": dict(precision="fp16", optimizer="adamw8bit"),
    "fp16, checkpointing": dict(precision="fp16", checkpointing=1),
    "fp16, checkpointing, 8-bit AdamW": dict(precision="fp16", checkpointing=1, optimizer="adamw8bit"),
    "fp16, checkpointing, Adafactor": dict(precision="fp16", checkpointing=1, optimizer="adafactor"),
    "LoRA of rank 8, fp16": dict(lora=8, precision="fp16"),
    "LoRA of rank 8, fp16, checkpointing": dict(lora=8, precision="fp16", checkpointing=1),
}
PICTURED = {"before": "fp32, AdamW", "after": "fp16, checkpointing, 8-bit AdamW"}
HALF = {
    "all weights, 16 bit": dict(precision="bf16-pure"),
    "all weights, 16 bit, checkpointing, 8-bit AdamW": dict(
        precision="bf16-pure", checkpointing=1, optimizer="adamw8bit"
    ),
    "LoRA of rank 8, 16 bit": dict(precision="bf16-pure", lora=8),
    "LoRA of rank 8, 16 bit, checkpointing": dict(precision="bf16-pure", lora=8, checkpointing=1),
}
QUESTIONS = {
    "full": (
        FULL,
        {
            "DeBERTa-v3-large at 512 on a T4": dict(model="deberta-v3-large", length=512, card="T4"),
            "DeBERTa-v3-large at 1024 on a T4": dict(model="deberta-v3-large", length=1024, card="T4"),
            "BERT-large at 128 on 4 GiB": dict(model="bert-large-uncased", length=128, card="4 GiB"),
        },
    ),
    "seven_billion": (
        HALF,
        {
            f"Llama 2 7B, a classifier, at 512 on {named}": dict(model="llama-2-7b", length=512, card=card)
            for named, card in (("an L4", "L4"), ("an RTX 4090", "4090"), ("an A100 of 40 GB", "A100"))
        },
    ),
}


def predicted(technique: dict, **case) -> predict.Prediction:
    """With the optimizer as the lessons and the planner make it."""
    optimizer = planner.OPTIMIZERS[technique.get("optimizer", "adamw")]
    return predict.step_memory(padded=True, **case, **technique | {"optimizer": optimizer})


def largest(case: dict, technique: dict) -> dict:
    """{micro_batch, card_bytes} of the largest power of two up to BATCH that fits; of 1, with 0, where none does."""
    found, batch = None, 1
    while batch <= BATCH:
        accumulate = 1 if batch == BATCH else 2  # from two on, the memory is the same
        report = predicted(technique, batch=batch, accumulate=accumulate, **case)
        if not report.fits:
            return found or {"micro_batch": 0, "card_bytes": report.card_bytes}
        found, batch = {"micro_batch": batch, "card_bytes": report.card_bytes}, 2 * batch
    return found


def answers(techniques: dict, cases: dict) -> dict:
    found = {}
    for title, case in cases.items():
        print(title, file=sys.stderr, flush=True)
        found[title] = {name: largest(case, technique) for name, technique in techniques.items()}
    return found


def run() -> dict:
    here = machine.start()
    return {
        "date": date.today().isoformat(),
        "versions": here.versions,
        "batch": BATCH,
        "answers": {name: answers(*question) for name, question in QUESTIONS.items()},
    }


def picture(target: Path):
    """The memory of one step of BERT-large over time: the plain loop's, and with three techniques."""
    step = dict(model="bert-large-uncased", batch=BATCH, length=128, card="T4")
    steps = {shown: predicted(FULL[name], **step) for shown, name in PICTURED.items()}
    figures.timeline(steps, show=lambda image: target.write_bytes(image.data))


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", action="store_true")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of checkpointing's older name
    picture(PICTURE)
    print(f"wrote {PICTURE.relative_to(ROOT)}")
    if not chosen.picture:
        bounds.write(TARGET, run())
        print(f"wrote {TARGET.relative_to(ROOT)}; now: python scripts/stamp.py")


if __name__ == "__main__":
    main()

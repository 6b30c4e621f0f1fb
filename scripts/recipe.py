"""What each technique of notebooks/recipe.py saves: make recipe

Trains DeBERTa-v3-large one step on 32 texts of 512 tokens on a virtual T4, with the recipe's own functions: with all of
its techniques, and without each of them, in processes of their own. Counts the tokens of an epoch of the course's texts
besides. Writes facts/predictions/recipe.json; scripts/stamp.py puts it, and the script, into notebooks/recipe.md.
"""

import json
import sys
from datetime import date
from pathlib import Path

import numpy as np
import torch
from record_predictions import FOLDER, alone

from tutorial_utils import bounds, data, machine, models

SCRIPT = Path(__file__).parents[1] / "notebooks" / "recipe.py"
TARGET = FOLDER / "recipe.json"
MODEL, LENGTH, BATCH = "deberta-v3-large", 512, 32
WITHOUT = {  # technique → its lesson, and what stands in its place: the code of the recipe, and other code
    "micro-batches of 8": ("01", {"micro_batch, steps = 8, 4": "micro_batch, steps = 32, 1"}),
    "frozen embeddings": (
        "02",
        {
            "embeddings.requires_grad_(False)": "embeddings.requires_grad_(True)",
            "    model.backbone.embeddings.eval()  # 02\n": "",
        },
    ),
    "fp16": ("03", {'half = torch.float16 if device == "cuda" else None': "half = None"}),
    "8-bit AdamW": ("04", {"bnb.optim.AdamW8bit(": "torch.optim.AdamW("}),
    "checkpointing": (
        "05",
        {'(newer or self.backbone.gradient_checkpointing_enable)({"use_reentrant": False})': "pass"},
    ),
}


def recipe(edits: dict[str, str]) -> dict:
    """The script's functions, with this code in place of its own."""
    code = SCRIPT.read_text(encoding="utf-8")
    for old, new in edits.items():
        assert code.count(old) == 1, f"recipe.py has {code.count(old)} of {old!r}"
        code = code.replace(old, new)
    namespace = {"__name__": "recipe"}
    exec(compile(code, str(SCRIPT), "exec"), namespace)
    return namespace


class Long:
    """32 texts that fill the length, as a data set of the recipe."""

    lengths = np.full(BATCH, LENGTH)

    def __len__(self):
        return BATCH

    def __getitem__(self, i):
        return [1] * LENGTH, np.zeros(2, "float32")


def model_of(of: dict) -> torch.nn.Module:
    """The script's model over an untrained MODEL."""
    of["AutoModel"].from_pretrained = lambda name, dtype: models.untrained(models.config(MODEL)).base_model.to(dtype)
    return of["Model"]()


def counted(edits: dict[str, str]) -> dict | str:
    """Bytes of an epoch of two steps: of tensors, and of the card as nvidia-smi would show it."""
    of = recipe(edits)
    torch.manual_seed(0)
    model = model_of(of).to("cuda")
    optimizer, scaler = of["optimizer_of"](model), torch.amp.GradScaler("cuda", enabled=of["CFG"].half is not None)
    scheduler, collate = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), of["collator"](data.tokenizer())
    try:
        for _ in range(2):
            of["train_epoch"](model, Long(), collate, torch.nn.SmoothL1Loss(), optimizer, scheduler, scaler)
    except torch.OutOfMemoryError:
        return "out of memory"
    free, total = torch.cuda.mem_get_info()
    return {"tensors": torch.cuda.memory_stats()["requested_bytes.all.peak"], "card": total - free}


def tokens() -> dict:
    """Of an epoch of the course's texts: all padded to LENGTH, to the longest of 8, and in batches of like lengths."""
    of, texts = recipe({}), data.load().train["text"]
    ids = data.tokenizer()(list(texts), truncation=True, max_length=LENGTH)["input_ids"]
    lengths = np.array([len(one) for one in ids])
    torch.manual_seed(0)
    at_random = [rows.tolist() for rows in torch.randperm(len(lengths)).split(8)]

    def padded(batches):
        return int(sum(len(rows) * lengths[rows].max() for rows in batches))

    alike = of["pooled_batches"](lengths, 8)
    return {"texts": int(lengths.sum()), "fixed": LENGTH * len(lengths), "07": padded(at_random), "08": padded(alike)}


def main():
    here = alone(machine.facts)
    if not here.virtual and here.device != "cuda":
        sys.exit("recipe.py: it counts a GPU's memory, a virtual one's too: make recipe; nothing was written")
    found = {"machine": here.name, "date": date.today().isoformat(), "versions": here.versions, "tokens": alone(tokens)}
    found |= {"all": alone(counted, {}), "without": {}}
    for name, (lesson, edits) in WITHOUT.items():
        found["without"][name] = {"lesson": lesson, "counted": alone(counted, edits)}
        print(name, json.dumps(found["without"][name]), flush=True)
    bounds.write(TARGET, found)
    print(f"wrote {TARGET.name}; now: python scripts/stamp.py")


if __name__ == "__main__":
    main()

"""A planner's script takes of a card what was predicted: each recipe's, at a real model's size.

Of virtual cards, and of the GPU that is here.
"""

import subprocess
import sys

import pytest
from test_card import ROOT, on
from test_card import pytestmark as virtual

from tutorial_utils import machine, models, planner

CODE = """
import sys, torch
sys.path.insert(0, "scripts")
import plan
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding
from tutorial_utils import data, models, planner

recipe = next(one for one in planner.recipes(HALF, models.head_share(MODEL)) if one.name == NAME)
asked = dict(model=MODEL, card=CARD, length=LENGTH)
(found,) = planner.predicted([recipe], batch=BATCH, accumulate=2, **asked)
of = {"__name__": "train"}
exec(plan.script(planner.Option(recipe, BATCH, found), effective_batch=2 * BATCH, **asked), of)
of["CFG"].epochs, of["CFG"].run = 1, of["CFG"].work

def made(name, num_labels=2, dtype=torch.float32, quantization_config=None, **_):
    model = models.untrained(models.config(MODEL, num_labels, dtype=dtype), causal=recipe.decoder)
    if quantization_config:
        import bitsandbytes
        for part in model.base_model.modules():
            if type(part) is torch.nn.Linear:
                packed = bitsandbytes.nn.Params4bit(
                    part.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
                part.__class__, part.weight = bitsandbytes.nn.Linear4bit, packed
                vars(part).update(compute_dtype=dtype, compute_type_is_set=True, support_avx512bf16_for_cpu=False,
                                  quant_state=None, quant_storage=torch.uint8)
    return model

of["AutoModelForCausalLM" if recipe.decoder else "AutoModelForSequenceClassification"].from_pretrained = made
of["save_file"] = lambda weights, path: path.touch()
of["load_file"], of["Files"].keep = lambda path: {}, lambda *_: None
of["np"].savez = lambda *_, **__: None
of["np"].isfinite = lambda _: of["np"].True_  # a virtual card computes no numbers
lengths = 4 * BATCH * [LENGTH] if recipe.decoder else 2 * BATCH * [LENGTH, LENGTH - 1]  # the largest kind of batch
rows = [{"input_ids": length * [1], "attention_mask": length * [1]} for length in lengths]
rows = [row | {"labels": row["input_ids"] if recipe.decoder else 0} for row in rows]
tokenizer = data.tokenizer()
if recipe.decoder:
    of["train_fold"](0, rows, rows, DataCollatorForSeq2Seq(tokenizer))
    if NAME.startswith("LoRA on"):  # of one only: it takes a while
        of["CFG"].new_tokens = 8  # of short completions, whose prompts are the longest
        of["predict"](of["make_model"](), BATCH * [{"input_ids": (LENGTH - 8) * [1]}], tokenizer)
else:
    of["train_fold"](0, rows, rows, 2, collate := DataCollatorWithPadding(tokenizer))
    of["predict"](of["make_model"](2), rows, collate)
stats = torch.cuda.memory_stats()
cublas = found.card_parts["cuBLAS workspaces"]
print(stats["requested_bytes.all.peak"], found.peak, cublas, stats["reserved_bytes.all.peak"], found.reserved)
"""
HERE = machine.facts()
CARDS = [("T4", "fp16", [virtual]), ("A100", "bf16", [virtual])]
if HERE.device == "cuda" and not HERE.virtual:
    CARDS += [(HERE.name, half, []) for half in ("fp16", *["bf16"] * HERE.bf16)]
SIZES = [("bert-base-uncased", 8, 128), ("qwen3-0.6b", 4, 128), ("deberta-v3-base", 2, 512)]
CASES = [
    pytest.param(card, half, model, batch, length, recipe.name, marks=marks)
    for card, half, marks in CARDS
    for model, batch, length in SIZES
    for recipe in planner.recipes(half, models.head_share(model))
    if half == "fp16" or "precision" in recipe.choices
    if length == 128 or "checkpointing" in recipe.choices and half == "fp16"  # where an evaluation takes most beside it
]


def on_this_gpu(code: str) -> str:
    """What the code prints in a process of its own."""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.parametrize(("card", "half", "model", "batch", "length", "name"), CASES)
def test_a_script_takes_what_was_predicted(card, half, model, batch, length, name, tmp_path):
    given = f"import os\nos.environ['WORK'] = {str(tmp_path)!r}\n"
    given += f"CARD, HALF, MODEL, BATCH, LENGTH, NAME = {(card, half, model, batch, length, name)}\n"
    real = card == HERE.name
    printed = on_this_gpu(given + CODE) if real else on(card, given + CODE)
    counted, predicted, cublas, reserved, expected = map(int, printed.split()[-5:])
    # From compute capability 9.0 on cuBLAS's two workspaces are 64 MiB; a peak in the forward pass has one, or none.
    most = predicted + (cublas if real else 0)
    assert 0.98 * predicted <= counted <= 1.02 * most, f"counted {counted:,}, predicted {predicted:,} to {most:,}"
    assert abs(expected / reserved - 1) <= 0.05, f"reserved {reserved:,}, predicted {expected:,}"

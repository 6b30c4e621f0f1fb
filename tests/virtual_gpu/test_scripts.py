"""A planner's script takes of a virtual card what was predicted: each recipe's, at a real model's size."""

import pytest
from test_card import on, pytestmark  # noqa: F401

from tutorial_utils import planner

CODE = """
import itertools, sys, torch
sys.path.insert(0, "scripts")
import plan
from transformers import DataCollatorWithPadding
from tutorial_utils import data, models, planner

recipe = next(one for one in planner.recipes("fp16") if one.name == NAME)
asked = dict(model="bert-base-uncased", card="T4", length=128)
found = planner._predicted(recipe, batch=8, accumulate=2, padded=True, **asked)
of = {"__name__": "train"}
exec(plan.script(planner.Option(recipe, 8, found), effective_batch=16, **asked), of)
of["CFG"].epochs = 1
of["AutoModelForSequenceClassification"].from_pretrained = lambda name, num_labels, **_: models.untrained(
    models.config("bert-base-uncased", num_labels))
of["save_model"] = lambda model, path: path.touch()
of["load_model"] = of["Files"].keep = lambda *_: None
of["np"].save = lambda *_: None
rows = [{"input_ids": length * [1], "attention_mask": length * [1], "labels": 0} for length in (128, 127)]
rows = list(itertools.islice(itertools.cycle(rows), 32))
of["train_fold"](0, rows, rows[:8], rows[:8], 2, DataCollatorWithPadding(data.tokenizer()))
stats = torch.cuda.memory_stats()
print(stats["requested_bytes.all.peak"], found.peak, stats["reserved_bytes.all.peak"], found.reserved)
"""


@pytest.mark.parametrize("name", [recipe.name for recipe in planner.recipes("fp16")])
def test_a_script_takes_what_was_predicted(name, tmp_path):
    shown = on("T4", f"import os\nos.environ['WORK'] = {str(tmp_path)!r}\nNAME = {name!r}\n" + CODE)
    counted, predicted, reserved, expected = map(int, shown.split()[-4:])
    assert abs(predicted / counted - 1) <= 0.02, f"counted {counted:,}, predicted {predicted:,}"
    assert abs(expected / reserved - 1) <= 0.05, f"reserved {reserved:,}, predicted {expected:,}"

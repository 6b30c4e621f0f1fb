"""Plans, and the scripts that are made of them: each recipe's trains, goes on after an interruption, and predicts."""

import json
import subprocess
import sys

import pandas
import plan
import pytest
import torch

from notebooks import ROOT, code_lines
from tutorial_utils import data, models, planner, predict

RECIPES = {recipe.name: recipe for half in ("fp16", "bf16") for recipe in planner.recipes(half)}
ON_A_T4 = [recipe.name for recipe in planner.recipes("fp16")]
ASKED = dict(model="tiny", card="T4", length=64, effective_batch=16)


def option(name: str) -> planner.Option:
    """With a micro-batch that leaves more than one a step."""
    report = predict.Prediction(0, {}, [], [], card_bytes=2**30)
    return planner.Option(RECIPES[name], 8, report)


def script(name: str) -> str:
    return plan.script(option(name), **ASKED)


def loaded(name: str, folder, **settings) -> dict:
    """The script's functions, told where its files are."""
    namespace = {"__name__": "train"}
    exec(compile(script(name), f"<{name}>", "exec"), namespace)
    files = dict(train=folder / "train.csv", test=folder / "test.csv", work=folder / "work", output=f"{folder}/out.csv")
    for field, value in (files | dict(folds=2, epochs=2, lr=2e-3) | settings).items():
        setattr(namespace["CFG"], field, value)
    return namespace


@pytest.fixture
def folder(tmp_path):
    corpus = data.load()
    rows = [corpus.train[i] for i in range(360)]
    frame = pandas.DataFrame([{"text": row["text"], "label": corpus.labels[row["label"]]} for row in rows])
    frame[:320].to_csv(tmp_path / "train.csv", index=False)
    frame[320:].drop(columns="label").assign(id=range(40)).to_csv(tmp_path / "test.csv", index=False)
    return tmp_path


def test_the_least_work_first_and_what_was_not_asked_for_says_so():
    options = planner.plan(**ASKED, whole=True, no_new_dependency=True)
    fitting = [one for one in options if not one.why]
    assert [one.recipe.operations for one in fitting] == sorted(one.recipe.operations for one in fitting)
    assert {one.micro_batch for one in fitting} == {16} and all(one.prediction.fits for one in fitting)
    against = {one.recipe.name: one.why for one in options if one.why}
    assert against["LoRA, fp16"] == "trains adapters, not all parameters; needs peft"
    assert against["fp16, 8-bit AdamW"] == "needs bitsandbytes" and len(options) == len(ON_A_T4)


def test_exact_leaves_the_plain_step():
    options = planner.plan(**ASKED, exact=True)
    assert [one.recipe.name for one in options if not one.why] == ["fp32, AdamW", "fp32, checkpointing, AdamW"]


def test_what_does_not_fit_says_why_and_which_card_would_do():
    asked = dict(model="bert-large-uncased", card="GTX 1650", length=128, effective_batch=32)
    options = planner.plan(**asked, exact=True)
    assert all("one text needs" in one.why and "weights" in one.why for one in options if one.prediction)
    assert planner.instead(options, **asked) == (
        "The smallest card that would do: NVIDIA GeForce RTX 2060, with fp32, checkpointing, AdamW."
    )


def test_operations_are_those_that_are_counted():
    """A forward and a backward pass, in multiplications of matrices, on a CPU."""
    from torch.utils.flop_counter import FlopCounterMode

    def counted(name):
        model = loaded(name, ROOT)["make_model"](4)
        batch = torch.ones(4, 64, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=batch).logits.sum().backward()
        return counter.get_total_flops()

    plain = counted("fp32, AdamW")
    for name in ("fp32, checkpointing, AdamW", "LoRA, fp16", "LoRA, fp16, checkpointing"):
        assert counted(name) / plain == pytest.approx(RECIPES[name].operations, rel=0.06), name


@pytest.mark.parametrize("name", ON_A_T4)
def test_a_script_is_short_and_clean(name, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(script(name))
    assert code_lines(path.read_text()) <= 200
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=E,F", "--line-length=120", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ON_A_T4)
def test_a_script_learns_and_goes_on_to_the_same_weights(name, folder, monkeypatch, capsys):
    whole = loaded(name, folder, work=folder / "whole")
    whole["main"]()
    scores = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    assert max(scores) > 0.45, f"accuracy {scores}: a quarter is chance"
    expected = pandas.read_csv(folder / "out.csv")
    (folder / "out.csv").unlink()

    again, kept = loaded(name, folder), []

    class Interrupted(Exception):
        pass

    def keep(self, *given):
        own(self, *given)
        kept.append(given)
        if len(kept) == 3:  # in the middle of the second fold
            raise Interrupted

    own = again["Files"].keep
    monkeypatch.setattr(again["Files"], "keep", keep)
    with pytest.raises(Interrupted):
        again["main"]()
    assert not (folder / "out.csv").exists()
    loaded(name, folder)["main"]()
    found = pandas.read_csv(folder / "out.csv")
    assert found.text.tolist() == pandas.read_csv(folder / "test.csv").text.tolist(), "the rows' order"
    pandas.testing.assert_frame_equal(found, expected, rtol=1e-6)


def test_the_command_writes_a_script(tmp_path, capsys):
    target = tmp_path / "train.py"
    arguments = ["--model=tiny", "--card=T4", "--length=64", "--effective-batch=16", "--exact", f"--script={target}"]
    plan.main([*arguments, "--recipe=fp32, checkpointing, AdamW", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert {row["recipe"] for row in rows if row["fits"]} == {"fp32, AdamW", "fp32, checkpointing, AdamW"}
    assert "checkpoint_layers(model)" in target.read_text() and models.hub("tiny") in target.read_text()
    plan.main(arguments[:-1])
    assert "takes another step than the plain loop" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model=bert-huge", "--card=T4", "--length=64"], "model was 'bert-huge'; accepted"),
        (["--model=tiny", "--card=T5", "--length=64"], "card was 'T5'; accepted"),
        (["--model=tiny", "--card=T4", "--length=513"], "length was 513; accepted: up to 512"),
        (["--model=tiny", "--card=T4", "--length=64", "--effective-batch=0"], "effective_batch was 0"),
        (["--model=tiny", "--card=T4", "--length=64", "--exact", "--recipe=x", "--script=t.py"], "recipe was 'x'"),
    ],
)
def test_errors_name_what_was_given(arguments, said, capsys):
    with pytest.raises(SystemExit):
        plan.main(arguments)
    assert f"error: {said}" in capsys.readouterr().err

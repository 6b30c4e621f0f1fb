"""Architectures by name, and what the tiny model's pretraining is worth."""

import json
import time

import pretrain_tiny
import pytest
import torch
from pretrain_tiny import fine_tuned_accuracy, fine_tuned_loss
from test_forks import EVERY

from tutorial_utils import data, machine, models

PARAMETERS = {  # of the published checkpoints' encoders, in millions
    "bert-base-uncased": 109.5,
    "bert-large-uncased": 335.1,
    "chinese-macbert-large": 325.5,
    "deberta-v3-base": 183.8,
    "deberta-v3-large": 434.0,
    "deberta-v3-small": 141.3,
    "roberta-base": 124.1,
    "roberta-large": 354.3,
    "distilbert-base-uncased": 66.4,
    "electra-base": 108.9,
    "electra-large": 334.1,
    "modernbert-base": 149.0,
    "modernbert-large": 394.8,
    "t5-base": 222.9,
    "gpt2": 124.4,
    "llama-2-7b": 6607.3,
    "llama-3.2-1b": 1235.8,
    "llama-3.2-3b": 3212.7,
    "llama-3.1-8b": 7504.9,  # and 525.3 of its head
    "qwen3-0.6b": 596.0,
    "qwen3-1.7b": 1720.6,
    "gemma-3-1b": 999.9,
    "tiny-decoder": 1.836,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_true_sizes(name):
    with torch.device("meta"):
        model = models.untrained(models.config(name)).base_model
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(PARAMETERS[name], rel=0.005)


def test_every_name_is_held_to_a_size():
    assert {"tiny", *PARAMETERS} == set(models.names())


def test_random_weights_are_those_of_the_seed():
    torch.manual_seed(3)
    first = models.build("tiny").classifier.weight
    torch.manual_seed(3)
    assert torch.equal(first, models.build("tiny").classifier.weight)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(name="bert-huge"), "model was 'bert-huge'; accepted: tiny, tiny-decoder"),
        (dict(name="tiny", weights="trained"), "weights was 'trained'; accepted"),
        (dict(name="tiny", weights="pretrained", hidden_size=64), "pretrained weights have a fixed shape"),
        (dict(name="tiny", attention="flex"), "attention was 'flex'; accepted"),
        (dict(name="deberta-v3-base", attention="sdpa"), "attention of deberta-v2 was 'sdpa'; accepted: .eager"),
    ],
)
def test_bad_names(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.build(**arguments)


def test_pretrained_weights_that_cannot_be_had_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(machine, "hub_reachable", lambda: False)
    small = machine.table("models")["bert-base-uncased"] | {"hidden_size": 96, "num_hidden_layers": 1, "vocab_size": 99}
    small |= {"hub": "nobody/no-such-model"}  # which no cache has
    monkeypatch.setattr(models, "table", lambda _: {"bert-base-uncased": small})
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    assert models.build("bert-base-uncased", weights="pretrained").training
    assert not waited, f"the hub was asked again and again although it cannot be reached: {sum(waited)} s of waiting"
    assert capsys.readouterr().out == (
        "bert-base-uncased: the hub cannot be reached and its cache has no copy; using random weights\n"
    )


def test_tiny_model_is_small_and_has_its_recipe():
    assert (data.TINY / "model.safetensors").stat().st_size <= 10 * 2**20
    assert not [p for p in data.TINY.iterdir() if p.suffix in (".bin", ".pt", ".pkl")]
    recipe = json.loads((data.TINY / "recipe.json").read_text())
    loss = recipe["masked_language_loss"]
    assert loss["last_200_steps"] < loss["first_200_steps"]


def test_tiny_pretrained_beats_random_by_the_stated_margin():
    """The margin is models.GAIN_POINTS points of test accuracy after models.GAIN_STEPS steps.

    Random weights are as they were recorded; trained again with COURSE_TEST_ALL=1.
    """
    recorded = json.loads((models.TINY / "recipe.json").read_text())["test_accuracy_after_fine_tuning"]
    corpus, tokenizer = data.load(), data.tokenizer()
    found = recorded | {
        weights: fine_tuned_accuracy(weights, corpus, tokenizer, models.GAIN_STEPS)
        for weights in (("pretrained", "random") if EVERY else ("pretrained",))
    }
    assert found["pretrained"] >= found["random"] + models.GAIN_POINTS / 100, found
    assert found["pretrained"] >= corpus.majority + 0.2, found


def test_the_tiny_decoder_tells_completions_better_than_random_weights():
    """In a minute, on a task that it was not made for: what a function does, from its signature.

    Random weights are as they were recorded; trained again with COURSE_TEST_ALL=1.
    """
    recorded = json.loads((models.TINY_DECODER / "recipe.json").read_text())["completion_loss_after_fine_tuning"]
    (train, test), tokenizer = data.completions(), data.tokenizer()
    splits, losses = (train, test.select(range(recorded["of_texts"]))), recorded
    for weights in ("pretrained", "random") if EVERY else ("pretrained",):
        losses = losses | {weights: fine_tuned_loss(weights, splits, tokenizer, recorded["steps"])}
    assert losses["pretrained"]["after"] < losses["pretrained"]["before"] - 0.15, losses
    assert losses["pretrained"]["after"] < losses["random"]["after"] - 1, losses
    # A GPU draws other numbers for dropout.
    nearly = pytest.approx(recorded["pretrained"]["after"], abs=0.25 if torch.cuda.is_available() else 0.1)
    assert losses["pretrained"]["after"] == nearly
    assert sum(path.stat().st_size for path in models.TINY_DECODER.iterdir()) < 10 * 2**20


@pytest.mark.parametrize(("kind", "packaged"), [("encoder", models.TINY), ("decoder", models.TINY_DECODER)])
def test_whoever_makes_it_again_has_all_its_files(kind, packaged, tmp_path):
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "mine").touch()
    pretrain_tiny.main([kind, "--steps", "2", "--out", str(tmp_path / kind)])
    made = {path.name for path in (tmp_path / kind).iterdir()}
    assert made == {"mine"} | {path.name for path in packaged.iterdir()}, "what else was in the folder stays"
    made, committed = (json.loads((folder / "recipe.json").read_text()) for folder in (tmp_path / kind, packaged))
    assert made["recipe"] | {"steps": 0} == committed["recipe"] | {"steps": 0}
    assert pretrain_tiny.KINDS[kind][1] == committed["recipe"], "the command's own steps are others"


def test_a_causal_model_of_any_decoder():
    for name in ("gpt2", "llama-2-7b"):
        with torch.device("meta"):
            model = models.untrained(models.config(name), causal=True)
        assert model.get_output_embeddings().weight.shape[0] == models.config(name).vocab_size
    with pytest.raises(ValueError, match="for which transformers has a causal language model"):
        models.untrained(models.config("deberta-v3-base"), causal=True)


def test_a_name_of_the_hub_is_that_of_its_architecture():
    assert models.named("microsoft/deberta-v3-large") == "deberta-v3-large"
    assert models.named("bert-large-uncased") == "bert-large-uncased" and models.named("nobody/none") == "nobody/none"

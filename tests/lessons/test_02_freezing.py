import copy

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails
from tutorial_utils import measure

LESSON = lesson("02")
COPIED = copied(LESSON)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.base_model.requires_grad_(False)", "pass"),
        ("stack[layers:]", "stack[layers + 1:]"),
        (
            "[p for p in model.parameters() if p.requires_grad]",
            "[p for p in model.parameters() if p.requires_grad][:9]",
        ),
        (
            "model(**batch).loss.backward()",
            "(2 * model(**batch).loss).backward(); model.base_model.embeddings.word_embeddings.weight.data += 1e-6",
        ),
    ],
    ids=["nothing frozen", "a layer too many", "weights that the optimizer does not get", "frozen weights that move"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def peak(layers):
    model = regressor(layers=4)
    if layers is not None:
        COPIED["freeze"](model, layers)
    optimizer = COPIED["new_optimizer"](model, lr=1e-3)
    loader = DataLoader(Ratings(64), batch_size=64)
    return measure.memory(lambda: COPIED["train_epoch_frozen"](model, optimizer, loader), model, optimizer).peak


def test_copied():
    """A DistilBERT regression: half the layers frozen keep their weights, the rest learns, in less memory."""
    model = regressor(layers=4)
    before = copy.deepcopy(dict(model.named_parameters()))
    COPIED["freeze"](model, 2)
    frozen = {name for name in before if "embeddings" in name or "layer.0." in name or "layer.1." in name}
    assert frozen == {name for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = COPIED["new_optimizer"](model, lr=1e-3)
    for _ in range(2):
        COPIED["train_epoch_frozen"](model, optimizer, DataLoader(Ratings(32), batch_size=8))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) is (name in frozen), name
    assert {p for group in optimizer.param_groups for p in group["params"]} == {
        p for p in model.parameters() if p.requires_grad
    }
    assert peak(2) < 0.65 * peak(None) and peak(4) < 0.25 * peak(None)


def test_frozen_layers_do_without_dropout():
    model = regressor(layers=4)
    COPIED["freeze"](model, 2)
    COPIED["train_epoch_frozen"](model, None, [])
    modes = [layer.training for layer in model.distilbert.transformer.layer]
    assert modes == [False, False, True, True] and not model.distilbert.embeddings.training


@pytest.mark.parametrize("name", ["electra", "roberta", "deberta-v2"])
def test_other_encoders(name):
    """What stands beside the layers is frozen too: the first layer that trains is where the gradient ends."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    settings = AutoConfig.for_model(
        name, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=100,
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_biased_input=name != "deberta-v2",
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(settings)
    COPIED["freeze"](model, 2)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("layer.2." in name or "pooler" in name or "classifier" in name for name in trained)
    reached = []
    for layer in model.base_model.encoder.layer:
        layer.register_forward_hook(
            lambda _, __, output: reached.append((output[0] if isinstance(output, tuple) else output).requires_grad)
        )
    model(input_ids=torch.ones(2, 8, dtype=torch.long)).logits.sum().backward()
    assert reached == [False, False, True]

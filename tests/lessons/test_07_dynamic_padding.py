import pytest
import torch
from stranger import Ratings, regressor

from notebooks import copied, lesson, proof_fails
from tutorial_utils import data

LESSON = lesson("07")
COPIED = copied(LESSON)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tiny(**batch.to(here.device))", "tiny(input_ids=batch['input_ids'], labels=batch['labels'])"),
        ("batches.insert(0, first)", "pass"),
        ("batches.insert(0, first)", "batches.insert(0, first + first[:1])"),
        ("    of_tokens = ", "    tokenizer.padding_side = 'left'\n    of_tokens = "),
    ],
    ids=["no attention mask", "a batch lost", "a text twice", "positions moved"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


class Uneven(Ratings):
    """Texts of 4 to 32 tokens."""

    def __getitem__(self, index):
        whole = super().__getitem__(index)
        ids = whole["input_ids"][: 4 + 7 * index % 29]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": whole["labels"]}


def test_copied():
    """A regression with a data set class of its own: the same predictions on fewer tokens, the longest text first."""
    model, examples, tokenizer = regressor().eval(), Uneven(26), data.tokenizer()
    lengths = [len(examples[i]["input_ids"]) for i in range(26)]
    predicted, tokens = {}, 0
    batches = list(COPIED["dynamic_loader"](examples, tokenizer, 4))
    for batch in batches:
        tokens += batch["input_ids"].numel()
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
        predicted |= dict(zip(batch["labels"].tolist(), output.tolist()))
    assert len(predicted) == 26 and sum(len(batch["labels"]) for batch in batches) == 26
    for i in range(26):
        alone = model(input_ids=examples[i]["input_ids"][None]).logits.item()
        assert predicted[examples[i]["labels"].item()] == pytest.approx(alone, abs=1e-5)
    assert tokens < 0.85 * 26 * max(lengths)
    assert batches[0]["input_ids"].shape[1] == max(lengths)


def test_another_seed_is_another_order_and_lengths_can_be_rounded_up():
    examples, tokenizer = Uneven(26), data.tokenizer()
    orders = [[i for batch in COPIED["dynamic_loader"](examples, tokenizer, 4, seed=seed).batch_sampler for i in batch]
              for seed in (0, 0, 1)]  # fmt: skip
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == list(range(26))
    rounded = COPIED["dynamic_loader"](examples, tokenizer, 4, multiple=8)
    assert all(batch["input_ids"].shape[1] % 8 == 0 for batch in rounded)


def test_labels_of_tokens_are_padded_with_what_the_loss_ignores():
    examples = [{"input_ids": [5] * n, "attention_mask": [1] * n, "labels": [1] * n} for n in (3, 6)]
    (batch,) = COPIED["dynamic_loader"](examples, data.tokenizer(), 2)
    assert sorted(batch["labels"].tolist()) == [[1, 1, 1, -100, -100, -100], [1] * 6]

import pytest
import torch
from stranger import regressor
from transformers import DataCollatorWithPadding

from notebooks import copied, lesson, proof_fails
from tutorial_utils import data

LESSON = lesson("10")
COPIED = copied(LESSON)
head_and_tail, windows = COPIED["head_and_tail"], COPIED["windows"]
example, pooled_logits = COPIED["example"], COPIED["pooled_logits"]
LAST = "for start in [*range(0, last, step), last]]"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (LAST, "for start in range(0, last + 1, step)]"),
        (LAST, "for start in [*range(0, last, step + 1), last]]"),
        (LAST, "for start in range(0, len(ids), step)]"),
        ("ids[len(ids) - (room - head):]", "ids[-(room - head):]"),
        ("ids[:head] + ids", "ids[:head + 1] + ids"),
        (".index_add(0, owners, logits) / owners.bincount()[:, None]", ".index_add(0, owners, logits)"),
        ("model(**batch.to(model.device)).logits", 'model(batch.to(model.device)["input_ids"]).logits'),
        ("*ids, tokenizer.sep_token_id]", "*ids]"),
    ],
    ids=[
        "the end is lost",
        "a longer step",
        "a short last window",
        "all, where no tail is left",
        "one more",
        "a sum",
        "padding is read",
        "no [SEP]",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


@pytest.mark.parametrize("head", [0, 3, 7, 14, None])
@pytest.mark.parametrize("length", [0, 1, 13, 14, 15, 200])
def test_head_and_tail(length, head):
    ids = list(range(length))
    kept = head_and_tail(ids, 14, head)
    assert len(kept) == min(length, 14) and kept == sorted(set(kept))
    if length > 14:
        first = 3 if head is None else head
        assert kept[:first] == ids[:first] and kept[first:] == ids[length - 14 + first :]


@pytest.mark.parametrize(("length", "expected"), [(0, 1), (5, 1), (14, 1), (15, 2), (24, 2), (25, 3), (34, 3), (35, 4)])
def test_windows(length, expected):
    found = windows(list(range(length)), 14, 10)
    assert len(found) == expected and {token for part in found for token in part} == set(range(length))
    assert {len(part) for part in found} == {min(length, 14)}


def test_copied():
    """A stranger's regression on long texts: it trains on windows, and a pooled score is the mean of its windows'."""
    tokenizer = data.tokenizer()
    collate = DataCollatorWithPadding(tokenizer)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 500, (int(length),), generator=generator).tolist() for length in (3, 40, 16, 90, 17)]
    parts = [[example(part, tokenizer) for part in windows(ids, 16, 8)] for ids in texts]
    assert example([7], tokenizer, 0.5) == {
        "input_ids": [tokenizer.cls_token_id, 7, tokenizer.sep_token_id],
        "attention_mask": [1] * 3,
        "labels": 0.5,
    }

    class Two(torch.nn.Module):  # DistilBERT takes no token types, which the collator does not make here
        def __init__(self):
            super().__init__()
            self.model = regressor()
            self.device = torch.device("cpu")

        def forward(self, **batch):
            return self.model(**batch)

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        loss = torch.stack([model(**collate(own)).logits.mean() - i / 5 for i, own in enumerate(parts)]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    scores = {size: pooled_logits(model, parts, collate, batch_size=size) for size in (1, 3, 64)}
    assert scores[64].shape == (5, 1) and not model.training
    with torch.no_grad():
        alone = torch.stack([model(**collate(own)).logits.mean(0) for own in parts])
    for size, found in scores.items():
        assert torch.allclose(found, alone, atol=1e-5), size
    assert len(parts[0]) == 1 and len(parts[3]) > 8

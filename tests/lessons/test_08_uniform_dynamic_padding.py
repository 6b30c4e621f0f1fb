import pytest
import torch
from stranger import regressor
from torch.utils.data import DataLoader, Dataset

from notebooks import copied, lesson, proof_fails

LESSON = lesson("08")
COPIED = copied(LESSON)


class Reviews(Dataset):
    """Texts of uneven lengths, most of them short."""

    def __init__(self, count=203):
        generator = torch.Generator().manual_seed(3)
        self.lengths = (torch.rand(count, generator=generator) * 4).exp().long() + 2
        self.rows = [torch.randint(5, 500, (length,), generator=generator) for length in self.lengths.tolist()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index].tolist()}


def padded(rows):
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def tokens(batches, lengths):
    return sum(len(batch) * lengths[batch].max().item() for batch in batches)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[torch.tensor(order).argsort()]", ""),
        ("[torch.tensor(order).argsort()]", "[torch.tensor(order)]"),
        ("manual_seed(seed)", "manual_seed(0)"),
        (  # of few texts only, or the counts of the whole corpus would notice before the proof
            "[batch.tolist() for batch in batches]",
            "[batch.tolist() for batch in batches if len(batch) == batch_size or len(lengths) > 100]",
        ),
        ("for i in 2 + torch.randperm", "for i in 1 + torch.randperm"),
    ],
    ids=["order not restored", "the order for its inverse", "a fixed seed", "the last batch dropped", "a text twice"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_copied():
    """On a stranger's texts: the same predictions from far fewer tokens, and shuffled batches of like lengths."""
    reviews, model, computed = Reviews(), regressor().eval(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    wanted = torch.cat([model(**padded([row])).logits for row in (reviews[i] for i in range(len(reviews)))]).detach()
    computed.clear()
    for batch in DataLoader(reviews, batch_size=16, collate_fn=padded):
        model(**batch)
    in_order = sum(computed)
    computed.clear()
    found = COPIED["predict_sorted"](model, reviews, 16, padded)
    assert (found - wanted).abs().max() <= 1e-5
    assert reviews.lengths.sum() <= sum(computed) < 0.5 * in_order

    batches = COPIED["length_batches"](reviews.lengths.tolist(), 16, seed=1)
    assert sorted(row for batch in batches for row in batch) == list(range(len(reviews)))
    assert tokens(batches, reviews.lengths) < 0.5 * tokens(
        torch.randperm(len(reviews), generator=torch.Generator().manual_seed(0)).split(16), reviews.lengths
    )
    for batch in DataLoader(reviews, batch_sampler=batches, collate_fn=padded):
        assert batch["attention_mask"].float().mean() > 0.5


def test_orders():
    length_batches, lengths = COPIED["length_batches"], Reviews(1000).lengths
    assert (
        length_batches(lengths, 8, seed=5) == length_batches(lengths, 8, seed=5) != length_batches(lengths, 8, seed=6)
    )
    for settings in ({}, {"noise": 0}, {"noise": 0, "mega_batches": 7}, {"noise": 3.0, "mega_batches": 1}):
        batches = length_batches(lengths, 8, seed=5, **settings)
        assert sorted(row for batch in batches for row in batch) == list(range(1000)), settings
        sizes = [len(batch) * lengths[batch].max().item() for batch in batches]
        assert sorted(sizes, reverse=True)[:2] == sizes[:2], "the two largest batches come first"
    widest = [lengths[batch].max().item() for batch in length_batches(lengths, 8, seed=5)[2:]]
    assert widest != sorted(widest) and widest != sorted(widest, reverse=True)


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 33])
def test_few_texts(count):
    batches = COPIED["length_batches"](list(range(1, count + 1)), 16, seed=0)
    assert sorted(row for batch in batches for row in batch) == list(range(count))
    assert len(batches) == -(-count // 16)


def test_noise_beats_mega_batches():
    """Less padding than with mega-batches of 50, and fewer pairs of texts that meet again in the next epoch."""
    length_batches = COPIED["length_batches"]
    lengths = (torch.rand(8000, generator=torch.Generator().manual_seed(4)) * 6).exp().long() + 4

    def trade(**settings):
        first, second = (length_batches(lengths, 16, seed, **settings) for seed in (0, 1))
        batch_of = torch.empty(len(lengths), dtype=torch.long)
        for number, batch in enumerate(second):
            batch_of[batch] = number
        again = [batch_of[batch].bincount() for batch in first]
        return tokens(first, lengths), sum((n * (n - 1)).sum().item() for n in again)

    mega_tokens, mega_again = trade(noise=0, mega_batches=50)
    noise_tokens, noise_again = trade(noise=1.1)
    assert noise_tokens < mega_tokens and noise_again < mega_again

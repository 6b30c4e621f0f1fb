import warnings

import pytest
import torch
from stranger import regressor
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorWithPadding

from notebooks import copied, lesson, proof_fails, source
from tutorial_utils import data

LESSON = lesson("06")
TOKENIZED_ONCE = copied(LESSON)["TokenizedOnce"]
CUT = "for tokenize in (tokenizer, lambda t, **o: slow(t, truncation=True, max_length=64, **o)))"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model_max_length=fast.model_max_length)", "do_lower_case=False)"),
        ("sorted(vocabulary, key=vocabulary.get)", "sorted(vocabulary)"),
        ("for tokenize in (tokenizer, slow))", CUT),
        ("plain(text[start:end])", "plain(text[start + 1:end + 1])"),
        ("sorted(vocabulary, key=vocabulary.get)", "sorted(vocabulary, key=vocabulary.get)[:4000]"),
    ],
    ids=[
        "case kept",
        "another order of the vocabulary",
        "cut on one side",
        "offsets shifted",
        "half of the vocabulary",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_the_same_ids_on_the_whole_corpus():
    namespace = {}
    cell = next(cell for cell in LESSON.code if "def python_tokenizer" in source(cell))
    exec(source(cell).split("\n\n\nslow =")[0], namespace)
    fast = data.tokenizer()
    slow = namespace["python_tokenizer"](fast)
    corpus = data.load()
    texts = [row["text"] for split in (corpus.train, corpus.test) for row in split]
    mine, theirs = (tokenize(texts, verbose=False)["input_ids"] for tokenize in (fast, slow))
    assert len(mine) == len(theirs) == len(texts) > 1000
    assert [text for text, a, b in zip(texts, mine, theirs, strict=True) if a != b] == []


class Reviews(Dataset):
    """A stranger's data set: a text and a score."""

    texts = ["Tokenizers split text.", "A much longer text about nothing in particular, " * 40, "Short.", "Four."]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], index / 4


@pytest.mark.parametrize("workers", [0, 1])
def test_copied(workers):
    """A regression on a data set of its own: every text once, in order, cut, unpadded; and it trains."""
    tokenizer, reviews = data.tokenizer(), Reviews()
    texts, scores = zip(*(reviews[i] for i in range(len(reviews))), strict=True)
    examples = TOKENIZED_ONCE(texts, scores, tokenizer, max_length=32, batch_size=3)
    assert len(examples) == 4 and [example["labels"] for example in examples] == list(scores)
    for example, text in zip(examples, texts, strict=True):
        alone = tokenizer(text, truncation=True, max_length=32)
        assert {name: example[name] for name in alone} == dict(alone) and len(example["input_ids"]) <= 32
    assert len({len(example["input_ids"]) for example in examples}) > 1, "padded"
    assert examples[-1] == examples[3]
    loader = DataLoader(examples, batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer), num_workers=workers)
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in list(loader) * 20:
        ids = batch["input_ids"] % 500  # the stranger's model has a smaller vocabulary
        loss = model(input_ids=ids, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])


def test_kept_in_few_bytes():
    """The effect: six bytes a token of a BERT tokenizer's three outputs, and no list of integers kept."""
    texts = ["some words of a text"] * 500
    examples = TOKENIZED_ONCE(texts, [0] * 500, data.tokenizer(), max_length=64)
    tokens = examples.ends[-1]
    assert tokens == sum(len(ids) for ids in data.tokenizer()(texts)["input_ids"])
    assert sum(column.untyped_storage().nbytes() for column in examples.columns.values()) == 6 * tokens


def test_tokenizes_once_in_batches():
    calls, tokenizer = [], data.tokenizer()

    class Counting:
        is_fast = True

        def __call__(self, texts, **options):
            calls.append(len(texts))
            return tokenizer(texts, **options)

    examples = TOKENIZED_ONCE(["a text"] * 25, [0] * 25, Counting(), max_length=8, batch_size=10)
    for _ in range(3):
        assert len(list(examples)) == 25
    assert calls == [10, 10, 5]


def test_a_python_tokenizer_is_named():
    class Slow:
        is_fast = False

        def __call__(self, texts, **_):
            return {"input_ids": [[1]] * len(texts)}

    with pytest.warns(UserWarning, match="Slow is written in Python"):
        TOKENIZED_ONCE(["a"], [0], Slow(), 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TOKENIZED_ONCE(["a"], [0], data.tokenizer(), 8)

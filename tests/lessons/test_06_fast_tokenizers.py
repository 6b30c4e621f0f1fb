import pytest
import torch
from stranger import regressor
from torch.utils.data import DataLoader, Dataset

from notebooks import copied, lesson, proof_fails, source
from tutorial_utils import data

LESSON = lesson("06")
TOKENIZE = copied(LESSON)["tokenize_once"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model_max_length=fast.model_max_length)", "do_lower_case=False)"),
        ("sorted(vocabulary, key=vocabulary.get)", "sorted(vocabulary)"),
        ("slow(texts, verbose=False)", "slow(texts, verbose=False, truncation=True, max_length=64)"),
        ("plain(text[start:end])", "plain(text[start + 1:end + 1])"),
    ],
    ids=["case kept", "another order of the vocabulary", "cut on one side", "offsets of another text"],
)  # fmt: skip
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_the_same_ids_on_the_whole_corpus():
    namespace = {}
    exec(
        source(next(cell for cell in LESSON.code if "def python_tokenizer" in source(cell))).split("\n\n\nslow =")[0],
        namespace,
    )
    fast = data.tokenizer()
    slow = namespace["python_tokenizer"](fast)
    corpus = data.load()
    texts = [corpus.train[i]["text"] for i in range(0, len(corpus.train), 3)]
    for text, a, b in zip(texts, fast(texts, verbose=False)["input_ids"], slow(texts, verbose=False)["input_ids"]):
        assert a == b, text


class Reviews(Dataset):
    """A stranger's data set: a text and a score."""

    texts = ["Tokenizers split text.", "A much longer text about nothing in particular, " * 40, "Short.", "Four."]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], index / 4


def test_copied():
    """A regression on a data set of its own: every text once, in order, cut, unpadded; and it trains."""
    from transformers import DataCollatorWithPadding

    tokenizer, reviews = data.tokenizer(), Reviews()
    texts, scores = zip(*(reviews[i] for i in range(len(reviews))))
    examples = TOKENIZE(texts, scores, tokenizer, max_length=32, batch_size=3)
    assert [example["labels"] for example in examples] == list(scores)
    for example, text in zip(examples, texts):
        alone = tokenizer(text, truncation=True, max_length=32)
        assert example["input_ids"] == alone["input_ids"] and len(example["input_ids"]) <= 32
    assert len({len(example["input_ids"]) for example in examples}) > 1, "padded"
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        for batch in DataLoader(examples, batch_size=4, collate_fn=DataCollatorWithPadding(tokenizer)):
            ids = batch["input_ids"] % 500  # the stranger's model has a smaller vocabulary
            loss = model(input_ids=ids, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])


def test_a_python_tokenizer_is_named(capsys):
    class Slow:
        is_fast = False

        def __call__(self, texts, **_):
            return {"input_ids": [[1]] * len(texts)}

    TOKENIZE(["a"], [0], Slow(), 8)
    assert "Slow is written in Python" in capsys.readouterr().out

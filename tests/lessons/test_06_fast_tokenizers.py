import copy
import tempfile
from types import SimpleNamespace

import numpy
import pandas
import pytest
import strangers
import torch
import transformers
from stranger import regressor
from strangers import competition, same_weights
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from notebooks import copied, lesson, proof_fails, run, source
from tutorial_utils import data

LESSON = lesson("06")
TokenizedOnce = copied(LESSON)["TokenizedOnce"]
CUT = "for tokenize in (tokenizer, lambda t, **o: slow(t, truncation=True, max_length=64, **o)))"
SORTED = "*sorted(vocabulary, key=vocabulary.get)"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model_max_length=fast.model_max_length)", "do_lower_case=False)"),
        (SORTED, "*sorted(vocabulary)"),
        (SORTED, f"{SORTED}[:4000]"),
        ("for tokenize in (tokenizer, slow))", CUT),
        ("normal(text[start:end])", "normal(text[start + 1:end + 1])"),
        ("self.ends[index:index + 2]", "(self.ends[index:index + 2] - 1).clamp(min=0)"),
        ("rows, parts, sizes = list(rows)", "rows, parts, sizes = list(rows)[::-1]"),
    ],
    ids=[
        "case kept",
        "another order of the vocabulary",
        "half of the vocabulary",
        "cut on one side",
        "offsets shifted",
        "rows shifted by a token",
        "rows turned around",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_the_same_ids_on_the_whole_corpus():
    corpus, fast = data.load(), data.tokenizer()
    texts = [row["text"] for split in (corpus.train, corpus.test) for row in split]
    namespace = {"tempfile": tempfile, "tokenizer": fast, "some": texts[:300]}
    namespace |= {name: getattr(transformers, name) for name in ("BertTokenizerLegacy", "DebertaV2Tokenizer")}
    run(source(next(cell for cell in LESSON.code if cell["id"] == "tokenizers")), namespace)
    mine, theirs = (tokenize(texts, verbose=False)["input_ids"] for tokenize in (fast, namespace["slow"]))
    assert len(mine) == len(theirs) == len(texts) > 1000
    assert [text for text, a, b in zip(texts, mine, theirs, strict=True) if a != b] == []


class Reviews(Dataset):
    """A stranger's data set: a text and a score."""

    texts = ["Tokenizers split text.", "A much longer text about nothing in particular, " * 40, "Short.", "Four."]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], index / 4


def encode(texts):
    return data.tokenizer()(texts, truncation=True, max_length=32)


@pytest.mark.parametrize("workers", [0, 1])
def test_copied(workers):
    """A regression on a data set of its own: every text once, in order, cut, unpadded; and it trains."""
    tokenizer, reviews = data.tokenizer(), Reviews()
    texts, scores = zip(*(reviews[i] for i in range(len(reviews))), strict=True)
    examples = TokenizedOnce(encode, texts, batch_size=3, labels=scores)
    assert len(examples) == 4 and [example["labels"] for example in examples] == list(scores)
    for example, text in zip(examples, texts, strict=True):
        alone = encode(text)
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
    examples = TokenizedOnce(encode, texts)
    tokens = examples.ends[-1]
    assert tokens == sum(len(ids) for ids in encode(texts)["input_ids"])
    assert sum(column.untyped_storage().nbytes() for column in examples.tokens.values()) == 6 * tokens


def test_tokenizes_once_in_batches():
    calls = []

    def counting(texts):
        calls.append(len(texts))
        return encode(texts)

    examples = TokenizedOnce(counting, ["a text"] * 25, batch_size=10)
    for _ in range(3):
        assert len(list(examples)) == 25
    assert calls == [10, 10, 5]


def test_columns_go_by_place_and_none_is_lost():
    """Those of a data frame whose rows were drawn have other numbers in their index."""
    frame = pandas.DataFrame({"text": ["one", "two words", "three more words"], "label": [5, 6, 7]})[::-1]
    examples = TokenizedOnce(encode, frame.text, labels=frame.label)
    assert [(len(row["input_ids"]), row["labels"]) for row in examples] == [(5, 7), (4, 6), (3, 5)]
    for labels in ([0, 1], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="zip"):
            TokenizedOnce(encode, frame.text, labels=labels)
    assert list(TokenizedOnce(encode, [])) == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("return_offsets_mapping", r"bad operand type for abs\(\)"),
        ("return_overflowing_tokens", "'int' object is not iterable"),
    ],
)
def test_what_encode_may_not_return_ends_in_the_pages_errors(asked, said):
    with pytest.raises(TypeError, match=said):
        TokenizedOnce(lambda texts: data.tokenizer()(texts, truncation=True, **{asked: True}), ["one", "two words"])
    page = "".join(source(cell) for cell in LESSON.cells if cell["cell_type"] == "markdown")
    assert said.replace("\\", "") in page


def test_labels_of_tokens_and_pairs_of_texts():
    rows = [("a question", "and its answer"), ("another", "one more answer, which is longer")]
    pairs = TokenizedOnce(lambda rows: data.tokenizer()(*map(list, zip(*rows, strict=True))), rows)
    assert [dict(data.tokenizer()(*row)) for row in rows] == list(pairs)
    ids = [[-100, 5, 127], [-100, 30_000]]
    assert [row["labels"] for row in TokenizedOnce(lambda _: {"input_ids": ids, "labels": ids}, "ab")] == ids
    for labels in ([[0.5, 0.25, 1.0], [-1.0, 2.0]], [[-1000, 3, 0], [-129, 2]]):  # nothing becomes another number
        encoded = {"input_ids": ids, "labels": labels}
        assert [row["labels"] for row in TokenizedOnce(lambda _, given=encoded: given, "ab")] == labels


@pytest.fixture
def asked(monkeypatch):
    """How many texts each call of a tokenizer was given."""
    calls, own = [], PreTrainedTokenizerBase.__call__

    def counting(self, text=None, *arguments, **options):
        calls.append(1 if isinstance(text, str) else len(text))
        return own(self, text, *arguments, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", counting)
    return calls


LAZY = """
class Lazy(torch.utils.data.Dataset):
    def __init__(self, frame, tokenizer):
        self.frame, self.tokenizer = frame, tokenizer

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, i):
        row = self.frame.iloc[i]
        return {**self.tokenizer(row.text, truncation=True, max_length=64), "labels": row.label}
"""
TOKENIZED = "    rows = tokenizer(frame.text.tolist(), truncation=True, max_length=64)\n"
LISTED = '    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(rows["input_ids"], frame.label)]\n'


def test_in_a_strangers_classifier(stranger_files, asked, capsys):
    """Whose own loader tokenizes once already: made to do it in __getitem__, then as the page says."""
    files = {name: stranger_files / f"{name}.csv" for name in ("train", "valid")}
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=2, batch_size=32)
    plain = strangers.load("classifier", LAZY, {TOKENIZED: "", LISTED: "    rows = Lazy(frame, tokenizer)\n"})
    mine = "    def encode(texts):\n        return tokenizer(texts, truncation=True, max_length=64)\n\n"
    edits = {TOKENIZED: mine, LISTED: "    rows = TokenizedOnce(encode, frame.text, labels=frame.label)\n"}
    changed = strangers.load("classifier", LESSON.source("copy"), edits)
    before = plain.main(arguments)
    assert asked == [1] * 2 * (128 + 40)
    asked.clear()
    after = changed.main(arguments)
    assert asked == [128, 40]
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == printed[2:], "the same accuracy"
    torch.manual_seed(42)
    start = plain.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    assert same_weights(before, after, start)


IN_A_COMPETITION = """
from torch.utils.data import StackDataset, Subset
from transformers import DataCollatorWithPadding

def encode(texts):
    return CFG.tokenizer(texts, truncation=True, max_length=CFG.max_len)

def pad_pairs(rows):
    inputs, targets = zip(*rows)
    return CFG.pad(list(inputs)), torch.stack(targets)
"""
FOLDS = '    folds["fold"] = np.arange(len(folds)) % CFG.n_folds\n'
COMPETITION_EDITS = {
    FOLDS: FOLDS + "    CFG.tokenizer = tokenizer\n"
    '    CFG.pad = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=CFG.max_len)\n'
    "    targets = torch.tensor(folds[CFG.targets].values, dtype=torch.float)\n"
    "    CFG.rows = StackDataset(TokenizedOnce(encode, folds.text), targets)\n",
    "DataLoader(TextDataset(train, tokenizer), CFG.batch_size, shuffle=True, drop_last=True)":
    "DataLoader(Subset(CFG.rows, np.flatnonzero(folds.fold != fold)), CFG.batch_size, shuffle=True,\n"
    "                              drop_last=True, collate_fn=pad_pairs)",
    "DataLoader(TextDataset(valid, tokenizer), 2 * CFG.batch_size, shuffle=False)":
    "DataLoader(Subset(CFG.rows, np.flatnonzero(folds.fold == fold)), 2 * CFG.batch_size, collate_fn=pad_pairs)",
    "DataLoader(TextDataset(test, tokenizer, train=False), 2 * CFG.batch_size, shuffle=False)":
    "DataLoader(TokenizedOnce(encode, test.text), 2 * CFG.batch_size, collate_fn=CFG.pad)",
}  # fmt: skip


def test_in_a_strangers_competition_script(stranger_files, monkeypatch, asked, capsys):
    """Folds and all: each text is tokenized once, and trains and predicts the same, in the rows' order."""
    plain = competition(stranger_files, monkeypatch)
    changed = competition(stranger_files, monkeypatch, LESSON.source("copy") + IN_A_COMPETITION, COMPETITION_EDITS)
    for script in (plain, changed):
        script.CFG.apex, script.CFG.epochs, script.CFG.trn_folds = False, 2, [0, 1]
    before, submission = plain.main()
    assert asked == [1] * 2 * (2 * (96 + 32) + 50)
    asked.clear()
    after, submitted = changed.main()
    assert asked == [128, 50]
    printed = capsys.readouterr().out.splitlines()
    assert printed[:4] == printed[4:], "the same losses and scores"
    assert same_weights(before, after, plain.CustomModel())
    assert submission.equals(submitted) and submitted.notna().all(axis=None)


def test_in_a_strangers_decoder(stranger_files, asked, capsys):
    mine = """
def encode(rows, tokenizer):
    prompts, answers = (tokenizer([row[name] for row in rows], add_special_tokens=False)["input_ids"]
                        for name in ("prompt", "completion"))
    pairs = [(prompt, answer + [tokenizer.sep_token_id]) for prompt, answer in zip(prompts, answers)]
    return {"input_ids": [(prompt + answer)[:MAX_LENGTH] for prompt, answer in pairs],
            "labels": [([-100] * len(prompt) + answer)[:MAX_LENGTH] for prompt, answer in pairs]}
"""
    old = "rows = [tokenize(json.loads(line), tokenizer) for line in lines]"
    new = "rows = TokenizedOnce(lambda rows: encode(rows, tokenizer), map(json.loads, lines))"
    plain, changed = strangers.load("decoder"), strangers.load("decoder", LESSON.source("copy") + mine, {old: new})
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before = plain.main(*files)
    assert asked == [1] * 2 * (128 + 40)
    asked.clear()
    after = changed.main(*files)
    assert asked == [128, 128, 40, 40]
    printed = capsys.readouterr().out.splitlines()
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :], "the same losses and perplexity"
    start = plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama")
    assert same_weights(before, after, start)


def test_deberta_in_sentencepiece():
    """Where it is installed: the same pieces as in Rust, but for cuts that score alike."""
    pytest.importorskip("sentencepiece")
    namespace = {}
    for cell in LESSON.code:
        if {"setup"} & set(cell["metadata"].get("tags", [])) or cell["id"] in ("start", "tokenizers", "sentencepiece"):
            run(source(cell), namespace)
    rust, cpp = namespace["deberta"], namespace["in_cpp"](namespace["deberta"])
    options = {"add_special_tokens": False, "verbose": False}
    one, other = (tokenize(namespace["spaced"], **options)["input_ids"] for tokenize in (rust, cpp))
    differ = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    assert not cpp.is_fast and len(differ) <= 0.02 * len(one) and all(len(a) == len(b) for a, b in differ)


def test_lists_of_another_length_are_refused():
    """Such as start positions, or the labels of a sequence-to-sequence model, which would come out shifted."""
    with pytest.raises(AssertionError, match="as long as input_ids"):
        TokenizedOnce(lambda rows: {"input_ids": [[1, 2, 3]] * len(rows), "start": [[0]] * len(rows)}, range(3))
    with pytest.raises(ValueError, match="zip"):  # windows: more rows than texts
        TokenizedOnce(lambda rows: {"input_ids": [[1, 2]] * (len(rows) + 1)}, range(3))


def test_numbers_of_numpy_keep_their_fractions():
    for scores in (numpy.linspace(0, 1, 3), numpy.linspace(0, 1, 3, dtype=numpy.float32)):
        rows = TokenizedOnce(lambda rows, scores=scores: {"input_ids": [[1, 2, 3]], "labels": [scores]}, range(1))
        assert rows[0] == {"input_ids": [1, 2, 3], "labels": [0.0, 0.5, 1.0]}


@pytest.mark.parametrize("bos", [None, "[CLS]"], ids=["BERT's", "with a first token"])
def test_a_long_prompt_keeps_its_end_and_the_answer(bos):
    tokenizer = copy.deepcopy(data.tokenizer())
    tokenizer.bos_token = bos
    namespace = {"tokenizer": tokenizer}
    exec(source(next(cell for cell in LESSON.cells if cell.get("id") == "shapes")), namespace)
    encode_answers = namespace["encode_answers"]
    first = [] if bos is None else [tokenizer.bos_token_id]
    question, answer = (tokenizer(text, add_special_tokens=False).input_ids for text in ("why", "a value"))
    for words, most in ((600, 64), (2, 64), (600, len(answer) + 2), (600, 2)):
        row = {"prompt": "returns " * words + "why", "answer": "a value"}
        (ids,), (labels,) = encode_answers([row], most=most).values()
        learned = [label for label in labels if label != -100]
        assert len(ids) == len(labels) <= most and ids[: len(first)] == first
        assert learned == ids[-len(learned) :] == answer[: len(learned) - 1] + [tokenizer.sep_token_id]
        if most == 64:
            assert ids[: -len(learned)][-len(question) :] == question, "the prompt lost its end"

from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import strangers
import torch
from stranger import Ratings, regressor
from strangers import counted, same_weights
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails
from tutorial_utils import data, measure

LESSON = lesson("07")
COPIED = copied(LESSON)
dynamic_loader, rows_of = COPIED["dynamic_loader"], COPIED["rows_of"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model(**batch.to(device))", "model(input_ids=batch.to(device)['input_ids'], labels=batch['labels'])"),
        ("(dynamic_loader(eight, tokenizer", "(dynamic_loader(eight[shuffle:], tokenizer"),
        ('padding="longest"', 'padding=(setattr(tokenizer, "padding_side", "left"), "longest")[1]'),
        ("    inputs, *targets =", "    rows = [*rows[:-1], rows[0]]\n    inputs, *targets ="),
        ("partial(pad_rows, pad=pad), **options", "partial(pad_rows, pad=pad), **options | dict(shuffle=True)"),
    ],
    ids=["no attention mask", "a text lost", "positions moved", "a text twice", "validation shuffled"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


class Uneven(Ratings):
    """Texts of 4 to 32 tokens, and their scores."""

    def __getitem__(self, index):
        whole = super().__getitem__(index)
        ids = whole["input_ids"][: 4 + 7 * index % 29]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": whole["labels"]}


def test_copied():
    """A regression with a data set class of its own: the same predictions in the rows' order, on fewer tokens."""
    model, rows, tokenizer = regressor().eval(), Uneven(26), data.tokenizer()
    batches = list(dynamic_loader(rows, tokenizer, 2))
    outputs = [model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits[:, 0] for b in batches]
    alone = [model(input_ids=row["input_ids"][None]).logits.item() for row in (rows[i] for i in range(26))]
    torch.testing.assert_close(torch.cat(outputs), torch.tensor(alone), atol=1e-5, rtol=0)
    assert torch.equal(torch.cat([batch["labels"] for batch in batches]), rows.scores)
    longest = max(len(rows[i]["input_ids"]) for i in range(26))
    assert sum(batch["input_ids"].numel() for batch in batches) < 0.85 * 26 * longest


def test_a_loader_shuffles_anew_in_each_epoch_and_only_when_asked():
    rows = rows_of(data.tokenizer(), ["one", "two words", "three words here"] * 8, 16, number=range(24))

    def epoch(loader):
        return torch.cat([batch["number"] for batch in loader]).tolist()

    shuffled = dynamic_loader(rows, data.tokenizer(), 4, shuffle=True, generator=torch.Generator().manual_seed(0))
    first, second = epoch(shuffled), epoch(shuffled)
    assert first != second and sorted(first) == sorted(second) == list(range(24))
    assert epoch(dynamic_loader(rows, data.tokenizer(), 4)) == list(range(24))


def test_a_lost_label_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        rows_of(data.tokenizer(), ["one", "two"], 16, labels=[0])


def test_lengths_can_be_rounded_up_and_options_reach_the_loader():
    tokenizer = data.tokenizer()
    rows = rows_of(tokenizer, ["one", "some more words than one"] * 5, 16)
    batches = list(dynamic_loader(rows, tokenizer, 4, multiple=8, drop_last=True))
    assert len(batches) == 2 and all(batch["input_ids"].shape[1] % 8 == 0 for batch in batches)


@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_of_tokens_are_padded_with_what_the_loss_ignores(side):
    tokenizer = data.tokenizer()
    tokenizer.padding_side = side
    rows = [{"input_ids": [5] * n, "attention_mask": [1] * n, "labels": [1] * n} for n in (3, 6)]
    (batch,) = dynamic_loader(rows, tokenizer, 2, multiple=8, labels_of_tokens=True)
    assert torch.equal(batch["labels"] != -100, batch["attention_mask"].bool())
    assert batch["labels"].shape == (2, 8) and (batch["labels"] != -100).sum(1).tolist() == [3, 6]


@pytest.mark.parametrize(
    "targets",
    [torch.rand(6, 2), numpy.random.rand(6, 2).astype("float32"), [0.5] * 6, [{"a": 1}] * 6],
    ids=["a tensor", "an array", "numbers", "dictionaries"],
)
def test_targets_beside_inputs(targets):
    tokenizer = data.tokenizer()
    rows = [*zip(rows_of(tokenizer, ["one", "two words"] * 3, 16), targets, range(6))]
    (batch,) = dynamic_loader(rows, tokenizer, 6)
    inputs, found, numbers = batch
    assert numbers.tolist() == list(range(6)) and inputs["input_ids"].shape == (6, 4)
    torch.testing.assert_close(found, torch.utils.data.default_collate([*targets]))


def test_it_crosses_to_workers():
    """Which a function inside a function could not."""
    tokenizer = data.tokenizer()
    rows = rows_of(tokenizer, ["one", "two words"] * 3, 16)
    loaders = (dynamic_loader(rows, tokenizer, 2, num_workers=n) for n in (0, 1))
    one, other = ([batch["input_ids"] for batch in loader] for loader in loaders)
    assert all(map(torch.equal, one, other))


def test_in_a_strangers_classifier(stranger_files, capsys):
    """Whose own loader pads to the longest already: made fixed, then as the page says."""
    files = {name: stranger_files / f"{name}.csv" for name in ("train", "valid")}
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=2)
    old = "DataLoader(rows, batch_size, shuffle=shuffle, collate_fn=DataCollatorWithPadding(tokenizer))"
    fixed = old.replace("Padding(tokenizer)", 'Padding(tokenizer, padding="max_length", max_length=64)')
    plain = strangers.load("classifier", edits={old: fixed})
    edits = {
        old: "dynamic_loader(rows, tokenizer, batch_size, shuffle=shuffle)",
        "    rows = tokenizer(frame.text.tolist(), truncation=True, max_length=64)\n": "",
        '    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(rows["input_ids"], frame.label)]\n':
        "    rows = rows_of(tokenizer, frame.text, 64, labels=frame.label)\n",
    }  # fmt: skip
    changed = strangers.load("classifier", LESSON.source("copy"), edits)
    (before, wide), (after, narrow) = counted(plain, arguments), counted(changed, arguments)
    one, other = capsys.readouterr().out.splitlines()
    assert one == other, "the same accuracy"
    torch.manual_seed(42)
    start = plain.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    assert same_weights(before, after, start)
    assert wide == (128 + 40) * 64 and narrow < 0.98 * wide


def competition(files, monkeypatch, copied="", edits=None):
    monkeypatch.setenv("DATA", str(files / "scores"))
    monkeypatch.setenv("MODEL", str(files / "bert"))
    script = strangers.load("competition", copied, {"    batch_size = 32\n": "    batch_size = 2\n", **(edits or {})})
    script.CFG.apex = False
    return script


LOADERS = {
    "train_loader = DataLoader(TextDataset(train, tokenizer), CFG.batch_size, shuffle=True, drop_last=True)": (
        "train, tokenizer", "CFG.batch_size, shuffle=True, drop_last=True"),
    "valid_loader = DataLoader(TextDataset(valid, tokenizer), 2 * CFG.batch_size, shuffle=False)": (
        "valid, tokenizer", "2 * CFG.batch_size"),
    "test_loader = DataLoader(TextDataset(test, tokenizer, train=False), 2 * CFG.batch_size, shuffle=False)": (
        "test, tokenizer, False", "2 * CFG.batch_size"),
}  # fmt: skip
ROWS = """
def make_rows(df, tokenizer, train=True):
    inputs = rows_of(tokenizer, df.text, CFG.max_len)
    return [*zip(inputs, torch.tensor(df[CFG.targets].values, dtype=torch.float))] if train else inputs
"""
ITS_OWN_DATA_SET = {  # which stays, without its padding
    'max_length=CFG.max_len, padding="max_length", truncation=True': "max_length=CFG.max_len, truncation=True",
    **{old: old.split(" = ")[0] + f" = dynamic_loader(TextDataset({its}), tokenizer, {options})"
       for old, (its, options) in LOADERS.items()},
}  # fmt: skip
ROWS_OF_THE_PAGE = {
    old: old.split(" = ")[0] + f" = dynamic_loader(make_rows({its}), tokenizer, {options})"
    for old, (its, options) in LOADERS.items()
}


@pytest.mark.parametrize(
    ("mine", "edits"), [("", ITS_OWN_DATA_SET), (ROWS, ROWS_OF_THE_PAGE)], ids=["its data set", "rows of the page"]
)
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, mine, edits):
    plain = competition(stranger_files, monkeypatch)
    changed = competition(stranger_files, monkeypatch, LESSON.source("copy") + mine, edits)
    ((before, submission), wide), ((after, submitted), narrow) = counted(plain), counted(changed)
    torch.manual_seed(42)
    assert same_weights(before, after, plain.CustomModel())
    assert (submission.id == submitted.id).all() and submitted.notna().all(axis=None)
    assert (submission - submitted).abs().max().max() <= 1e-3, "the same predictions, in the rows' order"
    assert wide == (96 + 32 + 50) * 64 and narrow < wide, "by how much is the texts' affair"


def test_a_competition_step_on_short_texts_takes_less_memory(stranger_files, monkeypatch):
    plain = competition(stranger_files, monkeypatch)
    changed = competition(stranger_files, monkeypatch, LESSON.source("copy") + ROWS, ROWS_OF_THE_PAGE)
    frame = plain.pd.read_csv(stranger_files / "scores" / "train.csv")
    frame = frame.iloc[frame.text.str.len().argsort()[:16]]
    tokenizer = plain.AutoTokenizer.from_pretrained(plain.CFG.model)

    def peak(loader):
        model = plain.CustomModel().to(plain.CFG.device)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler(enabled=False)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        step = partial(plain.train_fn, loader, model, plain.nn.SmoothL1Loss(), optimizer, scheduler, scaler)
        return measure.memory(step, model, optimizer).peak

    narrow = changed.dynamic_loader(changed.make_rows(frame, tokenizer), tokenizer, 16)
    assert peak(narrow) < 0.8 * peak(DataLoader(plain.TextDataset(frame, tokenizer), 16))


def test_a_shuffling_loader_gives_a_competition_other_predictions(stranger_files, monkeypatch):
    old = next(old for old in LOADERS if old.startswith("test_loader"))
    shuffling = {**ROWS_OF_THE_PAGE, old: ROWS_OF_THE_PAGE[old][:-1] + ", shuffle=True)"}
    right = competition(stranger_files, monkeypatch, LESSON.source("copy") + ROWS, ROWS_OF_THE_PAGE)
    wrong = competition(stranger_files, monkeypatch, LESSON.source("copy") + ROWS, shuffling)
    (_, submission), (_, submitted) = right.main(), wrong.main()
    assert (submission - submitted).abs().max().max() > 0.01


def test_in_a_strangers_decoder(stranger_files, capsys):
    """Whose own collator pads to the longest already: made fixed, then as the page says."""
    own = 'longest = max(len(e["input_ids"]) for e in examples)'
    plain = strangers.load("decoder", edits={own: "longest = MAX_LENGTH"})
    edits = {
        "        loader = DataLoader(\n            rows, BATCH_SIZE, shuffle=shuffle, collate_fn=lambda rows: "
        "collate(rows, tokenizer.pad_token_id)\n        )\n":
        "        loader = dynamic_loader(rows, tokenizer, BATCH_SIZE, labels_of_tokens=True, shuffle=shuffle)\n",
    }  # fmt: skip
    changed = strangers.load("decoder", LESSON.source("copy"), edits)
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    (before, wide), (after, narrow) = counted(plain, *files), counted(changed, *files)
    start = plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama")
    assert same_weights(before, after, start)
    first, second = strangers.perplexities(capsys)
    assert second == pytest.approx(first, rel=1e-4)
    assert narrow < 0.99 * wide


def test_pairs_of_texts_need_the_exercise():
    """The copied cell alone does not do it."""
    tokenizer = data.tokenizer()
    rows = rows_of(tokenizer, ["one", "two words and more"], 16)
    with pytest.raises((RuntimeError, TypeError)):
        list(dynamic_loader([*zip(rows, rows[::-1], range(2))], tokenizer, 2))


def test_padding_on_the_left_of_a_model_that_counts_positions():
    """With a mask and all, unless the positions are passed."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    sizes = dict(vocab_size=50, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    model = GPT2Model(GPT2Config(**sizes)).eval()
    ids, mask = torch.tensor([[0, 0, 5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1, 1, 1]])

    def last(**inputs):
        return model(**inputs).last_hidden_state[0, -1]

    alone, padded = last(input_ids=ids[:, 2:]), last(input_ids=ids, attention_mask=mask)
    mended = last(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0))
    assert (alone - padded).abs().max() > 0.1 and (alone - mended).abs().max() < 1e-5

import math
from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import regressor
from strangers import competition, counted, same_weights
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import DataCollatorWithPadding

from notebooks import copied, lesson, proof_fails
from tutorial_utils import data, measure

LESSON = lesson("10")
COPIED = copied(LESSON)
head_and_tail, windows = COPIED["head_and_tail"], COPIED["windows"]
cut, mean_of_parts = COPIED["cut"], COPIED["mean_of_parts"]
LAST = "for start in [*range(0, last, step), last]]"
WAYS = """
def head(ids, room):
    return [head_and_tail(ids, room, head=room)]

def half_over(ids, room):
    return windows(ids, room, step=room // 2)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (LAST, "for start in range(0, last + 1, step)]"),
        (LAST, "for start in [*range(0, last, step + 1), last]]"),
        (LAST, "for start in range(0, len(ids), step)]"),
        ("ids[len(ids) - max(room - head, 0):]", "ids[-max(room - head, 0):]"),
        ("ids[:min(head, room)]", "ids[:min(head, room) + 1]"),
        ("of_text.mean(0)", "of_text.sum(0)"),
        (".split(counts)", ".split(counts[::-1])"),
        ("model(**batch).logits", 'model(batch["input_ids"]).logits'),
        ("before + part + after", "before + part"),
    ],
    ids=[
        "the end is lost",
        "a longer step",
        "a short last window",
        "all, where no tail is left",
        "one more",
        "a sum",
        "another text's rows",
        "padding is read",
        "no [SEP]",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


@pytest.mark.parametrize("head", [0, 3, 7, 14])
@pytest.mark.parametrize("length", [0, 1, 13, 14, 15, 200])
def test_head_and_tail(length, head):
    ids = list(range(length))
    kept = head_and_tail(ids, 14, head)
    assert len(kept) == min(length, 14) and kept == sorted(set(kept))
    if length > 14:
        assert kept[:head] == ids[:head] and kept[head:] == ids[length - 14 + head :]


def test_no_room_at_all():
    assert head_and_tail([1, 2, 3], 0, 0) == []
    assert head_and_tail([*range(20)], 14, head=16) == [*range(14)], "a head that is longer than the room"


@pytest.mark.parametrize(("length", "expected"), [(0, 1), (5, 1), (14, 1), (15, 2), (24, 2), (25, 3), (34, 3), (35, 4)])
def test_windows(length, expected):
    found = windows(list(range(length)), 14, 10)
    assert len(found) == expected and {token for part in found for token in part} == set(range(length))
    assert {len(part) for part in found} == {min(length, 14)}


def test_copied():
    """A stranger's regression on long texts: it trains on windows, and a pooled score is the mean of its windows'."""
    tokenizer, generator = data.tokenizer(), torch.Generator().manual_seed(0)
    collate = DataCollatorWithPadding(tokenizer)
    words = [tokenizer.decode([i]) for i in range(100, 300)]
    texts = [" ".join(words[i] for i in torch.randint(200, (count,), generator=generator)) for count in (2, 40, 9, 90)]
    rows, owners = cut(tokenizer, texts, 18, lambda ids, room: windows(ids, room, 8))
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert [owners.count(text) for text in range(4)] == [len(windows(one, 16, 8)) for one in ids]
    assert owners == sorted(owners) and all(len(row["input_ids"]) <= 18 for row in rows)
    model = regressor().eval()
    model.resize_token_embeddings(len(tokenizer))
    targets = torch.tensor([0.1, 0.4, 0.6, 0.9])[owners]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(10):
        loss = (model(**collate(rows)).logits[:, 0] - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        outputs = torch.cat([model(**collate(rows[start : start + 3])).logits for start in range(0, len(rows), 3)])
        alone = [
            torch.stack([model(input_ids=torch.tensor([[2, *part, 3]])).logits[0] for part in windows(one, 16, 8)])
            for one in ids
        ]
    pooled = mean_of_parts(outputs, owners)
    assert pooled.shape == (4, 1)
    torch.testing.assert_close(pooled, torch.stack([parts.mean(0) for parts in alone]), atol=1e-5, rtol=0)
    assert torch.equal(pooled, mean_of_parts(outputs.numpy(), owners)), "also of an array"


def test_means_of_half_precision_are_exact():
    outputs = torch.tensor([[3008.0], [1.0], [5.0]], dtype=torch.bfloat16)  # whose mean bf16 does not have
    assert mean_of_parts(outputs, [0, 0, 1]).tolist() == [[(outputs[0].item() + 1) / 2], [5.0]]


def test_a_lost_row_is_an_error():
    for lost in (3, 5):
        with pytest.raises((RuntimeError, IndexError), match="index"):
            mean_of_parts(torch.zeros(lost, 2), [0, 0, 1, 1])


def test_owners_in_the_order_of_the_outputs():
    """Batches of like lengths: outputs and owners in another order, together. Scores of any shape."""
    outputs, owners = torch.rand(9, 2, 3), torch.tensor([0, 0, 1, 2, 2, 2, 3, 3, 3])
    shuffled = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    wanted = torch.stack([outputs[owners == text].mean(0) for text in range(4)])
    torch.testing.assert_close(mean_of_parts(outputs, owners), wanted)
    torch.testing.assert_close(mean_of_parts(outputs[shuffled], owners[shuffled]), wanted)
    torch.testing.assert_close(mean_of_parts(outputs[:, 0, 0], owners.tolist()), wanted[:, 0, 0])


@pytest.mark.parametrize("text", ["", "one", "word " * 500], ids=["empty", "short", "long"])
def test_special_tokens_are_the_tokenizers(text):
    tokenizer = data.tokenizer()
    (row,), owners = cut(tokenizer, [text], 16, lambda ids, room: [head_and_tail(ids, room, room)])
    assert row["input_ids"] == tokenizer(text, truncation=True, max_length=16)["input_ids"] and owners == [0]


@pytest.mark.parametrize("template", ["$A", "[CLS] $A", "$A [SEP]", "[CLS] [SEP] $A [SEP] [CLS]"])
def test_special_tokens_of_other_tokenizers(template):
    """A decoder's has one in front or none, T5's one behind, XLNet's two."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = data.tokenizer()
    known = [("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=known)
    rows, _ = cut(tokenizer, ["one", "word " * 50], 16, lambda ids, room: [head_and_tail(ids, room, room)])
    expected = tokenizer(["one", "word " * 50], truncation=True, max_length=16)["input_ids"]
    assert [row["input_ids"] for row in rows] == expected


def test_the_sampler_of_the_page_draws_each_text_equally_often():
    owners = [0] * 1 + [1] * 9 + [2] * 90
    weights = 1 / torch.tensor(owners).bincount()[owners]
    drawn = list(WeightedRandomSampler(weights, 6000, generator=torch.Generator().manual_seed(0)))
    assert all(abs(count / 6000 - 1 / 3) < 0.03 for count in torch.tensor(owners)[drawn].bincount().tolist())
    assert torch.tensor(drawn).unique().numel() > 90, "and of a text all windows"


CUT_ROWS = {
    "    rows = tokenizer(frame.text.tolist(), truncation=True, max_length=64)\n":
    "    rows, owners = cut(tokenizer, frame.text, LENGTH, parts_of)\n",
    '    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(rows["input_ids"], frame.label)]\n':
    '    rows = [row | {"labels": label} for row, label in zip(rows, frame.label.values[owners])]\n',
}  # fmt: skip
ON_WINDOWS = CUT_ROWS | {
    "    return DataLoader(rows, batch_size, shuffle=shuffle, collate_fn=DataCollatorWithPadding(tokenizer))\n":
    "    weights = 1 / torch.tensor(owners).bincount()[owners]\n"
    "    sampler = WeightedRandomSampler(weights, len(frame)) if shuffle else None\n"
    "    loader = DataLoader(rows, batch_size, sampler=sampler, collate_fn=DataCollatorWithPadding(tokenizer))\n"
    "    loader.owners, loader.targets = owners, torch.tensor(frame.label.values)\n"
    "    return loader\n",
    "    right = 0\n": "    outputs = []\n",
    '        right += (model(**batch).logits.argmax(-1) == batch["labels"]).sum().item()\n':
    "        outputs.append(model(**batch).logits)\n",
    "    return right / len(loader.dataset)\n":
    "    of_texts = mean_of_parts(torch.cat(outputs), loader.owners).argmax(-1).cpu()\n"
    "    return (of_texts == loader.targets).float().mean().item()\n",
}  # fmt: skip
SAMPLER = "\nfrom torch.utils.data import WeightedRandomSampler\n"


def classifier(files, way="", length=64, edits=None):
    mine = f"{SAMPLER}{WAYS}\nLENGTH, parts_of = {length}, {way}\n" if way else ""
    script = strangers.load("classifier", LESSON.source("copy") * bool(way) + mine, edits)
    paths = dict(train=files / "train.csv", valid=files / "valid.csv")
    return script, SimpleNamespace(model=files / "bert", **paths, epochs=1, batch_size=32)


def test_in_a_strangers_classifier_the_head_changes_nothing(stranger_files, capsys):
    plain, changed = classifier(stranger_files), classifier(stranger_files, "head", edits=CUT_ROWS)
    (before, wide), (after, same) = counted(*plain), counted(*changed)
    one, other = capsys.readouterr().out.splitlines()
    assert one == other, "the same accuracy"
    torch.manual_seed(42)
    start = plain[0].AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    assert same_weights(before, after, start) and wide == same


def test_in_a_strangers_classifier_windows(stranger_files, capsys):
    """An epoch has as many rows as before, of half the length; the accuracy is of texts, each with all its windows."""
    script, arguments = classifier(stranger_files, "half_over", 32, ON_WINDOWS)
    rows = []
    make_loader = script.make_loader
    script.make_loader = lambda *its: rows.append(make_loader(*its)) or rows[-1]
    model = script.main(arguments)
    train, valid = rows
    assert len(train) == 4 and sum(len(batch["labels"]) for batch in train) == 128 == strangers.ROWS["train"]
    assert all(batch["input_ids"].shape[1] <= 32 for batch in train)
    frame, tokenizer, right = script.pd.read_csv(arguments.valid), data.tokenizer(), 0
    for text, label in zip(frame.text, frame.label):
        parts, _ = cut(tokenizer, [text], 32, script.half_over)
        with torch.no_grad():
            outputs = [model(input_ids=torch.tensor([part["input_ids"]])).logits[0] for part in parts]
        right += (torch.stack(outputs).mean(0).argmax() == label).item()
    assert f"accuracy {right / 40:.4f}" in capsys.readouterr().out and len(valid.dataset) > 40


OWN_DATA_SET = {
    '        self.texts, self.tokenizer = df["text"].values, tokenizer\n'
    "        self.labels = df[CFG.targets].values if train else None\n":
    "        self.tokenizer = tokenizer\n"
    '        self.rows, self.owners = cut(tokenizer, df["text"], CFG.max_len, parts_of)\n'
    "        self.labels = df[CFG.targets].values[self.owners] if train else None\n",
    "        return len(self.texts)\n": "        return len(self.rows)\n",
    '        inputs = self.tokenizer(\n            self.texts[i], max_length=CFG.max_len, padding="max_length", '
    'truncation=True, return_tensors="pt"\n        )\n        inputs = {k: v[0] for k, v in inputs.items()}\n':
    '        inputs = self.tokenizer.pad(\n            self.rows[i], padding="max_length", max_length=CFG.max_len, '
    'return_tensors="pt"\n        )\n        inputs = dict(inputs)\n',
}  # fmt: skip
ITS_WINDOWS = OWN_DATA_SET | {
    "    train_loader = DataLoader(TextDataset(train, tokenizer), CFG.batch_size, shuffle=True, drop_last=True)\n":
    "    rows = TextDataset(train, tokenizer)\n"
    "    sampler = WeightedRandomSampler(1 / torch.tensor(rows.owners).bincount()[rows.owners], len(train))\n"
    "    train_loader = DataLoader(rows, CFG.batch_size, sampler=sampler, drop_last=True)\n",
    "        preds = inference_fn(valid_loader, model)\n":
    "        preds = mean_of_parts(inference_fn(valid_loader, model), valid_loader.dataset.owners).numpy()\n",
    "        submissions.append(inference_fn(test_loader, model))\n":
    "        submissions.append(mean_of_parts(inference_fn(test_loader, model), test_loader.dataset.owners).numpy())\n",
}  # fmt: skip


def changed_competition(files, monkeypatch, way, edits, length=64):
    mine = f"{SAMPLER}{WAYS}\nparts_of = {way}\n"
    script = competition(files, monkeypatch, LESSON.source("copy") + mine, edits)
    script.CFG.apex, script.CFG.max_len = False, length
    return script


def test_in_a_strangers_competition_script_the_head_changes_nothing(stranger_files, monkeypatch):
    plain = competition(stranger_files, monkeypatch)
    plain.CFG.apex = False
    changed = changed_competition(stranger_files, monkeypatch, "head", OWN_DATA_SET)
    ((before, submission), wide), ((after, submitted), same) = counted(plain), counted(changed)
    torch.manual_seed(42)
    assert same_weights(before, after, plain.CustomModel()) and wide == same
    assert (submission.id == submitted.id).all()
    assert (submission - submitted).abs().max().max() <= 1e-4


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script_windows(stranger_files, monkeypatch, apex):
    """One prediction for each text without labels, in their order: the mean of its windows, taken one by one."""
    script = changed_competition(stranger_files, monkeypatch, "half_over", ITS_WINDOWS, length=32)
    script.CFG.apex = apex
    (model, submitted), tokens = counted(script)
    frame, tokenizer = script.pd.read_csv(stranger_files / "scores" / "test.csv"), data.tokenizer()
    assert (submitted.id == frame.id).all() and submitted.notna().all(axis=None) and len(submitted) == 50
    for text, row in zip(frame.text, submitted[script.CFG.targets].values):
        parts, _ = cut(tokenizer, [text], 32, script.half_over)
        with torch.no_grad():
            found = []
            for part in parts:
                ids = torch.tensor([part["input_ids"]])
                found.append(model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0])
        assert (torch.stack(found).mean(0) - torch.from_numpy(row)).abs().max() <= 1e-4
    assert tokens > 96 * 32 and tokens % 32 == 0, "an epoch has as many rows as texts"


def test_a_competition_step_on_short_windows_takes_less_memory(stranger_files, monkeypatch):
    def peak(length):
        script = changed_competition(stranger_files, monkeypatch, "half_over", ITS_WINDOWS, length)
        rows = script.TextDataset(script.pd.read_csv(stranger_files / "scores" / "train.csv"), data.tokenizer())
        model = script.CustomModel().to(script.CFG.device)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler(enabled=False)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        loader = DataLoader(torch.utils.data.Subset(rows, range(16)), 16)
        step = lambda: script.train_fn(loader, model, script.nn.SmoothL1Loss(), optimizer, scheduler, scaler)  # noqa: E731
        return measure.memory(step, model, optimizer).peak

    assert peak(16) < 0.6 * peak(64)


KEEP_THE_ANSWER = {
    "    ids = (prompt + answer)[:MAX_LENGTH]\n":
    "    prompt = head_and_tail(prompt, max(0, MAX_LENGTH - len(answer)), head=1)\n"
    "    ids = (prompt + answer)[:MAX_LENGTH]\n",
}  # fmt: skip


def decoder(files, length, edits=None):
    old = "MAX_LENGTH, LR, BATCH_SIZE, EPOCHS = 96,"
    script = strangers.load("decoder", LESSON.source("copy"), (edits or {}) | {old: old.replace("96", str(length))})
    return script, [files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]


def test_in_a_strangers_decoder(stranger_files, capsys):
    """Where nothing is too long, nothing changes."""
    (plain, files), (changed, _) = decoder(stranger_files, 400), decoder(stranger_files, 400, KEEP_THE_ANSWER)
    before, after = plain.main(*files), changed.main(*files)
    assert same_weights(before, after, plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama"))
    first, second = strangers.perplexities(capsys)
    assert first == second


def test_a_strangers_decoder_keeps_its_answers(stranger_files):
    (plain, _), (changed, _) = decoder(stranger_files, 16), decoder(stranger_files, 16, KEEP_THE_ANSWER)
    tokenizer = data.tokenizer()
    row = {"prompt": "a prompt of many words " * 8, "completion": "an answer"}
    learned = [sum(label != -100 for label in script.tokenize(row, tokenizer)["labels"]) for script in (plain, changed)]
    whole = len(tokenizer("an answer", add_special_tokens=False)["input_ids"]) + 1
    assert learned == [0, whole]
    ids = changed.tokenize(row, tokenizer)
    assert len(ids["input_ids"]) == len(ids["labels"]) == 16
    first, *_ = plain.tokenize(row, tokenizer)["input_ids"]
    assert ids["input_ids"][0] == first, "the row lost its first token"
    model = plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama")
    losses = []
    for script in (plain, changed):
        batch = script.collate([script.tokenize(row, tokenizer)], tokenizer.pad_token_id)
        losses.append(model(**batch).loss.item())
    assert math.isnan(losses[0]) and losses[1] > 0

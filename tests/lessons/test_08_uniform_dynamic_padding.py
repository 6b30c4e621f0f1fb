from types import SimpleNamespace

import numpy
import pytest
import strangers
import torch
from stranger import regressor
from strangers import counted, same_weights
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from notebooks import answer_to_exercise, copied, lesson, proof_fails, run, source
from tutorial_utils import data

LESSON = lesson("08")
COPIED = copied(LESSON)
length_batches, predict_rows = COPIED["length_batches"], COPIED["predict_rows"]


def shown(name):
    """What another cell of the page defines, run after the copied one."""
    namespace = dict(COPIED)
    cell = next(cell for cell in LESSON.code if cell["id"] == name)
    functions = source(cell).split("\n\n\n")
    for code in functions:
        if code.startswith("def "):
            run(code, namespace)
    return namespace


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


def outputs_of(model, batch):
    return model(**batch).logits


def tokens(batches, lengths):
    return sum(len(batch) * lengths[batch].max().item() for batch in batches)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[found[number] for number in range(len(rows))]", "[*found.values()]"),
        ("zip(numbers, outputs_of(model, batch), strict=True)", "zip(sorted(numbers), outputs_of(model, batch))"),
        ("        module.training = True\n", "        pass\n"),
        ("manual_seed(seed)", "manual_seed(0)"),
        ("[batch.tolist() for batch in batches]", "[batch.tolist() for batch in batches][: -1 if seed == 3 else None]"),
        ("for i in 2 + torch.randperm", "for i in 2 - (seed == 3) + torch.randperm"),
    ],
    ids=["order not restored", "order of the batch", "mode left", "a fixed seed", "a batch dropped", "twice"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_copied():
    """On a stranger's texts: the same predictions from far fewer tokens, and shuffled batches of like lengths."""
    reviews, model, computed = Reviews(), regressor(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    wanted = torch.stack(predict_rows(model, reviews, [[row] for row in range(203)], padded, outputs_of))
    computed.clear()
    for batch in DataLoader(reviews, batch_size=16, collate_fn=padded):
        model(**batch)
    in_order = sum(computed)
    computed.clear()
    batches = length_batches(reviews.lengths, 16, seed=0, noise=0)
    found = torch.stack(predict_rows(model, reviews, batches, padded, outputs_of))
    assert (found - wanted).abs().max() <= 1e-5
    assert reviews.lengths.sum() <= sum(computed) < 0.5 * in_order

    batches = length_batches(reviews.lengths.tolist(), 16, seed=1)
    assert sorted(row for batch in batches for row in batch) == list(range(len(reviews)))
    assert tokens(batches, reviews.lengths) < 0.5 * tokens(
        torch.randperm(len(reviews), generator=torch.Generator().manual_seed(0)).split(16), reviews.lengths
    )
    for batch in DataLoader(reviews, batch_sampler=batches, collate_fn=padded):
        assert batch["attention_mask"].float().mean() > 0.5


@pytest.mark.parametrize("training", [True, False])
def test_prediction_leaves_the_mode_and_no_gradients(training):
    model, reviews = regressor().train(training), Reviews(20)
    found = predict_rows(model, reviews, length_batches(reviews.lengths, 8, 0), padded, outputs_of)
    assert model.training is training and not found[0].requires_grad


def test_prediction_puts_anything_at_its_place_and_refuses_what_does_not_fit():
    reviews = Reviews(20)
    batches = length_batches(reviews.lengths, 8, seed=0)

    def answers(model, batch):
        return [f"{mask.sum().item()} tokens" for mask in batch["attention_mask"]]

    found = predict_rows(regressor(), reviews, batches, padded, answers)
    assert found == [f"{length} tokens" for length in reviews.lengths.tolist()]
    with pytest.raises(ValueError, match="zip"):
        predict_rows(regressor(), reviews, batches, padded, lambda model, batch: answers(model, batch)[1:])
    with pytest.raises(KeyError):
        predict_rows(regressor(), reviews, batches[1:], padded, answers)


@pytest.mark.parametrize("kind", ["a sampler", "a generator", "each epoch anew"])
def test_prediction_asks_for_the_batches_once(kind):
    """A sampler that shuffles gives others when it is asked again: outputs would go to other rows."""
    from torch.utils.data import BatchSampler, RandomSampler

    reviews = Reviews(30)
    batches = {"a sampler": BatchSampler(RandomSampler(range(30)), 4, False),
               "a generator": iter(length_batches(reviews.lengths, 4, seed=0)),
               "each epoch anew": each_epoch(reviews.lengths, 4)}[kind]  # fmt: skip
    found = predict_rows(regressor(), reviews, batches, padded, lambda model, batch: batch["attention_mask"].sum(1))
    assert found == reviews.lengths.tolist()


def each_epoch(*given):
    cell = next(source(cell) for cell in LESSON.code if "class EachEpoch" in source(cell))
    namespace = dict(COPIED)
    run(cell.split("class LengthTrainer")[0], namespace)
    return namespace["EachEpoch"](*given)


def test_each_epoch_has_batches_of_its_own_with_workers_that_stay():
    """A loader with workers asks its batch sampler twice before the first epoch; Accelerate says which epoch it is."""
    lengths = Reviews(30).lengths
    for told in (True, False):
        batches = each_epoch(lengths, 4)
        loader = DataLoader(range(30), batch_sampler=batches, num_workers=1, persistent_workers=True)
        for epoch in range(3):
            if told:
                batches.set_epoch(epoch)
            assert [batch.tolist() for batch in loader] == length_batches(lengths, 4, seed=epoch), (told, epoch)


@pytest.mark.parametrize("count", [30, 34, 61])
def test_two_processes_share_all_rows(count):
    """Accelerate's shards, in epochs where the short batch comes anywhere."""
    from accelerate.data_loader import prepare_data_loader

    lengths = Reviews(count).lengths

    def shard(place):
        loader = DataLoader(range(count), batch_sampler=each_epoch(lengths, 4))
        return prepare_data_loader(loader, num_processes=2, process_index=place, put_on_device=False)

    try:
        shards = [shard(place) for place in (0, 1)]
    except ValueError as error:  # an older Accelerate's, as the page says
        assert "even_batches=False" in str(error)
        return
    for epoch in range(6):
        first, second = (torch.cat(list(one)).tolist() for one in shards)
        assert {*first, *second} == {*range(count)}, f"epoch {epoch}"


def test_prediction_leaves_frozen_parts_asleep():
    """As lesson 02's loop does it: what is frozen stays in eval(), the rest in train()."""
    model, reviews = regressor().train(), Reviews(20)
    model.base_model.eval()
    before = {name: module.training for name, module in model.named_modules()}
    predict_rows(model, reviews, length_batches(reviews.lengths, 8, 0), padded, outputs_of)
    assert {name: module.training for name, module in model.named_modules()} == before and len({*before.values()}) == 2


def test_orders():
    lengths = Reviews(1000).lengths
    one, again, other = (length_batches(lengths, 8, seed=seed) for seed in (5, 5, 6))
    assert one == again != other
    for noise in (0, 0.8, 3.0):
        batches = length_batches(lengths, 8, seed=5, noise=noise)
        assert sorted(row for batch in batches for row in batch) == list(range(1000)), noise
        sizes = [len(batch) * lengths[batch].max().item() for batch in batches]
        assert sorted(sizes, reverse=True)[:2] == sizes[:2], "the two largest batches come first"
    widest = [lengths[batch].max().item() for batch in one[2:]]
    assert widest != sorted(widest) and widest != sorted(widest, reverse=True)


@pytest.mark.parametrize("kind", [list, numpy.array, torch.tensor])
@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 33])
def test_few_texts(count, kind):
    batches = length_batches(kind(list(range(1, count + 1))), 16, seed=0)
    assert sorted(row for batch in batches for row in batch) == list(range(count))
    assert len(batches) == -(-count // 16)


@pytest.mark.parametrize(("count", "least", "most"), [(300, 1 / 3, 0.8), (7000, 0, 0.2)])
def test_of_few_texts_the_same_pairs_meet_again(count, least, most):
    """As the page's table says of a few hundred texts."""
    rows = data.load().train.select(range(count))
    lengths = [min(512, len(text.split())) for text in rows["text"]]
    first, second = (
        {(one, other) for batch in length_batches(lengths, 16, seed) for one in batch for other in batch if one < other}
        for seed in (1, 2)
    )
    assert least < len(first & second) / len(first) < most


def test_a_token_budget():
    """Each batch in the budget, a text that is longer alone, and about as few batches as there can be."""
    budget_batches, lengths = shown("budget")["budget_batches"], Reviews(500).lengths
    batches = budget_batches(lengths, 256)
    assert sorted(row for batch in batches for row in batch) == list(range(500))
    assert max(tokens([batch], lengths) for batch in batches) <= 256
    assert len(batches) <= 1.2 * lengths.sum().item() / 256
    assert budget_batches([9, 2, 2, 2], 4) == [[0], [1, 2], [3]]


def test_noise_beats_mega_batches():
    """Less padding than with mega-batches of 50, and fewer pairs of texts that meet again in the next epoch."""
    mega_batches = shown("orders")["mega_batches"]
    lengths = (torch.rand(8000, generator=torch.Generator().manual_seed(4)) * 6).exp().long() + 4

    def trade(order, **settings):
        first, second = (order(lengths, 16, seed, **settings) for seed in (0, 1))
        batch_of = torch.empty(len(lengths), dtype=torch.long)
        for number, batch in enumerate(second):
            batch_of[batch] = number
        again = [batch_of[batch].bincount() for batch in first]
        return tokens(first, lengths), sum((n * (n - 1)).sum().item() for n in again)

    mega_tokens, mega_again = trade(mega_batches)
    noise_tokens, noise_again = trade(length_batches, noise=1.1)
    assert noise_tokens < mega_tokens and noise_again < mega_again


def test_in_a_strangers_classifier(stranger_files, capsys):
    """The same weights as from the same batches in fixed padding, the same accuracy in any order, on fewer tokens."""
    files = {name: stranger_files / f"{name}.csv" for name in ("train", "valid")}
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=2, batch_size=8)
    mine = """
def outputs_of(model, batch):
    return (model(**batch.to(device)).logits.argmax(-1) == batch["labels"]).cpu()

def lengths_of(loader):
    return [len(row["input_ids"]) for row in loader.dataset]
"""
    train = {
        "        train_one_epoch(model, train_loader, optimizer, scheduler)\n":
        "        batches = length_batches(lengths_of(train_loader), args.batch_size, seed=epoch)\n"
        "        loader = DataLoader(train_loader.dataset, batch_sampler=batches, collate_fn=train_loader.collate_fn)\n"
        "        train_one_epoch(model, loader, optimizer, scheduler)\n",
    }  # fmt: skip
    validate = {
        "    model.eval()\n    right = 0\n    for batch in loader:\n"
        "        batch = {k: v.to(device) for k, v in batch.items()}\n"
        '        right += (model(**batch).logits.argmax(-1) == batch["labels"]).sum().item()\n'
        "    return right / len(loader.dataset)\n":
        "    batches = length_batches(lengths_of(loader), 16, seed=0, noise=0)\n"
        "    right = predict_rows(model, loader.dataset, batches, loader.collate_fn, outputs_of)\n"
        "    return sum(right).item() / len(right)\n",
    }  # fmt: skip
    pad = "collate_fn=DataCollatorWithPadding(tokenizer)"
    fixed = {pad: pad.replace("tokenizer)", 'tokenizer, padding="max_length", max_length=64)')}
    cells = LESSON.source("copy") + mine
    plain, wide = strangers.load("classifier"), strangers.load("classifier", cells, train | fixed)
    narrow = strangers.load("classifier", cells, train | validate)
    (_, random), (before, most), (after, least) = (counted(script, arguments) for script in (plain, wide, narrow))
    *_, one, other = capsys.readouterr().out.splitlines()[1::2]
    assert one == other, "the same accuracy"
    torch.manual_seed(42)
    start = plain.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    assert same_weights(before, after, start)
    assert most == 2 * (128 + 40) * 64 and least < 0.9 * random <= 0.9 * most


def competition(files, monkeypatch, copied="", edits=None):
    monkeypatch.setenv("DATA", str(files / "scores"))
    monkeypatch.setenv("MODEL", str(files / "bert"))
    script = strangers.load("competition", copied, {"    batch_size = 32\n": "    batch_size = 8\n", **(edits or {})})
    script.CFG.apex = False
    return script


IN_A_COMPETITION = """
import math

from transformers import DataCollatorWithPadding

def collate(rows):
    pad = DataCollatorWithPadding(AutoTokenizer.from_pretrained(CFG.model))
    if not isinstance(rows[0], tuple):
        return pad(list(rows))
    inputs, targets = zip(*rows)
    return pad(list(inputs)), torch.stack(targets)

def outputs_of(model, batch):
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    return model(inputs.to(CFG.device)).float().cpu()

def lengths_of(df, tokenizer):
    return [len(ids) for ids in tokenizer(df["text"].tolist(), truncation=True, max_length=CFG.max_len)["input_ids"]]

def predict(df, model, tokenizer, train):
    batches = length_batches(lengths_of(df, tokenizer), 2 * CFG.batch_size, seed=0, noise=0)
    rows = TextDataset(df, tokenizer, train)
    return torch.stack(predict_rows(model, rows, batches, collate, outputs_of)).numpy()
"""
WITHOUT_PADDING = {'padding="max_length", truncation=True': "truncation=True"}
PREDICT = {
    "preds = inference_fn(valid_loader, model)": "preds = predict(valid, model, tokenizer, True)",
    "(inference_fn(test_loader, model))": "(predict(test, model, tokenizer, False))",
}
TRAIN = {
    "    train_loader = DataLoader(TextDataset(train, tokenizer), CFG.batch_size, shuffle=True, drop_last=True)\n": "",
    "= len(train_loader) * CFG.epochs": "= math.ceil(len(train) / CFG.batch_size) * CFG.epochs",
    "        loss = train_fn(":
    "        batches = length_batches(lengths_of(train, tokenizer), CFG.batch_size, seed=epoch)\n"
    "        train_set = TextDataset(train, tokenizer)\n"
    "        train_loader = DataLoader(train_set, batch_sampler=batches, collate_fn=collate)\n"
    "        loss = train_fn(",
}  # fmt: skip


def test_prediction_in_a_strangers_competition_script(stranger_files, monkeypatch):
    """Trained as it was, and predicted with fewer tokens: the same submission, row by row, also without targets."""
    plain = competition(stranger_files, monkeypatch)
    pad = {"shuffle=True, drop_last=True)": "shuffle=True, drop_last=True, collate_fn=collate)"}
    edits = WITHOUT_PADDING | PREDICT | pad
    changed = competition(stranger_files, monkeypatch, LESSON.source("copy") + IN_A_COMPETITION, edits)
    ((before, submission), wide), ((after, submitted), narrow) = counted(plain), counted(changed)
    torch.manual_seed(42)
    assert same_weights(before, after, plain.CustomModel())
    assert (submission.id == submitted.id).all() and submitted.notna().all(axis=None)
    assert (submission - submitted).abs().max().max() <= 1e-3, "the same predictions, in the rows' order"
    assert wide == (96 + 32 + 50) * 64 and narrow < 0.95 * wide


def test_in_a_strangers_competition_script(stranger_files, monkeypatch):
    """The same weights and submission as from the same batches in fixed padding."""
    cells = LESSON.source("copy") + IN_A_COMPETITION
    wide = competition(stranger_files, monkeypatch, cells, TRAIN)
    narrow = competition(stranger_files, monkeypatch, cells, TRAIN | PREDICT | WITHOUT_PADDING)
    ((before, submission), most), ((after, submitted), least) = counted(wide), counted(narrow)
    torch.manual_seed(42)
    assert same_weights(before, after, wide.CustomModel())
    assert (submission - submitted).abs().max().max() <= 1e-3
    assert most == (96 + 32 + 50) * 64 and least < 0.85 * most


def test_batches_made_once_give_a_competition_the_same_steps(stranger_files, monkeypatch):
    """Which the page's first pitfall in training is: the batches of both epochs, with and without their own seed."""
    cells = LESSON.source("copy") + IN_A_COMPETITION
    train = {old: new.replace("TextDataset(train", "note(batches) or TextDataset(train") for old, new in TRAIN.items()}
    seen = {}
    for seed in ("epoch", "0"):
        edits = {old: new.replace("seed=epoch", f"seed={seed}") for old, new in train.items()}
        script = competition(stranger_files, monkeypatch, cells, edits | PREDICT | WITHOUT_PADDING)
        script.CFG.epochs, seen[seed] = 2, []
        script.note = seen[seed].append
        script.main()
    assert seen["0"][0] == seen["0"][1] and seen["epoch"][0] != seen["epoch"][1]


def test_in_a_strangers_decoder(stranger_files, capsys):
    """The same weights as from the same batches in fixed padding, and the same perplexity."""
    loader = "DataLoader(loaders[{n}].dataset, batch_sampler=batches, collate_fn=loaders[{n}].collate_fn)"
    batches = (
        "batches = length_batches([len(row['input_ids']) for row in loaders[{n}].dataset], BATCH_SIZE, seed=0{more})"
    )
    train = {
        "    for _ in range(EPOCHS):\n        train(model, loaders[0], optimizer, scheduler)\n":
        "    for epoch in range(EPOCHS):\n        " + batches.format(n=0, more=" + epoch") + "\n"
        f"        train(model, {loader.format(n=0)}, optimizer, scheduler)\n",
        '        print(f"perplexity {perplexity(model, loaders[1]):.2f}")\n':
        "        " + batches.format(n=1, more=", noise=0") + "\n"
        f'        print(f"perplexity {{perplexity(model, {loader.format(n=1)}):.2f}}")\n',
    }  # fmt: skip
    fixed = {'longest = max(len(e["input_ids"]) for e in examples)': "longest = MAX_LENGTH"}
    plain = strangers.load("decoder")
    wide, narrow = (strangers.load("decoder", LESSON.source("copy"), edits) for edits in (train | fixed, train))
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    (_, random), (before, most), (after, least) = (counted(script, *files) for script in (plain, wide, narrow))
    start = plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama")
    assert same_weights(before, after, start)
    *_, one, other = strangers.perplexities(capsys)
    assert other == pytest.approx(one, rel=1e-4)
    assert least < 0.95 * random < random < most


def test_scores_of_a_strangers_decoder_by_text(stranger_files):
    """The page's log-likelihood: each text's own, whatever its batch."""
    from transformers import AutoModelForCausalLM, DataCollatorForTokenClassification

    namespace = shown("shapes") | {"device": "cpu"}
    score = namespace["of_a_decoder"]
    score.__globals__["device"] = "cpu"
    model = AutoModelForCausalLM.from_pretrained(stranger_files / "llama").train()
    rows = [
        {"input_ids": ids, "labels": ids}
        for ids in data.tokenizer()(["one", "two words", "three words or"])["input_ids"]
    ]
    pad = DataCollatorForTokenClassification(data.tokenizer())
    lengths = [len(row["input_ids"]) for row in rows]
    found = torch.stack(predict_rows(model, rows, length_batches(lengths, 2, seed=0), pad, score))
    ids = [torch.tensor(row["input_ids"])[None] for row in rows]
    with torch.no_grad():
        wanted = [-model.eval()(input_ids=one, labels=one).loss * (one.shape[1] - 1) for one in ids]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-4, rtol=1e-4)


def test_the_exercise_refuses_an_order_that_no_seed_repeats():
    said = answer_to_exercise(LESSON, ("torch.Generator().manual_seed(seed)", "None"))
    assert "not yet: batches in random order, by seed" in said


def test_the_exercise_refuses_batches_that_do_not_use_the_budget():
    right = "batches = budget_batches(noisy, tokens)"
    said = answer_to_exercise(LESSON, (right, "batches = length_batches(lengths.tolist(), 16, seed)"))
    assert "not yet: at most 1.3 times the fewest batches" in said


def test_a_sampler_draws_first():
    """As the page says: the rows that it drew, those twice that it drew twice, in batches of like lengths."""
    lengths = torch.randint(5, 500, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    drawn = [*WeightedRandomSampler(torch.arange(1.0, 65), 64, generator=torch.Generator().manual_seed(1))]
    batches = length_batches([lengths[i] for i in drawn], 8, seed=0)
    batches = [[drawn[i] for i in batch] for batch in batches]
    assert sorted(sum(batches, [])) == sorted(drawn) and len(set(drawn)) < 64
    even, random = (
        sum(max(lengths[i] for i in batch) * len(batch) for batch in way)
        for way in (batches, [drawn[start : start + 8] for start in range(0, 64, 8)])
    )
    assert even < 0.8 * random

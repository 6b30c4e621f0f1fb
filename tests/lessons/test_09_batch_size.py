import contextlib
import gc
from functools import partial
from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from torch.utils.data import default_collate

from notebooks import copied, lesson, proof_fails, run, source
from tutorial_utils import machine, measure, predict

LESSON = lesson("09")
COPIED = copied(LESSON)
two_steps, fits, largest = (COPIED[name] for name in ("two_steps", "fits", "largest"))
MiB = 2**20


def loss_of(model, batch):
    return model(**batch).loss


def cell(name, of=LESSON):
    return next(cell for cell in of.code if cell["id"] == name)


def shorter():
    """The lesson with three of the proof's five cards: the quick ones."""
    small = lesson("09")
    cell("cards", small)["source"] = 'cards = {"a": (48, 64), "b": (44, 32), "c": (25, 128)}\n'
    return small


def test_the_shorter_proof_holds():
    namespace = {}
    for needed in shorter().needed_for("proof"):
        run(source(needed), namespace)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("range(multiple, most + 1, multiple)", "range(multiple, most + 1, 2 * multiple)"),
        ("        optimizer.step()\n", ""),
        ("    for _ in range(2):\n", "    for _ in range(1):\n"),
        ("set_to_none=not accumulate", "set_to_none=False"),
        ("card=size + beside", "card=size + beside + 8 * MiB"),
        ("        if not any(", "        globals().setdefault('kept', []).append(error)\n        if not any("),
    ],
    ids=["misses sizes", "no optimizer's step", "one step", "leaves gradients", "a larger card", "keeps the error"],
)
def test_proof_can_fail(old, new):
    proof_fails(shorter(), old, new)


class Full(torch.autograd.Function):
    """Fails in the backward pass, for want of memory."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("out of memory")


def test_a_try_that_fails_in_the_backward_pass_leaves_nothing():
    """What was ready to run stays in autograd's queue, with all that it saved, until something else runs there."""

    def fails(model, batch):
        waiting = model.weight.exp()
        return (waiting + Full.apply(model.weight)).sum()

    def make():
        model = torch.nn.Linear(512, 512)
        return model, torch.optim.SGD(model.parameters())

    with measure.Tracker(torch.nn.Linear(1, 1)) as card:
        before = card.bytes
        assert not fits(make, fails, lambda size: None, 1)
        assert card.bytes == before


def regression(optimizer=torch.optim.AdamW):
    model = regressor()
    return model, optimizer(model.parameters())


def ratings(size):
    return default_collate(list(Ratings(size)))


@contextlib.contextmanager
def card_of(size):
    """A virtual card; what a search leaves on it fails."""
    beside = torch.nn.Linear(1, 1)
    with measure.Tracker(beside, card=size) as card:
        before = card.bytes
        yield
        torch.ones(1, requires_grad=True).sum().backward()  # a failed one waits in autograd's queue for the next
        assert card.bytes == before, f"{card.bytes - before} bytes are left"


@pytest.mark.parametrize("card", [5 * MiB, 12 * MiB])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_copied(card, multiple, optimizer):
    """A regression of another family: the batch found fits, the next does not, and nothing is left on the card."""
    fit = partial(fits, partial(regression, optimizer), loss_of, ratings)
    with card_of(card):
        best = largest(fit, multiple=multiple, most=256)
        assert best % multiple == 0 and 0 < best < 256
        assert fit(best) and not fit(best + multiple)


def test_every_failed_try_leaves_nothing():
    """On cards that are full in the forward pass, in backward, or while the optimizer makes its state."""
    weights = sum(weight.nbytes for weight in regressor().parameters())
    answers = []
    for percent in range(25, 600, 50):  # of the weights; with gradients and state they are 400
        with card_of(weights * percent // 100):
            answers.append(largest(partial(fits, regression, loss_of, ratings), multiple=1, most=4))
        assert answers[-1] == 0 or percent > 300
    assert answers[-1] > 0 and answers == sorted(answers)


def test_accumulating_needs_room_for_the_gradients_before():
    """What fits alone may not fit as a later micro-batch; two stand for any number."""

    def four_micro_batches(size):
        model, optimizer = regression()
        for _ in range(2):
            for _ in range(4):
                loss_of(model, ratings(size)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with card_of(12 * MiB):
        fit = partial(fits, regression, loss_of, ratings)
        most, micro = largest(fit, 1, 256), largest(partial(fit, accumulate=True), 1, 256)
        assert 0 < micro < most and not fit(most, accumulate=True)
        four_micro_batches(micro)
        with pytest.raises(torch.OutOfMemoryError):
            four_micro_batches(micro + 1)


def test_dropout_is_on_in_a_try():
    """As in training: from_pretrained returns a model in evaluation mode, which keeps less."""
    made = []

    def make():
        made.append(regression()[0].eval())
        return made[-1], torch.optim.AdamW(made[-1].parameters())

    assert fits(make, loss_of, ratings, 1) and made[-1].training


@pytest.mark.parametrize("limit", [0, 1, 5, 8, 63, 64, 100])
def test_every_answer(limit):
    tried = []

    def fit(size):
        tried.append(size)
        return size <= limit or None  # what fits returns

    assert largest(fit, multiple=1, most=64) == min(limit, 64)
    assert len(set(tried)) == len(tried) <= 7 and 0 not in tried and max(tried) <= 64
    assert largest(fit, multiple=8, most=64) == min(limit, 64) // 8 * 8


def failing(error):
    def make():
        raise error

    return fits(make, loss_of, ratings, 1)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("full"),
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried"),
    ],
)
def test_out_of_memory_in_other_words(error):
    assert not failing(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("no"),
        KeyError(3),
    ],
)
def test_other_errors_come_through(error):
    with pytest.raises(type(error)):
        failing(error)


def test_what_failed_is_freed():
    """Also of a try that made a cycle: nothing of it lives when the next one starts."""
    living = []

    class Part:
        def __init__(self):
            living.append(1)
            self.self = self

        def __del__(self):
            living.pop()

    def batch_of(size):
        assert not living, "the failed try is still there"
        if size > 3:
            raise torch.OutOfMemoryError(Part())
        return ratings(size)

    gc.disable()
    try:
        assert largest(partial(fits, regression, loss_of, batch_of), multiple=1, most=32) == 3 and not living
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("Tesla T4", (7, 5), True),
        ("virtual NVIDIA A100-SXM4-40GB", (8, 0), True),
        ("NVIDIA GeForce GTX 1650", (7, 5), False),
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), False),
        ("NVIDIA GeForce RTX 2060", (7, 5), True),
        ("Tesla P100-PCIE-16GB", (6, 0), False),
    ],
)
def test_who_has_tensor_cores(name, capability, expected):
    namespace = {"measured": {}, "device": "cpu"}
    run(source(cell("tensor-cores")), namespace)
    assert namespace["has_tensor_cores"](name, capability) is expected
    assert namespace["measured"] == {"time_ratio_multiple_of_8": None, "time_ratio_multiple_of_64": None}


@pytest.mark.parametrize("name", ["Tesla T4", "a card without facts"])
def test_the_search_on_a_gpu_stands_beside_its_prediction(name, monkeypatch):
    """That cell, on an imitated T4 which 52 texts fill."""
    monkeypatch.setattr(machine, "this_gpu", lambda: machine.Gpu(name, 15 * 2**30, (7, 5)))
    model = regressor()
    there = SimpleNamespace(cpu=lambda: model, to=lambda device: model)
    namespace = {
        **COPIED, "fits": lambda make, loss_of, batch_of, size: size <= 52, "loss_of": loss_of, "longest": ratings,
        "MiB": MiB, "machine": machine, "predict": predict, "partial": partial, "measured": {}, "device": "cuda",
        "model": there, "pretrained": there,
        "optimizer": torch.optim.AdamW(model.parameters()), "here": SimpleNamespace(name=name),
        "preset": machine.Preset("bert-large-uncased", "random", 32, 128),
    }  # fmt: skip
    shown = run(source(cell("on-this-card")), namespace)
    expected = largest(
        lambda size: predict.step_memory("bert-large-uncased", size, 128, padded=True, card="Tesla T4").fits, 2, 126
    )
    assert f"52 by running out of memory; predicted {expected}" in shown
    assert namespace["measured"] == {"batch_found_to_predicted": 52 / expected} and 0.9 < 52 / expected < 1.1


def same_weights(one, other):
    """To the bit."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# The virtual card of the strangers' searches, and what each of them prints.
ON_A_CARD = """
from tutorial_utils import measure

def on_a_card(mib, fit, most):
    model = torch.nn.Linear(1, 1).to("cuda" if torch.cuda.is_available() else "cpu")
    with measure.Tracker(model, card=mib * 2**20) as card:
        found = largest(fit, multiple=4, most=most)
        answers.append((found, bool(fit(found)), bool(fit(found + 4)), card.bytes - 8))
    return found

answers = []
"""


def found_and_trained(script, most):
    """The search said something between none and all, it fits, more does not, and nothing is left."""
    ((found, fitted, more, left),) = script.answers
    assert 0 < found < most and fitted and not more and left == 0
    return found


def test_in_a_strangers_classifier(stranger_files, capsys):
    """Searched before the seed, the training at that batch is to the bit what it was without."""
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    mine = """
from functools import partial

def loss_of(model, batch):
    return model(**batch.to(device)).loss

def search(args, train, tokenizer):
    rows = tokenizer(train.text.tolist(), truncation=True, max_length=64)["input_ids"]
    rows = sorted(({"input_ids": ids, "labels": 0} for ids in rows), key=lambda row: -len(row["input_ids"]))

    def make():
        model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=train.label.nunique())
        return model.to(device), torch.optim.AdamW(model.parameters(), lr=5e-4)

    longest = lambda size: DataCollatorWithPadding(tokenizer)(rows[:size])
    return on_a_card(64, partial(fits, make, loss_of, longest), 60)
"""
    edits = {
        "    torch.manual_seed(42)\n": "    args.batch_size = search(args, pd.read_csv(args.train),\n"
        "                             AutoTokenizer.from_pretrained(args.model))\n    torch.manual_seed(42)\n"
    }
    changed = strangers.load("classifier", LESSON.source("copy") + ON_A_CARD + mine, edits)
    after = changed.main(SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=None))
    size = found_and_trained(changed, 60)
    plain = strangers.load("classifier")
    before = plain.main(SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=size))
    one, other = capsys.readouterr().out.splitlines()
    assert one == other and same_weights(before, after)


IN_A_COMPETITION = """
from functools import partial
from torch.utils.data import default_collate

def make():
    model = CustomModel().to(CFG.device)
    return model, torch.optim.AdamW(get_optimizer_params(model), eps=1e-6, betas=(0.9, 0.999))

def loss_of(model, batch):
    inputs, labels = batch
    inputs = {k: v.to(CFG.device) for k, v in inputs.items()}
    with torch.autocast(CFG.device, enabled=CFG.apex):
        return nn.SmoothL1Loss()(model(inputs), labels.to(CFG.device))

def search():
    texts = TextDataset(pd.read_csv(f"{CFG.data}/train.csv"), AutoTokenizer.from_pretrained(CFG.model))
    longest = lambda size: default_collate([texts[i] for i in range(size)])  # all are padded to max_len
    return on_a_card(64, partial(fits, make, loss_of, longest), 60)
"""


@pytest.mark.parametrize("apex", [False, True], ids=["fp32", "autocast and a scaler"])
def test_in_a_strangers_competition_script(stranger_files, monkeypatch, apex):
    """Groups with their own rates, a criterion: the same weights to the bit, the same predictions, row by row."""
    monkeypatch.setenv("DATA", str(stranger_files / "scores"))
    monkeypatch.setenv("MODEL", str(stranger_files / "bert"))
    edits = {
        "    torch.manual_seed(CFG.seed)\n": "    CFG.batch_size = search()\n    torch.manual_seed(CFG.seed)\n",
    }
    changed = strangers.load("competition", LESSON.source("copy") + ON_A_CARD + IN_A_COMPETITION, edits)
    changed.CFG.apex = apex
    after, submitted = changed.main()
    plain = strangers.load("competition")
    plain.CFG.apex, plain.CFG.batch_size = apex, found_and_trained(changed, 60)
    before, submission = plain.main()
    assert same_weights(before, after) and submission.equals(submitted) and submitted.notna().all(axis=None)


def test_in_a_strangers_decoder(stranger_files, capsys):
    mine = """
from functools import partial

def loss_of(model, batch):
    return model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss

def search(model_path, tokenizer_path, train_path):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    with open(train_path) as lines:
        rows = sorted((tokenize(json.loads(line), tokenizer) for line in lines), key=lambda row: -len(row["input_ids"]))

    def make():
        model = AutoModelForCausalLM.from_pretrained(model_path).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)

    longest = lambda size: collate(rows[:size], tokenizer.pad_token_id)
    return on_a_card(64, partial(fits, make, loss_of, longest), 60)
"""
    edits = {
        "    torch.manual_seed(0)\n": "    global BATCH_SIZE\n"
        "    BATCH_SIZE = search(model_path, tokenizer_path, train_path)\n    torch.manual_seed(0)\n"
    }
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    changed = strangers.load("decoder", LESSON.source("copy") + ON_A_CARD + mine, edits)
    after = changed.main(*files)
    plain = strangers.load("decoder")
    plain.BATCH_SIZE = found_and_trained(changed, 60)
    before = plain.main(*files)
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]
    assert same_weights(before, after)

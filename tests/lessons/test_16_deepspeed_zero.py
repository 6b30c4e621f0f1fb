import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import strangers
import torch
from safetensors.torch import load_file, save_file
from stranger import Ratings, regressor
from strangers import same_weights
from torch.utils.data import DataLoader, DistributedSampler

from notebooks import ROOT, answer_to_exercise, copied, lesson, names, proof_fails, run, source, tags
from tutorial_utils import packages

LESSON = lesson("16")
deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
WAYS = 'list(SHARED) if DEEPSPEED else ["DDP"]'


@deepspeed
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        model.step()\n", ""),
        ("shapes.batches(shape, ROWS[RANK::WORLD], 4)", "shapes.batches(shape, ROWS[:32], 4)"),
        ('"gradient_accumulation_steps": accumulate', '"gradient_accumulation_steps": 1'),
        ('"gradient_clipping": max_norm', '"gradient_clipping": 0.0'),
        ("        if complete:\n            after_step()", "        after_step()"),
    ],
    ids=["never stepped", "the same texts in each process", "not accumulated", "never clipped", "a hasty schedule"],
)
def test_proof_can_fail(old, new, monkeypatch):
    """With stage 3 alone, for the time it takes."""
    needed_for = LESSON.needed_for

    def one_stage(tag):
        cells = needed_for(tag)
        assert any(WAYS in source(cell) for cell in cells)
        return [{**cell, "source": source(cell).replace(WAYS, '["DDP", "stage 3"]')} for cell in cells]

    monkeypatch.setattr(LESSON, "needed_for", one_stage)
    proof_fails(LESSON, old, new)


def test_copied_needs_deepspeed_only_when_called():
    assert {"share", "train_zero"} <= copied(LESSON).keys()


def unshaken():
    """In evaluation mode, as from_pretrained leaves a model, and without dropout, which differs by process."""
    model = regressor().eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def prepared(model):
    """Two groups with their own rates, and a schedule."""
    weights, biases = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 1e-3}, {"params": biases, "lr": 1e-2}])
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)


def loss_of(model, batch):
    return model(**batch).loss


def outside(model, batch):  # the criterion is not the model's
    targets = batch["labels"]
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits.flatten()
    return torch.nn.functional.mse_loss(logits, targets.flatten().to(logits.dtype))


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.heads = torch.nn.Linear(8, 8), torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(2))

    def forward(self, inputs, which):
        return self.heads[which](self.base(inputs))


def two_heads(share, rank, which, early_freeze=False):
    """How far base and heads move in a step of SGD, by the engine and by one process; and what p.grad holds."""
    torch.manual_seed(0)
    inputs, moved, kept = torch.randn(2, 4, 8), [], None
    for engine in (True, False):
        torch.manual_seed(1)
        model = TwoHeads()
        before = [part.weight.detach().clone() for part in (model.base, *model.heads)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.base.requires_grad_(not early_freeze)
        if engine:
            zero = {"stage": 2, "reduce_bucket_size": 1e5}
            shared = share(model, optimizer, zero, 4, max_norm=0.0, zero_allow_untested_optimizer=True)
            model.base.requires_grad_(True)
            shared.backward(shared(inputs[rank], which[rank]).square().mean())
            kept = [p.grad is None for p in model.parameters()]
            shared.step()
        else:
            model.base.requires_grad_(True)
            sum(model(inputs[at], which[at]).square().mean() / 2 for at in (0, 1)).backward()
            optimizer.step()
        moved.append([(part.weight - old).norm().item() for part, old in zip((model.base, *model.heads), before)])
    return [*moved, all(kept)]


MINE = """
import torch.distributed as dist
from torch.utils.data import DistributedSampler

ZERO = {"stage": 3, "reduce_bucket_size": 1e5, "stage3_max_reuse_distance": 0}
"""
CALL = "train_zero(model, {}, loss_of, scheduler.step)\n"


def sampler(rows):
    return f"sampler=DistributedSampler({rows}, shuffle=False)"


# Each script as the page says: a sampler, the engine behind the schedule, the loop. Only the order is kept, to compare.
SCRIPTS = {
    "classifier": (
        """
def loss_of(model, batch):
    return model(**batch.to(device)).loss
""",
        {
            "batch_size, shuffle=shuffle,": f"batch_size, {sampler('rows')} if shuffle else None,",
            "2, args.epochs * len(train_loader))\n": "2, args.epochs * len(train_loader))\n"
            "    model = share(model, optimizer, ZERO, args.batch_size, max_norm=0.0)\n",
            "train_one_epoch(model, train_loader, optimizer, scheduler)\n": CALL.format("train_loader"),
        },
        {"shuffle=shuffle,": "shuffle=False,"},
    ),
    "competition": (
        """
def loss_of(model, batch):
    inputs, labels = batch
    inputs = {k: v.to(CFG.device) for k, v in inputs.items()}
    return nn.SmoothL1Loss()(model(inputs), labels.to(CFG.device))
""",
        {
            "batch_size = 32\n": "batch_size = 16\n",
            "CFG.batch_size, shuffle=True, drop_last": f"CFG.batch_size, {sampler('train')}, drop_last",
            "(optimizer, 0, num_train_steps)\n": "(optimizer, 0, num_train_steps)\n"
            "    model = share(model, optimizer, ZERO, CFG.batch_size, max_norm=CFG.max_grad_norm)\n",
            "loss = train_fn(train_loader, model, criterion, optimizer, scheduler, scaler)\n": "loss = 0.0\n        "
            + CALL.format("train_loader"),
        },
        {"shuffle=True": "shuffle=False"},
    ),
    "decoder": (
        """
def loss_of(model, batch):
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    tokens = (batch["labels"][:, 1:] != -100).sum()
    of_all = tokens.clone()
    dist.all_reduce(of_all)
    return model(**batch).loss * tokens * dist.get_world_size() / of_all
""",
        {
            "= 96, 1e-3, 16, 1": "= 96, 1e-3, 8, 1",
            "BATCH_SIZE, shuffle=shuffle,": f"BATCH_SIZE, {sampler('rows')} if shuffle else None,",
            "EPOCHS * len(loaders[0]))\n": "EPOCHS * len(loaders[0]))\n"
            "    model = share(model, optimizer, ZERO, BATCH_SIZE)\n",
            "train(model, loaders[0], optimizer, scheduler)\n": CALL.format("loaders[0]"),
        },
        {"shuffle=shuffle,": "shuffle=False,"},
    ),
}


def outcome(name, files, copied=""):
    """(the model, what the script makes besides) of a script, with the copied cell or with its own loop."""
    mine, edits, plain = SCRIPTS[name]
    script = strangers.load(name, copied and copied + MINE + mine, edits if copied else plain)
    if name == "classifier":
        texts = dict(train=files / "train.csv", valid=files / "valid.csv")
        size = 16 if copied else 32
        return script.main(SimpleNamespace(model=files / "bert", **texts, epochs=1, batch_size=size)), None
    if name == "competition":
        script.CFG.apex = False
        return script.main()
    return script.main(*(files / part for part in ("llama", "bert", "train.jsonl", "valid.jsonl"))), None


def work(folder, files):
    """What each of two processes does: all scripts in stage 3, and what they left behind in a folder."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, copied = torch.distributed.get_rank(), (folder / "copied.py").read_text()
    namespace = {}
    exec(copied, namespace)
    found = {}

    def of_a_stranger():
        data = Ratings(32)
        model = unshaken()
        optimizer, scheduler = prepared(model)
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
        engine = namespace["share"](model, optimizer, {"stage": 3, "reduce_bucket_size": 1e5}, 4, accumulate=2)
        namespace["train_zero"](engine, loader, loss_of, scheduler.step)
        assert scheduler.last_epoch == 2 and engine.module.training
        return engine, None

    def resumed():
        """Two epochs, and two with a checkpoint between, as the page says: the same weights?"""
        data, ends = Ratings(32), []
        loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))

        def made():
            model = unshaken()
            optimizer, scheduler = prepared(model)
            return namespace["share"](model, optimizer, {"stage": 3, "reduce_bucket_size": 1e5}, 4), scheduler

        for stop in (False, True):
            engine, scheduler = made()
            namespace["train_zero"](engine, loader, loss_of, scheduler.step)
            if stop:
                engine.save_checkpoint(str(folder / "go"), client_state={"schedule": scheduler.state_dict()})
                engine, scheduler = made()
                scheduler.load_state_dict(engine.load_checkpoint(str(folder / "go"))[1]["schedule"])
            namespace["train_zero"](engine, loader, loss_of, scheduler.step)
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                ends.append(torch.nn.utils.parameters_to_vector(engine.module.parameters()).detach().clone())
        return torch.equal(*ends)

    for name in ("regressor", *SCRIPTS):
        engine, submission = of_a_stranger() if name == "regressor" else outcome(name, files, copied)
        state = engine.optimizer.optimizer.state.values()
        elements = sum(tensor.numel() for values in state for tensor in values.values())
        parameters = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            whole = {name: tensor.detach().clone() for name, tensor in parameters.items()}
            weights = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
            save_file(weights, folder / f"{name}-whole-{rank}.safetensors")  # as the page does
        save_file(whole, folder / f"{name}-{rank}.safetensors")
        found[name] = [elements, sum(tensor.numel() for tensor in whole.values())]
        if submission is not None:
            submission.to_csv(folder / f"submission-{rank}.csv", index=False)
    for dtype in ("float16", "bfloat16"):
        engine, data = unshaken(), Ratings(32)
        options = {"torch_autocast": {"enabled": True, "dtype": dtype}}
        engine = namespace["share"](engine, prepared(engine)[0], {"stage": 2, "reduce_bucket_size": 1e5}, 4, **options)
        namespace["train_zero"](engine, DataLoader(data, batch_size=4), outside, lambda: None)
        found[dtype] = [engine.skipped_steps, engine.global_steps]
    share = namespace["share"]
    found["same head"], found["a head each"] = (two_heads(share, rank, which) for which in ((0, 0), (0, 1)))
    found["resumed"] = resumed()
    found["frozen first"] = two_heads(share, rank, (0, 0), early_freeze=True)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


@pytest.fixture(scope="module")
def two_processes(stranger_files, tmp_path_factory):
    """The folder that two processes left behind."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "copied.py").write_text(LESSON.source("copy"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    where |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    where |= {"CUDA_VISIBLE_DEVICES": "", "DATA": str(stranger_files / "scores"), "MODEL": str(stranger_files / "bert")}
    processes = [
        subprocess.Popen([sys.executable, __file__, str(folder), str(stranger_files)],
                         stdout=(folder / f"{rank}.log").open("w"), stderr=subprocess.STDOUT,
                         env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]  # fmt: skip
    for process in processes:
        process.wait(300)
    assert all((folder / f"found-{rank}.json").exists() for rank in (0, 1)), (folder / "0.log").read_text()[-3000:]
    return folder


def same_tensors(one, other):
    return one.keys() <= other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def check(two_processes, name, plain, start):
    """Two processes trained the weights of one, the same in both, and each holds half of the optimizer's state."""
    after = [load_file(two_processes / f"{name}-{rank}.safetensors") for rank in (0, 1)]
    assert all(torch.equal(tensor, after[1][key]) for key, tensor in after[0].items())
    shared = SimpleNamespace(parameters=lambda: [after[0][key] for key, _ in plain.named_parameters()])
    assert same_weights(plain, shared, start)
    for rank in (0, 1):
        state, every = json.loads((two_processes / f"found-{rank}.json").read_text())[name]
        assert state == pytest.approx(every, rel=0.01)  # two means, of half of the parameters


@deepspeed
def test_copied(two_processes):
    """A DistilBERT, a regression: groups with their own rates, a schedule, two micro-batches a step."""
    namespace = {}
    run(LESSON.source("baseline"), namespace)
    plain = unshaken()
    optimizer, scheduler = prepared(plain)
    namespace["train_epoch"](plain, optimizer, DataLoader(Ratings(32), batch_size=16), loss_of, scheduler.step)
    check(two_processes, "regressor", plain, unshaken())
    saved = load_file(two_processes / "regressor-whole-0.safetensors")
    assert same_tensors(load_file(two_processes / "regressor-0.safetensors"), saved)


@deepspeed
def test_autocast_in_fp16_skips_every_step_and_bf16_none(two_processes):
    """DeepSpeed 0.19.8's. If this fails, it was mended there: say so on the page."""
    found = json.loads((two_processes / "found-0.json").read_text())
    assert found["float16"] == [8, 8] and found["bfloat16"] == [0, 8]


@deepspeed
def test_in_a_strangers_classifier(two_processes, stranger_files, capsys):
    plain, _ = outcome("classifier", stranger_files)
    assert capsys.readouterr().out.strip() in (two_processes / "0.log").read_text(), "the same accuracy"
    torch.manual_seed(42)
    kind = strangers.load("classifier").AutoModelForSequenceClassification
    check(two_processes, "classifier", plain, kind.from_pretrained(stranger_files / "bert", num_labels=4))


@deepspeed
def test_in_a_strangers_competition_script(two_processes, stranger_files, monkeypatch):
    import pandas

    monkeypatch.setenv("DATA", str(stranger_files / "scores"))
    monkeypatch.setenv("MODEL", str(stranger_files / "bert"))
    plain, submission = outcome("competition", stranger_files)
    torch.manual_seed(42)
    check(two_processes, "competition", plain, strangers.load("competition").CustomModel())
    for rank in (0, 1):
        submitted = pandas.read_csv(two_processes / f"submission-{rank}.csv")
        assert (submission.id == submitted.id).all() and submitted.notna().all(axis=None)
        assert (submission - submitted).abs().max().max() <= 1e-3


@deepspeed
def test_in_a_strangers_decoder(two_processes, stranger_files):
    plain, _ = outcome("decoder", stranger_files)
    start = strangers.load("decoder").AutoModelForCausalLM.from_pretrained(stranger_files / "llama")
    check(two_processes, "decoder", plain, start)


@deepspeed
def test_what_the_page_warns_of(two_processes):
    """Another head in each rank, p.grad, and what is frozen at `share`."""
    found = json.loads((two_processes / "found-0.json").read_text())
    shared, alone, no_grad = found["same head"]
    assert shared == pytest.approx(alone, rel=1e-4) and no_grad
    shared, alone, _ = found["a head each"]
    assert shared != pytest.approx(alone, rel=0.1), "gradients reach the right heads now: say so on the page"
    shared, alone, _ = found["frozen first"]
    assert shared[0] == 0 < alone[0]


@deepspeed
def test_a_run_that_is_resumed_as_the_page_says_goes_on(two_processes):
    assert json.loads((two_processes / "found-0.json").read_text())["resumed"]


def test_after_a_process_that_ended_others_wait():
    """What it said is shown; the call after it finds new processes."""
    namespace = {}
    for cell in LESSON.code:
        if names(source(cell))[0] & {"LESSON", "WORKER", "together"} or "setup" in tags(cell):
            run(source(cell), namespace)
    namespace["DEEPSPEED"] = False
    with pytest.raises(ImportError, match="before its end"):
        run("def fail():\n    raise ValueError('before its end')\ntogether(two, 'fail()', fail)", namespace)
    run("found = together(two, 'RANK')", namespace)
    assert namespace["found"] == [0, 1]
    namespace["DEEPSPEED"] = True
    with pytest.raises(RuntimeError, match="NameError"):
        run("together(two, 'fail()')", namespace)


def test_without_deepspeed(monkeypatch):
    """The package is missing (imitated): one line, and torch's own DDP is still proved."""
    monkeypatch.setattr(packages, "left_out", {})
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    printed, namespace = [], {}
    for cell in LESSON.needed_for("proof"):
        printed.append(run(source(cell), namespace))
    assert sum("left out: its stages" in text for text in printed) == 1
    assert printed[-1].strip() == "DDP, of two processes to one: close (1e-3)"


@deepspeed
def test_the_exercise_refuses_a_loss_that_the_engine_divides_once_more():
    """AdamW and clipping hide every factor: the weights alone would not tell."""
    said = answer_to_exercise(LESSON, (" * WORLD", ""))
    assert said.startswith("not yet: weights")


if __name__ == "__main__":
    work(*map(Path, sys.argv[1:]))

"""Plans, and the scripts that are made of them: each recipe's trains, goes on after an interruption, and predicts."""

import functools
import gc
import json
import random
import re
import shutil
import subprocess
import sys
import weakref
from unittest.mock import Mock

import numpy as np
import pandas
import plan
import pytest
import torch
import transformers
from filelock import FileLock
from safetensors.torch import load_file, save_file
from test_forks import EVERY
from torch.nn.modules.module import register_module_forward_pre_hook

from notebooks import ROOT, code_lines
from tutorial_utils import data, machine, models, packages, planner, predict

ON_A_T4, ON_AN_A100 = (
    {
        (one.name, one.decoder): one
        for name in ("tiny", "tiny-decoder")
        for one in planner.recipes(half, models.head_share(name))
    }
    for half in ("fp16", "bf16")
)
ASKED = dict(model="tiny", card="T4", length=64, effective_batch=16)
each_recipe = pytest.mark.parametrize(
    "recipe", ON_A_T4.values(), ids=[("decoder: " if decoder else "") + name for name, decoder in ON_A_T4]
)


def of(name: str, decoder: bool = False) -> planner.Recipe:
    return ON_A_T4[name, decoder]


def script(recipe: planner.Recipe, model: str = "") -> str:
    """With a micro-batch that leaves more than one a step; of the tiny model, or another."""
    option = planner.Option(recipe, 8, predict.Prediction(0, {}, [], [], card_bytes=2**30))
    return plan.script(option, **ASKED | {"model": model or ("tiny-decoder" if recipe.decoder else "tiny")})


def loaded(recipe: planner.Recipe, folder, **settings) -> dict:
    """The script's functions, told where its files are."""
    namespace = {"__name__": "train"}
    exec(compile(script(recipe), f"<{recipe.name}>", "exec"), namespace)
    files = dict(train=folder / "train.csv", test=folder / "test.csv", work=folder / "work", output=folder / "out.csv")
    rate = 2e-3 if not recipe.decoder else 5e-4 if recipe.whole else 5e-3
    for field, value in (files | dict(folds=2, trained=range(2), epochs=2, lr=rate) | settings).items():
        setattr(namespace["CFG"], field, value)
    return namespace


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Where a test has used autograd in a build for CUDA, torch lets no process fork."""
    if torch.version.cuda:
        monkeypatch.setattr(plan, "in_processes", map)


TRAIN = 56  # rows


def rows_of(decoder: bool, count: int) -> pandas.DataFrame:
    if decoder:
        return pandas.DataFrame(data.completions()[0].select(range(count)).to_list())[["prompt", "completion"]]
    corpus = data.load()
    rows = corpus.train.select(range(count))
    return pandas.DataFrame([{"text": row["text"], "label": corpus.labels[row["label"]]} for row in rows])


@pytest.fixture
def folder(tmp_path, recipe):
    frame = rows_of(recipe.decoder, TRAIN + 16)
    frame[:-16].to_csv(tmp_path / "train.csv", index=False)
    answer = "completion" if recipe.decoder else "label"
    frame[-16:].drop(columns=answer).assign(id=range(16)).to_csv(tmp_path / "test.csv", index=False)
    return tmp_path


def test_what_is_not_installed_keeps_no_other_recipe_back(monkeypatch):
    """Kaggle and Colab have no bitsandbytes."""
    for package in ("bitsandbytes", "peft"):
        monkeypatch.setitem(sys.modules, package, None)
    options = planner.plan(**ASKED)
    against = {option.recipe.name: option.why for option in options}
    assert against["fp16, 8-bit AdamW"] == "needs bitsandbytes, not installed"
    assert against["LoRA, fp16"] == "needs peft, not installed" and not against["fp16, AdamW"]
    assert "need bitsandbytes or peft" in planner.instead(options, None), "a larger card is not what is missing"


@pytest.mark.parametrize("name", ["tiny", "tiny-decoder"])
def test_an_old_torchao_which_peft_refuses_is_hidden(name, monkeypatch):
    """Kaggle and Colab have one; the command opens no lesson, which would hide it."""
    pytest.importorskip("peft")
    hidden = []
    own = packages.hide_old_torchao
    monkeypatch.setattr(packages, "hide_old_torchao", lambda: hidden.append(own()))
    recipe = next(one for one in planner.recipes("fp16", models.head_share(name)) if one.adapters)
    planner.predicted([recipe], name, 1, 16, "T4")
    assert hidden


def test_the_least_work_first_and_what_was_not_asked_for_says_so():
    options = planner.plan(**ASKED, whole=True, no_new_dependency=True)
    fitting = [one for one in options if not one.why]
    assert [one.recipe.operations for one in fitting] == sorted(one.recipe.operations for one in fitting)
    assert {one.micro_batch for one in fitting} == {16} and all(one.prediction.fits for one in fitting)
    against = {one.recipe.name: one.why for one in options if one.why}
    assert against["LoRA, fp16"] == "trains adapters, not all parameters; needs peft"
    assert against["fp16, 8-bit AdamW"] == "needs bitsandbytes" and len(options) == len(planner.recipes("fp16"))


def test_exact_leaves_the_plain_step():
    options = planner.plan(**ASKED, exact=True)
    assert [one.recipe.name for one in options if not one.why] == ["fp32, AdamW", "fp32, checkpointing, AdamW"]


def test_what_does_not_fit_says_why_and_which_card_would_do():
    asked = dict(model="bert-large-uncased", card="GTX 1650", length=128, effective_batch=32)
    options = planner.plan(**asked, exact=True)
    assert all("one text needs" in one.why and "weights" in one.why for one in options if one.prediction)
    assert planner.instead(options, planner.smallest(options, **asked)) == (
        "The smallest card that would do: NVIDIA GeForce RTX 2060, with fp32, checkpointing, AdamW."
    )


def test_the_smallest_card_is_asked_again():
    """All texts at once meet no gradients of others, and may need less than one: a GTX 1660 has room for four."""
    asked = dict(model="bert-large-uncased", length=16, effective_batch=4)
    gpu, recipe = planner.smallest(planner.plan(card="3 GiB", **asked, exact=True), card="3 GiB", **asked)
    found = next(option for option in planner.plan(card=gpu.name, **asked, exact=True) if not option.why)
    assert found.recipe == recipe and found.micro_batch == 4
    smaller = max((one for one in machine.gpus().values() if one.usable < gpu.usable), key=lambda one: one.usable)
    assert all(option.why for option in planner.plan(card=smaller.name, **asked, exact=True)), smaller.name


def plan_of(asked: dict, limits: dict, card: str) -> tuple[list, list]:
    options = planner.plan(**asked | limits | {"card": card})
    return options, [option for option in options if not option.why]


@pytest.mark.skipif(not EVERY, reason="make test-all asks twenty")
@pytest.mark.parametrize("seed", range(20))
def test_the_answers_to_a_random_question_are_asked_again(seed):
    """What fits does, and a larger micro-batch does not; where nothing fits, the smallest card does, no smaller one."""
    draw = random.Random(seed)
    model, sizes = draw.choice(models.names()), [f"{size} GiB" for size in (1, 2, 3, 4, 6, 8)]
    longest = models.positions(models.config(model)) or 2048
    asked = dict(model=model, card=draw.choice([*machine.gpus(), *4 * sizes]),
                 length=min(longest, draw.choice((16, 33, 100, 128, 256, 512, 700, 2048))),
                 effective_batch=draw.choice((1, 2, 3, 6, 8, 12, 17, 32, 64)))  # fmt: skip
    limits = dict(whole=draw.random() < 0.3, exact=draw.random() < 0.15, no_new_dependency=draw.random() < 0.2)
    options, fitting = plan_of(asked, limits, asked["card"])
    step = asked["effective_batch"]
    for option in fitting:
        assert option.prediction.fits
        compile(plan.script(option, **asked), option.recipe.name, "exec")
        for more in (n for n in range(option.micro_batch + 1, step + 1) if step % n == 0):
            accumulate = 1 if more == step else 2
            larger = dict(model=model, batch=more, length=asked["length"], card=asked["card"], accumulate=accumulate)
            assert not planner.predicted([option.recipe], **larger)[0].fits, (asked, option.recipe.name, more)
            break
    if not fitting and (found := planner.smallest(options, **asked)):
        gpu, recipe = found
        assert recipe in [option.recipe for option in plan_of(asked, limits, gpu.name)[1]], (asked, gpu.name)
        smaller = [one for one in machine.gpus().values() if one.usable < gpu.usable]
        if smaller:
            next_one = max(smaller, key=lambda one: one.usable)
            assert not plan_of(asked, limits, next_one.name)[1], (asked, gpu.name, next_one.name)


def test_a_card_with_other_kernels_may_need_less(monkeypatch):
    """As if newer cards needed 9 GiB for what takes 30 of an older one."""
    GiB, parts = 2**30, {"weights": 2**30, "optimizer state": 2**31}

    def predicted(recipes, card, **_):
        gpu = machine.gpu(card)
        needed = (9 if gpu.capability >= (8, 0) else 30) * GiB
        step = [(0, 0, 0, 0, needed - predict.context(gpu), 0)], ["optimizer"]
        return [predict.Prediction(needed, parts, *step, card_bytes=needed, fits=needed <= gpu.usable)]

    monkeypatch.setattr(planner.search, "predicted", predicted)
    recipe, asked = planner.recipes("fp16")[0], dict(model="tiny", card="T4", length=64, effective_batch=8)
    options = [planner.Option(recipe, 0, predicted([recipe], "T4")[0], "one text needs more")]
    said = planner.instead(options, planner.smallest(options, **asked))
    enough = [gpu for gpu in machine.gpus().values() if predicted([recipe], gpu.name)[0].fits]
    smallest = min(enough, key=lambda gpu: gpu.usable)
    assert smallest.capability >= (8, 0) and said == (
        f"The smallest card that would do: {smallest.name}, with {planner.recipes('bf16')[0].name}."
    )


def test_operations_are_those_that_are_counted():
    """A forward and a backward pass, in multiplications of matrices, on a CPU."""
    from torch.utils.flop_counter import FlopCounterMode

    def counted(recipe):
        made = loaded(recipe, ROOT, device="cpu")
        model, ids = made["make_model"](*([] if recipe.decoder else [4])), torch.ones(4, 64, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            labels = ids if recipe.decoder else ids[:, 0]
            made["loss_of"](model, {"input_ids": ids, "labels": labels}).backward()
        of_all = counter.get_flop_counts()["Global"]  # from torch 2.15 on those of a CPU's attention too
        return sum(flops for operation, flops in of_all.items() if "attention" not in str(operation))

    for decoder in (False, True):
        plain = counted(of("fp32, AdamW", decoder))
        for name in ("fp32, checkpointing, AdamW", "LoRA, fp16", "LoRA, fp16, checkpointing"):
            assert counted(of(name, decoder)) / plain == pytest.approx(of(name, decoder).operations, rel=0.06), (
                name,
                decoder,
            )


@pytest.mark.parametrize("model", ["tiny", "tiny-decoder"])
def test_by_a_few_layers_no_micro_batch_is_passed_over_that_fits(model):
    largest = planner.search._Largest(dict(model=model, length=512, card="T4"), 8, machine.gpu("T4"))
    for recipe in planner.recipes("fp16", models.head_share(model)):
        if "optimizer" not in recipe.choices:
            of = {layers: largest._with([recipe], 8, layers)[0] for layers in (*planner.search.FEW, None)}
            least = largest._at_least(lambda _, layers, of=of: of[layers], 8)
            assert 0.98 <= least / (of[None].peak + predict.context(machine.gpu("T4"))) <= 1, recipe.name


def test_a_guess_of_fewer_texts_counts_the_gradients_that_they_meet():
    """Of one micro-batch there are none before: without them a whole prediction would be in vain."""
    largest = planner.search._Largest(dict(model="bert-large-uncased", length=512, card="T4"), 32, machine.gpu("T4"))
    for name in ("fp32, AdamW", "fp32, checkpointing, AdamW"):  # autocast's copies of weights are as if of texts
        few = functools.cache(lambda n, layers, name=name: largest._with([of(name)], n, layers)[0])
        assert largest._at_least(few, 32, 0.5) == pytest.approx(largest._at_least(few, 16), rel=0.02), name


def test_a_guess_is_never_so_high_that_what_fits_is_left_out():
    """ModernBERT's, with its vocabulary's gradients, are the highest: 2.1 % in fp32 with checkpointing."""
    largest = planner.search._Largest(dict(model="modernbert-base", length=256, card="T4"), 32, machine.gpu("T4"))
    for name in ("fp32, AdamW", "fp32, checkpointing, AdamW", "fp16, Adafactor", "LoRA, fp16"):
        few = functools.cache(lambda n, layers, name=name: largest._with([of(name)], n, layers)[0])
        guess, closer = largest._at_least(few, 32, 0.25), largest._at_least(few, 8)
        assert planner.search.NEAR * guess < closer, name


@pytest.mark.parametrize("model", ["gpt2", "llama-3.2-1b"])
def test_of_every_decoder_the_layers_are_packed(model):
    """GPT-2's are no torch.nn.Linear: transformers packs them all the same. Half a byte, and a little, of two."""
    weights, settings = {}, models.config(model, num_hidden_layers=1)
    with torch.device("meta"):
        matrices = [p for p in models.untrained(settings, causal=True).base_model.parameters() if p.ndim == 2]
    embeddings = 2 if model == "gpt2" else 1  # of words, and of places
    bytes_in_half = 2 * sum(p.numel() for p in matrices[embeddings:])
    for name in ("LoRA, fp16, checkpointing", "LoRA on 4 bits, fp16, checkpointing"):
        one, two = (
            planner.predicted([of(name, True)], model=model, batch=1, length=8, card="T4", layers=layers)[0]
            for layers in (1, 2)
        )
        weights[name] = two.parts["weights"] - one.parts["weights"]
    half, packed = weights.values()
    assert 0.25 < 1 - (half - packed) / bytes_in_half < 0.27


def test_a_decoder_has_its_own_recipes():
    options = planner.plan(model="tiny-decoder", card="T4", length=64, effective_batch=16)
    assert all(one.recipe.decoder and "24" in one.recipe.lessons and not one.why for one in options)
    packed = next(one for one in options if one.recipe.adapters == "4 bits")
    half = next(one for one in options if one.recipe.name == "LoRA, fp16, checkpointing")
    assert packed.prediction.parts["weights"] < half.prediction.parts["weights"]


def test_the_largest_micro_batch_is_asked_for(monkeypatch):
    """By a machine on which a text needs a quarter of 1 GiB in each layer, and the step of the optimizer 4 GiB."""
    GiB, asked, most = 2**30, [], [13]

    def predicted(recipes, batch, layers, **_):
        asked.extend([batch] if layers is None else ())
        held = GiB * batch * (layers or 4) // 4
        parts = {"weights": 0, "optimizer state": 0, "gradients": 0, "activations": held}
        steps = [(0, 0, 0, 0, held, 0), (0, 0, 0, 0, 0, 4 * GiB)], ["backward", "optimizer"]
        peak = max(held, 4 * GiB)
        found = predict.Prediction(peak, parts, *steps, card_bytes=peak + GiB, fits=peak <= most[0] * GiB)
        return [found for _ in recipes]

    monkeypatch.setattr(planner.search, "predicted", predicted)
    for most[0], expected in ((13, [12]), (11, [12, 8])):  # 12 texts are likely to fit a T4, and fit or do not
        asked.clear()
        options = planner.plan(model="tiny", card="T4", length=64, effective_batch=24, exact=True)
        assert [one.micro_batch for one in options if not one.why] == 2 * expected[-1:]
        assert asked == 2 * expected, "a whole prediction is asked for where it cannot fit, or a smaller one too early"


@each_recipe
def test_a_script_is_clean(recipe, tmp_path):
    pytest.importorskip("ruff")  # a platform has none
    path = tmp_path / "train.py"
    path.write_text(script(recipe))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=E,F", "--line-length=120", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_script_is_short_for_every_model():
    """Some architectures have lines of their own."""
    for model in models.names():
        for recipe in planner.recipes("fp16", models.head_share(model)):
            lines = code_lines(script(recipe, model))
            assert lines <= 200, f"{model}, {recipe.name}: {lines} lines of code"


def test_a_script_asks_its_device_for_the_half_precision():
    """So what follows holds for the recipes of an A100 too."""
    of_a_t4, of_an_a100 = ([*map(script, recipes.values())] for recipes in (ON_A_T4, ON_AN_A100))
    assert [text.replace("bf16", "fp16") for text in of_an_a100] == [text.replace("bf16", "fp16") for text in of_a_t4]


def untrained_losses(made) -> list[float]:
    """What will be in them when a decoder's main is done: of a token of each fold's held-out completions."""
    own, losses = made["train_fold"], []

    def train_fold(fold, train, valid, collate):
        losses.append(-made["score_of"](made["make_model"](), valid, collate))
        own(fold, train, valid, collate)

    made["train_fold"] = train_fold
    return losses


def epochs_of(made) -> list[dict]:
    """What will be in them when its main is done: each epoch's batches, optimizer, and the rate at its end."""
    own, epochs = made["train_accumulated"], []

    def train_accumulated(model, optimizer, loader, loss_of, *given, **options):
        batches, half = [*loader], []
        note = lambda *_: half.append(torch.is_autocast_enabled(made["CFG"].device))  # noqa: E731
        with register_module_forward_pre_hook(note):
            own(model, optimizer, batches, loss_of, *given, **options)
        decays = {group["weight_decay"] for group in optimizer.param_groups}
        found = dict(kind=type(optimizer).__name__, decays=decays, rate=optimizer.param_groups[0]["lr"], half={*half})
        epochs.append(found | {"ids": [batch["input_ids"].tolist() for batch in batches]})

    made["train_accumulated"] = train_accumulated
    return epochs


def weights_of(made) -> dict:
    """What will be in them when its main is done: the trained weights after the last epoch of the last fold."""
    own, weights = made["Files"].keep, {}

    def keep(self, model, *given):
        own(self, model, *given)
        weights.update({name: part.detach().clone() for name, part in model.named_parameters() if part.requires_grad})

    made["Files"].keep = keep
    return weights


def copy_after(epochs: int, made, place):
    """Copy the folder of a main that goes on, when so many epochs are kept."""
    own, kept = made["Files"].keep, []

    def keep(*given):
        own(*given)
        kept.append(given)
        if len(kept) == epochs:
            shutil.copytree(made["CFG"].run, place / made["CFG"].run.name)

    made["Files"].keep = keep


def half_a_decoder(folder) -> str:
    shutil.copytree(models.TINY_DECODER, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 2}))
    return str(folder)


def mean_of_folds(made, frame) -> np.ndarray:
    """Probabilities of these rows, one row at a time, by the best weights of each fold."""
    tokenizer, found = made["AutoTokenizer"].from_pretrained(made["CFG"].model), []
    for fold in range(2):
        model = made["loaded"](made["make_model"](4), made["Files"](fold).best).eval()
        texts = [tokenizer(text, truncation=True, max_length=24, return_tensors="pt") for text in frame.text]
        with torch.inference_mode():
            logits = [made["logits_of"](model, text)[0] for text in texts]
        found.append(torch.stack(logits).softmax(-1).cpu().numpy())
    return np.mean(found, 0)


@each_recipe
def test_a_script_learns_and_goes_on_to_the_same_weights(recipe, folder, capsys, as_in_a_lesson):
    short = dict(max_length=24)  # a small part of the rows will do
    if recipe.decoder:
        short["model"] = half_a_decoder(folder / "model")
    rows_of(recipe.decoder, 72 if recipe.decoder else 136).to_csv(folder / "train.csv", index=False)
    whole = loaded(recipe, folder, work=folder / "whole", **short)
    expected_weights, untrained = weights_of(whole), untrained_losses(whole) if recipe.decoder else None
    epochs = epochs_of(whole)
    copy_after(3, whole, folder / "work")  # what is there when a session ends in the middle of the second fold
    whole["main"]()
    kind = {"adamw8bit": "AdamW8bit", "adafactor": "Adafactor"}.get(recipe.choices.get("optimizer"), "AdamW")
    assert all((one["kind"], one["decays"]) == (kind, {0.0, 0.01}) for one in epochs)
    assert all(one["half"] == {"precision" in recipe.choices} for one in epochs)
    assert epochs[0]["ids"] != epochs[1]["ids"], "each epoch has the first one's batches"
    assert epochs[0]["rate"] > 1e-4 and epochs[1]["rate"] < 1e-12, "a schedule that is not at its end"
    left = {path.suffix for path in whole["CFG"].run.iterdir() if path.stat().st_size}  # locks are empty
    assert left == {".best", ".npz"}, "what nobody needs any more"
    scores = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if ", epoch " in line]
    if recipe.decoder:
        assert all(after < before - 0.25 for before, after in zip(untrained, scores[1::2], strict=True)), scores
    else:
        assert max(scores) > 0.45, f"accuracy {scores}: a quarter is chance"
    expected = pandas.read_csv(folder / "out.csv")
    if not recipe.decoder:
        mean = mean_of_folds(whole, pandas.read_csv(folder / "test.csv"))
        np.testing.assert_allclose(
            expected.filter(like="p_"), mean, atol=0.03 if "precision" in recipe.choices else 1e-5
        )
        held = pandas.read_csv(folder / "out_held_out.csv")
        guessed = held.filter(like="p_").idxmax(axis=1).str.removeprefix("p_")
        assert (guessed == held.label).mean() == pytest.approx(np.mean([max(scores[:2]), max(scores[2:])]), abs=1e-4)
    (folder / "out.csv").unlink()

    resumed = loaded(recipe, folder, **short)
    weights = weights_of(resumed)
    resumed["main"]()
    assert capsys.readouterr().out.count(", epoch ") == 1, "all is done again, or the last epoch is not"
    assert weights and weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], part) for name, part in expected_weights.items()), "other weights"
    found = pandas.read_csv(folder / "out.csv")
    assert found.id.tolist() == list(range(16)), "the rows' order"
    pandas.testing.assert_frame_equal(found, expected, rtol=1e-6)


@pytest.mark.parametrize("what", ["weights", "state"])
@pytest.mark.parametrize("recipe", [of("fp32, AdamW")], ids=["encoder"])
def test_a_session_that_ends_while_it_writes_goes_on_from_the_epoch_before(recipe, folder, what, monkeypatch, capsys):
    whole = loaded(recipe, folder, work=folder / "whole", max_length=24)
    expected = weights_of(whole)
    whole["main"]()
    cut, states = loaded(recipe, folder, max_length=24), []
    own = cut["save_file"] if what == "weights" else torch.save

    def save(content, path):
        states.append(path)
        if "fold1.last0" in path.name or what == "state" and len(states) == 4:  # the second fold's second epoch
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        own(content, path)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setitem(cut, "save_file", save) if what == "weights" else patched.setattr(torch, "save", save)
        cut["main"]()
    capsys.readouterr()
    resumed = loaded(recipe, folder, max_length=24)
    weights = weights_of(resumed)
    resumed["main"]()
    assert capsys.readouterr().out.count(", epoch ") == 1, "all is done again, or the cut epoch is not"
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], part) for name, part in expected.items()), "other weights"


@pytest.mark.parametrize("recipe", [of("fp16, AdamW"), of("LoRA, fp16", True)], ids=["encoder", "decoder"])
def test_in_fp16_as_on_a_t4_the_scale_goes_on_where_it_was(recipe, folder, as_in_a_lesson):
    def scales_of(made):  # at the beginning of each epoch
        made["HALF"] = torch.float16
        own, scales = made["train_accumulated"], []

        def train_accumulated(model, optimizer, loader, loss_of, step, scaler, *given, **options):
            scales.append(scaler.get_scale())
            scaler.set_growth_interval(2)
            own(model, optimizer, loader, loss_of, step, scaler, *given, **options)

        made["train_accumulated"] = train_accumulated
        return scales

    short = dict(max_length=24, folds=2, trained=range(1))
    whole, resumed = (loaded(recipe, folder, work=folder / name, **short) for name in ("whole", "work"))
    expected, scales = weights_of(whole), scales_of(whole)
    copy_after(1, whole, folder / "work")
    whole["main"]()
    weights, later = weights_of(resumed), scales_of(resumed)
    resumed["main"]()
    assert scales[0] == 2.0**16 != scales[1] == later[0]
    assert all(torch.equal(weights[name], part) for name, part in expected.items()), "other weights"


def small_run(recipe, folder, **settings):
    made = loaded(recipe, folder, epochs=1, output=folder / "a new one" / "out.csv", **settings)
    made["main"]()
    return pandas.read_csv(folder / "a new one" / "out.csv", keep_default_na=False)


both_kinds = pytest.mark.parametrize("recipe", [of("fp32, AdamW"), of("fp32, AdamW", True)], ids=["encoder", "decoder"])


@both_kinds
def test_other_texts_to_predict_are_predicted_and_nothing_is_trained_anew(recipe, folder, capsys):
    first = small_run(recipe, folder)
    assert capsys.readouterr().out.count("epoch 1 of 1") == 2
    test = pandas.read_csv(folder / "test.csv")
    test[::-1].to_csv(folder / "test.csv", index=False)
    turned = small_run(recipe, folder)
    assert "epoch 1 of 1" not in capsys.readouterr().out
    pandas.testing.assert_frame_equal(turned[::-1].reset_index(drop=True), first, rtol=1e-3)


def run_of(recipe, folder, **settings):
    """Where its files would be."""
    made = loaded(recipe, folder, **{"epochs": 0} | settings)
    with pytest.raises(AssertionError, match="CFG.epochs=0: 1 or more"):
        made["main"]()
    return made["CFG"].run


@both_kinds
def test_what_a_folder_holds_is_of_these_data_and_settings(recipe, folder, monkeypatch):
    """Else the rows of one file would get the answers of another, or a GPU would go on with what a CPU began."""
    own = models.HERE["tiny-decoder" if recipe.decoder else "tiny"]
    first, answer = run_of(recipe, folder), "completion" if recipe.decoder else "label"
    runs = [run_of(recipe, folder, **setting) for setting in (dict(lr=1e-4), dict(seed=1), dict(max_length=32))]
    for name in ("mine", "another"):  # a version, as Kaggle attaches it
        place = folder / name / "1"
        shutil.copytree(own, place)
        assert run_of(recipe, folder, model=str(place)) == first, "a model is known by its weights, wherever it lies"
    weights = load_file(place / "model.safetensors")
    save_file({key: value + 1 for key, value in weights.items()}, place / "model.safetensors", {"format": "pt"})
    runs.append(run_of(recipe, folder, model=str(place)))
    for one in (1, 2):  # numbers that were halves once: in fp32 most of their bytes are 0
        halves = {key: (value + one).bfloat16().float() for key, value in weights.items()}
        save_file(halves, place / "model.safetensors", {"format": "pt"})
        runs.append(run_of(recipe, folder, model=str(place)))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        for card in ("Tesla T4", "Tesla P100"):
            patched.setattr(torch.cuda, "get_device_name", lambda number, card=card: card)
            runs.append(run_of(recipe, folder))
    train = pandas.read_csv(folder / "train.csv")
    for row, column in ((3, answer), (5, "prompt" if recipe.decoder else "text")):
        changed = train.copy()
        changed.loc[row, column] = (
            train.loc[row + 1, column] + "?" if row == 5 else next(a for a in train[answer] if a != train[answer][row])
        )
        assert changed.loc[row, column] != train.loc[row, column]
        changed.to_csv(folder / "train.csv", index=False)
        runs.append(run_of(recipe, folder))
    assert len({first, *runs}) == 1 + len(runs), runs


@pytest.mark.parametrize("recipe", [of("fp32, AdamW")], ids=["encoder"])
def test_the_place_of_the_settings_in_the_file_is_none_of_them(recipe, folder):
    """Python 3.13 keeps the line of a class among its values."""
    assert run_of(recipe, folder, __firstlineno__=40) == run_of(recipe, folder, __firstlineno__=41)


@both_kinds
def test_weights_of_another_model_are_not_loaded_as_nothing(recipe, folder):
    """As after an edit of make_model: where no name agrees, the model would stay untrained, without a word."""
    small_run(recipe, folder)
    made = loaded(recipe, folder, epochs=1)
    own = made["make_model"]
    made["make_model"] = lambda *given: torch.nn.ModuleDict({"backbone": own(*given)})
    with pytest.raises(AssertionError, match="which this model lacks: remove .*work"):
        made["main"]()


def test_t5_gets_texts_without_its_end():
    """It refuses a batch in which they have different numbers of them."""
    option = planner.Option(of("fp16, AdamW"), 8, predict.Prediction(0, {}, [], [], card_bytes=2**30))
    of_t5, of_bert = (plan.script(option, **ASKED | {"model": name}) for name in ("t5-base", "bert-base-uncased"))
    assert 'str.replace("</s>", " ")' in of_t5 and "</s>" not in of_bert


@both_kinds
def test_blanks_missing_columns_and_rare_labels(recipe, folder, capsys):
    text, answer = ("prompt", "completion") if recipe.decoder else ("text", "label")
    train, test = (pandas.read_csv(folder / name) for name in ("train.csv", "test.csv"))
    train.loc[3, text], test.loc[5, text] = None, None
    train[answer] = train[answer].replace(train[answer][0], "None")
    train.loc[10:12, answer] = "rare"
    train.to_csv(folder / "train.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)
    found = small_run(recipe, folder)
    assert found.id.tolist() == list(range(16)) and found[text][5] == ""
    assert (
        recipe.decoder
        or "p_None" in found
        and f"5 labels in {TRAIN} rows, the rarest {{'rare': 3, " in capsys.readouterr().out
    )
    test.rename(columns={text: "Text"}).to_csv(folder / "test.csv", index=False)
    with pytest.raises(AssertionError, match=f"test.csv: 16 rows of .*Text.*; takes rows of .*{text}"):
        small_run(recipe, folder)
    test[:0].to_csv(folder / "test.csv", index=False)
    with pytest.raises(AssertionError, match="test.csv: 0 rows"):
        small_run(recipe, folder)
    train.loc[7, answer], train.loc[9, answer] = None, " "
    train.to_csv(folder / "train.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)
    with pytest.raises(AssertionError, match=f"no {answer} in 2 rows, such as .8, 10.; accepted: one in each"):
        small_run(recipe, folder)


@pytest.mark.parametrize("recipe", [of("fp32, AdamW")], ids=["encoder"])
def test_ids_and_labels_come_back_as_they_were_written(recipe, folder, capsys):
    train, test = (pandas.read_csv(folder / name, dtype=str) for name in ("train.csv", "test.csv"))
    codes = {label: f"0{n}" for n, label in enumerate(sorted(train.label.unique()))}
    train.assign(label=train.label.map(codes)).to_csv(folder / "train.csv", index=False)
    test.assign(id=test.id.str.zfill(6)).to_csv(folder / "test.csv", index=False)
    small_run(recipe, folder)
    found = pandas.read_csv(folder / "a new one" / "out.csv", dtype=str)
    assert found.id.tolist() == [f"{n:06}" for n in range(16)] and set(found.label) <= set(codes.values())


@both_kinds
def test_every_kind_of_line_end_in_a_text_stays_in_its_row(recipe, folder, capsys):
    train, test = (pandas.read_csv(folder / name) for name in ("train.csv", "test.csv"))
    text = "prompt" if recipe.decoder else "text"
    for frame, name in ((train, "train.csv"), (test, "test.csv")):
        frame.loc[:2, text] = ["one\rtwo", "one\ntwo", "one\r\ntwo"]
        frame.to_csv(folder / name, index=False, lineterminator="\r\n")
    found = small_run(recipe, folder)
    assert found.id.tolist() == list(range(16)) and found[text].tolist() == test[text].tolist()
    if not recipe.decoder:
        held_out = pandas.read_csv(folder / "a new one" / "out_held_out.csv")
        assert held_out.text.tolist() == train.text.tolist()


def test_a_blank_line_is_a_row(tmp_path):
    """Of a file of one column: there it is a blank text."""
    read = loaded(of("fp32, AdamW"), ROOT)["read"]
    for written, texts in (
        ("text\none\n\ntwo\n   \nthree\n", ["one", "", "two", "   ", "three"]),
        ("id,text\n1,one\n\n2,\n3,three\n\n", ["one", "", "three"]),
    ):
        (tmp_path / "test.csv").write_text(written)
        assert read(tmp_path / "test.csv", "text").text.tolist() == texts


def test_answers_take_no_column_but_those_of_their_names(tmp_path):
    made, path = loaded(of("fp32, AdamW"), ROOT), tmp_path / "out.csv.gz"
    theirs = {"p_text": ["a text"], "p_id": ["7"], "label": ["theirs"], "p_numpy": ["0.5"], "given label": ["before"]}
    made["write_beside"](pandas.DataFrame(theirs), path, {"label": ["torch"], "p_numpy": [0.25]})
    kept = {"p_text": "a text", "p_id": 7, "given label": "theirs", "given p_numpy": 0.5, "given given label": "before"}
    assert pandas.read_csv(path).iloc[0].to_dict() == kept | {"label": "torch", "p_numpy": 0.25}


def test_a_blank_prompt_is_written_to_where_no_token_begins_a_text():
    """Qwen's tokenizers have none."""
    made = loaded(of("fp32, AdamW", True), ROOT, new_tokens=32)
    tokenizer = made["AutoTokenizer"].from_pretrained(made["CFG"].model)
    tokenizer.cls_token = tokenizer.bos_token = None
    frame = pandas.DataFrame({"prompt": ["", "def f():"], "completion": ["One.", ""]})
    for columns in (["prompt"], ["prompt", "completion"]):
        assert all(row["input_ids"] for row in made["encode"](tokenizer, frame, *columns))
    assert len(made["predict"](made["make_model"](), made["encode"](tokenizer, frame[:1], "prompt"), tokenizer)) == 1


@both_kinds
def test_equal_texts_are_in_one_fold(recipe, folder):
    """Else a fold is scored on what it has learned by heart."""
    train = pandas.read_csv(folder / "train.csv")
    pandas.concat([train, train[:20]]).to_csv(folder / "train.csv", index=False)
    made, seen = loaded(recipe, folder, max_length=512), []  # texts that are cut may be equal, too

    class Seen(Exception):
        pass

    def train_fold(fold, mine, held_out, *_):
        seen.append([{tuple(row["input_ids"]) for row in rows} for rows in (mine, held_out)])
        raise Seen

    made["train_fold"] = train_fold
    with pytest.raises(Seen):
        made["main"]()
    ((mine, held_out),) = seen
    assert len(mine) > 20 and len(held_out) > 20 and not mine & held_out


@pytest.mark.parametrize("recipe", [of("fp32, AdamW")], ids=["encoder"])
def test_each_label_is_in_all_folds(recipe, folder):
    """A rare one too: dealt by chance, some fold would have none to score."""
    train = pandas.read_csv(folder / "train.csv")
    train.loc[[3, 17, 30, 44], "label"] = "rare"
    train.to_csv(folder / "train.csv", index=False)
    made, seen = loaded(recipe, folder, folds=4), {}
    made["train_fold"] = lambda fold, mine, rest, *_: seen.update({fold: {row["labels"] for row in rest}})
    with pytest.raises(FileNotFoundError):
        made["main"]()
    names, counts = sorted(train.label.unique()), train.label.value_counts()
    enough = {names.index(name) for name in names if counts[name] >= 4}
    assert names.index("rare") in enough and len(seen) == 4 and all(enough <= labels for labels in seen.values()), seen


@pytest.mark.parametrize("recipe", [of("fp32, AdamW")], ids=["encoder"])
@pytest.mark.parametrize(("labels", "said"), [(["same"] * TRAIN, "'same'"), (np.arange(TRAIN) / 7, "'0.0': 1, '0.14")])
def test_one_label_and_numbers_are_refused(recipe, labels, said, folder):
    pandas.read_csv(folder / "train.csv").assign(label=labels).to_csv(folder / "train.csv", index=False)
    with pytest.raises(
        AssertionError, match=f"{len(set(labels))} labels in {TRAIN} rows, .*{said}.*; accepted: 2 to half"
    ):
        small_run(recipe, folder)


@both_kinds
def test_a_training_that_diverges_says_so(recipe, folder):
    with pytest.raises(AssertionError, match="the training has diverged: lower CFG.lr"):
        loaded(recipe, folder, lr=1e30)["main"]()


@both_kinds
def test_main_once_more_in_the_same_process_goes_on(recipe, folder, capsys):
    made = loaded(recipe, folder, epochs=1)
    made["main"]()
    capsys.readouterr()
    made["main"]()
    assert "epoch 1 of 1" not in capsys.readouterr().out


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("recipe", [of("fp32, AdamW")], ids=["encoder"])
def test_two_processes_share_the_folds(recipe, done, folder):
    """What another one trains comes last: when it is done there, or has ended."""
    made = loaded(recipe, folder, epochs=1, max_length=24)
    made["main"]()
    alone = pandas.read_csv(folder / "out.csv")
    first, second = (made["Files"](fold).npz for fold in range(2))
    of_the_other = first.read_bytes()
    for path in (first, second):
        path.unlink()
    own, order, other = made["train_fold"], [], FileLock(f"{made['Files'](0).best}.busy")

    def train_fold(fold, *given):
        order.append(fold)
        if fold == 1 and done:
            first.write_bytes(of_the_other)
        if fold == 1:
            other.release()
        own(fold, *given)

    made["train_fold"] = train_fold
    with other:
        made["main"]()
    assert order == ([1] if done else [1, 0])
    pandas.testing.assert_frame_equal(pandas.read_csv(folder / "out.csv"), alone)


@pytest.mark.parametrize("recipe", [of("fp32, AdamW", True)], ids=["decoder"])
def test_a_decoder_trains_one_fold_and_goes_on_to_others_when_it_is_told(recipe, folder, capsys, monkeypatch):
    for trained, expected in ((range(1), ["fold 0"]), (range(2), ["fold 1"])):
        loaded(recipe, folder, epochs=1, trained=trained)["main"]()
        said = capsys.readouterr().out
        assert re.findall(r"(fold \d), epoch 1 of 1", said) == expected and f"loss of {len(trained)} of 2 folds" in said
    for best in (0, 1):
        for fold in (0, 1):
            (path,) = (folder / "work").glob(f"*/fold{fold}.npz")
            np.savez(path, score=-1.0 - (fold != best))
        made = loaded(recipe, folder, epochs=1)
        made["loaded"] = read = Mock(wraps=made["loaded"])
        made["main"]()
        assert read.call_args.args[1].name == f"fold{best}.best", "another fold writes than the best"
    monkeypatch.setenv("TRAINED", "3")
    namespace = {"__name__": "train"}
    exec(script(recipe), namespace)
    assert namespace["CFG"].trained == range(3)


@pytest.mark.parametrize("recipe", [of("fp32, AdamW")], ids=["encoder"])
def test_the_accuracy_is_that_of_all_rows_however_unequal_the_folds(recipe, folder, capsys):
    train = pandas.read_csv(folder / "train.csv")
    train.loc[: TRAIN // 2, "text"] = train.text[0]
    train.to_csv(folder / "train.csv", index=False)
    small_run(recipe, folder)
    said = float(capsys.readouterr().out.split("accuracy over all rows, best epochs: ")[1].split(";")[0])
    held = pandas.read_csv(folder / "a new one" / "out_held_out.csv")
    assert said == pytest.approx(
        (held.filter(like="p_").idxmax(axis=1).str.removeprefix("p_") == held.label).mean(), abs=1e-4
    )


@both_kinds
def test_what_the_other_texts_say_already_is_kept(recipe, folder):
    answer = "completion" if recipe.decoder else "label"
    test = pandas.read_csv(folder / "test.csv")
    # As a file does that was written by the script itself, which has them all.
    theirs = {answer: "theirs", f"given {answer}": "before"} | ({} if recipe.decoder else {"p_numpy": "theirs"})
    test.assign(**theirs).to_csv(folder / "test.csv", index=False)
    found = small_run(recipe, folder)
    assert set(found[f"given {answer}"]) == {"theirs"} and "theirs" not in set(found[answer])
    assert set(found[f"given given {answer}"]) == {"before"}, "two columns of one name"
    assert recipe.decoder or set(found["given p_numpy"]) == {"theirs"} and "theirs" not in set(found["p_numpy"])


def test_a_prompt_is_as_long_when_it_is_answered_as_when_it_was_learned():
    made = loaded(of("fp32, AdamW", True), ROOT, new_tokens=9)
    tokenizer = made["AutoTokenizer"].from_pretrained(made["CFG"].model)
    frame = pandas.DataFrame({"prompt": ["def " * 90, "def f():"], "completion": ["Two words.", "many " * 90]})
    learned = made["encode"](tokenizer, frame, "prompt", "completion")
    asked = made["encode"](tokenizer, frame, "prompt")
    for row, prompt in zip(learned, asked):
        assert row["input_ids"][: len(prompt["input_ids"])] == prompt["input_ids"]
    answers = [[label for label in row["labels"] if label != -100] for row in learned]
    ends = [answer[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id) for answer in answers]
    assert len(asked[0]["input_ids"]) == 64 - 9 and len(answers[1]) == 9 and ends == [True, False]


@pytest.mark.parametrize("recipe", [of("fp32, AdamW", True)], ids=["decoder"])
def test_short_completions_leave_more_to_prompts(recipe, folder, capsys):
    train = pandas.read_csv(folder / "train.csv")
    train.assign(prompt=train.prompt * 30, completion="one").to_csv(folder / "train.csv", index=False)
    made = loaded(recipe, folder, epochs=1)
    made["main"]()
    assert made["CFG"].new_tokens < 5 and f"{len(train)} of {len(train)} prompts fill what" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", [of("LoRA on 4 bits, fp16, checkpointing", True)], ids=["decoder"])
def test_packed_weights_end_with_their_fold(recipe, folder):
    """bitsandbytes' layers and weights hold each other, and Python's collector comes when it likes."""
    made, last = loaded(recipe, folder, epochs=1, max_length=24), []
    own = made["make_model"]

    def make_model():
        assert not any(weight() is not None for weight in last), "two models are in memory"
        model = own()
        last[:] = map(weakref.ref, model.parameters())
        return model

    made["make_model"] = make_model
    gc.disable()
    try:
        made["main"]()
    finally:
        gc.enable()
    assert last


def test_a_cpu_does_not_pack_weights_anew_in_an_evaluation():
    """Some do, and their adapters get no gradient from then on."""
    model = loaded(of("LoRA on 4 bits, fp16, checkpointing", True), ROOT)["make_model"]()
    packed = [part for part in model.modules() if type(part).__name__ == "Linear4bit"]
    assert packed and not any(part.support_avx512bf16_for_cpu for part in packed)


@pytest.mark.parametrize("name", ["fp16, AdamW", "LoRA, fp16"])
@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_what_is_trained_is_in_fp32_whatever_the_file_has(name, decoder, tmp_path):
    """Or a scaler refuses its gradients, and small steps are rounded away."""
    model = models.build("tiny-decoder" if decoder else "tiny", 4, "pretrained", causal=decoder)
    model.half().save_pretrained(tmp_path)
    made = loaded(of(name, decoder), ROOT, model=str(tmp_path))
    network = made["make_model"](*([] if decoder else [4]))
    assert {part.dtype for part in network.parameters() if part.requires_grad} == {torch.float32}


@pytest.mark.parametrize("recipe", [of("fp32, AdamW")], ids=["encoder"])
@pytest.mark.parametrize(("folds", "epochs"), [(1, 1), (241, 1), (2, 0)])
def test_folds_and_epochs_that_cannot_be_are_refused_before_the_training(recipe, folder, folds, epochs):
    with pytest.raises(AssertionError, match=f"CFG.folds={folds}: 2 to {TRAIN}; CFG.epochs={epochs}: 1 or more"):
        loaded(recipe, folder, folds=folds, epochs=epochs)["main"]()
    assert not list(folder.glob("work/*"))


def test_rows_without_a_label_leave_a_decoders_score_as_it_is():
    made = loaded(of("fp32, AdamW", True), ROOT)
    made["CFG"].micro_batch = 1
    model = made["make_model"]()
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}

    def collate(rows):
        return {name: torch.tensor([row[name] for row in rows]) for name in row}

    score = made["score_of"](model, [row], collate)
    assert made["score_of"](model, [row, row | {"labels": [-100] * 4}], collate) == score < 0


def test_the_command_writes_a_script(tmp_path, capsys):
    target = tmp_path / "train.py"
    arguments = ["--model=tiny", "--card=T4", "--length=64", "--effective-batch=16", "--exact", f"--script={target}"]
    plan.main([*arguments, "--recipe=fp32, checkpointing, AdamW", "--json"])
    answer = json.loads(capsys.readouterr().out)
    fitting = {row["recipe"]: row["micro_batch"] * row["steps"] for row in answer["recipes"] if row["fits"]}
    assert fitting == {"fp32, AdamW": 16, "fp32, checkpointing, AdamW": 16}
    assert answer["instead"] is None and answer["written"] == "fp32, checkpointing, AdamW"
    assert "checkpoint_layers(model)" in target.read_text() and models.hub("tiny") in target.read_text()
    for recipe in (of("fp32, AdamW"), of("LoRA, fp16"), of("LoRA, fp16", True)):
        exec(script(recipe), made := {"__name__": "train"})
        assert made["CFG"].micro_batch * made["CFG"].steps == 16 and made["CFG"].micro_batch == 8
        assert made["CFG"].lr == (2e-5 if recipe.whole else 2e-4)
    plan.main(arguments[:-1])
    assert "takes another step than the plain loop" in capsys.readouterr().out
    target.write_text(edited := target.read_text() + "# mine\n")
    with pytest.raises(SystemExit):
        plan.main(arguments)
    assert "is there, and another: name another file" in capsys.readouterr().err and target.read_text() == edited


def test_a_row_further_down_is_named_where_the_first_takes_a_text_or_two(monkeypatch, capsys):
    def of_a_plan(*sizes):
        recipes = planner.recipes("fp16")
        monkeypatch.setattr(planner, "plan", lambda **_: [*map(planner.Option, recipes, sizes)])
        plan.main(["--model=tiny", "--card=P100", "--length=64"])
        return capsys.readouterr().out

    said = of_a_plan(2, 1, 8)
    assert f"{planner.recipes('fp16')[2].name!r} may be faster" in said and "CUDA 12.6" in said
    assert "may be faster" not in of_a_plan(4, 1, 8) + of_a_plan(2, 1)


@pytest.mark.parametrize(
    ("model", "card", "names", "said"),
    [
        ("gemma-3-1b", "A100", ["LoRA, bf16"], ""),
        ("gemma-3-1b", "T4", ["fp32, AdamW"], ""),
        ("tiny", "GTX 1650", ["fp16, AdamW"], "NaN in some networks"),
        ("tiny", "T4", ["LoRA, fp16", "fp16, AdamW"], "another model (lesson 22); --all-parameters: 'fp16, AdamW'"),
        ("tiny", "T4", ["LoRA, fp16"], ""),
        ("tiny", "T4", ["fp16, AdamW", "LoRA, fp16"], ""),
        ("tiny", "T4", [], ""),
    ],
)
def test_a_plans_notes(model, card, names, said):
    gpu = machine.gpu(card)
    known = {one.name: one for half in ("fp16", "bf16") for one in planner.recipes(half, models.head_share(model))}
    given = plan.parser().parse_args([f"--model={model}", f"--card={card}", "--length=64"])
    options = [planner.Option(known[name], 8) for name in names]
    notes = plan.notes(given, gpu, options, options[0] if options else None)
    assert [said in note for note in notes] == [True] * bool(said), notes


def test_a_step_of_a_prime_number_of_texts_says_so_where_not_all_fit():
    said = {}
    for step, fitting in ((12, 1), (13, 1), (13, 13)):
        option = planner.Option(of("fp16, AdamW"), fitting)
        given = plan.parser().parse_args(["--model=tiny", "--card=T4", "--length=64", f"--effective-batch={step}"])
        said[step, fitting] = plan.notes(given, machine.gpu("T4"), [option], option)
    assert said[12, 1] == said[13, 13] == [] and "ask for 12 or 14" in said[13, 1][0]


def test_what_overflows_in_fp16_is_no_recipe_of_a_card_that_has_no_other(monkeypatch):
    """Neither where it would fit, nor as the smallest card that would do."""
    monkeypatch.setattr(planner.search, "OVERFLOWS", {"llama": 1})
    asked = dict(model="tiny-decoder", card="T4", length=64, effective_batch=16)
    options = {option.recipe.name: option for option in planner.plan(**asked)}
    assert [name for name, option in options.items() if not option.why] == [
        "fp32, AdamW", "fp32, checkpointing, AdamW"]  # fmt: skip
    refused = options["fp16, AdamW"]
    assert refused.why == "overflows in fp16: https://github.com/huggingface/transformers/issues/1"
    assert refused.micro_batch == 16
    gpu, recipe = planner.smallest([refused], **asked)
    assert gpu.capability >= (8, 0) and recipe == planner.recipes("bf16", models.head_share("tiny-decoder"))[0]


@pytest.mark.parametrize("name", ["GTX 1650", "P100", "V100-SXM2-32GB"])
def test_a_card_that_would_do_comes_with_what_is_known_of_it(name):
    gpu = machine.gpu(name)
    options = [planner.Option(of("fp16, AdamW"), 0, predict.Prediction(0, {}, [], []), "one text needs more")]
    (said,) = planner.of_card(gpu)
    assert planner.instead(options, (gpu, of("fp16, AdamW"))).endswith(f"{gpu.name}, with fp16, AdamW. {said}")


def test_where_no_process_can_fork_this_one_plans(monkeypatch):
    monkeypatch.setattr(plan.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert [*plan.in_processes(str, [1, 2])] == ["1", "2"]


def test_what_a_decoder_writes_is_not_cleaned_up(tmp_path):
    """Llama 3's tokenizers ask for it, and transformers 5.0 does it: "x != y" would come out as "x!= y"."""
    folder = shutil.copytree(models.hub("tiny-decoder"), tmp_path / "tokenizer")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"clean_up_tokenization_spaces": True}))
    (given,) = re.findall(r"= AutoTokenizer\.from_pretrained\(CFG\.model, (.*?)\)", script(of("fp32, AdamW", True)))
    for options, cleans in ({}, True), (eval(f"dict({given})"), False):
        assert transformers.AutoTokenizer.from_pretrained(folder, **options).clean_up_tokenization_spaces is cleans


@pytest.mark.parametrize("card", ["T4 x2", "T4x2", " T4 "])
def test_kaggles_name_of_two_cards_is_one_of_them(card):
    assert plan.parser().parse_args(["--model=tiny", f"--card={card}", "--length=64"]).card == "T4"


def test_where_nothing_fits_there_is_no_script(tmp_path, capsys):
    target = tmp_path / "train.py"
    with pytest.raises(SystemExit):
        plan.main(["--model=bert-large-uncased", "--card=1 GiB", "--length=128", "--exact", f"--script={target}"])
    said = capsys.readouterr().err
    assert "no script: no recipe fits. The smallest card that would do: " in said and not target.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model=bert-huge", "--card=T4", "--length=64"], "model was 'bert-huge'; accepted"),
        (["--model=tiny", "--card=T5", "--length=64"], "card was 'T5'; accepted"),
        (["--model=tiny", "--card=T4", "--length=513"], "length was 513; accepted: 4 to 512"),
        (["--model=qwen3-0.6b", "--card=T4", "--length=-5"], "length was -5; accepted: 4 to 1,000,000"),
        (["--model=tiny", "--card=T4", "--length=64", "--recipe=LoRA, fp16"], "recipe was 'LoRA, fp16'"),
        (["--model=tiny", "--card=T4", "--length=64", "--effective-batch=0"], "effective_batch was 0"),
        (["--model=tiny", "--card=T4", "--length=64", "--exact", "--recipe=x", "--script=t.py"], "recipe was 'x';"),
        (
            ["--model=tiny", "--card=T4", "--length=64", "--exact", "--recipe=fp16, AdamW", "--script=t.py"],
            "recipe was 'fp16, AdamW': takes another step than the plain loop; accepted: fp32, AdamW",
        ),
    ],
)
def test_errors_name_what_was_given(arguments, said, capsys):
    with pytest.raises(SystemExit):
        plan.main(arguments)
    assert f"error: {said}" in capsys.readouterr().err

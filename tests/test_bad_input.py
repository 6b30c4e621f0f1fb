"""Whatever is given: a right answer, or a clear error that names what was given and what is accepted.

Generated. A few of each in `make test`; 2,000 and more with COURSE_TEST_ALL=1 (make test-all).
"""

import collections
import contextlib
import io
import json
import math

import compare_predictors
import course
import decide
import numpy
import plan
import predict as predict_command
import pretrain_tiny
import pytest
import record_predictions
import stamp
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_forks import EVERY

import platforms
from notebooks import ROOT
from tutorial_utils import bounds, data, explorer, figures, machine, measure, models, names, packages, predict, times

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2000), st.integers(), st.floats(), st.text(max_size=12),
    st.binary(max_size=4), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2) | st.integers(0, 3), st.integers(), max_size=1), st.fractions(),
    st.sampled_from([numpy.arange(3), torch.ones(2), int, {1}, 10**400, object()]),
)  # fmt: skip
MEMORY = measure.Memory(1, dict.fromkeys(measure.ROLES, 0), [(0,) * len(measure.ROLES)], ["start"])
ran = []  # a name for each case


def _hashable(value) -> bool:
    return not isinstance(value, (list, dict, set, numpy.ndarray))


def cases(count: int):
    """So many cases; a tenth of them without COURSE_TEST_ALL."""
    quick = settings(max_examples=count if EVERY else max(10, count // 10), deadline=None, database=None,
                     derandomize=not EVERY, suppress_health_check=list(HealthCheck))  # fmt: skip
    return quick


def clear(name: str, call, *values):
    """The call's answer, or None after an error that names one of the values given and says what is accepted."""
    ran.append(name)
    try:
        return call()
    except (ValueError, FileNotFoundError) as error:
        said = str(error)
        ways_out = ("accepted: ", "give the path", "write it again")
        assert any(way in said for way in ways_out), f"what is accepted? {said}"
        named = any(repr(v)[:90] in said or str(v) and str(v)[:90] in said for v in values)
        assert named, f"{values} given, and not named: {said}"
        assert len(said) < 1500
        return None


@cases(500)
@given(JUNK | st.sampled_from(["T4", "t4", "6 GiB", "0 GiB", "1e3 GiB", "nan GiB", ". GiB", "Tesla", 2**33]))
def test_cards(card):
    found = clear("gpu", lambda: machine.gpu(card), card)
    if found is not None:
        assert found.memory > 0 and found.usable < found.memory


@cases(300)
@given(JUNK, JUNK, JUNK)
def test_models(name, labels, attention):
    named = name if str(name) in models.names() else "tiny"
    clear("config", lambda: models.config(name, 2), name)
    settings_ = clear("config", lambda: models.config("tiny", labels), labels)
    if settings_ is not None:
        assert settings_.num_labels == labels
    clear("build", lambda: models.build(named, 2, name), name)
    if attention is not None:
        clear("build", lambda: models.build("tiny", 2, attention=attention), attention)


@pytest.fixture(scope="module")
def tokenizer():
    return data.tokenizer()


ROWS = st.lists(st.fixed_dictionaries({"text": st.text(max_size=60) | JUNK, "label": st.integers(0, 3)}) | JUNK,
                max_size=4)  # fmt: skip


@cases(300)
@given(rows=ROWS, length=JUNK, size=JUNK, padding=JUNK | st.sampled_from(["longest", "max_length"]))
def test_rows_and_loaders(tokenizer, rows, length, size, padding):
    given = [length, *rows, *(row["text"] for row in rows if isinstance(row, dict) and "text" in row)]
    given += [str(row)[:60] for row in rows]
    encoded = clear("encode", lambda: data.encode(rows, tokenizer, length), *given)
    if encoded is not None:
        assert len(encoded) == len(rows)
        assert all(len(row["input_ids"]) <= (length or 512) for row in encoded)
    loader = clear("loader", lambda: data.loader(rows, tokenizer, size, length, padding), *given, size, padding)
    if loader is not None and rows and encoded is not None:
        assert sum(len(batch["labels"]) for batch in loader) == len(rows)


@cases(150)
@given(JUNK | st.sampled_from(["docstring", "hub:", "a.csv", "x/y.csv"]), JUNK, JUNK)
def test_sources(source, text, label):
    if str(source) != "docstrings" and not str(source).startswith("hub:"):
        clear("load", lambda: data.load(source, text, label), source)


@cases(150)
@given(st.lists(st.lists(st.text(max_size=8), max_size=3), max_size=5), st.binary(max_size=30), st.text(max_size=5))
def test_csv_files(tmp_path_factory, rows, raw, column):
    import csv

    path = tmp_path_factory.mktemp("csv") / "reviews.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    corpus = clear("load csv", lambda: data.load(str(path), column, "label"), "reviews.csv")
    assert corpus is None or len(corpus.train) + len(corpus.test) > 1
    path.write_bytes(raw)
    clear("load csv", lambda: data.load(str(path), column, "label"), "reviews.csv")


COUNTS = ("batch", "length", "accumulate", "checkpointing", "freeze_layers", "lora", "num_labels", "limit")
CHOICES = ("optimizer", "precision", "attention", "device", "card", "model", "prepare", "step", "inputs", "padded")


@cases(300)
@given(st.sampled_from((*COUNTS, *CHOICES)), JUNK)
def test_predictions(name, value):
    arguments = {"model": "tiny", "batch": 2, "length": 8}
    if name == "limit" and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return  # a limit on memory: passing it is out of memory, and right
    if callable(value):
        return  # what a function lacks, it says itself
    answer = clear("step_memory", lambda: predict.step_memory(**arguments | {name: value}), value)
    assert answer is None or answer.peak > 0


@cases(150)
@given(JUNK, JUNK)
def test_rounds(rounds, warmup):
    if isinstance(rounds, int) and rounds > 5 or isinstance(warmup, int) and warmup > 5:
        return
    answer = clear("timing", lambda: measure.timing({"a": lambda: None}, rounds, warmup), rounds, warmup)
    assert answer is None or len(answer.rounds["a"]) >= rounds


@cases(150)
@given(st.sampled_from(["model", "card", "batch", "length"]), JUNK)
def test_panels(name, value):
    arguments = {"model": "tiny", "card": "T4", "batch": 2, "length": 32}
    with contextlib.redirect_stdout(io.StringIO()):
        clear("panel", lambda: explorer.panel(**arguments | {name: value}), value)


@cases(150)
@given(JUNK, JUNK, JUNK)
def test_measuring(step, model, card):
    linear = torch.nn.Linear(2, 2)
    clear("memory", lambda: measure.memory(step, linear), step)
    clear("memory", lambda: measure.memory(lambda: None, model), model)
    report = clear("memory", lambda: measure.memory(lambda: None, linear, None, step), step)
    assert report is not None, "inputs may be any nesting"
    if not (type(card) is int and 0 < card < 100):  # a card without room: out of memory, and right
        clear("memory", lambda: measure.memory(lambda: None, linear, card=card), card)
    clear("timing", lambda: measure.timing(step), step)
    taken = measure.Timing({"a": [1.0]})
    for figure in (taken.median, taken.spread, lambda name: taken.ratio("a", name)):
        clear("Timing", lambda figure=figure: figure(step), step)


@cases(100)
@given(JUNK)
def test_pictures_and_tables(value):
    with contextlib.redirect_stdout(io.StringIO()):
        for show in (figures.memory_table, figures.memory_bars, figures.timeline):
            clear("figures", lambda show=show: show(value), value, {"": value})
        clear("figures", lambda: figures.bars(value, "MiB"), value)
        clear("figures", lambda: figures.lines(value, "x", "y"), value)
        clear("figures", lambda: figures.strips({"a": value}), value)


@cases(100)
@given(JUNK, JUNK)
def test_packages_and_lessons(package, figure):
    if not (isinstance(package, str) and package.isidentifier()):
        clear("need", lambda: packages.need(package, "its cells"), package)
    clear("compare", lambda: bounds.compare("01_gradient_accumulation", {str(figure): 1.0}), str(figure))
    clear("config", lambda: models.config("tiny", **{f"x{package}": 1}), f"x{package}")


@cases(100)
@given(JUNK)
def test_checkpoints(every):
    model = models.build("tiny")
    clear("checkpoint_layers", lambda: names.checkpoint_layers(model, every), every)


@cases(150)
@given(
    st.text(max_size=40)
    | st.recursive(JUNK.filter(lambda v: not isinstance(v, bytes)), st.lists).map(lambda v: json.dumps(v, default=str))
    | st.sampled_from(['{"machine": 1, "lessons": {"a": 1}}', '{"machine": {}, "lessons": []}'])
)
def test_recordings(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("bounds") / "cpu.json"
    path.write_text(text, encoding="utf-8", errors="replace")
    clear("bounds.load", lambda: bounds.load(path), "cpu.json")


LESSON = "01_gradient_accumulation"
CALLS = {
    "positions": models.positions, "untrained": models.untrained,
    "check_attention": lambda value: models.check_attention(value, None),
    "in_order": names.in_order, "preset": machine.preset, "limits": machine.limits,
    "measured": lambda value: bounds.claims(LESSON, value, {}),
    "predicted": lambda value: bounds.claims(LESSON, {}, value),
    "compared": lambda value: bounds.compare(LESSON, value, value), "Table": figures.Table,
    "untrained with": lambda value: models.untrained(models.config("tiny"), value),
    "seed": lambda value: data.loader([], data.tokenizer(), 1, seed=value),
    "shuffle": lambda value: data.loader([], data.tokenizer(), 1, shuffle=value),
}  # fmt: skip


@cases(500)
@given(
    st.sampled_from(sorted(CALLS)), JUNK | st.lists(JUNK, max_size=3) | st.dictionaries(JUNK.filter(_hashable), JUNK)
)
def test_everything_else(name, value):
    # Of a dict a name is said: of a figure too many, or of the first that is missing.
    named = [*value, "baseline_peak_bytes", "memory_ratio_hf_2022"] if isinstance(value, dict) else []
    given = "none" if name == "untrained with" and value is None else value
    clear(name, lambda: repr(CALLS[name](given)), given, *named)


@cases(150)
@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False), st.booleans())
def test_arithmetic_of_figures(first, second, settled):
    ran.append("Figure")
    with contextlib.suppress(ZeroDivisionError, OverflowError):
        made = measure.Figure(first, settled) / second
        assert made.settled is settled and (made == first / second or math.isnan(made))
    assert str(figures.size(first)).endswith(("MiB", "GiB"))
    assert times._agree([abs(first) + 1] * 3)


COMMANDS = {
    "course": course.main, "platforms": platforms.main, "predict": predict_command.main, "stamp": stamp.main,
    "decide": decide.main, "compare_predictors": compare_predictors.main, "pretrain_tiny": pretrain_tiny.main,
    "record_predictions": record_predictions.main, "plan": plan.main,
}  # fmt: skip
WORDS = st.lists(st.text(max_size=6).filter(lambda word: "check" not in word)
                 | st.sampled_from(["run", "lesson", "record", "--only", "77", "--batch", "-1", "--model", "--card"]),
                 min_size=1, max_size=4)  # fmt: skip


@cases(250)
@given(st.sampled_from(sorted(COMMANDS)), WORDS)
def test_commands(command, words):
    """None of these is a right call; each ends with usage and one line of error, before any work."""
    if command == "course" and words[0] in ("run", "record") and len(words) == 1:
        return
    said = io.StringIO()
    ran.append(command)
    quiet = contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO())
    with quiet[0], quiet[1], pytest.raises(SystemExit) as ended:
        COMMANDS[command](words)
    if ended.value.code:
        assert ended.value.code == 2 and "error: " in said.getvalue() and "Traceback" not in said.getvalue()


BATCH = collections.defaultdict(None, input=torch.ones(1, 2), labels=torch.zeros(1, dtype=torch.long))


def test_there_were_enough():
    if EVERY:
        assert len(ran) >= 2000, f"{len(ran)} cases"


def hooked(model):
    optimizer = torch.optim.SGD(model.parameters())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    return optimizer


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: machine.gpu("9" * 400 + " GiB"), "card was '999"),
        (lambda: models.build("tiny", 2, hidden_size=0), "hidden_size was 0"),
        (lambda: models.build("tiny", 2, num_hidden_layers=-1), "num_hidden_layers was -1"),
        (lambda: models.build("tiny", 2, num_hidden_layers=True), "num_hidden_layers was True"),
        (lambda: names.checkpoint_layers(torch.nn.Linear(2, 2), 1), "model was Linear"),
        (lambda: measure.memory(print, torch.nn.Linear(2, 2), torch.optim.SGD), "optimizer was"),
        (lambda: measure.timing({"a": print}, rounds=True), "rounds was True"),
        (lambda: predict.step_memory(lambda: 3, 1, 8), "what model returned was 3"),
        (lambda: predict.step_memory("tiny", 1, 8, optimizer=torch.optim.SGD), "optimizer was <class"),
        (lambda: predict.step_memory("tiny", 1, 8, optimizer=[]), "optimizer was []"),
        (lambda: predict.step_memory("tiny", 1, 8, optimizer=["adamw", "sgdw"]), "optimizer was ['adamw', 'sgdw']"),
        (lambda: predict.step_memory("tiny", 1, 8, optimizer=["sgd"] * 2, limit=9), "without a limit"),
        (lambda: predict.step_memory("tiny", 1, 8, optimizer=[hooked, hooked]), "steps in the backward pass"),
        (lambda: models.build("tiny", 2, hidden_act="nope"), "hidden_act was 'nope'; accepted: gelu"),
        (lambda: models.build("tiny", 2, max_position_embeddings=-1), "max_position_embeddings was -1"),
        (lambda: models.build("gpt2", 2, n_layer=-1), "n_layer was -1"),
        (lambda: models.build("gpt2", 2, activation_function="nope"), "activation_function was 'nope'"),
        (lambda: models.build("tiny", 2, layer_norm_eps=math.nan), "layer_norm_eps was nan"),
        (lambda: predict.step_memory(torch.nn.Linear(2, 2), 1, 8), "model was Linear"),
        (lambda: models.build("tiny", 2, hidden_dropout_prob=math.nan), "hidden_dropout_prob was nan"),
        (lambda: models.build("tiny", 2, hidden_dropout_prob=1.5), "hidden_dropout_prob was 1.5"),
        (lambda: data.encode([{"text": "words", "label": 0}], None), "tokenizer was None"),
        (lambda: predict.step_memory(lambda: torch.nn.Linear(2, 2), inputs=BATCH), "what the model returned was"),
        (lambda: predict.step_memory("tiny", inputs={"input_ids": BATCH["input"]}), "inputs was {'input_ids'"),
        (lambda: figures.memory_bars({"a": MEMORY}, outside=True), "outside was True"),
        (lambda: bounds.compare("00_memory_anatomy", None), "figures was None"),
        (lambda: bounds.compare("00_memory_anatomy", {"a": "1"}), "figures was"),
        (lambda: bounds.compare("00_memory_anatomy", {"a": 10**400}), "figures was"),
        (lambda: bounds.compare(["a"], {}), "lesson was"),
        (lambda: bounds.claims("nope", {}, {}), "lesson was 'nope'"),
        (lambda: bounds.load(ROOT), "is no recording"),
        (lambda: figures.size("x"), "count was 'x'"),
        (lambda: figures.size(10**400), "count was"),
        (lambda: figures.memory_bars({"a": MEMORY}, "T4"), "card was 'T4'"),
    ],
)
def test_what_was_found_by_hand(call, named):
    with pytest.raises(ValueError) as error:
        call()
    assert named in str(error.value)


def test_a_table_whose_rows_differ():
    table = figures.Table([{"a": 1, "b": 2}, {"b": 3, "a": 4}, {"c": 5}])
    assert table.columns == ["a", "b", "c"]
    assert [line.split() for line in repr(table).splitlines()] == [["a", "b", "c"], ["1", "2"], ["4", "3"], ["5"]]


def test_every_line_is_drawn(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_show", lambda axes, **_: drawn.extend(axes.get_lines()))
    figures.lines({str(number): {1: number, 2: number} for number in range(9)}, "x", "y")
    assert len(drawn) == 9


def test_a_recording_that_is_no_text(tmp_path):
    (path := tmp_path / "cpu.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="cpu.json is no recording"):
        bounds.load(path)
    with pytest.raises(ValueError, match="outside was True"):
        figures.memory_bars({"cpu": predict.step_memory("tiny", 1, 8, device="cpu")}, outside=True)
    with pytest.raises(ValueError, match="platform was '../requirements'; accepted: colab, kaggle"):
        platforms.pins("../requirements")

"""The corpus, the reader's own CSV, the hub that is not there, and bad input."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tutorial_utils import data, machine

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def corpus():
    return data.load()


def test_corpus_is_real_text_with_a_long_tail(corpus):
    words = sorted(len(row["text"].split()) for row in corpus.train)
    assert len(corpus.train) > 5000 and len(corpus.test) > 1000
    assert words[len(words) // 2] < 60 and words[-1] > 1000
    assert corpus.labels == list(data.LIBRARIES)
    assert {row["label"] for row in corpus.test} == {0, 1, 2, 3} and corpus.majority < 0.5


def test_no_text_leaks_from_test_to_train(corpus):
    train, test = set(corpus.train["text"]), corpus.test["text"]
    assert len(train) == len(corpus.train) and len(set(test)) == len(test)
    assert not train & set(test)


@pytest.mark.alone
def test_corpus_takes_15_seconds_the_first_time_and_1_from_its_cache(tmp_path, second):
    code = (
        "import datasets, time; from tutorial_utils import data; started = time.process_time(); "  # not a cold disk's
        "corpus = data.load(); print('seconds', time.process_time() - started, len(corpus.train))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for most in (15, 1):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        seconds = float(done.stdout.split("seconds ")[1].split()[0])
        assert seconds <= most * second, f"the corpus took {seconds:.1f} s"
    assert len(list((tmp_path / "tutorial_utils").iterdir())) == 1, "something half-written was left"


def write(tmp_path, text):
    path = tmp_path / "reviews.csv"
    path.write_text(text)
    return str(path)


def test_own_csv_through_the_same_call(tmp_path):
    rows = "".join(f'"review {i}, with a comma",{"good" if i % 2 else "bad"}\n' for i in range(20))
    corpus = data.load(write(tmp_path, "review,stars\n" + rows), text="review", label="stars")
    assert corpus.labels == ["bad", "good"] and len(corpus.train) == 16 and len(corpus.test) == 4
    assert corpus.train.features["label"].names == corpus.labels
    batch = next(iter(data.loader(corpus.train, data.tokenizer(), 4, 16)))
    assert batch["input_ids"].shape[0] == 4 and set(batch["labels"].tolist()) <= {0, 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text,stars\na,1\nb,2\n", r"column was 'label'; accepted: \['text', 'stars'\], which reviews.csv has"),
        ("text,label\na,1\n ,2\n", "reviews.csv: the text of row 1 was ' '"),
        ("text,label\na,1\na,1\n", "number of rows was 2; accepted: two different texts or more"),
        ("text,label\n", "number of rows was 0"),
        ("text,label\nonly a text\nb,1\n", "the label of row 0 was"),
    ],
)
def test_bad_csv(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        data.load(write(tmp_path, text))


def test_sources_that_do_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file at .*nowhere.csv"):
        data.load(str(tmp_path / "nowhere.csv"))
    with pytest.raises(ValueError, match="source was 'imdb'; accepted"):
        data.load("imdb")


def test_a_text_with_a_comma_needs_quotes(tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\nfine words,a\nhello, world,b\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"reviews.csv's rows longer than its header was \[1\]; accepted: none: put"):
        data.load(str(path))


def test_labels_may_be_arrays():
    encoded = data.encode([{"text": "some words", "label": np.array([0, 1])}], data.tokenizer())
    assert encoded[0]["labels"].tolist() == [0, 1]


def test_a_hub_that_cannot_be_reached_is_one_line_and_the_docstrings(monkeypatch, capsys):
    monkeypatch.setattr(machine, "hub_reachable", lambda: False)
    started = time.perf_counter()
    corpus = data.load("hub:nobody/no-such-set")  # which no cache has
    assert time.perf_counter() - started < 10
    assert corpus.source == "docstrings"
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1] == ("nobody/no-such-set: the hub cannot be reached and its cache has no copy; "
                         "using the docstrings")  # fmt: skip


def test_hub_columns_are_renamed_and_checked(monkeypatch):
    import datasets

    rows = {"review": ["a text", "b text", "c text", "d text", "e text"], "stars": [1, 2, 1, 2, 1], "id": [0] * 5}
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)})
    monkeypatch.setattr(machine, "hub_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **_: splits)
    corpus = data.load("hub:some/reviews", text="review", label="stars")
    assert corpus.labels == ["1", "2"] and corpus.train.column_names == ["text", "label"]
    with pytest.raises(
        ValueError, match=r"column was 'text'; accepted: \['review', 'stars', 'id'\], which some/reviews has"
    ):
        data.load("hub:some/reviews", label="stars")


def test_encode_cuts_only_when_asked():
    tokenizer, rows = data.tokenizer(), [{"text": "word " * 600, "label": 0}]
    with pytest.raises(
        ValueError, match="row 0 in tokens was 602; accepted: up to 512, which the model takes. Pass length=512"
    ):
        data.encode(rows, tokenizer)
    assert len(data.encode(rows, tokenizer, 64)[0]["input_ids"]) == 64
    for length in (0, -5, 513):
        with pytest.raises(ValueError, match=f"length was {length}; accepted: 3 to 512"):
            data.encode(rows, tokenizer, length)


def test_bad_loaders():
    tokenizer, rows = data.tokenizer(), [{"text": "a word", "label": 0}]
    with pytest.raises(ValueError, match="batch_size was -1; accepted: 1 or more"):
        data.loader(rows, tokenizer, -1)
    with pytest.raises(ValueError, match="padding was 'left'"):
        data.loader(rows, tokenizer, 1, padding="left")
    for text in ("", "half a pair \ud800"):
        with pytest.raises(ValueError, match="the text of row 0 was .*; accepted: words"):
            data.encode([{"text": text, "label": 0}], tokenizer)
    for label in (None, "x", float("nan")):
        with pytest.raises(ValueError, match="the label of row 0 was .*; accepted: a number"):
            data.encode([{"text": "a word", "label": label}], tokenizer)
    for changes in ({"seed": -1}, {"seed": float("nan")}, {"seed": 10**30}, {"shuffle": "no"}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} was .*; accepted: "):
            data.loader(rows, tokenizer, 1, **changes)
    for given in (None, 3, "a word"):
        with pytest.raises(ValueError, match="rows was .*; accepted: dicts"):
            data.encode(given, tokenizer)
    for source in ("hub:", "hub:x y", "hub:a/b/c", "hub:/etc/passwd", "hub:x/.."):
        with pytest.raises(ValueError, match="source was .*; accepted: "):
            data.load(source)
    with pytest.raises(FileNotFoundError, match="no file at"):
        data.load("a" * 5000 + ".csv")


def test_rows_may_come_from_an_iterator():
    rows = [{"text": "a word", "label": 0}] * 4
    assert len(data.encode(iter(rows), data.tokenizer())) == 4


def test_max_length_padding_has_one_shape():
    rows = [{"text": "word " * n, "label": 0} for n in (1, 9, 3, 30)]
    shapes = {tuple(b["input_ids"].shape) for b in data.loader(rows, data.tokenizer(), 2, 24, padding="max_length")}
    assert shapes == {(2, 24)}
    longest = [b["input_ids"].shape[1] for b in data.loader(rows, data.tokenizer(), 2, 24)]
    assert longest == [11, 24]


def test_without_datasets_the_corpus_is_a_list(corpus):
    """As on a server with only torch and transformers."""
    code = (
        "import sys; sys.modules['datasets'] = None; import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *a: None if name == 'datasets' else find(name, *a); "
        "from tutorial_utils import data; c = data.load(); import hashlib; "
        "rows = [(row['text'], row['label']) for split in (c.train, c.test) for row in split]; "
        "print(type(c.train).__name__, hashlib.sha256(repr(rows).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    rows = [(row["text"], row["label"]) for split in (corpus.train, corpus.test) for row in split]
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    assert done.stdout.splitlines()[-1] == f"list {digest}", "the selection has changed: raise data._EDITION"


def test_a_modules_texts_are_in_one_split(tmp_path, monkeypatch):
    (package := tmp_path / "a_library").mkdir()
    (package / "__init__.py").touch()
    for number in range(40):
        texts = (f'def f{i}():\n    """m{number} {i} three four five six seven eight."""\n' for i in range(5))
        (package / f"m{number}.py").write_text("".join(texts))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(data, "LIBRARIES", ("a_library",))
    train, test = ({row["text"].split()[0] for row in rows} for rows in data._harvest(data._texts_of))
    assert len(train) > 20 and test and not train & test


def test_completions_are_signatures_and_what_they_do():
    train, test = data.completions()
    assert len(train) > 5000 and len(test) > 1000
    for row in (*train.select(range(200)), *test.select(range(50))):
        assert row["prompt"].startswith("def ") and row["prompt"].endswith("):"), row
        assert row["completion"][0].isupper() and 4 <= len(row["completion"].split()) <= 40, row
    every = [*train["completion"], *test["completion"]]
    assert len(set(every)) == len(every), "a sentence stands twice, perhaps in both splits"

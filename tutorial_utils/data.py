"""Real text, its tokenizer and a loader: `load`, `tokenizer`, `encode`, `loader`.

The default needs no network: the docstrings of the Python standard library, numpy, torch and
transformers, read with `ast` and never imported. The task is to tell which library a text is from.
"""

import ast
import csv
import hashlib
import importlib.util
import math
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

from .check import accept, one_of

LIBRARIES = ("python", "numpy", "torch", "transformers")
TINY = Path(__file__).parent / "tiny"

_TEXTS_PER_LIBRARY = 3000
_BYTES_PER_LIBRARY = 9 * 2**20  # of source read, which bounds the first run to about ten seconds
_FEWEST_WORDS = 8
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib", "__pycache__"}
_EDITION = 2  # raise it when the selection below changes: the cache is keyed by it


@dataclass(frozen=True)
class Corpus:
    """Two splits of rows {"text": str, "label": int}, and the names of the labels.

    A split is a `datasets.Dataset`; where `datasets` is not installed, a list of such rows.
    """

    train: Sequence
    test: Sequence
    labels: list[str]
    source: str

    @property
    def majority(self) -> float:
        """Accuracy on the test split of always answering the commonest label."""
        answers = [row["label"] for row in self.test]
        return max(answers.count(label) for label in set(answers)) / len(answers)


def load(source: str = "docstrings", text: str = "text", label: str = "label") -> Corpus:
    """Text to train on.

    source: "docstrings"; the path of a CSV file with a header; or "hub:owner/name", a data set of
    the Hugging Face hub. Naming the hub is asking for the network; when neither the hub nor its
    cache has the data set, one line says so and the docstrings are used.
    text, label: the names of the two columns.
    Raises ValueError or FileNotFoundError, naming what was given and what is accepted.
    """
    name = source if isinstance(source, str) else ""
    if name == "docstrings":
        return _docstrings()
    if re.fullmatch(r"hub:(\w[\w.-]*/)?\w[\w.-]*", name, re.ASCII):
        return _hub(name.removeprefix("hub:"), text, label)
    if name.endswith(".csv"):
        return _csv(Path(name), text, label)
    accept(False, "source", source, '"docstrings", "hub:owner/name", or the path of a .csv file')


def tokenizer():
    """The course's own lower-case WordPiece tokenizer (8,192 tokens, at most 512 a text)."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


def encode(rows, tokenizer, length: int | None = None) -> list[dict]:
    """Tokenize rows once, unpadded: dicts of input_ids, attention_mask (and token_type_ids), labels.

    length: cut texts to this many tokens. Without it nothing is cut, and a text longer than the
    tokenizer's model accepts raises ValueError.
    """
    accept(isinstance(rows, Iterable) and not isinstance(rows, (str, bytes)), "rows", rows, "dicts with text and label")
    known = callable(tokenizer) and hasattr(tokenizer, "model_max_length")
    accept(known, "tokenizer", tokenizer, "a tokenizer of transformers, such as data.tokenizer()")
    rows, limit = list(rows), tokenizer.model_max_length  # an iterator is read once
    accept(length is None or type(length) is int and 2 < length <= limit, "length", length, f"3 to {limit}, or None")
    for number, row in enumerate(rows):
        known = isinstance(row, dict) and {"text", "label"} <= row.keys()
        accept(known, f"row {number}", row, "dicts with a text and a label")
        label = row["label"]
        none = isinstance(label, str) or label is None or isinstance(label, float) and math.isnan(label)
        accept(not none, f"the label of row {number}", label, "a number, from 0 on")
    texts = [row["text"] for row in rows]
    for number, text in enumerate(texts):
        # A half of a surrogate pair is no letter, and no tokenizer takes it.
        words = isinstance(text, str) and text.strip() and text.encode(errors="ignore").decode() == text
        accept(words, f"the text of row {number}", text, "words. Remove it or fill it in")
    if not texts:
        return []
    encoded = tokenizer(texts, truncation=length is not None, max_length=length, verbose=False)
    for number, ids in enumerate(encoded["input_ids"]):
        way = f"up to {limit}, which the model takes. Pass length={limit} (or less) to cut longer texts"
        accept(len(ids) <= limit, f"the length of row {number} in tokens", len(ids), way)
    examples = (dict(zip(encoded, values)) for values in zip(*encoded.values()))
    return [{**example, "labels": row["label"]} for example, row in zip(examples, rows)]


def loader(
    rows, tokenizer, batch_size: int, length: int | None = None, padding="longest", shuffle: bool = False, seed: int = 0
):
    """A DataLoader of padded batches (tensors of shape batch × length) of `rows`.

    padding: "longest" (of each batch) or "max_length" (every batch to `length`).
    """
    import torch
    from transformers import DataCollatorWithPadding

    for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        right = type(value) is int and least <= value < 2**63
        accept(right, name, value, f"{least} or more, below 2 to the power of 63")
    accept(type(shuffle) is bool, "shuffle", shuffle, "True or False")
    one_of(("longest", "max_length"), "padding", padding)
    examples = encode(rows, tokenizer, length)
    order = torch.Generator().manual_seed(seed)
    collate = DataCollatorWithPadding(tokenizer, padding=padding, max_length=length)
    shuffle = shuffle and examples != []  # of nothing, torch makes no order
    return torch.utils.data.DataLoader(examples, batch_size, shuffle, generator=order, collate_fn=collate)


def accuracy(model, rows, tokenizer, length: int = 64) -> float:
    """Of a classifier on rows, as a share. Leaves the model in the mode that it found."""
    import torch

    was, device = model.training, next(model.parameters()).device
    model.eval()
    with torch.inference_mode():
        right = [
            model(**batch.to(device)).logits.argmax(-1).eq(batch["labels"])
            for batch in loader(rows, tokenizer, 64, length)
        ]
    model.train(was)
    return torch.cat(right).double().mean().item()


def _docstrings() -> Corpus:
    splits = _kept("docstrings", _texts_of, lambda rows: _dataset(rows, list(LIBRARIES)))
    return Corpus(*splits, list(LIBRARIES), "docstrings")


def completions() -> tuple[Sequence, Sequence]:
    """(train, test): rows {"completion": str, "prompt": str}, for a decoder: what a function does, and its signature.

    Of the libraries of the docstrings, split as they are. The completion is the first sentence of a function's
    docstring; none stands twice.
    """
    from datasets import Dataset

    return _kept("completions", _sentences_of, Dataset.from_list)


def _kept(name: str, rows_of, dataset):
    """(train, test) of what is read from the libraries' sources, from the cache or into it."""
    if not importlib.util.find_spec("datasets"):
        print(f"datasets is not installed: the {name} are read afresh, as a plain list")
        return _harvest(rows_of)
    import datasets

    key = _hash(" ".join([str(_EDITION), platform.python_version(), *map(version, LIBRARIES[1:])]))[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tutorial_utils"
    folder = cache / f"{name}-{key}"
    if folder.exists():
        try:
            if (folder / "written").read_text(encoding="utf-8") != _content(folder):
                raise OSError("not what was written")
            return tuple(datasets.load_from_disk(str(folder / split)) for split in ("train", "test"))
        except Exception as error:  # of Arrow, of JSON, of the file system: cut off where a disk was full
            print(f"The texts in the cache cannot be read ({type(error).__name__}): they are made again")
            shutil.rmtree(folder, ignore_errors=True)
    else:
        print("Reading the docstrings of the installed libraries: once, about ten seconds")
    splits = tuple(map(dataset, _harvest(rows_of)))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            datasets.disable_progress_bars()
            for split, rows in zip(("train", "test"), splits):
                rows.save_to_disk(Path(unfinished, split))
            datasets.enable_progress_bars()
            Path(unfinished, "written").write_text(_content(Path(unfinished)), encoding="utf-8")
            with suppress(OSError):  # another process was first
                Path(unfinished).replace(folder)
    except OSError as error:
        print(f"The texts stay in memory ({error.strerror}): XDG_CACHE_HOME may name a folder with room, to keep them")
    return splits


def _content(folder: Path) -> str:
    """A digest of the texts as they were written: a disk that was full may leave zeros, which can be read."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.arrow")))).hexdigest()


def _harvest(rows_of) -> tuple[list[dict], list[dict]]:
    """(train, test): the rows that `rows_of` finds in a source, the same for the same versions.

    A module's rows all go to one split, and no first value of a row stands twice.
    """
    found = {}  # first value of a row → (the row, the hash of its module)
    for label, library in enumerate(LIBRARIES):
        root = Path(importlib.util.find_spec("ast" if library == "python" else library).origin).parent
        files = [p for p in root.rglob("*.py") if not _LEFT_OUT & set(p.relative_to(root).parts)]
        # In the order of a hash: any part of the list is then a fair sample of the library.
        ordered = sorted((_hash(p.relative_to(root).as_posix()), p) for p in files)
        before, size = len(found), 0
        for digest, path in ordered:
            if len(found) - before >= _TEXTS_PER_LIBRARY or size >= _BYTES_PER_LIBRARY:
                break
            source = path.read_bytes()
            size += len(source)
            for row in rows_of(_documented(source), label):
                found.setdefault(next(iter(row.values())), (row, digest))
    splits = ([], [])
    for first in sorted(found, key=_hash):
        row, digest = found[first]
        splits[int(digest, 16) % 5 == 0].append(row)
    return splits


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _documented(source: bytes):
    """(node, docstring) of each module, class and function that has one."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    statements = [tree]
    while statements:  # statements only: ast.walk would visit every expression as well
        node = statements.pop()
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(node, block, ())
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        if text:
            yield node, text


def _texts_of(documented, label: int):
    for _, text in documented:
        if len(text.split()) >= _FEWEST_WORDS:
            yield {"text": text, "label": label}


def _sentences_of(documented, _):
    for node, text in documented:
        sentence = re.split(r"(?<=[.:]) ", " ".join(text.split("\n\n")[0].split()))[0]
        if isinstance(node, ast.FunctionDef) and sentence[:1].isupper() and 4 <= len(sentence.split()) <= 40:
            yield {"completion": sentence, "prompt": f"def {node.name}({ast.unparse(node.args)}):"}


def _csv(path: Path, text: str, label: str) -> Corpus:
    if not os.path.isfile(path):  # which is False for a name that is too long, where Path.is_file raises
        raise FileNotFoundError(f"no file at {str(path)!r}: give the path of a CSV file with a header")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names, rows = reader.fieldnames or [], list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{path.name} cannot be read ({error}); accepted: a CSV file with a header, in UTF-8"
        ) from None
    longer = [number for number, row in enumerate(rows) if None in row]
    accept(not longer, f"{path.name}'s rows longer than its header", longer, "none: put a text with commas in quotes")
    _check_columns(names, text, label, path.name, "path")
    pairs = [(row[text], row[label]) for row in rows]
    return _from_pairs(pairs, path.name)


def _hub(name: str, text: str, label: str) -> Corpus:
    import datasets
    import huggingface_hub

    from .machine import hub_failed, hub_reachable

    offline = not hub_reachable()
    try:
        with ExitStack() as stack:  # offline, the libraries look into their cache and do not retry
            for settings in (datasets.config, huggingface_hub.constants) if offline else ():
                stack.enter_context(patch.object(settings, "HF_HUB_OFFLINE", True))
            splits = datasets.load_dataset(name)
    except Exception as error:
        if not offline and not hub_failed(error):  # no such data set, or not one
            raise
        print(f"{name}: the hub cannot be reached and its cache has no copy; using the docstrings")
        return _docstrings()
    if "test" not in splits:
        splits = splits["train"].train_test_split(0.2, seed=0)
    _check_columns(splits["train"].column_names, text, label, name, "source")
    if not isinstance(splits["train"].features[label], datasets.ClassLabel):
        splits = splits.class_encode_column(label)
    splits = splits.rename_columns({text: "text", label: "label"}).select_columns(["text", "label"])
    return Corpus(splits["train"], splits["test"], splits["train"].features["label"].names, name)


def _check_columns(found: list[str], text: str, label: str, source: str, given: str):
    for name in (text, label):
        way = f"{found}, which {source} has. Name the two to use: load({given}, text=…, label=…)"
        accept(isinstance(name, str) and name in found, "column", name, way)


def _from_pairs(pairs: list[tuple[str, str]], source: str) -> Corpus:
    for number, (text, answer) in enumerate(pairs):
        for name, value in (("text", text), ("label", answer)):
            accept(
                value and value.strip(),
                f"{source}: the {name} of row {number}",
                value,
                "words. Remove it or fill it in",
            )
    # By the hash of the text: the same text never stands in both splits.
    texts = sorted({text for text, _ in pairs}, key=_hash)
    accept(len(texts) > 1, f"{source}: the number of rows", len(pairs), "two different texts or more")
    labels = sorted({answer for _, answer in pairs})
    held_out = set(texts[: max(1, len(texts) // 5)])
    splits = ([], [])
    for text, answer in pairs:
        splits[text in held_out].append({"text": text, "label": labels.index(answer)})
    if importlib.util.find_spec("datasets"):
        splits = [_dataset(rows, labels) for rows in splits]
    return Corpus(*splits, labels, source)


def _dataset(rows: list[dict], labels: list[str]):
    from datasets import ClassLabel, Dataset, Features, Value

    return Dataset.from_list(rows, Features({"text": Value("string"), "label": ClassLabel(names=labels)}))

"""Training scripts that know nothing of this course, complete as people write them, and what they read.

A lesson's technique is put into each of them as its page says: the copied cell, and a few lines changed.
"""

import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch.utils.data import DataLoader

from tutorial_utils import data

HERE = Path(__file__).parent
ROWS = {"train": 128, "valid": 40}  # whole batches of 32, also of three folds of four


def load(name: str, copied: str = "", edits: dict[str, str] | None = None) -> ModuleType:
    """The script as a module: the copied cell before its first definition, and each of these lines replaced."""
    script = (HERE / f"{name}.py").read_text()
    for old, new in (edits or {}).items():
        assert script.count(old) == 1, f"{name}.py has {script.count(old)} of {old!r}"
        script = script.replace(old, new)
    first = min(script.index(start) for start in ("\ndef ", "\nclass ") if start in script)
    module = ModuleType(name)
    exec(compile(script[:first] + "\n\n" + copied + "\n" + script[first:], f"<{name}>", "exec"), vars(module))
    main = module.main
    module.main = lambda *given: on_the_cpu(module, main(*given))
    return module


def on_the_cpu(module: ModuleType, returned):
    """What a script's main returns, its models and the script moved to where a test makes batches and other models."""
    for part in returned if isinstance(returned, tuple) else (returned,):
        if isinstance(part, torch.nn.Module):
            part.cpu()
    getattr(module, "CFG", module).device = "cpu"
    return returned


def write_files(folder: Path) -> Path:
    """What the scripts read: CSV and JSON lines of texts, a BERT and a Llama without dropout, no index of a hub."""
    import pandas
    from transformers import AutoModelForCausalLM, LlamaConfig

    corpus, start = data.load(), 0
    for split, count in ROWS.items():
        rows = [corpus.train[i] for i in range(start, start + count)]
        start += count
        pandas.DataFrame(rows).to_csv(folder / f"{split}.csv", index=False)
        with open(folder / f"{split}.jsonl", "w") as lines:
            for row in rows:
                words = row["text"].split()
                half = {"prompt": " ".join(words[:8]), "completion": " ".join(words[8:24]) or "nothing more"}
                print(json.dumps(half), file=lines)
    (folder / "scores").mkdir()
    scores = pandas.read_csv(folder / "train.csv")
    scores["id"] = range(len(scores))
    scores["wording"] = scores.text.str.len().clip(upper=400) / 200 - 1
    scores["content"] = scores.label / 2 - 1
    scores.to_csv(folder / "scores" / "train.csv", index=False)
    scores[["id", "text"]].iloc[:50].to_csv(folder / "scores" / "test.csv", index=False)  # without labels
    shutil.copytree(data.TINY, folder / "bert")
    settings = json.loads((folder / "bert" / "config.json").read_text())
    settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "bert" / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(data.tokenizer()), **sizes)).save_pretrained(
        folder / "llama"
    )
    return folder


def competition(files: Path, monkeypatch, copied: str = "", edits: dict[str, str] | None = None) -> ModuleType:
    """The competition script, told where its files are."""
    monkeypatch.setenv("DATA", str(files / "scores"))
    monkeypatch.setenv("MODEL", str(files / "bert"))
    return load("competition", copied, edits)


def perplexities(capsys) -> list[float]:
    """Those that the decoder printed: numbers, since another padding or kernel may round the last digit otherwise."""
    lines = capsys.readouterr().out.splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith("perplexity")]


def same_weights(one, other, start) -> bool:
    """Whether two models moved to the same place, within a thousandth of their way."""
    vector = torch.nn.utils.parameters_to_vector
    way = (vector(one.parameters()) - vector(start.parameters())).norm()
    apart = (vector(one.parameters()) - vector(other.parameters())).norm()
    return way > 0 and apart <= 1e-3 * way


def classifier_learns_the_same(folder: Path, copied: str, edits: dict[str, str], capsys):
    """The classifier, changed, in micro-batches of 8: the accuracy and the weights of its own in batches of 32."""
    files = dict(model=folder / "bert", train=folder / "train.csv", valid=folder / "valid.csv")
    plain, changed = load("classifier"), load("classifier", copied, edits)
    before = plain.main(SimpleNamespace(**files, epochs=1, batch_size=32))
    after = changed.main(SimpleNamespace(**files, epochs=1, batch_size=8))
    one, other = capsys.readouterr().out.splitlines()
    assert one == other, "the same accuracy"
    torch.manual_seed(42)
    start = plain.AutoModelForSequenceClassification.from_pretrained(folder / "bert", num_labels=4)
    assert same_weights(before, after, start)


class Counting(DataLoader):
    """Counts the tokens of every batch that it gives."""

    tokens = 0

    def __iter__(self):
        for batch in super().__iter__():
            Counting.tokens += (batch[0] if isinstance(batch, (tuple, list)) else batch)["input_ids"].numel()
            yield batch


def counted(script: ModuleType, *arguments):
    """(what its main returns, the tokens of all its batches)"""
    script.DataLoader, Counting.tokens = Counting, 0
    return script.main(*arguments), Counting.tokens

"""Make the course's tiny pretrained model: python scripts/pretrain_tiny.py [--steps 4000]

Trains a WordPiece tokenizer on the training split of the corpus, then a small BERT by masked
language modelling on the same texts, and writes both to tutorial_utils/tiny with recipe.json: the
recipe, the loss, and what the pretraining is worth on the corpus task. About 30 minutes on two cores.
"""

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import transformers
from tokenizers import BertWordPieceTokenizer
from transformers import BertForMaskedLM, BertTokenizer, get_linear_schedule_with_warmup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tutorial_utils import data, models  # noqa: E402

RECIPE = dict(batch=32, length=128, learning_rate=1e-3, warmup=0.06, masked=0.15, weight_decay=0.01, seed=0)
GAIN_LENGTH = 64


def train_tokenizer(texts: list[str], folder: Path):
    trainer = BertWordPieceTokenizer(lowercase=True)
    trainer.train_from_iterator(texts, vocab_size=models.config("tiny").vocab_size, show_progress=False)
    vocabulary = trainer.get_vocab()
    tokenizer = BertTokenizer(vocab=vocabulary, do_lower_case=True, model_max_length=512)
    tokenizer.save_pretrained(folder)
    return tokenizer


def masked(batch: dict, tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids with 15 % of the tokens masked as in BERT, labels with -100 elsewhere)."""
    ids, labels = batch["input_ids"].clone(), batch["input_ids"].clone()
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    chosen = (torch.rand(ids.shape) < RECIPE["masked"]) & ~special
    labels[~chosen] = -100
    chance = torch.rand(ids.shape)
    ids[chosen & (chance < 0.8)] = tokenizer.mask_token_id
    swapped = chosen & (chance >= 0.9)
    ids[swapped] = torch.randint(len(tokenizer), (int(swapped.sum()),))
    return ids, labels


def pretrain(corpus, tokenizer, steps: int) -> tuple[BertForMaskedLM, list[float]]:
    torch.manual_seed(RECIPE["seed"])
    model = BertForMaskedLM(models.config("tiny"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE["learning_rate"], weight_decay=RECIPE["weight_decay"])
    scheduler = get_linear_schedule_with_warmup(optimizer, int(RECIPE["warmup"] * steps), steps)
    loader = data.loader(corpus.train, tokenizer, RECIPE["batch"], RECIPE["length"], shuffle=True)
    losses, started = [], time.perf_counter()
    while len(losses) < steps:
        for batch in loader:
            ids, labels = masked(batch, tokenizer)
            hidden = model.bert(ids, attention_mask=batch["attention_mask"]).last_hidden_state
            chosen = labels != -100
            # The vocabulary's logits for the masked positions only: most of the time saved.
            loss = torch.nn.functional.cross_entropy(model.cls(hidden[chosen]), labels[chosen])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) % 200 == 0:
                recent = sum(losses[-200:]) / 200
                print(f"step {len(losses)}/{steps} loss {recent:.3f} {time.perf_counter() - started:.0f} s", flush=True)
            if len(losses) == steps:
                break
    return model, losses


def fine_tuned_accuracy(weights: str, corpus, tokenizer, steps: int, seed: int = 0) -> float:
    """Test accuracy after a short fine-tuning on the corpus task, from `weights` or from random."""
    torch.manual_seed(seed)
    model = models.build("tiny", num_labels=len(corpus.labels), weights=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    loader = data.loader(corpus.train, tokenizer, 32, GAIN_LENGTH, shuffle=True, seed=seed)
    for _, batch in zip(range(steps), loader):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right = 0
    with torch.inference_mode():
        for batch in data.loader(corpus.test, tokenizer, 64, GAIN_LENGTH):
            right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return right / len(corpus.test)


def gain(corpus, tokenizer) -> dict:
    accuracies = {
        weights: round(fine_tuned_accuracy(weights, corpus, tokenizer, models.GAIN_STEPS), 4)
        for weights in ("pretrained", "random")
    }
    return {"steps": models.GAIN_STEPS, "length": GAIN_LENGTH, **accuracies, "majority": round(corpus.majority, 4)}


def make(corpus, steps: int) -> dict:
    """Train tokenizer and model into data.TINY; the recipe, without the gain."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        tokenizer = train_tokenizer([row["text"] for row in corpus.train], folder)
        model, losses = pretrain(corpus, tokenizer, steps)
        model.save_pretrained(folder)
        shutil.rmtree(data.TINY, ignore_errors=True)
        shutil.copytree(folder, data.TINY)
    return {
        "made_by": "scripts/pretrain_tiny.py",
        "date": date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "corpus": {"source": corpus.source, "train": len(corpus.train), "test": len(corpus.test)},
        "recipe": {**RECIPE, "steps": steps},
        "masked_language_loss": {
            "first_200_steps": round(sum(losses[:200]) / 200, 3),
            "last_200_steps": round(sum(losses[-200:]) / 200, 3),
        },
    }


def main(given: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--gain", action="store_true", help="train nothing; measure again what it is worth")
    arguments = parser.parse_args(given)
    if arguments.steps < 1:
        parser.error(f"steps was {arguments.steps}; accepted: 1 or more")
    corpus, path = data.load(), data.TINY / "recipe.json"
    recipe = json.loads(path.read_text(encoding="utf-8")) if arguments.gain else make(corpus, arguments.steps)
    recipe["test_accuracy_after_fine_tuning"] = gain(corpus, data.tokenizer())
    path.write_text(json.dumps(recipe, indent=2) + "\n")
    print(json.dumps(recipe["test_accuracy_after_fine_tuning"]))


if __name__ == "__main__":
    main()

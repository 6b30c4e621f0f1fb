"""Make the course's tiny pretrained models: python scripts/pretrain_tiny.py {encoder,decoder}

encoder: trains a WordPiece tokenizer on the training split of the corpus, then a small BERT by masked language
modelling on the same texts, and writes both to tutorial_utils/tiny. decoder: trains a small Llama on the same texts,
with that tokenizer, to tell the next token, and writes both to tutorial_utils/tiny_decoder. Beside each stands
recipe.json: the recipe, the loss, and what the pretraining is worth on the model's task. Half an hour on two cores.
--out FOLDER, and fewer --steps, to try it.
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
from transformers import BertForMaskedLM, BertTokenizer, LlamaForCausalLM, get_linear_schedule_with_warmup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tutorial_utils import bounds, data, models  # noqa: E402

RECIPE = dict(batch=32, length=128, learning_rate=1e-3, warmup=0.06, masked=0.15, weight_decay=0.01, seed=0, steps=4000)
DECODER = dict(batch=16, length=128, learning_rate=2e-3, warmup=0.06, weight_decay=0.01, seed=0, steps=2500)
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


def masked_losses(corpus, tokenizer, model):
    """Without end: the loss of a batch of texts with tokens masked."""
    loader = data.loader(corpus.train, tokenizer, RECIPE["batch"], RECIPE["length"], shuffle=True)
    while True:
        for batch in loader:
            ids, labels = masked(batch, tokenizer)
            hidden = model.bert(ids, attention_mask=batch["attention_mask"]).last_hidden_state
            chosen = labels != -100
            # The vocabulary's logits for the masked positions only: most of the time saved.
            yield torch.nn.functional.cross_entropy(model.cls(hidden[chosen]), labels[chosen])


def next_token_losses(corpus, tokenizer, model):
    """Without end: the loss of rows of texts one after another, cut to one length."""
    texts = tokenizer([row["text"] for row in corpus.train], verbose=False)["input_ids"]
    while True:
        stream = torch.cat([torch.tensor(texts[i]) for i in torch.randperm(len(texts))])
        rows = stream[: len(stream) // DECODER["length"] * DECODER["length"]].view(-1, DECODER["length"])
        for ids in rows.split(DECODER["batch"]):
            yield model(ids, labels=ids).loss


def pretrain(model, losses_of, recipe: dict) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["learning_rate"], weight_decay=recipe["weight_decay"])
    steps = recipe["steps"]
    scheduler = get_linear_schedule_with_warmup(optimizer, int(recipe["warmup"] * steps), steps)
    losses, started = [], time.perf_counter()
    for loss, _ in zip(losses_of, range(steps)):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % 200 == 0:
            recent = sum(losses[-200:]) / 200
            print(f"step {len(losses)}/{steps} loss {recent:.3f} {time.perf_counter() - started:.0f} s", flush=True)
    return losses


def fine_tuned_accuracy(weights: str, corpus, tokenizer, steps: int, seed: int = 0) -> float:
    """Test accuracy after a short fine-tuning on the corpus task, from `weights` or from random."""
    torch.manual_seed(seed)
    model = models.build("tiny", num_labels=len(corpus.labels), weights=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    loader = data.loader(corpus.train, tokenizer, 16, GAIN_LENGTH, shuffle=True, seed=seed)
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


def completion_batches(rows, tokenizer, size: int, seed: int | None = None):
    """Batches of prompts and completions, joined as lesson 24 does; the labels of prompts and padding are -100."""
    order = range(len(rows)) if seed is None else torch.randperm(len(rows), generator=torch.manual_seed(seed)).tolist()
    prompts, answers = (
        tokenizer(list(rows[name]), add_special_tokens=False)["input_ids"] for name in ("prompt", "completion")
    )
    first, last = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
    for start in range(0, len(rows), size):
        chosen = [(first + prompts[i][1 - GAIN_LENGTH :], answers[i] + last) for i in order[start : start + size]]
        longest = max(len(prompt) + len(answer) for prompt, answer in chosen)
        ids = torch.full((len(chosen), longest), tokenizer.pad_token_id)
        labels = torch.full_like(ids, -100)
        for row, (prompt, answer) in enumerate(chosen):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        yield {"input_ids": ids, "attention_mask": (ids != tokenizer.pad_token_id).long(), "labels": labels}


@torch.inference_mode()
def completion_loss(model, rows, tokenizer) -> float:
    """Nats a token of the completions."""
    model.eval()
    total = count = 0
    for batch in completion_batches(rows, tokenizer, 64):
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        total, count = total + float(model(**batch).loss) * tokens, count + tokens
    model.train()
    return total / count


def fine_tuned_loss(weights: str, splits, tokenizer, steps: int, seed: int = 0) -> dict[str, float]:
    """Test loss on completions before and after a short fine-tuning, from `weights` or from random."""
    torch.manual_seed(seed)
    model, (train, test) = models.build("tiny-decoder", weights=weights, causal=True), splits
    optimizer, before = torch.optim.AdamW(model.parameters(), lr=1e-3), completion_loss(model, test, tokenizer)
    for _, batch in zip(range(steps), completion_batches(train, tokenizer, 16, seed)):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"before": round(before, 4), "after": round(completion_loss(model, test, tokenizer), 4)}


def encoder_gain(corpus, tokenizer) -> dict:
    accuracies = {
        weights: round(fine_tuned_accuracy(weights, corpus, tokenizer, models.GAIN_STEPS), 4)
        for weights in ("pretrained", "random")
    }
    found = {"steps": models.GAIN_STEPS, "length": GAIN_LENGTH, **accuracies, "majority": round(corpus.majority, 4)}
    return {"test_accuracy_after_fine_tuning": found}


def decoder_gain(_, tokenizer) -> dict:
    (train, test), steps, few = data.completions(), models.GAIN_STEPS, range(400)
    losses = {
        weights: fine_tuned_loss(weights, (train, test.select(few)), tokenizer, steps)
        for weights in ("pretrained", "random")
    }
    return {"completion_loss_after_fine_tuning": {"steps": steps, "of_texts": len(few), **losses}}


def make_encoder(corpus, recipe: dict, target: Path) -> dict:
    """Train tokenizer and model into this folder; the recipe, without the gain."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer([row["text"] for row in corpus.train], Path(folder))
        torch.manual_seed(recipe["seed"])
        model = BertForMaskedLM(models.config("tiny"))
        losses = pretrain(model, masked_losses(corpus, tokenizer, model), recipe)
        _replace(target, model, Path(folder))
    return _recipe(corpus, recipe, "masked_language_loss", losses)


def make_decoder(corpus, recipe: dict, target: Path) -> dict:
    """Train the model into this folder, the tiny encoder's tokenizer beside it; the recipe, without the gain."""
    tokenizer = data.tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(recipe["seed"])
        model = LlamaForCausalLM(models.config("tiny-decoder"))
        losses = pretrain(model, next_token_losses(corpus, tokenizer, model), recipe)
        tokenizer.save_pretrained(folder)
        _replace(target, model, Path(folder))
    return _recipe(corpus, recipe, "next_token_loss", losses)


def _replace(target: Path, model, folder: Path):
    model.save_pretrained(folder)
    shutil.copytree(folder, target, dirs_exist_ok=True)  # nothing else that is there is touched


def _recipe(corpus, recipe: dict, kind: str, losses: list[float]) -> dict:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    ends = {"first_200_steps": losses[:200], "last_200_steps": losses[-200:]}
    return {
        "made_by": "scripts/pretrain_tiny.py",
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
        "corpus": {"source": corpus.source, "train": len(corpus.train), "test": len(corpus.test)},
        "recipe": recipe,
        kind: {name: round(sum(part) / len(part), 3) for name, part in ends.items()},
    }


KINDS = {
    "encoder": (make_encoder, RECIPE, encoder_gain, data.TINY),
    "decoder": (make_decoder, DECODER, decoder_gain, models.TINY_DECODER),
}


def main(given: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, help="the recipe's own, if not given")
    parser.add_argument("--out", type=Path, help="a folder for it, in place of the package's")
    parser.add_argument("--gain", action="store_true", help="train nothing; measure again what the package's is worth")
    arguments = parser.parse_args(given)
    make, recipe, gain, packaged = KINDS[arguments.kind]
    steps, folder = arguments.steps or recipe["steps"], arguments.out or packaged
    if steps < 1 or arguments.steps == 0:
        parser.error(f"steps was {arguments.steps}; accepted: 1 or more")
    if arguments.gain and arguments.out:
        parser.error("--gain is of the package's own; accepted: without --out")
    corpus, path = data.load(), folder / "recipe.json"
    if arguments.gain:
        recipe = json.loads(path.read_text(encoding="utf-8"))
    else:
        recipe = make(corpus, recipe | {"steps": steps}, folder)
    recipe |= {} if arguments.out else gain(corpus, data.tokenizer())
    bounds.write(path, recipe)
    print(json.dumps(recipe))


if __name__ == "__main__":
    main()

"""Fine-tune a causal language model on prompts and their completions. Only the completions are learned."""

import json
import sys

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_LENGTH, LR, BATCH_SIZE, EPOCHS = 96, 1e-3, 16, 1
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tokenize(example, tokenizer):
    prompt = tokenizer(example["prompt"], add_special_tokens=False)["input_ids"]
    answer = tokenizer(example["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.sep_token_id]
    ids = (prompt + answer)[:MAX_LENGTH]
    return {"input_ids": ids, "labels": ([-100] * len(prompt) + answer)[:MAX_LENGTH]}


def collate(examples, pad):
    longest = max(len(e["input_ids"]) for e in examples)

    def padded(name, value):
        return torch.tensor([e[name] + [value] * (longest - len(e[name])) for e in examples])

    ids = padded("input_ids", pad)
    return {"input_ids": ids, "attention_mask": (ids != pad).long(), "labels": padded("labels", -100)}


def train(model, loader, optimizer, scheduler):
    model.train()
    for step, batch in enumerate(loader):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: {loss.item():.3f}")


@torch.no_grad()
def perplexity(model, loader):
    model.eval()
    total = count = 0
    for batch in loader:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        tokens = (batch["labels"][:, 1:] != -100).sum().item()
        total, count = total + model(**batch).loss.item() * tokens, count + tokens
    return 2.718281828 ** (total / count)


def main(model_path, tokenizer_path, train_path, valid_path):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    model = AutoModelForCausalLM.from_pretrained(model_path).to(device)
    loaders = []
    for path, shuffle in ((train_path, True), (valid_path, False)):
        with open(path) as lines:
            rows = [tokenize(json.loads(line), tokenizer) for line in lines]
        loader = DataLoader(
            rows, BATCH_SIZE, shuffle=shuffle, collate_fn=lambda rows: collate(rows, tokenizer.pad_token_id)
        )
        loaders.append(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loaders[0]))
    for _ in range(EPOCHS):
        train(model, loaders[0], optimizer, scheduler)
        print(f"perplexity {perplexity(model, loaders[1]):.2f}")
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])

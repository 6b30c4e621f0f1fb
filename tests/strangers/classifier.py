"""Fine-tune a transformers classifier on a CSV of texts and labels, as its tutorials do."""

import argparse

import pandas as pd
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

device = "cuda" if torch.cuda.is_available() else "cpu"


def make_loader(frame, tokenizer, batch_size, shuffle):
    rows = tokenizer(frame.text.tolist(), truncation=True, max_length=64)
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(rows["input_ids"], frame.label)]
    return DataLoader(rows, batch_size, shuffle=shuffle, collate_fn=DataCollatorWithPadding(tokenizer))


def train_one_epoch(model, loader, optimizer, scheduler):
    model.train()
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = 0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        right += (model(**batch).logits.argmax(-1) == batch["labels"]).sum().item()
    return right / len(loader.dataset)


def main(args):
    torch.manual_seed(42)
    train, valid = pd.read_csv(args.train), pd.read_csv(args.valid)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=train.label.nunique()).to(device)
    train_loader = make_loader(train, tokenizer, args.batch_size, True)
    valid_loader = make_loader(valid, tokenizer, 64, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, args.epochs * len(train_loader))
    for epoch in range(args.epochs):
        train_one_epoch(model, train_loader, optimizer, scheduler)
        print(f"epoch {epoch}: accuracy {evaluate(model, valid_loader):.4f}")
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="bert-base-uncased")
    parser.add_argument("--train", default="train.csv")
    parser.add_argument("--valid", default="valid.csv")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=32)
    main(parser.parse_args())

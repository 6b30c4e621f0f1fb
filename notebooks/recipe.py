"""A competition script with the techniques that go together: recipe.md says what each saves, and names its lesson.

Reads train.csv and test.csv (id, text, and in train.csv the targets), writes submission.csv.
"""

import os

import bitsandbytes as bnb
import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoTokenizer, get_cosine_schedule_with_warmup


class CFG:
    data = os.environ.get("DATA", "/kaggle/input/scores")
    model = os.environ.get("MODEL", "microsoft/deberta-v3-large")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    targets, max_length = ["wording", "content"], 512
    micro_batch, steps = 8, 4  # 01: a batch of 32, of which 8 texts at a time are on the card
    half = torch.float16 if device == "cuda" else None  # 03: a T4 has no bf16
    encoder_lr, head_lr, weight_decay, max_norm = 1e-5, 1e-4, 0.01, 1.0
    epochs, warmup, folds, seed = 3, 0.1, 4, 42


class Texts(Dataset):
    def __init__(self, frame, tokenizer):
        self.ids = tokenizer(frame["text"].fillna("").tolist(), truncation=True, max_length=CFG.max_length)["input_ids"]
        self.lengths = np.array([len(ids) for ids in self.ids])
        self.targets = frame[CFG.targets].to_numpy("float32") if set(CFG.targets) <= set(frame) else None

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], None if self.targets is None else self.targets[i]


def collator(tokenizer):
    def collate(rows):
        ids, targets = zip(*rows)
        inputs = tokenizer.pad({"input_ids": list(ids)}, padding="longest", return_tensors="pt")  # 07
        return inputs, None if targets[0] is None else torch.from_numpy(np.stack(targets))

    return collate


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = AutoModel.from_pretrained(CFG.model, dtype=torch.float32)  # 03
        self.head = torch.nn.Linear(self.backbone.config.hidden_size, len(CFG.targets))
        newer = getattr(self.backbone, "activation_checkpointing_enable", None)
        (newer or self.backbone.gradient_checkpointing_enable)({"use_reentrant": False})  # 05
        self.backbone.embeddings.requires_grad_(False)  # 02

    def forward(self, inputs):
        hidden = self.backbone(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def optimizer_of(model):
    backbone = [p for p in model.backbone.parameters() if p.requires_grad]
    decayed, rest = [p for p in backbone if p.ndim > 1], [p for p in backbone if p.ndim == 1]  # 11: biases and norms
    groups = [{"params": decayed, "weight_decay": CFG.weight_decay}, {"params": rest}]
    groups.append({"params": model.head.parameters(), "lr": CFG.head_lr})
    return bnb.optim.AdamW8bit(groups, lr=CFG.encoder_lr, weight_decay=0.0)  # 04


def autocast():
    return torch.autocast(CFG.device, CFG.half, enabled=CFG.half is not None)


def pooled_batches(lengths, size):
    """Batches of like lengths in random order: shuffled, sorted within 50 batches, shuffled again (as 08)."""
    chunks = torch.randperm(len(lengths)).split(50 * size)
    batches = [rows for chunk in chunks for rows in chunk[torch.from_numpy(lengths)[chunk].argsort()].split(size)]
    return [batches[i].tolist() for i in torch.randperm(len(batches))]


def train_epoch(model, data, collate, criterion, optimizer, scheduler, scaler):
    model.train()
    model.backbone.embeddings.eval()  # 02
    batches = pooled_batches(data.lengths, CFG.micro_batch)
    loader = iter(DataLoader(data, batch_sampler=batches, collate_fn=collate, pin_memory=CFG.device == "cuda"))
    total = 0.0
    for start in range(0, len(batches), CFG.steps):
        window = batches[start : start + CFG.steps]
        rows = sum(map(len, window))
        for _ in window:
            inputs, targets = next(loader)
            with autocast():
                outputs = model(inputs.to(CFG.device))
            loss = criterion(outputs.float(), targets.to(CFG.device)) * (len(targets) / rows)  # 01
            scaler.scale(loss).backward()
            total += loss.detach() * rows
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CFG.max_norm)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= scale:  # 03: lower means that this step was skipped
            scheduler.step()
    return total.item() / len(data)


@torch.no_grad()
def predict(model, data, collate):
    """Predictions in the order of the rows, though the longest texts come first (08)."""
    model.eval()
    order, outputs = np.argsort(-data.lengths, kind="stable"), []
    for inputs, _ in DataLoader(data, 4 * CFG.micro_batch, sampler=order.tolist(), collate_fn=collate):
        with autocast():
            outputs.append(model(inputs.to(CFG.device)).float().cpu())
    return torch.cat(outputs).numpy()[order.argsort()]


def train_fold(train, valid, tokenizer):
    collate, model = collator(tokenizer), Model().to(CFG.device)
    optimizer = optimizer_of(model)
    train, answers, valid = Texts(train, tokenizer), valid[CFG.targets].to_numpy(), Texts(valid, tokenizer)
    steps = CFG.epochs * -(-len(train) // (CFG.micro_batch * CFG.steps))
    scheduler = get_cosine_schedule_with_warmup(optimizer, int(CFG.warmup * steps), steps)
    scaler = torch.amp.GradScaler(CFG.device, enabled=CFG.half == torch.float16)
    for epoch in range(CFG.epochs):
        loss = train_epoch(model, train, collate, torch.nn.SmoothL1Loss(), optimizer, scheduler, scaler)
        error = np.sqrt(((predict(model, valid, collate) - answers) ** 2).mean(0)).mean()
        print(f"epoch {epoch}: loss {loss:.4f}, MCRMSE {error:.4f}")
    return model


def main():
    torch.manual_seed(CFG.seed)
    tokenizer = AutoTokenizer.from_pretrained(CFG.model)
    options = dict(dtype={"id": str, "text": str}, keep_default_na=False)  # "None" may be a text, but is no target
    train, test = (pd.read_csv(f"{CFG.data}/{name}.csv", **options) for name in ("train", "test"))
    train = train.assign(**train[CFG.targets].apply(pd.to_numeric, errors="coerce")).dropna(subset=CFG.targets)
    found, fold = 0.0, np.arange(len(train)) % CFG.folds
    for held_out in range(CFG.folds):
        model = train_fold(train[fold != held_out], train[fold == held_out], tokenizer)
        found = found + predict(model, Texts(test[["text"]], tokenizer), collator(tokenizer)) / CFG.folds
        del model  # before the next one is made
    return test[["id"]].assign(**dict(zip(CFG.targets, found.T)))


if __name__ == "__main__":
    main().to_csv("submission.csv", index=False)

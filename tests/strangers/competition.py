"""A competition script: two scores for each text. Backbone and head, folds, layer-wise rates, AMP, a submission."""

import os

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModel, AutoTokenizer, get_cosine_schedule_with_warmup


class CFG:
    data = os.environ.get("DATA", "/kaggle/input/scores")
    model = os.environ.get("MODEL", "microsoft/deberta-v3-base")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    targets = ["wording", "content"]
    max_len = 64
    batch_size = 32
    epochs = 1
    encoder_lr = 2e-4
    head_lr = 1e-3
    max_grad_norm = 1.0
    apex = True
    n_folds = 4
    trn_folds = [0]
    seed = 42


class TextDataset(Dataset):
    def __init__(self, df, tokenizer, train=True):
        self.texts, self.tokenizer = df["text"].values, tokenizer
        self.labels = df[CFG.targets].values if train else None

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        inputs = self.tokenizer(
            self.texts[i], max_length=CFG.max_len, padding="max_length", truncation=True, return_tensors="pt"
        )
        inputs = {k: v[0] for k, v in inputs.items()}
        if self.labels is None:
            return inputs
        return inputs, torch.tensor(self.labels[i], dtype=torch.float)


class MeanPooling(nn.Module):
    def forward(self, last_hidden_state, attention_mask):
        mask = attention_mask.unsqueeze(-1).expand(last_hidden_state.size()).float()
        return (last_hidden_state * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


class CustomModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = AutoConfig.from_pretrained(CFG.model)
        self.model = AutoModel.from_pretrained(CFG.model, config=self.config)
        self.pool = MeanPooling()
        self.fc = nn.Linear(self.config.hidden_size, len(CFG.targets))

    def forward(self, inputs):
        outputs = self.model(**inputs)
        return self.fc(self.pool(outputs.last_hidden_state, inputs["attention_mask"]))


def get_optimizer_params(model):
    no_decay = ["bias", "LayerNorm.weight"]
    encoder = list(model.model.named_parameters())
    decay = [p for n, p in encoder if not any(nd in n for nd in no_decay)]
    rest = [p for n, p in encoder if any(nd in n for nd in no_decay)]
    return [
        {"params": decay, "lr": CFG.encoder_lr, "weight_decay": 0.01},
        {"params": rest, "lr": CFG.encoder_lr, "weight_decay": 0.0},
        {"params": model.fc.parameters(), "lr": CFG.head_lr, "weight_decay": 0.0},
    ]


def train_fn(train_loader, model, criterion, optimizer, scheduler, scaler):
    model.train()
    losses = []
    for inputs, labels in train_loader:
        inputs = {k: v.to(CFG.device) for k, v in inputs.items()}
        labels = labels.to(CFG.device)
        with torch.autocast(CFG.device, enabled=CFG.apex):
            loss = criterion(model(inputs), labels)
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
    return np.mean(losses)


def inference_fn(loader, model):
    model.eval()
    preds = []
    for batch in loader:
        inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
        inputs = {k: v.to(CFG.device) for k, v in inputs.items()}
        with torch.no_grad():
            preds.append(model(inputs).cpu().numpy())
    return np.concatenate(preds)


def train_loop(folds, fold, tokenizer):
    train, valid = folds[folds.fold != fold].reset_index(drop=True), folds[folds.fold == fold].reset_index(drop=True)
    train_loader = DataLoader(TextDataset(train, tokenizer), CFG.batch_size, shuffle=True, drop_last=True)
    valid_loader = DataLoader(TextDataset(valid, tokenizer), 2 * CFG.batch_size, shuffle=False)
    model = CustomModel().to(CFG.device)
    optimizer = torch.optim.AdamW(get_optimizer_params(model), eps=1e-6, betas=(0.9, 0.999))
    num_train_steps = len(train_loader) * CFG.epochs
    scheduler = get_cosine_schedule_with_warmup(optimizer, 0, num_train_steps)
    criterion = nn.SmoothL1Loss()
    scaler = torch.amp.GradScaler(CFG.device, enabled=CFG.apex)
    for epoch in range(CFG.epochs):
        loss = train_fn(train_loader, model, criterion, optimizer, scheduler, scaler)
        preds = inference_fn(valid_loader, model)
        score = np.sqrt(((preds - valid[CFG.targets].values) ** 2).mean(0)).mean()
        print(f"fold {fold} epoch {epoch}: loss {loss:.4f}, MCRMSE {score:.4f}")
    return model, preds


def main():
    torch.manual_seed(CFG.seed)
    tokenizer = AutoTokenizer.from_pretrained(CFG.model)
    folds, test = pd.read_csv(f"{CFG.data}/train.csv"), pd.read_csv(f"{CFG.data}/test.csv")
    folds["fold"] = np.arange(len(folds)) % CFG.n_folds
    test_loader = DataLoader(TextDataset(test, tokenizer, train=False), 2 * CFG.batch_size, shuffle=False)
    submissions = []
    for fold in CFG.trn_folds:
        model, _ = train_loop(folds, fold, tokenizer)
        submissions.append(inference_fn(test_loader, model))
    test[CFG.targets] = np.mean(submissions, axis=0)
    return model, test[["id", *CFG.targets]]


if __name__ == "__main__":
    main()[1].to_csv("submission.csv", index=False)

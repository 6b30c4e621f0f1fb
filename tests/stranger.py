"""A stranger's training script: another model family, another task, a data set class of its own."""

import torch
from torch.utils.data import Dataset


class Ratings(Dataset):
    """Texts with a score to predict, all of `length` tokens."""

    def __init__(self, count, length=32):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(5, 500, (count, length), generator=generator)
        self.scores = torch.rand(count, generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.scores[index]}


def regressor(layers=2, width=64):
    """A DistilBERT with one output, from fixed random weights."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(0)
    config = DistilBertConfig(n_layers=layers, dim=width, n_heads=2, hidden_dim=4 * width, vocab_size=500, num_labels=1)
    return DistilBertForSequenceClassification(config)

"""The three shapes of training scripts that a technique has to fit, small: a model and batches of each.

"classifier": transformers' own, which computes its loss. "competition": an AutoModel with a head of its own, and
batches of (inputs, targets). "decoder": a causal language model, whose loss is a mean over tokens.
"""

import torch

from . import data, models
from .check import one_of

SHAPES = ("classifier", "competition", "decoder")
LENGTH = 64  # tokens of a text, at most


class WithAHead(torch.nn.Module):
    """Mean pooling over a backbone's tokens, and a linear layer: inputs → logits of shape batch × labels."""

    def __init__(self, backbone, num_labels: int):
        super().__init__()
        self.backbone = backbone
        self.head = torch.nn.Linear(backbone.config.hidden_size, num_labels)

    def forward(self, inputs):
        hidden = self.backbone(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def model(shape: str, num_labels: int, device="cpu"):
    """The same model of that shape at each call, in training mode."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    one_of(SHAPES, "shape", shape)
    if shape == "decoder":
        torch.manual_seed(0)
        sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        settings = LlamaConfig(vocab_size=len(data.tokenizer()), **sizes, **models.NO_CACHE)
        return AutoModelForCausalLM.from_config(settings).train().to(device)
    classifier = models.fresh("tiny", num_labels, "pretrained")
    return (classifier if shape == "classifier" else WithAHead(classifier.base_model, num_labels)).to(device)


def batches(shape: str, rows, size: int) -> list:
    """The rows in batches of that shape, in their order."""
    one_of(SHAPES, "shape", shape)
    made = list(data.loader(rows, data.tokenizer(), size, LENGTH))
    if shape == "competition":
        return [(batch, batch.pop("labels")) for batch in made]
    if shape == "decoder":
        for batch in made:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            batch.pop("token_type_ids", None)
    return made

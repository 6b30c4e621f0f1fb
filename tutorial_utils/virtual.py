"""What does PyTorch's own allocator count on a virtual card? `peak` of a step there, `table` of what was recorded."""

import gc
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from . import bounds, machine, measure
from .figures import Table, size


def _classifiers_step(model, optimizer, inputs):
    texts = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    torch.nn.functional.cross_entropy(model(**texts).logits, inputs["labels"]).backward()
    optimizer.step()
    optimizer.zero_grad()


def peak(
    here: machine.Machine,
    build: Callable,
    inputs: dict[str, torch.Tensor],
    optimizer_of: Callable,
    step: Callable = _classifiers_step,
    gone=(),
) -> int | None:
    """The peak of step(model, optimizer, inputs), in bytes, on a virtual card that computes no numbers.

    None elsewhere, and where it does not fit.

    here: this machine; build: a function that returns the model; optimizer_of: one of the model that returns its
    optimizer. step: by default a classifier's, with `labels` among the inputs. gone: models and optimizers of before,
    whose tensors are given up to make room.
    """
    if here.virtual != "small":
        return None
    for one in gone:
        held = one.parameters() if isinstance(one, torch.nn.Module) else tree_leaves([*one.state.values()])
        for tensor in filter(torch.is_tensor, held):
            tensor.data = torch.empty(0, device=tensor.device)
    gc.collect()  # what was counted before, too
    torch.cuda.empty_cache()
    try:
        model = build().to(here.device).train()
        optimizer, inputs = optimizer_of(model), tree_map_only(torch.Tensor, lambda one: one.to(here.device), inputs)
        return measure.memory(lambda: step(model, optimizer, inputs), model, optimizer, inputs).peak
    except torch.OutOfMemoryError:
        return None


def table(lesson: str, predicted: dict[str, float]) -> Table:
    """Figures in bytes, by name, as they were counted on virtual cards, beside their predictions."""
    rows = []
    for figure, foretold in predicted.items():
        row = {"": figure.removesuffix("_bytes").replace("_", " "), "predicted": size(foretold)}
        for content in bounds.recordings("real-size"):
            if (count := content["lessons"].get(lesson, {"figures": {}})["figures"].get(figure)) is not None:
                row[content["machine"]["name"]] = f"{size(count)} counted"
        rows.append(row)
    return Table(rows)

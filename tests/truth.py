"""The independent truth that the tracker and the prediction are held to."""

import gc

import torch
from torch.profiler import ProfilerActivity, profile

SMALL = dict(num_hidden_layers=3, hidden_size=128, num_attention_heads=4, intermediate_size=512, vocab_size=2000)


def inputs(batch=8, length=128, padded=False):
    ids = torch.randint(5, 1000, (batch, length))
    mask = torch.ones_like(ids)
    if padded:
        mask[:, length - 28 :] = 0
    return {
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "attention_mask": mask,
        "labels": torch.zeros(batch, dtype=torch.long),
    }


def freeze(model):
    """The embeddings and the first two layers."""
    for part in (model.base_model.embeddings, *model.base_model.encoder.layer[:2]):
        part.requires_grad_(False)


def checkpoint(model):
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 5.23 on
    enable() if enable else model.gradient_checkpointing_enable()


def checkpoint_and_freeze(model):
    checkpoint(model)
    freeze(model)


def optimizer(name, model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(trained, lr=1e-4)
    return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name](trained, lr=1e-4)


def train(model, optimizer, batch, accumulate=1, precision="fp32"):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=precision == "fp16")  # no step may be skipped
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    for _ in range(accumulate):
        with torch.autocast("cpu", dtype, enabled=precision != "fp32"):
            loss = model(**batch).loss
        scaler.scale(loss / accumulate if accumulate > 1 else loss).backward()
        del loss
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def profiled_peak(step, model, batch) -> int:
    """Bytes: what was there before, and the peak of the CPU allocator's own events over two steps.

    Without oneDNN, whose scratch for products of halves depends on the CPU's instructions (at these sizes up to
    3 % of the peak with AVX-512 and no bf16): it is the kernels' own, as cuBLAS's workspace is, not the step's.
    """
    gc.collect()  # what an earlier test left must not die here
    storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *batch.values())]
    before = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
            step()
    finally:
        torch.backends.mkldnn.enabled = enabled
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    assert changes, "the profiler saw no allocation: its [memory] events may have another name in this torch"
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return before + peak

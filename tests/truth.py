"""The independent truth that the tracker and the prediction are held to."""

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


def train(model, optimizer, batch, accumulate=1):
    for _ in range(accumulate):
        loss = model(**batch).loss
        (loss / accumulate if accumulate > 1 else loss).backward()
    optimizer.step()
    optimizer.zero_grad()


def profiled_peak(step, model, batch) -> int:
    """Bytes: what was there before, and the peak of the CPU allocator's own events over two steps."""
    storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *batch.values())]
    before = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    assert changes, "the profiler saw no allocation: its [memory] events may have another name in this torch"
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return before + peak

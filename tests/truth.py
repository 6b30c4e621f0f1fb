"""The independent truth that the tracker and the prediction are held to."""

import functools
import gc
import inspect

import torch
from torch.profiler import ProfilerActivity, profile

from tutorial_utils import names, packages

SMALL = dict(num_hidden_layers=3, hidden_size=128, num_attention_heads=4, intermediate_size=512, vocab_size=2000)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
FAMILIES = {  # the same size in each family's own words
    "bert-base-uncased": SMALL,
    "roberta-base": SMALL,
    "electra-base": SMALL | dict(embedding_size=128),
    "deberta-v3-small": SMALL,
    "modernbert-base": SMALL | TOKENS | dict(cls_token_id=1, sep_token_id=2),
    "distilbert-base-uncased": dict(n_layers=3, dim=128, n_heads=4, hidden_dim=512, vocab_size=2000),
    "t5-base": dict(
        num_layers=3, num_decoder_layers=3, d_model=128, d_kv=32, d_ff=512, num_heads=4, vocab_size=2000, eos_token_id=2
    ),
    "gpt2": dict(n_layer=3, n_embd=128, n_head=4, vocab_size=2000) | TOKENS,
    "llama-2-7b": SMALL | dict(num_key_value_heads=4) | TOKENS,
}
LAYERS = {  # where each keeps its layers, and the part before them
    "distilbert-base-uncased": ("distilbert.transformer.layer", "distilbert.embeddings"),
    "modernbert-base": ("model.layers", "model.embeddings"),
    "llama-2-7b": ("model.layers", "model.embed_tokens"),
    "gpt2": ("transformer.h", "transformer.wte", "transformer.wpe"),
    "t5-base": ("transformer.encoder.block", "transformer.shared"),
}


def family_inputs(model, batch, length, padded):
    """`inputs` as this model takes them: one end-of-sequence token a text, and token types where it has them."""
    text = inputs(batch, length, padded)
    text["input_ids"][:, length - 29 if padded else -1] = 2
    accepted = inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
    return {name: tensor for name, tensor in text.items() if name in accepted}


def family_prepared(name, model, lora=0, freeze_layers=0, checkpointing=0, precision="fp32"):
    """The techniques in a reader's own words, for a model of FAMILIES."""
    if precision == "bf16-pure":
        model.to(torch.bfloat16)
    if freeze_layers:
        layers, *before = LAYERS.get(name, ("base_model.encoder.layer", "base_model.embeddings"))
        for part in (*map(model.get_submodule, before), *model.get_submodule(layers)[:freeze_layers]):
            part.requires_grad_(False)
    if lora:
        packages.hide_old_torchao()
        from peft import LoraConfig, get_peft_model

        targets = {"distilbert-base-uncased": ["q_lin", "v_lin"], "modernbert-base": ["Wqkv"]}.get(name)
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=lora, target_modules=targets))
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        if "every_n_layers" in inspect.signature(enable).parameters:
            enable(every_n_layers=checkpointing)
        else:
            names.checkpoint_layers(model, checkpointing)
    return model


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
    known = {
        "adamw": torch.optim.AdamW,
        "fused": functools.partial(torch.optim.AdamW, fused=True),
        "foreach": functools.partial(torch.optim.AdamW, foreach=True),
        "adafactor": torch.optim.Adafactor,
        "sgd": torch.optim.SGD,
    }
    return known[name](trained, lr=1e-4)


def train(model, optimizer, batch, accumulate=1, precision="fp32"):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=precision == "fp16")  # no step may be skipped
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    for _ in range(accumulate):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
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

"""Recipes: techniques that go together, for encoders and for decoders, as a prediction takes them."""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch

from .. import machine, models, packages, predict


@dataclass(frozen=True)
class Recipe:
    """name; choices: what `predict.step_memory` takes, and the optimizer by its name in OPTIMIZERS.

    lessons: of its techniques; needs: packages beside the course's.

    exact: whether it takes the plain loop's step, but for rounding in fp32. adapters: LoRA's, if not all parameters are
    trained: over a base of "fp32", "half" or "4 bits". decoder: a causal language model, its loss in chunks.
    """

    name: str
    choices: dict
    lessons: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    exact: bool = False
    adapters: str | None = None
    decoder: bool = False
    head: float = 0.0  # of a decoder: its share of the multiplications

    @property
    def whole(self) -> bool:
        """Whether it trains all parameters."""
        return self.adapters is None

    @property
    def operations(self) -> float:
        """To the plain step's, where a forward pass is one of three parts and gradients are two.

        Frozen weights need no gradients of their own; a checkpoint computes the forward pass again, as the loss in
        chunks does with a decoder's head. Source: lessons 05, 15 and 24, which count them.
        """
        again = (1 - self.head) * bool(self.choices.get("checkpointing"))
        return (3 + self.head + again - (not self.whole)) / (3 + self.head)


def recipes(half: str, head: float | None = None) -> list[Recipe]:
    """All of them, the fewest operations first, of these half precision first, of these the fewest techniques.

    half: "fp16" or "bf16". head: of a decoder, its share of the multiplications; None for an encoder.
    """
    decoder = head is not None
    autocast, again = dict(precision=half), dict(checkpointing=1)
    eight_bit, adafactor = dict(optimizer="adamw8bit"), dict(optimizer="adafactor")
    bnb, peft, base = ("bitsandbytes",), ("peft",), "half" if decoder else "fp32"
    every = [
        Recipe("fp32, AdamW", {}, exact=True),
        Recipe(f"{half}, AdamW", autocast, ("03",)),
        Recipe(f"{half}, 8-bit AdamW", autocast | eight_bit, ("03", "04"), bnb),
        Recipe(f"{half}, Adafactor", autocast | adafactor, ("03", "11")),
        Recipe("fp32, checkpointing, AdamW", again, ("05",), exact=True),
        Recipe(f"{half}, checkpointing, AdamW", autocast | again, ("03", "05")),
        Recipe(f"{half}, checkpointing, 8-bit AdamW", autocast | again | eight_bit, ("03", "04", "05"), bnb),
        Recipe(f"{half}, checkpointing, Adafactor", autocast | again | adafactor, ("03", "05", "11")),
        Recipe(f"LoRA, {half}", autocast, ("03", "15"), peft, adapters=base),
        Recipe(f"LoRA, {half}, checkpointing", autocast | again, ("03", "05", "15"), peft, adapters=base),
    ]
    if decoder:
        name = f"LoRA on 4 bits, {half}, checkpointing"
        every.append(Recipe(name, autocast | again, ("03", "05", "15"), peft + bnb, adapters="4 bits"))
        every = [replace(one, lessons=(*one.lessons, "24"), decoder=True, head=head) for one in every]
    return sorted(every, key=lambda one: (one.operations, "precision" not in one.choices, len(one.choices)))


def predicted(
    recipes: list[Recipe], model: str, batch: int, length: int, card: str, layers: int | None = None, **step
) -> list:
    """A Prediction for each, of one step of the largest kind. recipes: alike but for the optimizer.

    model: a name of facts/models.toml; layers: of so many in place of its own; step: what `predict.step_memory` takes.
    """
    recipe = recipes[0]
    optimizers = [OPTIMIZERS[one.choices.get("optimizer", "adamw")] for one in recipes]
    choices = recipe.choices | {"card": card, "optimizer": optimizers}
    if recipe.decoder:
        # Empty: nobody reads it, so it takes no memory here.
        text = {n: torch.empty(batch, length, dtype=torch.long) for n in ("input_ids", "labels", "attention_mask")}
        # Without padding there is no mask, and heads that share keys want a kernel that cards before Ampere lack:
        # attention is then computed plainly, in more memory.
        if _grouped(models.config(model)) and (machine.gpu(card).capability or (0,)) < (8,):
            text["attention_mask"] = None
        # Of a few layers the loss of two chunks will do: the others need no more memory, only most of the time.
        choices |= dict(inputs=text, loss=partial(_chunked_loss, most=None if layers is None else 2))
    built = partial(_built, model, recipe, {} if layers is None else {"num_hidden_layers": layers})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of checkpointing's older name, which peft asks for
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # of GPT-2's layers, which peft sets
        return predict.step_memory(built, batch, length, padded=True, **choices, **step)


def _grouped(settings) -> bool:
    return getattr(settings, "num_key_value_heads", None) not in (None, settings.num_attention_heads)


def _built(name: str, recipe: Recipe, changes: dict):
    half = torch.float16 if recipe.choices.get("precision") == "fp16" else torch.bfloat16
    settings = models.config(name, **changes, **({} if recipe.adapters in (None, "fp32") else {"dtype": half}))
    network = models.untrained(settings, causal=recipe.decoder)
    if recipe.adapters == "4 bits":
        from transformers.pytorch_utils import Conv1D

        for part in network.base_model.modules():
            if type(part) in (torch.nn.Linear, Conv1D):
                predict.pack_4bit(part, half)
    if recipe.whole:
        return network
    # As lesson 15 does it: adapters of rank 8, and a whole head.
    targets = "all-linear" if recipe.decoder else predict.lora_targets(settings.model_type)
    packages.hide_old_torchao()
    from peft import LoraConfig, get_peft_model

    old = {network, network.get_output_embeddings(), *network.base_model.modules()}
    parts = [(part, at) for at, part in network.named_modules() if list(part.parameters())]
    head = [at for part, at in parts if part not in old and "." not in at or at.endswith("pooler")]
    return get_peft_model(network, LoraConfig(r=8, target_modules=targets, modules_to_save=head))


def _chunked_loss(model, inputs, chunk=256, most=None):
    """As lesson 24 computes it: the logits of a chunk of tokens at a time. most: chunks, of all by default."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    text = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    hidden = model.base_model(**text)[0].flatten(0, 1)
    labels = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100).flatten()
    parts = islice(zip(hidden.split(chunk), labels.split(chunk)), most)
    again = partial(torch.utils.checkpoint.checkpoint, _sum_of_losses, model.get_output_embeddings())
    return sum(again(*part, use_reentrant=False) for part in parts) / (labels != -100).sum()


def _sum_of_losses(head, hidden, labels):
    return torch.nn.functional.cross_entropy(head(hidden).float(), labels, reduction="sum")


def _trained(model) -> list:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _adamw(model):
    return torch.optim.AdamW(_trained(model), fused=True)


def _adafactor(model):
    from transformers.optimization import Adafactor

    return Adafactor(_trained(model), lr=1e-3, relative_step=False, scale_parameter=False)


def _adamw8bit(model):
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    return bitsandbytes.optim.AdamW8bit(_trained(model))


# As lessons 04 and 11 make them.
OPTIMIZERS = {"adamw": _adamw, "adafactor": _adafactor, "adamw8bit": _adamw8bit}

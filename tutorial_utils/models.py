"""Sequence classifiers and causal language models by name: `build`, `config`, `names`. Sizes: facts/models.toml."""

import sys

from .check import accept, one_of
from .data import TINY
from .machine import table

TINY_DECODER = TINY.with_name("tiny_decoder")
HERE = {"tiny": TINY, "tiny-decoder": TINY_DECODER}  # name → the folder of weights that travel with the package

# After this many fine-tuning steps the tiny pretrained model must lead one from random weights on
# the corpus task by at least this many points of test accuracy.
GAIN_STEPS = 60
GAIN_POINTS = 10

MOST_LABELS = 100_000  # a configuration names each
NO_CACHE = {"use_cache": False}  # a classifier has none, and with checkpointing transformers would warn of it


def hub(name: str) -> str:
    """Where the pretrained weights are: a name of the Hugging Face hub, or the course's own folder."""
    one_of(names(), "model", name)
    return str(HERE.get(name) or table("models")[name]["hub"])


def names() -> list[str]:
    """The architectures that `build` knows."""
    return list(table("models"))


def named(text: str) -> str:
    """The architecture of a name of the hub, such as microsoft/deberta-v3-large; any other text as it is."""
    return {fields.get("hub"): name for name, fields in table("models").items()}.get(text, text)


def head_share(name: str) -> float | None:
    """Of a decoder's multiplications those of its head; None for an encoder, in the first place no language model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    settings = config(name)
    kind = type(settings)
    if kind not in AutoModelForCausalLM._model_mapping or kind in AutoModelForMaskedLM._model_mapping:
        return None
    with torch.device("meta"):
        model = untrained(settings, causal=True)
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    others = sum(weight.numel() for weight in model.parameters() if weight is not head and weight is not embeddings)
    return head.numel() / (head.numel() + others)


def config(name: str, num_labels: int = 2, **changes):
    """The transformers configuration of a named architecture, with `changes` to any of its fields.

    ValueError for a name that is not in `names()`.
    """
    from transformers import AutoConfig

    one_of(names(), "model", name)
    accept(type(num_labels) is int and 1 <= num_labels <= MOST_LABELS, "num_labels", num_labels, f"1 to {MOST_LABELS}")
    fields = {key: value for key, value in table("models")[name].items() if key != "hub"}
    plain = AutoConfig.for_model(**{**fields, **NO_CACHE}, num_labels=num_labels)
    from transformers.activations import ACT2FN

    fields_known = ", ".join(key for key in plain.to_dict() if key[0] != "_")
    for key, value in changes.items():
        accept(hasattr(plain, key), f"a field of {name}", key, fields_known)
        default = getattr(plain, key)
        if type(default) is int and not key.endswith("_id"):
            least = min(1, default)
            accept(type(value) is int and value >= least, key, value, f"a whole number, {least} or more")
        elif isinstance(default, float):
            most = 1 if "drop" in key else sys.float_info.max
            accept(isinstance(value, float | int) and 0 <= value <= most, key, value, f"0 to {most}")
        elif isinstance(default, str) and "act" in key:
            one_of(ACT2FN, key, value)
    return AutoConfig.for_model(**{**fields, **NO_CACHE, **changes}, num_labels=num_labels)


def build(
    name: str, num_labels: int = 2, weights: str = "random", attention: str | None = None, causal=False, **changes
):
    """A sequence classifier of a named architecture, on the CPU, in training mode, in fp32.

    weights: "random" (no download), or "pretrained": the course's own for "tiny" and "tiny-decoder"; for the others
    the hub's or its cache's, and when neither can be had, one line says so and they are random.
    attention: "eager" or "sdpa"; by default what transformers chooses for the architecture.
    causal: a causal language model in its place.
    changes: configuration fields, for example num_hidden_layers=2 (with random weights only).
    """
    one_of(("random", "pretrained"), "weights", weights)
    accept(weights == "random" or not changes, "changes", changes, "none: pretrained weights have a fixed shape")
    settings = config(name, num_labels, **changes)
    check_attention(settings, attention, causal)
    if weights == "pretrained":
        model = _pretrained(name, settings, attention, causal)
        if model is not None:
            return model.train()
    return _auto(causal).from_config(settings, attn_implementation=attention).train()


def _auto(causal: bool):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    accept(type(causal) is bool, "causal", causal, "True or False")
    return AutoModelForCausalLM if causal else AutoModelForSequenceClassification


def fresh(name: str, num_labels: int, weights: str = "random", device="cpu", **options):
    """The same model at each call: `build` from one seed, on a device."""
    import torch

    torch.manual_seed(0)
    return build(name, num_labels, weights, **options).to(device)


def without_dropout(model):
    """The model, with the probability of each of its dropout layers at 0, also in training."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def quiet(num_labels: int, device="cpu"):
    """The tiny pretrained model without dropout, whose random masks would hide small differences."""
    return without_dropout(fresh("tiny", num_labels, "pretrained", device))


def untrained(settings, attention: str | None = None, causal=False):
    """The model of a configuration without initial values: for fake tensors, where none exist."""
    from transformers.initialization import no_init_weights

    check_attention(settings, attention, causal)
    with no_init_weights():
        model = _auto(causal).from_config(settings, attn_implementation=attention)
    model.tie_weights()  # a part of the initialization
    return model


def check_attention(settings, attention: str | None, causal=False):
    """ValueError where transformers has no such model, or no such attention for it."""
    if attention is not None:
        one_of(("eager", "sdpa"), "attention", attention)
    classes, kind = _auto(causal)._model_mapping, "causal language model" if causal else "sequence classifier"
    way = f"a configuration for which transformers has a {kind}, or a function that returns a module"
    accept(type(settings) in classes, "model", settings, way)
    known = attention != "sdpa" or classes[type(settings)]._supports_sdpa
    accept(known, f"attention of {settings.model_type}", attention, '"eager": transformers has no SDPA for it')


def positions(settings) -> int | None:
    """The longest text in tokens, or None where positions are relative or rotated and set no limit in memory."""
    accept(hasattr(settings, "model_type"), "settings", settings, "a configuration, such as models.config()")
    if settings.model_type in ("roberta", "xlm-roberta", "camembert"):
        return settings.max_position_embeddings - settings.pad_token_id - 1  # counted from behind the padding's
    if not getattr(settings, "position_biased_input", True) or getattr(settings, "rope_parameters", None):
        return None
    return max(0, getattr(settings, "max_position_embeddings", None) or 0) or None  # XLNet says -1


def _pretrained(name: str, settings, attention, causal):
    from transformers.utils import logging

    from .machine import hub_failed, hub_reachable

    local = name in HERE
    offline = local or not hub_reachable()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a new head is what we ask for, not a thing to warn of
    try:
        return _auto(causal).from_pretrained(
            hub(name),
            num_labels=settings.num_labels,
            attn_implementation=attention,
            local_files_only=offline,
            adapter_kwargs={"local_files_only": offline},  # or with peft it asks the hub for an adapter
            use_safetensors=True,
            **NO_CACHE,
        )
    except Exception as error:
        if local or not (isinstance(error, OSError) or hub_failed(error)):
            raise
        print(f"{name}: the hub cannot be reached and its cache has no copy; using random weights")
    finally:
        logging.set_verbosity(verbosity)

"""What transformers calls by another name from version to version, asked for by what it accepts.

Copied cells do without this room: they hold on every version by themselves.
"""

from . import packages
from .check import accept


def checkpoint_layers(model, every_n_layers: int = 1, **options):
    """Checkpoint every n-th layer of a transformers model; 0 turns it off. options: of torch's `checkpoint`.

    `activation_checkpointing_enable` is the newer name, and `every_n_layers` an argument of some versions only: a
    layer's own switch is older than both.
    """
    accept(type(every_n_layers) is int and every_n_layers >= 0, "every_n_layers", every_n_layers, "0 for none, or more")
    from transformers.modeling_layers import GradientCheckpointingLayer

    enable = getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))
    accept(enable is not None, "model", model, "a model of transformers")
    if every_n_layers == 0:
        return (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()
    enable({"use_reentrant": False, **options})
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % every_n_layers == 0


def in_order(trainer: type) -> type:
    """transformers' Trainer, or a class made of it, that takes the rows in their order.

    Newer versions say `train_sampling_strategy="sequential"` for it; the older ones always shuffle.
    """
    from torch.utils.data import SequentialSampler

    trains = isinstance(trainer, type) and hasattr(trainer, "_get_train_sampler")
    accept(trains, "trainer", trainer, "transformers' Trainer, or a class made of it")

    class InOrder(trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    return InOrder


def trainer_checkpointing() -> str:
    """The argument of TrainingArguments that turns checkpointing on."""
    from transformers import TrainingArguments

    known = TrainingArguments.__dataclass_fields__
    return "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"


def group_by_length() -> dict:
    """The argument of TrainingArguments that puts texts of like lengths into a batch."""
    from transformers import TrainingArguments

    newer = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
    return {"train_sampling_strategy": "group_by_length"} if newer else {"group_by_length": True}


def lora_targets(model_type: str) -> list[str]:
    """The linear layers that peft adapts by default, of an architecture by its name in transformers."""
    packages.hide_old_torchao()
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    return KNOWN.get(model_type, ["Wqkv", "q_lin", "v_lin"])  # ModernBERT's, DistilBERT's

"""What would a training step cost on a GPU that is not here? Nothing is allocated, downloaded or computed.

python scripts/predict.py --model bert-large-uncased --batch 32 --length 128 --card T4
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tutorial_utils import machine, models, predict  # noqa: E402
from tutorial_utils.figures import Table, memory_table, size  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """The command line; each choice is `predict.step_memory`'s."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", required=True, type=models.named,
                         help=f"one of {', '.join(models.names())}, or its name on the hub")  # fmt: skip
    options.add_argument("--batch", required=True, type=int, help="texts in a micro-batch")
    options.add_argument("--length", required=True, type=int, help="tokens in a text")
    options.add_argument("--optimizer", default="adamw", choices=predict.OPTIMIZERS)
    options.add_argument("--precision", default="fp32", choices=list(predict.PRECISIONS))
    options.add_argument("--checkpointing", nargs="?", type=int, const=1, default=0, metavar="N",
                         help="every layer, or every N layers")  # fmt: skip
    options.add_argument("--attention", choices=("eager", "sdpa"), help="default: what transformers chooses")
    options.add_argument("--padded", action="store_true", help="the batch holds padding")
    options.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches a step")
    options.add_argument("--freeze-layers", type=int, default=0, metavar="K", help="and what comes before them")
    options.add_argument("--lora", type=int, default=0, metavar="R", help="rank of peft's adapters")
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--card", help=f'one of {", ".join(machine.gpus())}, a word of one, or "6 GiB"')
    options.add_argument("--json", action="store_true", help="peak_bytes, card_bytes, parts, fits, seconds")
    return options


def main(arguments: list[str] | None = None):
    choices = vars(parser().parse_args(arguments))
    as_json = choices.pop("json")
    if choices["card"] and choices["device"] == "cpu":
        sys.exit("predict.py: card is of a GPU; accepted: without --device cpu")
    try:
        report = predict.step_memory(**choices)
    except (ValueError, ImportError) as error:
        sys.exit(f"predict.py: {error}")
    if models.head_share(choices["model"]) is not None:
        print("Of a classifier: a language model has a vocabulary's logits besides (scripts/plan.py).", file=sys.stderr)
    if as_json:
        names = ("card_bytes", "parts", "fits", "seconds")
        print(json.dumps({"peak_bytes": report.peak} | {name: getattr(report, name) for name in names}))
        return
    print(memory_table({"tensor memory": report}))
    print()
    most = list(report.modules.items())[:5]
    print(Table([{"held by": module, "tensor memory": size(held)} for module, held in most]))
    if report.card_bytes is not None:
        print()
        print(Table([{"on the card, at most": name, "": size(part)} for name, part in report.card_parts.items()]))
        verdict = {True: f", fits {choices['card']}", False: f", does not fit {choices['card']}", None: ""}[report.fits]
        print(f"in all {size(report.card_bytes)}{verdict}")


if __name__ == "__main__":
    main()

"""Measure a grid of training steps on this GPU beside their predictions: make record-predictions

Alone on the GPU, twenty minutes at most; on a virtual one with CARD=T4. Each step in a process of its own: what the
allocator reserves depends on what a process did before. Writes facts/predictions/<gpu>.json: for each step the bytes of
BYTES, predicted and measured, with versions and date. scripts/stamp.py puts the summary into README.md.
"""

import argparse
import functools
import gc
import importlib.util
import multiprocessing
import signal
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tutorial_utils import bounds, machine, measure, models, predict  # noqa: E402

FOLDER = ROOT / "tutorial_utils" / "facts" / "predictions"
MINUTES = 20
# Of tensors, as the caching allocator rounds them, as it holds them, and of the card with all that lives there.
BYTES = ("tensors", "allocated", "reserved", "card")

SHAPES = [
    ("bert-base-uncased", 32, 128), ("bert-large-uncased", 32, 128), ("bert-large-uncased", 8, 512),
    ("chinese-macbert-large", 16, 128), ("roberta-base", 32, 128), ("roberta-large", 8, 256),
    ("distilbert-base-uncased", 64, 128), ("electra-base", 32, 128), ("electra-large", 16, 128),
    ("deberta-v3-small", 32, 128), ("deberta-v3-base", 16, 256), ("deberta-v3-large", 8, 256),
    ("modernbert-base", 16, 512), ("modernbert-large", 8, 512), ("t5-base", 16, 128), ("gpt2", 8, 512),
]  # fmt: skip
ROTATING = [
    {"optimizer": "adamw8bit"}, {"optimizer": "adafactor"}, {"optimizer": "sgd", "accumulate": 2},
    {"freeze_layers": 4}, {"lora": 8}, {"precision": "bf16-pure"}, {"freeze_layers": 4, "checkpointing": 1},
    {"checkpointing": 2},
]  # fmt: skip


# Each with half of the models, at other sizes than the grid's: what nobody looked at while the predictor was written.
WIDE = [
    {"optimizer": "adafactor"}, {"optimizer": "fused"}, {"optimizer": "foreach", "precision": "bf16-pure"},
    {"optimizer": "adafactor", "precision": "bf16-pure"}, {"lora": 8},
    {"lora": 4, "checkpointing": 1, "optimizer": "adamw8bit"}, {"checkpointing": 1, "precision": "bf16"},
    {"checkpointing": 2, "optimizer": "sgd"}, {"freeze_layers": 2, "precision": "fp16"},
    {"freeze_layers": 1, "checkpointing": 1, "precision": "bf16"}, {"accumulate": 2, "precision": "fp16"},
    {"accumulate": 3, "optimizer": "adamw8bit", "attention": "eager"}, {"precision": "fp16", "optimizer": "fused"},
    {"precision": "bf16", "attention": "eager"},
]  # fmt: skip
# A step of transformers' single-GPU guide of 2022 → MB on a V100, as NVML counts them, less its context of 1,343.
OF_2022 = {"model": "bert-large-uncased", "length": 512, "attention": "eager"}
WHOLE, ACCUMULATED = OF_2022 | {"batch": 4}, OF_2022 | {"batch": 1, "accumulate": 4}
ALL_FOUR = ACCUMULATED | {"checkpointing": 1, "precision": "fp16"}
OF_THE_GUIDE = [
    (WHOLE, 14_949 - 1343), (ACCUMULATED, 8681 - 1343), (ACCUMULATED | {"checkpointing": 1}, 6775 - 1343),
    (WHOLE | {"precision": "fp16"}, 13_939 - 1343), (ALL_FOUR, 7275 - 1343),
    (WHOLE | {"optimizer": "adafactor"}, 12_295 - 1343), (ALL_FOUR | {"optimizer": "adafactor"}, 4847 - 1343),
    (WHOLE | {"optimizer": "adamw8bit"}, 13_085 - 1343), (ALL_FOUR | {"optimizer": "adamw8bit"}, 5363 - 1343),
]  # fmt: skip
OF_TORCH = {  # optimizers by the names of the grid
    "adamw": torch.optim.AdamW,
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}


def grid() -> list[dict]:
    """The steps to measure, as arguments of `predict.step_memory`; optimizers by the names of `optimizer`."""
    cells = []
    for number, (model, batch, length) in enumerate(SHAPES):
        shape = {"model": model, "batch": batch, "length": length}
        cells += [
            shape,
            shape | {"precision": "fp16", "padded": True},
            shape | {"precision": "bf16", "checkpointing": 1},
            shape | ROTATING[number % len(ROTATING)],
        ]
        if "deberta" not in model and number % 2 == 0:
            cells.append(shape | {"precision": "fp16"})
        if "deberta" not in model and number % 3 == 0:
            cells.append(shape | {"attention": "eager"})
    llama = {"model": "llama-2-7b", "batch": 2, "length": 512, "precision": "bf16-pure", "lora": 8, "checkpointing": 1}
    return [*cells, llama, *(cell for cell, _ in OF_THE_GUIDE), *wide()]


def wide() -> list[dict]:
    """Every family with every technique: batches and lengths that no power of two divides."""
    cells = []
    for row, (model, batch, length) in enumerate(SHAPES):
        for column, technique in enumerate(WIDE):
            eager = technique.get("attention") and "deberta" in model  # which has its own
            if (row + column) % 2 == 0 and not eager:
                cells.append({"model": model, "batch": batch // 2 + 1, "length": length - 21} | technique
                             | {"padded": bool((row + column // 2) % 2)})  # fmt: skip
    return cells


def optimizer(cell: dict, parameters):
    """Of a cell's name for it, over what is trained."""
    if (name := cell.get("optimizer", "adamw")) == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, lr=1e-5)
    return OF_TORCH[name](parameters, lr=1e-5)


def predicted(cell: dict, gpu: machine.Gpu) -> predict.Prediction:
    """Those that the predictor has no name for, as a function of the model."""
    if cell.get("optimizer", "adamw") in predict.OPTIMIZERS:
        return predict.step_memory(**cell, card=gpu)
    return predict.step_memory(**cell | {"optimizer": lambda model: optimizer(cell, trained(model))}, card=gpu)


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def in_bytes(prediction: predict.Prediction) -> dict[str, int]:
    """By the names of BYTES."""
    return dict(zip(BYTES, (prediction.peak, prediction.allocated, prediction.reserved, prediction.card_bytes)))


def training(cell: dict, device: str):
    """(step, model, optimizer, inputs) of a real run, in a reader's own words; random weights.

    Made on the CPU and moved whole, as a reader does: made on the GPU, it would leave gaps in what is reserved.
    """
    precision, accumulate = cell.get("precision", "fp32"), cell.get("accumulate", 1)
    torch.manual_seed(0)
    try:  # made in its type, as from_pretrained makes it
        torch.set_default_dtype(torch.bfloat16 if precision == "bf16-pure" else torch.float32)
        settings = models.config(cell["model"], **cell.get("sizes", {}))
        model = models.untrained(settings, cell.get("attention")).train().to(device)
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model = predict._prepared(
        model, precision, cell.get("checkpointing", 0), cell.get("freeze_layers", 0), cell.get("lora", 0), None
    )
    chosen = optimizer(cell, trained(model))
    inputs = predict._text(model, cell["batch"], cell["length"], padded=True)
    if cell.get("padded"):
        inputs["attention_mask"][:, -cell["length"] // 4 :] = 0
    if "token_type_ids" in inputs:
        inputs["token_type_ids"].zero_()  # RoBERTa has one type
    inputs["input_ids"][:, cell["length"] // 2] = getattr(model.config, "eos_token_id", None) or 2
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    dtype = predict.PRECISIONS[precision]
    scaler = torch.amp.GradScaler(device, init_scale=1.0, enabled=precision == "fp16")

    def step():
        for _ in range(accumulate):
            with torch.autocast(device, dtype, enabled=dtype is not None):
                logits = model(**{name: tensor for name, tensor in inputs.items() if name != "labels"}).logits
                loss = torch.nn.functional.cross_entropy(logits, inputs["labels"])
            scaler.scale(loss / accumulate if accumulate > 1 else loss).backward()
            del logits, loss
        scaler.step(chosen)
        scaler.update()
        chosen.zero_grad()

    return step, model, chosen, inputs


def measured(cell: dict) -> dict:
    """The names of BYTES → bytes on this GPU, of the first two steps. The card's are all that is in use on it."""
    step, model, chosen, inputs = training(cell, "cuda")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    step()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    peaks = torch.cuda.memory_stats()
    tensors = measure.memory(step, model, chosen, inputs).peak
    allocated, reserved = (peaks[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved"))
    return dict(zip(BYTES, (tensors, allocated, reserved, total - free)))


def predictions(cells: list[dict], gpu: machine.Gpu) -> list[tuple[dict[str, int], bool]]:
    """Of each step its predicted bytes, by the names of BYTES, and whether it fits."""
    found = []
    for number, cell in enumerate(cells, 1):
        if why_not(cell, True, True):  # nor can be predicted what is not installed
            found.append(({}, False))
            continue
        prediction = predicted(cell, gpu)
        found.append((in_bytes(prediction), prediction.fits))
        print(f"\rpredicted {number}/{len(cells)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def why_not(cell: dict, fits: bool, bf16: bool) -> str:
    """Why this GPU cannot run a step, or nothing."""
    for package, needed in {"bitsandbytes": cell.get("optimizer") == "adamw8bit", "peft": cell.get("lora")}.items():
        if needed and not importlib.util.find_spec(package):
            return f"{package} is not installed"
    if "bf16" in cell.get("precision", "") and not bf16:
        return "no bf16 in hardware"
    return "" if fits else "predicted not to fit"


def record(cells: list[dict], gpu: machine.Gpu, bf16: bool, minutes: float, keep=lambda rows: None) -> list[dict]:
    """A row for each cell: its choices, predicted and measured bytes, or the reason for leaving it out.

    keep: called with the rows so far, at every new one.
    """
    models.build("tiny")  # imports once, here, what every process needs
    rows, started = [], time.monotonic()
    for number, (cell, (found, fits)) in enumerate(zip(cells, alone(predictions, cells, gpu)), 1):
        row = {**cell, "predicted": found}
        late = time.monotonic() - started > 60 * minutes
        reason = f"later than {minutes:g} minutes" if late else why_not(cell, fits, bf16)
        try:
            row |= {"left_out": reason} if reason else {"measured": alone(measured, cell)}
        except torch.OutOfMemoryError:
            row["measured"] = "out of memory"
        rows.append(row)
        keep(rows)
        shown = {name: value for name, value in row.items() if name not in ("predicted", "measured")}
        error = f"{errors([row])[0]:+.2%}" if errors([row]) else row.get("left_out", row.get("measured"))
        print(f"{number}/{len(cells)} {shown}: {error}", file=sys.stderr, flush=True)
    return rows


def alone(function, *arguments):
    """What it returns or raises, in a process of its own that has imported the libraries and done nothing else.

    This process never asks for a GPU: those that it forks could not have one then. They have one thread: for those
    of a process that has used its own, a fork waits for ever.
    """
    context, one = multiprocessing.get_context("fork"), dict(initializer=torch.set_num_threads, initargs=(1,))
    with ProcessPoolExecutor(1, mp_context=context, **one) as process:
        return process.submit(function, *arguments).result()


def errors(rows: list[dict], name: str = "tensors") -> list[float]:
    """Relative errors of the predicted bytes of that name, of the rows that were measured."""
    pairs = [(row["predicted"][name], row["measured"][name]) for row in rows if is_measured(row)]
    return [found / real - 1 for found, real in pairs]


def is_measured(row: dict) -> bool:
    return isinstance(row.get("measured"), dict)


def summary(rows: list[dict]) -> dict:
    """Cells measured, absolute relative errors, how often the card held more than its bound, and the bound's margin."""
    found = {name: sorted(map(abs, errors(rows, name))) for name in BYTES[:-1]}
    margins = errors(rows, "card")
    failed = [row for row in rows if row.get("measured") == "out of memory"]
    return {
        "cells": len(rows),
        "measured": len(margins),
        "median_error": {name: statistics.median(values) for name, values in found.items() if values},
        "worst_error": {name: values[-1] for name, values in found.items() if values},
        "above_the_card_bound": sum(margin < 0 for margin in margins) + len(failed),
        "median_margin": statistics.median(margins) if margins else None,
    }


def main(arguments: list[str] | None = None):
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--minutes", type=float, default=MINUTES, help="measure nothing later than that")
    options.add_argument("--into", type=Path, default=FOLDER, help="folder of the file")
    choices = options.parse_args(arguments)
    gpu, here = alone(machine.this_gpu), alone(machine.facts)
    if gpu is None:
        sys.exit("record_predictions.py: no GPU that this torch can use: run it where one is; nothing was written")
    about = {"machine": {"name": here.name, "memory_bytes": here.memory}, "versions": here.versions}
    about["date"] = date.today().isoformat()
    path = choices.into / f"{here.slug}.json"

    unfinished = path.with_suffix(".unfinished")  # what an interrupt leaves

    def keep(rows):
        bounds.write(unfinished, {**about, "summary": summary(rows), "cells": rows})

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a termination ends its processes, too
    rows = record(grid(), gpu, here.bf16, choices.minutes, keep)
    unfinished.replace(path)
    print(f"{summary(rows)}\nwrote {path.name}; now: python scripts/stamp.py")


if __name__ == "__main__":
    main()

"""Compare what predicts the memory of a training step, on a CPU: python scripts/compare_predictors.py

Each predictor is asked for the peak of the same steps of small models, and torch.profiler measures the steps
as they run. It takes a few minutes, writes tutorial_utils/facts/predictions/compared.json and prints a table;
scripts/stamp.py puts the summary into README.md.
"""

import argparse
import importlib
import platform
import statistics
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import truth  # noqa: E402

from tutorial_utils import bounds, machine, models, predict  # noqa: E402
from tutorial_utils.figures import Table, size  # noqa: E402

TARGET = ROOT / "tutorial_utils" / "facts" / "predictions" / "compared.json"
NEEDS = {
    "torch_preflight": "torch-preflight==0.5.0",
    "kitsune": "torch-kitsune==0.7.0",
    "accelerate": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "peft": "peft",
}
ROUNDS = 3

SIZES = {
    "bert-base-uncased": truth.SMALL,
    "deberta-v3-base": truth.SMALL,
    "gpt2": dict(n_layer=3, n_embd=128, n_head=4, vocab_size=2000, pad_token_id=0),
    "llama-2-7b": truth.SMALL | dict(num_key_value_heads=4),
}
EAGER, SDPA = (dict(name="bert-base-uncased", attention=attention) for attention in ("eager", "sdpa"))
CASES = {
    "BERT eager": EAGER,
    "BERT sdpa": SDPA,
    "BERT sdpa, padded": SDPA | dict(padded=True),
    "BERT sdpa, 1 × 20 tokens": SDPA | dict(batch=1, length=20),  # its peak is in the optimizer's step
    "BERT eager, bf16 autocast": EAGER | dict(precision="bf16"),
    "BERT sdpa, 8-bit AdamW": SDPA | dict(optimizer="adamw8bit"),
    "BERT eager, checkpointing": EAGER | dict(checkpointing=1),
    "BERT sdpa, 2 of 3 layers frozen": SDPA | dict(freeze_layers=2),
    "BERT eager, accumulation of 3": EAGER | dict(accumulate=3),
    "BERT sdpa, LoRA": SDPA | dict(lora=8),
    "DeBERTa-v3": dict(name="deberta-v3-base"),
    "GPT-2 sdpa": dict(name="gpt2", attention="sdpa"),
    "Llama sdpa": dict(name="llama-2-7b", attention="sdpa"),
}
LARGE = dict(name="bert-large-uncased", batch=32)

HOW = {
    "truth": "torch.profiler's peak over two steps of a real run on the CPU, in bytes",
    "steps": "sequence classifiers with 3 layers of width 128; 8 × 128 tokens, AdamW, fp32 where nothing else is said",
    "errors": "relative to the truth; median and worst are of their absolute values, over the cases answered",
    "seconds": "after imports, with building the model; median of 3; BERT-large once: 32 × 128, AdamW, fp32",
    "step_memory": "predict.step_memory(device='cpu').peak; of DeBERTa it supposes a mask, which the run here has not",
    "MemTracker": "under FakeTensorMode, two steps, the peak's Total. For its sake the loss is computed from the "
    "logits, module statistics are reset after every micro-batch, the optimizer is made outside the mode, and "
    "real inputs are allowed for the 8-bit optimizer's table",
    "VRAMGuard": "its total without its terms for CUDA's context and fragmentation, since the truth has neither. The "
    "model is on the meta device, the example is the whole batch. Where it cannot run as it is (DeBERTa, GPT-2, "
    "Llama), a wrapper gives it a mask of ones, and attention is eager. With gradient_checkpointing=True the model "
    "itself is left plain, which comes nearer to the truth than a model with its checkpointing on",
    "estimate_config": "torch-preflight's formula, less the same two terms; the shape is what it reads from the "
    "configuration, parameters are counted, flash_attention is left off: of the sdpa cases that comes nearer to the "
    "truth in all but the frozen one",
    "predict_memory": "torch-kitsune's, its total without its margin of 15 %, which is for the allocator, "
    "fragmentation and PyTorch's internals. The model is on the meta device. torch-kitsune hands a model floats, which "
    "an embedding refuses: a wrapper makes them ids, else a formula that all but ignores length remains; outside BERT "
    "it also gives a mask of ones, and attention is eager. Its dtype is bfloat16 for autocast, its optimizer adam8bit "
    "for the 8-bit one. It has no setting for checkpointing: what it suggests that this saves is subtracted. LoRA's "
    "model has its adapters: that comes nearer to the truth than estimate_lora_memory",
    "predict_memory with its margin": "the same total with the 15 %",
    "estimate-memory": "accelerate's calculate_maximum_sizes and estimate_training_usage, on the case's own model on "
    "the meta device: the command itself asks the hub for a model. Of the parts it takes the largest, as the command "
    "does: in float32 weights, gradients and Adam's states, in float16 (asked for autocast) Adam's states alone",
    "published": "what a tool's authors report, or its own tests accept: torch-preflight's docs/vram-estimation.md, "
    "torch-kitsune's README, PyTorch's test/distributed/_tools/test_mem_tracker.py, LLMem's abstract "
    "(arXiv:2404.10933); the replication is issue 1 of github.com/taehokim20/LLMem",
}
# The errors that others report: of other steps, most of them on GPUs.
PUBLISHED = {
    "MemTracker": "its tests accept ±10 %",
    "VRAMGuard": "3.7 % mean, 12.4 % worst: 8 steps on a T4",
    "predict_memory": "16.7 % mean: 9 cases on Apple's MPS",
    "estimate-memory": "none: weights, gradients and Adam only",
    "LLMem": "up to 1.6 % on one GPU; 6 to 10 % in a replication",
}
NOT_RUN = {"LLMem": "needs a GPU"}
# Each one read in the predictor's code or seen by running it.
CANNOT_SAY = {
    "step_memory": [
        "models whose shapes follow from values: it refuses them",
        "buffers inside CUDA's kernels, but for cuBLAS's workspaces",
        "several devices",
        "generation",
        "how uncertain a prediction is",
        "which change would make a step fit",
    ],
    "MemTracker": [
        "frozen parameters: it raises an error",
        "steps that look at values: it raises an error",
        "the attention kernel of a real run: fake tensors take the plain one",
        "CUDA's kernels, where torch is a CPU build",
        "CUDA's context, workspaces and reserve",
        "whether it fits a card",
        "a timeline",
    ],
    "VRAMGuard": [
        "what lives for a moment in the backward pass and the optimizer: it adds up what is kept",
        "modules that look at values: their activations are unknown",
        "CUDA's kernels: activations are those of the meta device",
        "how far checkpointing reaches: it takes 0.3 of the activations",
        "bytes by module",
        "a timeline",
    ],
    "predict_memory": [
        "models of tokens as they are: activations come from a formula that all but ignores length",
        "what is kept between modules, such as attention's scores: it adds up the outputs of the innermost ones",
        "what lives for a moment in the backward pass and the optimizer",
        "what freezing saves of the activations: it counts them all",
        "8-bit states: they count as fp32",
        "how far checkpointing reaches: it suggests 0.3 of the activations",
        "accumulation",
        "a timeline",
    ],
    "estimate-memory": [
        "activations: it knows neither batch nor length, attention nor checkpointing",
        "frozen parameters and adapters: all are trained",
        "optimizers other than Adam",
        "accumulation",
        "models that are not on the hub, as a command",
        "whether it fits a card",
        "a timeline",
    ],
}


def require():
    """Leave with what to install where something is missing."""
    for module, package in NEEDS.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise SystemExit(f"the comparison needs {module} ({error}): pip install {package}") from None


def sizes(case) -> tuple[int, int]:
    return case.get("batch", 8), case.get("length", 128)


def build(case):
    """The plain model of a case, in training mode."""
    return models.build(case["name"], 4, attention=case.get("attention"), **SIZES.get(case["name"], {}))


def prepared(model, case):
    """The model with a case's freezing, adapters and checkpointing."""
    if case.get("freeze_layers"):
        truth.freeze(model)
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(task_type="SEQ_CLS", r=case["lora"], target_modules=["query", "value"])
        model = get_peft_model(model, adapters)
    if case.get("checkpointing"):
        truth.checkpoint(model)
    return model


def inputs(case) -> dict[str, torch.Tensor]:
    batch = truth.inputs(*sizes(case), case.get("padded", False))
    if not case.get("padded"):
        del batch["attention_mask"]
    if case["name"] in ("gpt2", "llama-2-7b"):
        del batch["token_type_ids"]
    return batch


def train(model, optimizer, batch, case, after_backward=lambda: None):
    """One step, its loss from the logits: DeBERTa's own reads the values of labels, which fake tensors lack."""
    accumulate = case.get("accumulate", 1)
    for _ in range(accumulate):
        with torch.autocast("cpu", torch.bfloat16, enabled=case.get("precision") == "bf16"):
            logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
            loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
        (loss / accumulate if accumulate > 1 else loss).backward()
        del logits, loss
        after_backward()
    optimizer.step()
    optimizer.zero_grad()


def real(case) -> int:
    """Bytes at the peak of a real run, by torch.profiler."""
    torch.manual_seed(0)
    model = prepared(build(case), case)
    optimizer, batch = truth.optimizer(case.get("optimizer", "adamw"), model), inputs(case)
    return truth.profiled_peak(lambda: train(model, optimizer, batch, case), model, batch)


def step_memory(case) -> int:
    """Bytes by this project's prediction."""
    choices = {name: value for name, value in case.items() if name not in ("name", "batch", "length")}
    settings = models.config(case["name"], 4, **SIZES.get(case["name"], {}))
    return predict.step_memory(settings, *sizes(case), device="cpu", **choices).peak


def mem_tracker(case) -> int:
    """Bytes by PyTorch's MemTracker under fake tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model, batch = prepared(build(case), case), inputs(case)
    optimizer = truth.optimizer(case.get("optimizer", "adamw"), model)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *batch.values())
    with fake, tracker:
        for _ in range(2):
            train(model, optimizer, batch, case, after_backward=tracker.reset_mod_stats)
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


class WithMask(torch.nn.Module):
    """The model with a mask of ones, so that transformers need not look for padding."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids))


def vram_guard(case) -> int:
    """Bytes of tensors by torch-preflight's VRAMGuard, which measures activations on the meta device."""
    from torch_preflight import VRAMGuard

    batch, length = sizes(case)
    plain = case | dict(checkpointing=0)
    for choices, wrapped in ((plain, lambda model: model), (plain | dict(attention="eager"), WithMask)):
        with torch.device("meta"):
            model = wrapped(prepared(build(choices), choices))
        guard = VRAMGuard(
            model,
            optimizer=truth.optimizer(case.get("optimizer", "adamw"), model),
            max_vram="1TiB",  # whatever this machine has
            batch_size=batch,
            seq_len=length,
            precision="amp" if "precision" in case else "fp32",
            gradient_checkpointing=bool(case.get("checkpointing")),
            example_input=torch.zeros(batch, length, dtype=torch.long),
        )
        if guard.activation_source == "measured":
            with guard:
                return tensors(guard.report)
    raise ValueError("the model cannot run on the meta device; activations are unknown")


def estimate_config(case) -> int:
    """Bytes of tensors by torch-preflight's formula."""
    from torch_preflight import vram
    from torch_preflight.vram.providers.hub import shape_from_config

    with torch.device("meta"):
        model = prepared(build(case), case)
    counts = [sum(p.numel() for p in model.parameters() if p.requires_grad or frozen) for frozen in (True, False)]
    profile = vram.ModelProfile(case["name"], *counts, source="model", confidence=vram.Confidence.HIGH)
    profile.shape = shape_from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
    batch, length = sizes(case)
    settings = vram.RunConfig(
        batch_size=batch,
        seq_len=length,
        precision=vram.PrecisionMode("amp" if "precision" in case else "fp32"),
        optimizer=vram.OptimizerKind("adamw-8bit" if "optimizer" in case else "adamw"),
        gradient_checkpointing=bool(case.get("checkpointing")),
        accumulation_steps=case.get("accumulate", 1),
    )
    return tensors(vram.estimate_config(profile, settings))


def tensors(report) -> int:
    return report.total - report.breakdown.cuda_context - report.breakdown.fragmentation


class FromFloats(torch.nn.Module):
    """The model as torch-kitsune calls it: with numbers that are no integers."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, numbers):
        return self.model(numbers.long())


def kitsune(case):
    """torch-kitsune's answer, and the bytes that it says checkpointing saves where the case has it."""
    from kitsune.predict import predict_memory

    bert = case["name"].startswith("bert")
    plain = case | dict(checkpointing=0) | ({} if bert else dict(attention="eager"))
    with torch.device("meta"):
        model = prepared(build(plain), plain)
    batch, length = sizes(case)
    found = predict_memory(
        FromFloats(model if bert else WithMask(model)),
        (length,),
        batch,
        dtype="bfloat16" if "precision" in case else "float32",
        optimizer="adam8bit" if "optimizer" in case else "adamw",
    )
    saved = [advice.savings_bytes for advice in found.recommendations if advice.name == "Gradient Checkpointing"]
    return found, sum(saved) if case.get("checkpointing") else 0


def predict_memory(case) -> int:
    """Bytes by torch-kitsune, without its margin."""
    found, saved = kitsune(case)
    return found.total_bytes - found.overhead_bytes - saved


def with_margin(case) -> int:
    """Bytes by torch-kitsune, its margin of 15 % in."""
    from kitsune.predict.estimator import OVERHEAD_FRACTION

    return int(predict_memory(case) * (1 + OVERHEAD_FRACTION))


def estimate_memory(case) -> int:
    """Bytes that accelerate's estimate-memory would print as "Training using Adam"."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        model = prepared(build(case), case)
    size_of_model, _ = calculate_maximum_sizes(model)
    return max(estimate_training_usage(size_of_model, "float16" if "precision" in case else "float32").values())


PREDICTORS = {
    "step_memory": step_memory,
    "MemTracker": mem_tracker,
    "VRAMGuard": vram_guard,
    "estimate_config": estimate_config,
    "predict_memory": predict_memory,
    "predict_memory with its margin": with_margin,
    "estimate-memory": estimate_memory,
}


def ask(predictor, case, rounds: int = ROUNDS) -> dict:
    """{"bytes": …, "seconds": …}, or {"reason": …} where there is no answer."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        try:
            found = predictor(case)
        except Exception as error:  # whatever a predictor raises is its answer
            return {"reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]}
        seconds.append(time.perf_counter() - started)
    return {"bytes": found, "seconds": round(statistics.median(seconds), 3)}


def compare(case) -> dict:
    """The truth in bytes, and each predictor's answer with its relative error."""
    measured = real(case)
    answers = {name: ask(predictor, case) for name, predictor in PREDICTORS.items()}
    for answer in answers.values():
        if "bytes" in answer:
            answer["error"] = round(answer["bytes"] / measured - 1, 6)
    return {"truth_bytes": measured, "predictors": answers}


def summary(cases: list[dict], name: str) -> dict:
    """Of one predictor: cases answered, absolute relative errors, median seconds of a case."""
    answers = [case["predictors"][name] for case in cases]
    answered = [answer for answer in answers if "bytes" in answer]
    errors = [abs(answer["error"]) for answer in answered]
    return {
        "answered": len(answered),
        "cases": len(cases),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "seconds": statistics.median(answer["seconds"] for answer in answered) if answered else None,
    }


def run() -> dict:
    cases = []
    for number, (title, case) in enumerate(CASES.items(), 1):
        cases.append({"case": title, **compare(case)})
        print(f"{number} of {len(CASES)}: {title}, {size(cases[-1]['truth_bytes'])}", file=sys.stderr, flush=True)
    about = {}
    for name, predictor in PREDICTORS.items():
        large = ask(predictor, LARGE, rounds=1)
        print(f"BERT-large by {name}: {large}", file=sys.stderr, flush=True)
        about[name] = summary(cases, name) | {"seconds_bert_large": large.get("seconds")}
        if name in CANNOT_SAY:
            about[name]["cannot_say"] = CANNOT_SAY[name]
    for name, reason in NOT_RUN.items():
        about[name] = {"not_run": reason}
    for name, reported in PUBLISHED.items():
        about[name]["published"] = reported
    packages = ("torch", "transformers", "torch-preflight", "torch-kitsune", "accelerate", "bitsandbytes", "peft")
    here = machine.facts()
    return {
        "date": date.today().isoformat(),
        "machine": {"processor": "CPU", "cores": here.cores, "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "how": HOW,
        "cases": cases,
        "summary": about,
    }


def shown(answer: dict) -> str:
    if "reason" in answer:
        return answer["reason"][:40]
    return f"{answer['bytes'] / 1e6:.2f} MB ({answer['error']:+.2%}), {answer['seconds']:.2f} s"


def tables(content: dict) -> str:
    rows = [
        {"case": case["case"], "truth": f"{case['truth_bytes'] / 1e6:.2f} MB"}
        | {name: shown(answer) for name, answer in case["predictors"].items()}
        for case in content["cases"]
    ]
    totals = [
        {
            "predictor": name,
            "answered": f"{found['answered']} of {found['cases']}",
            "median error": f"{found['median_error']:.2%}",
            "worst error": f"{found['worst_error']:.2%}",
            "seconds a case": f"{found['seconds']:.2f}",
            "BERT-large": "–" if found["seconds_bert_large"] is None else f"{found['seconds_bert_large']:.1f} s",
            "published": found.get("published", ""),
        }
        for name, found in content["summary"].items()
        if name not in NOT_RUN
    ]
    return f"{Table(rows)}\n\n{Table(totals)}"


def main(arguments: list[str] | None = None):
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(arguments)
    require()
    transformers.logging.set_verbosity_error()
    content = run()
    bounds.write(TARGET, content)
    print(tables(content))
    print(f"\nwrote {TARGET.relative_to(ROOT)}; now: python scripts/stamp.py")


if __name__ == "__main__":
    main()

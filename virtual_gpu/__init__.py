"""A virtual GPU: the CUDA build of PyTorch on a machine without one.

    import virtual_gpu
    virtual_gpu.start("T4")        # before torch is imported

or `python -m virtual_gpu --card T4 script.py arguments`. The allocator, the dispatcher, autograd and the host code of
every operator are PyTorch's own, so `torch.cuda.memory_stats()` counts as it does on that card. Kernels are not run:
`values` says what is computed in their place, on the CPU. Times, and what cuBLAS, cuDNN and the driver keep for
themselves, are not known here.
"""

import atexit
import ctypes
import importlib.util
import json
import os
import re
import sys
import time
from functools import partial
from pathlib import Path

from tutorial_utils import machine

MiB = 2**20
VALUES = ("all", "small", "none")
# Of the card's memory, gone to the CUDA context: about 300 MB (pytorch issue 107667), and more on cards with many
# multiprocessors. A real H100, of 132, held 751 MiB after the first training step.
CONTEXT, CONTEXT_OF_ONE = 300 * MiB, 751 * MiB // 132
ALL_COPIES, SMALL_COPIES = 1 << 62, 1 << 20  # bytes of a copy that is carried out, at most
DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")  # of Linux, and of Windows' subsystem for it
SETTINGS = "VIRTUAL_GPU"  # a variable of the environment: what start() was given, for the processes it starts

_libraries = []  # while they are loaded, the first is the runtime


def start(
    card: str = "T4", values: str = "small", *, context: int | None = None, beside_a_driver: bool = False, **facts: int
):
    """Load the libraries in place of NVIDIA's, for this process and for no other.

    card: of facts/gpus.toml, or a word of one. values: "all" computes what every kernel would have computed (numbers
    are right; tiny models), "small" whole numbers, truth values, what is filled or drawn at random, and tensors of few
    elements (branches and shapes by these are right; real sizes in seconds), "none" nothing. context: bytes of the card
    that no tensor can have; else by its multiprocessors.
    facts: in place of the card's own: total (bytes that CUDA reports), multiprocessors, threads, blocks (of one).
    Raises RuntimeError where torch came first or a driver of NVIDIA's is here, ValueError for what is not accepted,
    and FileNotFoundError without gcc.
    """
    chosen = machine.gpu(card)
    if values not in VALUES:
        raise ValueError(f"values was {values!r}; accepted: {', '.join(VALUES)}")
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: start the virtual GPU before it, in a new process or kernel")
    if not beside_a_driver and (here := [place for place in DRIVERS if Path(place).exists()]):
        raise RuntimeError(
            f"a GPU's driver is here ({here[0]}): use the GPU, or say beside_a_driver=True (--beside-a-driver)"
        )
    described = described_by(chosen, facts) | {"name": chosen.name}
    described["context"] = max(CONTEXT, CONTEXT_OF_ONE * described["multiprocessors"]) if context is None else context
    if type(described["context"]) is not int or not 0 <= described["context"] < described["total"]:
        given, total = described["context"], described["total"]
        raise ValueError(f"context was {given!r}; accepted: bytes, 0 or more, fewer than the card's total of {total}")
    described["copy"] = ALL_COPIES if values == "all" else SMALL_COPIES
    os.environ[SETTINGS] = json.dumps({"values": values, "described": described})
    inherit()
    try:
        import torch  # noqa: F401
    except BaseException:  # it could not be had: leave the process as it was
        del os.environ[SETTINGS]
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Around)]
        raise


def inherit():
    """Be the card of the process that started this one, if it had one, as soon as torch is imported.

    Called when Python starts in the environment of `make virtual-gpu`: what a script starts is on its card too.
    """
    if SETTINGS in os.environ and "torch" not in sys.modules:
        sys.meta_path.insert(0, _Around("torch", _around_torch))


class _Around:
    """Finds a package as ever, and has it loaded by a function that does something before or after it."""

    def __init__(self, package, function):
        self.package, self.function, self.looking = package, function, False

    def find_spec(self, name, path, target=None):
        if name != self.package or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)  # which others call too, only to know whether the package is here
        finally:
            self.looking = False
        if spec is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self.function(partial(load, module))
        return spec


def _around_torch(load_torch):
    from . import build

    settings = json.loads(os.environ[SETTINGS])
    described = settings["described"]
    libraries = build.build()
    # Of kernels that torch writes while it runs: a real card would find nothing in those that are written here.
    os.environ["USE_PYTORCH_KERNEL_CACHE"] = "0"
    os.environ.update({f"VGPU_{name.upper()}": str(value) for name, value in described.items()})
    # torch finds them by their names, loaded already: no loader's path is touched.
    _libraries.extend(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL) for library in libraries)
    load_torch()
    os.environ["VGPU_KERNELS"] = str(_kernels(described["major"], described["minor"]))
    from . import arithmetic

    arithmetic.start(settings["values"], _libraries[0])
    if settings["values"] == "all":
        sys.meta_path.insert(0, _Around("bitsandbytes", lambda load: (load(), arithmetic.start_bitsandbytes())))
    # torch's autograd thread may still let go of the last graph; an interpreter that ends meanwhile aborts.
    atexit.register(time.sleep, 0.2)


def described_by(card: machine.Gpu, facts: dict[str, int]) -> dict[str, int]:
    """What a program can ask of the card. ValueError for a card known by its size only, or a fact that is none."""
    if card.capability is None:
        raise ValueError(f"card was {card.name!r}; accepted: {', '.join(machine.gpus())}, or a word of one")
    major, minor = card.capability
    limits = machine.multiprocessor(card.capability)
    known = {
        "total": card.total, "multiprocessors": card.multiprocessors, "threads": limits["threads"],
        "blocks": limits["blocks"], "shared": limits["shared_kib"] * 1024,
        "shared_optin": limits["shared_optin_kib"] * 1024,
    }  # fmt: skip
    if unknown := [name for name, value in facts.items() if name not in known or type(value) is not int or value < 1]:
        raise ValueError(f"facts were {facts}; accepted: {', '.join(known)}, whole numbers (not {unknown[0]})")
    return {"major": major, "minor": minor} | known | facts


def _kernels(major: int, minor: int) -> int:
    """The architecture, of those that torch was built for, whose machine code the card runs, such as 86; 0 for none."""
    import torch

    # Not by torch._C._cuda_getArchFlags: after it, processes that are forked have no GPU, as on a real card.
    numbers = map(int, re.findall(r"code=sm_(\d+)\b", torch._C._show_config()))
    return max((number for number in numbers if number // 10 == major and number % 10 <= minor), default=0)


def report() -> str:
    """What nvidia-smi and torch.cuda.memory_stats() would have shown at the peak of this process."""
    import torch

    if not torch.cuda.device_count():
        return "no GPU: CUDA_VISIBLE_DEVICES hides the virtual one too"
    stats = torch.cuda.memory_stats()
    parts = {name: stats.get(f"{name}_bytes.all.peak", 0) for name in ("requested", "allocated", "reserved")}
    _libraries[0].vgpu_highest.restype = ctypes.c_size_t
    shown = {**parts, "nvidia-smi": _libraries[0].vgpu_highest()}
    card = torch.cuda.get_device_properties(0)
    lines = [f"{name:>12} {size / MiB:>12,.1f} MiB" for name, size in shown.items()]
    if not stats.get("requested_bytes.all.allocated"):  # ever: a script may have reset its peaks
        lines.append("This process asked for nothing. What it started in processes of their own is not counted here.")
    return "\n".join([f"peak on a virtual {card.name}, {card.total_memory / MiB:,.0f} MiB:", *lines])

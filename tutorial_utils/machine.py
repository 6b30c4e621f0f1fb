"""What am I running on, what can it do, what will break, and which sizes fit?"""

import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GiB = 2**30
OLDEST = {"python": "3.11", "torch": "2.11", "transformers": "5.17"}
NEEDED = ("datasets", "accelerate", "matplotlib")  # beside torch and transformers, by every lesson


@dataclass(frozen=True)
class Machine:
    """The facts that lessons and bounds depend on. memory: bytes of the GPU, or of main memory.

    device: where the lessons run; "cpu" also for a GPU that this build of torch has no kernels for.
    """

    name: str
    device: str  # "cuda" or "cpu"
    memory: int
    cores: int
    capability: tuple[int, int] | None
    bf16: bool
    kernels: bool  # whether this build of torch has kernels for this GPU
    versions: dict[str, str]

    @property
    def backend(self) -> str:
        """The class that a bound belongs to: "cpu", "cuda", or their special cases "cpu-fp16" and "cuda-bf16"."""
        if self.device == "cpu":
            return "cpu" if self.bf16 else "cpu-fp16"
        return "cuda-bf16" if self.bf16 else "cuda"

    @property
    def slug(self) -> str:
        """The name of its file in facts/bounds: "cpu", or the GPU's name in lower case."""
        return "cpu" if self.device == "cpu" else re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Preset:
    """The size at which a lesson's own measurements run here."""

    model: str
    weights: str
    batch: int
    length: int


def facts() -> Machine:
    """This machine."""
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["transformers"] = importlib.metadata.version("transformers")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not torch.cuda.is_available():
        return Machine("CPU", "cpu", _main_memory(), cores, None, True, True, versions)
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    if not _has_kernels(capability, torch.cuda.get_arch_list()):
        return Machine(properties.name, "cpu", _main_memory(), cores, capability, True, False, versions)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Machine(properties.name, "cuda", properties.total_memory, cores, capability, bf16, True, versions)


def start(network: bool = False) -> Machine:
    """Open a lesson: check the versions, install what is missing if `network`, show the machine.

    torch is never replaced. RuntimeError where Python, torch or transformers is too old.
    """
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # of several GPUs, or the Trainer would split each batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an old GPU that torch has no kernels for: said below
        here = facts()
    _check_versions(here.versions)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and network:
        _install(missing)
    elif missing:
        print(f"Not installed: {', '.join(missing)}. Cells that use them will fail; with a network, set NETWORK = True")
    _quiet(here)
    versions = ", ".join(f"{name} {version}" for name, version in here.versions.items())
    print(f"{here.name}, {here.memory / GiB:.0f} GiB, {here.cores} cores; {versions}", *limits(here), sep="\n")
    return here


def limits(here: Machine) -> list[str]:
    """What this machine cannot do, a line each."""
    lines = []
    if not here.kernels:
        major, minor = here.capability
        lines.append(
            f"This build of torch has no kernels for this GPU (sm_{major}{minor}): choose another "
            f"accelerator, or a build of torch made for it. Until then the lessons run on the CPU."
        )
    elif here.device == "cpu":
        lines.append("No GPU: lessons run at a small size, and predict the real sizes.")
    if not here.bf16:
        lines.append("No bf16 in hardware: use fp16 with a GradScaler.")
    return lines


def preset(here: Machine) -> Preset:
    """The largest of the course's sizes that leaves a quarter or more of this machine's memory free."""
    if here.device == "cpu" or here.memory < 5.5 * GiB:  # 6 GB cards have 5.8 for a process
        return Preset("tiny", "pretrained", 32, 128)
    return Preset("bert-large-uncased" if here.memory > 14 * GiB else "bert-base-uncased", "random", 32, 128)


@dataclass(frozen=True)
class Gpu:
    """A card that need not be here. memory: bytes, as nvidia-smi reports them."""

    name: str
    memory: int
    capability: tuple[int, int] | None  # None for a card known by its size only

    @property
    def usable(self) -> int:
        """Bytes that a process can have, at least: 14.56 of a T4's 15.00 GiB, 23.64 of an RTX 4090's 23.99."""
        return self.memory * 97 // 100


@cache
def gpus() -> dict[str, Gpu]:
    """The cards of facts/gpus.toml, by name."""
    facts = tomllib.loads((Path(__file__).parent / "facts" / "gpus.toml").read_text())
    return {n: Gpu(n, fact["memory_mib"] * 2**20, tuple(fact["capability"])) for n, fact in facts.items()}


def gpu(card: str | int | Gpu) -> Gpu:
    """The card of a name or of a unique word of one ("T4"), or of a size ("6 GiB", or bytes). Else ValueError."""
    if isinstance(card, Gpu):
        return card
    if isinstance(card, str) and (size := re.fullmatch(r"([\d.]+) ?GiB", card.strip())):
        card = round(float(size[1]) * GiB)
    if isinstance(card, int) and card > 0:
        return Gpu(f"{card / GiB:g} GiB", card, None)
    found = [g for name, g in gpus().items() if card == name or str(card).lower() in re.split(r"[ -]", name.lower())]
    if len(found) != 1:
        raise ValueError(f'card was {card!r}; accepted: {", ".join(gpus())}, a word of one, or a size such as "6 GiB"')
    return found[0]


def card(name: str) -> int:
    """Bytes of memory of a GPU of facts/gpus.toml. ValueError for one that is not there."""
    return gpu(name).memory


@contextmanager
def reserved_limit(size: int, context: int):
    """On CUDA, let the allocator reserve at most `size` bytes less those of the CUDA context."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    if not 0 < size - context <= total:
        raise ValueError(
            f"size was {size:,} with a context of {context:,} bytes; "
            f"accepted: more than the context, up to this card's {total:,}"
        )
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((size - context) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def hub_reachable() -> bool:
    """Whether the Hugging Face hub answers within five seconds. Called only when it was asked for."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info("google-bert/bert-base-uncased", timeout=5)
    except Exception as error:
        return isinstance(error, HfHubHTTPError)  # then it answered, if not to our liking
    return True


def _check_versions(versions: dict[str, str]):
    for name, oldest in OLDEST.items():
        found, least = ([int(part) for part in re.findall(r"\d+", v)[:2]] for v in (versions[name], oldest))
        if found < least:
            advice = {
                "python": "use a newer image or environment",
                "torch": "choose a newer image of the platform: this course does not replace its torch",
                "transformers": 'run  pip install "transformers>=5.17"  (offline: see README) and restart the kernel',
            }[name]
            raise RuntimeError(f"{name} is {versions[name]}; the lessons need {oldest} or newer: {advice}")


def _install(packages: list[str]):
    import torch

    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        print(f"torch=={torch.__version__}", file=constraints, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", constraints.name]
        subprocess.run([*pip, *packages], check=True)
    importlib.invalidate_caches()


def _quiet(here: Machine):
    """No progress bars in committed outputs, and no telemetry."""
    os.environ.setdefault("DS_ACCELERATOR", here.device)  # DeepSpeed, which Accelerate imports, logs what it guesses
    # Imported on a CPU, it warns of a 4-bit kernel that no optimizer uses.
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def _has_kernels(capability: tuple[int, int], architectures: list[str]) -> bool:
    # Machine code runs on later minor versions of its major one; PTX on anything later.
    for architecture in architectures:
        kind, major, minor = re.match(r"(sm|compute)_(\d+)(\d)", architecture).groups()
        if (int(major), int(minor)) <= capability and (kind == "compute" or int(major) == capability[0]):
            return True
    return False


def _main_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

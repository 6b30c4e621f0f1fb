"""What am I running on, what can it do, what will break, and which sizes fit?"""

import gc
import importlib.metadata
import importlib.util
import json
import locale
import logging
import math
import os
import platform
import re
import tempfile
import time
import tomllib
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from . import packages
from .check import accept

GiB = 2**30
# The oldest versions that the lessons run on, those of platforms/, and the newest that they were tested with.
OLDEST = {"python": "3.11", "torch": "2.10", "transformers": "5.0"}
NEWEST = {"python": "3.13", "torch": "2.15", "transformers": "5.24"}
NEEDED = ("datasets", "accelerate", "matplotlib")  # beside torch and transformers, by every lesson
OWN = f"said by {os.getpid()}"  # by which a process knows its own COURSE_BUSY
LARGE = 14 * GiB  # of a GPU on which lessons train BERT-large
SLOW, EMULATED = 0.7, 3  # times of bf16 on a CPU, to fp32's, between the classes of `Machine.backend`
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container's processors, as the Linux kernel tells it
FEW_CORES = 4  # Kaggle's and Colab's, and those of the machines that recorded "cpu"


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
    bf16_time: float = 0.3  # of a CPU: the time of a product of matrices in bf16, to fp32's
    virtual: str | None = None  # of a virtual GPU, which values it computes: its memory is real, its times are not

    @property
    def backend(self) -> str:
        """The class that a bound belongs to: "cpu", "cuda", or their special cases.

        "cpu-fp16" has no bf16 at all, "cuda-bf16" has it. "cpu-slow-bf16" gains no time by it, or little. "cpu-other"
        has more cores than those whose times were recorded, or emulates bf16: the times of "cpu" say little about it.
        """
        if self.device == "cpu" and not self.bf16:
            return "cpu-fp16"
        if self.device == "cpu" and (self.cores > FEW_CORES or self.bf16_time > EMULATED):
            return "cpu-other"
        if self.device == "cpu":
            return "cpu" if self.bf16_time < SLOW else "cpu-slow-bf16"
        return "cuda-bf16" if self.bf16 else "cuda"

    @property
    def slug(self) -> str:
        """The name of its file in facts/bounds: "cpu", or the GPU's name in lower case, such as "virtual-t4"."""
        name = re.sub(r"^(virtual )(Tesla|NVIDIA) ", r"\1", self.name)
        return "cpu" if self.device == "cpu" else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


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
    cores = _cores()
    if not torch.cuda.is_available():
        return Machine("CPU", "cpu", _main_memory(), cores, None, True, True, versions, _bf16_time())
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    if not _has_kernels(capability, torch.cuda.get_arch_list()):
        return Machine(properties.name, "cpu", _main_memory(), cores, capability, True, False, versions, _bf16_time())
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    here = Machine(properties.name, "cuda", properties.total_memory, cores, capability, bf16, True, versions)
    if virtual := os.environ.get("VIRTUAL_GPU"):  # what virtual_gpu.start was given
        return replace(here, name=f"virtual {here.name}", virtual=json.loads(virtual)["values"])
    return here


def start(network: bool = False) -> Machine:
    """Open a lesson: check the versions, add what is missing, show the machine.

    What is missing comes from the kit, or with `network` from the package index. No package that is there is replaced;
    where the CPU emulates bf16, its matrix products of halves are from here on `kernels.multiply_in_fp32`'s.
    RuntimeError where Python, torch or transformers is too old.
    """
    packages.may_install = network
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # torch, too, cannot be imported without one
        raise RuntimeError("no folder for temporary files has room: free some space, or name one in TMPDIR") from None
    _give_way()
    _read_utf_8()
    gpus_said = _one_gpu()
    packages.hide_old_torchao()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        here = facts()
    # The rest is of an old GPU that torch has no kernels for: said below.
    gpus_said += [str(one.message) for one in told if "driver on your system" in str(one.message)]
    _check_versions(here.versions)
    versions = ", ".join(f"{name} {version}" for name, version in here.versions.items())
    said = [*limits(here), *gpus_said]
    print(f"{here.name}, {here.memory / GiB:.0f} GiB, {here.cores} cores; {versions}", *said, sep="\n")
    for name in NEEDED:
        packages.need(name, "the cells that use it")
    _quiet(here)
    _not_more_threads_than(here.cores)
    if emulates(here):
        from . import kernels  # with torch, which is imported when `_give_way` has spoken

        kernels.multiply_in_fp32()
    gc.get_freeze_count() or gc.freeze()  # what was imported: else each of the collections that follow looks at it
    return here


def _not_more_threads_than(cores: int):
    """They would wait for each other, and spend a container's quota on that."""
    import torch

    if torch.get_num_threads() > cores:
        torch.set_num_threads(cores)


def _read_utf_8():
    """Where the locale has ASCII alone: torch opens its own templates, in UTF-8, in the locale's encoding."""
    if "utf" not in locale.getpreferredencoding(False).lower():
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        os.environ["PYTHONUTF8"] = "1"  # for the processes that the lesson starts


def emulates(here: Machine) -> bool:
    return here.device == "cpu" and here.bf16_time > EMULATED


def limits(here: Machine) -> list[str]:
    """What this machine cannot do, a line each."""
    accept(isinstance(here, Machine), "here", here, "machine.facts()")
    major, minor = here.capability or (0, 0)
    lines = {
        f"This build of torch has no kernels for this GPU, {here.name} (sm_{major}{minor}), and the lessons run on "
        "the CPU: on Kaggle choose GPU T4 x2 under Settings, Accelerator; on Colab a T4 under Runtime, Change runtime "
        "type.": not here.kernels,
        "No GPU: lessons run at a small size, and predict the real sizes.": here.kernels and here.device == "cpu",
        f"This CPU emulates bf16, {here.bf16_time:.0f} times slower than fp32. "
        "Products of halves are computed in fp32 and rounded, except for times.": emulates(here),
        "No times on a virtual GPU: the seconds that are shown are this computer's.": here.virtual,
        "No bf16 in hardware: use fp16 with a GradScaler.": not here.bf16,
    }
    return [line for line, holds in lines.items() if holds]


def preset(here: Machine) -> Preset:
    """The largest of the course's sizes that leaves a quarter or more of this machine's memory free."""
    accept(isinstance(here, Machine), "here", here, "machine.facts()")
    slow = here.device == "cpu" or here.virtual == "all"  # a virtual GPU computes on this CPU
    if slow or here.memory < 5.5 * GiB:  # 6 GB cards have 5.8 for a process
        return Preset("tiny", "pretrained", 32, 128)
    return Preset("bert-large-uncased" if here.memory > LARGE else "bert-base-uncased", "random", 32, 128)


@dataclass(frozen=True)
class Gpu:
    """A card that need not be here. memory: bytes, as nvidia-smi reports them; total: as CUDA does."""

    name: str
    memory: int
    capability: tuple[int, int] | None  # None for a card known by its size only
    total: int | None = None
    multiprocessors: int | None = None
    short: str | None = None  # the name alone that means this card of several

    @property
    def usable(self) -> int:
        """Bytes that a process can have, at least: 14.55 of a T4's 15.00 GiB, 3.63 of a GTX 1650's 4.00."""
        return min(self.memory * 97 // 100, self.total or self.memory)


@cache
def table(name: str) -> dict[str, dict]:
    """A file of facts: capabilities, gpus or models."""
    return tomllib.loads((Path(__file__).parent / "facts" / f"{name}.toml").read_text(encoding="utf-8"))


def multiprocessor(capability: tuple[int, int]) -> dict[str, int]:
    """What a multiprocessor of that compute capability holds at most, such as threads."""
    return table("capabilities")["{}.{}".format(*capability)]


@cache
def gpus() -> dict[str, Gpu]:
    """The cards of facts/gpus.toml, by name."""
    return {
        name: Gpu(name, fact["memory_mib"] * 2**20, tuple(fact["capability"]), int(fact["total_mib"] * 2**20),
                  fact["multiprocessors"], fact.get("short"))
        for name, fact in table("gpus").items()
    }  # fmt: skip


def this_gpu() -> Gpu | None:
    """The card of this machine; None where there is none, or none that this torch has kernels for."""
    import torch

    if not torch.cuda.is_available() or (here := facts()).device != "cuda":
        return None
    chip = torch.cuda.get_device_properties(0)
    return Gpu(here.name, here.memory, here.capability, chip.total_memory, chip.multi_processor_count)


def gpu(card: str | int | Gpu) -> Gpu:
    """The card of a name or of words that only one has ("T4", "A100 PCIe"), or of a size: "6 GiB",
    which is sold as "6 GB", or bytes.

    Words that stand in several names mean the one that has no others ("3060", of the Ti too), or the usual one of
    facts/gpus.toml ("A100"). Else ValueError.
    """
    if isinstance(card, Gpu):
        return card
    size = re.fullmatch(r"(\d{1,6}(\.\d+)?) ?Gi?B", card.strip(), re.ASCII) if isinstance(card, str) else None
    count = round(float(size[1]) * GiB) if size else card
    if type(count) is int and 0 < count < 2**63:
        return Gpu(f"{count / GiB:g} GiB", count, None)
    found = {g: set(re.split(r"[ -]", g.name.lower())) for g in gpus().values()}
    found = {g: words for g, words in found.items() if set(re.split(r"[ -]", str(card).lower())) <= words}
    plain = [g for g, words in found.items() if all(words <= others for others in found.values())]
    chosen = [g for g in found if str(card).lower() in (g.name.lower(), str(g.short).lower())] or plain
    names = ", ".join(found and [g.name for g in found] or gpus())
    accept(len(chosen) == 1, "card", card, f'{names}, words of one, or a size such as "6 GiB"')
    return chosen[0]


@contextmanager
def reserved_limit(size: int, context: int):
    """On CUDA, let the allocator reserve at most `size` bytes less those of the CUDA context."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    fits = 0 < size - context <= total
    accept(fits, "size", size, f"more than the context of {context} bytes, up to this card's {total} more")
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
    except HfHubHTTPError as error:
        return error.response.status_code < 500  # then it answered, if not to our liking
    except Exception:
        return False
    return True


def hub_failed(error: BaseException | None) -> bool:
    """Whether an error is the hub's or the way's there, and not its answer to what was asked."""
    while error is not None:
        response = getattr(error, "response", None)
        if getattr(response, "status_code", 0) >= 500:
            return True
        kind = type(error).__module__.split(".")[0]
        if response is None and (kind.startswith("httpx") or isinstance(error, (ConnectionError, TimeoutError))):
            return True
        error = error.__cause__ or error.__context__
    return False


def _check_versions(versions: dict[str, str]):
    def places(version):
        return [int(part) for part in re.findall(r"\d+", version)[:2]]

    for name, oldest in OLDEST.items():
        if places(versions[name]) < places(oldest):
            advice = {
                "python": "use a newer image or environment",
                "torch": "choose a newer image, or a GPU in place of a TPU: this course does not replace its torch",
                "transformers": 'run  !pip install "transformers>=5.0"  (offline: see README) and restart the kernel',
            }[name]
            raise RuntimeError(f"{name} is {versions[name]}; the lessons need {oldest} or newer: {advice}")
    newer = [f"{name} {versions[name]}" for name in NEWEST if places(versions[name]) > places(NEWEST[name])]
    if newer:
        print(f"Newer than what the lessons were tested with: {', '.join(newer)}. They go on.")


def _give_way():
    """Where others use the processors: let threads sleep while they wait, and say that times are not judged.

    Threads that spin take the processor from whoever has work, this process' own threads too; alone, those that sleep
    make small steps slower, so it is no default. It counts where torch is not imported yet.
    """
    if os.environ.get("COURSE_STRICT") or os.environ.get("COURSE_BUSY") not in (None, OWN):
        return
    os.environ.pop("COURSE_BUSY", None)  # said by this cell when it ran before: things may have changed
    with suppress(ImportError):
        import psutil

        count = psutil.cpu_count() or 1
        others = max(0, count - int(os.environ.get("OMP_NUM_THREADS") or count))  # processors for another lesson
        if psutil.cpu_percent(interval=0.5) * count > 100 * others + 30:  # of one processor
            os.environ["COURSE_BUSY"] = OWN
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            print("Something else uses this machine: times are shown and not judged.")


def _one_gpu() -> list[str]:
    """Of several, the Trainer would split each batch, and `measure.memory` sees one: what to say, where there are."""
    import torch

    count = torch.cuda.device_count()  # does not open CUDA, which would fix the choice
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if count < 2:
        return []
    late = ", but CUDA is open already: restart the kernel, and run this cell first" * torch.cuda.is_initialized()
    return [f"{count} GPUs are here; a lesson uses the first{late}."]


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


@cache
def _bf16_time() -> float:
    """Measured, since no name of a processor tells: 0.3 with AMX or fast AVX-512, 1.3 with slow, emulated 9 or more."""
    import torch

    def seconds(matrix):
        started = time.perf_counter()
        matrix @ matrix
        return time.perf_counter() - started

    full, rounds, half, whole = torch.ones(512, 512), [], 0.0, 1.0
    while len(rounds) < (2 if half > 9 * whole else 8):  # a product that is emulated takes a quarter of a second
        rounds.append((seconds(full.bfloat16()), seconds(full)))
        half, whole = map(min, zip(*rounds))
    return half / whole


def _cores() -> int:
    """Those that this process may use: of its affinity, and of its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        quota, period = map(int, QUOTA.read_text(encoding="utf-8").split())
        return min(cores, math.ceil(quota / period))
    return cores


def _main_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows has no such call
        import psutil

        return psutil.virtual_memory().total

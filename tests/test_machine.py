"""What a machine can do, also machines that are not here: their facts are imitated."""

import dataclasses
import os
import platform
import re
import subprocess
import sys
import tomllib
import warnings
from types import SimpleNamespace

import pytest
import torch

from notebooks import ROOT
from tutorial_utils import machine, packages

CPU = machine.Machine(
    "CPU", "cpu", 24 * 2**30, 2, None, True, True, {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"}
)
T4 = dataclasses.replace(CPU, name="Tesla T4", device="cuda", memory=15 * 2**30, capability=(7, 5), bf16=False)
P100 = dataclasses.replace(T4, name="Tesla P100-PCIE-16GB", device="cpu", capability=(6, 0), kernels=False, bf16=True)
A100 = dataclasses.replace(T4, name="NVIDIA A100-SXM4-40GB", memory=40 * 2**30, capability=(8, 0), bf16=True)
LAPTOP = dataclasses.replace(A100, name="NVIDIA GeForce RTX 3060", memory=int(5.8 * 2**30))
SMALL = dataclasses.replace(T4, name="NVIDIA GeForce GTX 1650", memory=int(3.9 * 2**30))


def test_this_machine():
    here = machine.facts()
    assert here.memory > 2**30 and here.cores >= 1 and set(here.versions) == set(machine.OLDEST)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN is told to do without instructions of x86")
@pytest.mark.parametrize(
    ("instructions", "backends"), [("AVX512_CORE", ("cpu-slow-bf16", "cpu-other")), ("AVX2", ("cpu-other",))]
)
def test_the_class_of_a_cpu_is_that_of_its_bf16(instructions, backends):
    """Without its instructions for bf16 a processor is slower with it, by how much is its own."""
    if instructions != "AVX2" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor emulates bf16 whatever it is told")
    code = (
        "import dataclasses; from tutorial_utils import machine; here = machine.facts(); "
        "print(dataclasses.replace(here, cores=2).backend, here.bf16_time)"
    )
    known = {**os.environ, "PYTHONPATH": str(ROOT), "ONEDNN_MAX_CPU_ISA": instructions}
    done = subprocess.run([sys.executable, "-c", code], env=known, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] in backends, done.stdout


@pytest.mark.alone
def test_the_first_cell_takes_five_seconds_where_nothing_is_missing(second, tmp_path):
    cell = (ROOT / "scripts" / "setup_cell.py").read_text(encoding="utf-8")
    code = f"import time; started = time.perf_counter()\n{cell}\nprint('seconds', time.perf_counter() - started)"
    known = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    for _ in range(2):  # the first reads the libraries from the disk
        done = subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True, check=True)
    seconds = float(done.stdout.split("seconds ")[1])
    assert seconds <= 5 * second, f"the first cell took {seconds:.1f} s"


def test_classes_slugs_and_presets():
    machines = (CPU, T4, P100, A100, LAPTOP, SMALL)
    assert [m.backend for m in machines] == ["cpu", "cuda", "cpu", "cuda-bf16", "cuda-bf16", "cuda"]
    others = {"cpu-slow-bf16": {"bf16_time": 1.3}, "cpu-other": {"bf16_time": 9.0}}
    for backend, facts in others.items():
        assert dataclasses.replace(CPU, **facts).backend == backend
        assert dataclasses.replace(CPU, **facts, cores=16).backend == "cpu-other"
    assert [m.slug for m in machines[:3]] == ["cpu", "tesla-t4", "cpu"]
    presets = [machine.preset(m) for m in machines]
    assert [p.model for p in presets] == [
        "tiny",
        "bert-large-uncased",
        "tiny",
        "bert-large-uncased",
        "bert-base-uncased",
        "tiny",
    ]
    assert presets[-1] == machine.preset(CPU)


@pytest.mark.parametrize(
    ("here", "words"),
    [
        (CPU, "^No GPU[^.]*[.]$"),
        (dataclasses.replace(CPU, bf16_time=57.3), "No GPU.*emulates bf16, 57 times slower than fp32"),
        (T4, "No bf16"),
        (P100, r"no kernels.*P100.*sm_60.*Kaggle choose GPU T4 x2"),
    ],
)
def test_limits_are_said(here, words):
    import re

    assert re.search(words, " ".join(machine.limits(here)))
    assert machine.limits(A100) == []


def test_presets_fit_their_machines():
    from tutorial_utils import predict

    for here in (T4, LAPTOP, SMALL):
        preset = machine.preset(here)
        cost = predict.step_memory(preset.model, preset.batch, preset.length, padded=True, card=here.memory)
        assert cost.fits and cost.peak < 0.76 * here.memory, f"{preset} needs {cost.card_bytes / 2**30:.1f} GiB"


@pytest.mark.parametrize(
    ("name", "version", "advice"),
    [
        ("torch", "2.9.1+cu128", "does not replace its torch"),
        ("transformers", "4.57.0", "pip install"),
        ("python", "3.10.4", "newer image"),
    ],
)
def test_versions_below_the_range_are_named_with_what_to_do(name, version, advice):
    with pytest.raises(RuntimeError, match=f"{name} is .*need {machine.OLDEST[name]} or newer: .*{advice}"):
        machine._check_versions(CPU.versions | {name: version})
    machine._check_versions(machine.OLDEST)


def test_newer_versions_than_tested_are_one_line(capsys):
    machine._check_versions(machine.NEWEST)
    assert capsys.readouterr().out == ""
    machine._check_versions(CPU.versions | {"torch": "2.99.0+cu140", "transformers": "6.1"})
    (line,) = capsys.readouterr().out.splitlines()
    assert "torch 2.99.0+cu140, transformers 6.1" in line and line.endswith("They go on.")


@pytest.fixture
def no_such_package(monkeypatch, tmp_path):
    """A package that is nowhere, whatever the lessons installed before; and what was left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COURSE_KIT", str(tmp_path / "kit"))
    monkeypatch.setattr(packages, "left_out", {})
    yield "no_such_package"
    sys.modules.pop("no_such_package", None)


def test_a_missing_package_is_named_and_not_installed_unasked(monkeypatch, capsys, no_such_package):
    monkeypatch.setattr(packages, "may_install", False)
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: pytest.fail("installed unasked"))
    assert packages.need(no_such_package, "its cells") is False
    assert capsys.readouterr().out == "left out: its cells. no_such_package: not installed\n"
    assert packages.left_out == {no_such_package: "its cells"}
    assert packages.need("torch", "everything") and not capsys.readouterr().out


def test_a_package_that_pip_puts_into_a_new_folder_of_the_user_is_there_at_once(monkeypatch, tmp_path):
    """As where the environment is read-only."""
    (tmp_path / "kit").mkdir()

    def pip(*_, **__):
        (tmp_path / "user").mkdir()
        (tmp_path / "user" / "of_the_user.py").touch()
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(packages, "_wheels", lambda: [tmp_path / "kit"])
    monkeypatch.setattr(packages.subprocess, "run", pip)
    monkeypatch.setattr(packages.site, "getusersitepackages", lambda: str(tmp_path / "user"))
    monkeypatch.setattr(packages.sys, "path", list(packages.sys.path))
    monkeypatch.setattr(packages.importlib.metadata, "version", lambda name: "1.0")
    assert packages.need("of_the_user", "its cells")


def test_an_old_torchao_is_hidden_from_peft(monkeypatch):
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(packages.importlib.metadata, "version", lambda name: "0.16.1")
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    packages.hide_old_torchao()
    assert "torchao" not in sys.modules
    monkeypatch.setattr(packages.importlib.metadata, "version", lambda name: "0.10.0+git")
    packages.hide_old_torchao()
    assert sys.modules.pop("torchao") is None


@pytest.mark.parametrize(("percent", "busy"), [(5.0, False), (60.0, True)])
def test_beside_others_threads_sleep_and_times_are_not_judged(monkeypatch, capsys, percent, busy):
    import psutil

    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine.os, "environ", {"PATH": os.environ["PATH"]})
    machine._give_way()
    assert (machine.os.environ.get("OMP_WAIT_POLICY") == "PASSIVE") is busy is ("COURSE_BUSY" in machine.os.environ)
    assert ("times are shown and not judged" in capsys.readouterr().out) is busy
    monkeypatch.setattr(machine.os, "environ", {"OMP_NUM_THREADS": "1"})
    machine._give_way()
    assert "COURSE_BUSY" not in machine.os.environ, "another lesson may have the other processor"
    monkeypatch.setattr(machine.os, "environ", {"COURSE_STRICT": "1"})
    machine._give_way()
    assert machine.os.environ == {"COURSE_STRICT": "1"}, "where figures are the point, they decide by themselves"


def test_a_first_cell_that_runs_again_looks_again(monkeypatch):
    """What it said itself it takes back; what a runner has said stays."""
    import psutil

    percent = [60.0]
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent[0])
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine.os, "environ", {"PATH": os.environ["PATH"]})
    machine._give_way()
    assert machine.os.environ["COURSE_BUSY"]
    percent[0] = 5.0
    machine._give_way()
    assert "COURSE_BUSY" not in machine.os.environ
    machine.os.environ["COURSE_BUSY"] = "1"
    machine._give_way()
    assert machine.os.environ["COURSE_BUSY"] == "1"


def test_of_two_gpus_one_is_used_and_the_lesson_says_so(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(machine, "_not_more_threads_than", lambda cores: None)
    monkeypatch.setattr(machine, "facts", lambda: T4)
    monkeypatch.setattr(machine.os, "environ", dict(os.environ))
    for given, chosen in ((None, "0"), ("1,0", "1")):
        machine.os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        machine.os.environ |= {"CUDA_VISIBLE_DEVICES": given} if given else {}
        machine.start()
        assert machine.os.environ["CUDA_VISIBLE_DEVICES"] == chosen
    assert "2 GPUs are here; a lesson uses the first.\n" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    machine.start()
    assert "CUDA is open already: restart the kernel" in capsys.readouterr().out


def test_a_driver_that_is_too_old_is_said(monkeypatch, capsys):
    def facts():
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1)
        warnings.warn("of something else", stacklevel=1)
        return dataclasses.replace(T4, device="cpu", name="CPU")

    monkeypatch.setattr(machine, "facts", facts)
    monkeypatch.setattr(machine, "_not_more_threads_than", lambda cores: None)
    monkeypatch.setattr(machine.os, "environ", dict(os.environ))
    machine.start()
    said = capsys.readouterr().out
    assert (
        "\nCUDA initialization: The NVIDIA driver on your system is too old\n" in said
        and "of something else" not in said
    )


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("150000 100000", 2), ("3200000 100000", 8), (None, 8)]
)
def test_cores_are_those_of_the_containers_quota(monkeypatch, tmp_path, quota, cores):
    file = tmp_path / "cpu.max"
    if quota:
        file.write_text(quota + "\n")
    monkeypatch.setattr(machine, "QUOTA", file)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert machine._cores() == cores


def test_no_more_threads_than_cores():
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        machine._not_more_threads_than(4)
        assert torch.get_num_threads() == 3
        machine._not_more_threads_than(2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_main_memory_where_the_system_has_no_sysconf(monkeypatch):
    """Windows has none."""
    import psutil  # which asks for it when it is imported

    monkeypatch.delattr(machine.os, "sysconf", raising=False)
    assert machine._main_memory() == psutil.virtual_memory().total


def test_a_package_that_is_there_twice_is_held_once(monkeypatch):
    """Colab has Debian's MarkupSafe behind its own: two constraints of one name are met by no version."""

    def one(name, version):
        return SimpleNamespace(metadata={"Name": name}, version=version)

    twice = [one("MarkupSafe", "3.0.3"), one("zope.interface", "1"), one("markupsafe", "2.0.1"), one(None, "1")]
    monkeypatch.setattr(packages.importlib.metadata, "distributions", lambda: twice)
    assert packages._installed() == ["MarkupSafe==3.0.3", "zope.interface==1"]


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [((7, 5), ["sm_75", "sm_80"], True), ((6, 0), ["sm_75", "sm_80"], False), ((8, 6), ["sm_80"], True),
     ((9, 0), ["sm_80"], False), ((9, 0), ["sm_80", "compute_80"], True), ((10, 0), ["sm_100"], True),
     ((9, 0), ["sm_90a"], True)],
)  # fmt: skip
def test_kernels(capability, architectures, expected):
    assert machine._has_kernels(capability, architectures) is expected


def test_cards():
    assert machine.gpu("Tesla T4").memory == 15360 * 2**20
    assert machine.gpu("T4") is machine.gpu("t4") is machine.gpu("Tesla T4") is machine.gpu(machine.gpu("T4"))
    assert 14.5 * 2**30 < machine.gpu("T4").usable < 14.56 * 2**30  # what a T4 gives a process
    assert all(gpu.usable <= gpu.total for gpu in machine.gpus().values())
    for size in ("6 GiB", "6GiB", "6 GB", 6 * 2**30):  # "GB" as cards are sold
        assert (machine.gpu(size).name, machine.gpu(size).memory) == ("6 GiB", 6 * 2**30)
    for unknown in ("T5000", "Tesla", "6 G", 0, -1):  # two cards are a Tesla
        with pytest.raises(ValueError, match=f'card was {unknown!r}; accepted: Tesla T4.* such as "6 GiB"'):
            machine.gpu(unknown)


def test_reserved_limit_leaves_out_the_context_and_is_put_back(monkeypatch):
    import torch

    fractions = []
    total = type("Properties", (), {"total_memory": 16 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(KeyError), machine.reserved_limit(4 * 2**30, context=2**30):
        raise KeyError
    assert fractions == [3 / 16, 1.0]
    with pytest.raises(ValueError, match="accepted: more than the context"), machine.reserved_limit(1, context=2):
        pass


def test_an_unreachable_hub_is_known_at_once(monkeypatch):
    import huggingface_hub

    def refuse(self, *arguments, timeout=None, **_):
        assert timeout == 5
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    assert machine.hub_reachable() is False


def test_every_figure_of_a_card_has_an_address():
    address = re.compile(r"https?://\S+\.|github\.com/[\w.-]+/[\w.-]+: \S|the file above")
    cards = tomllib.loads((ROOT / "tutorial_utils" / "facts" / "gpus.toml").read_text(encoding="utf-8"))
    for name, card in cards.items():
        assert len(card["sources"]) == 3, f"{name}: one source each of memory_mib, total_mib and multiprocessors"
        for source in card["sources"]:
            assert address.search(source) and "no known address" not in source, f"{name}: {source}"

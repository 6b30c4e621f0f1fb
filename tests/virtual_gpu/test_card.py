"""The virtual GPU, by what is known of real ones. Each test is a process of its own: a card is for life."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VIRTUAL_GPU_PYTHON") or str(ROOT / ".virtual_gpu" / "bin" / "python")
pytestmark = pytest.mark.skipif(not Path(ROOT, PYTHON).exists(), reason="`make virtual-gpu` makes its environment")


def process(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"} | variables
    command = [str(ROOT / PYTHON), "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def on(card: str, code: str, values: str = "small", **facts: int) -> str:
    """What the code prints on a card, torch imported."""
    begin = f"import virtual_gpu; virtual_gpu.start({card!r}, {values!r}, **{facts})\nimport torch\n"
    ran = process(begin + textwrap.dedent(code))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.parametrize(
    ("card", "capability", "multiprocessors"), [("T4", (7, 5), 40), ("H100", (9, 0), 132), ("4090", (8, 9), 128)]
)
def test_the_card_is_what_programs_ask(card, capability, multiprocessors):
    from tutorial_utils import machine

    code = """
    p = torch.cuda.get_device_properties(0)
    print((p.name, (p.major, p.minor), p.multi_processor_count, p.total_memory, torch.cuda.is_bf16_supported(False)))
    """
    name, found, count, total, bf16 = eval(on(card, code))
    assert (name, found, count, total) == (machine.gpu(card).name, capability, multiprocessors, machine.gpu(card).total)
    assert bf16 is (capability >= (8, 0))


def test_the_allocator_counts():
    """Segments of 2 MiB for what is small, of 20 MiB for what is below 10: torch's own rule."""
    code = """
    a = torch.empty(100, device="cuda"); b = torch.empty(1000, 1000, device="cuda")
    s = torch.cuda.memory_stats()
    print([s[f"{n}_bytes.all.peak"] for n in ("requested", "allocated", "reserved")])
    print(virtual_gpu.report())
    """
    counted, shown = on("T4", code).split("\n", 1)
    assert eval(counted) == [4_000_400, 4_000_256 + 512, 22 * 2**20]
    assert "virtual Tesla T4" in shown and "322.0 MiB" in shown, "22 reserved and 300 of the context"


def test_a_process_that_is_forked_has_the_card():
    """As on a real one: if the process that forks it has not asked for a GPU, as importing torch does not."""
    code = """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    def on_the_card():
        return torch.ones(3, device="cuda").sum().item()

    def forked():
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
            return process.submit(on_the_card).result()

    print(forked(), on_the_card())
    try:
        forked()
    except RuntimeError as error:
        print(error)
    """
    before, after = on("T4", code).splitlines()
    assert before == "3.0 3.0" and "Cannot re-initialize CUDA in forked subprocess" in after


def test_out_of_memory_is_torchs_own():
    code = """
    held = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(14)]
    try:
        torch.empty(2**30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print(error)
    """
    said = on("T4", code)
    assert "Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 14.56 GiB" in said


def test_a_card_that_torch_has_no_kernels_for_says_so_as_torch_does():
    code = """
    try:
        torch.ones(2, device="cuda") + 1
    except RuntimeError as error:
        print(error)
    """
    assert "no kernel image is available for execution on the device" in on("P100", code)


def test_small_values_are_real():
    """A mask of ones is seen to be one; a boolean index has the size that it has; what goes there comes back."""
    code = """
    mask = torch.ones(4, 8, dtype=torch.long); x = torch.randn(4, 8)
    ones, mask[:, 6:] = mask.cuda().bool().all().item(), 0
    print(ones, mask.cuda().bool().all().item(), x.cuda()[mask.cuda() == 0].shape[0], torch.equal(x.cuda().cpu(), x))
    """
    assert on("A100", code).split() == ["True", "False", "8", "True"]


@pytest.mark.parametrize(("card", "workspace"), [("T4", 8_519_680), ("A100", 8_519_680), ("H100", 32 * 2**20)])
def test_cublas_workspace(card, workspace):
    """CUBLAS_WORKSPACE_CONFIG's default by capability, a thread that multiplies. torch 2.15 leaves it to cuBLAS."""
    code = """
    x = torch.empty(8, 8, device="cuda"); before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    y = x @ x
    print(torch.cuda.memory_stats()["requested_bytes.all.current"] - before - y.nbytes, torch.__version__)
    """
    found, version = on(card, code).split()
    own = tuple(map(int, version.split(".")[:2])) >= (2, 15)
    assert int(found) == (0 if own else workspace)


@pytest.mark.parametrize(("card", "staging"), [("T4", 20), ("A100", 108), ("L4", 44), ("H100", 128)])
def test_column_sum(card, staging):
    """The staging buffer of ATen's Reduce.cuh for 4096 x 4096, by its formula, in MiB; none with a single SM."""
    code = """
    x = torch.empty(4096, 4096, device="cuda"); torch.cuda.reset_peak_memory_stats()
    y = x.sum(0)
    print((torch.cuda.max_memory_allocated() - x.nbytes - y.nbytes) // 2**20)
    """
    assert int(on(card, code)) == staging
    if card == "A100":
        assert int(on(card, code, multiprocessors=1, threads=512)) == 0


@pytest.mark.parametrize(
    ("card", "kernel"), [("T4", "Efficient"), ("A100", "Flash"), ("L4", "Flash"), ("H100", "Cudnn")]
)
def test_attention_kernel(card, kernel):
    code = """
    q = torch.empty(2, 4, 128, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    y = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    y.sum().backward()
    print(type(y.grad_fn).__name__)
    """
    assert kernel in on(card, code)


def test_what_is_not_written_is_an_error_with_its_name():
    """In the exception too, of which torch knows a number only, with each kind of values."""
    code = """
for f in (torch.linalg.inv, torch.fft.fft, lambda x: x.to(torch.complex64) @ x.to(torch.complex64)):
    try:
        f(torch.eye(4, device="cuda"))
    except NotImplementedError as error:
        print(error)
"""
    for values in ("all", "small"):
        shown = on("T4", code, values)
        for name in ("cusolverDnCreate", "cufftCreate", "cublasCgemm_v2"):
            assert f"asked for {name}, which the virtual GPU does not have" in shown


def test_a_function_of_cusparse_names_itself():
    """With values a sparse tensor has none, and no function of cuSPARSE is reached."""
    ran = process("""
    import virtual_gpu; virtual_gpu.start("T4", "none")
    import torch
    torch.sparse.mm(torch.eye(4).to_sparse_csr().cuda(), torch.ones(4, 4, device="cuda"))
    """)
    assert ran.returncode and "the virtual GPU does not have this: cusparse" in ran.stderr


def test_each_process_has_a_whole_card(tmp_path):
    """And the report is of the first: README says both."""
    script = tmp_path / "two.py"
    script.write_text("""
import subprocess, sys, torch
x = torch.ones(2**28, device="cuda")
free = torch.cuda.mem_get_info()[0]
child = "import torch; y = torch.ones(2**28, device='cuda'); print(torch.cuda.mem_get_info()[0])"
print(free == int(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout))
""")
    ran = subprocess.run([PYTHON, "-m", "virtual_gpu", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "True" in ran.stdout and "allocated      1,024.0 MiB" in ran.stdout


def test_facts_that_are_the_same_for_each_card():
    """As README says: no program of the course asks for them."""
    code = """
    p = torch.cuda.get_device_properties(0)
    print(p.L2_cache_size, p.memory_bus_width, p.pci_bus_id)
    """
    assert on("T4", code) == on("H100 80GB", code) == "4194304 256 0\n"


CANNOT = {  # README's list: what is tried, and what it says
    "CUDA graphs": ("with torch.cuda.graph(torch.cuda.CUDAGraph()): x + 1", "not have this: cudaStreamBeginCapture"),
    "Triton": ("torch.compile(lambda x: 2 * x + 1)(x)", "Cannot find a working triton installation"),
    "NCCL": ("""torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.all_reduce(x)""", "ncclGetUniqueId was called, which the virtual GPU does not have"),
    "cuSPARSE": ("torch.sparse.mm(torch.eye(4).to_sparse_csr().cuda(), torch.ones(4, 4, device='cuda'))",
                 "of a sparse tensor has no values on the virtual GPU"),
    "cuDNN's recurrent layers": ("torch.nn.LSTM(4, 4).cuda()",
                                "virtual GPU does not have; torch.backends.cudnn.enabled = False does without cuDNN"),
    "batch normalisation": ("torch.nn.BatchNorm1d(4).cuda()(torch.ones(2, 4, 3, device='cuda'))",
                            "cudnnCreateTensorDescriptor was called, which"),
    "cuFFT": ("torch.fft.fft(x)", "cufftCreate was called, which the virtual GPU does not have"),
}  # fmt: skip


@pytest.mark.parametrize("what", CANNOT)
def test_what_cannot_run_says_so(what):
    code, said = CANNOT[what]
    begin = "import virtual_gpu; virtual_gpu.start('T4'); import torch; x = torch.ones(4, device='cuda')\n"
    ran = process(begin + code)
    assert ran.returncode and said in ran.stderr, ran.stderr[-2000:]
    assert what in (ROOT / "virtual_gpu" / "README.md").read_text(encoding="utf-8")


def test_its_kernels_are_not_traced():
    """Dynamo takes them for the program's own Python where one runs between two graphs."""
    code = """
    def f(x, y):
        return (x + 1)[y.nonzero()]
    x = torch.ones(4, device="cuda")
    print(torch._dynamo.explain(f)(x, x > 0).graph_break_count)
    """
    assert on("T4", code, "all").split()[-1] == "1"


def test_kernels_that_torch_writes_while_it_runs(tmp_path):
    """Their values are the CPU's, and nothing of them is kept where a real card would look for them."""
    code = f"""
    import os
    os.environ["PYTORCH_KERNEL_CACHE_PATH"] = {str(tmp_path)!r}
    x = torch.linspace(-0.9, 0.9, 5)
    print((x.cuda().erfinv().cpu() - x.erfinv()).abs().max().item() < 1e-6)
    """
    assert "True" in on("T4", code, "all") and not list(tmp_path.iterdir())


def test_torchscript_compiles_nothing():
    """In transformers 5.17 functions of DeBERTa are TorchScript, whose fuser would write kernels for a card."""
    code = """
    x = torch.ones(4, device="cuda")
    f = torch.jit.trace(lambda x: torch.sign(x) * (x.abs() + 1).log(), x)
    print([f(x).shape for _ in range(4)][-1])
    """
    assert "[4]" in on("T4", code)


def test_an_operator_without_values_names_itself():
    ran = process("""
    import virtual_gpu; virtual_gpu.start("T4", "all")
    import torch
    torch._fused_dropout(torch.ones(4, device="cuda"), 0.5)
    """)
    assert "aten::_fused_dropout has no values on the virtual GPU" in ran.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("virtual_gpu.start('T5')", "card was 'T5'; accepted: Tesla T4"),
        ("virtual_gpu.start('6 GiB')", "card was '6 GiB'; accepted: Tesla T4"),
        ("virtual_gpu.start('T4', 'some')", "values was 'some'; accepted: all, small, none"),
        ("virtual_gpu.start('T4', sms=3)", "facts were {'sms': 3}; accepted: "),
        ("import sys; sys.modules['torch'] = sys; virtual_gpu.start('T4')", "torch is imported already"),
        ("virtual_gpu.DRIVERS = ['/proc/self']; virtual_gpu.start('T4')", "a GPU's driver is here (/proc/self)"),
    ],
)
def test_what_it_refuses(code, said):
    assert said in process(f"import virtual_gpu; {code}").stderr


def test_nothing_is_left_on_a_loaders_path():
    code = """
    import os
    print([name for name, value in os.environ.items() if "virtual_gpu/build" in value])
    """
    assert on("T4", code).strip() == "[]"


def test_a_script_runs_unchanged(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys, torch\nprint(sys.argv[1:], torch.ones(2**20, device='cuda').device)\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [str(ROOT / PYTHON), "-m", "virtual_gpu", "--card", "A100", str(script), "--epochs", "2"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "['--epochs', '2'] cuda:0" in ran.stdout and "peak on a virtual NVIDIA A100-SXM4-40GB" in ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    command[5] = "no.py"
    assert "no file at 'no.py'" in subprocess.run(command, env=environment, capture_output=True, text=True).stderr


def test_small_values_are_classes_and_indices_in_their_range():
    """By these a script looks something up: what is not computed is zero, and never what lay in memory before."""
    code = """
torch.full((100_000,), 7.7e7, device="cuda")
scores = torch.rand(64, 6, device="cuda")
print(scores.argmax(-1).max().item() < 6, scores.topk(3).indices.max().item() < 6)
print(torch.randint(0, 5, (100,), device="cuda").max().item() < 5)
print(sorted(torch.randperm(100, device="cuda").tolist()) == list(range(100)))
print(torch.rand(8192, 64, device="cuda").argmax(-1).max().item() < 64)
print(torch.full((1,), float("nan"), device="cuda").item() == 0.0)  # what nobody computed is no NaN that stops a script
"""
    assert set(on("T4", code, "small").split()) == {"True"}


def test_small_values_stop_no_script_that_looks_for_nan():
    """What no kernel has written counts as finite, however many there are: else steps would be left out."""
    code = """
torch.full((4000, 1000), -100, device="cuda")  # whose bytes are NaN as floats
few, many = torch.empty(4, device="cuda").exp(), torch.empty(3000, 1000, device="cuda")
weight = torch.nn.Parameter(torch.empty(3000, 1000, device="cuda"))
(2 * weight).sum().backward()
for x in (few, many, weight.grad, weight):
    print(torch.isfinite(x).all().item(), not torch.isnan(x).any().item(), not torch.isinf(x).any().item())
print((few == few).all().item(), not (few != few).any().item())
print(torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True) is not None)
"""
    assert set(on("T4", code).split()) == {"True"}


def test_small_values_are_drawn_at_random():
    """The masks of masked language modelling, made on the card: by them a loss takes its rows."""
    code = """
shares = torch.full((32, 128), 0.15, device="cuda")
shares.masked_fill_(torch.arange(128, device="cuda") < 64, 0.0)
for mask in (torch.bernoulli(torch.full((32, 128), 0.15, device="cuda")).bool(), torch.bernoulli(shares).bool(),
             torch.rand(32, 128, device="cuda") < 0.15):
    print(mask.sum().item() / mask.numel(), torch.empty(32, 128, device="cuda")[mask].shape[0] == mask.sum().item())
"""
    (one, *_), (half, *_), (other, *right) = (line.split() for line in on("T4", code).splitlines())
    assert abs(float(one) - 0.15) < 0.03 and abs(float(half) - 0.075) < 0.03 and abs(float(other) - 0.15) < 0.03
    assert right == ["True"]


def test_a_profiler_goes_on_with_the_cpu():
    """As torch's own does where CUPTI fails."""
    ran = process("""
    import virtual_gpu; virtual_gpu.start("T4")
    import torch
    x = torch.ones(64, 64, device="cuda")
    with torch.profiler.profile() as profiled:
        x @ x
    print("aten::mm" in {event.key for event in profiled.key_averages()})
    """)
    assert ran.stdout == "True\n" and "the virtual GPU has no profiler" in ran.stderr


def test_a_second_card_is_none():
    code = """
    try:
        torch.ones(1, device="cuda:1")
    except RuntimeError as error:
        print(error)
    """
    assert "CUDA error: invalid device ordinal" in on("T4", code)


def test_what_is_not_here_names_itself_and_nothing_after_it():
    """A function of cuSOLVER, one of the driver that torch asks for by name, and a fact of the card."""
    code = """
try:
    torch.linalg.qr(torch.eye(4, device="cuda"))
except RuntimeError as error:
    print("refused")
print(torch.cdist(torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda")).shape)
try:
    print(torch.cuda.get_device_properties(0).clock_rate)
except RuntimeError as error:
    print(error)
"""
    shown = on("T4", code)
    assert "refused\ntorch.Size([2, 2])\n" in shown and "does not have this: attribute 13" in shown
    ran = process(
        """
        import virtual_gpu; virtual_gpu.start("T4")
        import torch
        torch.ones(3, device="cuda")
        """,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    assert ran.returncode and "cuMemAddressReserve was called, which the virtual GPU does not have" in ran.stderr


def test_a_start_that_fails_leaves_the_process_as_it_was():
    """Where torch is a build for the CPU: this environment's own."""
    code = """
import os, virtual_gpu
for options in ({"context": "x"}, {"context": -1}, {"context": 2**50}, {"total": 1}, {}):
    try:
        virtual_gpu.start("T4", **options)
    except ValueError as error:
        print(error)
import torch
print(torch.ones(2).sum().item(), "VIRTUAL_GPU" in os.environ)
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *refused, build, last = ran.stdout.splitlines()
    assert len(refused) == 4 and all("context was " in line for line in refused)
    assert "this torch is a build for the CPU" in build and last == "2.0 False"


def test_a_process_that_asked_for_nothing_says_so(tmp_path):
    script = tmp_path / "idle.py"
    script.write_text("print('idle')")
    ran = subprocess.run([PYTHON, "-m", "virtual_gpu", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "This process asked for nothing. What it started" in ran.stdout


def test_without_gcc_nothing_is_changed(tmp_path):
    there = tmp_path / "environment"
    there.mkdir()
    (there / "kept").touch()
    command = [sys.executable, "-m", "virtual_gpu.environment", there]
    ran = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert ran.returncode == 2 and "gcc is not here: install gcc and binutils; nothing was changed" in ran.stderr
    assert (there / "kept").exists()


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    (tmp_path / "kept").touch()
    command = [sys.executable, "-m", "virtual_gpu.environment", tmp_path]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and "is there, and no environment: name a folder that is not" in ran.stderr
    assert (tmp_path / "kept").exists()

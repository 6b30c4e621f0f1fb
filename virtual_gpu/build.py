"""Compile what stands in place of NVIDIA's libraries: libraries/*.c, and an error for every other function wanted.

Needs gcc and binutils. What is wanted is read from torch's own libraries, and from bitsandbytes'. Compiled once for a
torch and a source, into the folder build beside this.
"""

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
KNOWN = (12, 13)  # CUDA's major versions whose structures are written here: of torch 2.10, and of 2.11 to 2.15
WRITTEN = {  # library, without its version → its own source and options
    "libcudart": ("cudart.c", []),
    "libcuda": ("driver.c", []),
    "libcublasLt": ("blas.c", []),
    "libcublas": ("blas.c", ["-DCUBLAS"]),
    "libcudnn": ("dnn.c", []),
    "libnvrtc": ("nvrtc.c", []),
    "libcupti": ("cupti.c", []),
}
ORDER = ("libcudart", "libcuda", "libcublasLt", "libcublas")  # in which they are loaded, before the others
# Where a symbol names no version, by its beginning: the longest that fits.
BY_PREFIX = {"nccl": "libnccl", "cuFile": "libcufile", "cusparseLt": "libcusparseLt", "cu": "libcuda",
             "nvshmem": "libnvshmem_host", "nvrtc": "libnvrtc", "cupti": "libcupti"}  # fmt: skip
WANTED = re.compile(r"(__)?cu[A-Za-z]|nccl[A-Z]|nvrtc[A-Z]|nvshmem")
TEXTS = re.compile(r"Get(Last)?(Error|Status)(String|Name)?$")  # what they give is read as text
STUBS = """int {answer}(const char *name);
const char *vgpu_text(void);
#define TEXT(name) const char *name(void) {{ return vgpu_text(); }}
#define UNKNOWN(name) long name(void) {{ return {answer}(#name); }}
{stubs}
"""
RUNTIME = "libcudart.so."


def users() -> list[Path]:
    """The libraries that look for NVIDIA's: torch's and, if it is there, bitsandbytes'. ValueError without CUDA."""
    torch = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    if not (torch / "libtorch_cuda.so").exists():
        raise ValueError(
            "this torch is a build for the CPU; accepted: the CUDA build, which `make virtual-gpu` installs"
        )
    found = sorted(torch.glob("*.so"))
    if spec := importlib.util.find_spec("bitsandbytes"):
        major = cuda_major(found)
        found += sorted(Path(spec.origin).parent.glob(f"libbitsandbytes_cuda{major}*.so"))
    return found


def _read(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _needed(user: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nvrtc|nvshmem)[^\]]+)\]", _read("readelf", "-d", user))


def cuda_major(libraries: list[Path]) -> int:
    """The CUDA that they were built for, such as 13. ValueError for one whose structures are not known here."""
    names = {name for library in libraries for name in _needed(library) if name.startswith(RUNTIME)}
    majors = {int(name.removeprefix(RUNTIME)) for name in names}
    if len(majors) != 1 or not majors <= set(KNOWN):
        raise ValueError(f"torch is built for CUDA {sorted(majors)}; accepted: {KNOWN}, whose structures are known")
    return majors.pop()


def wanted(libraries: list[Path]) -> dict[str, tuple[set[str], str]]:
    """File name of a library → the functions that its users do not define, and the version by which they ask."""
    symbols, files, versions = {}, {}, {}
    for user in libraries:
        files |= {name.partition(".so")[0]: name for name in _needed(user)}
        for name in re.findall(r"^\s+[Uw] (\S+)$", _read("nm", "-D", "--undefined-only", user), re.M):
            name, _, version = name.partition("@")
            if not WANTED.match(name):
                continue
            library = version.lstrip("@").partition(".so")[0] if version.lstrip("@").startswith("lib") else None
            fits = [prefix for prefix in BY_PREFIX if name.startswith(prefix)]
            library = library or BY_PREFIX[max(fits, key=len)]
            symbols.setdefault(library, set()).add(name)
            versions[library] = version.lstrip("@") or versions.get(library, "")
    files.setdefault("libcuda", "libcuda.so.1")
    return {file: (symbols.get(library, set()), versions.get(library, "")) for library, file in files.items()}


def build() -> list[Path]:
    """Paths of the libraries, in the order in which to load them."""
    libraries = users()
    stamp = hashlib.sha256(
        b"".join(s.read_bytes() for s in [*sorted((HERE / "libraries").glob("*.c")), Path(__file__)])
    )
    stamp.update("".join(f"{user}{user.stat().st_size}" for user in libraries).encode())
    folder = HERE / "build" / stamp.hexdigest()[:16]
    if not folder.exists():
        for tool in ("gcc", "readelf", "nm"):
            if not shutil.which(tool):
                raise FileNotFoundError(f"the virtual GPU needs {tool}: install gcc and binutils")
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            _build(Path(unfinished), libraries)
            try:
                Path(unfinished).rename(folder)
            except OSError:  # another process was first
                assert folder.exists()
            else:
                Path(unfinished).mkdir()  # which is to be removed
    paths = sorted(folder.glob("lib*.so*"))
    first = {f"{name}.so": number for number, name in enumerate(ORDER)}
    return sorted(paths, key=lambda path: first.get(path.name.partition(".so")[0] + ".so", len(first)))


def _build(folder: Path, libraries: list[Path]):
    major, runtime = cuda_major(libraries), None
    for file, (names, version) in sorted(wanted(libraries).items(), key=lambda item: not item[0].startswith(RUNTIME)):
        runtime = runtime or folder / file
        _compile(folder, file, names, version, runtime, ["gcc", "-O1", "-fPIC", "-w", f"-DCUDA={major}"])


def _compile(folder: Path, file: str, names: set[str], version: str, runtime: Path, gcc: list[str]):
    source, options = WRITTEN.get(file.partition(".so")[0], (None, []))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        run = functools.partial(subprocess.run, check=True, env={**os.environ, "TMPDIR": place})
        own, stubs, script = Path(place, "own.o"), Path(place, "stubs.c"), Path(place, "map")
        defined = set()
        if source:
            run([*gcc, *options, "-c", HERE / "libraries" / source, "-o", own])
            defined = set(re.findall(r" T (\S+)$", _read("nm", "--defined-only", own), re.M))
        lines = [f"{'TEXT' if TEXTS.search(name) else 'UNKNOWN'}({name})" for name in sorted(names - defined)]
        answer = "vgpu_unknown" if folder / file == runtime else "vgpu_refused"
        stubs.write_text(STUBS.format(stubs="\n".join(lines), answer=answer))
        script.write_text(f"{version or file} {{ global: *; }};\n")
        objects = [own] if source else []
        beside = [] if folder / file == runtime else [runtime]
        run(
            [*gcc, "-shared", *objects, stubs, *beside, f"-Wl,-soname,{file}", f"-Wl,--version-script,{script}",
             "-o", folder / file, "-ldl", "-lpthread"]
        )  # fmt: skip


if __name__ == "__main__":
    try:
        print(f"{len(build())} libraries stand in place of NVIDIA's")
    except (ValueError, OSError) as error:
        raise SystemExit(f"virtual_gpu: {error}") from None

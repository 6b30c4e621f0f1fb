"""Build dist/kit, the folder to attach where there is no network: python scripts/kit.py [PACKAGE …]

It holds the package as a wheel, which a lesson's setup cell finds and installs, and the course
itself (the lessons, what runs them, the tiny pretrained model), which record_on_your_gpu.ipynb
finds. Upload it as a Kaggle data set, or name it in COURSE_KIT on a machine of your own.
Packages that are named, such as transformers or "peft==0.21.2", are downloaded into its folder
wheels, for Linux on x86_64 and without what they depend on: that would be another torch.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINUX = [f"--platform=manylinux{glibc}_x86_64" for glibc in ("2014", "_2_17", "_2_24", "_2_28", "_2_34")]


def build(target: Path = ROOT / "dist" / "kit", packages: tuple[str, ...] = ()) -> Path:
    """Make the kit and return its folder. An earlier one is replaced only when the new one is whole."""
    with tempfile.TemporaryDirectory() as folder:
        # From a copy: a build in the tree would leave its own folders there, and pick up stale ones.
        source, kit = Path(folder, "source"), Path(folder, "kit")
        left_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / "tutorial_utils", source / "tutorial_utils", ignore=left_out)
        for name in ("pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / name, source / name)
        pip, quiet = [sys.executable, "-m", "pip"], ["--quiet", "--no-deps"]
        here = ["--no-build-isolation", "--no-index", "--wheel-dir", str(kit), str(source)]
        subprocess.run([*pip, "wheel", *quiet, *here], check=True)
        if packages:
            there = ["--only-binary=:all:", *LINUX, "--dest", str(kit / "wheels"), *packages]
            subprocess.run([*pip, "download", *quiet, *there], check=True)
        for part in ("notebooks", "scripts", "tutorial_utils"):
            shutil.copytree(ROOT / part, kit / "course" / part, ignore=left_out)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(kit, target)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", help="wheels to add, such as transformers")
    for file in sorted(build(packages=tuple(parser.parse_args().packages)).rglob("*")):
        if file.is_file():
            print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 2**20:.2f} MiB")

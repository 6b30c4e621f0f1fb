"""Build dist/kit, the folder to attach where there is no network: python scripts/kit.py [PACKAGE …]

It holds the package as a wheel, which a lesson's setup cell finds and installs; the course itself
(the lessons, what runs them, the tiny pretrained model), which record_on_your_gpu.ipynb finds; and in
its folder wheels what Kaggle and Colab lack, of which a lesson takes what it needs. Upload it as a
Kaggle data set, or name it in COURSE_KIT on a machine of your own. It needs pip and a network, no more.
Packages that are named, such as "peft==0.21.2", are added for Linux on x86_64 and the
platforms' Pythons, without what they depend on.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINUX = [f"--platform=manylinux{glibc}_x86_64" for glibc in ("2014", "_2_17", "_2_24", "_2_28", "_2_34")]


# What the platforms lack, and what that needs and they lack too. deepspeed is source only: its wheel is made here.
MADE, TAKEN = ("deepspeed",), ("bitsandbytes", "hjson==3.1.0", "ninja==1.13.2")


def pinned(package: str) -> str:
    """The package as requirements.txt pins it."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(f"{package}==")), package)


def build(target: Path = ROOT / "dist" / "kit", made: tuple[str, ...] = (), taken: tuple[str, ...] = ()) -> Path:
    """Make the kit and return its folder. An earlier one is replaced only when the new one is whole.

    made: packages whose wheels are made here; taken: those that are downloaded for Linux on x86_64.
    """
    with tempfile.TemporaryDirectory() as folder:
        # From a copy: a build in the tree would leave its own folders there, and pick up stale ones.
        source, kit = Path(folder, "source"), Path(folder, "kit")
        left_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / "tutorial_utils", source / "tutorial_utils", ignore=left_out)
        for name in ("pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / name, source / name)
        pip, quiet = [sys.executable, "-m", "pip"], ["--quiet", "--no-deps"]
        isolated = [] if not _has_setuptools() else ["--no-build-isolation", "--no-index"]
        subprocess.run([*pip, "wheel", *quiet, *isolated, "--wheel-dir", str(kit), str(source)], check=True)
        if made:
            # DeepSpeed's own setup would compile where it finds Windows.
            plain = {**os.environ, "DS_BUILD_OPS": "0"}
            subprocess.run([*pip, "wheel", *quiet, "--wheel-dir", str(kit / "wheels"), *made], check=True, env=plain)
        if taken:
            there = ["--only-binary=:all:", *LINUX, "--dest", str(kit / "wheels"), *taken]
            texts = [path.read_text(encoding="utf-8") for path in (ROOT / "platforms").glob("*.txt")]
            for version in sorted({re.search(r"^# python (\S+)$", text, re.M)[1] for text in texts}):
                subprocess.run([*pip, "download", *quiet, f"--python-version={version}", *there], check=True)
        for part in ("notebooks", "scripts", "tutorial_utils"):
            shutil.copytree(ROOT / part, kit / "course" / part, ignore=left_out)
        unfinished = target.with_name(f"{target.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(kit, unfinished)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.replace(target)
    return target


def whole(target: Path = ROOT / "dist" / "kit", more: tuple[str, ...] = ()) -> Path:
    """The kit with all that the platforms lack."""
    return build(target, tuple(map(pinned, MADE)), (*map(pinned, TAKEN), *more))


def _has_setuptools() -> bool:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


def main(given: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", help="wheels to add, such as transformers")
    packages = tuple(parser.parse_args(given).packages)
    try:
        made = whole(more=packages)
    except subprocess.CalledProcessError:
        named = ", ".join([*packages, "the kit's own"])
        parser.error(f"pip could not build or download the wheels ({named}): its reason is above")
    files = [file for file in sorted(made.rglob("*")) if file.is_file()]
    for file in files:
        if file.suffix == ".whl":
            print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 2**20:.1f} MiB")
    print(f"dist/kit: {len(files)} files, {sum(file.stat().st_size for file in files) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()

"""Build dist/kit, the folder to attach where there is no network: python scripts/kit.py

It holds the package as a wheel, which a lesson's setup cell finds and installs, and the course
itself (the lessons, what runs them, the tiny pretrained model), which record_on_your_gpu.ipynb
finds. Upload it as a Kaggle data set, or name it in COURSE_KIT on a machine of your own.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build(target: Path = ROOT / "dist" / "kit") -> Path:
    """Make the kit and return its folder. An earlier one is replaced only when the new one is whole."""
    with tempfile.TemporaryDirectory() as folder:
        # From a copy: a build in the tree would leave its own folders there, and pick up stale ones.
        source, kit = Path(folder, "source"), Path(folder, "kit")
        left_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        shutil.copytree(ROOT / "tutorial_utils", source / "tutorial_utils", ignore=left_out)
        for name in ("pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / name, source / name)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                "--no-index",
                "--wheel-dir",
                str(kit),
                str(source),
            ],
            check=True,
        )
        for part in ("notebooks", "scripts", "tutorial_utils"):
            shutil.copytree(ROOT / part, kit / "course" / part, ignore=left_out)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(kit, target)
    return target


if __name__ == "__main__":
    for file in sorted(build().rglob("*")):
        if file.is_file():
            print(f"{file.relative_to(ROOT)}  {file.stat().st_size / 2**20:.2f} MiB")

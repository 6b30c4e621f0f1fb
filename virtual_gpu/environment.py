"""An environment with the CUDA build of torch beside the first one: python -m virtual_gpu.environment FOLDER

It has everything of the environment that runs this, but torch: of that the same version, as built for CUDA, without
NVIDIA's packages, which a virtual GPU does not need. 530 MB of downloads, 1.1 GB of disk.
"""

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


def make(folder: Path):
    """subprocess.CalledProcessError where pip cannot have it; then nothing is left. OSError without gcc, or where the
    folder is there and no environment."""
    if missing := [tool for tool in ("gcc", "readelf") if shutil.which(tool) is None]:
        raise FileNotFoundError(f"{missing[0]} is not here: install gcc and binutils; nothing was changed")
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        raise FileExistsError(f"{folder} is there, and no environment: name a folder that is not; nothing was changed")
    version = importlib.metadata.version("torch").partition("+")[0]
    shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        python = folder / "bin" / "python"
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        # ===: the release itself, though a file of the build for CPUs, "+cpu", lies nearer.
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.run([*pip, f"torch==={version}"], check=True)
        root = Path(__file__).parents[1]
        lines = [sysconfig.get_path("purelib"), str(root), "import virtual_gpu; virtual_gpu.inherit()"]
        Path(packages, "zz_the_rest.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
        subprocess.run([python, "-m", "virtual_gpu.build"], check=True, cwd=root)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    try:
        make(parser.parse_args().folder)
    except OSError as error:
        parser.error(str(error))
    except subprocess.CalledProcessError:
        parser.error("the environment could not be made: the reason is above")

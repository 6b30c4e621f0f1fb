# Setup: the same cell in every lesson. It adds what is missing, and replaces nothing that the platform has.
REPOSITORY = ""  # where the course comes from when no kit is attached
import importlib.util
import os
import pathlib
import site
import subprocess
import sys

# True: may install what is missing from the network. Kaggle and Colab start empty, so there it is on.
NETWORK = "KAGGLE_KERNEL_RUN_TYPE" in os.environ or "COLAB_RELEASE_TAG" in os.environ
if importlib.util.find_spec("tutorial_utils") is None:
    here = pathlib.Path.cwd()
    nearby = [place for place in (here, *here.parents) if (place / "tutorial_utils").is_dir()]
    kit = pathlib.Path(os.environ.get("COURSE_KIT", "/kaggle/input"))  # an attached data set
    depths = ("", "*/", "*/*/", "*/*/*/")  # not deeper: a competition's data may be a million files
    wheels = [path for at in (here, kit) for depth in depths for path in at.glob(f"{depth}tutorial_utils-*.whl")]
    if nearby:
        sys.path.insert(0, str(nearby[0]))
    elif wheels or (NETWORK and REPOSITORY):
        source = str(wheels[-1]) if wheels else f"git+{REPOSITORY}"
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", source])
        if site.ENABLE_USER_SITE:  # pip installs there if the environment is read-only
            sys.path.append(site.getusersitepackages())
        how = "could not be installed (pip says why) from" if done.returncode else "installed from"
        print("tutorial_utils:", how, "the kit" if wheels else REPOSITORY)
    if importlib.util.find_spec("tutorial_utils") is None:
        raise ModuleNotFoundError("tutorial_utils: attach the kit (scripts/kit.py makes it) or put it beside this file")

from tutorial_utils import machine

here = machine.start(NETWORK)
preset = machine.preset(here)
print(preset)

"""Run a training script, unchanged, on a virtual GPU: python -m virtual_gpu --card T4 script.py [arguments]

or -m and the name of a module, as Python has it. What the script starts in processes of their own is on that card too.

Prints at its end what nvidia-smi and torch.cuda.memory_stats() would have shown at its peak.
"""

import argparse
import os
import re
import runpy
import sys
from pathlib import Path

import virtual_gpu


def main():
    parser = argparse.ArgumentParser(prog="python -m virtual_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--card", default="T4", help="of tutorial_utils/facts/gpus.toml, or a word of one")
    parser.add_argument("--values", default="small", choices=virtual_gpu.VALUES, help="what is computed, on the CPU")
    parser.add_argument("--fact", action="append", default=[], metavar="NAME=NUMBER", help="in place of the card's own")
    parser.add_argument("--beside-a-driver", action="store_true", help="though a GPU's driver is here")
    parser.add_argument("-m", action="store_true", dest="is_module", help="the script is the name of a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    try:
        wrong = [fact for fact in given.fact if not re.fullmatch(r"[a-z_]+=\d+", fact)]
        if wrong:
            raise ValueError(
                f"--fact was {wrong[0]!r}; accepted: a name and a whole number, such as multiprocessors=40"
            )
        facts = {name: int(number) for name, number in (fact.split("=") for fact in given.fact)}
        if not given.is_module and not Path(given.script).exists():
            raise FileNotFoundError(f"no file at {given.script!r}: give the path of a Python script")
        virtual_gpu.start(given.card, given.values, beside_a_driver=given.beside_a_driver, **facts)
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))
    sys.argv = [given.script, *given.arguments]
    sys.path[0] = os.getcwd() if given.is_module else str(Path(given.script).resolve().parent)
    try:
        if given.is_module:
            runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(given.script, run_name="__main__")
    finally:
        print(virtual_gpu.report())


if __name__ == "__main__":
    main()

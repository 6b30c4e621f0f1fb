"""Which recipe trains this model on this card? python scripts/plan.py --model deberta-v3-large --card T4 --length 1024

--script train.py writes the first recipe that fits, or the one that --recipe names, as one self-contained script.
"""

import argparse
import ast
import gc
import json
import logging
import multiprocessing
import os
import sys
import textwrap
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # or bitsandbytes imports torch's compiler: 0.7 s
    gc.disable()  # a fifth of the time, of imports and predictions: what is predicted is small, the command short
from tutorial_utils import bounds, machine, models, planner, predict  # noqa: E402
from tutorial_utils.figures import size  # noqa: E402

TEMPLATE = ROOT / "scripts" / "train.template"
OF_THE_SCRIPT = """The script reads train.csv and test.csv: the columns text and label (a class) of an encoder's, prompt
and completion of a decoder's; CFG in it names others. TRAIN, TEST, WORK, OUTPUT, MODEL, FOLDS, EPOCHS and LR in its
environment change its settings, of a decoder's also TRAINED, the number of folds that are trained: a small file needs
more epochs, or a higher rate. To try a recipe on a CPU, without its model's weights: --model tiny, or tiny-decoder."""
RATES = {True: 2e-5, False: 2e-4}  # of all parameters, and of adapters


def one_of_them(card: str) -> str:
    """Kaggle offers a "T4 x2"; a process of a script uses one."""
    return card.strip().removesuffix("x2").strip()


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=OF_THE_SCRIPT)
    options.add_argument("--model", required=True, type=models.named,
                         help=f"one of {', '.join(models.names())}, or what the hub calls one of these")  # fmt: skip
    options.add_argument("--card", required=True, type=one_of_them,
                         help='a GPU of tutorial_utils/facts/gpus.toml, a word of one, or a size: "8 GiB", as for '
                              'the smaller of two of one name (an RTX 4060 Ti is here that of 16 GiB)')  # fmt: skip
    options.add_argument("--length", required=True, type=int, help="tokens of the longest text")
    options.add_argument("--effective-batch", type=int, default=32,
                         help="texts of one optimizer step, 32 by default: micro-batches divide it")  # fmt: skip
    options.add_argument("--all-parameters", action="store_true", help="all are trained: no adapters")
    options.add_argument("--exact", action="store_true", help="the plain loop's step: fp32, AdamW")
    options.add_argument("--no-new-dependency", action="store_true", help="neither bitsandbytes nor peft")
    options.add_argument("--recipe", help="the recipe of --script, by its name in the table; else the first that fits")
    options.add_argument("--script", type=Path, metavar="train.py", help="write the recipe as a script")
    options.add_argument("--json", action="store_true")
    return options


def copied(lesson: str, only: str | None = None) -> tuple[list[str], str]:
    """(the imports of a lesson's copied cell, the rest of it, or one of its functions)"""
    (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    source = next("".join(cell["source"]) for cell in cells if "copy" in cell["metadata"].get("tags", []))
    statements, lines = ast.parse(source).body, source.splitlines()
    imports = [statement for statement in statements if isinstance(statement, (ast.Import, ast.ImportFrom))]
    rest = [node for node in statements if node not in imports and only in (None, getattr(node, "name", None))]
    starts = [min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]) for node in rest]
    texts = ["\n".join(lines[start - 1 : node.end_lineno]) for start, node in zip(starts, rest)]
    used = {name.id for node in rest for name in ast.walk(node) if isinstance(name, ast.Name)}
    for statement in imports:
        statement.names = [one for one in statement.names if (one.asname or one.name.partition(".")[0]) in used]
    return [ast.unparse(statement) for statement in imports if statement.names], "\n\n\n".join(texts)


def script(option: planner.Option, *, model: str, card: str, length: int, effective_batch: int) -> str:
    """The recipe with its micro-batch as a training script, made of the lessons' copied cells."""
    recipe, choices = option.recipe, option.recipe.choices
    optimizer = choices.get("optimizer", "adamw")
    has = {"fp32" if choices.get("precision", "fp32") == "fp32" else "half", optimizer}
    has |= {"checkpointing"} if choices.get("checkpointing") else set()
    has |= set() if recipe.whole else {"lora"}
    has |= {"decoder" if recipe.decoder else "encoder"} | ({"4bit"} if recipe.adapters == "4 bits" else set())
    has |= {models.config(model).model_type}

    def holds(condition):
        return not condition or (condition[1:] not in has if condition[0] == "!" else condition in has)

    imports, cells, kept, blocks = set(), [], [], []  # blocks: conditions, one in the other
    for line in TEMPLATE.read_text(encoding="utf-8").splitlines():
        text, _, condition = line.partition("  #? ")
        if line.startswith("#{ "):
            blocks.append(line.removeprefix("#{ "))
        elif line == "#}":
            blocks.pop()
        elif not set(blocks) <= has:
            continue
        elif line.startswith("#= "):
            lesson, *only = text.removeprefix("#= ").split()
            if holds(condition):
                more, cell = copied(lesson, *only)
                imports |= set(more)
                cells.append(f"# Lesson {lesson}\n{cell}")
        elif holds(condition):
            kept.append(text)
    fields = {
        "model": model, "card": machine.gpu(card).name, "recipe": recipe.name, "length": length,
        "hub": models.hub(model), "card_bytes": size(option.prediction.card_bytes), "lr": RATES[recipe.whole],
        "micro_batch": option.micro_batch, "steps": effective_batch // option.micro_batch,
    }  # fmt: skip
    if has >= {"lora", "encoder"}:
        fields["targets"] = predict.lora_targets(models.config(model).model_type)
    return _assembled("\n".join(kept), sorted(imports), cells, fields)


def _assembled(template: str, imports: list[str], cells: list[str], fields: dict) -> str:
    for name, value in fields.items():
        template = template.replace("{" + name + "}", str(value))
    head, body = template.split("\n\n\n", 1)
    docstring, own = head.split('"""\n\n', 1)
    lines = set(own.splitlines()) | set(imports)
    return f'{docstring}"""\n\n{_sorted(lines)}\n\n\n' + "\n\n\n".join([*cells, body]) + "\n"


def _sorted(imports: set[str]) -> str:
    """The standard library, then installed packages; what comes from one module in as many lines as it takes."""
    plain, named = set(), {}
    for statement in ast.parse("\n".join(imports)).body:
        if isinstance(statement, ast.Import):
            plain.add(ast.unparse(statement))
        else:
            named.setdefault(statement.module, set()).update(alias.name for alias in statement.names)
    groups = ([], [])
    for line in sorted(plain):
        groups[line.split()[1].partition(".")[0] not in sys.stdlib_module_names].append(line)
    for module, found in sorted(named.items()):
        lines = textwrap.wrap(", ".join(sorted(found)), 119 - len(f"from {module} import "))
        of_python = module.partition(".")[0] in sys.stdlib_module_names
        groups[not of_python].extend(f"from {module} import {line.rstrip(',')}" for line in lines)
    return "\n\n".join("\n".join(group) for group in groups if group)


def row(option: planner.Option, effective_batch: int) -> dict:
    """Of the table and of --json: bytes."""
    report = option.prediction
    return {
        "recipe": option.recipe.name,
        "fits": not option.why,
        "why": option.why,
        "micro_batch": option.micro_batch,
        "steps": option.micro_batch and effective_batch // option.micro_batch,
        "operations": round(option.recipe.operations, 2),
        "lessons": list(option.recipe.lessons),
        "card_bytes": report and report.card_bytes,
        "parts": report and report.parts,
    }


def notes(given, gpu: machine.Gpu, fitting: list[planner.Option], chosen: planner.Option | None) -> list[str]:
    """What a plan does not say of its card, its step and the chosen recipe; a line each."""
    said, step = planner.of_card(gpu), given.effective_batch
    if chosen and chosen.micro_batch == 1 and step > 3 and all(step % n for n in range(2, step)):
        said.append(f"{step} texts divide into single ones alone: ask for {step - 1} or {step + 1}, and more may fit.")
    whole = next((option for option in fitting if option.recipe.whole), None)
    if whole and not chosen.recipe.whole:
        said.append(
            f"Adapters train another model (lesson 22); --all-parameters: {whole.recipe.name!r} and what follows."
        )
    fuller = next((option for option in fitting if option.micro_batch > 2), None)
    if fuller and chosen.micro_batch <= 2 < given.effective_batch:
        said.append(f"One or two texts keep few cards busy: {fuller.recipe.name!r} may be faster (lessons 09 and 22).")
    return said


def other_card(options: list[planner.Option], asked: dict) -> dict:
    """Of --json, where no recipe fits: a sentence, the smallest card that would do, and with which recipe."""
    found = planner.smallest(options, **asked)
    gpu, recipe = found or (None, None)
    return {"said": planner.instead(options, found), "card": gpu and gpu.name, "recipe": recipe and recipe.name}


def in_processes(function, groups):
    """A `map`. The processes begin with what has been imported until then; an interrupt ends them at once."""
    if "fork" not in multiprocessing.get_all_start_methods():  # on Windows
        yield from map(function, groups)
        return
    with multiprocessing.get_context("fork").Pool() as pool:
        done = pool.imap(function, groups)
        yield from tqdm(done, "kinds of recipes", len(groups), leave=False, disable=None)  # to a terminal only


def main(arguments: list[str] | None = None):
    given = parser().parse_args(arguments)
    logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)  # of a 4-bit kernel that no recipe uses here
    asked = dict(model=given.model, card=given.card, length=given.length, effective_batch=given.effective_batch)
    if given.recipe and not given.script:
        parser().error(f"recipe was {given.recipe!r}, which is of a script; accepted: with --script train.py")
    limits = dict(whole=given.all_parameters, exact=given.exact, no_new_dependency=given.no_new_dependency)
    try:
        options = planner.plan(**asked, **limits, each=in_processes)
        fitting = [option for option in options if not option.why]
        chosen = [option for option in fitting if given.recipe in (None, option.recipe.name)]
        if given.script and not fitting:
            said = planner.instead(options, planner.smallest(options, **asked))
            raise ValueError(f"no script: no recipe fits. {said}")
        if given.script and not chosen:
            why = "".join(f": {option.why}" for option in options if option.recipe.name == given.recipe)
            accepted = "; ".join(option.recipe.name for option in fitting)
            raise ValueError(f"recipe was {given.recipe!r}{why}; accepted: {accepted}")
        if given.script:
            made = script(chosen[0], **asked)
            if given.script.exists() and given.script.read_text(encoding="utf-8") != made:
                raise FileExistsError(f"{given.script} is there, and another: name another file, or remove it")
            bounds.write_text(given.script, made)
    except (ValueError, ImportError, OSError) as error:
        parser().error(str(error))
    gpu = machine.gpu(given.card)
    if given.json:
        answer = {"recipes": [row(option, given.effective_batch) for option in options],
                  "notes": notes(given, gpu, fitting, chosen[0] if chosen else None),
                  "instead": None if fitting else other_card(options, asked),
                  "written": chosen[0].recipe.name if given.script else None}  # fmt: skip
        print(json.dumps(answer, indent=2))
        return
    print(f"{given.model}, texts of {given.length} tokens, {given.effective_batch} a step, on {gpu.name}, which gives")
    print(f"{size(gpu.usable)}. Texts: at a time. Card: what they need of it, at most. Weights to rest: tensors, at")
    print("their peak. Operations: beside the plain step's; in half precision they are faster.\n")
    print(planner.table(options))
    for note in notes(given, gpu, fitting, chosen[0] if chosen else None):
        print(note)
    if not fitting:
        print(planner.instead(options, planner.smallest(options, **asked)))
    if given.script:
        print(f"wrote {given.script}: {chosen[0].recipe.name}")


if __name__ == "__main__":
    main()
    gc.freeze()  # nor is half a second spent on a last look at what was imported

"""scripts/predict.py from the shell."""

import json
import re
import subprocess
import sys

import predict as predict_command
import pytest
import torch
import truth

from notebooks import ROOT
from tutorial_utils import models


def run(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "predict.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_json_has_its_keys_and_every_option_is_taken():
    done = run("--model", "google-bert/bert-large-uncased", "--batch", 32, "--length", 128, "--optimizer", "adamw8bit",
               "--precision", "fp16", "--checkpointing", "--attention", "eager", "--padded", "--accumulate", 2,
               "--freeze-layers", 12, "--lora", 8, "--card", "6 GiB", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert list(answer) == ["peak_bytes", "card_bytes", "parts", "fits", "seconds"]
    assert answer["fits"] is True and answer["peak_bytes"] == sum(answer["parts"].values()) < answer["card_bytes"]


def test_the_tables():
    done = run("--model", "bert-base-uncased", "--batch", 8, "--length", 128, "--card", "T4")
    for words in ("optimizer state", "bert.encoder.layer.*.intermediate.dense", "CUDA context", "GiB, fits T4"):
        assert words in done.stdout, done.stdout + done.stderr


def test_on_a_cpu_it_is_what_a_cpu_run_does():
    """A sequence classifier, two steps, torch's default AdamW, the loss by the model's head."""
    done = run("--model", "tiny", "--batch", 8, "--length", 64, "--padded", "--device", "cpu", "--json")
    answer = json.loads(done.stdout)
    model, batch = models.build("tiny"), truth.inputs(8, 64, padded=True)
    optimizer = torch.optim.AdamW(model.parameters())
    real = truth.profiled_peak(lambda: truth.train(model, optimizer, batch), model, batch)
    assert abs(answer["peak_bytes"] / real - 1) <= 0.02 and answer["card_bytes"] is None and answer["fits"] is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--model", "bert-huge"), "predict.py: model was 'bert-huge'; accepted: tiny"),
        (("--batch", 0), "predict.py: batch was 0; accepted: a whole number"),
        (("--card", "T5000"), "predict.py: card was 'T5000'; accepted: Tesla T4"),
        (("--model", "deberta-v3-base", "--attention", "sdpa"), "attention of deberta-v2 was 'sdpa'"),
    ],
)
def test_refusals_are_one_line(changed, message):
    arguments = ("--model", "bert-base-uncased", "--batch", 8, "--length", 128, *changed)
    with pytest.raises(SystemExit, match=re.escape(message)):
        predict_command.main([*map(str, arguments)])


def test_a_refusal_has_an_exit_code_and_no_traceback():
    done = run("--model", "bert-base-uncased", "--batch", 8, "--length", 128, "--device", "cpu", "--card", "T4")
    assert done.returncode == 1 and done.stderr == "predict.py: card is of a GPU; accepted: without --device cpu\n"


def test_of_a_decoder_it_says_that_it_is_a_classifier(capsys):
    predict_command.main(["--model", "tiny-decoder", "--batch", "2", "--length", "16"])
    assert "a language model has a vocabulary's logits besides" in capsys.readouterr().err

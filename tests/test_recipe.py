"""The recipe: one competition script with the techniques that go together."""

import numpy as np
import pytest
import recipe
import torch
import transformers

from tutorial_utils import data


@pytest.fixture
def script(stranger_files, monkeypatch):
    """The recipe's functions, on a CPU, for a small model without dropout."""
    monkeypatch.setenv("DATA", str(stranger_files / "scores"))
    monkeypatch.setenv("MODEL", str(stranger_files / "bert"))
    made = recipe.recipe({})
    made["CFG"].device, made["CFG"].half = "cpu", None
    made["CFG"].max_length, made["CFG"].encoder_lr, made["CFG"].head_lr = 64, 2e-4, 1e-3
    return made


def texts(script, count=None):
    frame = script["pd"].read_csv(f"{script['CFG'].data}/train.csv").iloc[:count]
    tokenizer = script["AutoTokenizer"].from_pretrained(script["CFG"].model)
    return script["Texts"](frame, tokenizer), script["collator"](tokenizer)


def test_it_is_one_short_file_and_each_edit_is_of_it():
    assert len(recipe.SCRIPT.read_text().splitlines()) <= 150
    for name, (_, edits) in recipe.WITHOUT.items():
        assert recipe.recipe(edits)["Model"], name


def test_what_is_counted_is_the_scripts_model(monkeypatch):
    monkeypatch.setattr(recipe, "MODEL", "tiny")
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", None)  # put back after it
    model = recipe.model_of(recipe.recipe({}))
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"backbone", "head"} and not model.backbone.embeddings.word_embeddings.weight.requires_grad


def test_it_learns_and_predicts_rows_without_targets_in_their_order(script, capsys):
    here = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", None)
    script["CFG"].device, script["CFG"].half = here
    submission = script["main"]()
    test = script["pd"].read_csv(f"{script['CFG'].data}/test.csv", dtype={"id": str})
    assert submission["id"].equals(test["id"]) and submission.notna().all(axis=None)
    errors = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "MCRMSE" in line]
    epochs, folds = script["CFG"].epochs, script["CFG"].folds
    assert len(errors) == epochs * folds and all(
        errors[i + epochs - 1] < errors[i] for i in range(0, len(errors), epochs)
    )


def test_a_blank_text_is_one_and_ids_keep_their_zeros(script, tmp_path):
    """A hidden test has what the training rows had not: it is read when hours of training are over."""
    ids = [f"{number:04d}" for number in range(24)]
    for name in ("train", "test"):
        frame = script["pd"].read_csv(f"{script['CFG'].data}/{name}.csv").head(24).assign(id=ids)
        frame.loc[3, "text"] = ""
        frame.loc[5, "text"] = "NA"
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    script["CFG"].data, script["CFG"].epochs, script["CFG"].folds = tmp_path, 1, 2
    submission = script["main"]()
    assert submission["id"].tolist() == ids and submission.notna().all(axis=None)


def test_a_checkpoint_in_half_precision_is_trained_in_fp32(script, tmp_path):
    """As DeBERTa-v3's are: from_pretrained keeps the type of the file, and a scaler refuses such weights."""
    script["AutoModel"].from_pretrained(script["CFG"].model).half().save_pretrained(tmp_path)
    assert script["AutoModel"].from_pretrained(tmp_path).dtype == torch.float16, "transformers converts by itself now"
    script["CFG"].model = tmp_path
    assert {parameter.dtype for parameter in script["Model"]().parameters()} == {torch.float32}


def test_predictions_are_those_of_each_text_alone(script):
    rows, collate = texts(script, 40)
    torch.manual_seed(0)
    model = script["Model"]()
    together = script["predict"](model, rows, collate)
    with torch.no_grad():
        alone = torch.cat([model(collate([rows[i]])[0]) for i in range(len(rows))]).numpy()
    assert np.abs(together - alone).max() < 1e-5


def test_an_epoch_moves_the_weights_as_large_batches_do(script):
    """SGD at a rate of 1 over 32 texts, in four micro-batches: the gradient of the mean loss over all of them."""
    rows, collate = texts(script, 30)  # the last micro-batch is short
    torch.manual_seed(0)
    model = script["Model"]().double()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    inputs, targets = collate([rows[i] for i in range(len(rows))])
    model.train()
    torch.nn.functional.smooth_l1_loss(model(inputs), targets.double()).backward()
    expected = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    model.zero_grad()
    script["CFG"].max_norm = float("inf")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler(enabled=False)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    script["train_epoch"](model, rows, collate, torch.nn.SmoothL1Loss(), optimizer, scheduler, scaler)
    moved = before - torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert (moved - expected).norm() < 1e-5 * expected.norm()
    assert all(parameter.grad is None for parameter in model.backbone.embeddings.parameters())


def test_the_schedule_waits_where_the_scaler_skipped_a_step(script):
    rows, collate = texts(script, 64)  # two steps
    torch.manual_seed(0)
    model = script["Model"]()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)  # once too large

    def large(outputs, targets):
        return 1000 * torch.nn.functional.smooth_l1_loss(outputs, targets)

    script["train_epoch"](model, rows, collate, large, optimizer, scheduler, scaler)
    assert scheduler.last_epoch == 1 and scaler.get_scale() == 2.0**7
    assert not before.equal(torch.nn.utils.parameters_to_vector(model.parameters()))


def test_batches_of_like_lengths_have_each_text_once_and_little_padding(script):
    lengths = np.array([len(text.split()) for text in data.load().train["text"][:2000]])
    torch.manual_seed(0)
    first, second = (script["pooled_batches"](lengths, 8) for _ in range(2))
    assert sorted(sum(first, [])) == list(range(2000)) and first != second
    padded = sum(len(rows) * lengths[rows].max() for rows in first)
    at_random = sum(8 * lengths[i : i + 8].max() for i in range(0, 2000, 8))
    assert padded < 0.6 * at_random


def test_a_row_without_a_target_is_left_out(script, tmp_path):
    """One NaN makes the gradients of its step NaN, and the scaler skips it: nothing would be learned."""
    for name in ("train", "test"):
        frame = script["pd"].read_csv(f"{script['CFG'].data}/{name}.csv").head(24)
        if name == "train":
            frame = frame.astype(object)
            frame.loc[3, script["CFG"].targets[0]], frame.loc[4, script["CFG"].targets[1]] = float("nan"), "NaN"
        frame.loc[[0, 1], "text"] = "None", ""  # a word, and no text
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    script["CFG"].data, script["CFG"].epochs, script["CFG"].folds = tmp_path, 1, 2
    found = script["main"]()
    assert found.notna().all(axis=None) and len(found) == 24
    assert not np.allclose(found.iloc[0, 1:].tolist(), found.iloc[1, 1:].tolist()), "the word None is no empty text"

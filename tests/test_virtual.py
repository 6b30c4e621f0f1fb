"""What is counted on virtual cards, here with a CPU in such a card's place, and the table of what was recorded."""

import dataclasses

import torch

from tutorial_utils import bounds, machine, measure, models, virtual

TEXT = {"input_ids": torch.ones(4, 32, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}
HERE = dataclasses.replace(machine.facts(), device="cpu", virtual="small")


def build():
    return models.build("tiny")


def adamw(model):
    return torch.optim.AdamW(model.parameters())


def test_a_peak_is_that_of_the_step_in_steady_state():
    model = build()
    optimizer = adamw(model)

    def step():
        torch.nn.functional.cross_entropy(model(TEXT["input_ids"]).logits, TEXT["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    expected = measure.memory(step, model, optimizer, TEXT).peak
    assert virtual.peak(HERE, build, TEXT, adamw) == expected
    assert virtual.peak(dataclasses.replace(HERE, virtual=None), build, TEXT, adamw) is None


def test_what_was_before_makes_room():
    model = build()
    optimizer = adamw(model)
    model(TEXT["input_ids"]).logits.sum().backward()
    optimizer.step()
    virtual.peak(HERE, build, TEXT, adamw, gone=(model, optimizer))
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert states and not any(tensor.numel() for tensor in (*model.parameters(), *states))


def test_a_table_has_the_prediction_and_every_card_that_counted():
    figure = "llama_3_2_3b_whole_bytes"
    (row,) = virtual.table("24_decoders", {figure: 3 * 2**30}).rows
    cards = {content["machine"]["name"] for content in bounds.recordings("real-size")}
    assert row[""] == "llama 3 2 3b whole" and row["predicted"] == "3.00 GiB" and cards <= row.keys()


def test_what_does_not_fit_is_not_counted():
    def too_large():
        raise torch.OutOfMemoryError

    assert virtual.peak(HERE, too_large, TEXT, adamw) is None

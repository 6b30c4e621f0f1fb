import gc
import weakref

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails
from tutorial_utils import models, predict

bitsandbytes = pytest.importorskip("bitsandbytes")
LESSON = lesson("04")
COPIED = copied(LESSON)
adamw_8bit, train_epoch = COPIED["adamw_8bit"], COPIED["train_epoch"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"optim_bits": 32}', '{"optim_bits": 8}'),
        ("8 * -(-size // 256)", "4 * -(-size // 256)"),
        ("make_map=dynamic_map", "make_map=linear_map"),
        ("codes[numbers.long()] * absmax", "codes[numbers.long()] * absmax * 1.05"),
        ("(codes[1:] + codes[:-1]) / 2", "codes[1:]"),
    ],
    ids=["a lost override", "a lost absmax", "the linear map", "a wrong scale", "rounding down"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def bits(optimizer, module):
    return 8 * optimizer.state[module.weight]["state1"].element_size()


def step(model, optimizer, batches=1):
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    train_epoch(model, optimizer, scheduler, DataLoader(Ratings(8 * batches), batch_size=8))


def test_copied():
    """A regression: the embeddings at 32 bit, the matrices at 8, the losses AdamW's, a quarter of the rest's state."""
    losses = {}
    for build in (lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr), adamw_8bit):
        model, own = regressor(width=128).eval(), losses.setdefault("8" if build is adamw_8bit else "fp32", [])
        model.register_forward_hook(lambda _, inputs, output, own=own: own.append(output.loss.item()))
        optimizer = build(model, 1e-3)
        step(model, optimizer, batches=6)
    assert losses["8"][5] < losses["8"][0]
    assert max(abs(a - b) for a, b in zip(losses["8"], losses["fp32"], strict=True)) < 1e-3
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            assert bits(optimizer, module) == 32
        elif isinstance(module, torch.nn.Linear) and module.weight.numel() >= 4096:
            assert bits(optimizer, module) == 8
    sizes = [sum(t.nbytes for k, t in s.items() if k in ("state1", "state2", "absmax1", "absmax2"))
             for p, s in optimizer.state.items() if s["state1"].dtype == torch.uint8]  # fmt: skip
    quantised = sum(p.numel() for p, s in optimizer.state.items() if s["state1"].dtype == torch.uint8)
    assert sum(sizes) < 0.26 * 8 * quantised


def test_overrides_stay_with_their_model():
    """Two models built before either steps; a third that has no embedding; the library's own manager is left alone."""
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    first, second = regressor(width=128), regressor(width=128)
    optimizers = adamw_8bit(first, 1e-3), adamw_8bit(second, 1e-3)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        step(model, optimizer)
        assert bits(optimizer, model.distilbert.embeddings.word_embeddings) == 32
    bare = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = adamw_8bit(bare, 1e-3)
    bare(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert [bits(optimizer, layer) for layer in bare] == [8, 8]
    assert not manager.module_weight_config_triple and not manager.index2config and not manager.pid2config


def test_foreign_overrides_do_not_reach_it():
    """What other code left in the library's manager, even a broken entry."""
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.index2config[(0, 0)] = {"optim_bits": 32}
    manager.register_module_override(None, "weight", {"optim_bits": 32})
    try:
        bare = torch.nn.Sequential(torch.nn.Linear(64, 64))
        optimizer = adamw_8bit(bare, 1e-3)
        bare(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        assert bits(optimizer, bare[0]) == 8
    finally:
        manager.initialize()


def test_a_tied_and_a_frozen_embedding():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_embd=64, n_layer=1, n_head=2, n_positions=64))
    model.transformer.wpe.weight.requires_grad = False
    optimizer = adamw_8bit(model, 1e-3)
    ids = torch.arange(32).view(2, 16)
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    optimizer.step()
    assert model.lm_head.weight is model.transformer.wte.weight and bits(optimizer, model.lm_head) == 32
    assert model.transformer.wpe.weight not in optimizer.state


def test_the_model_is_freed():
    model = regressor(width=128)
    optimizer = adamw_8bit(model, 1e-3)
    step(model, optimizer)
    words = weakref.ref(model.distilbert.embeddings.word_embeddings)
    del model, optimizer
    gc.collect()
    assert words() is None


def test_the_state_is_restored_from_a_checkpoint():
    """Six steps in a row, or three, saved, loaded into a new optimizer, and three: the same weights."""
    torch.manual_seed(0)
    data = DataLoader(Ratings(48), batch_size=8)
    batches = list(data)

    def go(model, optimizer, part):
        train_epoch(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), part)

    whole, parted = regressor(width=128).eval(), regressor(width=128).eval()
    go(whole, adamw_8bit(whole, 1e-3), batches)
    before = adamw_8bit(parted, 1e-3)
    go(parted, before, batches[:3])
    after = adamw_8bit(parted, 1e-3)
    after.load_state_dict(before.state_dict())
    go(parted, after, batches[3:])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parted.parameters(), strict=True))


def test_the_prediction_takes_the_copied_function():
    shape = models.config("deberta-v3-base", 2, num_hidden_layers=2)
    words = 128100 * 768
    peaks = {
        name: predict.step_memory(shape, 1, 16, optimizer=optimizer).peak
        for name, optimizer in (("all", "adamw8bit"), ("copied", lambda model: adamw_8bit(model, 1e-3)))
    }
    relative = 512 * 768  # rel_embeddings
    kept = words + relative
    assert peaks["copied"] - peaks["all"] == pytest.approx(8 * kept - 2 * kept - 8 * kept / 256, rel=0.001)

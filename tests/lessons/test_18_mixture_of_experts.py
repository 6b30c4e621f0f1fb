import copy
from functools import partial

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails, run
from tutorial_utils import measure

LESSON = lesson("18")
COPIED = copied(LESSON)
EXPERTS, BALANCE = COPIED["MixtureOfExperts"], COPIED["balance_loss"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" if self.top_k > 1 else weights", " if False else weights"),
        ("scores.topk(self.top_k)", "(-scores).topk(self.top_k)"),
        ("* weights[token, place, None]", "* weights[token, place, None].detach()"),
        ("torch.where(chosen == number)", "torch.where(chosen == (number + 1) % len(self.experts))"),
        ("output.index_add(0, token,", "output.index_copy(0, token,"),
        ("scores.mean(0)).sum()", "scores.mean(0).detach()).sum()"),
        ("balance = len(self.experts) *", "balance = 0 *"),
    ],
    ids=[
        "weights not normalised",
        "the worst expert",
        "a lost gradient",
        "another expert",
        "only one of two is added",
        "no gradient of the balance",
        "no balance",
    ],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def with_experts(count, top_k=1, layers=2, experts=EXPERTS):
    """A stranger's regressor whose feed-forward parts are routed."""
    model = regressor(layers=layers)
    for block in model.distilbert.transformer.layer:
        block.ffn = experts(block.ffn, 64, count, top_k)
    return model


def test_copied():
    """Another architecture, a regression: eight times the feed-forward weights, the same arithmetic, and it trains."""
    from torch.utils.flop_counter import FlopCounterMode

    batch = next(iter(DataLoader(Ratings(32), batch_size=32)))
    dense, sparse = regressor(layers=2), with_experts(8)

    def flops(model):
        with FlopCounterMode(display=False) as counter:
            model(**batch)
        return counter.get_total_flops()

    feed_forward = sum(p.numel() for p in dense.distilbert.transformer.layer[0].ffn.parameters())
    more = sum(p.numel() for p in sparse.parameters()) - sum(p.numel() for p in dense.parameters())
    assert more == 2 * (7 * feed_forward + 8 * 64)
    assert flops(dense) < flops(sparse) < 1.03 * flops(dense)

    optimizer, losses = torch.optim.AdamW(sparse.parameters(), lr=1e-3), []
    for _ in range(30):
        loss = sparse(**batch).loss
        (loss + 0.01 * BALANCE(sparse)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_upcycled_model_predicts_what_it_did():
    batch = next(iter(DataLoader(Ratings(8), batch_size=8)))
    dense, sparse = regressor(layers=2).eval(), with_experts(4, top_k=2).eval()
    assert torch.allclose(dense(**batch).logits, sparse(**batch).logits, atol=1e-5)


def test_experts_cost_their_weights_gradients_and_state():
    batch = next(iter(DataLoader(Ratings(8), batch_size=8)))
    peaks = []
    for count in (2, 4):
        model = with_experts(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(model=model, optimizer=optimizer):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        report = measure.memory(step, model, optimizer, batch)
        peaks.append((sum(p.numel() for p in model.parameters()), report))
    (fewer, two), (more, four) = peaks
    for role in ("weights", "optimizer state"):
        assert four.parts[role] - two.parts[role] == 4 * (more - fewer), role


def test_balance_loss_is_one_for_an_equal_load_and_more_for_any_other():
    layer = EXPERTS(torch.nn.Identity(), 4, count=4, top_k=1)
    torch.nn.init.zeros_(layer.router.weight)
    layer(torch.randn(16, 4))
    assert layer.balance_loss.item() == pytest.approx(1)
    torch.nn.init.eye_(layer.router.weight)
    layer(torch.tensor([[9.0, 0, 0, 0]]).expand(16, 4))
    assert layer.balance_loss > 3 and layer.load.tolist() == [1, 0, 0, 0]


def checkpointed(model, **options):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
    return model


def test_checkpointing_keeps_no_graph_and_changes_no_gradient():
    """The second run, in the backward pass, makes a loss that nobody walks; kept, it holds the layer's activations."""
    always = {}
    guard = "if torch._C._current_graph_task_id() < 0:"
    assert guard in LESSON.source("copy")
    run(LESSON.source("copy").replace(guard, "if True:"), always)
    batch = next(iter(DataLoader(Ratings(16, length=64), batch_size=16)))

    def step(model, balance):
        torch.manual_seed(0)
        loss = model.train()(**batch).loss + 0.01 * balance(model)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return gradients

    plain = with_experts(4, layers=4)
    ours = checkpointed(with_experts(4, layers=4), use_reentrant=False)
    kept = checkpointed(with_experts(4, layers=4, experts=always["MixtureOfExperts"]), use_reentrant=False)
    expected = step(plain, BALANCE)
    for model, balance in ((ours, BALANCE), (kept, always["balance_loss"])):
        assert all(map(torch.equal, step(model, balance), expected)) and len(expected) > 40
    peaks = [
        measure.memory(partial(step, model, balance), model, inputs=batch).peak
        for model, balance in ((ours, BALANCE), (kept, always["balance_loss"]))
    ]
    assert peaks[1] > 1.2 * peaks[0]


def test_balance_loss_refuses_where_it_would_have_no_gradient():
    batch = next(iter(DataLoader(Ratings(8), batch_size=8)))
    model = checkpointed(with_experts(4), use_reentrant=True)
    model.train()(**batch)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        BALANCE(model)
    model.eval()
    with torch.no_grad():  # where none is wanted, as in an evaluation
        model(**batch)
        assert 1 <= BALANCE(model) < 4


def test_balance_loss_refuses_a_replica_s_and_a_second_call():
    """As DataParallel runs them: the replicas' losses do not reach the model."""
    model = torch.nn.Sequential(EXPERTS(torch.nn.Linear(8, 8), 8, count=4))
    replica = model[0]._replicate_for_data_parallel()
    replica(torch.randn(4, 8))
    assert replica.balance_loss.requires_grad
    with pytest.raises(RuntimeError, match="one GPU"):
        BALANCE(model)
    model(torch.randn(4, 8))
    assert BALANCE(model).requires_grad
    with pytest.raises(RuntimeError, match="once"):
        BALANCE(model)


def test_a_model_can_be_copied_between_steps():
    batch = next(iter(DataLoader(Ratings(8), batch_size=8)))
    model = with_experts(4)
    (model(**batch).loss + BALANCE(model)).backward()
    assert torch.equal(copy.deepcopy(model).eval()(**batch).logits, model.eval()(**batch).logits)


def test_trainer_s_loss_is_that_of_the_whole_step():
    """Micro-batches of unlike sizes sum to the mean over their texts; without a count a batch is the whole."""
    from types import SimpleNamespace

    namespace = {"torch": torch, "balance_loss": lambda network: torch.tensor(2.0)}
    run("".join(LESSON.tagged("trainer")[0]["source"]), namespace)
    loss_of = namespace["balanced_loss"](None)
    logits, labels = torch.randn(10, 4), torch.randint(0, 4, (10,))
    whole = loss_of(SimpleNamespace(logits=logits), labels)
    assert whole == torch.nn.functional.cross_entropy(logits, labels) + 0.02
    parts = [
        loss_of(SimpleNamespace(logits=logits[part]), labels[part], num_items_in_batch=torch.tensor(10))
        for part in (slice(0, 4), slice(4, 8), slice(8, 10))
    ]
    assert torch.allclose(sum(parts), whole)

import pytest
import torch
from stranger import Ratings, regressor
from torch.utils.data import DataLoader

from notebooks import copied, lesson, proof_fails
from tutorial_utils import measure

LESSON = lesson("18")
COPIED = copied(LESSON)
EXPERTS, BALANCE = COPIED["MixtureOfExperts"], COPIED["balance_loss"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("weights = weights / weights.sum(-1, keepdim=True)\n        output", "pass\n        output"),
        ("scores.topk(self.top_k)", "(-scores).topk(self.top_k)"),
        ("* weights[token, place, None]", "* weights[token, place, None].detach()"),
        ("torch.where(chosen == number)", "torch.where(chosen == (number + 1) % len(self.experts))"),
        ("output.index_add(0, token,", "output.index_copy(0, token,"),
    ],
    ids=["weights not normalised", "the worst expert", "a lost gradient", "another expert", "only one of two is added"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def with_experts(count, top_k=1):
    """A stranger's regressor whose feed-forward parts are routed."""
    model = regressor(layers=2)
    for block in model.distilbert.transformer.layer:
        block.ffn = EXPERTS(block.ffn, 64, count, top_k)
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

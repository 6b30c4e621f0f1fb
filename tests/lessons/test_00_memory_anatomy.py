import torch

from notebooks import copied, lesson, proof_fails

LESSON = lesson("00")
COPIED = copied(LESSON)


def test_copied():
    """GPT-2, whose head shares the embedding's storage: tied weights count once."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(500, (4, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    held = COPIED["memory_held"](model, optimizer)
    parameters = sum(p.numel() for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    assert held["weights"] * 2**20 == 4 * parameters + buffers
    assert held["gradients"] * 2**20 == 4 * parameters
    if not torch.cuda.is_available():  # there the counters of the step stay in main memory too
        assert held["optimizer state"] * 2**20 == 8 * parameters + 4 * len(list(model.parameters()))
    optimizer.zero_grad()
    assert COPIED["memory_held"](model, optimizer)["gradients"] == 0


def test_proof_can_fail():
    """A step that never clears its gradients is another step than the predicted one."""
    proof_fails(LESSON, "    optimizer.zero_grad()\n\n\nreport", "\n\nreport")

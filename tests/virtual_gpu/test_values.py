"""With values="all" numbers are right: losses and gradients are the CPU's, of the same weights in the same process."""

import pytest
from test_card import on, pytestmark  # noqa: F401

FAMILIES = """
import copy, transformers as t
SIZE = dict(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
OFF = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
CONFIGS = {
    "bert": lambda: t.BertConfig(**SIZE, **OFF),
    "deberta": lambda: t.DebertaV2Config(**SIZE, **OFF, relative_attention=True, pos_att_type=["p2c", "c2p"],
                                         position_buckets=16, share_att_key=True, norm_rel_ebd="layer_norm"),
    "modernbert": lambda: t.ModernBertConfig(**SIZE, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
                                             sep_token_id=2),
    "llama": lambda: t.LlamaConfig(**SIZE, num_key_value_heads=2, pad_token_id=0),
}
def pair(family, attention, device="cuda"):
    torch.manual_seed(0)
    model = t.AutoModelForSequenceClassification.from_config(CONFIGS[family](), attn_implementation=attention)
    return model, copy.deepcopy(model).to(device)
def texts(device):
    ids = torch.randint(3, 500, (4, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, 16:] = mask[1, 16:] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device),
            "labels": torch.tensor([0, 1, 0, 1]).to(device)}
def run(model, device, dtype=None):
    inputs = texts(device)
    labels = inputs.pop("labels")
    with torch.autocast(device, dtype, enabled=dtype is not None):
        logits = model(**inputs).logits
        # As cross_entropy does on CUDA: its autocast has nll_loss in fp32, and a CPU's all of it.
        loss = torch.nn.functional.nll_loss(torch.log_softmax(logits, -1, dtype=logits.dtype).float(), labels)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])
def apart(family, attention, dtype=None):
    one, other = pair(family, attention)
    (loss, gradients), (loss_2, gradients_2) = run(one, "cpu", dtype), run(other, "cuda", dtype)
    return abs(loss - loss_2) / loss, ((gradients - gradients_2).norm() / gradients.norm()).item()
"""


@pytest.mark.parametrize("family", ["bert", "deberta", "modernbert", "llama"])
def test_losses_and_gradients_in_fp32(family):
    code = (
        FAMILIES
        + f"""
for attention in ("eager", "sdpa") if {family != "deberta"} else ("eager",):
    print(apart({family!r}, attention))
"""
    )
    for line in on("T4", code, "all").splitlines():
        loss, gradients = eval(line)
        assert loss < 1e-5 and gradients < 1e-5, line


@pytest.mark.parametrize(("card", "dtype", "rounding"), [("T4", "float16", 2**-10), ("A100", "bfloat16", 2**-7)])
def test_losses_and_gradients_in_half_precision(card, dtype, rounding):
    """No farther from fp32 than the CPU's own halves, whose autocast rounds at other places."""
    code = (
        FAMILIES
        + f"""
for family, attention in (("bert", "sdpa"), ("bert", "eager"), ("deberta", "eager"), ("modernbert", "sdpa"),
                          ("llama", "sdpa")):
    loss, gradients = run(pair(family, attention, "cpu")[0], "cpu")
    one, other = pair(family, attention)
    halves = run(one, "cpu", torch.{dtype}), run(other, "cuda", torch.{dtype})
    print([(abs(a - loss) / loss, ((b - gradients).norm() / gradients.norm()).item()) for a, b in halves])
"""
    )
    for line in on(card, code, "all").splitlines():
        (_, on_cpu), (loss, gradients) = eval(line)
        assert loss < 2 * rounding and gradients < 1.25 * on_cpu, line


@pytest.mark.parametrize(("card", "of_halves"), [("T4", "Efficient"), ("A100", "Flash"), ("H100", "Cudnn")])
def test_attention_kernels_and_their_gradients(card, of_halves):
    """Memory-efficient, flash, cuDNN's: masks, causal, shared keys, and in the backward the forward's dropout mask."""
    code = """
F = torch.nn.functional.scaled_dot_product_attention
def apart(dtype, mask=False, causal=False, shared=False):
    torch.manual_seed(0)
    made = [torch.randn(2, heads, 16, 32).to(dtype) for heads in (4, 2 if shared else 4, 2 if shared else 4)]
    cpu = [m.float().clone().requires_grad_() for m in made]
    gpu = [m.cuda().requires_grad_() for m in made]
    bias = torch.where(torch.rand(2, 1, 16, 16) > 0.2, 0.0, -1e4) if mask else None
    options = dict(is_causal=causal, enable_gqa=shared)
    one, other = F(*cpu, bias, **options), F(*gpu, None if bias is None else bias.to(dtype).cuda(), **options)
    weights = torch.randn(one.shape)
    (one * weights).sum().backward(); (other * weights.cuda()).sum().backward()
    return other.grad_fn.name(), max(((a.grad - b.grad.cpu()).norm() / a.grad.norm()).item() for a, b in zip(cpu, gpu))
for options in ({}, {"mask": True}, {"causal": True}, {"shared": True}):
    for dtype in (torch.float32, torch.float16):
        print((*apart(dtype, **options), str(dtype)))
x = torch.randn(2, 4, 16, 32, device="cuda", requires_grad=True)
nothing = torch.zeros(2, 1, 16, 16, device="cuda").index_fill_(2, torch.tensor(2, device="cuda"), -torch.inf)
unseen = F(x, x, x, nothing)
assert "Efficient" in unseen.grad_fn.name() and unseen[:, :, 2].eq(0).all()
unseen.sum().backward()
assert x.grad.isfinite().all()
with torch.no_grad():  # of which no kernel keeps the sums
    halves = [torch.randn(2, 4, 16, 32).half() for _ in range(3)]
    one, other = F(*(half.float() for half in halves)), F(*(half.cuda() for half in halves))
assert (one - other.cpu()).norm() < 2e-3 * one.norm()
x.grad = None
torch.manual_seed(3); first = F(x, x, x, dropout_p=0.5)
torch.manual_seed(3); again = F(x, x, x, dropout_p=0.5)
first.sum().backward()
eps = torch.zeros_like(x); eps[0, 0, 0, 0] = 1e-2
def at(value):
    torch.manual_seed(3)
    return F(value, value, value, dropout_p=0.5).sum()
slope = (at(x.detach() + eps) - at(x.detach() - eps)) / 2e-2
print(("dropout", abs(slope.item() - x.grad[0, 0, 0, 0].item()), str(torch.equal(first, again))))
half = [torch.randn(2, 4, 16, 32, device="cuda").half().requires_grad_() for _ in range(3)]
output = F(*half, dropout_p=0.5)
weights = torch.randn_like(output)
(output * weights).sum().backward()  # the output is linear in the values, with the mask that was drawn
direct, by_gradient = (output * weights).float(), (half[2] * half[2].grad).float()
print(((direct.sum() - by_gradient.sum()).abs() / direct.norm()).item())
"""
    *lines, dropout, of_dropout_in_halves = map(eval, on(card, code, "all").splitlines())
    for name, far, dtype in lines:
        assert far < (1e-5 if dtype == "torch.float32" else 4e-3), (name, far, dtype)
    assert dropout[1] < 1e-2 and dropout[2] == "True"
    assert of_dropout_in_halves < 1e-2
    kernels = {dtype: {name for name, _, of in lines if of == dtype} for *_, dtype in lines}
    assert any("Efficient" in name for name in kernels["torch.float32"])
    assert any(of_halves in name for name in kernels["torch.float16"]), kernels


def test_a_head_of_convolutions_and_a_softmax_of_halves():
    """What competitors put on a backbone: under autocast CUDA's softmax widens halves in one kernel."""
    code = """
import copy
torch.manual_seed(0)
class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mixed, self.weight = torch.nn.Conv1d(16, 16, 3, padding=1, groups=2), torch.nn.Linear(16, 1)
    def forward(self, x):
        x = torch.nn.functional.gelu(self.mixed(x.mT).mT)
        return (self.weight(x).softmax(1) * x).sum(1).log_softmax(-1)
for dtype in (None, torch.float16):
    one = Head()
    other, x = copy.deepcopy(one).cuda(), torch.randn(4, 12, 16)
    a = one(x)
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        b = other(x.cuda())
    a.square().mean().backward(); b.float().square().mean().backward()
    pairs = [(a, b), *((p.grad, q.grad) for p, q in zip(one.parameters(), other.parameters()) if p.ndim > 1)]
    print(max(((p - q.float().cpu()).norm() / p.norm()).item() for p, q in pairs))
"""
    full, half = map(float, on("T4", code, "all").split())
    assert full < 1e-5 and half < 2e-2, (full, half)


def test_a_loss_whose_kernel_the_host_chooses():
    """CTC's: CUDA's host code asks itself first whether cuDNN has it."""
    code = """
torch.manual_seed(0)
x, texts, longest, lengths = torch.randn(12, 3, 6), torch.randint(1, 6, (3, 4)), torch.tensor([12, 12, 10]), [4, 3, 2]
def run(x, to):
    loss = torch.nn.functional.ctc_loss(x.log_softmax(-1), to(texts), to(longest), to(torch.tensor(lengths)))
    loss.backward()
    return loss.item(), x.grad.cpu()
one, two = run(x.clone().requires_grad_(), torch.Tensor.cpu), run(x.cuda().requires_grad_(), torch.Tensor.cuda)
print(abs(one[0] - two[0]), (one[1] - two[1]).abs().max().item())
"""
    assert max(map(float, on("T4", code, "all").split())) < 1e-6


def test_layers_that_a_cpu_computes_in_parts():
    """Convolutions and RMSNorm: outputs, and gradients of what goes in and of the weights. RMSNorm in halves too."""
    code = """
import copy
torch.manual_seed(0)
N = torch.nn
layers = [N.Conv1d(8, 6, 3, dilation=2), N.ConvTranspose1d(8, 6, 3, stride=2, dilation=2), N.RMSNorm(8),
          N.Conv1d(8, 16, 3, padding=1, groups=8),
          N.RMSNorm((6, 8), eps=1e-3)]
def apart(made, dtype=torch.float32, size=1.0):
    made = made.to(dtype)
    if isinstance(made, N.RMSNorm):
        N.init.normal_(made.weight)
    other, x = copy.deepcopy(made).cuda(), size * torch.randn(4, 8, 6)
    x = (x.mT.contiguous() if isinstance(made, N.RMSNorm) else x).to(dtype)
    one, two = x.clone().requires_grad_(), x.cuda().requires_grad_()
    a, b = made(one), other(two)
    weights = torch.randn(a.shape).to(dtype)
    (a * weights).sum().backward(); (b * weights.cuda()).sum().backward()
    pairs = [(a, b), (one.grad, two.grad), *((p.grad, q.grad) for p, q in zip(made.parameters(), other.parameters()))]
    return max(((p.float() - q.cpu().float()).norm() / p.float().norm()).item() for p, q in pairs)
print([apart(layer) for layer in layers], [apart(N.RMSNorm(8), torch.float16, size) for size in (1.0, 0.02)])
"""
    in_full, in_halves = eval(on("T4", code, "all").strip().replace("] [", "], ["))
    assert max(in_full) < 1e-5 and max(in_halves) < 5e-3, (in_full, in_halves)


def test_what_cudnn_alone_would_compute_says_how_to_do_without_it():
    """Batch normalisation and recurrent layers are computed then: what they give, and every gradient."""
    code = """
import copy
torch.manual_seed(0)
x, lengths = torch.randn(4, 8, 6), torch.tensor([8, 5, 5, 2])
for refused in (lambda: torch.nn.LSTM(6, 5).cuda(), lambda: torch.nn.BatchNorm1d(8).cuda()(x.cuda())):
    try:
        refused()
    except NotImplementedError as error:
        print(error)
torch.backends.cudnn.enabled = False
N = torch.nn
def out(layer, x):
    if isinstance(layer, N.BatchNorm1d):
        return layer(x)
    packed = N.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    last = layer(x)[1]  # the state after the last token, of one kind or of two
    return torch.cat([layer(x)[0].flatten(), layer(packed)[0].data.flatten(), *(s.flatten() for s in last)])
options = dict(num_layers=2, bidirectional=True, batch_first=True)
for one in (N.BatchNorm1d(8), N.LSTM(6, 5, **options), N.GRU(6, 5, **options), N.LSTM(6, 5, bias=False, num_layers=2,
            batch_first=True), N.GRU(6, 5, bias=False, batch_first=True)):
    other = copy.deepcopy(one).cuda()
    first, second = x.clone().requires_grad_(), x.cuda().requires_grad_()
    a, b = out(one, first), out(other, second)
    weights = torch.randn(a.shape)
    (a * weights).sum().backward(); (b * weights.cuda()).sum().backward()
    of_weights = ((p.grad, q.grad) for p, q in zip(one.parameters(), other.parameters()))
    pairs = [(a, b), (first.grad, second.grad), *of_weights]
    print(max(((p - q.cpu()).norm() / p.norm()).item() for p, q in pairs))
"""
    recurrent, normed, *apart = on("T4", code, "all").splitlines()
    assert "_cudnn_rnn" in recurrent and "torch.backends.cudnn.enabled = False takes torch's own kernel" in recurrent
    assert "cudnn_batch_norm" in normed and "torch.backends.cudnn.enabled = False takes torch's own kernel" in normed
    assert len(apart) == 5 and max(map(float, apart)) < 1e-5, apart


def test_dropout_draws_anew_each_time_and_the_same_from_the_same_state():
    code = """
x, F = torch.ones(4, 64, device="cuda"), torch.nn.functional
def drawn():
    return F.dropout(x, 0.5), torch.rand(99, device="cuda"), F.scaled_dot_product_attention(*[x.view(1, 4, 8, 8)] * 3,
                                                                                        dropout_p=0.5)
torch.manual_seed(1)
first, second = drawn(), drawn()
torch.manual_seed(1)
again = drawn()
print([torch.equal(a, b) for a, b in zip(first, second)], [torch.equal(a, b) for a, b in zip(first, again)])
"""
    assert on("T4", code, "all").strip() == "[False, False, False] [True, True, True]"


def test_training_with_clipping_a_scaler_and_checkpoints():
    """Three steps: fused and foreach AdamW, fp16 with its scaler, dropout drawn again where a layer runs again."""
    code = (
        FAMILIES
        + """
def losses(device, checkpoints=False, fused=None, dtype=None, dropout=0.0):
    torch.manual_seed(0)
    config = t.BertConfig(**SIZE, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    model = t.BertForSequenceClassification(config).to(device).train()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    adamw, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), torch.amp.GradScaler(
        device, init_scale=1024.0, enabled=dtype is not None)
    found = []
    torch.manual_seed(5)
    for _ in range(3):
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = model(**texts(device)).loss
        scaler.scale(loss).backward()
        scaler.unscale_(adamw)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(adamw); scaler.update(); adamw.zero_grad()
        found.append(loss.item())
    return found
print([losses("cpu"), losses("cuda"), losses("cuda", fused=True), losses("cuda", checkpoints=True)])
print([losses("cpu", dtype=torch.float16), losses("cuda", dtype=torch.float16)])
print([losses("cuda", dropout=0.1), losses("cuda", dropout=0.1, checkpoints=True)])
"""
    )
    full, half, dropped = map(eval, on("T4", code, "all").splitlines())
    assert all(abs(a - b) < 1e-5 for others in full[1:] for a, b in zip(full[0], others)), full
    assert all(abs(a - b) < 4e-3 for a, b in zip(*half)), half
    assert all(abs(a - b) < 1e-5 for a, b in zip(*dropped)) and abs(dropped[0][0] - full[0][0]) > 1e-4, dropped


def test_bitsandbytes():
    """Three steps of its 8-bit optimizers; a 4-bit layer's output and the gradient of its input."""
    code = """
import importlib.util; importlib.util.find_spec("bitsandbytes")  # as programs ask whether it is here
import bitsandbytes as bnb
def trained(device, optimizer):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(128, 64).to(device))
    chosen = getattr(bnb.optim, optimizer)([weight], lr=1e-2)
    for gradient in torch.randn(3, 128, 64):
        weight.grad = gradient.to(device)
        chosen.step()
    types = {name: value.dtype for name, value in chosen.state[weight].items() if hasattr(value, "dtype")}
    return weight.detach().cpu(), types
def four_bits(device):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(64, 32, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict({"weight": torch.randn(32, 64), "bias": torch.randn(32)})
    inputs = torch.randn(5, 64).to(device).requires_grad_()
    output = layer.to(device)(inputs)
    (output * torch.randn(5, 32).to(device)).sum().backward()
    return output.detach().cpu(), inputs.grad.cpu()
for optimizer in ("AdamW8bit", "Lion8bit"):
    (one, types), (other, others) = trained("cpu", optimizer), trained("cuda", optimizer)
    assert types == others and torch.uint8 in types.values(), (types, others)
    print((one - other).abs().max().item())
for one, other in zip(four_bits("cpu"), four_bits("cuda")):
    print(((one - other).abs().max() / one.abs().max()).item())
"""
    assert all(float(line) < 1e-5 for line in on("T4", code, "all").splitlines())


def test_paged_state_is_outside_of_torchs_allocator_and_gives_the_same_weights():
    code = """
import bitsandbytes as bnb
def trained(optimizer):
    weight = torch.nn.Parameter(torch.ones(2**20, device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    before, weight.grad = torch.cuda.memory_allocated(), torch.full_like(weight, 0.5)
    getattr(bnb.optim, optimizer)([weight], lr=1e-2).step()
    torch.cuda.synchronize()
    return weight.detach().cpu(), torch.cuda.max_memory_allocated() - before - weight.nbytes
(plain, state), (paged, outside) = trained("AdamW8bit"), trained("PagedAdamW8bit")
assert torch.equal(plain, paged) and state > 2**21, (state, outside)
print(outside)
"""
    assert int(on("T4", code, "all")) < 2**18


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        ("torch.nn.Embedding(9, 4, sparse=True).cuda()(torch.tensor([1, 2]).cuda()).sum().backward()", "sparse"),
        ("torch.sparse_coo_tensor([[0, 1], [1, 1]], [1.0, 2.0], (2, 2), device='cuda').coalesce()", "sparse"),
        ("torch.nested.nested_tensor([torch.ones(2, 3).cuda(), torch.ones(4, 3).cuda()]) * 2", "nested"),
        ("torch.quantize_per_tensor(torch.ones(3).cuda(), 0.1, 0, torch.qint8).dequantize()", "quantized"),
    ],
)
@pytest.mark.parametrize("values", ["small", "all"])
def test_kinds_of_tensors_without_values_say_so(made, kind, values):
    code = f"""
try:
    {made}
except NotImplementedError as error:
    print(error)
"""
    assert f"of a {kind} tensor has no values on the virtual GPU: use dense tensors" in on("T4", code, values)


def test_a_conjugate_that_is_not_carried_out_yet():
    code = """
t = torch.tensor([1 + 2j, 3 - 1j]).cuda()
print((t.conj() * t).tolist(), t.conj().imag.neg().clone().tolist())
"""
    assert on("T4", code, "all").strip() == "[(5+0j), (10+0j)] [2.0, -1.0]"


def test_what_is_written_in_place_beside_a_result():
    """An operator that changes an argument and gives a new tensor too."""
    code = """
    random = torch.nn.functional.rrelu(-torch.ones(1000, device="cuda"), training=True)
    print(bool(((random <= -1 / 8) & (random >= -1 / 3)).all()), len(random.unique()) > 100)
    x = torch.randn(8, 3)
    def norm(to):
        mean, var = to(torch.ones(3)), to(torch.ones(3))
        found = torch._native_batch_norm_legit(to(x), None, None, mean, var, True, 0.1, 1e-5)
        return [one.cpu() for one in (*found, mean, var)]
    print(all(torch.allclose(*pair, atol=1e-6) for pair in zip(norm(torch.Tensor.cpu), norm(torch.Tensor.cuda))))
    """
    assert on("T4", code, "all").split() == ["True"] * 3


def test_a_batch_norm_in_evaluation():
    code = """
    import copy
    torch.backends.cudnn.enabled = False
    one, x = torch.nn.BatchNorm1d(3), torch.randn(8, 3)
    other = copy.deepcopy(one).cuda()
    for training in (True, False):
        given = [x.clone().requires_grad_(), x.cuda().requires_grad_()]
        outputs = [model.train(training)(given) for model, given in zip((one, other), given)]
        for output in outputs:
            output.square().sum().backward()
        print((outputs[0] - outputs[1].cpu()).abs().max().item() < 1e-6,
              (given[0].grad - given[1].grad.cpu()).abs().max().item() < 1e-5)
    """
    assert on("T4", code, "all").split() == ["True"] * 4


@pytest.mark.parametrize("values", ["small", "all"])
def test_shapes_that_are_values_with_a_place_for_them(values):
    code = """
    mask = torch.tensor([True, False, True, True]).cuda()
    out = torch.empty(0, dtype=torch.long, device="cuda")
    print(torch.nonzero(mask, out=out) is out, out.flatten().tolist())
    print(torch.masked_select(torch.arange(4, device="cuda"), mask, out=out).tolist())
    """
    assert on("T4", code, values).splitlines() == ["True [0, 2, 3]", "[0, 2, 3]"]


def test_attention_whose_scale_is_zero():
    code = """
    parts = torch.randn(3, 1, 2, 5, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    print((attend(*parts, scale=0.0) - attend(*parts.cuda(), scale=0.0).cpu()).abs().max().item() < 1e-6)
    """
    assert on("T4", code, "all").split() == ["True"]


@pytest.mark.parametrize("made", ['jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")',
                                  '_compile_kernel("__global__ void f() {}", "f")'])  # fmt: skip
def test_a_kernel_of_ones_own_says_so(made):
    code = f"""
    try:
        torch.cuda.{made}(torch.ones(4, device="cuda"))
    except NotImplementedError as error:
        print(error)
    """
    assert "kernel of one's own" in on("T4", code, "all")


def test_operators_whose_own_host_code_asks_for_values():
    """A number to a power, membership, and what CUDA keeps less of than the CPU."""
    code = """
def of(x):
    x = x.detach().clone().requires_grad_()
    F = torch.nn.functional
    torch.manual_seed(0)
    layer = torch.nn.Conv3d(4, 8, 3, groups=4).to(x.device)
    results = [2**x, torch.matrix_exp(x), F.logsigmoid(x), layer(x.view(1, 4, 4, 4, 4)), torch.ldexp(x, x)]
    sum(r.square().sum() for r in results).backward()
    return [*results, x.grad, torch.isin(x, x[:1]).float(), (2 ** torch.arange(3, device=x.device)).float()]
x = torch.linspace(-1, 1, 256).view(16, 4, 4)
for one, other in zip(of(x), of(x.cuda())):
    print((one - other.cpu()).abs().max().item() <= 1e-5 * one.abs().max().item())
"""
    assert set(on("T4", code, "all").split()) == {"True"}

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import Ratings, regressor
from strangers import competition
from torch.utils.data import DataLoader

from notebooks import answer_to_exercise, lesson, proof_fails, run, source
from tutorial_utils import measure

LESSON = lesson("18")
CELLS = "\n".join(source(cell) for cell in LESSON.code if cell["id"] in ("copy", "into-a-model", "balance"))
COPIED = {}
run(CELLS, COPIED)
EXPERTS, USE, BALANCE = (COPIED[name] for name in ("MixtureOfExperts", "use_experts", "balance_loss"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" if self.top_k > 1 else weights", " if False else weights"),
        (" if self.top_k > 1 else weights", ""),
        ("scores.topk(self.top_k)", "(-scores).topk(self.top_k)"),
        ("* weights[token, place, None]", "* weights[token, place, None].detach()"),
        ("torch.where(chosen == number)", "torch.where(chosen == (number + 1) % len(self.experts))"),
        ("total.index_add(0, token,", "total.index_copy(0, token,"),
    ],
    ids=[
        "weights not normalised",
        "one weight normalised",
        "the worst expert",
        "a lost gradient",
        "another expert",
        "only one of two is added",
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


def small(architecture):
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=99)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    more = {"pos_att_type": ["p2c", "c2p"], "relative_attention": True} if architecture == "deberta-v2" else {}
    more |= {"num_key_value_heads": 2} if architecture in ("llama", "qwen2") else {}
    return AutoModel.from_config(AutoConfig.for_model(architecture, **sizes, **ids, **more)).eval()


@pytest.mark.parametrize("architecture", ["bert", "roberta", "electra", "deberta-v2", "llama", "qwen2", "modernbert"])
def test_use_experts_in_every_second_layer_of(architecture):
    """The architectures that the page names, within a module of one's own whose head is called mlp."""
    model = torch.nn.ModuleDict({"backbone": small(architecture), "mlp": torch.nn.Linear(32, 2)})
    dense, ids = small(architecture), torch.arange(5, 25).view(2, 10)
    assert USE(model, every=2) is model
    layers = [name for name, part in model.named_modules() if isinstance(part, EXPERTS)]
    assert len(layers) == 1 and ".1." in layers[0] and isinstance(model["mlp"], torch.nn.Linear)
    before, after = dense(ids).last_hidden_state, model["backbone"](ids).last_hidden_state
    assert torch.allclose(before, after, atol=1e-5)


def test_a_model_without_known_layers_is_an_error():
    with pytest.raises(AttributeError, match="mlp"):
        USE(regressor())


def test_twice_or_without_known_layers_is_refused():
    from transformers import AlbertConfig, AlbertModel

    albert = AlbertModel(AlbertConfig(vocab_size=30, hidden_size=64, intermediate_size=64, num_attention_heads=2))
    for model in (USE(small("bert")), albert):
        with pytest.raises(AssertionError, match="no known layers"):
            USE(model)


def test_frozen_layers_stay_frozen_and_are_not_balanced():
    """Nothing below the first layer that trains keeps a graph, whenever it was frozen."""
    for early in (True, False):
        model = small("bert")
        if not early:
            USE(model)
        for part in (model.embeddings, model.encoder.layer[0]):
            part.requires_grad_(False)
        if early:
            USE(model)
        hidden = model(torch.arange(5, 25).view(2, 10), output_hidden_states=True).hidden_states
        assert not hidden[1].requires_grad and hidden[2].requires_grad and BALANCE(model).requires_grad


def test_a_frozen_layer_above_one_that_trains_leaves_nothing_behind():
    model = USE(small("bert"))
    model.encoder.layer[1].requires_grad_(False)
    model(torch.arange(5, 25).view(2, 10))
    assert BALANCE(model).requires_grad
    copy.deepcopy(model)  # an average of weights


@pytest.mark.parametrize(("trained", "expected"), [("", [False] * 3), ("bias", [True] * 3)], ids=["none", "biases"])
def test_a_router_trains_where_its_experts_may_differ(trained, expected):
    model = small("bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(trained) and name.endswith(trained))
    routers = [part.router for part in USE(model).modules() if isinstance(part, EXPERTS)]
    assert [router.weight.requires_grad for router in routers] == expected


def test_adapters_of_all_linear_layers_come_after_the_experts():
    pytest.importorskip("peft")
    adapters = {}
    run(source(lesson("15").tagged("copy")[0]), adapters)
    model, ids = USE(small("bert")), torch.arange(5, 25).view(2, 10)
    handle = adapters["with_lora"](model)
    assert sum(name.endswith(".router") for name in handle.targeted_module_names) == 3
    (model(ids).last_hidden_state.sum() + BALANCE(model)).backward()
    routers = [part.router for part in model.modules() if hasattr(part, "router")]
    assert all(router.lora_B["default"].weight.grad.norm() > 0 for router in routers)
    learned = [name for name, part in model.named_parameters() if ".experts." in name and part.grad is not None]
    assert learned and all("lora_" in name for name in learned)
    copy.deepcopy(model)


def test_balance_loss_finds_experts_of_a_cell_that_ran_before_and_refuses_to_find_none():
    again = {}
    run(CELLS, again)
    model, ids = USE(small("bert")), torch.arange(5, 25).view(2, 10)
    model(ids)
    assert again["balance_loss"](model) > 0.9
    with pytest.raises(AssertionError, match="use_experts"):
        BALANCE(small("bert"))
    with pytest.raises(AssertionError, match="no known layers"):
        again["use_experts"](model)


def test_wrapped_by_hand_the_router_has_the_type_of_the_experts():
    batch, dense, sparse = next(iter(DataLoader(Ratings(8), batch_size=8))), regressor().double(), regressor().double()
    for block in sparse.distilbert.transformer.layer:
        block.ffn = EXPERTS(block.ffn, sparse.config.dim)
    ids = batch["input_ids"]
    apart = dense.eval()(input_ids=ids).logits - sparse.eval()(input_ids=ids).logits
    assert apart.abs().max() < 1e-6 and BALANCE(sparse) > 0


def test_a_state_dict_loads_into_a_model_with_experts():
    trained, fresh = USE(small("bert")), USE(small("bert"))
    for parameter in trained.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    fresh.load_state_dict(trained.state_dict())
    ids = torch.arange(5, 25).view(2, 10)
    assert torch.equal(fresh(ids).last_hidden_state, trained(ids).last_hidden_state)


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
    layer = EXPERTS(torch.nn.Linear(4, 4), 4, count=4, top_k=1)
    torch.nn.init.zeros_(layer.router.weight)
    layer(torch.randn(16, 4))
    assert BALANCE(layer).item() == pytest.approx(1)
    torch.nn.init.eye_(layer.router.weight)
    layer(torch.tensor([[9.0, 0, 0, 0]]).expand(16, 4))
    assert BALANCE(layer) > 3 and layer.load.tolist() == [1, 0, 0, 0]


def test_balance_loss_is_the_mean_over_the_layers():
    model = USE(small("bert"))
    for layer in (part for part in model.modules() if isinstance(part, EXPERTS)):
        torch.nn.init.zeros_(layer.router.weight)
    model(torch.arange(5, 25).view(2, 10))
    assert BALANCE(model).item() == pytest.approx(1)


def balance_is_that_of_transformers(cells, masked):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    namespace = {}
    run(cells, namespace)
    torch.manual_seed(0)
    layer, hidden = namespace["MixtureOfExperts"](torch.nn.Linear(8, 8), 8), torch.randn(3, 10, 8)
    mask = torch.arange(30).view(3, 10) % 3 if masked else None
    layer(hidden)
    ours = namespace["balance_loss"](layer, mask)
    theirs = load_balancing_loss_func((layer.router(hidden).flatten(0, 1),), 4, 2, mask if mask is None else mask > 0)
    losses = (ours, theirs / 2)
    gradients = [torch.autograd.grad(loss, layer.router.weight)[0] for loss in losses if loss.requires_grad]
    return len(gradients) == 2 and torch.allclose(*losses) and torch.allclose(*gradients, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_balance_loss_is_that_of_transformers(masked):
    assert balance_is_that_of_transformers(CELLS, masked)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scores.mean(0)).sum()", "scores.mean(0).detach()).sum() + 0 * scores.sum()"),
        ("len(layer.experts) * (layer.load", "0 * (layer.load"),
        ("if mask is not None", "if False"),
        ("mask.flatten() != 0", "mask.flatten() == 0"),
    ],
    ids=["no gradient", "no balance", "the mask ignored", "padding alone"],
)
def test_balance_loss_differs_with_a_fault(old, new):
    assert old in CELLS and not balance_is_that_of_transformers(CELLS.replace(old, new), masked=True)


def checkpointed(model, **options):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
    return model


def test_checkpointing_keeps_no_graph_and_changes_no_gradient():
    """The second run, in the backward pass, makes scores that nobody walks; kept, they hold the layer's activations."""
    always = {}
    guard = "if torch._C._current_graph_task_id() < 0:"
    assert guard in CELLS
    run(CELLS.replace(guard, "if True:"), always)
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
    """As DataParallel runs them: what the replicas keep does not reach the model."""
    model = torch.nn.Sequential(EXPERTS(torch.nn.Linear(8, 8), 8, count=4))
    replica = model[0]._replicate_for_data_parallel()
    replica(torch.randn(4, 8))
    assert replica.routed[0].requires_grad
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
    namespace = {"torch": torch, "balance_loss": lambda network: torch.tensor(2.0)}
    run(source(LESSON.tagged("trainer")[0]), namespace)
    loss_of = namespace["balanced_loss"](None)
    logits, labels = torch.randn(10, 4), torch.randint(0, 4, (10,))
    whole = loss_of(SimpleNamespace(logits=logits), labels)
    assert whole == torch.nn.functional.cross_entropy(logits, labels) + 0.02
    parts = [
        loss_of(SimpleNamespace(logits=logits[part]), labels[part], num_items_in_batch=torch.tensor(10))
        for part in (slice(0, 4), slice(4, 8), slice(8, 10))
    ]
    assert torch.allclose(sum(parts), whole)


def experts_that_did_not_move(model) -> int:
    """Of each layer the experts start alike; whoever trains is soon unlike the others."""
    layers = [part for part in model.modules() if isinstance(part, torch.nn.Module) and hasattr(part, "router")]
    assert layers and all(hasattr(layer, "load") for layer in layers)
    weights = [[next(expert.parameters()) for expert in layer.experts] for layer in layers]
    return sum(torch.equal(one, other) for of_layer in weights for one, other in zip(of_layer, of_layer[1:]))


def more_weights(dense, sparse) -> int:
    return sum(p.numel() for p in sparse.parameters()) - sum(p.numel() for p in dense.parameters())


def test_in_a_strangers_classifier(stranger_files, capsys):
    """The same accuracy as long as nothing is learned; then every expert trains."""
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=32)
    edits = {
        "    train_loader = make_loader(train, tokenizer, args.batch_size, True)\n": "    use_experts(model)\n"
        "    train_loader = make_loader(train, tokenizer, args.batch_size, True)\n",
        "        loss = model(**batch).loss\n": "        loss = model(**batch).loss\n"
        '        loss = loss + 0.01 * balance_loss(model, batch["attention_mask"])\n',
    }
    still = {"AdamW(model.parameters(), lr=5e-4)": "SGD(model.parameters(), lr=0.0)"}
    dense = strangers.load("classifier", "", still).main(arguments)
    strangers.load("classifier", CELLS, edits | still).main(arguments)
    sparse = strangers.load("classifier", CELLS, edits).main(arguments)
    before, same, after = capsys.readouterr().out.splitlines()
    assert before == same != after
    assert experts_that_did_not_move(sparse) == 0
    layer = dense.bert.encoder.layer[0]
    each = sum(p.numel() for part in (layer.intermediate, layer.output.dense) for p in part.parameters())
    width, layers = dense.config.hidden_size, dense.config.num_hidden_layers
    assert more_weights(dense, sparse) == layers * (3 * each + 4 * width)


COMPETITION_EDITS = {
    "    model = CustomModel().to(CFG.device)\n": "    model = use_experts(CustomModel()).to(CFG.device)\n",
    "            loss = criterion(model(inputs), labels)\n": "            loss = criterion(model(inputs), labels)\n"
    '            loss = loss + 0.01 * balance_loss(model, inputs["attention_mask"])\n',
}


def test_in_a_strangers_competition_script(stranger_files, monkeypatch, capsys):
    """The same submission as long as nothing is learned; under a scaler and autocast every expert trains."""
    plain = competition(stranger_files, monkeypatch)
    changed = competition(stranger_files, monkeypatch, CELLS, COMPETITION_EDITS)
    for script in (plain, changed):
        script.CFG.encoder_lr = script.CFG.head_lr = 0.0
    (_, submission), (_, same) = plain.main(), changed.main()
    assert (submission.id == same.id).all()
    assert (submission - same).abs().max().max() <= 1e-4
    changed.CFG.encoder_lr, changed.CFG.head_lr = 2e-4, 1e-3
    model, learned = changed.main()
    assert (submission.id == learned.id).all() and learned.notna().all(axis=None)
    assert experts_that_did_not_move(model) == 0
    _, still, after = (float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines())
    assert after < still, "it learns"
    groups = changed.get_optimizer_params(model)
    assert sum(p.numel() for group in groups for p in group["params"]) == sum(p.numel() for p in model.parameters())


def test_a_competition_script_takes_the_memory_of_its_experts(stranger_files, monkeypatch):
    """Weights and AdamW's state of three more experts in each layer, whatever the tokens do."""
    reports = []
    for edits in ({}, COMPETITION_EDITS):
        script = competition(stranger_files, monkeypatch, CELLS, edits)
        script.CFG.apex = False
        model = script.use_experts(script.CustomModel()) if edits else script.CustomModel()
        optimizer = torch.optim.AdamW(script.get_optimizer_params(model))
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        frame = script.pd.read_csv(stranger_files / "scores" / "train.csv").iloc[:8]
        tokenizer = script.AutoTokenizer.from_pretrained(script.CFG.model)
        loader = DataLoader(script.TextDataset(frame, tokenizer), 8)
        scaler = torch.amp.GradScaler(enabled=False)
        step = partial(
            script.train_fn, loader, model.to(script.CFG.device), script.nn.MSELoss(), optimizer, scheduler, scaler
        )
        reports.append((model, measure.memory(step, model, optimizer)))
    (dense, before), (sparse, after) = reports
    more = 4 * more_weights(dense, sparse)
    assert after.parts["weights"] - before.parts["weights"] == more
    assert after.parts["optimizer state"] - before.parts["optimizer state"] == pytest.approx(2 * more, rel=0.001)
    assert after.peak > before.peak + 3 * more


def test_in_a_strangers_decoder(stranger_files, capsys):
    """The same perplexity as long as nothing is learned, a lower one after; every expert trains."""
    edits = {
        "    model = AutoModelForCausalLM.from_pretrained(model_path).to(device)\n": "    model = "
        "use_experts(AutoModelForCausalLM.from_pretrained(model_path)).to(device)\n",
        "        loss = model(**batch).loss\n": "        loss = model(**batch).loss\n"
        '        loss = loss + 0.01 * balance_loss(model, batch["attention_mask"])\n',
    }
    still = {"LR, BATCH_SIZE, EPOCHS = 96, 1e-3, 16, 1": "LR, BATCH_SIZE, EPOCHS = 96, 0.0, 16, 1"}
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    strangers.load("decoder", "", still).main(*files)
    strangers.load("decoder", CELLS, edits | still).main(*files)
    model = strangers.load("decoder", CELLS, edits).main(*files)
    dense, same, after = strangers.perplexities(capsys)
    assert same == pytest.approx(dense, rel=1e-4) and after < 0.99 * same
    assert experts_that_did_not_move(model) == 0


def test_the_exercise_refuses_experts_that_are_counted_from_the_tokens():
    right = "capacity = -(-factor * len(chosen) // experts)"
    said = answer_to_exercise(LESSON, (right, right.replace("experts)", "len(chosen.unique()))")))
    assert said.startswith("not yet")

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import strangers
import torch
from stranger import regressor
from strangers import same_weights

from notebooks import copied, lesson, proof_fails, run, source
from tutorial_utils import bounds, data, measure, models

LESSON = lesson("20")
COPIED = copied(LESSON)
packed = COPIED["packed"]


def cell(name):
    return source(next(found for found in LESSON.code if found["id"] == name))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("owner[:, None, :, None] == owner[:, None, None]", "owner[:, None, :, None] >= -owner[:, None, None]"),
        ("**inputs).last", "**{**inputs, 'position_ids': None}).last"),
        (".tril(0 if causal else width)", ""),
        ("(owner, src % width), out)[:-1]", "(owner, src % width), out)[1:]"),
        ("self.pooler(out)", "self.pooler(out[:, 1:])"),
        ("            for t in texts:", "            for t in texts[:-1]:"),
        ("mask.to(self.dtype).log()", "mask.to(self.dtype)"),
    ],
    ids=["no blocks", "positions run on", "the future is seen", "another's place", "another [CLS]", "a text lost",
         "a mask that is added"],
)  # fmt: skip
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def counted(model):
    """A list to which each forward pass adds the places that it computes."""
    places = []
    words = model.get_input_embeddings()
    words.register_forward_pre_hook(lambda _, args: places.append(args[0].numel()))
    return places


def reviews(count=40, width=48, side="right"):
    """(ids, mask): texts of uneven lengths, most of them short."""
    generator = torch.Generator().manual_seed(3)
    lengths = (torch.rand(count, generator=generator) * 3.6).exp().long() + 3
    mask = torch.arange(width) < lengths[:, None]
    mask = mask if side == "right" else mask.flip(1)
    return torch.randint(5, 500, (count, width), generator=generator) * mask, mask.long()


@pytest.mark.parametrize("side", ["right", "left"])
def test_copied(side):
    """A DistilBERT, in a batch of a fixed width: each text's own states at its own place, from far fewer places."""
    ids, mask = reviews(side=side)
    model = regressor().eval()
    places = counted(model)
    alone = [model.base_model(text[real.bool()][None]).last_hidden_state[0] for text, real in zip(ids, mask)]
    packed(model.base_model)
    places.clear()
    found = model.base_model(ids, attention_mask=mask).last_hidden_state
    assert (found[mask.bool()] - torch.cat(alone)).abs().max() <= 1e-5 and not found[~mask.bool()].any()
    assert mask.sum() <= places[0] <= 1.25 * mask.sum() < 0.5 * ids.numel()


def test_trimmed_is_the_same_on_more_places():
    ids, mask = reviews(width=64)
    baseline, outputs, places = {}, [], []
    run(LESSON.source("baseline"), baseline)
    for change in (lambda backbone: None, baseline["trimmed"], packed):
        model = regressor().eval()
        places.append(counted(model))
        change(model.base_model)
        outputs.append(model(input_ids=ids, attention_mask=mask).logits)
    assert all((found - outputs[0]).abs().max() <= 1e-6 for found in outputs)
    fixed, dynamic, least = (count[0] for count in places)
    assert fixed == 40 * 64 and dynamic == 40 * mask.sum(1).max() and least < 0.7 * dynamic


def test_roberta_counts_from_behind_its_padding():
    from transformers import RobertaConfig, RobertaModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=500)
    model = RobertaModel(RobertaConfig(**sizes, max_position_embeddings=52)).eval()  # the last one is 49 + 2
    ids, mask = reviews(width=50)
    ids = ids.where(mask.bool(), 1)
    before = model(ids, attention_mask=mask)
    packed(model)
    after = model(ids, attention_mask=mask)
    assert (after.last_hidden_state - before.last_hidden_state)[mask.bool()].abs().max() < 1e-5
    assert torch.allclose(after.pooler_output, before.pooler_output, atol=1e-5)


def test_windows_are_refused_and_a_second_call_fails_aloud():
    from transformers import ModernBertConfig, ModernBertModel

    small = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=500)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    with pytest.raises(AssertionError, match="windows"):
        packed(ModernBertModel(ModernBertConfig(**small, **tokens)))
    model = regressor().base_model
    packed(model)
    packed(model)
    with pytest.raises((TypeError, RuntimeError)):
        model(*reviews())


def test_adapters_come_first():
    pytest.importorskip("peft")
    with_lora, (ids, mask) = copied(lesson("15"))["with_lora"], reviews()
    model, late = a_small("bert"), a_small("bert")
    before = model(ids, attention_mask=mask).last_hidden_state
    with_lora(model)
    packed(model)
    assert (model.eval()(ids, attention_mask=mask).last_hidden_state - before)[mask.bool()].abs().max() < 1e-5
    packed(late)
    with pytest.raises(StopIteration):
        with_lora(late)


def a_small(kind):
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=500)
    model = AutoModel.from_config(AutoConfig.for_model(kind, **sizes, hidden_dropout_prob=0.0))
    with torch.no_grad():  # or the tokens hardly look at each other
        for weight in model.parameters():
            weight.mul_(4) if weight.ndim > 1 else None
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "head", "most"),
    [
        ("bert", lambda out, mask: out.pooler_output, 1e-5),
        ("bert", lambda out, mask: (out.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), 1e-5),
        ("bert", lambda out, mask: out.last_hidden_state.mean(1), None),
        ("albert", lambda out, mask: out.last_hidden_state[:, 0], 1e-5),
        ("albert", lambda out, mask: out.pooler_output, None),
        ("convbert", lambda out, mask: out.last_hidden_state[:, 0], None),
        ("mobilebert", lambda out, mask: out.last_hidden_state[:, 0], None),
    ],
    ids=["a pooler", "a masked mean", "padding is read", "ALBERT", "ALBERT's pooler", "ConvBERT", "MobileBERT"],
)
def test_the_check_sees_a_model_and_a_head_that_packing_does_not_suit(kind, head, most):
    """The outputs before and after the call. most: how far apart they may be; None: they are apart."""
    model, (ids, mask) = a_small(kind), reviews(8)
    before = head(model(ids, attention_mask=mask), mask)
    packed(model)
    try:
        after = head(model(ids, attention_mask=mask), mask)
    except ValueError as error:  # of ConvBERT in transformers 5.0: it takes no mask of pairs
        assert most is None and "Wrong shape for input_ids" in str(error)
        return
    apart = (before - after).abs().max() if before.shape == after.shape else float("inf")
    assert apart <= most if most else apart > 1e-3


def test_the_time_of_packing_does_not_explode_with_the_batch():
    """In calls of functions: of four times the texts each is tried in at most four times the rows."""
    import cProfile
    import pstats

    calls = []
    for count in (64, 256):
        ids, mask = reviews(count)
        model = a_small("bert")
        packed(model)
        profile = cProfile.Profile()
        profile.runcall(model, ids, attention_mask=mask)
        calls.append(pstats.Stats(profile).total_calls)
    assert calls[1] < 4 * 4 * calls[0], calls


def test_layers_are_compiled_once_for_all_packs_and_the_model_again_and_again():
    import torch._dynamo.testing

    def graphs(compile_it):
        model, counter = a_small("bert"), torch._dynamo.testing.CompileCounter()
        packed(model)
        compile_it(model, counter)
        for count in (8, 12, 16, 24, 32):
            ids, mask = reviews(count)
            model(input_ids=ids, attention_mask=mask)
        torch._dynamo.reset()
        return counter.frame_count

    layers = graphs(lambda model, counter: [layer.compile(backend=counter) for layer in model.encoder.layer])
    assert layers <= 2, "the first for one shape, the second for all"
    assert graphs(lambda model, counter: model.compile(backend=counter)) > 2 * layers


@pytest.mark.parametrize("lengths", ["uneven", "equal"])
def test_a_decoder_that_is_taken_back_generates(lengths):
    from tutorial_utils import shapes

    ids, mask = reviews(6, side="left")
    ids, mask = (ids, mask) if lengths == "uneven" else (ids[:, -3:], mask[:, -3:])
    options = dict(attention_mask=mask, max_new_tokens=4, do_sample=False)
    model = shapes.model("decoder", 4).eval()
    expected = model.generate(ids, **options)
    backbone = model.base_model
    packed(backbone)
    backbone.__class__ = type(backbone).__base__  # as the page says
    assert torch.equal(model.generate(ids, **options), expected)


def test_weights_keep_their_names_and_a_copy_its_own():
    model = regressor().eval()
    names = list(model.state_dict())
    packed(model.base_model)
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
        ids, mask = reviews()
        assert not twin(input_ids=ids, attention_mask=mask).logits.any()
        assert model(input_ids=ids, attention_mask=mask).logits.all()


def test_pairs_keep_their_types():
    model, (ids, mask) = a_small("bert"), reviews(8)
    types = (torch.arange(ids.shape[1]) % 2).expand_as(ids).contiguous()
    given = dict(attention_mask=mask, token_type_ids=types)
    before = model(ids, **given).last_hidden_state[mask.bool()]
    COPIED["packed"](model)
    assert (model(ids, **given).last_hidden_state[mask.bool()] - before).abs().max() < 1e-5


def test_one_text_and_texts_that_fill_their_rows():
    """Nothing to pack: the batch itself."""
    model = regressor().eval()
    ids = torch.randint(5, 500, (3, 20))
    before = model(input_ids=ids).logits
    packed(model.base_model)
    places = counted(model)
    assert (model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits - before).abs().max() < 1e-6
    assert (model(input_ids=ids[:1], attention_mask=torch.ones_like(ids[:1])).logits - before[:1]).abs().max() < 1e-6
    assert places == [60, 20]


def test_first_fit_of_the_page_counts_the_rows_of_the_cell():
    first_fit = {}
    run(cell("counting").split("\n\n\n")[0], first_fit)
    ids, mask = reviews()
    model = regressor().eval()
    places = counted(model)
    packed(model.base_model)
    model(input_ids=ids, attention_mask=mask)
    sizes = mask.sum(1).tolist()
    rows = first_fit["first_fit"](sizes)
    assert places == [len(rows) * max(sizes)] and sorted(sum(rows, [])) == list(range(40))
    assert all(sum(sizes[n] for n in row) <= max(sizes) for row in rows)


def test_a_token_budget():
    namespace = {"torch": torch}
    run(cell("budget").split("\n\n\n")[0], namespace)
    budget_batches, lengths = namespace["budget_batches"], reviews(300)[1].sum(1)
    one, again, other = (budget_batches(lengths, 256, seed) for seed in (0, 0, 1))
    assert one == again != other
    assert sorted(sum(one, [])) == sorted(sum(other, [])) == list(range(300))
    filled = [lengths[batch].sum().item() for batch in one]
    assert max(filled) <= 256 and sum(filled) / len(filled) > 0.9 * 256
    longer = sorted(budget_batches(torch.tensor([300, 5, 300]), 256, 0))
    assert longer == [[0], [1], [2]], "a text that is longer comes alone"


def test_in_a_strangers_classifier(stranger_files, capsys):
    """The same weights and accuracy, from fewer places, in training and in validation."""
    build = "num_labels=train.label.nunique()).to(device)\n"
    plain = strangers.load("classifier", "", {build: build + "    note(model)\n"})
    changed = strangers.load(
        "classifier", LESSON.source("copy"), {build: build + "    note(model)\n    packed(model.base_model)\n"}
    )
    files = dict(train=stranger_files / "train.csv", valid=stranger_files / "valid.csv")
    arguments = SimpleNamespace(model=stranger_files / "bert", **files, epochs=1, batch_size=32)
    models_of, places = [], []
    for script in (plain, changed):
        script.note = lambda model: places.append(counted(model))
        models_of.append(script.main(arguments))
    one, other = capsys.readouterr().out.splitlines()
    assert one == other, "the same accuracy"
    torch.manual_seed(42)
    start = plain.AutoModelForSequenceClassification.from_pretrained(stranger_files / "bert", num_labels=4)
    assert same_weights(*models_of, start)
    assert sum(places[0]) == (128 + 40) * 64 and sum(places[1]) < 0.8 * sum(places[0])


@pytest.fixture(scope="module")
def deberta_folder(stranger_files, tmp_path_factory):
    """A small DeBERTa-v3 without dropout and the strangers' tokenizer, as a competition script loads it."""
    folder = tmp_path_factory.mktemp("deberta")
    for path in stranger_files.joinpath("bert").iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder)
    vocabulary = json.loads((stranger_files / "bert" / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=64)
    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = models.build("deberta-v3-small", **sizes, **still, vocab_size=vocabulary)
    model.base_model.save_pretrained(folder)
    return folder


BUILD = "    model = CustomModel().to(CFG.device)\n"


@pytest.mark.parametrize(
    ("backbone", "apex"),
    [("bert", False), ("bert", True), ("deberta", False)],
    ids=["BERT", "BERT, autocast and a scaler", "DeBERTa"],
)
def test_in_a_strangers_competition_script(stranger_files, deberta_folder, monkeypatch, backbone, apex):
    """Whose rows are padded to 64: the same weights and submission, row by row, from fewer places, in less memory."""
    monkeypatch.setenv("DATA", str(stranger_files / "scores"))
    monkeypatch.setenv("MODEL", str(deberta_folder if backbone == "deberta" else stranger_files / "bert"))
    call = "packed_deberta" if backbone == "deberta" else "packed"
    cells = LESSON.source("copy") + "\n\n" + (cell("deberta") if backbone == "deberta" else "")
    plain = strangers.load("competition")
    changed = strangers.load("competition", cells, {BUILD: f"{BUILD}    {call}(model.model)\n"})
    plain.CFG.apex = changed.CFG.apex = apex
    (before, submission), (after, submitted) = plain.main(), changed.main()
    torch.manual_seed(42)
    if not apex:
        assert same_weights(before, after, plain.CustomModel())
    assert (submission.id == submitted.id).all() and submitted.notna().all(axis=None)
    assert (submission - submitted).abs().max().max() <= (0.05 if apex else 1e-3)

    frame = plain.pd.read_csv(stranger_files / "scores" / "train.csv").iloc[:32]
    rows = plain.TextDataset(frame, plain.AutoTokenizer.from_pretrained(plain.CFG.model), train=False)
    inputs = {name: torch.stack([rows[i][name] for i in range(32)]) for name in rows[0]}
    peaks = [
        measure.memory(lambda model=model: model.train()(inputs).sum().backward(), model, None, inputs).peak
        for model in (before, after)
    ]
    assert peaks[1] < 0.9 * peaks[0], peaks


def test_a_shuffled_submission_without_the_way_back(stranger_files, monkeypatch):
    """A fault of the cell reaches a competition: another's states."""
    monkeypatch.setenv("DATA", str(stranger_files / "scores"))
    monkeypatch.setenv("MODEL", str(stranger_files / "bert"))
    edits = {BUILD: f"{BUILD}    packed(model.model)\n"}
    right = strangers.load("competition", LESSON.source("copy"), edits)
    faulty = LESSON.source("copy").replace("out)[:-1]", "out)[:-1].flip(0)")
    wrong = strangers.load("competition", faulty, edits)
    right.CFG.apex = wrong.CFG.apex = False
    (_, submission), (_, submitted) = right.main(), wrong.main()
    assert (submission - submitted).abs().max().max() > 0.01


def test_in_a_strangers_decoder(stranger_files, capsys):
    load = "    model = AutoModelForCausalLM.from_pretrained(model_path).to(device)\n"
    plain = strangers.load("decoder", "", {load: load + "    note(model)\n"})
    changed = strangers.load(
        "decoder", LESSON.source("copy"), {load: load + "    note(model)\n    packed(model.base_model)\n"}
    )
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    trained, places = [], []
    for script in (plain, changed):
        script.note = lambda model: places.append(counted(model))
        trained.append(script.main(*files))
    assert same_weights(*trained, plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama"))
    one, other = strangers.perplexities(capsys)
    assert other == pytest.approx(one, rel=1e-4)
    assert sum(places[1]) < 0.95 * sum(places[0])


def test_a_strangers_decoder_flattened(stranger_files, capsys):
    """The page's other way for a decoder: transformers' collator in place of its own."""
    own = "collate_fn=lambda rows: collate(rows, tokenizer.pad_token_id)"
    edits = {
        own: "collate_fn=flat",
        "from_pretrained(model_path).to(device)": "from_pretrained(model_path, use_cache=False).to(device)",
        "device = torch.device(": "def flat(rows):\n"
        "    return {name: value for name, value in Flattening()(rows).items() if torch.is_tensor(value)}\n\n"
        "device = torch.device(",
        "from torch.utils.data import DataLoader\n": "from torch.utils.data import DataLoader\n"
        "from transformers import DataCollatorWithFlattening as Flattening\n",
    }
    plain, changed = strangers.load("decoder"), strangers.load("decoder", "", edits)
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    (before, wide), (after, narrow) = strangers.counted(plain, *files), strangers.counted(changed, *files)
    assert same_weights(before, after, plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama"))
    one, other = strangers.perplexities(capsys)
    assert other == pytest.approx(one, rel=1e-4)
    assert narrow < wide
    del edits["from_pretrained(model_path).to(device)"]
    leaky = strangers.load("decoder", "", edits).main(*files)
    assert not same_weights(before, leaky, plain.AutoModelForCausalLM.from_pretrained(stranger_files / "llama"))


@pytest.mark.parametrize(("ratio", "holds"), [(1.0, True), (1.01, False)])
def test_claims_are_judged(ratio, holds):
    rows = bounds.claims(LESSON.name, {"padding_share_512": 0.7, "loss_ratio": ratio}, {})
    judged = [row["verdict"] for row in rows if not row["verdict"].startswith("open")]
    assert [verdict == "holds (measured)" for verdict in judged] == [holds]


def test_states_of_the_layers_are_not_handed_out_in_packs():
    ids, mask = reviews()
    model = regressor().base_model
    assert model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    packed(model)
    assert model(ids, attention_mask=mask, output_hidden_states=True).hidden_states is None


def test_a_loss_that_counts_too_much_is_seen():
    """A flattened loss that counts each text's first token too is another."""
    from transformers import DataCollatorWithFlattening

    from tutorial_utils import shapes

    model, tokenizer = shapes.model("decoder", 4).eval(), data.tokenizer()
    rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer(["one", "some more words than one"])["input_ids"]]
    flat = DataCollatorWithFlattening()(rows)
    right = model(input_ids=flat["input_ids"], position_ids=flat["position_ids"], labels=flat["labels"]).loss
    first_counts = flat["labels"].where(flat["labels"] != -100, flat["input_ids"])
    wrong = model(input_ids=flat["input_ids"], position_ids=flat["position_ids"], labels=first_counts).loss
    assert abs(right / wrong - 1) > 1e-3

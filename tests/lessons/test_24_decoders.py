import pytest
import strangers
import torch
from stranger import Ratings
from transformers import BatchEncoding

from notebooks import copied, definition, lesson, proof_fails, run, source
from tutorial_utils import bounds, measure, models

LESSON = lesson("24")
COPIED = copied(LESSON)
chunked_loss = COPIED["chunked_loss"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hidden.split(chunk), labels.split(chunk)", "hidden.split(10**6), labels.split(10**6)"),
        ("total = total + checkpoint(", "total = checkpoint("),
        ("head, some, right, use_reentrant", "head, some, right.roll(1), use_reentrant"),
        ("head, some, right, use_reentrant", "head, (some + some.detach()) / 2, right, use_reentrant"),
    ],
    ids=["whole logits", "the last chunk only", "labels out of step", "half the gradient below the head"],
)
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def stranger(**settings):
    """A Llama of another size, its head tied to the embeddings or not."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=5000, **sizes, **settings)).train()


def batch_of(count=24):
    ids = Ratings(count).ids
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(ids.shape[1]) < 9, -100)}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("chunk", [1, 100, 256, 10_000])
def test_copied(tie, chunk):
    model, batch = stranger(tie_word_embeddings=tie), batch_of(4 if chunk == 1 else 24)
    expected, found = model(**batch).loss, chunked_loss(model, batch, chunk=chunk)
    assert torch.isclose(found, expected, rtol=1e-6)
    for one, other in zip(gradients(model, found), gradients(model, expected), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


def test_it_keeps_the_logits_of_one_chunk():
    model, batch = stranger(), batch_of(64)
    matrix = batch["labels"].numel() * 5000 * 4
    whole, chunked = (
        measure.memory(lambda loss_of=loss_of: loss_of(model, batch).backward(), model, None, batch).peak
        for loss_of in (lambda model, batch: model(**batch).loss, chunked_loss)
    )
    assert whole - chunked > 2 * matrix, (whole, chunked, matrix)


def test_by_tokens_the_parts_make_the_whole():
    model, batch = stranger(), batch_of()
    batch["labels"][:8, 20:] = -100
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 8), slice(8, 24))]
    count = (batch["labels"][:, 1:] != -100).sum()
    total = sum(chunked_loss(model, part, num_tokens=count) for part in parts)
    assert torch.isclose(total, model(**batch).loss, rtol=1e-6)


def test_the_pages_loops_for_accumulation_and_validation():
    """Windows of two batches, the last of one: the steps are those of a loop with a window's rows in one batch."""
    parts = [{name: tensor[rows] for name, tensor in batch_of().items()} for rows in torch.arange(24).split([6, 2, 16])]
    parts[0]["labels"][:, 20:] = -100
    plain, changed = stranger(), stranger()
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, changed))
    for window in (parts[:2], parts[2:]):
        whole = {name: torch.cat([part[name] for part in window]) for name in window[0]}
        plain(**whole).loss.backward()
        one.step()
        one.zero_grad()
    given = COPIED | {"loader": [dict(parts[0]), *map(BatchEncoding, parts[1:])], "accumulation": 2}
    step = "    optimizer.step()\n    optimizer.zero_grad()\n"
    run(LESSON.fenced("islice") + step, given | {"model": changed, "optimizer": other})
    assert strangers.same_weights(plain, changed, stranger())

    said = {"total": 0, "count": 0, "chunked_loss": chunked_loss, "model": changed.eval()}
    with torch.no_grad():
        for part in parts:
            run(LESSON.fenced("total, count"), said := said | {"batch": part})
        expected = changed(**batch_of() | {"labels": torch.cat([part["labels"] for part in parts])}).loss
    assert said["total"] / said["count"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_pages_loops_pass_over_what_has_no_labels():
    model, batch = stranger(), batch_of(4)
    empty = BatchEncoding(batch | {"labels": torch.full_like(batch["labels"], -100)})
    run(LESSON.fenced("islice"), COPIED | {"loader": [empty], "accumulation": 2, "model": model})
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    said = {"total": 0, "count": 0, "chunked_loss": chunked_loss, "model": model, "batch": empty}
    run(LESSON.fenced("total, count"), said)
    assert (said["total"], said["count"]) == (0, 0)


def test_under_autocast_and_a_scaler():
    model, batch = stranger(), batch_of()
    found = []
    for loss_of in (lambda model, batch: model(**batch).loss, chunked_loss):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        found.append((loss.item(), gradients(model, torch.amp.GradScaler("cpu").scale(loss))))
    (expected, whole), (reached, chunked) = found
    assert reached == pytest.approx(expected, rel=1e-3)
    apart = torch.stack([(a - b).norm() for a, b in zip(whole, chunked)]).norm()
    assert apart < 0.02 * torch.stack([a.norm() for a in whole]).norm()


def test_under_accelerate_half_precision_is_asked_for():
    """Its autocast stands in the model's own forward pass, which is gone past."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator, types = Accelerator(mixed_precision="bf16", cpu=True), []
    model = accelerator.prepare(stranger())
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *call: types.append(call[-1].dtype))
    chunked_loss(model, batch_of())
    with accelerator.autocast():
        chunked_loss(model, batch_of())
    AcceleratorState._reset_state(True)
    assert types == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("asked", [True, False], ids=["as the page has it", "without autocast"])
def test_in_a_trainer_half_precision_is_asked_for(asked, tmp_path):
    """The Trainer leaves autocast to Accelerate, in every version."""
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    (cell,) = (cell for cell in LESSON.code if cell["id"] == "trainer")
    code, kept = definition(cell, "ChunkedTrainer"), "with self.accelerator.autocast():"
    assert kept in code
    namespace = {**COPIED, "Trainer": Trainer}
    run(code.replace(kept, kept if asked else "if True:"), namespace)
    model, types = stranger(), []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *call: types.append(call[-1].dtype))
    rows = [{name: tensor[0] for name, tensor in batch_of(1).items()}]
    how = dict(output_dir=tmp_path, max_steps=1, bf16=True, use_cpu=True, report_to="none", save_strategy="no")
    AcceleratorState._reset_state(True)
    namespace["ChunkedTrainer"](model, TrainingArguments(**how, disable_tqdm=True), train_dataset=rows).train()
    AcceleratorState._reset_state(True)
    assert types == [torch.bfloat16 if asked else torch.float32]


def test_of_a_long_prompt_the_end_is_kept():
    namespace = {}
    for cell in LESSON.needed_for("labels"):
        run(source(cell), namespace)
    tokenizer, words = namespace["tokenizer"], " ".join(f"a{n}" for n in range(60))
    row = namespace["encoded"]({"prompt": words, "completion": "the answer"}, 32)
    whole = tokenizer(words, add_special_tokens=False).input_ids
    answer = [*tokenizer("the answer", add_special_tokens=False).input_ids, tokenizer.sep_token_id]
    assert row["input_ids"] == [tokenizer.cls_token_id, *whole[-15:], *answer]
    assert row["labels"] == [-100] * 16 + answer


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=["head frozen", "head saved"])
def test_under_adapters(options):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **options)
    model, batch = peft.get_peft_model(stranger(), settings), batch_of()
    expected, found = model(**batch).loss, chunked_loss(model, batch)
    assert torch.isclose(found, expected, rtol=1e-6)
    pairs = list(zip(gradients(model, found), gradients(model, expected), strict=True))
    assert len(pairs) > 10 and all(torch.allclose(*pair, rtol=1e-4, atol=1e-7) for pair in pairs)


@pytest.mark.parametrize("name", ["gpt2", "qwen3-0.6b", "gemma-3-1b"])
def test_other_families(name):
    small = {"gpt2": dict(n_embd=32, n_layer=1, n_head=2)}
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    torch.manual_seed(0)
    settings = small.get(name, sizes | dict(num_key_value_heads=1))
    settings |= dict(vocab_size=5000, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model, batch = models.without_dropout(models.build(name, causal=True, **settings)), batch_of()
    assert torch.isclose(chunked_loss(model, batch), model(**batch).loss, rtol=1e-6)


def test_peft_makes_head_and_embeddings_fp32():
    """And for Llama 3.1 8B that is 2 GiB more, as the page says."""
    peft = pytest.importorskip("peft")
    model = peft.prepare_model_for_kbit_training(stranger().half(), use_gradient_checkpointing=False)
    tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert {table.dtype for table in tables} == {torch.float32}
    config = models.config("llama-3.1-8b")
    assert not config.tie_word_embeddings
    assert 2 * 2 * config.vocab_size * config.hidden_size / 2**30 == pytest.approx(2, rel=0.05)


AFTER_THE_HEAD = {  # as the page says it
    "cohere": lambda logits, settings: logits * settings.logit_scale,
    "granite": lambda logits, settings: logits / settings.logits_scaling,
    "gemma2": lambda logits, settings: (
        settings.final_logit_softcapping * torch.tanh(logits / settings.final_logit_softcapping)
    ),
}


def of_family(kind, **options):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=5000)
    settings = AutoConfig.for_model(kind, **sizes, num_key_value_heads=1, pad_token_id=0, bos_token_id=1, **options)
    model = AutoModelForCausalLM.from_config(settings).eval()
    with torch.no_grad():  # as far from uniform as a pretrained head is
        model.get_output_embeddings().weight.mul_(20)
    return model


@pytest.mark.parametrize("kind", AFTER_THE_HEAD)
def test_what_comes_after_the_head_is_seen_by_the_pages_check_and_mended_by_its_hook(kind):
    options = {"granite": {"logits_scaling": 8.0}, "cohere": {"eos_token_id": 2}}.get(kind, {})
    model, batch = of_family(kind, **options), batch_of()
    check = "assert abs(chunked_loss(model, batch) / model(**batch).loss - 1) < 1e-4"
    assert any(check in "".join(cell["source"]) for cell in LESSON.part_one)
    with pytest.raises(AssertionError):
        exec(check, {"chunked_loss": chunked_loss, "model": model, "batch": batch})
    expected = model(**batch).loss
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, logits: AFTER_THE_HEAD[kind](logits, model.config))
    assert torch.isclose(chunked_loss(model, batch), expected, rtol=1e-5)


def test_compiled_layers_stay_compiled_and_a_compiled_model_is_gone_past():
    import torch._dynamo.testing

    def graphs(compile_it):
        model, counter = of_family("llama"), torch._dynamo.testing.CompileCounter()
        compile_it(model, counter)
        chunked_loss(model, batch_of()).backward()
        torch._dynamo.reset()
        return counter.frame_count

    assert graphs(lambda model, counter: model.compile(backend=counter)) == 0
    assert graphs(lambda model, counter: [part.compile(backend=counter) for part in model.base_model.layers])


def test_rows_without_a_label_cost_nothing_where_they_are_left_out():
    """The line that the solution names."""
    line = "hidden, labels = hidden[labels != -100], labels[labels != -100]"
    assert any(line in "".join(cell["source"]) for cell in LESSON.part_one)
    source = LESSON.source("copy").replace("    total = 0.0\n", f"    {line}\n    total = 0.0\n")
    exec(source, less := {})
    model, batch, rows = of_family("llama"), batch_of(), []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    loss = less["chunked_loss"](model, batch)
    assert sum(rows) == (batch["labels"][:, 1:] != -100).sum() < batch["labels"].numel()
    assert torch.isclose(loss, chunked_loss(model, batch), rtol=1e-6)


def test_in_a_strangers_decoder(stranger_files, capsys):
    """One line in training and one in validation: the same perplexity and the same weights."""
    edits = {
        "        loss = model(**batch).loss\n": "        loss = chunked_loss(model, batch)\n",
        "total + model(**batch).loss.item() * tokens": "total + chunked_loss(model, batch).item() * tokens",
    }
    plain, changed = strangers.load("decoder"), strangers.load("decoder", LESSON.source("copy"), edits)
    files = [stranger_files / name for name in ("llama", "bert", "train.jsonl", "valid.jsonl")]
    before, expected = plain.main(*files), strangers.perplexities(capsys)
    after, found = changed.main(*files), strangers.perplexities(capsys)
    assert found == pytest.approx(expected, rel=1e-3) and len(found) == 1
    start = plain.AutoModelForCausalLM.from_pretrained(files[0])
    assert strangers.same_weights(before, after, start)

    ids = torch.randint(5, 500, (16, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids > 400, -100)}

    def peak(script, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        return measure.memory(lambda: script.train(model, [batch], optimizer, scheduler), model, optimizer).peak

    assert peak(changed, after) < 0.7 * peak(plain, before)


CLAIMS = bounds.facts("24_decoders")["claims"]


@pytest.mark.parametrize("figure", ["gemma_2_forward_mib", "gemma_2_both_mib", "liger_baseline_mib"])
def test_a_claim_that_is_wrong_does_not_hold(figure):
    claim = next(claim for claim in CLAIMS.values() if claim["figure"] == figure)
    others = {one["figure"]: one["claimed"] for one in CLAIMS.values()}

    def verdict(factor):
        rows = bounds.claims("24_decoders", {"memory_ratio": 0.4}, others | {figure: factor * claim["claimed"]})
        return next(row["verdict"] for row in rows if row["claim"].startswith(f"{claim['claim']} ({claim['source']}"))

    assert "holds" in verdict(1.0)
    assert "holds" not in verdict(1.05) and "holds" not in verdict(0.95)

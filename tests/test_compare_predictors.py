"""The comparison of predictors: one case, its arithmetic, its refusals, and README without it."""

import json
import sys

import compare_predictors as compare
import pytest
import stamp

CASE = compare.CASES["BERT sdpa"] | dict(batch=2, length=32)


@pytest.fixture(scope="module")
def measured():
    return compare.real(CASE)


OF_ANSWERS = [
    ("step_memory", 0.01),
    ("MemTracker", 0.05),
    ("VRAMGuard", 0.25),
    ("predict_memory", 0.1),
    ("estimate-memory", 0.2),  # so short a step keeps next to no activations
]
NEEDS = {"VRAMGuard": "torch_preflight", "predict_memory": "kitsune", "estimate-memory": "accelerate"}


@pytest.mark.parametrize(("name", "within"), OF_ANSWERS)
def test_a_predictor_answers(name, within, measured):
    if name in NEEDS:
        needed = NEEDS[name]
        pytest.importorskip(needed, reason=f"pip install {compare.NEEDS[needed]}", exc_type=ImportError)
    answer = compare.ask(compare.PREDICTORS[name], CASE, rounds=1)
    assert answer["bytes"] == pytest.approx(measured, rel=within) and answer["seconds"] > 0


def test_kitsune_sees_the_length():
    """Without the wrapper its answer would be that of a formula that all but ignores length."""
    pytest.importorskip("kitsune", reason="pip install torch-kitsune==0.7.0", exc_type=ImportError)
    for case in (CASE, compare.CASES["Llama sdpa"] | dict(batch=2, length=32)):
        short, long = (compare.kitsune(case | dict(length=length))[0].activation_bytes for length in (32, 64))
        assert long == pytest.approx(2 * short, rel=0.1)


def test_checkpointing_is_what_kitsune_says_it_saves():
    pytest.importorskip("kitsune", reason="pip install torch-kitsune==0.7.0", exc_type=ImportError)
    found, saved = compare.kitsune(CASE | dict(checkpointing=1))
    assert saved == pytest.approx(0.7 * found.activation_bytes, abs=1) and compare.kitsune(CASE)[1] == 0


def test_estimate_memory_counts_no_activations():
    pytest.importorskip("accelerate", reason="pip install accelerate", exc_type=ImportError)
    assert compare.estimate_memory(CASE) == compare.estimate_memory(CASE | dict(batch=8, length=128))


@pytest.mark.filterwarnings("ignore:global module forward hook")
def test_what_cannot_be_answered_has_a_reason():
    answer = compare.ask(compare.mem_tracker, CASE | dict(freeze_layers=2))
    assert answer == {"reason": "RuntimeError: cannot register a hook on a tensor that doesn't require gradient"}


def test_summary():
    answers = [{"bytes": 1, "error": error, "seconds": 1.0} for error in (-0.3, 0.1, 0.2)] + [{"reason": "x"}]
    cases = [{"predictors": {"a": answer}} for answer in answers]
    expected = {"answered": 3, "cases": 4, "median_error": 0.2, "worst_error": 0.3, "seconds": 1.0}
    assert compare.summary(cases, "a") == expected
    assert compare.summary(cases[3:], "a")["median_error"] is None


@pytest.mark.parametrize("package", ["torch-preflight==0.5.0", "torch-kitsune==0.7.0"])
def test_what_is_missing_is_named(package, monkeypatch):
    for module, needed in list(compare.NEEDS.items()):
        if needed == package:
            monkeypatch.setitem(sys.modules, module, None)
        else:
            monkeypatch.delitem(compare.NEEDS, module)
    with pytest.raises(SystemExit, match=f"pip install {package}"):
        compare.main([])


def test_what_did_not_run_has_its_published_error_and_nothing_measured():
    content = json.loads(stamp.COMPARED.read_text(encoding="utf-8"))
    assert content["summary"]["LLMem"] == {"not_run": "needs a GPU", "published": compare.PUBLISHED["LLMem"]}
    row = next(line for line in stamp.predictors_table(content).splitlines() if line.startswith("| LLMem "))
    assert row == f"| LLMem | not run: needs a GPU | – | – | {compare.PUBLISHED['LLMem']} | – | – |"


def test_without_a_comparison_the_readme_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(stamp, "COMPARED", tmp_path / "compared.json")
    readme = stamp.ROOT / "README.md"
    stamped, now = (text.split("<!-- predictors -->")[1] for text in (stamp.stamped("")[readme], readme.read_text()))
    assert stamped == now

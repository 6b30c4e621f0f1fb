"""The comparison of predictors: one case, its arithmetic, its refusals, and README without it."""

import sys

import compare_predictors as compare
import pytest
import stamp

CASE = compare.CASES["BERT sdpa"] | dict(batch=2, length=32)


@pytest.fixture(scope="module")
def measured():
    return compare.real(CASE)


@pytest.mark.parametrize(("name", "within"), [("step_memory", 0.01), ("MemTracker", 0.05), ("VRAMGuard", 0.25)])
def test_a_predictor_answers(name, within, measured):
    if name == "VRAMGuard":
        pytest.importorskip("torch_preflight", reason="pip install torch-preflight==0.5.0", exc_type=ImportError)
    answer = compare.ask(compare.PREDICTORS[name], CASE, rounds=1)
    assert answer["bytes"] == pytest.approx(measured, rel=within) and answer["seconds"] > 0


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


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_preflight", None)
    with pytest.raises(SystemExit, match="pip install torch-preflight==0.5.0"):
        compare.main([])


def test_without_a_comparison_the_readme_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(stamp, "COMPARED", tmp_path / "compared.json")
    readme = stamp.ROOT / "README.md"
    stamped, now = (text.split("<!-- predictors -->")[1] for text in (stamp.stamped("")[readme], readme.read_text()))
    assert stamped == now

"""README's tables of techniques: what fits, and what each costs."""

import itertools
import json

import decide
import pytest
import stamp
from test_forks import EVERY

from notebooks import lessons
from tutorial_utils import predict

ANSWERS = json.loads(decide.TARGET.read_text())["answers"]


def test_the_largest_fits_and_twice_as_many_do_not():
    case = dict(model="tiny", length=512, card="0.75 GiB")
    found = decide.largest(case, {})
    fitting, larger = (
        predict.step_memory(batch=n * found["micro_batch"], padded=True, accumulate=2, **case) for n in (1, 2)
    )
    assert fitting.fits and not larger.fits and fitting.card_bytes == found["card_bytes"]


def test_where_nothing_fits_it_says_what_one_text_needs():
    case = dict(model="tiny", length=512, card="0.55 GiB")
    one = predict.step_memory(batch=1, padded=True, accumulate=2, **case)
    assert decide.largest(case, {}) == {"micro_batch": 0, "card_bytes": one.card_bytes} and not one.fits


def test_the_committed_answers_are_to_these_questions():
    asked = {
        name: {title: list(techniques) for title in cases} for name, (techniques, cases) in decide.QUESTIONS.items()
    }
    assert asked == {name: {title: list(found) for title, found in cases.items()} for name, cases in ANSWERS.items()}, (
        "run python scripts/decide.py"
    )


def cells():
    """Every cell of the tables with COURSE_TEST_ALL=1, else one."""
    for name, (techniques, cases) in decide.QUESTIONS.items():
        for title, technique in itertools.product(cases, techniques):
            if EVERY or ("4 GiB" in title and technique == "LoRA of rank 8, fp16"):
                yield name, title, technique


@pytest.mark.parametrize(("name", "title", "technique"), cells())
def test_a_committed_answer_is_what_is_predicted(name, title, technique):
    techniques, cases = decide.QUESTIONS[name]
    found, committed = decide.largest(cases[title], techniques[technique]), ANSWERS[name][title][technique]
    assert found["micro_batch"] == committed["micro_batch"]
    assert found["card_bytes"] == pytest.approx(committed["card_bytes"], rel=0.02)


def test_every_lesson_says_what_it_changes_and_where_it_does_not_help():
    for lesson in lessons():
        for key in ("changes", "no_help"):
            assert lesson.course.get(key), f"{lesson.name} needs {key!r} in its facts"


def test_a_technique_is_shown_with_its_recorded_figures():
    shown = stamp.techniques_table([lesson.name for lesson in lessons()])
    (recording,) = (content for content in stamp.bounds.recordings() if content["machine"]["device"] == "cpu")
    figures = recording["lessons"]["05_gradient_checkpointing"]["figures"]
    (row,) = (line for line in shown.splitlines() if "05_gradient_checkpointing" in line)
    assert f"| CPU | × {figures['memory_ratio']:.2f} | × {figures['time_ratio']:.2f} |" in row
    assert "nothing: the same gradient to the bit" in row and "00_memory_anatomy" not in shown

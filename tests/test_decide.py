"""README's tables of techniques: what fits, and what each costs."""

import itertools
import json

import decide
import pytest
import stamp
from matplotlib.image import imread
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


FEW = [
    ("4 GiB", "LoRA of rank 8, fp16"),
    ("1024", "fp16, checkpointing, 8-bit AdamW"),
    ("A100", "all weights, 16 bit, checkpointing, 8-bit AdamW"),
]  # a card's rules, another model's and 16-bit weights: where the predictor changes, one of them does


def cells():
    """Every cell of the tables with COURSE_TEST_ALL=1, else three."""
    for name, (techniques, cases) in decide.QUESTIONS.items():
        for title, technique in itertools.product(cases, techniques):
            if EVERY or any(part in title and technique == row for part, row in FEW):
                yield name, title, technique


def test_the_few_are_in_the_tables():
    assert EVERY or len([*cells()]) == len(FEW), "FEW names what the tables no longer have"


@pytest.mark.parametrize(("name", "title", "technique"), cells())
def test_a_committed_answer_is_what_is_predicted(name, title, technique):
    techniques, cases = decide.QUESTIONS[name]
    found, committed = decide.largest(cases[title], techniques[technique]), ANSWERS[name][title][technique]
    assert found["micro_batch"] == committed["micro_batch"]
    assert found["card_bytes"] == pytest.approx(committed["card_bytes"], rel=0.02)


def test_the_picture_that_readme_opens_with_says_its_figures():
    step = dict(model="bert-large-uncased", batch=decide.BATCH, length=128, card="T4")
    found = (decide.predicted(decide.FULL[name], **step).peak / 2**30 for name in decide.PICTURED.values())
    before, after = (f"{gib:.1f}" for gib in found)
    assert f'memory over time: before {before} GiB, after {after}">' in (decide.ROOT / "README.md").read_text()


def test_every_lesson_says_what_it_changes_when_to_use_it_and_where_it_does_not_help():
    for lesson in lessons():
        for key in ("changes", "when", "no_help"):
            assert lesson.course.get(key), f"{lesson.name} needs {key!r} in its facts"


def test_a_lesson_is_shown_with_its_recorded_figures():
    """Memory of BERT-large on a virtual T4, time of a real GPU; of what no GPU has, the prediction and the CPU's."""
    (virtual,) = (one for one in stamp.bounds.recordings("real-size") if "Tesla T4" in one["machine"]["name"])
    (real,) = (one for one in stamp.bounds.recordings() if one["machine"]["name"].startswith("NVIDIA H100"))
    name = "05_gradient_checkpointing"
    memory, time = (one["lessons"][name]["figures"] for one in (virtual, real))
    row = stamp.lessons_table([name]).splitlines()[-1]
    assert f"| × {memory['memory_ratio']:.2f} | × {time['time_ratio']:.2f}, H100 |" in row
    assert "nothing: the same gradient to the bit" in row
    on_a_cpu = ({"name": "CPU", "device": "cpu"}, {"figures": {"bert_large_memory_ratio": 0.5, "time_ratio": 2.0}})
    assert (stamp.memory_of([on_a_cpu]), stamp.time_of([on_a_cpu])) == ("× 0.50, predicted", "× 2.00, CPU")
    assert stamp.memory_of([]) == stamp.time_of([]) == "–"


def test_readme_opens_with_the_picture(tmp_path):
    """Its bytes differ from one matplotlib to the next; what it shows is the prediction."""
    decide.picture(tmp_path / "made.png")
    there, made = (imread(path) for path in (decide.PICTURE, tmp_path / "made.png"))
    assert there.shape == made.shape and abs(there - made).mean() < 0.02, "python scripts/decide.py --picture"
    first = (decide.ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[1]
    assert decide.PICTURE.relative_to(decide.ROOT).as_posix() in first

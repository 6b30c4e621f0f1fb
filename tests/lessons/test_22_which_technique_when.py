import pytest
import strangers  # noqa: F401 the technique in each of its scripts

from notebooks import copied, lesson, proof_fails

LESSON = lesson("22")
COPIED = copied(LESSON)


@pytest.mark.parametrize(("old", "new"), [])
def test_proof_can_fail(old, new):
    proof_fails(LESSON, old, new)


def test_copied():
    pytest.fail("put the copied cell into a script that the lesson does not know, and assert its effect")

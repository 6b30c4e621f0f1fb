import pytest


@pytest.fixture(autouse=True)
def as_in_a_lesson(as_in_a_lesson):
    """All tests of lessons."""

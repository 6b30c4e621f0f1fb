import pytest

from tutorial_utils import kernels, machine


@pytest.fixture(autouse=True)
def as_in_a_lesson(own_environment):
    """As a lesson's first cell does, where the CPU emulates bf16."""
    if machine.emulates(machine.facts()):
        kernels.multiply_in_fp32()

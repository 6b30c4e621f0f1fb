"""What is accepted? `accept`: one form for every error about what was given; `one_of` words, `figures` by name."""

import numbers
import sys


def accept(right: bool, name: str, given: object, accepted: str):
    """ValueError, with the first 100 characters of what was given and with what is accepted, unless it is right."""
    if not right:
        raise ValueError(f"{name} was {given!r:.100}; accepted: {accepted}")


def one_of(words, name: str, given: object):
    """ValueError unless it is one of these words. An array, which equals nothing and everything, is none."""
    accept(isinstance(given, str) and given in words, name, given, ", ".join(words))


def figures(name: str, given: object):
    """ValueError unless it is a dict of finite numbers, or None where there is none."""
    finite = isinstance(given, dict) and all(
        value is None or isinstance(value, numbers.Real) and abs(value) <= sys.float_info.max
        for value in given.values()
    )
    accept(finite, name, given, "finite numbers by name, or None")

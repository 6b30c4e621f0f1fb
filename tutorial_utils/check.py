"""What is accepted? `accept`: one form for every error about what was given."""


def accept(right: bool, name: str, given: object, accepted: str):
    """ValueError, with the first 100 characters of what was given and with what is accepted, unless it is right."""
    if not right:
        raise ValueError(f"{name} was {given!r:.100}; accepted: {accepted}")

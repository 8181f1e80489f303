"""A study over many machines."""


def sweep(*a: object, **k: object) -> None:
    """Todo."""

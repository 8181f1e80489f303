"""Colours of the figures, for light and for dark paper: each method has its own in all of them."""

from steradian.lab.config import METHODS

__all__ = ["METHOD_COLOURS", "Colour", "ramp", "usual"]

Colour = tuple[str, str]
"""On light paper, and on dark."""

# After Okabe and Ito, whose colours are told apart by readers of any eyesight.
METHOD_COLOURS: dict[str, Colour] = dict(
    zip(
        METHODS,
        (
            ("#4d4d4d", "#c8c8c8"),  # SGD-M
            ("#d55e00", "#ff8c42"),  # Adam
            ("#d19a00", "#f0c04c"),  # AdamW†
            ("#009e73", "#2fcb9d"),  # AdamG†
            ("#45a5de", "#8ed0f7"),  # Adam w/o (a)
            ("#0055a4", "#5b9cf5"),  # Adam w/o (ab)
            ("#b5498a", "#e88fc2"),  # Adam w/o (abc)
            ("#7a5195", "#b99be6"),  # SGD
            ("#117a8b", "#4fc6d8"),  # AdaGradG
            ("#a61e4d", "#f27a9b"),  # AdaGrad
        ),
        strict=True,
    )
)
_DAY = ((253, 187, 76), (214, 72, 92), (63, 27, 110))
_NIGHT = ((255, 226, 140), (240, 105, 110), (140, 100, 230))


def usual(number: int) -> Colour:
    """The colour of the n-th line of a figure whose lines are no methods."""
    return list(METHOD_COLOURS.values())[1:][number % (len(METHOD_COLOURS) - 1)]


def ramp(share: float) -> Colour:
    """A colour between the first (0) and the last (1) of an ordered set, such as layers by depth.

    >>> ramp(0.0), ramp(1.0)
    (('#fdbb4c', '#ffe28c'), ('#3f1b6e', '#8c64e6'))
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")
    half, rest = divmod(2 * share, 1) if share < 1 else (1.0, 1.0)
    made = []
    for stops in (_DAY, _NIGHT):
        start, end = stops[int(half)], stops[int(half) + 1]
        made.append("#" + "".join(f"{round(a + rest * (b - a)):02x}" for a, b in zip(start, end, strict=True)))
    return made[0], made[1]

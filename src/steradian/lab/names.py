"""Names that people type: known ones are found whatever their case, signs and daggers."""

import re
from collections.abc import Iterable, Sequence

__all__ = ["chosen", "meant"]


def meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that letters and digits agree with; None where there is none.

    >>> known = ("Adam", "AdamW†", "Adam w/o (ab)")
    >>> meant("adamw", known), meant("Adam-wo-ab", known), meant("Adam without (ab)", known), meant("Lion", known)
    ('AdamW†', 'Adam w/o (ab)', 'Adam w/o (ab)', None)
    """
    every = list(known)
    return name if name in every else next((each for each in every if _bare(each) == _bare(name)), None)


def chosen(what: str, names: Sequence[str] | str | None, known: Sequence[str]) -> list[str]:
    """The known names that are meant, all of them where none is given.

    Raises:
        ValueError: a name is not known; it is said with those that are.
    """
    if not names:
        return list(known)
    given = [names] if isinstance(names, str) else list(names)
    found = [meant(name, known) for name in given]
    if unknown := [name for name, each in zip(given, found, strict=True) if each is None]:
        raise ValueError(f"{what} must be among {', '.join(known)}, got {', '.join(unknown)}")
    return [name for name in found if name is not None]


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).replace("without", "wo")

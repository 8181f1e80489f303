"""Names of parameters for people to read: with repetition folded. Needs no torch."""

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby

__all__ = ["fold", "plural", "ranges"]

_NUMBER = re.compile(r"(?<!\w)(0|[1-9]\d*)(?!\w)")
_BETWEEN = re.compile(r"[\s(){},]")
_FEWEST = 3  # names that differ by a number alone are folded if there are this many

Slot = tuple[int, int]  # the place of a number in a template: which of its numbers, and what is added to it
Template = tuple[str | Slot, ...]
Box = tuple[tuple[int, ...], ...]  # the values of each of a template's numbers; it stands for all combinations of them


def plural(number: int, noun: str) -> str:
    """A number of things: "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def fold(texts: Sequence[str], alike: Sequence[Hashable] | None = None) -> list[tuple[str, list[int]]]:
    """Texts of names that differ by numbers alone as one text with ranges, each with the positions of its texts.

    A text may hold several names, such as a parameter and its reason; numbers at the same place of two names then
    change together. The numbers of a folded text are a full product: no name is in it that was not given. Texts are
    folded only if what `alike` has for them, such as their shapes, is equal.

    >>> fold(["layers.0.up layers.1.norm", "layers.1.up layers.2.norm", "head", "layers.2.up layers.3.norm"])
    [('layers.{0-2}.up layers.{1-3}.norm', [0, 1, 3]), ('head', [2])]
    """
    kinds: dict[tuple[Template, Hashable], list[tuple[Box, list[int]]]] = {}
    for position, (text, kind) in enumerate(zip(texts, alike or [None] * len(texts), strict=True)):
        template, numbers = _parse(text)
        kinds.setdefault((template, kind), []).append((tuple((number,) for number in numbers), [position]))
    folded = []
    for (template, _), boxes in kinds.items():
        for slot in reversed(range(len(boxes[0][0]))):
            merged: dict[Box, tuple[set[int], list[int]]] = {}
            for box, positions in boxes:
                values, all_positions = merged.setdefault(box[:slot] + box[slot + 1 :], (set(), []))
                values.update(box[slot])
                all_positions += positions
            boxes = [((*o[:slot], tuple(sorted(v)), *o[slot:]), p) for o, (v, p) in merged.items()]
        for box, positions in boxes:
            if len(positions) < _FEWEST:
                folded += [(texts[position], [position]) for position in positions]
            else:
                folded.append((_text(template, box), sorted(positions)))
    return sorted(folded, key=lambda pair: pair[1][0])


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order, runs of three or more as a range.

    >>> ranges([0, 1, 2, 3, 5, 7, 8])
    '0-3,5,7,8'
    """
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) >= _FEWEST else ",".join(map(str, r)) for r in runs)


def _parse(text: str) -> tuple[Template, tuple[int, ...]]:
    """A text cut at the numbers of its names, and those numbers that are not given by an earlier one."""
    parts: list[str | Slot] = []
    numbers: list[int] = []
    first: dict[str, int] = {}  # what stands before a number in its name → which of the numbers it is
    before = ""
    for k, part in enumerate(_NUMBER.split(text)):
        if k % 2 == 0:
            parts.append(part)
            before = _BETWEEN.split(before + part)[-1]
            continue
        if before not in first:
            first[before] = len(numbers)
            numbers.append(int(part))
        parts.append((first[before], int(part) - numbers[first[before]]))
        before += "#"
    return tuple(parts), tuple(numbers)


def _text(template: Template, box: Box) -> str:
    """The template with its numbers filled in, several in braces."""
    parts = []
    for part in template:
        text = part if isinstance(part, str) else ranges(number + part[1] for number in box[part[0]])
        parts.append(text if isinstance(part, str) or text.isdigit() else f"{{{text}}}")
    return "".join(parts)

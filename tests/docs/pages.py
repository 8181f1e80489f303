"""The Python in Markdown pages: found, run in order, and what it prints compared with what the page shows."""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]

FENCE = re.compile(r"^```(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = {"python", "py", "python3", "pycon"}
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A block of Python, where it begins, and what the page says that it prints."""

    text: str
    line: int
    shown: str | None = None


def blocks(page):
    """The blocks of a page; an `output` block belongs to the one right before it."""
    text = page.read_text(encoding="utf-8")
    found = []
    end = None
    for fence in FENCE.finditer(text):
        if fence["language"] == "output":
            between = None if end is None else text[end : fence.start()].strip()
            assert between == "", f"{page}: an output block follows no Python"
            found[-1] = Block(found[-1].text, found[-1].line, fence["text"])
        end = fence.end() if fence["language"] in PYTHON else None
        if fence["language"] in PYTHON:
            found.append(Block(fence["text"], text.count("\n", 0, fence.start()) + 2))
    return found


def run(page, prepare):
    """Run the blocks of a page in one namespace; prepare(block, names) comes before each. Returns the namespace."""
    names = {"__name__": "__page__"}
    for block in blocks(page):
        prepare(block.text, names)
        # Line numbers of the page in tracebacks.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if block.shown is not None:
            difference = unlike(block.shown, printed.getvalue())
            assert difference is None, f"{page}:{block.line} {difference}; it printed\n{printed.getvalue()}"
    return names


def unlike(shown, printed):
    """Where what is shown is not what was printed, else None.

    Words must be the same; numbers with a fraction or an exponent may differ by a factor of two, since they depend on
    the machine; "..." at the end stands for all further lines.
    """
    shown, printed = shown.rstrip(), printed.rstrip()
    lines, others = shown.splitlines(), printed.splitlines()
    if lines and lines[-1] == "...":
        lines.pop()
        others = others[: len(lines)]
    if len(lines) != len(others):
        return f"shows {len(lines)} lines of {len(others)}"
    for line, other in zip(lines, others, strict=True):
        words, other_words = NUMBER.sub("#", line).split(), NUMBER.sub("#", other).split()
        numbers, other_numbers = NUMBER.findall(line), NUMBER.findall(other)
        if words != other_words or not all(map(_close, numbers, other_numbers)):
            return f"shows {line!r} where {other!r} is printed"
    return None


def _close(one, other):
    if one.lstrip("+-").isdigit() and other.lstrip("+-").isdigit():
        return int(one) == int(other)
    a, b = float(one), float(other)
    return a == b or (a * b > 0 and 0.5 <= a / b <= 2)

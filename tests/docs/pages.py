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
    the machine; "…" at the end of a line stands for the rest of it, and "…" alone for any lines in between; "..." at
    the end stands for all further lines.
    """
    lines, others = shown.rstrip().splitlines(), printed.rstrip().splitlines()
    rest = bool(lines) and lines[-1] == "..."
    at, skipping = 0, False
    for line in lines[:-1] if rest else lines:
        if line == "…":
            skipping = True
            continue
        if skipping:
            at = next((k for k in range(at, len(others)) if _alike(line, others[k])), at)
        if at >= len(others) or not _alike(line, others[at]):
            return f"shows {line!r} where {others[at] if at < len(others) else 'nothing'!r} is printed"
        at, skipping = at + 1, False
    return None if rest or skipping or at == len(others) else f"shows {at} lines of {len(others)}"


def _alike(line, other):
    words, other_words = NUMBER.sub("#", line).split(), NUMBER.sub("#", other).split()
    if words and words[-1] == "…":
        words, other_words = words[:-1], other_words[: len(words) - 1]
    numbers, other_numbers = NUMBER.findall(line), NUMBER.findall(other)
    return words == other_words and all(map(_close, numbers, other_numbers))


def _close(one, other):
    if one.lstrip("+-").isdigit() and other.lstrip("+-").isdigit():
        return int(one) == int(other)
    a, b = float(one), float(other)
    return a == b or (a * b > 0 and 0.5 <= a / b <= 2)

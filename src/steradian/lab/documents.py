"""Documents whose tables and figures are made from stored results: marked regions are written anew, all else is kept.

A region stands between `<!-- begin KIND STUDY … -->` and `<!-- end KIND STUDY … -->`, each on a line of its own. KIND
is one of `fragments.KINDS`, and the studies are names of files in the folder of results.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from steradian.lab.fragments import Place, fragment
from steradian.lab.results import write_atomically

__all__ = ["regions", "write_up", "written"]

_REGION = re.compile(r"^<!-- begin (?P<name>.+?) -->\n(?P<body>.*?)^<!-- end (?P=name) -->$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"^<!-- (?:begin|end) .+? -->$", re.MULTILINE)


def regions(text: str) -> list[str]:
    r"""Names of the marked regions of a document.

    >>> regions("a\n<!-- begin table x -->\nold\n<!-- end table x -->\nb")
    ['table x']

    Raises:
        ValueError: a mark has no counterpart.
    """
    found = [match["name"] for match in _REGION.finditer(text)]
    if 2 * len(found) != len(_MARK.findall(text)):
        alone = [mark for mark in _MARK.findall(text) if not any(f" {name} -->" in mark for name in found)]
        raise ValueError(f"every begin needs an end of the same name, got {', '.join(alone or _MARK.findall(text))}")
    return found


def written(document: Path, *, results: Path, figures: Path) -> str:
    """The document with its regions made anew; the figures are written to their folder."""
    try:
        text = document.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{document} must be text in UTF-8: {error}") from error
    windows = "\r\n" in text and text.count("\r\n") == text.count("\n")
    text = text.replace("\r\n", "\n") if windows else text
    regions(text)
    place = Place(results, figures, document.parent)

    def anew(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- begin {name} -->\n\n{fragment(name, place)}\n\n<!-- end {name} -->"

    made = _REGION.sub(anew, text)
    return made.replace("\n", "\r\n") if windows else made


def write_up(documents: Sequence[Path], *, results: Path, figures: Path) -> None:
    """Write the regions of documents anew.

    Args:
        documents: files with marked regions.
        results: folder of the results.
        figures: folder for the figures.
    """
    for document in documents:
        if not document.is_file():
            raise ValueError(f"document must be a file, got {document}")
    made = {document: written(document, results=results, figures=figures) for document in documents}
    for document, text in made.items():  # all of them or none
        write_atomically(document, text.encode())

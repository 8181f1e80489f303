"""The page's sections, whose words are in assets/sections.toml."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

__all__ = ["SECTIONS", "Figure", "Section", "asset"]


@dataclass(frozen=True)
class Figure:
    """One figure of a section.

    Attributes:
        id: of its element.
        kind: the function in assets/ that draws it.
        needs: the quantities it draws; it is left out if no run has them. "rows", "paths", "pairs" and "whole" stand
            for single rows, trajectories, trajectories in several runs, and quantities of the whole run.
        title: its heading.
        caption: what the figure shows, HTML.
        controls: names of its own selectors.
        paper: the figure of the paper that it corresponds to, HTML.
        bound: a value that is drawn as a line, and its name.
    """

    id: str
    kind: str
    needs: tuple[str, ...]
    title: str = ""
    caption: str = ""
    controls: tuple[str, ...] = ()
    paper: str = ""
    bound: tuple[float, str] | None = None


@dataclass(frozen=True)
class Section:
    """A section: an id for links, a heading, an introduction, figures, and where the paper treats it."""

    id: str
    title: str
    text: str
    figures: tuple[Figure, ...]
    paper: str = ""


def asset(name: str) -> str:
    """The text of a file in assets/."""
    return (files("steradian.reporting") / "assets" / name).read_text(encoding="utf-8")


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Texts in one line, lists as tuples."""
    return {key: " ".join(of.split()) if isinstance(of, str) else tuple(of) for key, of in entry.items()}


SECTIONS = tuple(
    Section(**_plain({**section, "figures": [Figure(**_plain(figure)) for figure in section["figures"]]}))
    for section in tomllib.loads(asset("sections.toml"))["section"]
)

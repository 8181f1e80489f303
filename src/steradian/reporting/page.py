"""One self-contained HTML page from one or several recorded runs."""

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from steradian.files import write_atomically
from steradian.reporting import markup
from steradian.reporting.data import PageRun, load, page_data

__all__ = ["report"]

_NAMED = 5  # runs in the heading
SCRIPTS = ("base.js", "panels.js", "lines.js", "fields.js", "sphere.js", "main.js")


def report(runs: Sequence[str | Path], out: str | Path, *, title: str | None = None) -> Path:
    """Write a page that compares recorded runs; it opens without network.

    An existing page is replaced only when the new one is complete.

    Args:
        runs: folders that `watch` wrote, one per run.
        out: the HTML file; its folder is made.
        title: the page's heading. None: the names of the runs, of the first ones if there are many.

    Returns:
        `out`.

    Raises:
        ValueError: a path is not a run, is given twice, or holds no record; `out` is a folder or a device.
        OSError: the page cannot be written.
        TypeError: `runs` is one path.
    """
    if isinstance(runs, str | Path):
        raise TypeError(f"runs must be a list of runs, got {str(runs)!r}: write [{str(runs)!r}]")
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out must be a file such as page.html, and {out} is a folder")
    if out.exists() and not out.is_file():
        raise ValueError(f"out must be a file such as page.html, and {out} is not a file")
    loaded = load(runs)
    text = document(loaded, title or _title([run.name for run in loaded]))
    write_atomically(out, text.encode())
    return out


def document(runs: Sequence[PageRun], title: str) -> str:
    """The page's text."""
    # "</" would end the script element early, and "<!--" would begin a comment in it.
    data = json.dumps(page_data(runs), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        style=_asset("page.css"),
        runs=markup.run_cards(runs),
        verdict=markup.verdict(runs),
        alerts=markup.alerts(runs),
        groups=markup.groups(runs),
        contents=markup.contents(),
        paper=markup.paper_index(),
        sections=markup.sections(runs),
        data=data,
        plotly=get_plotlyjs(),
        script="\n".join(map(_asset, SCRIPTS)),
    )


def _asset(name: str) -> str:
    return (files("steradian.reporting") / "assets" / name).read_text(encoding="utf-8")


def _title(names: Sequence[str]) -> str:
    if len(names) > _NAMED + 1:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

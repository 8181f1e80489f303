"""One self-contained HTML page from one or several recorded runs."""

import html
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from steradian.reporting import head
from steradian.reporting.build import PageRun, block, load

__all__ = ["report"]

_NAMED = 5  # runs in the heading
SCRIPTS = ("base.js", "panels.js", "lines.js", "fields.js", "sphere.js", "main.js")


def report(paths: Sequence[str | Path], out: str | Path, *, title: str | None = None) -> Path:
    """Write a page that compares recorded runs; it opens without network.

    An existing page is replaced only when the new one is complete. A link stays one: what it points to is written.

    Args:
        paths: folders that `watch` wrote, one per run.
        out: the HTML file; its folder is made.
        title: the page's heading; without it, the names of the runs, of the first where there are many.

    Returns:
        `out`.

    Raises:
        ValueError: a path is not a run, is given twice, or holds no record; `out` is a folder or a device.
        OSError: the page cannot be written.
        TypeError: `paths` is one path.
    """
    if isinstance(paths, str | Path):
        raise TypeError(f"paths must be a list of runs, got {str(paths)!r}: write [{str(paths)!r}]")
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out must be a file such as page.html, and {out} is a folder")
    if out.exists() and not out.is_file():
        raise ValueError(f"out must be a file such as page.html, and {out} is no file")
    runs = load(paths)
    text = document(runs, title or _title([run.name for run in runs]))
    page = Path(os.path.realpath(out))
    page.parent.mkdir(parents=True, exist_ok=True)
    unfinished = page.with_name(f".{page.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, page)
    except OSError as error:  # by the name that the user knows
        raise OSError(error.errno, error.strerror, str(out)) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return out


def document(runs: Sequence[PageRun], title: str) -> str:
    """The page's text."""
    # "</" would end the script element early, and "<!--" would begin a comment in it.
    data = json.dumps(block(runs), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        style=_asset("page.css"),
        runs=head.run_cards(runs),
        alerts=head.alerts(runs),
        groups=head.groups(runs),
        contents=head.contents(),
        paper=head.paper_index(),
        sections=head.sections(runs),
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

"""One self-contained HTML page from one or several recorded runs."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, Template
from plotly.offline import get_plotlyjs

from steradian.files import write_atomically
from steradian.reporting.data import PageRun, compressed, load, page_data
from steradian.reporting.sections import alerts, all_hold, asset, bounds, cards, groups, left_out, notes, shown_sections
from steradian.watching.records import QUANTITIES, listed

__all__ = ["document", "report"]

_NAMED = 5  # runs in the heading
SCRIPTS = ("base.js", "panels.js", "lines.js", "fields.js", "sphere.js", "main.js")


def report(runs: Sequence[str | Path], out: str | Path, *, title: str | None = None) -> Path:
    """Write a page that compares recorded runs; it opens without network.

    An existing page is replaced only when the new one is complete.

    Args:
        runs: folders that `watch` wrote, or folders that contain such folders.
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
    if out.exists() and not out.is_file():
        what = "a folder" if out.is_dir() else "not a file"
        raise ValueError(f"out must be a file such as page.html, and {out} is {what}")
    write_atomically(out, document(load(runs), title).encode())
    return out


def document(runs: Sequence[PageRun], title: str | None = None, *, live: str = "") -> str:
    """The page's text. `live`: the state of the runs that it shows; the page follows them."""
    shown, (entries, common), (data, numbers) = shown_sections(runs), cards(runs), page_data(runs)
    figures = [figure for section in shown for figure in section.figures]

    def figure_of(quantity: str) -> str:
        """The figure that draws a quantity; the last one shows any."""
        return next((each.id for each in figures if quantity in each.needs), figures[-1].id)

    return _template().render(
        title=title or listed([run.name for run in runs], _NAMED),
        live=live,
        runs=runs,
        figure_of=figure_of,
        alerts=alerts(runs),
        cards=entries,
        common=common,
        groups=groups(runs),
        sections=shown,
        missing=left_out(runs, shown),
        data=compressed(data.encode()),
        numbers=numbers,
    )


@cache
def _template() -> Template:
    """The template, with what every page has."""
    common = {"quantities": QUANTITIES, "all_hold": all_hold, "bounds": bounds, "notes": notes}
    common |= {"style": asset("page.css"), "script": "\n".join(map(asset, SCRIPTS))}
    common |= {"plotly": compressed(get_plotlyjs().encode())}
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(asset("page.html"), common)

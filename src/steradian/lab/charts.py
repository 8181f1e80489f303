"""Line charts as SVG, drawn here: pictures for documents without a browser, a service or a plotting library.

They follow the reader's preference for light or dark, and paint their own background, so that they can be read on any.
"""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from steradian.lab.colours import Colour, usual
from steradian.lab.scales import Scale

__all__ = ["Chart", "Figure", "Line", "Paint", "Ramp", "scales", "svg"]

_WIDTH, _HEIGHT, _ACROSS = 470, 310, 2
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 34, 46
_ROW = 20  # of the legend


@dataclass(frozen=True)
class Line:
    """A line, and where given the band around it.

    Attributes:
        name: in the legend, once for all lines that share it; empty: not there.
        x: abscissae.
        y: ordinates; where one is no number the line is interrupted.
        low: lower edge of the band.
        high: upper edge of the band.
        dashed: whether it is.
        colour: of the line; None: one of its own for each name.
        thin: one of many.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False
    colour: Colour | None = None
    thin: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes.

    Attributes:
        title: what is shown.
        x_title: of the horizontal axis.
        y_title: of the vertical axis.
        lines: the lines.
        logarithmic: the vertical axis.
        x_range: part of the horizontal axis that is shown; None: all.
        y_range: part of the vertical axis that is shown; None: what the lines need.
        marks: levels to compare with, which are shown unless there is a `y_range`, and what they are.
    """

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line] = field(default_factory=tuple)
    logarithmic: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    marks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Ramp:
    """A row of colours in the legend, with what its ends mean."""

    first: str
    last: str
    colours: Sequence[Colour]


@dataclass(frozen=True)
class Figure:
    """Charts that belong together, with one legend."""

    charts: Sequence[Chart]
    ramp: Ramp | None = None

    @property
    def empty(self) -> bool:
        """There is nothing to show."""
        return not any(chart.lines for chart in self.charts)


def svg(figure: Figure) -> str:
    """Charts two by two with one legend: in the free place where their number is odd, below them elsewhere."""
    charts = figure.charts
    columns = min(_ACROSS, len(charts))
    width, rows = _WIDTH * columns, math.ceil(len(charts) / columns)
    paint = Paint(figure)
    body = [_chart(chart, paint, k % columns * _WIDTH, k // columns * _HEIGHT) for k, chart in enumerate(charts)]
    height = rows * _HEIGHT
    free = len(charts) < rows * columns
    left, top = (_WIDTH + _LEFT, height - _HEIGHT + _TOP) if free else (_LEFT, height)
    legend, length = _legend(list(paint.entries()), _WIDTH - _LEFT if free else width - _LEFT, below=free)
    height += 0 if free else length + 8
    picture = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<style>{paint.style()}</style>",
        f'<rect width="{width}" height="{height}" class="paper"/>',
        *body,
        f'<g transform="translate({left} {top})">{legend}</g>',
        "</svg>\n",
    ]
    return "\n".join(picture)


class Paint:
    """The colours of a figure: as classes, so that a dark reader gets others."""

    def __init__(self, figure: Figure) -> None:
        self.lines, self.ramp = [line for chart in figure.charts for line in chart.lines], figure.ramp
        names = list(dict.fromkeys(line.name for line in self.lines if line.colour is None))
        self._by_name = {name: usual(k) for k, name in enumerate(names)}
        used = [self.colour(line) for line in self.lines] + list(self.ramp.colours if self.ramp else ())
        self.numbers = {colour: k for k, colour in enumerate(dict.fromkeys(used))}

    def colour(self, line: Line) -> Colour:
        """Its own, or that of its name."""
        return line.colour or self._by_name[line.name]

    def number(self, line: Line) -> int:
        """Of the line's class."""
        return self.numbers[self.colour(line)]

    def style(self) -> str:
        """All classes, and what they are for a dark reader."""
        light = [
            ".paper{fill:#fff}",
            "text{fill:#222}",
            ".grid{stroke:#e4e4e4}",
            ".axis{stroke:#555}",
            ".mark{stroke:#777}",
        ]
        dark = [
            ".paper{fill:#15181c}",
            "text{fill:#ddd}",
            ".grid{stroke:#2c3138}",
            ".axis{stroke:#999}",
            ".mark{stroke:#999}",
        ]
        for (day, night), k in self.numbers.items():
            light.append(f".s{k}{{stroke:{day}}}.f{k}{{fill:{day}}}")
            dark.append(f".s{k}{{stroke:{night}}}.f{k}{{fill:{night}}}")
        return "".join(light) + "@media(prefers-color-scheme:dark){" + "".join(dark) + "}"

    def entries(self) -> Iterator[tuple[str, int]]:
        """What the legend holds: the drawing of an entry and its length."""
        seen: set[str] = set()
        for line in self.lines:
            if line.name and line.name not in seen:
                seen.add(line.name)
                stroke = _stroke(line, 1.2 if line.thin else 3)
                sample = f'<path d="M0 -4h20" class="s{self.number(line)}" {stroke}/>'
                yield f'{sample}<text x="26">{html.escape(line.name)}</text>', 46 + round(6.1 * len(line.name))
        if self.ramp is not None:
            first, last, start = (
                html.escape(self.ramp.first),
                html.escape(self.ramp.last),
                8 + round(6.1 * len(self.ramp.first)),
            )
            bars = "".join(
                f'<rect x="{start + 7 * k}" y="-10" width="7" height="10" class="f{self.numbers[colour]}"/>'
                for k, colour in enumerate(self.ramp.colours)
            )
            end = start + 7 * len(self.ramp.colours) + 8
            yield f'<text>{first}</text>{bars}<text x="{end}">{last}</text>', end + 26 + round(6.1 * len(last))


def _legend(entries: Sequence[tuple[str, int]], room: float, *, below: bool) -> tuple[str, int]:
    """Entries below each other, or beside each other as far as there is room, and the height that they take."""
    made, x, y = [], 0, 14
    for drawn, length in entries:
        if x and (below or x + length > room):
            x, y = 0, y + _ROW
        made.append(f'<g transform="translate({x} {y})">{drawn}</g>')
        x += length
    return "".join(made), y if entries else 0


def _chart(chart: Chart, paint: Paint, left: float, top: float) -> str:
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    across, up = scales(chart, wide, high)
    made = [f'<text x="{_LEFT}" y="20" font-weight="bold" font-size="13">{html.escape(chart.title)}</text>']
    for value, text in across.ticks():
        x = _LEFT + across(value)
        made.append(f'<path d="M{x:.1f} {_TOP}v{high}" class="grid"/>')
        made.append(f'<text x="{x:.1f}" y="{_TOP + high + 17}" text-anchor="middle">{text}</text>')
    for value, text in up.ticks():
        y = _TOP + up(value)
        made.append(f'<path d="M{_LEFT} {y:.1f}h{wide}" class="grid"/>')
        made.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    made.append(f'<path d="M{_LEFT} {_TOP}v{high}h{wide}" class="axis" fill="none"/>')
    made.append(
        f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{html.escape(chart.x_title)}</text>'
    )
    turned = f'transform="translate(15 {_TOP + high / 2}) rotate(-90)" text-anchor="middle"'
    made.append(f"<text {turned}>{html.escape(chart.y_title)}</text>")
    # What lies beyond the axes is cut off at them.
    made.append(f'<svg x="{_LEFT}" y="{_TOP}" width="{wide}" height="{high}" overflow="hidden">')
    for level, meaning in chart.marks:
        if up.shows(level):
            y = up(level)
            beside = y + 14 if y < 20 else y - 5
            made.append(f'<path d="M0 {y:.1f}h{wide}" class="mark" stroke-dasharray="2 3"/>')
            made.append(
                f'<text x="{wide - 5}" y="{beside:.1f}" text-anchor="end" font-size="11">{html.escape(meaning)}</text>'
            )
    for line in chart.lines:
        made += _band(line, across, up, paint.number(line))
    for line in chart.lines:
        path = _path(line.x, line.y, across, up)
        if path:
            alone = path.endswith("h0") and path.count("M") == 1
            stroke = _stroke(line, 6 if alone else 0.8 if line.thin else 1.6)
            if "h0" in path:
                stroke += ' stroke-linecap="round"'  # without it a line of no length is not seen
            made.append(
                f'<path d="{path}" class="s{paint.number(line)}" fill="none" stroke-linejoin="round" {stroke}/>'
            )
    made.append("</svg>")
    return f'<g transform="translate({left} {top})">' + "\n".join(made) + "</g>"


def scales(chart: Chart, wide: float, high: float) -> tuple[Scale, Scale]:
    """The horizontal and the vertical one, the latter over what is shown of the lines and their bands."""
    xs = [x for line in chart.lines for x in line.x]
    start, end = chart.x_range or (min(xs, default=0.0), max(xs, default=1.0))
    around = 0.5 if start == end else 0  # so that a point alone stands in the middle
    across = Scale(start - around, end + around, 0, wide)
    ys = [
        y
        for line in chart.lines
        for series in (line.y, line.low, line.high)
        for x, y in zip(line.x, series, strict=False)
        if across.shows(x) and math.isfinite(y) and (y > 0 or not chart.logarithmic)
    ]
    if chart.y_range is not None:
        return across, Scale(*chart.y_range, high, 0, logarithmic=chart.logarithmic)
    ys += [level for level, _ in chart.marks]
    return across, Scale.around(ys, high, 0, logarithmic=chart.logarithmic)


def _stroke(line: Line, width: float) -> str:
    dash = ' stroke-dasharray="5 3"' if line.dashed else ""
    faint = ' opacity="0.65"' if line.thin else ""
    return f'stroke-width="{width}"{dash}{faint}'


def _band(line: Line, across: Scale, up: Scale, number: int) -> list[str]:
    if not line.low:
        return []
    edges = [
        (x, low, high)
        for x, low, high in zip(line.x, line.low, line.high, strict=True)
        if across.shows(x) and up.has(low) and up.has(high)
    ]
    if not edges:
        return []
    there = [f"{across(x):.1f} {up(high):.1f}" for x, _, high in edges]
    back = [f"{across(x):.1f} {up(low):.1f}" for x, low, _ in reversed(edges)]
    return [f'<path d="M{"L".join(there + back)}Z" class="f{number}" opacity="0.15"/>']


def _path(xs: Sequence[float], ys: Sequence[float], across: Scale, up: Scale) -> str:
    """The line, begun anew after what cannot be shown; a single point is a line of no length."""
    parts: list[list[str]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if across.shows(x) and up.has(y):
            point = f"{across(x):.1f} {up(y):.1f}"
            if not parts[-1] or parts[-1][-1] != point:
                parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    return "".join("M" + "L".join(part) + ("h0" if len(part) == 1 else "") for part in parts if part)

"""Line charts as SVG, drawn here: pictures for documents without a browser, a service or a plotting library."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Chart", "Line", "svg"]

# Okabe and Ito's colours, told apart by readers of any eyesight, and their order.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
_WIDTH, _HEIGHT, _ACROSS = 460, 320, 2
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 30, 44


@dataclass(frozen=True)
class Line:
    """A named line, and where given the band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes.

    Attributes:
        title: what is shown.
        x_title: of the horizontal axis.
        y_title: of the vertical axis.
        lines: the lines; those of one name share a colour and an entry of the legend.
        logarithmic: the vertical axis.
        x_range: part of the horizontal axis that is shown; None: all.
    """

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line] = field(default_factory=tuple)
    logarithmic: bool = False
    x_range: tuple[float, float] | None = None


def svg(charts: Sequence[Chart]) -> str:
    """Charts two by two, with one legend below."""
    names = list(dict.fromkeys(line.name for chart in charts for line in chart.lines))
    colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)}
    width, drawn = _WIDTH * min(_ACROSS, len(charts)), _HEIGHT * math.ceil(len(charts) / _ACROSS)
    legend, legend_height = _legend(names, colours, width)
    body = [_chart(chart, colours, k % _ACROSS * _WIDTH, k // _ACROSS * _HEIGHT) for k, chart in enumerate(charts)]
    height = drawn + legend_height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *body,
            f'<g transform="translate(0 {drawn})">{legend}</g>',
            "</svg>",
        ]
    )


def _chart(chart: Chart, colours: dict[str, str], left: float, top: float) -> str:
    scale = _Scale(chart)
    marks = [f'<text x="{_LEFT}" y="18" font-weight="bold">{html.escape(chart.title)}</text>']
    for value in scale.x_ticks:
        x = scale.x(value)
        marks.append(f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#ddd"/>')
        marks.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_label(value)}</text>')
    for value in scale.y_ticks:
        y = scale.y(value)
        marks.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_label(value)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    marks.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{html.escape(chart.x_title)}</text>')
    turned = f'transform="translate(14 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
    marks.append(f"<text {turned}>{html.escape(chart.y_title)}</text>")
    for line in chart.lines:
        marks += _marks(line, scale, colours[line.name])
    return f'<g transform="translate({left} {top})">' + "\n".join(marks) + "</g>"


def _marks(line: Line, scale: "_Scale", colour: str) -> list[str]:
    made = []
    if line.low:
        up = scale.points(line.x, line.high)
        down = scale.points(line.x, line.low)
        if up and down:
            outline = "L".join([*up, *reversed(down)])
            made.append(f'<path d="M{outline}Z" fill="{colour}" opacity="0.15"/>')
    points = scale.points(line.x, line.y)
    if points:
        dash = ' stroke-dasharray="4 3"' if line.dashed else ""
        made.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{colour}" stroke-width="1.3"{dash}/>')
    return made


class _Scale:
    """From data to the picture."""

    def __init__(self, chart: Chart) -> None:
        self.log = chart.logarithmic
        xs = [x for line in chart.lines for x in line.x]
        self.x_low, self.x_high = chart.x_range or (min(xs, default=0.0), max(xs, default=1.0))
        if self.x_low == self.x_high:
            self.x_high = self.x_low + 1
        values = [
            y
            for line in chart.lines
            for series in (line.y, line.low, line.high)
            for x, y in zip(line.x, series, strict=False)
            if self._shown(x, y)
        ]
        low, high = min(values, default=1.0), max(values, default=2.0)
        if self.log:
            low, high = math.log10(low), math.log10(high)
        gap = 0.04 * (high - low) or 0.5
        self.y_low, self.y_high = low - gap, high + gap
        self.x_ticks = _ticks(self.x_low, self.x_high, 6)
        self.y_ticks = self._y_ticks()

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        place = math.log10(value) if self.log else value
        share = (place - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def points(self, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        return [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in zip(xs, ys, strict=True) if self._shown(x, y)]

    def _shown(self, x: float, y: float) -> bool:
        return self.x_low <= x <= self.x_high and math.isfinite(y) and (y > 0 or not self.log)

    def _y_ticks(self) -> list[float]:
        if not self.log:
            return _ticks(self.y_low, self.y_high, 6)
        powers = range(math.ceil(self.y_low), math.floor(self.y_high) + 1)
        if len(powers) >= 2:
            return [10.0**k for k in powers[:: max(1, len(powers) // 6)]]
        return [tick for tick in _ticks(10**self.y_low, 10**self.y_high, 5) if tick > 0]


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two bounds.

    >>> _ticks(0, 405, 5)
    [0.0, 100.0, 200.0, 300.0, 400.0]
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _label(value: float) -> str:
    """A tick in few characters.

    >>> _label(400.0), _label(0.30000000000000004), _label(1e-5)
    ('400', '0.3', '1e-05')
    """
    return f"{value:.4g}"


def _legend(names: Sequence[str], colours: dict[str, str], width: float) -> tuple[str, float]:
    made, x, y = [], float(_LEFT), 14.0
    for name in names:
        length = 34 + 7.0 * len(name)
        if x + length > width and x > _LEFT:
            x, y = float(_LEFT), y + 18
        made.append(f'<path d="M{x} {y - 4}h18" stroke="{colours[name]}" stroke-width="3"/>')
        made.append(f'<text x="{x + 23}" y="{y}">{html.escape(name)}</text>')
        x += length
    return "".join(made), y + 12

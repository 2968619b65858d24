"""Numbers -> SVG, drawn here: no script, no style attribute, nothing from elsewhere.

in: lines of points  ->  out: Markup
Invariant: every text in it is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 600, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 28
MAX_POINTS = 600


def line_chart(title: str, lines: Mapping[str, Points], *, percent: bool = False, x_name: str = "step") -> Markup:
    """Lines over a common x axis; the legend is HTML around the SVG. Points that are not finite are left out."""
    lines = {name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)] for name, points in lines.items()}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return Markup("")
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x_low, x_high = min(xs), max(xs)
    ticks = nice_ticks(min(ys), max(ys))
    y_low, y_high = ticks[0], ticks[-1]
    x_scale = (WIDTH - LEFT - RIGHT) / ((x_high - x_low) or 1)
    y_scale = (HEIGHT - TOP - BOTTOM) / ((y_high - y_low) or 1)

    def at(x: float, y: float) -> str:
        return f"{LEFT + (x - x_low) * x_scale:.1f},{HEIGHT - BOTTOM - (y - y_low) * y_scale:.1f}"

    parts = [Markup('<figure class="chart"><figcaption><b>{}</b>').format(title)]
    for number, (name, points) in enumerate(lines.items()):
        last = say(points[-1][1], percent)
        parts.append(Markup(' <span class="key s{}">{} <b>{}</b></span>').format(number % 4, name, last))
    head = Markup('</figcaption><svg viewBox="0 0 {} {}" role="img" aria-label="{}">')
    parts.append(head.format(WIDTH, HEIGHT, summary(title, lines, percent)))
    for tick in ticks:
        y = at(x_low, tick).partition(",")[2]
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, y, y))
        parts.append(Markup('<text class="tick end" x="{}" y="{}" dy="4">{}</text>').format(LEFT - 6, y, say(tick, percent)))
    for value, side in [(x_low, "start"), (x_high, "end")][: 2 if x_low < x_high else 1]:
        x = at(value, y_low).partition(",")[0]
        text = f"{x_name} {value:,.0f}"
        parts.append(Markup('<text class="tick {}" x="{}" y="{}">{}</text>').format(side, x, HEIGHT - 8, text))
    for number, points in enumerate(lines.values()):
        thinned = thin(points)
        if len(thinned) > 1:
            path = " ".join(at(*point) for point in thinned)
            parts.append(Markup('<polyline class="line s{}" points="{}"/>').format(number % 4, path))
        x, y = at(*points[-1]).split(",")
        parts.append(Markup('<circle class="dot s{}" cx="{}" cy="{}" r="3"/>').format(number % 4, x, y))
    parts.append(Markup("</svg></figure>"))
    return Markup("").join(parts)


def bar(share: float) -> Markup:
    """A bar of a share in 0..1."""
    width = f"{max(0.5, min(100.0, 100 * share)):.2f}"
    shape = Markup('<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width="{}" height="8"/></svg>')
    return shape.format(width)


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers that span low..high."""
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def thin(points: Points) -> Points:
    """At most MAX_POINTS of them, evenly chosen, the last one among them."""
    if len(points) <= MAX_POINTS:
        return points
    stride = len(points) / MAX_POINTS
    return [points[min(len(points) - 1, int((i + 1) * stride) - 1)] for i in range(MAX_POINTS)]


def say(value: float, percent: bool = False) -> str:
    """A number for an axis or a legend."""
    if percent:
        return f"{100 * value:.4g}%"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def summary(title: str, lines: Mapping[str, Points], percent: bool) -> str:
    """A chart in words, for those who don't see it."""
    told = (f"{name} from {say(points[0][1], percent)} to {say(points[-1][1], percent)}" for name, points in lines.items())
    return f"{title}: {', '.join(told)}"

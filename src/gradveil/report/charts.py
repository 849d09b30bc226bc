"""The charts: share identified per defense, the privacy-cost frontier, and the small strip on the first screen.

Text in a picture shrinks with it, so the big chart is drawn twice, wide and narrow, and the style sheet shows one of them.
Colour never carries a meaning alone: plain is a hollow ring, informed a filled disc, the verdict a bar with whiskers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gradveil.report.svg import Scale, clip_lines, drawing, nice_ticks, tag
from gradveil.study.measures import Share, Summary
from gradveil.study.results import CellResult
from gradveil.verdict.levels import bar_of, level_of
from gradveil.verdict.numbers import interval, percent

__all__ = ["Axis", "frontier_chart", "identified_chart", "ladder_lines", "number_marks", "on_frontier", "strip"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where things go in the chart of shares."""

    width: int
    left: float
    right: float
    row: float
    label_chars: int
    stacked: bool


WIDE = Layout(width=780, left=270.0, right=610.0, row=42.0, label_chars=36, stacked=False)
NARROW = Layout(width=360, left=10.0, right=350.0, row=66.0, label_chars=48, stacked=True)
TOP = 26.0
# Where a point's number may stand, best places first.
AROUND = (
    (10, -7),
    (-10, -7),
    (10, 9),
    (-10, 9),
    (0, -13),
    (0, 14),
    (16, 0),
    (-16, 0),
    (20, -14),
    (-20, -14),
    (20, 16),
    (-20, 16),
)


def identified_chart(cells: Sequence[CellResult], *, narrow: bool = False, ident: str = "identified") -> Markup:
    """Draw the share identified per defense: the verdict with its interval, plain and informed linked, the null band behind."""
    layout = NARROW if narrow else WIDE
    scale = Scale(0.0, 1.0, layout.left, layout.right)
    bottom = TOP + layout.row * len(cells)
    rows = [_row(cell, scale, layout, TOP + layout.row * i) for i, cell in enumerate(cells)]
    best = "; ".join(f"{cell.defense.spelling}: {percent(cell.identified.value)}" for cell in cells)
    return drawing(
        *_share_axis(scale, bottom),
        *rows,
        width=layout.width,
        height=bottom + 8,
        ident=f"{ident}-{'narrow' if narrow else 'wide'}",
        title="Share of records identified, per defense",
        desc=f"Verdict of the strongest attacker, in plan order. {best}. The table below the chart has all numbers.",
        class_="chart narrow-only" if narrow else "chart wide-only",
    )


def _share_axis(scale: Scale, bottom: float) -> list[Markup]:
    drawn = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = scale(value)
        anchor = {0.0: "start", 1.0: "end"}.get(value, "middle")
        drawn.append(tag("line", x1=x, x2=x, y1=TOP - 6, y2=bottom, class_="grid"))
        drawn.append(tag("text", percent(value), x=x, y=TOP - 11, text_anchor=anchor, class_="tick"))
    return drawn


def _row(cell: CellResult, scale: Scale, layout: Layout, top: float) -> Markup:
    share, bar = cell.identified, bar_of(cell)
    band = 24.0
    y = top + (layout.row - band / 2 - 4 if layout.stacked else layout.row / 2)
    value = f"{percent(share.value)} ({interval(share.low, share.high)})"
    marks = [
        tag("rect", x=scale(0), y=y - band / 2, width=max(1.0, scale(bar.top) - scale(0)), height=band, class_="null-band"),
        tag("line", x1=scale(bar.value), x2=scale(bar.value), y1=y - band / 2, y2=y + band / 2, class_="null-line"),
        *_verdict(share, scale, y - 5),
        *_pair(cell.plain, cell.informed, scale, y + 6),
        *_other_levels(cell, scale, y + 6),
    ]
    return tag("g", *_labels(cell, layout, top, y, value), *marks, class_="row no-verdict" if cell.failures else "row")


def _labels(cell: CellResult, layout: Layout, top: float, y: float, value: str) -> list[Markup]:
    lines = clip_lines(cell.defense.spelling or "none", layout.label_chars, lines=1 if layout.stacked else 2)
    note = "no verdict" if cell.failures else value
    if layout.stacked:
        return [
            tag("text", lines[0], x=layout.left, y=top + 17, class_="label"),
            tag("text", note, x=layout.left, y=top + 32, class_="value"),
        ]
    start = y + 4.5 - 7.5 * (len(lines) - 1)
    places = [start + 15 * i for i in range(len(lines))]
    names = [
        tag("text", t, x=layout.left - 14, y=at, text_anchor="end", class_="label") for t, at in zip(lines, places, strict=True)
    ]
    return [*names, tag("text", note, x=layout.right + 14, y=y + 4.5, class_="value")]


def _verdict(share: Share, scale: Scale, y: float) -> list[Markup]:
    low, middle, high = scale(share.low), scale(share.value), scale(share.high)
    return [
        tag("line", x1=low, x2=high, y1=y, y2=y, class_="whisker"),
        tag("line", x1=low, x2=low, y1=y - 3, y2=y + 3, class_="whisker"),
        tag("line", x1=high, x2=high, y1=y - 3, y2=y + 3, class_="whisker"),
        tag("rect", x=middle - 3, y=y - 5, width=6, height=10, class_="verdict"),
    ]


def _pair(plain: Summary | None, informed: Summary | None, scale: Scale, y: float) -> list[Markup]:
    drawn = []
    if plain is not None and informed is not None:
        x1, x2 = scale(plain.identified.value), scale(informed.identified.value)
        drawn.append(tag("line", x1=x1, x2=x2, y1=y, y2=y, class_="link"))
    if informed is not None:
        drawn.append(tag("circle", cx=scale(informed.identified.value), cy=y, r=4.5, class_="informed"))
    if plain is not None:
        # The ring is wider than the disc, so both stay visible where they coincide.
        drawn.append(tag("circle", cx=scale(plain.identified.value), cy=y, r=5.5, class_="plain"))
    return drawn


def _other_levels(cell: CellResult, scale: Scale, y: float) -> list[Markup]:
    """Draw a triangle for labels and a diamond for lists, where they were measured."""
    # The triangle is wider than the diamond, so both stay visible where they coincide.
    shapes = {"list": ("M{1} {2} L{4} {5} L{1} {3} L{0} {5} Z", 5), "label": ("M{0} {3} L{1} {2} L{4} {3} Z", 8)}
    drawn = []
    for name, (path, size) in shapes.items():
        share = level_of(cell, name).share
        if share is not None:
            x = round(scale(share.value), 1)
            told = tag("title", f"{name}: {percent(share.value)}")
            corners = path.format(x - size, x, y - size, y + size, x + size, y)
            drawn.append(tag("path", told, d=corners, class_=f"by-{name}"))
    return drawn


def strip(cell: CellResult, ident: str) -> Markup:
    """Draw the first screen's small strip: one share, its interval, and the null band."""
    share, bar = cell.identified, bar_of(cell)
    scale = Scale(0.0, 1.0, 2.0, 358.0)
    return drawing(
        tag("rect", x=scale(0), y=6, width=scale(1) - scale(0), height=16, class_="track"),
        tag("rect", x=scale(0), y=6, width=max(1.0, scale(bar.top) - scale(0)), height=16, class_="null-band"),
        tag("line", x1=scale(bar.value), x2=scale(bar.value), y1=6, y2=22, class_="null-line"),
        *_verdict(share, scale, 14.0),
        width=360,
        height=28,
        ident=ident,
        title=f"{percent(share.value)} identified",
        desc=f"95 % interval {interval(share.low, share.high)}; the best null reaches {percent(bar.value)}.",
        class_="chart strip",
    )


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The cost side of the frontier."""

    name: str
    label: str
    values: tuple[float | None, ...]
    lower_is_better: bool = True
    as_percent: bool = False

    def tick(self, value: float) -> str:
        """Return the text of one tick."""
        return percent(value) if self.as_percent else f"{value:g}×"


def on_frontier(costs: Sequence[float | None], leaks: Sequence[float], *, lower_is_better: bool = True) -> list[bool]:
    """Return, per point, whether no other point is at least as good on both sides and better on one.

    >>> on_frontier([1.0, 1.2, 1.3], [0.9, 0.3, 0.4])
    [True, True, False]
    """
    sign = 1 if lower_is_better else -1
    points = [None if cost is None else (sign * cost, leak) for cost, leak in zip(costs, leaks, strict=True)]
    known = [point for point in points if point is not None]

    def beaten(point: tuple[float, float]) -> bool:
        return any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in known)

    return [point is not None and not beaten(point) for point in points]


def frontier_chart(cells: Sequence[CellResult], axis: Axis, ident: str) -> Markup:
    """Draw privacy (upper bound of the share identified) against one cost; rungs are joined; numbers key the table."""
    leaks = [cell.identified.high for cell in cells]
    known = [value for value in axis.values if value is not None]
    ticks = nice_ticks(min(known), max(known))
    x, y = Scale(ticks[0], ticks[-1], 52.0, 342.0), Scale(0.0, 1.0, 248.0, 18.0)
    spots = [None if value is None else (x(value), y(leak)) for value, leak in zip(axis.values, leaks, strict=True)]
    filled = on_frontier(axis.values, leaks, lower_is_better=axis.lower_is_better)
    best = ", ".join(str(i + 1) for i, flag in enumerate(filled) if flag)
    dots = [(spot, flag) for spot, flag in zip(spots, filled, strict=True) if spot is not None]
    return drawing(
        *_frontier_axes(x, y, ticks, axis),
        *ladder_lines(cells, spots),
        *(tag("circle", cx=spot[0], cy=spot[1], r=5, class_="front" if flag else "behind") for spot, flag in dots),
        *number_marks(spots),
        width=360,
        height=300,
        ident=ident,
        title=f"Privacy against {axis.name}",
        desc=f"Upper bound of the share identified against {axis.label}. On the frontier: table rows {best}.",
        class_="chart frontier",
    )


def _frontier_axes(x: Scale, y: Scale, ticks: Sequence[float], axis: Axis) -> list[Markup]:
    drawn = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn.append(tag("line", x1=x.start, x2=x.end, y1=y(value), y2=y(value), class_="grid"))
        drawn.append(tag("text", percent(value), x=x.start - 8, y=y(value) + 4, text_anchor="end", class_="tick"))
    for tick in ticks:
        drawn.append(tag("line", x1=x(tick), x2=x(tick), y1=y.end, y2=y.start, class_="grid"))
        drawn.append(tag("text", axis.tick(tick), x=x(tick), y=y.start + 17, text_anchor="middle", class_="tick"))
    drawn.append(tag("text", axis.label, x=(x.start + x.end) / 2, y=y.start + 40, text_anchor="middle", class_="label"))
    return drawn


def ladder_lines(cells: Sequence[CellResult], spots: Sequence[tuple[float, float] | None]) -> list[Markup]:
    """Join the rungs of each defense, from weak to strong."""
    families: dict[tuple[str, ...], list[tuple[int, tuple[float, float]]]] = {}
    for cell, spot in zip(cells, spots, strict=True):
        if spot is not None and cell.defense.rung is not None:
            families.setdefault(cell.defense.parts, []).append((cell.defense.rung, spot))
    lines = [sorted(family) for family in families.values() if len(family) > 1]
    return [tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for _, (x, y) in line), class_="ladder") for line in lines]


def number_marks(spots: Sequence[tuple[float, float] | None], others: Sequence[tuple[float, float]] = ()) -> list[Markup]:
    """Put each point's number at the first place around it that touches no point, other mark or other number."""
    taken = [*others, *(spot for spot in spots if spot is not None)]
    drawn = []
    for index, spot in enumerate(spots):
        if spot is None:
            continue
        place = _free_place(spot, taken)
        taken.append(place)
        drawn.append(tag("text", str(index + 1), x=place[0], y=place[1] + 4, text_anchor="middle", class_="number"))
    return drawn


def _free_place(spot: tuple[float, float], taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    places = [(spot[0] + dx, spot[1] + dy) for dx, dy in AROUND]
    others = [point for point in taken if point != spot]
    room = [min((max(abs(x - ox) / 1.1, abs(y - oy)) for ox, oy in others), default=99.0) for x, y in places]
    return next((place for place, free in zip(places, room, strict=True) if free >= 11), places[room.index(max(room))])

"""Power curves of one setting, drawn over the weight of the planted leak, with what was found at weaker settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gradveil.report.svg import Scale, drawing, tag
from gradveil.study.evidence import Power, Rung
from gradveil.study.results import CellResult
from gradveil.verdict.numbers import percent

__all__ = ["PowerRow", "power_chart", "power_rows"]

LEFT, RIGHT = 44.0, 348.0
TOP, BOTTOM = 14.0, 150.0
END = 3.2
"""Where no leak and the whole update stand, in powers of ten of how much louder the leak is than the release."""
TICKS = ((-END, "0"), (-2.0, "0.01"), (-0.95, "0.1"), (0.0, "0.5"), (0.95, "0.9"), (2.0, "0.99"), (END, "1"))


@dataclass(frozen=True, kw_only=True)
class PowerRow:
    """One defense: its cell, how a curve reads in words, and the curve where there is more than its two ends."""

    cell: CellResult
    weaker: str
    chart: Markup | None


def power_rows(cells: Sequence[CellResult], ident: str) -> list[PowerRow]:
    """Return one row for every cell whose power was measured; none in older folders."""
    told = [(cell, cell.power) for cell in cells if cell.power is not None]
    return [_row(cell, power, f"{ident}-{index}") for index, (cell, power) in enumerate(told)]


def _row(cell: CellResult, power: Power, ident: str) -> PowerRow:
    chart = power_chart(cell, power, ident) if len(power.planted) > 1 else None
    return PowerRow(cell=cell, weaker="; ".join(_weaker(rung) for rung in power.ladder) or power.reason, chart=chart)


def _weaker(rung: Rung) -> str:
    broken = ", broken" if rung.broken else ""
    return f"{rung.spelling}: {rung.identified.count} of {rung.identified.n}{broken}"


def power_chart(cell: CellResult, power: Power, ident: str) -> Markup:
    """Draw the share identified over the weight of the planted leak, from none to the whole update, each with its interval."""
    x, y = Scale(-END, END, LEFT, RIGHT), Scale(0.0, 1.0, BOTTOM, TOP)
    points = [(0.0, cell.identified), *((rung.leak, rung.identified) for rung in power.planted)]
    spots = [(x(_place(leak)), share) for leak, share in points]
    null = max((rung.null.top for rung in power.planted if rung.null is not None), default=0.0)
    line = " ".join(f"{at:.1f},{y(share.value):.1f}" for at, share in spots)
    said = "; ".join(f"{leak:g}: {percent(share.value)}" for leak, share in points)
    middle = None if power.a50 is None else x(_place(power.a50))
    half = [] if middle is None else [tag("line", x1=middle, x2=middle, y1=TOP, y2=BOTTOM, class_="null-line")]
    return drawing(
        tag("rect", x=LEFT, y=y(null), width=RIGHT - LEFT, height=max(1.0, BOTTOM - y(null)), class_="null-band"),
        *_axes(x, y),
        *half,
        tag("polyline", points=line, class_="ladder"),
        *(tag("line", x1=at, x2=at, y1=y(share.low), y2=y(share.high), class_="whisker") for at, share in spots),
        *(tag("circle", cx=at, cy=y(share.value), r=4.5, class_="front") for at, share in spots),
        width=360,
        height=200,
        ident=ident,
        title=f"Power against {cell.defense.spelling}",
        desc=f"Share of records identified by weight of the planted leak. {said}.",
        class_="chart frontier",
    )


def _place(leak: float) -> float:
    """Return how much louder the leak is than the release, as a power of ten, kept inside the plot."""
    if leak <= 0 or leak >= 1:
        return END if leak >= 1 else -END
    return max(-END, min(END, math.log10(leak / (1 - leak))))


def _axes(x: Scale, y: Scale) -> list[Markup]:
    drawn = []
    for value in (0.0, 0.5, 1.0):
        drawn.append(tag("line", x1=LEFT, x2=RIGHT, y1=y(value), y2=y(value), class_="grid"))
        drawn.append(tag("text", percent(value), x=LEFT - 6, y=y(value) + 4, text_anchor="end", class_="tick"))
    for place, text in TICKS:
        drawn.append(tag("text", text, x=x(place), y=BOTTOM + 16, text_anchor="middle", class_="tick"))
    middle = (LEFT + RIGHT) / 2
    drawn.append(tag("text", "weight of the planted leak", x=middle, y=BOTTOM + 38, text_anchor="middle", class_="label"))
    return drawn

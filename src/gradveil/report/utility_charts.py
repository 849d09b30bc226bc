"""The charts of utility: privacy against accuracy, and accuracy by round.

Privacy against accuracy is drawn twice, wide and narrow, like the chart of shares. Marks are those of the whole page: a hollow
ring for attackers who ignore the defense, a filled disc for those who know it. Curves are small panels, one per defense, so that
the rungs of one ladder are compared with each other and with no defense; a number at the end of a line names its table row.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gradveil.report.charts import ladder_lines, number_marks
from gradveil.report.svg import Scale, drawing, nice_ticks, tag
from gradveil.study.results import CellResult
from gradveil.study.training_result import Curve
from gradveil.verdict.levels import bar_of
from gradveil.verdict.numbers import percent

__all__ = ["Panel", "curve_panels", "decision_chart", "training_chart"]

CAP = 3.0
LINE_GAP = 12.0


def decision_chart(cells: Sequence[CellResult], *, narrow: bool = False, ident: str = "decision") -> Markup:
    """Draw the share identified against accuracy: plain and informed attackers, both intervals, and the best null behind."""
    width, height = (360, 396) if narrow else (780, 446)
    values = [cell.accuracy.value for cell in cells if cell.accuracy is not None]
    ticks = nice_ticks(min(values), max(values), 4 if narrow else 6)
    x = Scale(ticks[0], ticks[-1], 46.0, width - 26.0)
    y = Scale(0.0, 1.0, height - 62.0, 30.0)  # room above for the numbers of defenses that stop nothing
    spots = [None if cell.accuracy is None else (x(cell.accuracy.value), y(cell.identified.value)) for cell in cells]
    told = "; ".join(
        f"{cell.defense.spelling}: {percent(cell.identified.value)} at {percent(cell.accuracy.value)} accuracy"
        for cell in cells
        if cell.accuracy is not None
    )
    return drawing(
        *_null(cells, x, y),
        *_axes(x, y, ticks, "accuracy after training"),
        *ladder_lines(cells, spots),
        *(mark for cell in cells if cell.accuracy is not None for mark in _marks(cell, x, y)),
        *number_marks(spots, [spot for cell in cells for spot in _attacker_spots(cell, x, y)]),
        width=width,
        height=height,
        ident=f"{ident}-{'narrow' if narrow else 'wide'}",
        title="Share of records identified against accuracy, per defense",
        desc=f"Right and down is better. {told}. The table below the chart has all numbers.",
        class_="chart narrow-only" if narrow else "chart wide-only",
    )


def _axes(x: Scale, y: Scale, ticks: Sequence[float], label: str) -> list[Markup]:
    drawn = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn.append(tag("line", x1=x.start, x2=x.end, y1=y(value), y2=y(value), class_="grid"))
        drawn.append(tag("text", percent(value), x=x.start - 8, y=y(value) + 4, text_anchor="end", class_="tick"))
    for tick in ticks:
        drawn.append(tag("line", x1=x(tick), x2=x(tick), y1=y.end, y2=y.start, class_="grid"))
        drawn.append(tag("text", _accuracy_tick(tick), x=x(tick), y=y.start + 17, text_anchor="middle", class_="tick"))
    drawn.append(tag("text", label, x=(x.start + x.end) / 2, y=y.start + 40, text_anchor="middle", class_="label"))
    drawn.append(tag("text", "share identified", x=2, y=12, class_="label"))
    return drawn


def _accuracy_tick(value: float) -> str:
    return f"{100 * value:g}\u00a0%"


def _null(cells: Sequence[CellResult], x: Scale, y: Scale) -> list[Markup]:
    """Draw the highest null of all cells: what lies inside it may be had without the update."""
    bar = max((bar_of(cell) for cell in cells), key=lambda each: (each.top, each.value))
    top = y(bar.top)
    return [
        tag("rect", x=x.start, y=top, width=x.end - x.start, height=max(1.0, y.start - top), class_="null-band"),
        tag("line", x1=x.start, x2=x.end, y1=y(bar.value), y2=y(bar.value), class_="null-line"),
    ]


def _attacker_spots(cell: CellResult, x: Scale, y: Scale) -> list[tuple[float, float]]:
    if cell.accuracy is None:
        return []
    return [(x(cell.accuracy.value), y(who.identified.value)) for who in (cell.plain, cell.informed) if who is not None]


def _marks(cell: CellResult, x: Scale, y: Scale) -> list[Markup]:
    accuracy, share = cell.accuracy, cell.identified
    assert accuracy is not None
    at = x(accuracy.value)
    drawn = [_whisker(y, share.low, share.high, at, upright=True)]
    if accuracy.low is not None and accuracy.high is not None:
        drawn.append(_whisker(x, accuracy.low, accuracy.high, y(share.value), upright=False))
    plain = None if cell.plain is None else y(cell.plain.identified.value)
    informed = None if cell.informed is None else y(cell.informed.identified.value)
    if plain is not None and informed is not None:
        drawn.append(tag("line", x1=at, x2=at, y1=plain, y2=informed, class_="reach"))
    if informed is not None:
        drawn.append(tag("circle", cx=at, cy=informed, r=4.5, class_="informed"))
    if plain is not None:
        drawn.append(tag("circle", cx=at, cy=plain, r=5.5, class_="plain"))
    return drawn


def _whisker(scale: Scale, low: float, high: float, place: float, *, upright: bool) -> Markup:
    """Draw an interval along an axis; an end that lies outside the plot has no cap."""
    ends = [scale(low), scale(high)]
    caps = [end for end, value in zip(ends, (low, high), strict=True) if scale.low <= value <= scale.high]
    lines = [(ends[0], place, ends[1], place), *((end, place - CAP, end, place + CAP) for end in caps)]
    turned = [(b, a, d, c) if upright else (a, b, c, d) for a, b, c, d in lines]
    return tag("g", *(tag("line", x1=a, y1=b, x2=c, y2=d, class_="thin-whisker") for a, b, c, d in turned))


def _families(cells: Sequence[CellResult]) -> dict[tuple[str, ...], list[int]]:
    """Return the positions of the rungs of each defense or chain."""
    families: dict[tuple[str, ...], list[int]] = {}
    for index, cell in enumerate(cells):
        families.setdefault(cell.defense.parts or (cell.defense.spelling,), []).append(index)
    return families


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Accuracy by round of one defense at its strengths, beside no defense."""

    name: str
    chart: Markup


def curve_panels(cells: Sequence[CellResult], ident: str = "curves") -> list[Panel]:
    """Draw one panel per defense: a line per rung, numbered like the table, over the undefended one."""
    bare = next((cell for cell in cells if cell.defense.is_none and _mean(cell)), None)
    panels = []
    for index, rows in enumerate(_families(cells).values()):
        shown = [row for row in rows if _mean(cells[row]) and cells[row] is not bare]
        if shown:
            lines = {str(row + 1): cells[row].utility.curves for row in shown}  # type: ignore[union-attr]
            names = "; ".join(f"{row + 1} is {cells[row].defense.spelling}" for row in shown)
            name = " + ".join(cells[shown[0]].defense.parts) or cells[shown[0]].defense.spelling
            under = bare.utility.curves if bare is not None and bare.utility is not None else ()
            panels.append(Panel(name=name, chart=_panel(lines, under, f"{ident}-{index}", name, names)))
    if not panels and bare is not None and bare.utility is not None:
        panels.append(
            Panel(name="none", chart=_panel({}, bare.utility.curves, f"{ident}-0", "none", "no defense was trained with"))
        )
    return panels


def training_chart(curve: Curve, ident: str = "training", score: str = "Accuracy") -> Markup:
    """Draw the curve of one training, of whose accuracies ``score`` is the name."""
    return _panel({"": (curve,)}, (), ident, "this training", "one line", score)


def _mean(cell: CellResult) -> bool:
    return cell.utility is not None and any(curve.rounds for curve in cell.utility.curves)


def _panel(
    lines: Mapping[str, Sequence[Curve]], under: Sequence[Curve], ident: str, name: str, names: str, score: str = "Accuracy"
) -> Markup:
    everything = [*under, *(curve for curves in lines.values() for curve in curves)]
    last = max(curve.rounds[-1] for curve in everything if curve.rounds)
    top = max(max(curve.accuracy) for curve in everything if curve.accuracy)
    ticks = nice_ticks(0.0, max(top, 0.05), 4)
    x, y = Scale(0.0, float(last), 46.0, 332.0), Scale(0.0, ticks[-1], 186.0, 12.0)
    ends = {label: y(_average(curves)[-1][1]) for label, curves in lines.items() if _average(curves)}
    return drawing(
        *_curve_axes(x, y, ticks, last),
        *(_line(under, x, y, "bare") if under else []),
        *(part for rung, curves in enumerate(lines.values()) for part in _line(curves, x, y, f"rung-{min(rung, 4)}")),
        *(tag("text", label, x=x.end + 6, y=at + 4, class_="number") for label, at in _apart(ends).items() if label),
        width=360,
        height=226,
        ident=ident,
        title=f"{score} by round, {name}",
        desc=f"Mean over seeds, with the range of seeds behind it; {names}. The grey dashed line is training without a defense.",
        class_="chart frontier",
    )


def _curve_axes(x: Scale, y: Scale, ticks: Sequence[float], last: int) -> list[Markup]:
    drawn = []
    for tick in ticks:
        drawn.append(tag("line", x1=x.start, x2=x.end, y1=y(tick), y2=y(tick), class_="grid"))
        drawn.append(tag("text", _accuracy_tick(tick), x=x.start - 6, y=y(tick) + 4, text_anchor="end", class_="tick"))
    for value, anchor in ((0, "middle"), (last, "end")):
        drawn.append(tag("text", str(value), x=x(float(value)), y=y.start + 16, text_anchor=anchor, class_="tick"))
    drawn.append(tag("text", "round", x=(x.start + x.end) / 2, y=y.start + 32, text_anchor="middle", class_="tick"))
    return drawn


def _line(curves: Sequence[Curve], x: Scale, y: Scale, class_: str) -> list[Markup]:
    """Draw the mean over seeds, and behind it the range from the worst to the best seed."""
    mean = _average(curves)
    if not mean:
        return []
    values = {number: [c.accuracy[c.rounds.index(number)] for c in curves if number in c.rounds] for number, _ in mean}
    there = [(number, max(each)) for number, each in values.items()]
    back = [(number, min(each)) for number, each in reversed(values.items())]
    band = tag("polygon", points=_points([*there, *back], x, y), class_=f"curve-band {class_}")
    line = tag("polyline", points=_points(mean, x, y), class_=f"curve {class_}")
    return [band, line] if len(curves) > 1 else [line]


def _average(curves: Sequence[Curve]) -> list[tuple[int, float]]:
    """Return the mean accuracy at every round that all seeds were evaluated in."""
    known = [dict(zip(curve.rounds, curve.accuracy, strict=True)) for curve in curves if curve.rounds]
    common = sorted(set.intersection(*(set(each) for each in known))) if known else []
    return [(number, statistics.fmean(each[number] for each in known)) for number in common]


def _points(values: Sequence[tuple[int, float]], x: Scale, y: Scale) -> str:
    return " ".join(f"{x(float(number)):.1f},{y(value):.1f}" for number, value in values)


def _apart(ends: Mapping[str, float]) -> dict[str, float]:
    """Move labels down where they would stand on each other."""
    placed: dict[str, float] = {}
    free = 0.0
    for label, at in sorted(ends.items(), key=lambda item: item[1]):
        placed[label] = max(at, free)
        free = placed[label] + LINE_GAP
    return placed

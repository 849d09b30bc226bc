"""Escaped SVG elements, and the two things every chart needs: a scale and ticks."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

from markupsafe import Markup, escape

__all__ = ["Scale", "clip_lines", "drawing", "nice_ticks", "tag"]


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """Return one element, escaped: ``None`` leaves an attribute out, floats get one decimal, underscores become hyphens.

    >>> tag("text", "a < b", x=1.25, class_="label")
    Markup('<text x="1.2" class="label">a &lt; b</text>')
    """
    spelled = Markup("")
    for key, value in attributes.items():
        if value is not None:
            text = f"{value:.1f}" if isinstance(value, float) else str(value)
            spelled += Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), text)
    inside = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), spelled, inside)


def drawing(*children: str, width: int, height: float, ident: str, title: str, desc: str, class_: str) -> Markup:
    """Return a whole picture with the title and description a screen reader says."""
    return tag(
        "svg",
        tag("title", title, id=f"{ident}-title"),
        tag("desc", desc, id=f"{ident}-desc"),
        *children,
        viewBox=f"0 0 {width} {height:.0f}",
        role="img",
        aria_labelledby=f"{ident}-title {ident}-desc",
        class_=class_,
    )


@dataclass(frozen=True)
class Scale:
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of ``value``, kept inside the plot."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def nice_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return round numbers that cover ``low`` to ``high``.

    >>> nice_ticks(0.93, 1.3)
    [0.9, 1.0, 1.1, 1.2, 1.3]
    """
    if high <= low:
        high = low + (abs(low) or 1.0) * 0.1
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.99)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [round(i * step, 10) for i in range(first, last + 1)]


def clip_lines(text: str, width: int, lines: int = 2) -> list[str]:
    """Break a label into at most ``lines`` lines of ``width`` characters, preferably at a plus or comma."""
    broken = textwrap.wrap(text, width) or [""]
    if len(broken) > lines:
        broken = [*broken[: lines - 1], broken[lines - 1][: width - 1] + "…"]
    return broken

"""Numbers as people write them. What is missing is said in words; nothing here can print "not a number"."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from gradveil.study.measures import Estimate, Spread

__all__ = [
    "MISSING",
    "accuracy",
    "count",
    "db",
    "duration",
    "interval",
    "ms",
    "percent",
    "plain_json",
    "points",
    "ratio",
    "significant",
    "size",
    "spread",
    "times",
]

MISSING = "–"
NBSP = "\u00a0"


def _percent_number(value: float) -> str:
    points = 100 * value
    # One decimal only where rounding would hide that it is not quite 0 or not quite 100.
    if 0.05 <= points < 1 or 99 < points < 99.95:
        return f"{points:.1f}"
    return f"{math.floor(points + 0.5)}"


def percent(value: float | None) -> str:
    """Return a share as a percentage: 0.9375 is ``94 %``."""
    return MISSING if value is None else f"{_percent_number(value)}{NBSP}%"


def interval(low: float | None, high: float | None) -> str:
    """Return an interval of shares: ``72–99 %``."""
    if low is None or high is None:
        return "interval not available"
    return f"{_percent_number(low)}–{_percent_number(high)}{NBSP}%"


def accuracy(value: Estimate | None) -> str:
    """Return an accuracy with its interval over seeds: ``87.3 % (85.1–89.5)``."""
    return _estimate(value, lambda number: f"{100 * number:.1f}", f"{NBSP}%")


def points(value: Estimate | None) -> str:
    """Return a difference of accuracies in percentage points: ``−1.2 (−2.0 to −0.4)``."""
    return _estimate(value, _signed, "", " to ")


def ratio(value: Estimate | None) -> str:
    """Return a ratio of accuracies: ``0.98 (0.95–1.01)``."""
    return _estimate(value, lambda number: f"{number:.3f}", "")


def _signed(value: float) -> str:
    text = f"{100 * value:+.1f}"
    return "0.0" if text in {"+0.0", "-0.0"} else text.replace("-", "−")


def _estimate(value: Estimate | None, spell: Callable[[float], str], unit: str, between: str = "–") -> str:
    if value is None:
        return MISSING
    if value.low is None or value.high is None or value.low == value.high:
        return f"{spell(value.value)}{unit}"
    return f"{spell(value.value)}{unit} ({spell(value.low)}{between}{spell(value.high)})"


def significant(value: float | None, digits: int = 2) -> str:
    """Return a number with a few significant digits and no exponent for everyday sizes."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -5 or magnitude > 8:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - magnitude)}f}"


def db(value: float | None) -> str:
    """Return a PSNR: ``31.0 dB``."""
    return MISSING if value is None else f"{value:.1f}{NBSP}dB"


def spread(value: Spread | None, unit: str = "") -> str:
    """Return a median with its interval: ``31.0 dB (28.1–33.0)``; without a unit, two significant digits."""
    if value is None:
        return MISSING

    def spelled(number: float) -> str:
        return f"{number:.1f}" if unit else significant(number)

    middle = f"{spelled(value.median)}{NBSP}{unit}" if unit else spelled(value.median)
    if value.low is None or value.high is None:
        return middle
    return f"{middle} ({spelled(value.low)}–{spelled(value.high)})"


def size(value: float | None) -> str:
    """Return bytes in decimal units: 63304 is ``63.3 kB``."""
    if value is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f}{NBSP}{unit}" if unit == "B" or value >= 100 else f"{value:.1f}{NBSP}{unit}"


def ms(value: float | None) -> str:
    """Return milliseconds, or seconds from one second on."""
    if value is None:
        return MISSING
    return f"{value / 1000:.1f}{NBSP}s" if value >= 1000 else f"{significant(value)}{NBSP}ms"


def duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: ``3 min 20 s``."""
    if seconds is None:
        return MISSING
    total = round(seconds)
    if total < 60:
        return f"{total}{NBSP}s"
    minutes, rest = divmod(total, 60)
    if minutes < 60:
        return f"{minutes}{NBSP}min {rest}{NBSP}s"
    return f"{minutes // 60}{NBSP}h {minutes % 60}{NBSP}min"


def times(ratio: float | None) -> str:
    """Return a ratio: ``1.07×``."""
    if ratio is None:
        return MISSING
    if 0 < ratio < 0.01:
        return f"{ratio:.1g}×"
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.0f}×"


def count(number: int, one: str, many: str = "") -> str:
    """Return ``1 record`` or ``3 records``."""
    return f"{number}{NBSP}{one if number == 1 else many or one + 's'}"


def plain_json(value: Any) -> str:
    """Return plan or provenance values as readable JSON."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, sort_keys=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Checks of a defense's settings, so that every file refuses nonsense in the same words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradveil.errors import UsageError, suggest

__all__ = ["check_choice", "check_flag", "check_number", "check_whole", "noise_std"]


def check_number(
    owner: str, setting: str, value: object, *, least: float = 0.0, open_below: bool = False, below: float = math.inf
) -> None:
    """Refuse anything but a finite number in [least, below), or (least, below) where ``open_below``.

    >>> check_number("pruning", "rate", 1.5, below=1)
    Traceback (most recent call last):
    gradveil.errors.UsageError: pruning: rate is 1.5; it must be a number at least 0 and below 1
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if number and (value > least if open_below else value >= least) and value < below:  # type: ignore[operator]
        return
    limit = f" and below {below:g}" if below < math.inf else ""
    raise UsageError(
        f"{owner}: {setting} is {value!r}; it must be a number {'above' if open_below else 'at least'} {least:g}{limit}"
    )


def check_whole(owner: str, setting: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse anything but a whole number from ``least`` up, or up to ``most``.

    >>> check_whole("quantisation", "bits", 1, 2, 16)
    Traceback (most recent call last):
    gradveil.errors.UsageError: quantisation: bits is 1; it must be a whole number from 2 to 16
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{owner}: {setting} is {value!r}; it must be a whole number {limit}")


def check_choice(owner: str, setting: str, value: object, choices: Sequence[str]) -> None:
    """Refuse anything but one of the choices.

    >>> check_choice("clipping", "scope", "layers", ("global", "layer"))
    Traceback (most recent call last):
    gradveil.errors.UsageError: clipping: scope is 'layers'; did you mean 'layer'?
    """
    if value not in choices:
        raise UsageError(f"{owner}: {setting} is {value!r}{suggest(str(value), choices)}")


def check_flag(owner: str, setting: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise UsageError(f"{owner}: {setting} is {value!r}; it must be True or False")


def noise_std(delta: float, variance: bool) -> float:
    """Return the standard deviation that δ stands for: the InvRE paper calls it a variance here and a strength there.

    >>> noise_std(0.25, variance=True), noise_std(0.25, variance=False)
    (0.5, 0.25)
    """
    return math.sqrt(delta) if variance else delta

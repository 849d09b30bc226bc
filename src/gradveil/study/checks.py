"""Checks of settings and of numbers that people hand in, so that every room refuses nonsense in the same words. No torch.

``owner`` is who has the setting, such as a defense; empty where the setting's name says enough.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import TypeGuard

from gradveil.errors import UsageError, suggest

__all__ = ["check_choice", "check_flag", "check_number", "check_share", "check_whole", "is_number", "is_whole"]

ASK = "it must be"
LARGEST = sys.float_info.max


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a finite number, such as a float can hold; True and False are none."""
    # Compared, not asked by `math.isfinite`, which fails on whole numbers of four hundred digits.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def is_whole(value: object) -> TypeGuard[int]:
    """Tell whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(
    owner: str,
    setting: str,
    value: object,
    *,
    least: float = 0.0,
    open_below: bool = False,
    below: float = math.inf,
    ask: str = ASK,
) -> None:
    """Refuse anything but a finite number in [least, below), or (least, below) where ``open_below``.

    >>> check_number("pruning", "rate", 1.5, below=1)
    Traceback (most recent call last):
    gradveil.errors.UsageError: pruning: rate is 1.5; it must be a number at least 0 and below 1
    """
    if is_number(value) and (value > least if open_below else value >= least) and value < below:
        return
    limit = f" and below {below:g}" if below < math.inf else ""
    _refuse(owner, setting, value, f"; {ask} a number {'above' if open_below else 'at least'} {least:g}{limit}")


def check_share(owner: str, setting: str, value: object, *, open_ends: bool = False) -> None:
    """Refuse anything but a number from 0 to 1, or strictly between them where ``open_ends``.

    >>> check_share("", "delta", 0, open_ends=True)
    Traceback (most recent call last):
    gradveil.errors.UsageError: delta is 0; it must be above 0 and below 1
    """
    if not (is_number(value) and (0 < value < 1 if open_ends else 0 <= value <= 1)):
        _refuse(owner, setting, value, f"; {ASK} {'above 0 and below 1' if open_ends else 'between 0 and 1'}")


def check_whole(owner: str, setting: str, value: object, least: int, most: int | None = None, *, ask: str = ASK) -> None:
    """Refuse anything but a whole number from ``least`` up, or up to ``most``.

    >>> check_whole("quantisation", "bits", 1, 2, 16)
    Traceback (most recent call last):
    gradveil.errors.UsageError: quantisation: bits is 1; it must be a whole number from 2 to 16
    """
    if not is_whole(value) or value < least or (most is not None and value > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        _refuse(owner, setting, value, f"; {ask} a whole number {limit}")


def check_choice(owner: str, setting: str, value: object, choices: Iterable[str]) -> None:
    """Refuse anything but one of the choices.

    >>> check_choice("clipping", "scope", "layers", ("global", "layer"))
    Traceback (most recent call last):
    gradveil.errors.UsageError: clipping: scope is 'layers'; did you mean 'layer'?
    """
    known = tuple(choices)
    if value not in known:
        _refuse(owner, setting, value, suggest(str(value), known))


def check_flag(owner: str, setting: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        _refuse(owner, setting, value, f"; {ASK} True or False")


def _refuse(owner: str, setting: str, value: object, remedy: str) -> None:
    raise UsageError(f"{owner}: {setting} is {value!r}{remedy}" if owner else f"{setting} is {value!r}{remedy}")

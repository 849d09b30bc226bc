"""Settings as results keep them: typed like those that were asked for, and honest about what a file does not say.

A file may be older than a setting, newer than this code, or edited by hand. What it lacks has the default, so that code can read
``cell.settings.batch_size`` of any file; what is shown comes from `Kept.said` and `Kept.as_dict`, which state no default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gradveil.study.cell import CAME_LATER, Cell
from gradveil.study.codec import UNREAD, encode
from gradveil.study.declare import again
from gradveil.study.federation import UtilitySettings
from gradveil.study.settings import Vertical
from gradveil.study.training import Training

__all__ = ["Kept", "KeptCell", "KeptTraining", "KeptUtility"]

LATER = ("scale", "read", "bn_statistics", "cut", "parts", "party", "sees", *CAME_LATER)
"""Settings that the first published cells lack: those were measured at what is the default now."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the settings in a result have beside their values.

    Attributes:
        unread: What the file says and no field can hold, by name; None for what it does not say.
    """

    unread: Mapping[str, Any] = field(default_factory=dict, hash=False, metadata=UNREAD)

    def __post_init__(self) -> None:
        """Refuse nothing: whatever these settings are, they were measured."""

    def said(self, name: str) -> Any:
        """Return a setting, or None where the file does not say it."""
        return None if name in self.unread else getattr(self, name)

    def as_dict(self) -> dict[str, Any]:
        """Return what is said as plain JSON values, in order."""
        return dict(encode(self))


@dataclass(frozen=True, kw_only=True)
class KeptCell(Kept, Cell):
    """A cell that was measured: its ensemble is the version that attacked."""

    KEYS = (*(each.name for each in fields(Cell)), "shares", "threads")

    threads: int = 1

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Say what older cells meant by saying nothing."""
        return {each.name: each.default for each in fields(Cell) if each.name in LATER} | values


@dataclass(frozen=True, kw_only=True)
class KeptTraining(Kept, Training):
    """A training that was run; where the model was cut is said only if it was, and never of a training without an audit."""


@dataclass(frozen=True, kw_only=True)
class KeptUtility(Kept, UtilitySettings):
    """What the trainings behind a cell have in common; of a cut model, nothing about clients is said."""

    cut: str = again(Vertical, "cut", "")
    parts: str = again(Vertical, "parts", "whole")

"""No defense: the reference every other row is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from gradveil.defenses.base import DEFENSES, Defense, DefenseCard

__all__ = ["NoDefense"]


@DEFENSES.register(
    DefenseCard(
        name="none",
        summary="Sends the update as it is.",
        cost="nothing",
        weakness="everything the update reveals is revealed",
        acts_on=(),
        ladder=({},),
        off={},
    )
)
@dataclass(frozen=True, kw_only=True)
class NoDefense(Defense):
    """The identity at every station: ``sent = update``.

    Departs from the paper: there is none. Cost: nothing. Known weakness: no protection.
    """

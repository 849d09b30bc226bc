"""Write a defense in one file, and check that it keeps the contract.

Run it: ``python examples/write_a_defense.py``. The same on the command line: ``gradveil check write_a_defense.py:Rounding``;
and to see whether it stops anyone: ``gradveil audit --defense none --defense 'write_a_defense.py:Rounding(step=0.1)'``.
"""

from dataclasses import dataclass
from typing import ClassVar

from gradveil import Defense, Observation, Update
from gradveil.adversary import OpenAdversary
from gradveil.defenses import ClientView, DefenseCard, State
from gradveil.records import WhatArrives
from gradveil.testing.defenses import check_defense


class RoundingAdversary(OpenAdversary):
    """The attacker who knows it: the true inputs explain the update up to rounding, and no entry arrives exactly."""

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that no tensor is exact: ``frozenset`` names none."""
        return super().arrives(observation).replace(exact=frozenset)


@dataclass(frozen=True, kw_only=True)
class Rounding(Defense):
    """``sent = step · round(u / step)``. Departs from the paper: there is none. Cost: one pass. Known weakness: see the card."""

    card: ClassVar[DefenseCard] = DefenseCard(
        name="rounding",
        summary="Rounds every entry of the update to a multiple of a step.",
        cost="one pass over the weights",
        weakness="large entries hardly change, and they tell the most",
        acts_on=("update",),
        ladder=({"step": 0.001}, {"step": 0.01}, {"step": 0.1}),
    )
    step: float = 0.01

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Round every tensor; a hook returns new values, and never changes what it was given."""
        rounded = {name: self.step * (value / self.step).round() for name, value in update.weights.items()}
        return update.replace(weights=rounded), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who knows the defense; the audit tries generic ones as well."""
        return RoundingAdversary()


if __name__ == "__main__":
    for result in check_defense(Rounding()):
        print(f"{result.status:<8} {result.check} {result.message}")

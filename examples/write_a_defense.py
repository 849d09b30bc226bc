"""Write a defense in one file, and check that it keeps the contract.

Run it: ``python examples/write_a_defense.py``. The same on the command line: ``gradveil check write_a_defense.py:Rounding``;
and to see whether it stops anyone: ``gradveil audit --defense none --defense 'write_a_defense.py:Rounding(step=0.1)'``.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradveil import Defense, Observation, Update
from gradveil.adversary import OpenAdversary
from gradveil.defenses import ClientView, DefenseCard, State
from gradveil.learning.learner import Learner
from gradveil.records import WhatArrives
from gradveil.tensors import Named
from gradveil.testing.defenses import check_defense


@dataclass(frozen=True)
class RoundingAdversary(OpenAdversary):
    """The attacker who knows it: no entry arrives exactly, and what a guess would have sent is rounded before it is compared."""

    step: float

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that no tensor is exact: ``frozenset`` names none."""
        return super().arrives(observation).replace(exact=frozenset)

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        """Round, and let the search pass through as if nothing were rounded: steps have no slope to follow."""
        return {name: value + (rounded(value, self.step) - value).detach() for name, value in update.items()}


def rounded(value: Tensor, step: float) -> Tensor:
    """Round to a multiple of a step."""
    return step * (value / step).round()


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
        return update.replace(weights={name: rounded(value, self.step) for name, value in update.weights.items()}), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who knows the defense; the audit tries generic ones as well."""
        return RoundingAdversary(self.step)


if __name__ == "__main__":
    for result in check_defense(Rounding()):
        print(f"{result.status:<8} {result.check} {result.message}")

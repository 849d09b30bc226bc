"""How long the attackers of a cell take on this machine: each is run for a few steps on a real update, the rest is multiplied.

What a step costs depends on the objective, the defense that is replayed, the stance, the smoothing of the network and how many
candidates share a program; timing one plain step of one candidate was off by a factor of three. So the very attackers are run,
with two small budgets: the difference tells a step, what is left is spent once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.attacks import Attack, AttackContext, Referee, launch
from gradveil.attacks.engine.execution import CPU_BATCH_LIMIT, choose_execution
from gradveil.client.timing import work_seconds
from gradveil.records import Observation, Reconstruction

__all__ = ["Pace", "attack_seconds", "judging_seconds"]

FEW, MORE, MANY = 2, 10, 25
"""Steps of the two runs whose difference tells what one step takes; many where both begin with dear runs of the client's code."""
OVERHEAD = 3
"""Evaluations that a search makes beside its steps: the slope before it, the loss before and after."""
LONG_SECONDS = 1.5
"""A first run longer than this is not repeated with more steps: its own length tells."""
COMPILED_FASTER, COMPILING_SECONDS = 1.7, 60.0
"""What compilation gains on a CPU and what it costs once, about (docs/measurements.md)."""


@dataclass(frozen=True)
class Pace:
    """What one attacker takes for all updates of a cell, and what it found on the way."""

    seconds: float
    found: tuple[Reconstruction, ...]


def attack_seconds(attack: Attack, observation: Observation, context: AttackContext, updates: int, client: float) -> Pace:
    """Return what one attacker takes for ``updates`` updates like this one.

    Args:
        attack: As it will be launched.
        observation: One real update, which stands for all.
        context: Of the attacker, with the budget of the cell.
        updates: How many there will be, rehearsals included.
        client: Seconds of one update of the defended client, which some attackers run every few steps.
    """
    device = next(iter(observation.update.weights.values())).device
    rows = attack.cost().restarts * attack.hypotheses(observation, context)
    alone = device.type == "cpu" and observation.learner.parameters > CPU_BATCH_LIMIT
    together = 1 if alone else updates
    steps = context.steps(attack.cost().steps)
    first, found = _timed(attack, [observation] * together, context, FEW)
    if attack.cost().per_label:  # what all updates of one label share was measured on copies of one update
        return Pace(first * _labels(observation, updates), found)
    if steps <= FEW:
        return Pace(first * updates / together, found)
    if first > LONG_SECONDS:
        per_step, once = first / (FEW + OVERHEAD), first * OVERHEAD / (FEW + OVERHEAD)
    else:
        # The very first run pays for what is prepared once; a second tells what a run of this length takes.
        again, _ = _timed(attack, [observation] * together, context, FEW)
        more = min(MANY if attack.cost().client_updates else MORE, steps)
        longer, _ = _timed(attack, [observation] * together, context, more)
        per_step = max(0.0, longer - again) / (more - FEW)
        once = max(0.0, first - FEW * per_step)
    mode = choose_execution(
        context.execution, device, observation.learner.parameters, updates * rows, observation.examples, steps
    )
    seconds = (once + steps * per_step) * updates / together + steps * rows * updates * attack.cost().client_updates * client
    if mode.mode == "compiled":
        seconds = once + COMPILING_SECONDS + steps * per_step / COMPILED_FASTER
    return Pace(seconds, found)


def _labels(observation: Observation, updates: int) -> float:
    """Return how many labels are expected among so many updates, if all classes are as frequent; of batches, one each."""
    if observation.examples > 1 or observation.classes == 0:
        return updates
    return observation.classes * (1 - (1 - 1 / observation.classes) ** updates)


def judging_seconds(observation: Observation, candidates: Sequence[Reconstruction], updates: int) -> float:
    """Return what the referee takes for the candidates of all updates; it fits unknowns anew, in double precision."""
    if not candidates:
        return 0.0
    device = candidates[0].inputs.device
    return updates * work_seconds(lambda: Referee().scores(observation, candidates), device)


def _timed(
    attack: Attack, observations: Sequence[Observation], context: AttackContext, steps: int
) -> tuple[float, tuple[Reconstruction, ...]]:
    few = dataclasses.replace(context, budget=min(steps, context.budget), progress=None)
    found: list[Reconstruction] = []
    device = next(iter(observations[0].update.weights.values())).device
    seconds = work_seconds(lambda: found.extend(launch(attack, observations, few)), device)
    return seconds, tuple(each for each in found if each.target == 0)

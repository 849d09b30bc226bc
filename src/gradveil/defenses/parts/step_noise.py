"""What noise on the gradient of every local step amounts to on the update that is sent."""

from __future__ import annotations

import math
from collections.abc import Callable

from gradveil.records import Observation

__all__ = ["accumulated_noise", "step_sizes"]


def step_sizes(observation: Observation) -> list[int]:
    """Return how many examples one client used at each of its local steps."""
    settings = observation.learner.settings
    examples = max(1, observation.examples // observation.threat.clients)
    if settings.shares == "gradient":
        return [examples]
    chosen = [settings.minibatch_indices(step, examples) for step in range(settings.steps(examples))]
    return [examples if indices is None else len(indices) for indices in chosen]


def accumulated_noise(observation: Observation, std: Callable[[int], float]) -> float | None:
    """Return the standard deviation, on the update that is seen, of noise drawn anew at every step.

    A gradient carries it as it is. With SGD the noise of step t of T moves the update by the learning rate times
    1 + m + ... + m^(T-1-t), m the momentum. That is exact for one step; for several it leaves out that noisy weights also change
    later gradients, which is of second order in the learning rate. Adam is not linear in its gradients: None.

    Args:
        observation: Whose training settings and number of clients count.
        std: Standard deviation on the gradient of a step, from its number of examples.
    """
    settings = observation.learner.settings
    per_step = [std(size) for size in step_sizes(observation)]
    clients = observation.threat.clients
    if settings.shares == "gradient":
        return per_step[0] / math.sqrt(clients)
    if settings.optimizer != "sgd":
        return None
    moved, factor = [], 0.0
    for each in reversed(per_step):
        factor = 1 + settings.momentum * factor
        moved.append(settings.learning_rate * factor * each)
    return math.hypot(*moved) / math.sqrt(clients)

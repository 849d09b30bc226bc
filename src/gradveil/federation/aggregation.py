"""Many updates become one, tensor by tensor and by role.

| role | rule |
|---|---|
| weight | mean by number of examples, or by the weights the defense chooses per tensor (SVDefense: entropy times examples) |
| buffer | mean by number of examples over the clients that sent it; the defense's weights are made for gradients |
| counter | the client that counted furthest: local steps of clients run side by side, so they do not add up |

Everything is in gradient sign, as updates are: a counter that grew by 3 arrives as -3, and the furthest client has the least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Role, Update
from gradveil.tensors import Named

__all__ = ["LayerWeights", "aggregate", "shares_by_tensor", "subtract"]

LayerWeights = Mapping[str, float]


def aggregate(updates: Sequence[Update], spec: ModelSpec, layer_weights: Sequence[LayerWeights] | None = None) -> Update:
    """Return the one update that stands for all of them.

    Args:
        updates: Decoded updates of one round.
        spec: Says which tensor has which role.
        layer_weights: One mapping from tensor to weight per update, as `Defense.layer_weights` returns them. They need not sum to
            one; tensors they leave out are averaged by examples. None averages everything by examples.

    Raises:
        BadUpdate: There is nothing to aggregate, or the weights of a tensor are negative, not finite, or sum to zero.
    """
    if not updates:
        raise BadUpdate("there are no updates to aggregate: every client was refused or sent nothing")
    shares = shares_by_tensor(updates, spec, layer_weights)
    weights = {
        name: _weighted_sum([update.weights[name] for update in updates], shares[name]) for name in spec.named(Role.WEIGHT)
    }
    buffers = {
        name: _aggregate_buffer(name, role_spec.role, updates)
        for name, role_spec in spec.tensors.items()
        if role_spec.role is not Role.WEIGHT and any(name in update.buffers for update in updates)
    }
    return Update(weights, sum(update.examples for update in updates), updates[0].round, buffers)


def shares_by_tensor(
    updates: Sequence[Update], spec: ModelSpec, layer_weights: Sequence[LayerWeights] | None = None
) -> dict[str, list[float]]:
    """Return each update's share in every weight tensor; the shares of a tensor sum to one."""
    examples = [float(update.examples) for update in updates]
    if layer_weights is not None and len(layer_weights) != len(updates):
        raise BadUpdate(f"there are aggregation weights for {len(layer_weights)} updates, but {len(updates)} updates")
    shares = {}
    for name in spec.named(Role.WEIGHT):
        told = [name in own for own in layer_weights or ()]
        if any(told) and not all(told):
            raise BadUpdate(f"only some clients have an aggregation weight for {name!r}; all or none must have one")
        chosen = [float(own[name]) for own in layer_weights] if layer_weights is not None and all(told) else examples
        shares[name] = _normalise(name, chosen)
    return shares


def _normalise(name: str, weights: Sequence[float]) -> list[float]:
    wrong = next((value for value in weights if not (math.isfinite(value) and value >= 0)), None)
    if wrong is not None:
        raise BadUpdate(f"an aggregation weight of {name!r} is {wrong}; it must be a finite number, at least 0")
    # Divided by the largest first, so that counts near the end of float64 cannot overflow their sum.
    largest = max(weights)
    if largest == 0:
        raise BadUpdate(f"the aggregation weights of {name!r} sum to zero, so no client counts; fall back to example counts")
    scaled = [value / largest for value in weights]
    total = math.fsum(scaled)
    return [value / total for value in scaled]


def _weighted_sum(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = values[0] * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        total = total + value * share
    return total


def _aggregate_buffer(name: str, role: Role, updates: Sequence[Update]) -> Tensor:
    sent = [update for update in updates if name in update.buffers]
    values = [update.buffers[name] for update in sent]
    if role is Role.COUNTER:
        return torch.stack(values).amin(0)
    return _weighted_sum(values, _normalise(name, [float(update.examples) for update in sent]))


def subtract(values: Named, update: Named) -> Named:
    """Return values minus the update where there is one: the way everything in gradient sign is applied."""
    return {name: value - update[name] if name in update else value for name, value in values.items()}

"""Run the client's own code on many candidates: at once where it can be mapped, one by one where it cannot.

One by one is the reference. The code is somebody else's, so before anything mapped is believed for the first time, two candidates
are run both ways.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext
from gradveil.errors import UsageError
from gradveil.tensors import Named, stack

__all__ = ["run_clients"]

SAME = 0.02
"""Largest distance of two answers, in units of a tensor's norm, that is rounding; ten-bit factors and kinks move it by less."""
SILENT = 1e-4
"""Of the whole norm: tensors of which nothing but rounding arrives may differ by this."""


def run_clients(context: AttackContext, inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
    """Return, per round, what the server would read of every candidate, along a leading axis.

    Args:
        context: Its ``simulate``, which must be there, and ``simulate_many``.
        inputs: (N, B, ...).
        targets: (N, B, ...).
        draw: Of the client's randomness, the same for all.
    """
    # What can be mapped depends on the client, which the context stands for, and on what it is given.
    key = ("clients at once", inputs.shape[1:], targets.shape[1:], targets.dtype)
    if context.simulate_many is not None and len(inputs) > 1 and context.memory.get(key, True):
        found = _at_once(context, inputs, targets, draw)
        if key not in context.memory:
            few = None if found is None else _one_by_one(context, inputs[:2], targets[:2], draw)
            context.memory[key] = found is not None and few is not None and _agree(found, few)
        if found is not None and context.memory[key]:
            return found
        context.memory[key] = False
    return _one_by_one(context, inputs, targets, draw)


def _at_once(context: AttackContext, inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...] | None:
    assert context.simulate_many is not None
    try:
        return context.simulate_many(inputs, targets, draw)
    except Exception:  # whatever stops it, one by one is there, and says what is really wrong
        return None


def _one_by_one(context: AttackContext, inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
    if context.simulate is None:
        raise UsageError("there is no client's code to run; hand it in as the context's `simulate`")
    rows = [context.simulate(x, y, draw) for x, y in zip(inputs, targets, strict=True)]
    return tuple(stack([row[index] for row in rows]) for index in range(len(rows[0])))


def _agree(many: tuple[Named, ...], few: tuple[Named, ...]) -> bool:
    """Whether the first of many are those few, up to rounding."""
    if [each.keys() for each in many] != [each.keys() for each in few]:
        return False
    for own, expected in zip(many, few, strict=True):
        apart = torch.stack([(own[n][: len(v)].double() - v.double()).norm() for n, v in expected.items()])
        sizes = torch.stack([v.double().norm() for v in expected.values()])
        if not bool((apart <= torch.maximum(SAME * sizes, SILENT * sizes.norm())).all()):
            return False
    return True

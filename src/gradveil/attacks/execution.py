"""How candidates are mapped over one loss function: batched, looped, captured or compiled, chosen by device and model size.

Measured on two CPU cores with one thread and sixteen candidates (docs/measurements.md): a LeNet runs several times faster
batched than looped, a ResNet-18 slower, because its weight gradients do not fit the cache. On a GPU batching always wins, and
the time then goes to launching kernels, not to running them; so a step is captured once as a CUDA graph and replayed.
Compilation pays only where a program runs for minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from gradveil.attacks.capture import Captured
from gradveil.errors import UsageError
from gradveil.tensors import Named

__all__ = ["COARSE_FROM", "MODES", "Execution", "choose_execution"]

MODES = ("auto", "batched", "looped", "captured", "compiled")
Evaluate = Callable[[Tensor, Named], tuple[Tensor, Tensor]]

CPU_BATCH_LIMIT = 300_000
COMPILE_PAYS_CPU = 400_000
CAPTURE_PAYS = 10
"""Steps from which recording a step is worth the three evaluations it costs."""
COARSE_FROM = 2_000_000
"""Weights from which matrix products may be coarse (`gradveil.tensors.matrix_products`) in an attack.

The loss of a LeNet starts at 5e-6 of its scale: there the truth would no longer be the minimum. On a ResNet-18 a picture at 40 dB
is a thousand times further from the truth than this rounding is.
"""


@dataclass(frozen=True)
class Execution:
    """A mode and the number of candidates evaluated together."""

    mode: str
    chunk: int

    def prepare(self, loss: Callable[[Tensor, Named], Tensor]) -> Evaluate:
        """Return ``(rows, constants) -> (gradients, values)`` over all candidates."""
        one = grad_and_value(loss)
        if self.mode == "looped":
            return lambda rows, constants: _looped(one, rows, constants)
        together: Any = vmap(one)
        if self.mode == "compiled":
            together = torch.compile(together, dynamic=False)
        if self.mode == "captured":
            together = Captured(together)
        return lambda rows, constants: _chunked(together, rows, constants, self.chunk)


def _looped(one: Any, rows: Tensor, constants: Named) -> tuple[Tensor, Tensor]:
    found = [one(rows[i], {name: value[i] for name, value in constants.items()}) for i in range(rows.shape[0])]
    return torch.stack([g for g, _ in found]).detach(), torch.stack([v for _, v in found]).detach()


def _chunked(together: Any, rows: Tensor, constants: Named, chunk: int) -> tuple[Tensor, Tensor]:
    if rows.shape[0] <= chunk:
        gradients, values = together(rows, constants)
        return gradients.detach(), values.detach()
    parts = [
        together(rows[i : i + chunk], {name: value[i : i + chunk] for name, value in constants.items()})
        for i in range(0, rows.shape[0], chunk)
    ]
    return torch.cat([g for g, _ in parts]).detach(), torch.cat([v for _, v in parts]).detach()


def choose_execution(wanted: str, device: torch.device, parameters: int, candidates: int, examples: int, steps: int) -> Execution:
    """Choose mode and chunk size.

    Args:
        wanted: One of `MODES`; anything but ``auto`` is taken as it is.
        device: Where the attack runs.
        parameters: Trainable entries of the model.
        candidates: Targets × restarts.
        examples: Inputs per candidate.
        steps: Steps planned.
    """
    if wanted not in MODES:
        raise UsageError(f"execution mode {wanted!r} is unknown; choose one of {', '.join(MODES)}")
    chunk = _chunk_size(device, parameters, candidates, examples)
    if wanted != "auto":
        return Execution(wanted, chunk)
    if device.type == "cuda":
        return Execution("captured" if steps >= CAPTURE_PAYS else "batched", chunk)
    if parameters > CPU_BATCH_LIMIT:
        return Execution("looped", 1)
    worth = candidates * steps >= COMPILE_PAYS_CPU and candidates % chunk == 0
    return Execution("compiled" if worth else "batched", chunk)


def _chunk_size(device: torch.device, parameters: int, candidates: int, examples: int) -> int:
    """Bound memory: about a dozen copies of the gradient per candidate live at once, plus activations."""
    per_candidate = parameters * 4 * 12 + examples * 3_000_000
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        limit = int(free * 0.6)
    else:
        limit = 700_000_000
    most = max(1, limit // per_candidate)
    if most >= candidates:
        return candidates
    # Equal chunks, so that a compiled program sees one shape.
    pieces = -(-candidates // most)
    return -(-candidates // pieces)

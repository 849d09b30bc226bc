"""How candidates are mapped over one loss function: batched, looped, captured or compiled, chosen by device and model size.

Measured on two CPU cores with one thread and sixteen candidates (docs/measurements.md): a LeNet runs several times faster
batched than looped, a ResNet-18 slower, because its weight gradients do not fit the cache. On a GPU batching always wins, and
the time then goes to launching kernels, not to running them; so a step is captured once as a CUDA graph and replayed.
Compilation pays only where a program runs for minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from gradveil.errors import UsageError
from gradveil.recording import Recorded
from gradveil.tensors import Named

__all__ = ["COARSE_FROM", "CPU_BATCH_LIMIT", "MODES", "Chunks", "Evaluate", "Execution", "choose_execution", "chunk_size"]

MODES = ("auto", "batched", "looped", "captured", "compiled")
Evaluate = Callable[[Tensor, Named], tuple[Tensor, Tensor]]

ROWS = "rows of all candidates"
"""Name of the rows among the constants; no constant can have it."""
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

    def once(self) -> Execution:
        """Return the same for a single evaluation, which is not worth compiling or recording."""
        return replace(self, mode="batched") if self.mode in ("compiled", "captured") else self

    def together(self, loss: Callable[[Tensor, Named], Tensor]) -> Chunks:
        """Return the same for candidates that are mapped, as they are, neither compiled nor recorded."""
        return Chunks(vmap(grad_and_value(loss)), self.chunk)

    def prepare(self, loss: Callable[[Tensor, Named], Tensor]) -> Evaluate:
        """Return ``(rows, constants) -> (gradients, values)`` over all candidates."""
        if self.mode == "looped":
            return lambda rows, constants: _looped(loss, rows, constants)
        together: Any = vmap(grad_and_value(loss))
        if self.mode == "compiled":
            together = torch.compile(together, dynamic=False)
        if self.mode == "captured":
            together = _Captured(together)
        return Chunks(together, self.chunk)


def _looped(loss: Callable[[Tensor, Named], Tensor], rows: Tensor, constants: Named) -> tuple[Tensor, Tensor]:
    found = [_one(loss, rows[i], {name: value[i] for name, value in constants.items()}) for i in range(rows.shape[0])]
    return torch.stack([g for g, _ in found]), torch.stack([v for _, v in found])


def _one(loss: Callable[[Tensor, Named], Tensor], row: Tensor, constants: Named) -> tuple[Tensor, Tensor]:
    """Return gradient and value of one candidate by plain autograd, which spends less on a small step than a transform does."""
    with torch.enable_grad():
        row = row.detach().requires_grad_()
        value = loss(row, constants)
        if not value.requires_grad:
            return torch.zeros_like(row), value.detach()
        (gradient,) = torch.autograd.grad(value, row, materialize_grads=True)
    return gradient.detach(), value.detach()


class _Captured:
    """The same function of rows and constants, from a recording."""

    def __init__(self, together: Any) -> None:
        def named(given: Named) -> Named:
            gradients, values = together(given[ROWS], {name: value for name, value in given.items() if name != ROWS})
            return {"gradients": gradients, "values": values}

        self._recorded = Recorded(named)

    def __call__(self, rows: Tensor, constants: Named) -> tuple[Tensor, Tensor]:
        found = self._recorded({ROWS: rows, **constants})
        return found["gradients"], found["values"]

    def forget(self) -> None:
        self._recorded.forget()


class Chunks:
    """Evaluates candidates in chunks, and in smaller ones for good once a GPU's memory has not been enough.

    How much a step needs depends on the network, the defense and the local steps replayed; `chunk_size` only guesses it.
    """

    def __init__(self, together: Any, chunk: int) -> None:
        """Begin with so many at a time."""
        self._together, self._chunk = together, chunk

    def __call__(self, rows: Tensor, constants: Named) -> tuple[Tensor, Tensor]:
        """Return gradients and values of all candidates."""
        while True:
            try:
                return self._evaluate(rows, constants)
            except torch.OutOfMemoryError:
                # What a recording has begun only it can end.
                if (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()) or not self.halve(len(rows)):
                    raise
            # Outside the handler: until it ends, the exception keeps everything alive that filled the memory.
            if isinstance(self._together, _Captured):
                self._together.forget()
            torch.cuda.empty_cache()

    def halve(self, candidates: int) -> bool:
        """Take half as many at a time from now on, and tell whether that was possible."""
        now = min(self._chunk, candidates)
        self._chunk = _equal_chunks(candidates, -(-now // 2))
        return now > 1

    def _evaluate(self, rows: Tensor, constants: Named) -> tuple[Tensor, Tensor]:
        if rows.shape[0] <= self._chunk:
            gradients, values = self._together(rows, constants)
            return gradients.detach(), values.detach()
        starts = range(0, rows.shape[0], self._chunk)
        pieces = [slice(start, start + self._chunk) for start in starts]
        parts = [self._together(rows[piece], {name: value[piece] for name, value in constants.items()}) for piece in pieces]
        return torch.cat([g for g, _ in parts]).detach(), torch.cat([v for _, v in parts]).detach()


def _equal_chunks(candidates: int, most: int) -> int:
    """Return the size of equal chunks of at most ``most`` candidates, so that a recorded or compiled program sees one shape."""
    return -(-candidates // -(-candidates // most))


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
    chunk = chunk_size(device, parameters, candidates, examples)
    if wanted != "auto":
        return Execution(wanted, chunk)
    if device.type == "cuda":
        return Execution("captured" if steps >= CAPTURE_PAYS else "batched", chunk)
    if parameters > CPU_BATCH_LIMIT or candidates == 1:  # mapping over one candidate costs a quarter and gains nothing
        return Execution("looped", 1)
    worth = candidates * steps >= COMPILE_PAYS_CPU and candidates % chunk == 0
    return Execution("compiled" if worth else "batched", chunk)


def chunk_size(device: torch.device, parameters: int, candidates: int, examples: int) -> int:
    """Bound memory: about a dozen copies of the gradient per candidate live at once, plus activations."""
    per_candidate = parameters * 4 * 12 + examples * 3_000_000
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        limit = int(free * 0.6)
    else:
        limit = 700_000_000
    most = max(1, limit // per_candidate)
    return _equal_chunks(candidates, most)

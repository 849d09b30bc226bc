"""Record one evaluation of all candidates as a CUDA graph and replay it.

A step of an attack launches thousands of small kernels from Python; on a fast GPU the launching takes many times longer than
the kernels. A graph launches them all at once. It reads from and writes to fixed memory, so inputs are copied in and results
out, and what cannot be recorded (a step that waits for the GPU) is evaluated the ordinary way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.tensors import Named

__all__ = ["Captured"]

Together = Callable[[Tensor, Named], tuple[Tensor, Tensor]]

WARM_UPS = 2
"""Evaluations before the recording: libraries choose algorithms and allocate workspaces in the first ones."""


@dataclass
class _Recording:
    """A graph with the memory it reads and writes, and which tensors its constants were last copied from."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    constants: Named
    gradients: Tensor
    values: Tensor
    sources: dict[str, tuple[Tensor, int]] = field(default_factory=dict)


class Captured:
    """Evaluates like the function it is made of, from a recording per number of rows; on a CPU it is that function."""

    def __init__(self, together: Together) -> None:
        """Wrap a function of rows and constants."""
        self._together = together
        self._recordings: dict[int, _Recording] = {}
        self._possible = True

    def __call__(self, rows: Tensor, constants: Named) -> tuple[Tensor, Tensor]:
        """Return gradients and values of all rows."""
        if not self._possible or rows.device.type != "cuda":
            return self._together(rows, constants)
        if rows.shape[0] not in self._recordings:
            recording = self._record(rows, constants)
            if recording is None:
                return self._together(rows, constants)
            self._recordings[rows.shape[0]] = recording
        recording = self._recordings[rows.shape[0]]
        recording.rows.copy_(rows)
        for name, value in constants.items():
            # Most constants are the same tensors at every step; copying the evidence of a large model each time would cost
            # more than the launches that are saved.
            source = recording.sources.get(name)
            if source is None or source[0] is not value or source[1] != value._version:
                recording.constants[name].copy_(value)
                recording.sources[name] = (value, value._version)
        recording.graph.replay()
        return recording.gradients.clone(), recording.values.clone()

    def _record(self, rows: Tensor, constants: Named) -> _Recording | None:
        fixed_rows, fixed = rows.detach().clone(), {name: value.detach().clone() for name, value in constants.items()}
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self._together(fixed_rows, fixed)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                gradients, values = self._together(fixed_rows, fixed)
        except RuntimeError as reason:
            self._possible = False
            torch.cuda.synchronize()
            warnings.warn(f"this step cannot be recorded and runs kernel by kernel: {reason}", RuntimeWarning, stacklevel=2)
            return None
        return _Recording(graph, fixed_rows, fixed, gradients.detach(), values.detach())

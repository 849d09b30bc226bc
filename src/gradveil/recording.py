"""Record a function of named tensors as a CUDA graph, once per shape, and replay it.

A step of an attack or of a training launches hundreds of small kernels from Python; on a fast GPU the launching takes many times
longer than the kernels. A graph launches them all at once. It reads from and writes to fixed memory, so inputs are copied in and
results out, and what cannot be recorded (a step that waits for the GPU) is evaluated the ordinary way.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradveil.tensors import Named

__all__ = ["Recorded"]

WARM_UPS = 2
"""Evaluations before the recording: libraries choose algorithms and allocate workspaces in the first ones."""


@dataclass
class _Recording:
    """A graph with the memory it reads and writes, and which tensors its inputs were last copied from."""

    graph: torch.cuda.CUDAGraph
    given: Named
    found: Named
    sources: dict[str, tuple[Tensor, int]] = field(default_factory=dict)

    def replay(self, given: Named) -> Named:
        for name, value in given.items():
            # Most constants of an attack are the same tensors at every step; copying the evidence of a large model each time
            # would cost more than the launches that are saved.
            source = self.sources.get(name)
            if source is None or source[0] is not value or source[1] != value._version:
                self.given[name].copy_(value)
                self.sources[name] = (value, value._version)
        self.graph.replay()
        return {name: value.clone() for name, value in self.found.items()}


class Recorded:
    """Evaluates like the function it is made of, from a recording per set of shapes; on a CPU it is that function.

    The function must not change what it is given, and must return new tensors.
    """

    def __init__(self, function: Callable[[Named], Named], *, patience: int = 0) -> None:
        """Wrap a function.

        Args:
            function: Named tensors to named tensors.
            patience: Evaluations of one set of shapes before it is worth a recording.
        """
        self._function, self._patience = function, patience
        self._seen: Counter[Any] = Counter()
        self._recordings: dict[Any, _Recording] = {}
        self._possible = True
        self._pool: Any = None

    def __call__(self, given: Named) -> Named:
        """Return what the function returns."""
        if not self._possible or next(iter(given.values())).device.type != "cuda":
            return self._function(given)
        shapes = tuple((name, value.shape, value.dtype) for name, value in given.items())
        recording = self._recordings.get(shapes)
        if recording is None:
            self._seen[shapes] += 1
            recording = self._record(given) if self._seen[shapes] > self._patience else None
            if recording is None:
                return self._function(given)
            self._recordings[shapes] = recording
        return recording.replay(given)

    def forget(self) -> None:
        """Let go of all recordings and their memory."""
        self._recordings.clear()
        self._pool = None

    def _record(self, given: Named) -> _Recording | None:
        fixed = {name: value.detach().clone() for name, value in given.items()}
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self._function(fixed)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # One pool for all: results are copied out before another recording is replayed.
            with torch.cuda.graph(graph, pool=self._pool):
                found = self._function(fixed)
        except torch.OutOfMemoryError:
            raise  # a smaller part may fit
        except RuntimeError as reason:
            self._possible = False
            torch.cuda.synchronize()
            warnings.warn(f"this step cannot be recorded and runs kernel by kernel: {reason}", RuntimeWarning, stacklevel=2)
            return None
        self._pool = graph.pool()
        return _Recording(graph, fixed, {name: value.detach() for name, value in found.items()})

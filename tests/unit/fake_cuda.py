"""A stand-in for CUDA that records and replays functions themselves, on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from gradveil import recording
from gradveil.tensors import Named

KEEP = recording._keep


class FakeGraph:
    """Holds what the function was given and returned while it was captured."""

    def __init__(self) -> None:
        self.plan: Any = None
        self.names: Collection[str] = ()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        function, given, found = self.plan
        for name, value in function(given).items():
            found[name].copy_(value)
        KEEP(found, given, self.names)

    def pool(self) -> str:
        return "pool"


class FakeCuda:
    """What `gradveil.recording` uses of torch.cuda, on a CPU."""

    CUDAGraph = FakeGraph

    def __init__(self) -> None:
        self.capturing: FakeGraph | None = None
        self.failure: RuntimeError | None = None
        self.current = "main"
        self.graphs: list[FakeGraph] = []

    def synchronize(self) -> None:
        pass

    def Stream(self) -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None, name=self.current)

    def set_stream(self, stream: Any) -> None:
        self.current = stream.name

    def device(self, device: torch.device) -> Any:
        return contextlib.nullcontext()

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph, pool: Any, stream: Any) -> Iterator[None]:
        self.capturing, self.current = graph, "capture"
        self.graphs.append(graph)
        yield
        self.capturing = None
        if self.failure is not None:
            raise self.failure  # as torch does: the capture's stream stays the current one
        self.current = "main"

    def watched(self, function: Any) -> Any:
        def watching(given: Named) -> Named:
            found: Named = function(given)
            if self.capturing is not None:
                self.capturing.plan = function, given, found
            return found

        return watching

    def keep(self, found: Named, given: Named, names: Collection[str]) -> None:
        KEEP(found, given, names)
        assert self.capturing is not None
        self.capturing.names = names

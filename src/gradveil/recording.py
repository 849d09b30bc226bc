"""Record a function of named tensors as a CUDA graph, once per shape, and replay it.

A step of an attack or of a training launches hundreds of small kernels from Python; on a fast GPU the launching takes many times
longer than the kernels. A graph launches them all at once. It reads from and writes to fixed memory, so inputs are copied in and
results out, and what cannot be recorded (a step that waits for the GPU) is evaluated the ordinary way.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradveil.tensors import Named

__all__ = ["Recorded", "wait_for_gpu"]

RECORDABLE = ("cuda",)
WARM_UPS = 2
"""Evaluations before the recording: libraries choose algorithms and allocate workspaces in the first ones."""
SAME = 0.02
"""Largest distance of two answers, in units of their norm, that is rounding and not chance.

With ten-bit factors a GPU answers the same question differently by up to 7e-4 (a ResNet-18's gradients, entry by entry); dropout
moves them by tens of percent. So does rounding itself behind several local steps through kinks (ReLU, pooling): answers that
differ by more are asked again in a fixed order of sums, where only chance and memory are left to tell them apart.
"""


@dataclass
class _Recording:
    """A graph with the memory it reads and writes, and which tensors its inputs were last copied from."""

    graph: torch.cuda.CUDAGraph
    given: Named
    found: Named
    keeps: frozenset[str] = frozenset()
    sources: dict[str, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)

    def replay(self, given: Named) -> Named:
        for name, value in given.items():
            # Most constants of an attack are the same tensors at every step; copying the evidence of a large model each time
            # would cost more than the launches that are saved. What is kept in place is there already.
            source, version = self.sources.get(name, (None, 0))
            if value is not self.given[name] and (source is None or source() is not value or version != value._version):
                self.given[name].copy_(value)
                self.sources[name] = weakref.ref(value), value._version
        self.graph.replay()
        if self.keeps:
            return {name: self.given[name] if name in self.keeps else value for name, value in self.found.items()}
        return {name: value.clone() for name, value in self.found.items()}


class Recorded:
    """Evaluates like the function it is made of, from a recording per set of shapes; on a CPU it is that function.

    A function that changes what it is given, or answers differently the second time, is noticed and not recorded. It must not
    read tensors of its own that are replaced between calls: a recording goes on reading the old ones.
    """

    def __init__(
        self,
        function: Callable[[Named], Named],
        *,
        patience: int = 0,
        most: int = 1000,
        keeps: Collection[str] = (),
    ) -> None:
        """Wrap a function.

        Args:
            function: Named tensors to named tensors.
            patience: Evaluations of one set of shapes before it is worth a recording.
            most: Recordings to keep; each holds a copy of what it is given and of what it returns.
            keeps: Names under which it returns what it is to be given under the same name in the next call: a recording leaves
                these where it reads them. Then all results stand in the recording's own memory, until the next call.
        """
        self._function, self._patience, self._most, self._keeps = function, patience, most, frozenset(keeps)
        self._seen: Counter[Any] = Counter()
        self._recordings: dict[Any, _Recording] = {}
        self._possible = True
        self._pool: Any = None

    @property
    def recordings(self) -> int:
        """How many there are."""
        return len(self._recordings)

    def __call__(self, given: Named) -> Named:
        """Return what the function returns."""
        device = next(iter(given.values())).device
        if not self._possible or device.type not in RECORDABLE:
            return self._function(given)
        shapes = tuple((name, value.shape, value.dtype) for name, value in given.items())
        # Streams and graphs belong to the current device, which need not be the one of the tensors.
        with torch.cuda.device(device):
            recording = self._recordings.get(shapes) or self._first(shapes, given)
            return self._function(given) if recording is None else recording.replay(given)

    def forget(self) -> None:
        """Let go of all recordings and their memory."""
        self._recordings.clear()
        self._pool = None

    def _first(self, shapes: Any, given: Named) -> _Recording | None:
        self._seen[shapes] += 1
        if self._seen[shapes] <= self._patience or len(self._recordings) >= self._most:
            return None
        recording = self._record(given)
        if recording is not None:
            self._recordings[shapes] = recording
        return recording

    def _record(self, given: Named) -> _Recording | None:
        fixed = {name: value.detach().clone() for name, value in given.items()}
        before = torch.cuda.current_stream()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(before)
            with torch.cuda.stream(side):
                answers = [self._answer(fixed) for _ in range(WARM_UPS)]
                if _differ(*answers):
                    with _sums_in_order():
                        answers = [self._answer(fixed) for _ in range(WARM_UPS)]
            before.wait_stream(side)
            if any(value._version for value in fixed.values()) or _differ(*answers):
                self._give_up("it changes what it is given, or leaves something to chance")
                return None
            graph = torch.cuda.CUDAGraph()
            # One pool for all: results are copied out before another recording is replayed.
            with _no_garbage(), torch.cuda.graph(graph, pool=self._pool, stream=side):
                found = self._function(fixed)
                _keep(found, fixed, self._keeps)
        except RuntimeError as reason:
            # A capture that failed leaves its stream behind as the current one.
            torch.cuda.set_stream(before)
            if isinstance(reason, torch.OutOfMemoryError) or isinstance(reason.__context__, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(reason)) from None  # a smaller part may fit
            torch.cuda.synchronize()
            self._give_up(str(reason))
            return None
        self._pool = graph.pool()
        return _Recording(graph, fixed, {name: value.detach() for name, value in found.items()}, self._keeps)

    def _answer(self, given: Named) -> Named:
        """Return what chance would show in: what is kept follows from the rest."""
        return {name: value for name, value in self._function(given).items() if name not in self._keeps}

    def _give_up(self, reason: str) -> None:
        self._possible = False
        self.forget()
        warnings.warn(f"this step cannot be recorded and runs kernel by kernel: {reason}", RuntimeWarning, stacklevel=4)


def _keep(found: Named, given: Named, names: Collection[str]) -> None:
    """Put results where they are read from; first all aside, since one may be a view of what another was."""
    aside = {name: found[name].clone() for name in names}
    for name, value in aside.items():
        given[name].copy_(value)


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Collect garbage now and not inside: to free an older graph while another is captured spoils the capture."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _sums_in_order() -> Iterator[None]:
    """Let torch and its libraries add in the same order every time, where they can."""
    asked, only_warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations that cannot: their answers then differ, and nothing is recorded
            torch.use_deterministic_algorithms(True, warn_only=True)
            yield
    finally:
        torch.use_deterministic_algorithms(asked, warn_only=only_warned)


def _differ(left: Named, right: Named) -> bool:
    """Whether chance has part in an answer: whether at least half of its tensors differ by more than rounding.

    One tensor says nothing: the gradient of a bias in front of a BatchNorm is zero, and all that arrives of it is rounding.
    What is not finite in both counts as equal.
    """
    differing = 0
    for name, one in left.items():
        a, b = torch.nan_to_num(one.detach().double()), torch.nan_to_num(right[name].detach().double())
        differing += bool((a - b).norm() > SAME * torch.maximum(a.norm(), b.norm()))
    return 2 * differing >= max(1, len(left))


def wait_for_gpu(device: torch.device | None = None) -> None:
    """Wait until a GPU has done what it was told to do, if there is one at work; None is the current one."""
    if torch.cuda.is_initialized() if device is None else device.type == "cuda":
        torch.cuda.synchronize(device)

"""Replays of a recorded function are the function, and what cannot be replayed is not; on a CPU nothing is recorded.

Most tests run on a stand-in for CUDA that records and replays the function itself; two run on a GPU where there is one.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from gradveil.recording import Recorded
from gradveil.tensors import Named
from tests.unit.fake_cuda import FakeCuda

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="recordings need a CUDA device")


def pure(given: Named) -> Named:
    with torch.enable_grad():
        leaf = given["weight"].detach().requires_grad_()
        loss = ((given["inputs"] @ leaf).tanh() ** 2).sum()
    (slope,) = torch.autograd.grad(loss, leaf)
    return {"slope": slope, "count": given["count"] + 1}


def draw(seed: int, rows: int, device: str = "cpu") -> Named:
    generator = torch.Generator().manual_seed(seed)
    given = {"weight": torch.randn(4, 3, generator=generator), "inputs": torch.randn(rows, 4, generator=generator)}
    return {name: value.to(device) for name, value in given.items()} | {"count": torch.tensor(seed, device=device)}


def follow(recorded: Recorded, device: str) -> None:
    kept = [(recorded(given), pure(given)) for given in (draw(seed, 5 + seed % 2, device) for seed in range(8))]
    for found, expected in kept:  # also after later replays: results must not share memory
        assert torch.allclose(found["slope"], expected["slope"], atol=1e-6) and torch.equal(found["count"], expected["count"])


@pytest.mark.parametrize(("patience", "recordings"), [(0, 2), (2, 2), (4, 0)])
def test_replays_follow_what_they_are_given(patience: int, recordings: int, cuda: FakeCuda) -> None:
    recorded = Recorded(cuda.watched(pure), patience=patience)
    follow(recorded, "cpu")
    assert recorded.recordings == recordings


@GPU
def test_replays_follow_on_a_gpu() -> None:
    recorded = Recorded(pure)
    follow(recorded, "cuda")
    assert recorded.recordings == 2


def test_only_so_many_shapes_are_recorded(cuda: FakeCuda) -> None:
    recorded = Recorded(cuda.watched(pure), most=1)
    follow(recorded, "cpu")
    assert recorded.recordings == 1
    recorded.forget()
    assert recorded.recordings == 0


def test_a_tensor_changed_in_place_is_noticed(cuda: FakeCuda) -> None:
    recorded, given = Recorded(cuda.watched(pure)), draw(0, 5)
    first = recorded(given)["slope"]
    given["weight"].mul_(2)
    second = recorded(given)["slope"]
    assert torch.allclose(second, pure(given)["slope"], atol=1e-6) and not torch.allclose(first, second)


def test_a_tensor_that_died_is_not_taken_for_its_successor(cuda: FakeCuda) -> None:
    recorded = Recorded(cuda.watched(pure))
    for seed in range(6):  # new tensors often get the address of the last ones
        given = draw(seed, 5)
        assert torch.allclose(recorded(given)["slope"], pure(given)["slope"], atol=1e-6)
        del given
        gc.collect()


def counting(given: Named) -> Named:
    given["count"].add_(1)
    return pure(given)


def chancy(given: Named) -> Named:
    return {"slope": given["weight"] * torch.rand((), generator=CHANCE)}


CHANCE = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("function", [counting, chancy])
def test_functions_with_a_memory_or_luck_are_not_recorded(function: Any, cuda: FakeCuda) -> None:
    recorded = Recorded(cuda.watched(function))
    with pytest.warns(RuntimeWarning, match="kernel by kernel"):
        recorded(draw(0, 5))
    recorded(draw(1, 5))
    assert recorded.recordings == 0


def rounded(given: Named) -> Named:
    """A pure function as a GPU computes it: entries off by a thousandth, and a gradient of zero that is nothing but rounding."""
    found, noise = pure(given), torch.randn(3, generator=CHANCE)
    return {**found, "slope": found["slope"] * (1 + 2e-3 * noise), "bias in front of a norm": 1e-9 * noise}


def test_rounding_is_not_taken_for_luck(cuda: FakeCuda, recwarn: pytest.WarningsRecorder) -> None:
    recorded = Recorded(cuda.watched(rounded))
    recorded(draw(0, 5))
    assert recorded.recordings == 1 and not recwarn.list


def kinked(given: Named) -> Named:
    """A pure function behind kinks: rounding turns the slope by a third, unless sums are taken in a fixed order."""
    found = pure(given)
    turned = 0.0 if torch.are_deterministic_algorithms_enabled() else 0.3
    return {**found, "slope": found["slope"] * (1 + turned * torch.randn(3, generator=CHANCE))}


@pytest.mark.parametrize("asked", [False, True])
def test_rounding_behind_kinks_is_not_taken_for_luck(asked: bool, cuda: FakeCuda, recwarn: pytest.WarningsRecorder) -> None:
    torch.use_deterministic_algorithms(asked)
    try:
        recorded = Recorded(cuda.watched(kinked))
        recorded(draw(0, 5))
        assert recorded.recordings == 1 and not recwarn.list
        assert torch.are_deterministic_algorithms_enabled() is asked  # the order was asked for, and only for a moment
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_failed_capture_leaves_everything_as_it_was(cuda: FakeCuda) -> None:
    recorded, given = Recorded(cuda.watched(pure)), draw(0, 5)
    cuda.failure = RuntimeError("operation not permitted when stream is capturing")
    with pytest.warns(RuntimeWarning, match="not permitted"):
        found = recorded(given)
    assert cuda.current == "main" and recorded.recordings == 0
    assert torch.equal(found["slope"], pure(given)["slope"])


def test_no_garbage_is_collected_while_a_graph_is_captured(cuda: FakeCuda) -> None:
    class Ring:
        """What only the collector of garbage frees, as an older recording may be."""

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            freed.append(cuda.capturing is not None)

    def littering(given: Named) -> Named:
        Ring()
        assert [[] for _ in range(2 * gc.get_threshold()[0])]  # so many that the collector would set off
        return pure(given)

    freed: list[bool] = []
    recorded = Recorded(cuda.watched(littering))
    recorded(draw(0, 5))
    gc.collect()
    assert recorded.recordings == 1 and gc.isenabled()
    assert len(freed) > 2 and not any(freed)


def test_a_full_memory_is_told_and_may_be_tried_again(cuda: FakeCuda) -> None:
    recorded, given = Recorded(cuda.watched(pure)), draw(0, 5)
    cuda.failure = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        recorded(given)
    assert cuda.current == "main"
    cuda.failure = None
    recorded(draw(0, 3))
    assert recorded.recordings == 1


def test_on_a_cpu_nothing_is_recorded() -> None:
    recorded = Recorded(pure)
    follow(recorded, "cpu")
    assert recorded.recordings == 0


@GPU
def test_what_waits_for_the_gpu_runs_kernel_by_kernel() -> None:
    def waits(given: Named) -> Named:
        return {"twice": given["weight"] * (2 if float(given["weight"].sum()) > 0 else 3)}

    recorded, stream = Recorded(waits), torch.cuda.current_stream()
    with pytest.warns(RuntimeWarning, match="kernel by kernel"):
        recorded({"weight": torch.ones(3, device="cuda")})
    assert torch.cuda.current_stream() == stream
    assert torch.equal(recorded({"weight": -torch.ones(3, device="cuda")})["twice"], torch.full((3,), -3.0, device="cuda"))


def walking(given: Named) -> Named:
    """A step whose state changes places: each is a view of what the other was."""
    here, there = given["here"], given["there"]
    return {"here": there, "there": here + given["pace"], "told": here * 2}


def test_a_state_stays_where_the_recording_reads_it(cuda: FakeCuda) -> None:
    recorded = Recorded(cuda.watched(walking), keeps={"here", "there"})
    state, expected = ({"here": torch.zeros(3), "there": torch.ones(3)} for _ in range(2))
    for step in range(6):
        pace = {"pace": torch.full((3,), float(step))}
        state, expected = recorded(state | pace), walking(expected | pace)
        for name, value in expected.items():
            assert torch.equal(state[name], value), (name, step)
        state.pop("told"), expected.pop("told")
    (graph,) = cuda.graphs
    assert graph.replays == 6


def luck_in_what_is_told(given: Named) -> Named:
    told = given["here"] * torch.rand((), generator=CHANCE)
    return {"here": given["here"], "there": given["there"], "told": told}


def test_a_state_that_stands_still_hides_no_luck(cuda: FakeCuda) -> None:
    recorded = Recorded(cuda.watched(luck_in_what_is_told), keeps={"here", "there"})
    with pytest.warns(RuntimeWarning, match="chance"):
        recorded({"here": torch.ones(3), "there": torch.ones(3)})
    assert recorded.recordings == 0

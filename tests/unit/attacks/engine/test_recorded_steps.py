"""A search that replays one recorded step finds what it finds step by step; recorded by a stand-in for CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradveil.attacks.base import launch
from gradveil.attacks.engine import loop
from gradveil.attacks.engine.execution import Execution
from gradveil.attacks.engine.loop import Outcome, Problem, optimise
from gradveil.attacks.engine.optimisers import LBFGS, Adam
from gradveil.attacks.feature_inversion import FeatureInversion
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.recording import Recorded
from gradveil.tensors import Named
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe, simulator
from tests.unit.fake_cuda import FakeCuda

ROWS = 5


@pytest.fixture
def replays(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    def recorded(function: Callable[[Named], Named], keeps: frozenset[str]) -> Recorded:
        return Recorded(cuda.watched(function), keeps=keeps)

    monkeypatch.setattr(loop, "Recorded", recorded)
    return cuda


def bumpy(leaves: Named, constants: Named) -> Tensor:
    x = leaves["x"]
    wave = (x.square() + 2 * torch.cos(9 * x + constants["phase"])).sum()
    return wave * constants["size"] + constants["weight"] * (x - 1).square().sum()


def renewed(step: int, leaves: Named, constants: Named) -> Named:
    return constants if step % 7 else constants | {"size": 1 + leaves["x"].square().mean(1)}


def problem(**changes: object) -> Problem:
    phase = torch.linspace(0, 3, ROWS, dtype=torch.float64)
    phase[3] = torch.nan
    whole: dict[str, object] = {
        "loss": bumpy,
        "leaves": {"x": torch.full((ROWS, 2), 0.3, dtype=torch.float64)},
        "constants": {"phase": phase, "size": torch.ones_like(phase)},
        "boxed": frozenset({"x"}),
        "refresh": renewed,
        "tracks": lambda step: step % 3 == 2 or step > 30,
        "schedules": {"weight": lambda step: 0.9**step},
    }
    return Problem(**(whole | changes))  # type: ignore[arg-type]


def same(left: Outcome, right: Outcome) -> None:
    for name in ("first_loss", "best_loss", "gradient_norm", "spent"):
        one, other = (getattr(each, "steps" if name == "spent" else name) for each in (left, right))
        assert torch.allclose(one, other, rtol=1e-9, equal_nan=True), name
    assert torch.allclose(left.leaves["x"], right.leaves["x"], rtol=1e-9, equal_nan=True)
    assert left.status == right.status


@pytest.mark.parametrize("optimiser", [Adam(schedule="cosine"), Adam(signed=True, schedule="steps"), LBFGS(history=4)])
@pytest.mark.parametrize("chunk", [2, 100])
def test_replayed_steps_are_the_steps(optimiser: Adam | LBFGS, chunk: int, replays: FakeCuda) -> None:
    seen: list[dict[int, Tensor]] = [{}, {}]
    told = [functools.partial(lambda kept, step, leaves: kept.update({step: leaves["x"].clone()}), kept) for kept in seen]
    eager = optimise(problem(), optimiser, 40, Execution("batched", chunk), watch=told[0])
    assert not replays.graphs
    found = optimise(problem(), optimiser, 40, Execution("captured", chunk), watch=told[1])
    same(found, eager)
    assert all(torch.allclose(seen[1][step], own) for step, own in seen[0].items())
    (graph,) = replays.graphs
    assert graph.replays == 40


def test_a_search_that_is_done_is_noticed_every_few_steps(replays: FakeCuda) -> None:
    done = [optimise(problem(), Adam(), 40, Execution(mode, 9), stop_below=9.0) for mode in ("batched", "captured")]
    assert set(done[0].status) == {"stopped early", "not finite"}
    same(done[1], done[0])


def test_a_memory_that_is_full_while_recording_halves_the_chunks(replays: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    replays.failure = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(replays, "failure", None))
    eager = optimise(problem(), Adam(), 20, Execution("batched", ROWS))
    same(optimise(problem(), Adam(), 20, Execution("captured", ROWS)), eager)
    assert len(replays.graphs) == 2
    replays.failure = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        optimise(problem(), Adam(), 20, Execution("captured", 1))


@pytest.mark.parametrize("stance", ["plain", "averaged"])
def test_a_recipe_finds_the_same(stance: str, replays: FakeCuda) -> None:
    learner = make_learner("lenet(activation='relu')")
    seen = [observe(learner, make_batch(seed=seed), "gaussian_noise(std=0.001)") for seed in range(2)]
    attack = InvertingGradients(
        steps=30, stance=stance, signed=False, tv=0.25, tv_end=0.01, relative=True, smooth_relu=True, schedule="cosine"
    )
    code = simulator((learner,), "gaussian_noise(std=0.001)")
    eager, found = (
        launch(attack, seen, make_context(30, execution=mode, simulate=code, random_defense=True))
        for mode in ("batched", "captured")
    )
    for one, other in zip(eager, found, strict=True):
        assert torch.allclose(one.inputs, other.inputs, atol=1e-6)
        assert one.best_loss == pytest.approx(other.best_loss, rel=1e-6)
    assert sum(graph.replays for graph in replays.graphs) == 30


def test_features_are_inverted_the_same(replays: FakeCuda) -> None:
    seen = [observe(make_learner(), make_batch(seed=seed)) for seed in range(2)]
    eager, found = (launch(FeatureInversion(steps=20), seen, make_context(20, execution=m)) for m in ("batched", "captured"))
    assert all(torch.allclose(a.inputs, b.inputs, atol=1e-6) for a, b in zip(eager, found, strict=True))
    assert [graph.replays for graph in replays.graphs] == [20]

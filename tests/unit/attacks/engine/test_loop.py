"""The loop: the best iterate is kept, and what goes wrong in one row stays there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradveil.attacks.engine import execution as execution_module
from gradveil.attacks.engine.execution import MODES, Execution, choose_execution
from gradveil.attacks.engine.loop import Problem, optimise
from gradveil.attacks.engine.optimisers import LBFGS, Adam
from gradveil.errors import UsageError
from gradveil.tensors import Named

BATCHED = Execution("batched", 1000)


class Recorder:
    """Keeps every iterate of an optimisation, as its refresh hook sees them."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, step: int, leaves: Named, constants: Named) -> Named:
        self.seen.append(leaves["x"].clone())
        return constants


def bumpy(leaves: Named, constants: Named) -> Tensor:
    x = leaves["x"]
    return (x.square() + 2 * torch.cos(9 * x + constants["phase"])).sum()


def test_the_best_iterate_is_kept_not_the_last() -> None:
    recorder = Recorder()
    phase = torch.tensor([0.0, 1.0, 2.0])
    problem = Problem(bumpy, {"x": torch.full((3, 2), 2.0)}, {"phase": phase}, refresh=recorder)
    outcome = optimise(problem, Adam(learning_rate=0.7, schedule="constant"), 40, BATCHED)
    losses = torch.stack([torch.stack([bumpy({"x": x[i]}, {"phase": phase[i]}) for i in range(3)]) for x in recorder.seen])
    best = losses.argmin(0)
    assert len(recorder.seen) == 40 and not bool((best == 39).any()), "a test in which the last iterate is the best shows nothing"
    for row in range(3):
        assert torch.equal(outcome.leaves["x"][row], recorder.seen[best[row]][row])
        assert float(outcome.best_loss[row]) == pytest.approx(float(losses[:, row].min()))
        assert float(outcome.first_loss[row]) == pytest.approx(float(losses[0, row]))


def test_a_row_that_is_done_stops_and_stays_while_others_go_on() -> None:
    calls: list[int] = []
    target = torch.tensor([0.1, 5.0])
    problem = Problem(lambda leaves, c: (leaves["x"] - c["target"]).square().sum(), {"x": torch.zeros(2, 1)}, {"target": target})
    optimiser = Adam(learning_rate=0.1, schedule="constant")
    outcome = optimise(problem, optimiser, 80, BATCHED, stop_below=1e-3, progress=calls.append)
    assert outcome.status == ["stopped early", "finished"] or outcome.status == ["stopped early", "stopped early"]
    assert int(outcome.steps[0]) < int(outcome.steps[1])
    alone = optimise(
        Problem(problem.loss, {"x": torch.zeros(1, 1)}, {"target": target[:1]}), optimiser, 80, BATCHED, stop_below=1e-3
    )
    assert torch.equal(alone.leaves["x"][0], outcome.leaves["x"][0]) and int(alone.steps[0]) == int(outcome.steps[0])
    assert calls == [2] * int(outcome.steps.max())


def test_by_default_a_negative_loss_is_no_reason_to_stop() -> None:
    problem = Problem(lambda leaves, _: leaves["x"].square().sum() - 10, {"x": torch.ones(1, 1)}, {})
    outcome = optimise(problem, Adam(learning_rate=0.1), 60, BATCHED)
    assert outcome.status == ["finished"] and float(outcome.best_loss) < -9.99


def root(leaves: Named, constants: Named) -> Tensor:
    """Falls towards zero and is not a number below it."""
    return leaves["x"].sqrt().sum() + constants["lift"]


def test_a_row_that_stops_being_finite_keeps_its_best_iterate() -> None:
    problem = Problem(root, {"x": torch.tensor([[0.5], [1e6]])}, {"lift": torch.zeros(2)})
    outcome = optimise(problem, Adam(learning_rate=0.2, schedule="constant"), 30, BATCHED)
    assert outcome.status == ["not finite", "finished"]
    assert 0 < float(outcome.leaves["x"][0]) < 0.5
    assert float(outcome.best_loss[0]) == pytest.approx(float(outcome.leaves["x"][0].sqrt()))


def test_a_line_search_steps_back_from_what_is_not_finite() -> None:
    problem = Problem(root, {"x": torch.full((1, 1), 0.5, dtype=torch.float64)}, {"lift": torch.zeros(1, dtype=torch.float64)})
    outcome = optimise(problem, LBFGS(), 60, BATCHED)
    assert outcome.status == ["finished"] and 0 <= float(outcome.best_loss) < 0.1


def test_a_finite_value_with_a_slope_that_is_not_is_not_usable() -> None:
    def loss(leaves: Named, _: Named) -> Tensor:
        x = leaves["x"]
        return (x - 1).square().sum() + (x - x.detach()).abs().sqrt().sum()

    for optimiser in (Adam(), LBFGS()):
        outcome = optimise(Problem(loss, {"x": torch.zeros(1, 2)}, {}), optimiser, 60, BATCHED)
        assert outcome.status == ["not finite"] and torch.isinf(outcome.best_loss).all()
        assert torch.equal(outcome.leaves["x"], torch.zeros(1, 2))


def test_a_line_search_does_not_accept_a_point_without_a_slope() -> None:
    def loss(leaves: Named, _: Named) -> Tensor:
        x = leaves["x"]
        outside = (x.detach().abs() >= 0.3).to(x)  # inside, the root of zero has a value but no slope
        return (x.square() + (outside + (x - x.detach()).abs()).sqrt() - outside).sum()

    outcome = optimise(Problem(loss, {"x": torch.ones(1, 1)}, {}), LBFGS(), 40, BATCHED)
    assert 0.09 <= float(outcome.best_loss) < 0.2


def weighted(leaves: Named, constants: Named) -> Tensor:
    return constants["weight"] * (leaves["x"] - 3).square().sum()


def fading(step: int, leaves: Named, constants: Named) -> Named:
    return {"weight": torch.full_like(constants["weight"], 1e-3 if step < 15 else 1.0)}


def test_only_tracked_steps_compete() -> None:
    start = {"x": torch.zeros(1, 1)}
    everything = Problem(weighted, start, {"weight": torch.ones(1)}, refresh=fading)
    tracked = Problem(weighted, start, {"weight": torch.ones(1)}, refresh=fading, tracks=lambda step: step >= 15)
    early, late = (optimise(p, Adam(learning_rate=0.1, schedule="constant"), 30, BATCHED) for p in (everything, tracked))
    # While the weight is small every loss is: without tracking, a poor early iterate would win.
    assert float(early.leaves["x"]) < float(late.leaves["x"])
    assert float(late.best_loss) == pytest.approx(float((late.leaves["x"] - 3).square()))


def test_until_a_step_is_tracked_the_latest_iterate_is_kept() -> None:
    problem = Problem(root, {"x": torch.tensor([[1.0]])}, {"lift": torch.zeros(1)}, tracks=lambda step: step >= 25)
    outcome = optimise(problem, Adam(learning_rate=0.1, schedule="constant"), 30, BATCHED)
    assert outcome.status == ["not finite"]
    assert float(outcome.leaves["x"]) < 0.2, "the start came back, not the last iterate before values stopped being finite"
    assert torch.isfinite(outcome.best_loss).all()


def test_boxed_leaves_stay_inside_and_others_go_free() -> None:
    def loss(leaves: Named, _: Named) -> Tensor:
        return (leaves["x"] - 4).square().sum() + (leaves["free"] - 4).square().sum()

    leaves = {"x": torch.full((2, 3), 0.5), "free": torch.zeros(2, 1)}
    outcome = optimise(Problem(loss, leaves, {}, boxed=frozenset({"x"})), Adam(learning_rate=0.5), 60, BATCHED)
    assert torch.equal(outcome.leaves["x"], torch.ones(2, 3))
    assert bool((outcome.leaves["free"] > 3).all())


@pytest.mark.parametrize(
    "execution", [Execution("looped", 1), Execution("batched", 3), Execution("batched", 2), Execution("captured", 2)], ids=str
)
def test_modes_and_chunks_agree(execution: Execution) -> None:
    phase = torch.linspace(0, 2, 7, dtype=torch.float64)
    problem = Problem(bumpy, {"x": torch.full((7, 2), 0.3, dtype=torch.float64)}, {"phase": phase})
    whole = optimise(problem, LBFGS(), 15, BATCHED)
    other = optimise(problem, LBFGS(), 15, execution)
    assert torch.allclose(whole.leaves["x"], other.leaves["x"], atol=1e-9)
    assert torch.allclose(whole.gradient_norm, other.gradient_norm)


CPU = torch.device("cpu")


def test_execution_is_chosen_by_size() -> None:
    assert choose_execution("auto", CPU, 15_826, 16, 1, 400) == Execution("batched", 16)
    assert choose_execution("auto", CPU, 11_000_000, 16, 1, 400) == Execution("looped", 1)
    assert choose_execution("auto", CPU, 15_826, 1, 1, 400) == Execution("looped", 1)
    assert choose_execution("auto", CPU, 15_826, 64, 1, 10_000).mode == "compiled"
    cuda = torch.device("cuda")
    if torch.cuda.is_available():
        assert choose_execution("auto", cuda, 15_826, 16, 1, 400).mode == "captured"
        assert choose_execution("auto", cuda, 15_826, 16, 1, 1).mode == "batched"
    assert all(choose_execution(mode, CPU, 10**9, 1, 1, 1).mode == mode for mode in MODES if mode != "auto")


def test_chunks_are_equal_where_memory_is_short() -> None:
    chunk = choose_execution("batched", CPU, 250_000, 100, 8, 10).chunk
    assert 1 < chunk < 100 and -(-100 // chunk) * chunk - 100 < chunk


@pytest.mark.parametrize("mode", ["batched", "captured"])
@pytest.mark.parametrize(("rows", "fits"), [(7, 3), (5, 1), (4, 4), (1, 1)])
def test_a_full_memory_halves_the_chunks_for_good(rows: int, fits: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def mapped(one: object) -> object:
        def together(points: torch.Tensor, constants: Named) -> tuple[torch.Tensor, torch.Tensor]:
            tried.append(len(points))
            if len(points) > fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return 2 * points, points.sum(1) + constants["shift"]

        return together

    monkeypatch.setattr(execution_module, "vmap", mapped)
    evaluate = Execution(mode, 100).prepare(lambda row, constants: row.sum())
    points, shift = torch.arange(2.0 * rows).reshape(rows, 2), torch.arange(float(rows))
    for _ in range(2):
        tried.clear()
        gradients, values = evaluate(points, {"shift": shift})
        assert torch.equal(gradients, 2 * points) and torch.equal(values, points.sum(1) + shift)
    assert sum(tried) == rows and max(tried) <= fits  # the second time nothing too large is tried
    with pytest.raises(torch.OutOfMemoryError):
        fits = 0
        evaluate(points, {"shift": shift})


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="choose one of auto"):
        choose_execution("fast", CPU, 1, 1, 1, 1)


@pytest.mark.parametrize("optimiser", [LBFGS(), Adam(schedule="constant")])
def test_who_watches_sees_what_smaller_budgets_would_return(optimiser: LBFGS | Adam) -> None:
    start = torch.tensor([[3.0], [-2.0]])
    seen: dict[int, Tensor] = {}

    def watch(steps: int, leaves: Named) -> None:
        seen[steps] = leaves["x"].clone()

    problem = Problem(bumpy, {"x": start}, {"phase": torch.tensor([0.0, 1.0])})
    whole = optimise(problem, optimiser, 12, Execution("batched", 2), watch=watch)
    assert list(seen) == list(range(1, 13))
    assert torch.equal(seen[12], whole.leaves["x"])
    for budget in (1, 4, 9):
        alone = optimise(problem, optimiser, budget, Execution("batched", 2))
        assert torch.equal(seen[budget], alone.leaves["x"])

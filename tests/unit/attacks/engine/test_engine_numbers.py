"""Numbers of searches by hand: chunks, rates, labels as they are read, when a search stops, and each candidate's own row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary
from gradveil.attacks import ensembles, feature_inversion, peeling, referee
from gradveil.attacks.adaptive import REFRESH_EVERY
from gradveil.attacks.engine import matching
from gradveil.attacks.engine.execution import Execution, choose_execution, chunk_size
from gradveil.attacks.engine.labels import _plain_scores, label_scores
from gradveil.attacks.engine.lean_distances import unit_distance
from gradveil.attacks.engine.loop import Outcome
from gradveil.attacks.engine.matching import Recipe, run_recipe
from gradveil.attacks.engine.optimisers import LBFGS, Adam, learning_rate_at
from gradveil.attacks.ensembles import QUICK_4, Member
from gradveil.attacks.feature_inversion import FeatureInversion
from gradveil.attacks.generic.probe import Probe
from gradveil.attacks.generic.stances import GAIN, WEIGHT, Learned, Magnitudes, Robust
from gradveil.attacks.kernel_regression import KernelRegression
from gradveil.attacks.linear_layer import features_at, layer_inputs
from gradveil.attacks.linear_map import LinearMap
from gradveil.attacks.peeling import Peeling
from gradveil.attacks.wiener import Wiener
from gradveil.learning import Learner
from gradveil.records import Observation
from gradveil.tensors import Named
from tests.unit.attacks.scenes import drawn, make_batch, make_context, make_learner, noting, observe

CPU = torch.device("cpu")


@pytest.mark.parametrize(("examples", "most"), [(1, 2_020_833), (3, 1_895_833)])
def test_chunks_are_as_large_as_memory_allows(examples: int, most: int) -> None:
    """Seven candidates of so many parameters are just below 700 million bytes, and of one more above."""
    assert chunk_size(CPU, most, 7, examples) == 7 and chunk_size(CPU, most + 1, 7, examples) == 4
    for parameters, chunk in ((most, 7), (most + 1, 4)):
        assert choose_execution("batched", CPU, parameters, 7, examples, 3) == Execution("batched", chunk)


def test_rates_fall_in_steps_or_along_a_cosine() -> None:
    for step, factor in ((0, 1), (5, 1), (6, 0.1), (9, 0.1), (10, 0.01), (13, 0.01), (14, 0.001), (15, 0.001)):
        assert learning_rate_at("steps", 3.0, step, 16) == pytest.approx(3.0 * factor)
    for step in (0, 3, 8, 16):
        expected = 3.0 * (0.02 + 0.49 * (1 + math.cos(math.pi * step / 16)))
        assert learning_rate_at("cosine", 3.0, step, 16) == pytest.approx(expected)
        assert learning_rate_at("constant", 3.0, step, 16) == 3.0
    assert learning_rate_at("cosine", 3.0, 0, 0) == 3.0


def test_a_wild_row_takes_no_curvature_from_a_tame_one() -> None:
    optimiser = LBFGS(history=3)
    curvature = torch.tensor([[1.0, 2.0], [1e15, 3e15]]).double()

    def searched(rows: list[int]) -> dict[str, Tensor]:
        memory = optimiser.start(torch.ones(len(rows), 2).double())
        for _ in range(3):
            trial = memory["trial"]
            values = (curvature[rows] * trial.square()).sum(1) / 2
            memory = optimiser.advance(memory, values, curvature[rows] * trial, torch.ones(len(rows)) > 0, {})
        return memory

    both, alone = searched([0, 1]), searched([0])
    assert bool(alone["s"].any()), "there is a curvature pair"
    for name, value in alone.items():
        assert torch.allclose(both[name][0], value[0]), name


@pytest.mark.parametrize("wanted", [(1,), (3,), (0, 3), (2,)])
def test_only_what_is_asked_for_gets_a_derivative(wanted: tuple[int, ...]) -> None:
    given = [drawn(3), drawn(2, 2, seed=1), drawn(3, seed=2), drawn(2, 2, seed=3)]
    lean, plain = ([v.clone().requires_grad_(place in wanted) for place, v in enumerate(given)] for _ in range(2))
    unit_distance(lean[:2], lean[2:], 1e-3).backward()
    left, right = ((sum(v.square().sum() for v in side) + 1e-3) ** -0.5 for side in (plain[:2], plain[2:]))
    distance = sum((s * left - o * right).square().sum() for s, o in zip(plain[:2], plain[2:], strict=True)) / 2
    distance.backward()  # type: ignore[union-attr]
    for place, (own, other) in enumerate(zip(lean, plain, strict=True)):
        assert (own.grad is not None) == (place in wanted)
        assert own.grad is None or torch.allclose(own.grad, other.grad if other.grad is not None else torch.zeros(()))


@pytest.mark.parametrize("settings", [{}, {"shares": "weights", "local_steps": 3, "learning_rate": 0.2}])
def test_a_bias_without_a_negative_entry_leaves_the_rows_to_tell(settings: dict[str, Any]) -> None:
    seen = observe(make_learner("mlp(hidden=2)", **settings), make_batch())
    names = list(seen.update.weights)[-2:]
    weight, bias = (next(n for n in names if n.endswith(end)) for end in ("weight", "bias"))
    rows = drawn(*seen.update.weights[weight].shape) - 0.5
    scale = 0.6 if settings else 1.0
    for own, told in (([0.3, 0.0, 0.2, 0.0, 0.1], False), ([0.3, 0.0, -0.2, 0.0, 0.1], True)):
        entries = torch.tensor(own).double()
        changed = seen.replace(updates=(seen.update.replace(weights=seen.update.weights | {weight: rows, bias: entries}),))
        expected = (entries if told else rows.sum(1)) / scale
        for found in (_plain_scores(changed), label_scores(changed)):
            assert found is not None and torch.allclose(found, expected)
    without = {n: v for n, v in changed.update.weights.items() if n != bias}
    found = label_scores(seen.replace(updates=(seen.update.replace(weights=without),)))
    assert found is not None and torch.allclose(found, rows.sum(1) / scale)


def handed(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[Any]:
    """Note what a module hands to the search, which moves every leaf of a row by a tenth of its number and one."""
    asked: list[Any] = []

    def optimise(problem: Any, optimiser: Any, steps: int, execution: Any, **named: Any) -> Outcome:
        asked.append((problem, optimiser, steps, execution, named))
        count = len(next(iter(problem.leaves.values())))
        rows = torch.arange(1.0, count + 1).double()
        moved = {n: v + 0.1 * rows.reshape(-1, *[1] * (v.ndim - 1)) for n, v in problem.leaves.items()}
        return Outcome(moved, rows, rows, rows, [f"end {row}" for row in range(count)], torch.arange(count) + 3)

    monkeypatch.setattr(module, "optimise", optimise)
    return asked


@pytest.mark.parametrize(
    ("changes", "floor"),
    [
        ({"objective": "cosine"}, 1e-14),
        ({"objective": "likelihood"}, -math.inf),
        ({"objective": "l2", "relative": True}, -math.inf),
        ({"matching": 0.0, "tv": 1.0}, -math.inf),
    ],
    ids=["cosine", "likelihood", "relative", "prior"],
)
def test_a_search_ends_early_only_where_its_loss_is_nothing_but_a_distance(
    changes: dict[str, Any], floor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, done, watching = handed(monkeypatch, matching), list[int](), list[Any]()
    watch = lambda step, leaves: watching.append(step)  # noqa: E731
    recipe = Recipe(name="x", steps=9, optimiser=Adam(learning_rate=0.03), **changes)
    run_recipe(recipe, [observe(make_learner("mlp(hidden=2)"), make_batch())], make_context(7, progress=done.append, watch=watch))
    ((_, optimiser, steps, _, named),) = asked
    assert named == {"stop_below": floor, "progress": done.append, "watch": watch}
    assert steps == 7 and optimiser == recipe.optimiser


@pytest.mark.parametrize(("stance", "steps", "renewed"), [("straight_through", 30, [0, 25, 29]), ("robust", 30, [0, 25])])
def test_what_is_read_off_the_dummies_is_renewed_now_and_then_and_at_the_end(
    stance: str, steps: int, renewed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REFRESH_EVERY == 25
    asked, learner, drawn_at = handed(monkeypatch, matching), make_learner("mlp(hidden=2)"), list[int]()
    context = make_context(50, simulate=lambda x, y, draw: noting(drawn_at, draw, (learner.update(x, y),)))
    run_recipe(Recipe(name="x", steps=steps, stance=stance), [observe(learner, make_batch())], context)
    ((problem, *_),) = asked
    changing = []
    for step in range(steps):
        constants = problem.refresh(step, problem.leaves, problem.constants)
        changing += [step] if any(constants[n] is not v for n, v in problem.constants.items()) else []
    assert changing == renewed


def test_features_are_fitted_in_units_of_each_candidates_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, learner = handed(monkeypatch, feature_inversion), make_learner("mlp(hidden=3, activation='sigmoid')")
    seen = [observe(learner, make_batch(seed=seed)) for seed in (1, 2)]
    found = FeatureInversion(steps=9, restarts=2, learning_rate=0.03).run(seen, make_context(7))
    ((problem, optimiser, steps, _, _),) = asked
    assert steps == 7 and optimiser == Adam(learning_rate=0.03) and problem.boxed == {"inputs"}
    layer = feature_inversion.feature_layer(seen[0])
    assert layer is not None
    units = []
    for row, each in enumerate(found):
        target, restart = divmod(row, 2)
        wanted = layer_inputs(seen[target].update.weights, layer, 1)
        assert wanted is not None and torch.allclose(problem.constants["features"][row], wanted)
        noise = torch.randn(
            (1, 2, 8, 8), generator=make_context().seed.child("feature_inversion", restart).generator("start", client=target)
        )
        start = (0.5 + 0.01 * noise).double().requires_grad_()
        before = (features_at(learner, layer, start) - wanted).square().sum()
        (slope,) = torch.autograd.grad(before, start)
        end = start.detach() + 0.1 * (row + 1)
        after = (features_at(learner, layer, end) - wanted).square().sum()
        units.append(1 / float(before.detach()))
        assert torch.allclose(each.inputs, end) and each.first_loss == pytest.approx(1.0)
        assert each.best_loss == pytest.approx(float(after) * units[-1])
        assert each.gradient_norm == pytest.approx(float(slope.norm()) * units[-1])
        assert (each.target, each.restart, each.steps, each.status) == (target, restart, row + 3, f"end {row}")
        assert float(problem.constants["unit"][row]) == pytest.approx(units[-1]) and float(problem.constants["tv"][row]) == 0.5
    assert len(found) == 4 and len({round(unit, 9) for unit in units}) == 4
    weights = [problem.schedules["tv"](step) for step in range(7)]
    assert weights == pytest.approx([0.5 * 0.04 ** min(1.0, step / 6.3) for step in range(7)])
    assert [problem.tracks(step) for step in range(7)] == [False] * 6 + [True]


def test_peeling_begins_every_round_but_the_first_with_the_features_of_the_images_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, Any]] = []
    monkeypatch.setattr(peeling, "_plan", lambda steps: [(2, 3), (0, 4), (5, 6)])

    @dataclass
    class Search:
        attack: Any
        parts: Any
        begin: Tensor
        seen: Any
        execution: Any
        context: Any

        def first_features(self) -> str:
            return "first"

        def unit(self, images: Tensor, features: str) -> str:
            assert features == "first" and images is self.begin
            return "unit"

        def features_of(self, images: Tensor) -> str:
            return f"of {float(images.flatten()[0]):.0f}"

        def features(self, start: str, steps: int, sharpness: float) -> Any:
            done.append(("features", (start, steps, sharpness)))
            return f"{start}+", torch.tensor([steps, 10 * steps]), ["finished", "finished"]

        def images(self, start: Tensor, features: str, unit: str, steps: int) -> Any:
            done.append(("images", (features, unit, steps)))
            ends = ["finished", "not finite"] if steps == 4 else ["finished", "finished"]
            return torch.full_like(start, float(steps)), torch.tensor([steps, 10 * steps]), ends

        def measure(self, images: Tensor) -> Any:
            first = float(images.flatten()[0])
            return torch.tensor([first, first + 1]), torch.tensor([first + 2, first + 3])

    monkeypatch.setattr(peeling, "_Search", Search)
    learner = make_learner('convnet(width=4, norm="none")', shape=(2, 16, 16))
    seen = [observe(learner, make_batch(seed=seed, shape=(2, 16, 16))) for seed in (1, 2)]
    found = Peeling().run(seen, make_context(100))
    assert done == [
        ("features", ("first", 2, 1.0)),
        ("images", ("first+", "unit", 3)),
        ("images", ("of 3", "unit", 4)),
        ("features", ("of 4", 5, 2.0)),
        ("images", ("of 4+", "unit", 6)),
    ]
    assert [each.steps for each in found] == [20, 200] and [each.status for each in found] == ["finished", "not finite"]
    assert [each.best_loss for each in found] == [8, 9] and [each.target for each in found] == [0, 1]
    assert found[0].first_loss != found[0].best_loss and found[1].gradient_norm == pytest.approx(found[0].gradient_norm + 1)
    assert all(bool((each.inputs == 6).all()) for each in found)


@dataclass(frozen=True)
class Unknown(OpenAdversary):
    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        return {"factor": torch.ones(()), "other": torch.zeros(2)}

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        return {n: v * variables["factor"] for n, v in update.items()}

    def penalty(self, variables: Named) -> Tensor:
        return 7 * variables["factor"] + variables["other"].sum()


def test_unknowns_are_fitted_to_each_candidate_from_its_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = handed(monkeypatch, referee)
    seen = observe(make_learner("mlp(hidden=2)"), make_batch()).replace(adversary=Unknown())
    inputs, labels = drawn(2, 1, 2, 8, 8), torch.tensor([[0], [3]])
    starts: list[Named] = [{"factor": torch.tensor(2.0 + row).double(), "other": drawn(2, seed=row)} for row in range(2)]
    both = referee._comparing(seen)
    found = referee._refit(seen, seen.adversary, inputs, labels, starts, both)
    (probe, *first), (problem, *second) = asked
    assert first[0] == second[0] == Adam(learning_rate=0.05) and (first[1], second[1]) == (1, referee.REFIT_STEPS)
    assert problem.constants["inputs"] is inputs and problem.constants["labels"] is labels
    for row, start in enumerate(starts):
        for name, value in start.items():
            assert torch.allclose(found[row][name], value + 0.1 * (row + 1))
        constants = {n: v[row] for n, v in problem.constants.items()}
        residuals, observed = both(inputs[row], labels[row], start)
        size = sum(float(v.square().sum()) for v in observed.values())
        misfit = sum(float(v.square().sum()) for v in residuals.values()) / size
        assert float(probe.loss(start, constants)) == pytest.approx(misfit)
        assert float(problem.loss(start, constants)) == pytest.approx(misfit + float(Unknown().penalty(start)))
    assert referee._refit(seen, seen.adversary, inputs, labels, [{}, {}], both) == [{}, {}]


def test_later_versions_add_a_regression_and_linear_priors() -> None:
    regression, search, reader = KernelRegression(records=77), Member(LinearMap(), ("plain",)), Member(Wiener(), ("informed",))
    found = ensembles._with_priors(QUICK_4, "quick-x", regression, search, reader)
    assert found.name == "quick-x" and found.summary.endswith(
        "; a regression on public records, and linear priors learned from them."
    )
    assert found.summary.startswith(QUICK_4.summary.removesuffix(".") + ";")
    assert found.members == (*QUICK_4.members, Member(regression, ("plain", "simulated")), search, reader)
    assert (found.rehearsals, found.by_round) == (QUICK_4.rehearsals, QUICK_4.by_round)


def test_every_way_to_compare_keeps_both_sides_apart() -> None:
    simulated, seen = {"a": drawn(3) - 0.5}, {"a": drawn(3, seed=1) - 0.5}
    weight, gain = {"a": drawn(3, seed=2)}, {"a": drawn(3, seed=3)}
    evidence = {OBSERVED + "a": seen["a"], WEIGHT + "a": weight["a"], GAIN + "a": gain["a"]}
    for adversary, left, right in (
        (Magnitudes(), simulated["a"].abs(), seen["a"].abs()),
        (Robust(), simulated["a"] * weight["a"], seen["a"] * weight["a"]),
        (Learned(), simulated["a"] * gain["a"] * weight["a"], seen["a"] * weight["a"]),
    ):
        found = adversary.compare(evidence, simulated, {})
        assert torch.allclose(found.simulated["a"], left) and torch.allclose(found.observed["a"], right)


@pytest.mark.parametrize("count", [4, 5])
def test_confusion_is_the_median_over_own_inputs_of_the_truths_distance_over_others(count: int) -> None:
    raw, sent = {"a": drawn(count, 6)}, {"a": drawn(count, 6, seed=1)}
    crossed = {"a": drawn(count, count, 6, seed=2)}
    asked: list[int] = []

    def compare_of(row: int) -> Any:
        asked.append(row)
        return lambda left, right: SimpleNamespace(simulated={n: v + row for n, v in left.items()}, observed=right)

    found = Probe((raw,), (sent,), crossed).confusion(compare_of)
    ratios = []
    for row in range(count):
        left = crossed["a"][row] + row
        far = (1 - torch.nn.functional.cosine_similarity(left, sent["a"][row][None])).tolist()
        near = far.pop(row)
        ratios.append(near / sorted(far)[len(far) // 2])
    assert found == pytest.approx(sorted(ratios)[count // 2]) and asked == list(range(count))

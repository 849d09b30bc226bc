"""What tests on a processor hardly reach: other devices, compiled searches, dear clients and errors on the way."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gradveil.attacks import ATTACKS, launch
from gradveil.attacks.engine.label_belief import label_hypotheses
from gradveil.attacks.engine.loop import optimise
from gradveil.attacks.generic import probe
from gradveil.attacks.listing import own
from gradveil.attacks.peeling import Peeling
from gradveil.audit import floors, list_level, list_others
from gradveil.audit.lists import Pool
from gradveil.defenses.invl.gnp_adversary import SubspaceUpdateAdversary
from gradveil.errors import UsageError
from gradveil.proofs.accountant import epsilon
from gradveil.records import Knowledge, ThreatModel
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe
from tests.unit.audit.small import make_subject


def built(spelling: str) -> Any:
    return ATTACKS.build(spelling)


@pytest.mark.parametrize(("device", "fits", "expected"), [("cpu", 50, 4), ("cuda", 50, 50), ("cuda", 2, 4)])
def test_updates_are_computed_as_many_at_a_time_as_fit(
    device: str, fits: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    learner: Any = SimpleNamespace(parameters=100)
    inputs: Any = SimpleNamespace(device=SimpleNamespace(type=device), shape=(9, 2, 3, 8, 8))
    inputs = type("Inputs", (), {"device": inputs.device, "shape": inputs.shape, "__len__": lambda self: 9})()
    monkeypatch.setattr(probe, "MOST_ENTRIES", 400)

    def chunk_size(*given: Any) -> int:
        asked.append(given)
        return fits

    def quicker(_: Any, shape: Any) -> SimpleNamespace:
        asked.append(shape)
        return SimpleNamespace(update="update")

    monkeypatch.setattr(probe, "chunk_size", chunk_size)
    monkeypatch.setattr(probe, "quicker", quicker)
    monkeypatch.setattr(probe, "vmap", lambda function, chunk_size: lambda x, y: {"a": (function, chunk_size, x, y)})
    found = probe.raw_updates(learner, inputs, "targets")  # type: ignore[arg-type]
    assert found == {"a": ("update", expected, inputs, "targets")}
    assert asked == [*([(inputs.device, 100, 9, 2)] if device == "cuda" else []), (3, 8, 8)]


@pytest.mark.parametrize("spelling", ["feature_inversion", "inverting_gradients"])
def test_what_listens_to_layers_is_not_compiled(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    where = "engine.matching" if spelling == "inverting_gradients" else spelling
    module = f"gradveil.attacks.{where}"

    def noting(problem: Any, optimiser: Any, steps: int, execution: Any, **more: Any) -> Any:
        modes.append(execution.mode)
        return optimise(problem, optimiser, steps, dataclasses.replace(execution, mode="batched"), **more)

    inner = sys.modules[module].choose_execution
    monkeypatch.setattr(f"{module}.choose_execution", lambda *given: dataclasses.replace(inner(*given), mode="compiled"))
    monkeypatch.setattr(f"{module}.optimise", noting)
    monkeypatch.setattr(
        "gradveil.attacks.engine.execution.Execution.once", lambda self: dataclasses.replace(self, mode="batched")
    )
    attack: Any = dataclasses.replace(built(spelling), steps=3)
    launch(attack, [observe(make_learner(), make_batch())], make_context(100))
    assert modes == ["batched" if spelling == "feature_inversion" else "compiled"]


def test_as_many_labels_are_planned_for_as_are_tried() -> None:
    learner = make_learner('convnet(width=4, norm="none")', shape=(2, 16, 16))
    seen = observe(learner, make_batch(shape=(2, 16, 16)))
    context = make_context(100)
    assert Peeling().hypotheses(seen, context) == len(label_hypotheses(seen, "plain", context)) == 1
    given = seen.replace(labels=torch.tensor([1]), threat=ThreatModel(knows=ThreatModel().knows | {Knowledge.LABELS}))
    assert Peeling().hypotheses(given, context) == 1


@pytest.mark.parametrize("seconds", [1.0, 3.0])
@pytest.mark.parametrize(("rows", "expected"), [(1000, (6, 40)), (60, (16, 15)), (4, (8, 8))])
def test_dear_unknowns_leave_fewer_releases(
    rows: int, expected: tuple[int, int], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of what there is time for goes to releases of its own."""
    monkeypatch.setattr(own, "LEAST", 8)
    clock = itertools.count(0, seconds / rows)
    monkeypatch.setattr(own, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    looked: list[Any] = []
    monkeypatch.setattr(own, "_Scorer", lambda *given: SimpleNamespace(energies=looked.append))
    monkeypatch.setattr(own, "_unknown", lambda observation: True)
    seen: list[Any] = ["first", *range(5 if rows == 1000 else 15)]
    told = own.affordable(seen, "list", 40, seconds * 1.0001)  # type: ignore[arg-type]
    assert looked == [["first"]]
    assert told == (min(len(seen), max(8, rows - expected[1])), expected[1])
    monkeypatch.setattr(own, "_unknown", lambda observation: False)
    assert own.affordable(seen, "list", 40, seconds) == (len(seen), 40)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cost", "expected"),
    [(0.0, (32, 8)), (20 / (32 * 8), (32, 8)), (20 / (32 * 8) + 1e-6, (16, 8)), (20 / (16 * 8) + 1e-6, (16, 4)), (9.0, (16, 4))],
)
def test_dear_clients_get_shorter_lists_and_then_fewer_updates(
    cost: float, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.attacks.listing.client.ListClient.seconds", lambda self: cost / list_others.RUNS)
    subject = make_subject(records=16, batch_size=2)
    assert list_others._affordable(subject, subject.context(5), Pool.of(subject, 60)) == expected
    short = Pool.of(subject, 20)
    assert list_others._affordable(subject, subject.context(5), short)[0] == (19 if cost < 0.1 else 16)


@pytest.mark.parametrize(("values", "mean"), [([], None), ([None], None), ([0.25, None, 0.75], 0.5), ([0.0, 1.0, 0.5], 0.5)])
def test_a_mean_is_of_what_is_known(values: list[float | None], mean: float | None) -> None:
    assert list_others._mean(values) == mean


def test_errors_on_the_way_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **more: Any) -> Any:
        raise UsageError("it broke")

    subject = make_subject(records=2, model="mlp(hidden=16, activation='sigmoid')", defense="clipping + gaussian_noise")
    assert not floors.mean_error_of_cell(subject).reason
    monkeypatch.setattr(floors, "_floor", broken)
    assert floors.mean_error_of_cell(subject).reason == "it broke"
    monkeypatch.setattr(list_level, "_affordable", broken)
    assert list_level.measure_lists(subject, 20).reason == "no list could be tested: it broke"


def test_without_a_basis_an_update_is_compared_as_it_is() -> None:
    adversary: Any = object.__new__(SubspaceUpdateAdversary)
    seen, simulated = {"a": torch.rand(3)}, {"a": torch.rand(3)}
    found = adversary.compare({f"{SubspaceUpdateAdversary.compare.__globals__['OBSERVED']}a": seen["a"]}, simulated, {})
    assert torch.equal(found.observed["a"], seen["a"]) and torch.equal(found.simulated["a"], simulated["a"])


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), [(1.5, 0.1, 30, 1e-6), (2.0, 0.2, 7, 1e-5)])
def test_opacus_is_asked_for_what_was_given(
    sigma: float, rate: float, steps: int, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Accountant:
        history: list[Any]

        def get_epsilon(self, delta: float) -> float:
            asked.append((self.history, delta))
            return 3.5

    module = ModuleType("opacus.accountants")
    module.PRVAccountant = Accountant  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opacus", ModuleType("opacus"))
    monkeypatch.setitem(sys.modules, "opacus.accountants", module)
    assert epsilon(noise_multiplier=sigma, sampling_rate=rate, steps=steps, delta=delta, method="prv") == 3.5
    assert asked == [([(sigma, rate, steps)], delta)]

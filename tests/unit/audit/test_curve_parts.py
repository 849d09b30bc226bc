"""What a point of a power curve and a floor under the mean error are handed, with hand-made cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradveil.attacks import Referee
from gradveil.audit import floors, power
from gradveil.audit.cell import STEP_LIMIT
from gradveil.errors import UsageError
from gradveil.metrics import share_of, wilson
from gradveil.randomness import Seed
from gradveil.records import Batch, Reconstruction
from gradveil.study.evidence import Rung
from gradveil.study.rung import RungTask
from tests.unit.audit.small import CELL, make_subject
from tests.unit.stand_ins import fake

HERE = CELL.replace(records=6, batch_size=2, rounds=3, seed=5, local_steps=2)


def test_a_point_of_a_curve_is_attacked_and_judged_as_the_cell_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody is watched; nobody attacks."""
    told, asked = HERE.replace(device="cpu:0", ensemble="quick", records=4), {}

    def note(name: str, answer: Callable[..., Any]) -> None:
        def noting(*given: Any, **more: Any) -> Any:
            asked[name] = (*given, *more.values())
            return answer(*given)

        monkeypatch.setattr(power, name, noting)

    def target(name: str) -> Any:
        batch = Batch(torch.ones(1, 1), torch.tensor([3]))
        return fake(observation=f"seen {name}", batch=batch, replayed_inputs=f"replayed {name}")

    context: Any = fake()
    subject: Any = fake(targets=[target("a"), target("b")], rehearsals=[target("r")], context=lambda *given: given)
    materials: Any = fake(dataset=lambda given: ("data", given))
    rung = Rung(identified=share_of(1, 2))
    note("resolve", lambda *given: fake(name="named", rehearsals=3))
    note("build_subject", lambda *given: "built")
    note("plant", lambda *given: subject)
    note("line_up", lambda *given: ["one", "two"])
    note("PartialWork", lambda *given: fake(has=lambda place: place == 0))
    note("planned_steps", lambda *given: 70)
    note("attack_all", lambda *given: [["of a"], ["of b"], ["of r"]])
    note("_judged", lambda *given: rung)
    note("check_canaries", lambda *given: ["canary"])
    monkeypatch.setattr(Referee, "rehearsed", lambda *given: given)
    said: list[Any] = []
    record = power.measure_rung(
        RungTask(cell=told, leak=1), materials=materials, key="k" * 16, report=lambda *steps: said.append(steps), work=None
    )
    assert asked["resolve"] == ("quick", "update") and asked["build_subject"] == (told, ("data", told), 3, materials)
    assert asked["plant"] == ("built", 1) and asked["PartialWork"] == (None, "cpu:0")
    everyone = ["seen a", "seen b", "seen r"]
    context = asked["line_up"][2]
    assert asked["line_up"][1] == "seen a" and context[0] == STEP_LIMIT == 1_000_000
    assert asked["planned_steps"] == (["two"], context, everyone)
    assert asked["attack_all"][:3] == (["one", "two"], everyone, context)
    context[1](5)
    context[1](6)
    assert said == [(5, 70), (11, 70)]
    assert asked["_judged"][:2] == (subject, [["of a"], ["of b"]])
    referee = asked["_judged"][2]
    assert referee[0] == ["seen r"] and referee[3] == [["of r"]] and referee[2][0].tolist() == [[1.0]]
    assert referee[1][0][0] == "replayed r" and referee[1][0][1].tolist() == [3]
    assert asked["check_canaries"] == (subject, ["one", "two"], context, [["of a"], ["of b"]], rung.identified)
    assert record.key == "k" * 16 and record.rung.leak == 1 and record.checks == ("canary",)  # type: ignore[comparison-overlap]
    assert record.settings.ensemble == "named" and record.settings.threads == torch.get_num_threads()
    assert power.measure_rung(RungTask(cell=told, leak=0.5), materials=materials).checks == ()
    note("line_up", lambda *given: [])
    with pytest.raises(UsageError, match="no attack of 'named' applies"):
        power.measure_rung(RungTask(cell=told), materials=materials)


def test_nulls_of_a_point_are_grey_the_mean_and_other_records() -> None:
    candidates = torch.tensor([[0.0], [0.26], [0.52], [0.9], [0.6]])
    made: Any = fake(positions=(0, 1, 3), candidates=candidates, copies=torch.arange(5))
    turned = torch.tensor([[0.25], [0.9], [0.5]])
    found = power._null(made, [torch.tensor([[0.0], [0.0], [0.6]]), turned])
    assert (found.null, found.value) == ("derangement", 2 / 3) and found.high == wilson(2, 3)[1]
    one: Any = fake(positions=(2,), candidates=candidates, copies=torch.arange(5))
    assert power._null(one, [torch.tensor([[0.0]])]).null == "grey"
    middle: Any = fake(
        positions=(1, 4), candidates=torch.tensor([[0.0], [0.45], [0.9], [0.1], [0.55]]) * 0.5, copies=torch.arange(5)
    )
    assert power._null(middle, [torch.zeros(2, 1)]).null == "data_mean"
    alone: Any = fake(positions=(0,), candidates=candidates, copies=torch.arange(5))
    last = power._null(alone, [torch.tensor([[0.6]])])
    assert (last.null, last.value, last.high) == ("derangement", 1.0, 1.0), "the last candidate stands in for another record"


def test_a_point_counts_the_best_of_the_choice_and_of_each_attacker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = torch.tensor([[0.0], [0.3], [0.6], [0.9]])
    targets = [fake(batch=Batch(candidates[i : i + 1], torch.tensor([i]))) for i in range(4)]
    made: Any = fake(positions=(0, 1, 2, 3), candidates=candidates, copies=torch.arange(4), targets=targets)
    shown = {"": [0.3, 0.3, 0.3, 0.3], "a/plain": [0.0, 0.3, 0.65, 0.3], "b/plain": [0.0, 0.0, 0.0, 0.9]}

    def choose(given: Any, many: list[list[Reconstruction]], referee: Any) -> torch.Tensor:
        names = {each.recipe for own in many for each in own}
        assert given is made and referee == "referee" and all(own for own in many)
        return torch.tensor(shown["" if len(names) > 1 else f"{names.pop()}/plain"])[:, None]

    monkeypatch.setattr(power, "_chosen", choose)
    many = [[Reconstruction(torch.zeros(1, 1), torch.zeros(1), name) for name in "ab"] for _ in targets]
    found = power._judged(made, many, "referee")  # type: ignore[arg-type]
    assert (found.identified.count, found.identified.n, found.identified.high) == (3, 4, wilson(3, 4)[1])
    assert found.identified.low == wilson(3, 4, 1 - 0.05 / 3)[0]
    assert found.psnr == pytest.approx((100.0 - 10 * math.log10(0.05**2)) / 2, rel=1e-3)
    assert found.null is not None and found.null == power._null(made, [torch.tensor(each)[:, None] for each in shown.values()])


def test_a_floor_is_taken_of_candidates_with_their_labels_and_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_subject(records=2, defense="gaussian_noise(std=0.25)", batch_size=1)
    released: list[Any] = []
    monkeypatch.setattr(floors, "INPUTS", 3)

    def release(learner: Any, image: torch.Tensor, label: torch.Tensor, defense: Any, seed: Seed, dtype: Any) -> Any:
        released.append((image, int(label), defense, seed, dtype))
        return fake(shared_noise=0.25, jacobian=fake(inputs=2, outputs=3))

    monkeypatch.setattr(floors, "defended_release", release)
    monkeypatch.setattr(floors, "_gram", lambda jacobian: jacobian)
    monkeypatch.setattr(floors, "mean_error_bound", lambda grams, **more: (len(grams), more))
    monkeypatch.setattr(floors, "smoothed_score", lambda *given: given)
    monkeypatch.setattr(floors, "as_floor", lambda *given: given)
    seed = Seed(3)
    found: Any = floors._floor(made, made.learner, seed)
    assert found == ((3, {"noise_std": 0.25, "score": (64, floors.SMOOTHING)}), 0.25)
    noise = torch.randn(made.candidates[:3].shape, generator=seed.generator("smoothing"))
    assert all(torch.equal(each[0], made.candidates[place] + 0.1 * noise[place]) for place, each in enumerate(released))
    assert [each[1] for each in released] == made.candidate_labels[:3].tolist() and len({each[1] for each in released}) > 1
    assert [each[3] for each in released] == [seed.child(place) for place in range(3)]
    assert all(each[2] is made.defense and each[4] is torch.float32 for each in released)
    monkeypatch.setattr(floors, "DENSE_ENTRIES", 5)
    monkeypatch.setattr(floors, "_trace", lambda jacobian, own: 4.0 * released[-1][1])
    monkeypatch.setattr(floors, "mean_error_from_spectra", lambda roots, **more: (roots, more))
    found = floors._floor(made, made.learner, seed)
    roots = [[2 * math.sqrt(label)] for label in made.candidate_labels[:3].tolist()]
    assert found == ((roots, {"dimension": 64, "noise_std": 0.25, "score_trace": pytest.approx(6400.0)}), 0.25)
    monkeypatch.setattr(floors, "DENSE_ENTRIES", 6)
    assert floors._floor(made, made.learner, seed)[0][0] == 3  # type: ignore[index]


def test_a_floor_has_the_cell_s_seed_and_learner_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_subject(records=2, seed=5, defense="gaussian_noise(std=0.25)")
    kinks: list[str] = [""]
    monkeypatch.setattr(
        floors, "build_learner", lambda *given: (given == (made.cell, made.dataset, made.defense)) and made.learner
    )
    monkeypatch.setattr(
        floors, "why_not_smooth", lambda learner, inputs, labels: kinks[0] if len(inputs) == len(labels) == 1 else "?"
    )
    monkeypatch.setattr(floors, "_floor", lambda *given: given)
    assert floors.mean_error_of_cell(made) == (made, made.learner, Seed(5).child("mean error"))  # type: ignore[comparison-overlap]
    kinks[0] = "it has kinks"
    assert floors.mean_error_of_cell(made).reason == "no floor: it has kinks"

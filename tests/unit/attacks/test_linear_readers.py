"""Who reads with a linear prior: its rehearsals, its plan, and what every update is told of its own row."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.attacks import wiener
from gradveil.attacks.base import AttackContext
from gradveil.attacks.linear_evidence import entries, held_batches
from gradveil.attacks.linear_model import LinearModel, Read
from gradveil.attacks.linear_noise import Release
from gradveil.attacks.wiener import STRENGTHS, Wiener
from gradveil.records import Knowledge, ThreatModel
from tests.unit.attacks.linear_scenes import prior_of, two_rounds
from tests.unit.attacks.scenes import drawn, make_context, noting

KNOWING = ThreatModel(rounds=2, knows=ThreatModel().knows | {Knowledge.LABELS})
OWN = torch.tensor([0, 1])


def test_reads_are_put_back_in_their_places_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    prior, done = prior_of(), list[int]()
    seen = [two_rounds().replace(threat=KNOWING, labels=OWN), two_rounds().replace(threat=KNOWING)]
    labels = {id(seen[0]): [torch.tensor([4, 1])], id(seen[1]): [torch.tensor([3, 1]), torch.tensor([0, 2])]}
    monkeypatch.setattr(wiener, "prior_for", lambda *_, **__: prior)
    monkeypatch.setattr(wiener, "label_hypotheses", lambda one, own, _: labels[id(one)] if own == "informed" else [])
    order: list[list[int]] = []

    def read(self: Any, observation: Any) -> Read:
        order.append(self.labels.tolist())
        assert self.attack.iterations == 2 and self.prior is prior
        place = len(order) + (10 if observation is seen[0] else 20)
        return Read(torch.full((2, 3), 0.1 * place).double(), place + 0.25, place + 0.5, place + 0.75)

    monkeypatch.setattr(wiener._Reader, "read", read)
    found = Wiener(iterations=3, stance="informed").run(seen, make_context(2, progress=done.append))
    assert order == [[0, 2], [3, 1], [4, 1]] and done == [2, 2, 2]
    assert [(each.target, each.hypothesis) for each in found] == [(0, 0), (1, 0), (1, 1)]
    for each, place, own in zip(found, (13, 22, 21), ([4, 1], [3, 1], [0, 2]), strict=True):
        assert each.targets.tolist() == own and (each.recipe, each.stance, each.steps) == ("wiener", "informed", 1)
        assert (each.first_loss, each.best_loss, each.gradient_norm) == (place + 0.25, place + 0.5, place + 0.75)
        expected = prior.decode(torch.full((2, 3), 0.1 * place).double(), prior.mean_of(each.targets))
        assert torch.allclose(each.inputs, expected)
    assert [each.oracle_labels for each in found] == [True, False, False]


def reader(context: AttackContext | None = None, **changes: Any) -> Any:
    settings: dict[str, Any] = {"errors": 7, "rehearsals": 4, "stance": "informed"}
    return wiener._Reader(Wiener(**(settings | changes)), prior_of(held=20), context or make_context(), OWN)


def test_records_that_measure_errors_and_those_that_rehearse_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, many = two_rounds(), 10**9
    size = entries(seen)
    own = reader()
    for most, errors, count in ((many, 7, 7), (many, 30, 15), (8 * size * 3, 7, 3), (1, 7, 2)):
        monkeypatch.setattr(wiener, "MOST_NUMBERS", most)
        one = reader(errors=errors)
        model = one._model(seen)
        assert torch.equal(model.inputs, held_batches(own.prior, 2, 0, count)) and model.labels is OWN
        assert model.prior is one.prior and model.context is one.context
        assert one._share(seen) == pytest.approx(min(1.0, most / ((2 * 3 + errors) * size)))
    assert torch.equal(own._own(), held_batches(own.prior, 2, 15, 4))


def test_a_release_and_a_plan_are_made_once_for_what_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def learn(*given: Any, share: float) -> Release:
        asked.append((*given, share))
        return Release(noise=len(asked))

    monkeypatch.setattr(wiener, "learn_release", learn)
    monkeypatch.setattr(wiener._Reader, "_planned", lambda self, seen: noting(asked, self.labels, ((len(asked) + 1, 1.0),)))
    seen, context = two_rounds(), make_context()
    one = reader(context)
    other = wiener._Reader(one.attack, one.prior, context, OWN.flip(0))
    less = wiener._Reader(Wiener(errors=8, rehearsals=4), one.prior, context, OWN)
    for _ in range(2):
        assert [each._release(seen).noise for each in (one, other, less)] == [1, 2, 3]
    observation, where, stance, inputs, labels, share = asked[0]
    assert observation is seen and where is context and stance == "informed" and labels is OWN
    assert torch.equal(inputs, one._own()) and share == one._share(seen)
    for _ in range(2):
        assert [each._plan(seen) for each in (one, other, less)] == [((4, 1.0),), ((4, 1.0),), ((5, 1.0),)]
    assert asked[3].tolist() == [0, 0], "so that it does not hang on who else is attacked"
    soft = wiener._Reader(Wiener(errors=9), one.prior, context, torch.tensor([[0.2, 0.8], [1, 0]]))
    soft._plan(seen)
    assert asked[-1] is soft.labels


def test_an_update_is_read_step_by_step_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def posterior(self: Any, evidence: Any, release: Any, point: Tensor, near: float) -> Any:
        def mean(strength: float) -> Read:
            asked.append((evidence.share, release.noise, point.clone(), near, strength))
            return Read(point + strength, 10 * len(asked), 20 * len(asked), 30 * len(asked))

        return SimpleNamespace(mean=mean)

    monkeypatch.setattr(LinearModel, "posterior", posterior)
    own = reader()
    for name, value in (("_plan", ((3.0, 1.0), (5.0, 0.25))), ("_release", Release(noise=0.5)), ("_share", 0.75)):
        monkeypatch.setattr(wiener._Reader, name, lambda self, seen, value=value: value)
    found = own.read(two_rounds())
    assert torch.equal(found.point, torch.full((2, 3), 8.0).double())
    assert (found.first_loss, found.loss, found.slope) == (10, 40, 30), "where it began, and where it ended"
    assert [(each[0], each[1], each[3], each[4]) for each in asked] == [(0.75, 0.5, 1.0, 3.0), (0.75, 0.5, 0.25, 5.0)]
    assert not asked[0][2].any() and bool((asked[1][2] == 3).all())


def test_the_strength_is_the_one_that_rehearsals_ask_for_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is off by how far the strength is from the best of its step, in the same direction for each rehearsal."""
    own, seen = reader(iterations=2, errors=3), two_rounds()
    inputs, mean = own._own(), own.prior.mean_of(OWN)
    truths = own.prior.encode(inputs, mean)
    best, asked = [STRENGTHS[5], STRENGTHS[2]], list[Any]()
    monkeypatch.setattr(wiener._Reader, "_release", lambda self, one: Release())
    monkeypatch.setattr(wiener._Reader, "_share", lambda self, one: 0.75)

    def posterior(self: Any, evidence: Any, release: Any, point: Tensor, near: float) -> Any:
        place, step = len(asked) % 4, len(asked) // 4
        asked.append((evidence, point, near))

        def mean(strength: float) -> Read:
            off = 0.02 * math.log(strength / best[step]) + (0.4 if step == 0 else 0.0)
            return Read(truths[place] + (abs(off) if step else off if strength >= best[0] else 9.0), 0, 0, 0)

        return SimpleNamespace(mean=mean)

    monkeypatch.setattr(LinearModel, "posterior", posterior)
    plan = own._planned(seen)
    assert [strength for strength, _ in plan] == best
    # After the first step an answer is four tenths off in every coordinate.
    assert plan[0][1] == 1.0 and plan[1][1] == pytest.approx(0.4)
    assert len(asked) == 8 and [each[2] for each in asked] == [1.0] * 4 + [pytest.approx(0.4)] * 4
    for place in range(4):
        assert (
            asked[place][0].share == 0.75
            and not asked[place][1].any()
            and torch.allclose(asked[4 + place][1], truths[place] + 0.4)
        )
        sent = own.context.memory, asked[place][0].observation
        expected = [one.update(inputs[place], OWN) for one in seen.learners]
        for update, raw in zip(sent[1].updates, expected, strict=True):
            assert all(torch.allclose(update.weights[n], v) for n, v in raw.items())


def test_an_estimate_is_wrong_by_its_squared_error_inside_the_box() -> None:
    own = reader()
    points, truth, mean = 5 * (drawn(3, 2, 3) - 0.5), drawn(2, 2, 8, 8, seed=4), own.prior.mean_of(OWN)
    found = own._wrong(points, truth, mean)
    for point, wrong in zip(points, found.tolist(), strict=True):
        assert wrong == pytest.approx(float((own.prior.decode(point, mean).clamp(0, 1) - truth).square().mean()))

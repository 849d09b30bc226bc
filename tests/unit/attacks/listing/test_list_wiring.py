"""What an attacker with a list runs, draw by draw, and what it makes of it: every number beside one that is computed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gradveil.attacks.listing import client, generic, joint
from gradveil.attacks.listing.client import ListClient, joined
from gradveil.attacks.listing.evidence import Evidence, _spread, fit_logit
from gradveil.attacks.listing.joint import Joint, Sketch, single_updates
from gradveil.attacks.listing.statistics import Laws, Sent, features_of
from gradveil.errors import MissingKnowledge
from gradveil.randomness import Seed
from gradveil.tensors import Named
from tests.unit.attacks.listing.list_scenes import listed, rounds, running
from tests.unit.attacks.scenes import SHAPE, drawn, make_context, noting

MLP = "mlp(hidden=2, activation='sigmoid')"


@pytest.mark.parametrize("size", [1, 3])
def test_a_candidate_is_sent_with_the_companions_and_the_randomness_of_its_draw(size: int) -> None:
    seen, calls, made = rounds(size), list[Any](), listed(size=size)
    one = ListClient(seen, made, running(seen, 0.1, calls))
    found = one.observe(4, 2)
    inputs, labels = made.batch(4, 2)
    assert torch.equal(calls[0][0], inputs) and torch.equal(calls[0][1], labels) and calls[0][2] == 2
    assert found.update.examples == size
    raw = one.raw(4, 2)
    for index, learner in enumerate(seen.learners):
        for name, value in learner.update(inputs, labels).items():
            assert torch.equal(raw[f"{index}|{name}"], value) and not raw[f"{index}|{name}"].requires_grad
            assert torch.equal(joined(found)[f"{index}|{name}"], found.updates[index].weights[name])
    assert len(raw) == len(joined(found)) == 2 * len(seen.update.weights)
    with pytest.raises(MissingKnowledge, match="grant the defense"):
        ListClient(seen, made, make_context()).observe(0, 0)


def test_what_varies_from_draw_to_draw_is_seen_or_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = rounds()
    for noise, random, size, varies in (
        (0.0, False, 1, False),
        (0.1, False, 1, True),
        (0.0, True, 1, True),
        (0.0, False, 3, True),
    ):
        calls: list[Any] = []
        one = ListClient(seen, listed(size=size), running(seen, noise, calls, random_defense=random))
        assert one.varies() is varies
        assert [draw for *_, draw in calls] == ([] if random or size > 1 else [0, 1])
        assert all(torch.equal(inputs[0], one.hypotheses.inputs[0]) for inputs, *_ in calls)
    asked: list[Any] = []
    monkeypatch.setattr(client, "seconds_of", lambda run: noting(asked, joined(run(5)), 0.25))
    one = ListClient(seen, listed(), running(seen, 0.1))
    assert one.seconds() == 0.25 and torch.equal(
        asked[0]["0|" + next(iter(seen.update.weights))], next(iter(one.observe(0, 5).update.weights.values()))
    )


@pytest.mark.parametrize(("size", "noise", "draws"), [(1, 0.0, 1), (1, 0.05, 3), (3, 0.0, 3)])
def test_every_candidate_is_compared_with_every_release_as_often_as_said(
    size: int, noise: float, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five of six candidates a release is made; four of them teach where several records are in an update."""
    monkeypatch.setattr(generic, "TAUGHT", 4)
    monkeypatch.setattr(generic, "BLOCK", 2)
    seen, made, calls = rounds(size), listed(size=size), list[Any]()
    wanted = (6, 2 * seen.learner.parameters)
    monkeypatch.setattr(generic, "releases_of_own", lambda count, parameters: 5 if (count, parameters) == wanted else 0)
    context = running(seen, noise, calls)
    observations = [context.observe(*made.batch(i, 90 + i), 90 + i) for i in (1, 4, 2)]  # type: ignore[misc]
    calls.clear()
    found = generic.generic_evidence(observations, made, context)
    varies = draws > 1
    place = {inputs[0].sum().item(): index for index, inputs in enumerate(made.inputs[:, None])}
    asked = [(place[inputs[0].sum().item()], draw) for inputs, _, draw in calls]
    if size == 1:
        asked = asked[2:]  # two to find out whether anything varies
    shared = [(index, draw) for index in range(5) for draw in range(draws)]
    fresh = [(index, draws + index) for index in range(5)] if varies else []
    assert asked == [*shared, *fresh, *((5, draw) for draw in range(draws))]
    one = ListClient(observations[0], made, context)
    sent, own_releases = [], []
    for index in range(6):
        raws = [one.raw(index, draw) for draw in range(draws if size > 1 else 1)]
        mean = {n: torch.stack([raw[n] for raw in raws]).mean(0) for n in raws[0]}
        sent.append(Sent.of([joined(one.observe(index, draw)) for draw in range(draws)], mean))
        own_releases.append(joined(one.observe(index, draws + index if varies else 0)))
    laws = Laws(own_releases[:5], sent[:5])
    every = features_of([*map(joined, observations), *own_releases[:5]], sent, laws)
    taught = 4 if size > 1 else 5
    assert (found.name, found.informed, found.draws, found.optimal) == ("generic", False, 4 if varies else 1, False)
    # Where nothing varies the truth is at no distance but rounding, which is as large as variances are small.
    rough = 0.0 if varies else 1e-6 * float(every.abs().max())
    assert torch.allclose(found.features, every[:3, :, :-1], atol=rough)
    assert torch.allclose(found.own, every[3 : 3 + taught, :, :-1], atol=rough)
    assert found.signs is not None and found.truth.tolist() == list(range(taught))
    assert torch.allclose(found.signs[0], every[:3, :, -1]) and torch.allclose(found.signs[1], every[3 : 3 + taught, :, -1])
    assert torch.equal(found.apart, generic.apart_of(made, [draws + i if varies else 0 for i in range(taught)]))
    if size == 1:
        assert found.joint is None
    else:
        expected = Joint.of(observations, own_releases[:4], made)
        assert found.joint is not None and expected is not None
        assert torch.allclose(found.joint.seen, expected.seen) and torch.allclose(found.joint.own, expected.own)


def test_as_many_releases_are_made_as_fit_and_never_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generic, "HELD_ENTRIES", 4 * 100 * 20)
    assert [generic.releases_of_own(count, 100) for count in (5, 20, 21)] == [5, 20, 20]
    assert generic.releases_of_own(50, 10**6) == generic.LEAST_OWN and generic.releases_of_own(50, 0) == 50


def test_a_sketch_hangs_on_its_seed_alone() -> None:
    flat = drawn(joint.SKETCH + 3)
    generator = Seed(4).generator("sketch")
    places = torch.randint(joint.SKETCH, flat.shape, generator=generator)
    signs = torch.randint(2, flat.shape, generator=generator).double() * 2 - 1
    expected = torch.zeros(joint.SKETCH).double().index_add(0, places, flat * signs)
    torch.manual_seed(3)
    sketch = Sketch()
    assert torch.allclose(sketch.of([{"a": flat[:50], "b": flat[50:60]}, {"a": flat[60:]}], Seed(4)), expected)
    assert torch.allclose(sketch.of([{"a": 2 * flat}], Seed(9)), 2 * expected), "drawn once"


def test_a_single_update_is_that_of_one_client_with_one_record() -> None:
    learners = rounds().learners
    several = [each.replace(settings=each.settings.replace(clients=2)) for each in learners]
    x, y = drawn(*SHAPE), torch.tensor(3)
    for found, learner in zip(single_updates(several, x, y), learners, strict=True):
        assert all(torch.equal(found[n], v) for n, v in learner.update(x[None], y[None]).items())


def test_candidates_and_releases_stand_in_coordinates_that_keep_their_angles() -> None:
    made, seen = listed(4, 3), [rounds(3, seed=s) for s in (1, 2)]
    context = running(seen[0], 0.0)
    observations = [context.observe(*made.batch(i, 0), 0) for i in (1, 3)]  # type: ignore[misc]
    releases = [joined(context.observe(*made.batch(2, 5), 5))]  # type: ignore[misc]
    found = Joint.of(observations, releases, made)
    assert found is not None

    def row(updates: list[Named]) -> Tensor:
        flat = torch.cat([v.flatten() for one in updates for v in one.values()])
        found_of: Tensor = flat / flat.norm()
        return found_of

    alone = [single_updates(seen[0].learners, x, y) for x, y in zip(made.inputs, made.labels, strict=True)]
    columns = torch.stack([row(each) for each in alone])
    assert torch.allclose(found.columns.T @ found.columns, columns @ columns.T)
    shown = torch.stack([row([dict(u.weights) for u in each.updates]) for each in observations])
    mine = torch.stack([torch.cat([v.flatten() for v in each.values()]) for each in releases])
    assert torch.allclose(found.seen @ found.columns, shown @ columns.T)
    assert torch.allclose(found.own @ found.columns, (mine / mine.norm()) @ columns.T)
    hidden = torch.tensor([[True, True, True, True], [True, False, True, True]])
    shares = found.shares(found.seen, hidden)
    assert float(shares[1, 1]) == 0 and bool((shares >= 0).all())
    assert torch.allclose(found.columns @ shares[0], found.seen[0], atol=1e-6), "a batch is a sum over its records"


def evidence(**changes: Any) -> Evidence:
    settings: dict[str, Any] = {
        "features": drawn(2, 4, 2),
        "own": drawn(3, 4, 2, seed=1),
        "truth": torch.tensor([2, 0, 3]),
        "apart": torch.ones(3, 4) > 0,
        "name": "x",
        "informed": False,
    }
    return Evidence(**(settings | changes))


def test_features_are_measured_by_the_lead_that_decides() -> None:
    made, chosen = evidence(), torch.ones(3, 4, dtype=torch.bool)
    chosen[0, 1] = chosen[1, 3] = False
    leads = []
    for row, truth in enumerate(made.truth.tolist()):
        others = [c for c in range(4) if c != truth and chosen[row, c]]
        leads.append((made.own[row, truth] - made.own[row, others].amax(0)).abs())
    size = torch.stack(leads).median(0).values
    assert torch.allclose(_spread(made.own, made.truth, chosen), size)
    fitted = fit_logit((made.own / size).numpy(), made.truth.numpy(), chosen.numpy())
    assert torch.allclose(made._weights(chosen), torch.from_numpy(fitted) / size)
    sure = dataclasses.replace(made, optimal=True)._weights(chosen)
    assert sure.tolist() == [1, 1]
    untaught = evidence(own=made.own[:0], truth=made.truth[:0], apart=made.apart[:0])
    assert untaught._weights(chosen[:0]).tolist() == [1, 1]
    assert untaught.ranking(torch.ones(2, 4) > 0, torch.ones(4, 4) > 0).rehearsed is None


def test_signs_join_only_where_they_clearly_name_more_of_its_own_releases() -> None:
    count = 12
    truth = torch.arange(count) % 4
    noise = 0.01 * drawn(count, 4, 1)
    told = torch.nn.functional.one_hot(truth, 4).double()
    shown = torch.nn.functional.one_hot(torch.tensor([1, 3]), 4).double()
    everyone = torch.ones(4, 4) > 0
    blind: dict[str, Any] = {
        "features": 0.01 * drawn(2, 4, 1, seed=5),
        "own": noise,
        "truth": truth,
        "apart": torch.ones(count, 4) > 0,
    }
    found = evidence(**blind, signs=(shown, told)).ranking(torch.ones(2, 4) > 0, everyone)
    assert found.rehearsed == 1.0 and found.scores.argmax(1).tolist() == [1, 3]
    plain = evidence(**blind).ranking(torch.ones(2, 4) > 0, everyone)
    useless = evidence(**blind, signs=(shown, 0.01 * drawn(count, 4, seed=9))).ranking(torch.ones(2, 4) > 0, everyone)
    assert torch.equal(useless.scores, plain.scores) and useless.rehearsed == plain.rehearsed
    assert cast("float", plain.rehearsed) < 0.7


def test_what_is_fitted_together_is_one_more_feature_of_who_is_on_which_list() -> None:
    class Fitting:
        seen, own = "seen", "own"

        def shares(self, releases: str, shown: Tensor) -> Tensor:
            return (3.0 if releases == "seen" else 5.0) * shown.double()

    hidden = torch.tensor([[True, False, True, True], [True, True, True, False]])
    made = evidence(joint=cast("Any", Fitting()), apart=torch.tensor([[True, True, True, False]] * 3))
    chosen = torch.tensor([[True, False, True, True], [False, True, True, True], [True] * 4])
    found = made._fitted_together(hidden, chosen)
    assert found.joint is None and torch.equal(found.features[..., :2], made.features)
    assert torch.equal(found.features[..., 2], 3.0 * hidden.double()) and torch.equal(found.own[..., 2], 5.0 * chosen.double())
    assert torch.equal(found.own[..., :2], made.own) and evidence()._fitted_together(hidden, chosen).joint is None
    around = torch.tensor([[True, True, True, True], [True] * 4, [False, True, True, True], [True] * 4])
    asked: list[Any] = []
    object.__setattr__(made, "joint", cast("Any", Fitting()))
    Fitting.shares = lambda self, releases, shown: noting(asked, (releases, shown), shown.double())  # type: ignore[method-assign]
    made.ranking(hidden, around)
    # Of the candidates around the truth those are left that did not fill its update, and the truth itself.
    expected = torch.tensor([[False, True, True, False], [True, True, True, False], [True, True, True, True]])
    assert asked[0][0] == "seen" and torch.equal(asked[0][1], hidden)
    assert asked[1][0] == "own" and torch.equal(asked[1][1], expected)


def test_signs_follow_the_releases_that_are_asked_about() -> None:
    signs = drawn(2, 4), drawn(3, 4, seed=1)
    found = evidence(signs=signs).of(torch.tensor([1, 1, 0])).signs
    assert found is not None and torch.equal(found[0], signs[0][[1, 1, 0]]) and found[1] is signs[1]
    assert evidence().of(torch.tensor([1])).signs is None


def test_companions_are_those_of_the_seed_and_the_draw() -> None:
    made = listed(6, 3)
    for draw in (0, 1, 5):
        order = Seed(2).numpy("companions", round=draw).permutation(6).tolist()
        for index in range(6):
            assert made.companions(index, draw) == [other for other in order[:3] if other != index][:2]

"""What linear attackers compare, its slopes, and the gains and errors of what arrives, by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from gradveil.adversary import OBSERVED, OpenAdversary
from gradveil.attacks import linear_evidence, linear_noise
from gradveil.attacks.linear_evidence import FIRST_DRAW, Evidence, evidence_of
from gradveil.attacks.linear_noise import Release
from gradveil.records import Comparison, Observation, Update
from gradveil.tensors import Named
from tests.unit.attacks.linear_scenes import Scaled, prior_of, two_rounds
from tests.unit.attacks.scenes import SHAPE, drawn, make_batch, make_context, noting

MLP = "mlp(hidden=2, activation='sigmoid')"


def test_what_is_compared_is_of_every_round_by_its_own_learner_with_the_unknowns() -> None:
    observation, context = two_rounds(), make_context()
    evidence = evidence_of(observation, "informed", context)
    factor = (2 + torch.rand((), generator=context.seed.child("linear", "informed").generator("start"))).double()
    assert torch.equal(evidence.variables["factor"], factor) and evidence.variables["factor"].dtype == torch.float64
    inputs, targets = make_batch(2, seed=4).inputs, torch.tensor([1, 3])
    found = evidence.simulate(inputs, targets)
    pair = evidence.compare(found)
    assert len(found) == 2 * len(observation.update.weights) == len(pair.simulated) == len(pair.observed)
    for index, (learner, update) in enumerate(zip(observation.learners, observation.updates, strict=True)):
        for name, value in learner.update(inputs, targets).items():
            key = f"{index}|{name}"
            assert torch.allclose(found[key], factor * value) and torch.allclose(pair.simulated[key], 2 * factor * value)
            assert torch.allclose(pair.observed[key], update.weights[name] - factor)
            assert torch.allclose(evidence.residuals(found)[key], pair.simulated[key] - pair.observed[key])
    plain = evidence_of(observation, "learned", context)
    assert type(plain.adversary) is OpenAdversary and plain.variables == {} and plain.share == 1.0


def test_a_share_of_entries_is_the_same_on_both_sides_and_whenever_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_evidence, "LEAST_ENTRIES", 3)
    observation, context = two_rounds(), make_context()
    whole, some = (evidence_of(observation, "informed", context, share=share) for share in (1.0, 0.101))
    found = whole.simulate(make_batch(2, seed=4).inputs, torch.tensor([1, 3]))
    everything = whole.compare(found)
    torch.manual_seed(1)
    linear_evidence._places.cache_clear()
    pair = some.compare(found)
    for name, value in everything.simulated.items():
        order = torch.randperm(value.numel(), generator=torch.Generator().manual_seed(value.numel()))
        kept = max(min(3, value.numel()), -(-101 * value.numel() // 1000))
        places = order[:kept].sort().values
        assert torch.equal(pair.simulated[name], value.flatten()[places])
        assert torch.equal(pair.observed[name], everything.observed[name].flatten()[places])


def test_numbers_seen_are_counted_and_as_many_inputs_replayed_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    observation = two_rounds()
    evidence = evidence_of(observation, "plain", make_context())
    parameters = observation.learner.parameters
    assert linear_evidence.entries(observation) == 2 * parameters
    one = 8 * (3 * parameters + 7) * 8
    inputs = torch.zeros(7, dtype=torch.float64)
    for room, fits in ((one, 1), (5 * one, 5), (5 * one - 1, 4), (1, 1), (10**12, linear_evidence.MOST_AT_ONCE)):
        monkeypatch.setattr(linear_evidence, "WORKING_BYTES", {"cpu": room})
        assert linear_evidence.at_once(evidence, inputs) == fits


def test_slopes_are_those_of_what_is_sent_about_the_point_as_many_at_once_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    prior, observation = prior_of(), two_rounds()
    evidence = evidence_of(observation, "informed", make_context())
    targets, point = torch.tensor([0, 1]), drawn(2, 3, seed=9)
    mean = prior.mean_of(targets)
    asked: list[Any] = []

    def at_once(given: Evidence, inputs: Tensor) -> int:
        asked.append((given, inputs))
        return 4

    monkeypatch.setattr(linear_evidence, "at_once", at_once)
    pieces = list(linear_evidence.slopes(evidence, prior, mean, point, targets))
    assert [len(next(iter(columns.values()))) for _, columns in pieces] == [4, 2]
    assert asked[0][0] is evidence and asked[0][1] is mean
    expected = jacrev(lambda z: evidence.simulate(prior.decode(z, mean), targets))(point)
    at = evidence.simulate(prior.decode(point, mean), targets)
    pushed = [evidence.push(piece) for piece in pieces]
    for name, value in at.items():
        jacobian = expected[name].flatten(-2).movedim(-1, 0)
        assert torch.allclose(pieces[1][0][name], value) and not pieces[0][0][name].requires_grad
        assert torch.allclose(torch.cat([columns[name] for _, columns in pieces]), jacobian)
        assert torch.allclose(torch.cat([each[name] for each in pushed]), 2 * jacobian)


def test_values_come_a_few_rows_at_a_time_and_held_records_round_and_round() -> None:
    asked: list[Tensor] = []

    def function(row: Tensor) -> Named:
        asked.append(row)
        return {"a": row.sum(0, keepdim=True)}

    inputs = drawn(5, 2).requires_grad_()
    pieces = list(linear_evidence.values(function, inputs, 2))
    assert [len(piece["a"]) for piece in pieces] == [2, 2, 1] and len(asked) == 3
    assert torch.allclose(torch.cat([piece["a"] for piece in pieces])[:, 0], inputs.sum(1))
    assert not pieces[0]["a"].requires_grad
    prior = prior_of(held=5)
    found = linear_evidence.held_batches(prior, 2, 3, 4)
    assert found.shape == (4, 2, *SHAPE)
    assert torch.equal(found.flatten(0, 1), prior.held[[3, 4, 0, 1, 2, 3, 4, 0]])


def test_rehearsals_are_the_clients_code_where_it_is_known_else_what_is_sent_without_a_defense() -> None:
    observation = two_rounds().replace(labels=torch.tensor([0, 1]))
    inputs, targets = drawn(3, 2, *SHAPE, seed=2), torch.tensor([1, 4])
    draws: list[int] = []

    def simulate(x: Tensor, y: Tensor, draw: int) -> tuple[Named, ...]:
        draws.append(draw)
        return tuple({n: v + 1 for n, v in one.update(x, y).items()} for one in observation.learners)

    def watch(x: Tensor, y: Tensor, draw: int) -> Observation:
        ran = simulate(x, y, draw)
        updates = tuple(Update({n: v + 1 for n, v in one.items()}, examples=2) for one in ran)
        return observation.replace(updates=updates, payloads=(cast("Any", f"payload {draw}"),), examples=99)

    for stance, context, more in (
        ("plain", make_context(simulate=simulate, observe=watch), 0),
        ("zero_mask", make_context(simulate=simulate), 0),
        ("learned", make_context(), 0),
        ("learned", make_context(simulate=simulate), 1),
        ("informed", make_context(simulate=simulate, observe=watch), 2),
    ):
        draws.clear()
        found = linear_evidence.rehearsed(observation, context, stance, inputs, targets)
        assert draws == ([FIRST_DRAW + place for place in range(3)] if more else [])
        for place, each in enumerate(found):
            assert each.labels is None and each.examples == 2 and each.learners == observation.learners
            assert each.payloads == ((f"payload {FIRST_DRAW + place}",) if more == 2 else ())
            for one, update, old in zip(observation.learners, each.updates, observation.updates, strict=True):
                assert more == 2 or update.round == old.round
                for name, value in one.update(inputs[place], targets).items():
                    assert torch.allclose(update.weights[name], value + more)
        assert len(found) == 3


def test_a_release_shifts_residuals_scales_slopes_and_names_its_errors() -> None:
    residuals, simulated = {"a": drawn(3), "b": drawn(2, seed=1)}, {"a": drawn(3, seed=2), "b": drawn(2, seed=3)}
    gain, shift = {"a": drawn(3, seed=4), "b": drawn(2, seed=5)}, {"a": drawn(3, seed=6), "b": drawn(2, seed=7)}
    release = Release(gain=gain, shift=shift, variance={"a": drawn(3, seed=8), "b": drawn(2, seed=9)}, noise=4.0)
    for n, v in release.shifted(residuals, simulated).items():
        assert torch.allclose(v, residuals[n] + (gain[n] - 1) * simulated[n] + shift[n])
    assert all(torch.allclose(v, residuals[n] * gain[n]) for n, v in release.scaled(residuals).items())
    assert torch.equal(cast("Tensor", release.error("b")), drawn(2, seed=9))
    nothing = Release(noise=4.0)
    assert nothing.shifted(residuals, simulated) is residuals and nothing.scaled(residuals) is residuals
    assert nothing.error("a") == 4.0 and Release().error("a") == 0.0


def test_what_is_learned_of_a_release_is_asked_of_who_runs_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    observation, inputs, targets = two_rounds(), drawn(3, 2, *SHAPE), torch.tensor([1, 4])
    asked: list[Any] = []
    monkeypatch.setattr(linear_noise, "release_of", lambda seen, *rest: noting(asked, (seen, *rest), "learned"))
    able = make_context(simulate=lambda x, y, draw: tuple(one.update(x, y) for one in observation.learners))
    learn = linear_noise.learn_release
    for stance, context in (("plain", able), ("informed", make_context())):
        nothing = learn(observation, context, stance, inputs, targets)
        assert dataclasses.asdict(nothing) == dataclasses.asdict(Release()) and not asked
    assert cast("Any", learn(observation, able, "informed", inputs, targets, share=0.25)) == "learned"
    ((seen, x, y),) = asked
    assert len(seen) == 3 and {each.share for each in seen} == {0.25} and type(seen[0].adversary) is Scaled
    assert x is inputs and y is targets
    for place, each in enumerate(seen):
        sent = observation.learners[1].update(inputs[place], targets)
        assert all(torch.equal(each.seen[1][OBSERVED + name], value) for name, value in sent.items())


def test_noise_that_is_known_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy(Scaled):
        def arrives(self, observation: Observation) -> Any:
            return super().arrives(observation).replace(noise_std=0.3)

    observation = two_rounds(Noisy())
    assert linear_noise.known_noise(observation, "informed") == 0.3 and linear_noise.known_noise(observation, "plain") is None
    found = linear_noise.learn_release(observation, make_context(), "informed", drawn(3, 2, *SHAPE), torch.tensor([1, 4]))
    assert found.noise == pytest.approx(0.09) and not found.gain


def rehearsals_of(left: Named, right: Named) -> list[Evidence]:
    """Return what compares the rows of both sides, and checks what it is given."""

    def one(row: int) -> Any:
        def simulate(own: Tensor, targets: Tensor) -> int:
            assert int(own) == row and targets.tolist() == [7]
            return row

        def compare(at: int) -> Comparison:
            return Comparison({n: v[at] for n, v in left.items()}, {n: v[at] for n, v in right.items()})

        return SimpleNamespace(simulate=simulate, compare=compare)

    return [one(row) for row in range(len(next(iter(left.values()))))]


def test_gains_shifts_and_errors_of_every_tensor_are_its_own() -> None:
    count = 12
    left = {"same": drawn(count, 3) - 0.5, "half": drawn(count, 2, seed=1), "noise": drawn(count, 4, seed=2)}
    error = 0.01 * (drawn(count, 2, seed=3) - 0.5)
    right = {"same": left["same"].clone(), "half": 3 + 0.5 * left["half"] + error, "noise": drawn(count, 4, seed=4)}
    found = linear_noise.release_of(rehearsals_of(left, right), torch.arange(count), torch.tensor([7]))
    assert found.gain["same"].tolist() == [1, 1, 1] and not found.shift["same"].any()
    assert not cast("Tensor", found.error("same")).any()
    about, arrived = (each["half"] - each["half"].mean(0) for each in (left, right))
    overall = float((about * arrived).sum() / about.square().sum())
    assert torch.allclose(found.gain["half"], torch.full((2,), overall).double(), atol=2e-3)
    assert torch.allclose(found.shift["half"], right["half"].mean(0) - found.gain["half"] * left["half"].mean(0))
    assert not found.gain["noise"].any() and torch.allclose(found.shift["noise"], right["noise"].mean(0))
    for name in ("half", "noise"):
        apart = (right[name] - right[name].mean(0)) - found.gain[name] * (left[name] - left[name].mean(0))
        drawn_in = (apart.square().sum(0) + 4 * apart.square().mean()) / (count + 4) * count / (count - 2)
        assert torch.allclose(cast("Tensor", found.error(name)), drawn_in)
    untouched = linear_noise.release_of(rehearsals_of(left, left), torch.arange(count), torch.tensor([7]))
    assert untouched.gain == {} and untouched.shift == {} and untouched.variance == {}


def test_gains_of_entries_are_believed_where_they_differ_by_more_than_chance() -> None:
    about = drawn(20, 6) - 0.5
    about = about - about.mean(0)
    about[:, 5] = 0
    error = 0.02 * (drawn(20, 6, seed=1) - 0.5)
    true = torch.tensor([0.2, 0.5, 1.0, 1.5, 2.0, 9.0]).double()
    found = linear_noise._gains(about, about * true + error)
    size = about.square().sum(0)
    alone = (about * (about * true + error)).sum(0) / size
    overall = float((about * (about * true + error)).sum() / size.sum())
    left = ((about * true + error - alone.nan_to_num(overall) * about).square().sum()) / (5 * 18)
    differ = ((size[:5] * (alone[:5] - overall).square()).sum() - 5 * left) / size.sum()
    expected = overall + (alone[:5] - overall) * differ / (differ + left / size[:5])
    assert torch.allclose(found[:5], expected) and float(found[5]) == pytest.approx(overall)
    same = linear_noise._gains(about, 0.7 * about + error)
    assert len(same.unique()) == 1 and float(same[0]) == pytest.approx(0.7, abs=0.02)
    assert not linear_noise._gains(about, drawn(20, 6, seed=5) - 0.5).any(), "chance is no gain"
    assert torch.allclose(linear_noise.spread_of(about), (about.square().sum(0) + 4 * about.square().mean()) / 24)

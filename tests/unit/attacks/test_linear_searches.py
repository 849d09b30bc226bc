"""Who searches with a linear prior: what is handed to the search, and what every candidate is told of its own row."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.attacks import linear_evidence, linear_map, wiener
from gradveil.attacks.adaptive import DRAWS, REFRESH_EVERY, STANCES
from gradveil.attacks.base import Cost
from gradveil.attacks.engine.execution import Execution, choose_execution
from gradveil.attacks.engine.loop import Outcome
from gradveil.attacks.engine.optimisers import LBFGS
from gradveil.attacks.generic.stances import renewed
from gradveil.attacks.linear_evidence import evidence_of, held_batches
from gradveil.attacks.linear_map import LinearMap
from gradveil.attacks.linear_noise import Release
from gradveil.attacks.wiener import Wiener
from gradveil.errors import UsageError
from gradveil.records import Knowledge, ThreatModel
from tests.unit.attacks.linear_scenes import prior_of, two_rounds
from tests.unit.attacks.scenes import drawn, make_context, noting

KNOWING = ThreatModel(rounds=2, knows=ThreatModel().knows | {Knowledge.LABELS})
OWN = torch.tensor([0, 1])


@pytest.mark.parametrize("kind", [Wiener, LinearMap])
def test_the_least_of_every_setting_is_taken_and_less_is_refused(kind: Any) -> None:
    last = "iterations" if kind is Wiener else "steps"
    for name, least in (("rank", 1), (last, 1), ("errors", 2), ("rehearsals", 3)):
        assert getattr(kind(**{name: least}), name) == least
        with pytest.raises(UsageError, match=f"{kind.card.name}: {name} is {least - 1}; it must be .*{least}"):
            kind(**{name: least - 1})
    with pytest.raises(UsageError, match=f"{kind.card.name}: by_class is 3"):
        kind(by_class=3)


@pytest.mark.parametrize(("stance", "runs"), [("plain", 0), ("averaged", DRAWS + 1), ("straight_through", 2), ("robust", 1)])
def test_a_search_costs_its_steps_and_what_it_renews(stance: str, runs: int) -> None:
    assert LinearMap(steps=7, stance=stance).cost() == Cost(7, 1, runs / REFRESH_EVERY)
    assert Wiener(iterations=3).cost() == Cost(3)


@pytest.mark.parametrize("kind", [Wiener, LinearMap])
def test_a_prior_is_asked_for_as_the_settings_say(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    module = wiener if kind is Wiener else linear_map
    monkeypatch.setattr(module, "prior_for", lambda *given, **named: asked.append((given, named)))
    monkeypatch.setattr(module, "label_hypotheses", lambda *given: [given] * 3)
    seen, context = two_rounds(), make_context()
    assert kind(rank=9, by_class=False).lacks(seen, context) is None
    assert asked == [((seen, context, 9), {"by_class": False, "name": kind.card.name})]
    assert kind(stance="learned").hypotheses(seen, context) == 3
    asked.clear()
    monkeypatch.setattr(module, "prior_for", lambda *given, **named: noting(asked, (given, named), prior_of()))
    monkeypatch.setattr(module, "label_hypotheses", lambda *given: [])
    if kind is Wiener:
        assert kind(rank=9, by_class=False).run([seen], context) == []
        assert asked == [((seen, context, 9), {"by_class": False, "name": "wiener"})]
    assert kind().stances == (STANCES if kind is LinearMap else ("plain", "informed", "zero_mask", "magnitudes", "learned"))


def candidates(monkeypatch: pytest.MonkeyPatch, stance: str, **changes: Any) -> tuple[Any, ...]:
    """Run the search on two updates, the second of which has two plausible labels, with an end that is made up."""
    prior, noted = prior_of(held=12), SimpleNamespace(asked=[], renewed=[], chosen=[], priors=[])
    seen = [two_rounds().replace(threat=KNOWING, labels=OWN), two_rounds().replace(labels=OWN)]
    moved = tuple(each.replace(weights={n: 1.5 * v + 0.1 for n, v in each.weights.items()}) for each in seen[0].updates)
    seen[1] = seen[1].replace(updates=moved)
    labels = {id(seen[0]): [OWN], id(seen[1]): [torch.tensor([3, 1]), torch.tensor([2, 2])]}
    monkeypatch.setattr(linear_map, "prior_for", lambda *given, **named: noting(noted.priors, (*given[2:], named), prior))
    monkeypatch.setattr(linear_map, "label_hypotheses", lambda one, own, _: labels[id(one)] if own == stance else [])
    inner, renew = choose_execution, renewed
    like = evidence_of(seen[0], stance, make_context()).simulate(prior.mean_of(OWN), OWN)
    # Of the labels (3, 1) half of everything arrives, and more; of all others it arrives as it is.
    half = Release(gain={n: torch.full_like(v, 0.5) for n, v in like.items()}, shift={n: 0.1 * v for n, v in like.items()})
    monkeypatch.setattr(linear_map, "learn_release", lambda *given: half if given[-1].tolist() == [3, 1] else Release())

    def choose(*given: Any) -> Execution:
        noted.chosen.append(given)
        return inner(*given)

    def renewing(*given: Any) -> Any:
        noted.renewed.append(given[-1])
        return renew(*given)

    def optimise(problem: Any, optimiser: Any, steps: int, execution: Any, *, progress: Any) -> Outcome:
        noted.asked.append((problem, optimiser, steps, execution, progress))
        rows = torch.arange(3.0).double()
        moved = {n: v + 0.1 * (1 + rows.reshape(3, *[1] * (v.ndim - 1))) for n, v in problem.leaves.items()}
        return Outcome(moved, rows, rows, rows, ["finished", "stopped early", "not finite"], torch.tensor([5, 6, 7]))

    for name, value in (("optimise", optimise), ("choose_execution", choose), ("renewed", renewing)):
        monkeypatch.setattr(linear_map, name, value)
    context = make_context(60, progress=print)
    attack = LinearMap(rank=3, steps=55, by_class=False, errors=4, rehearsals=3, stance=stance, **changes)
    return attack.run(seen, context), prior, seen, context, noted


def by_hand(prior: Any, evidence: Any, constants: Any, row: int, coordinates: Tensor) -> Tensor:
    """Return the misfit of one candidate, half the squared residuals by weight."""
    inputs = prior.decode(coordinates, constants["mean"][row])
    pair, total = evidence.compare(evidence.simulate(inputs, constants["labels"][row])), torch.zeros(()).double()
    for name, value in pair.simulated.items():
        gain, shift = constants[f"gain/{name}"][row], constants[f"shift/{name}"][row]
        apart = value - pair.observed[name] + (gain - 1) * value + shift
        total = total + (apart.square() * constants[f"weight/{name}"][row]).sum() / 2
    return total


@pytest.mark.parametrize("stance", ["plain", "informed"])
def test_every_candidate_is_told_of_its_own_row(stance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, prior, seen, context, noted = candidates(monkeypatch, stance)
    ((problem, optimiser, steps, execution, progress),) = noted.asked
    assert optimiser == LBFGS() and steps == 55 and progress is print and execution.mode == "batched"
    device, parameters = torch.device("cpu"), seen[0].learner.parameters
    assert noted.chosen == [("batched", device, parameters, 3, 2, 55)] and not noted.renewed
    assert noted.priors == [(3, {"by_class": False, "name": "linear_map"})]
    for name, value in problem.constants.items():
        if name.startswith(("gain/", "shift/")):
            assert bool((value[[0, 2]] == (1 if name.startswith("gain") else 0)).all()), "everything arrives"
            assert name.startswith("shift") or bool((value[1] == 0.5).all())
    assert problem.refresh is None and problem.tracks is None
    assert [each.status for each in found] == ["finished", "stopped early", "not finite"]
    assert [each.steps for each in found] == [5, 6, 7] and {each.stance for each in found} == {stance}
    assert [(each.target, each.hypothesis) for each in found] == [(0, 0), (1, 0), (1, 1)]
    assert [each.oracle_labels for each in found] == [True, False, False]
    ends = {n: v + 0.1 * (1 + torch.arange(3.0).double().reshape(3, *[1] * (v.ndim - 1))) for n, v in problem.leaves.items()}
    for row, each in enumerate(found):
        evidence = evidence_of(seen[each.target], stance, context)
        assert each.recipe == "linear_map" and torch.equal(each.targets, problem.constants["labels"][row])
        assert torch.allclose(each.inputs, prior.decode(ends["coordinates"][row], prior.mean_of(each.targets)))
        own = {n.removeprefix("unknown/"): v[row] for n, v in ends.items() if n.startswith("unknown/")}
        assert set(each.variables) == set(own) == ({"factor"} if stance == "informed" else set())
        assert all(torch.equal(each.variables[n], v) for n, v in own.items())
        begun = torch.zeros(2, 3).double() + problem.leaves["coordinates"][row]
        start = begun.requires_grad_()
        misfit = by_hand(prior, evidence, problem.constants, row, start)
        (slope,) = torch.autograd.grad(misfit, start)
        assert each.first_loss == pytest.approx(float(misfit.detach())) and each.gradient_norm == pytest.approx(
            float(slope.norm())
        )
        end = replace(evidence, variables=own)
        after = float(by_hand(prior, end, problem.constants, row, ends["coordinates"][row]))
        assert each.best_loss == pytest.approx(after)
        whole = problem.loss({n: v[row] for n, v in ends.items()}, {n: v[row] for n, v in problem.constants.items()})
        penalty = 7 * float(own["factor"]) ** 2 if own else 0.0
        assert float(whole) == pytest.approx(after + float(ends["coordinates"][row].square().sum()) / 2 + penalty)


def test_weights_are_renewed_while_the_search_is_young_and_held_for_its_last_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, seen, context, noted = candidates(monkeypatch, "robust")
    ((problem, *_),) = noted.asked
    assert noted.renewed == [54] and len(found) == 3
    noted.renewed.clear()
    for step in range(55):
        constants = problem.refresh(step, problem.leaves, problem.constants)
        renewed = any(constants[name] is not value for name, value in problem.constants.items())
        assert renewed == (step % REFRESH_EVERY == 0 and step <= 49)
    assert noted.renewed == list(range(0, 50, REFRESH_EVERY))
    last = REFRESH_EVERY * math.floor(49.5 / REFRESH_EVERY)
    assert [problem.tracks(step) for step in range(55)] == [step >= last for step in range(55)]
    short = linear_map._tracks(evidence_of(seen[0], "robust", context), context, 1)
    assert short is not None and short(0)


def test_a_candidate_starts_at_the_mean_and_equal_labels_a_little_apart() -> None:
    prior, context, attack = prior_of(held=12), make_context(), LinearMap(errors=4, rehearsals=3, stance="informed")
    seen = two_rounds()
    leaves, constants = attack._row(seen, OWN, prior, context)
    noise = torch.randn((2, 3), generator=context.seed.child("linear_map").generator("start"))
    assert torch.equal(leaves["coordinates"], 0.01 * noise.double())
    evidence = evidence_of(seen, "informed", context)
    assert torch.equal(leaves["unknown/factor"], evidence.variables["factor"])
    assert torch.equal(constants["mean"], prior.mean_of(OWN)) and constants["labels"] is OWN
    for index, own in enumerate(evidence.seen):
        assert own and all(torch.equal(constants[f"{index}|{name}"], value) for name, value in own.items())
    alone, _ = attack._row(two_rounds(size=1), OWN[:1], prior, context)
    assert alone["coordinates"].shape == (1, 3) and not alone["coordinates"].any()


@pytest.mark.parametrize(("most", "count"), [(10**9, 5), (0, linear_map.FEWEST)])
def test_errors_are_measured_on_held_out_batches_and_their_part_within_the_directions(
    most: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prior, context = prior_of(held=24), make_context()
    evidence = evidence_of(two_rounds(), "informed", context)
    asked: list[Any] = []
    inner = linear_evidence.values

    def values(function: Any, inputs: Tensor, at_once: int) -> Any:
        asked.append((inputs, at_once))
        return inner(function, inputs, at_once)

    for name, value in (("MOST_ENTRIES", most), ("values", values), ("at_once", lambda evidence, mean: 2 + len(mean))):
        monkeypatch.setattr(linear_map, name, value)
    attack = LinearMap(errors=5, stance="informed")
    pairs = attack._pairs(evidence, OWN, prior, context)
    batches = held_batches(prior, 2, 0, count)
    assert torch.equal(asked[0][0], batches) and asked[0][1] == 2
    mean = prior.mean_of(OWN)
    for place, batch in enumerate(batches):
        drawn_of = prior.decode(prior.encode(batch, mean), mean)
        for side, inputs in zip(pairs[place // 2], (batch, drawn_of), strict=True):
            expected = evidence.simulate(inputs, OWN)
            assert side.keys() == expected.keys()
            assert all(torch.allclose(side[n][place % 2], v) for n, v in expected.items())
    again = attack._pairs(evidence, OWN, prior, context)
    assert (again is pairs) == bool(most)
    attack._pairs(evidence, OWN.flip(0), prior, context)
    assert attack._pairs(evidence, OWN, prior, context) is not pairs, "of the last labels alone"
    monkeypatch.setattr(linear_map, "MOST_ENTRIES", 10**9)
    asked.clear()
    LinearMap(errors=99)._pairs(evidence, OWN, prior, context)
    assert len(asked[0][0]) == 24 - 6, "the others rehearse"


def test_releases_are_learned_of_the_records_that_measure_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    prior, asked = prior_of(held=24), list[Any]()
    context = make_context(simulate=lambda *_: ())
    monkeypatch.setattr(linear_map, "learn_release", lambda *given: noting(asked, given, Release(noise=len(asked) + 1)))
    attack, seen = LinearMap(rehearsals=5, stance="informed"), two_rounds()
    evidence = evidence_of(seen, "informed", context)
    for _ in range(2):
        assert attack._release(evidence, OWN, prior, context).noise == 1
        assert attack._release(evidence, OWN.flip(0), prior, context).noise == 2
        assert LinearMap(rehearsals=4, stance="informed")._release(evidence, OWN, prior, context).noise == 3
        assert LinearMap(rehearsals=5, stance="learned")._release(evidence, OWN, prior, context).noise == 4
    observation, where, stance, inputs, labels = asked[0]
    assert observation is seen and where is context and stance == "informed" and labels is OWN
    assert torch.equal(inputs, held_batches(prior, 2, 18, 5))
    robust = evidence_of(seen, "robust", context)
    assert attack._release(robust, OWN, prior, context).noise == 0 and len(asked) == 4
    assert linear_map._rehearsing(prior_of(held=3)) == 1


def test_an_entry_weighs_as_little_as_everything_that_moves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = evidence_of(two_rounds(), "informed", make_context())
    names = list(evidence.simulate(drawn(2, 2, 8, 8), OWN))

    def some(count: int, seed: int) -> Any:
        rows = [evidence.simulate(drawn(2, 2, 8, 8, seed=seed + place), OWN) for place in range(count)]
        return {n: torch.stack([row[n] for row in rows]) for n in names}

    real, within = [some(3, 1), some(2, 5)], [some(3, 11), some(2, 15)]
    real[1][names[0]][1] = float("nan")
    gain, variance = ({n: drawn(*v.shape[1:], seed=s) + 0.5 for n, v in real[0].items()} for s in (7, 8))
    found = LinearMap()._weights(evidence, Release(gain=gain, variance=variance), list(zip(real, within, strict=True)))
    for name in names:
        # Residuals are twice what was simulated less what was seen; the last record is not finite and left out.
        drawn_of = torch.cat([each[name] for each in within])[:4]
        factor = evidence.variables["factor"]
        seen = torch.stack([evidence.seen[int(name[0])]["observed/" + name[2:]]]) - factor
        inside = gain[name] * (2 * drawn_of - seen)
        apart = gain[name] * 2 * (torch.cat([each[name] for each in real])[:4] - drawn_of)
        spread = (apart.square().sum(0) + 4 * apart.square().mean()) / 8
        least = 1e-10 * (inside - inside.mean(0)).square().mean() + (4 * 2.0**-52) ** 2 * inside.square().mean()
        assert torch.allclose(found[name], 1 / (spread + variance[name] + least))
    for each in real:
        each[names[0]][:] = float("inf")
    with pytest.raises(UsageError, match="not finite"):
        LinearMap()._weights(evidence, Release(), list(zip(real, within, strict=True)))

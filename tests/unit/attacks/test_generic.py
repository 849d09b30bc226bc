"""Attackers that know a defense by running it, and need nobody to describe it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks.adaptive import adversary_for, confusions, stances_for
from gradveil.attacks.base import AttackContext
from gradveil.attacks.generic.probe import Probe, probe_of
from gradveil.attacks.generic.stances import GAIN, WEIGHT, Learned, Magnitudes, Robust, robust_weights
from gradveil.attacks.gradient_matching import GradientMatching
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.learning import Learner
from gradveil.records import ORDINARY, Batch, Comparison, Knowledge, Observation, ThreatModel, Update
from gradveil.tensors import Named
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe, own_inputs

Spoil = Callable[[Named, torch.Generator], Named]


def flipped(share: float, *, fixed: bool = False) -> Spoil:
    """Turn the signs of a share of all entries; always of the same ones where ``fixed``."""

    def spoil(weights: Named, generator: torch.Generator) -> Named:
        own = torch.Generator().manual_seed(3) if fixed else generator
        return {n: torch.where(torch.rand(v.shape, generator=own) < share, -v, v) for n, v in weights.items()}

    return spoil


def replaced(share: float) -> Spoil:
    """Replace a share of all entries by noise as large as the largest."""

    def spoil(weights: Named, generator: torch.Generator) -> Named:
        hit = {n: torch.rand(v.shape, generator=generator) < share for n, v in weights.items()}
        noise = {n: v.abs().max() * torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in weights.items()}
        return {n: torch.where(hit[n], noise[n], v) for n, v in weights.items()}

    return spoil


def scaled(weights: Named, generator: torch.Generator) -> Named:
    return {n: 0.1 * v for n, v in weights.items()}


def noisy(weights: Named, generator: torch.Generator) -> Named:
    size = torch.cat([v.reshape(-1) for v in weights.values()]).std()
    return {n: v + size * torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in weights.items()}


def client(learner: Learner, spoil: Spoil) -> Callable[[Tensor, Tensor, int], tuple[Named, ...]]:
    def simulate(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        return (spoil(dict(learner.update(inputs, targets)), torch.Generator().manual_seed(1000 + draw)),)

    return simulate


def scene(
    spoil: Spoil, *, dtype: torch.dtype = torch.float64, count: int = 1
) -> tuple[list[Observation], list[Batch], AttackContext]:
    """Return what a server sees of clients whose updates are spoiled, by an author who refines nothing of the search."""
    learner = make_learner(dtype=dtype)
    simulate, batches = client(learner, spoil), [make_batch(seed=10 + place, dtype=dtype) for place in range(count)]
    seen = [
        observe(learner, batch).replace(updates=(Update(simulate(batch.inputs, batch.targets, place)[0], examples=1),))
        for place, batch in enumerate(batches)
    ]
    known = [each.replace(adversary=Refined()) for each in seen]
    context = make_context(400, simulate=simulate, own=own_inputs(5, dtype=dtype), random_defense=True)
    return known, batches, context


class Refined(OpenAdversary):
    """Another class, so that the defense is known, that changes nothing."""


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (flipped(0.1), {"magnitudes", "robust"}),
        (flipped(0.5), {"magnitudes"}),
        (flipped(0.6, fixed=True), {"magnitudes", "learned"}),
        (replaced(0.2), {"robust"}),
        (scaled, set()),
        (noisy, set()),
    ],
    ids=["tenth flipped", "half flipped", "always the same flipped", "replaced", "scaled", "noise"],
)
def test_a_stance_runs_where_it_tells_own_inputs_apart_and_nowhere_else(spoil: Spoil, expected: set[str]) -> None:
    (seen,), _, context = scene(spoil)
    assert set(stances_for(seen, context)) - {"plain", "informed", "averaged", "zero_mask"} == expected


def test_who_does_not_know_the_defense_or_has_no_inputs_of_its_own_learns_nothing() -> None:
    (seen,), _, context = scene(flipped(0.1))
    ignorant = seen.replace(threat=ThreatModel(knows=ORDINARY - {Knowledge.DEFENSE}))
    assert set(stances_for(ignorant, context)) <= {"plain", "zero_mask"}
    bare = make_context(simulate=context.simulate, random_defense=True)
    assert set(stances_for(seen, bare)) <= {"plain", "informed", "averaged", "zero_mask"}
    assert probe_of(seen, bare) is None


def test_the_client_is_run_for_nobody_who_would_not_learn_from_it_and_once_for_all_who_do() -> None:
    (seen,), _, context = scene(flipped(0.1))
    inner, runs = context.simulate, []

    def counted(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        runs.append(draw)
        assert inner is not None
        return inner(inputs, targets, draw)

    context = make_context(simulate=counted, own=own_inputs(), random_defense=True)
    stances_for(seen, context, ("plain", "informed", "zero_mask"))
    assert runs == []
    stances_for(seen, context)
    adversary_for("learned", seen, context).evidence(seen, 0)
    assert len(runs) == len(set(runs)) == 8


def at_truth(seen: Observation, batch: Batch, adversary: OpenAdversary, **constants: Named) -> float:
    evidence = dict(adversary.evidence(seen, 0))
    for part, named in constants.items():
        evidence |= {f"{part}/{n}": v for n, v in named.items()}
    simulated = adversary.replay(seen.learner, batch.inputs, batch.targets, {})
    both = adversary.compare(evidence, simulated, {})
    left, right = (torch.cat([side[n].reshape(-1) for n in both.simulated]) for side in (both.simulated, both.observed))
    return float(1 - torch.cosine_similarity(left, right, dim=0))


def test_magnitudes_coincide_at_the_truth_whatever_signs_are_sent() -> None:
    (seen,), (batch,), _ = scene(flipped(0.4))
    assert at_truth(seen, batch, OpenAdversary()) > 0.1
    assert at_truth(seen, batch, Magnitudes()) < 1e-12


def test_entries_that_were_replaced_lose_their_weight_whatever_the_scale() -> None:
    (seen,), (batch,), _ = scene(replaced(0.2))
    raw = dict(seen.learner.update(batch.inputs, batch.targets))
    for factor in (1.0, 0.01, 30.0):
        sent = {n: factor * v for n, v in seen.update.weights.items()}
        weight = robust_weights(raw, sent)
        exact = {n: (sent[n] - factor * v).abs() <= 1e-9 * factor * v.abs().max() for n, v in raw.items()}
        kept = torch.cat([weight[n][exact[n]] for n in raw])
        lost = torch.cat([weight[n][~exact[n]] for n in raw])
        assert float(kept.min()) > 0.99 and float(lost.median()) < 1e-4
    assert at_truth(seen, batch, Robust(), weight=robust_weights(raw, seen.update.weights)) < 1e-4
    assert at_truth(seen, batch, OpenAdversary()) > 0.2


def test_gains_that_differ_from_entry_to_entry_are_learned_and_chance_is_not_taken_for_one() -> None:
    (seen,), (batch,), context = scene(flipped(0.5, fixed=True))
    probe = probe_of(seen, context)
    assert probe is not None
    turned = {n: torch.sign(seen.update.weights[n] * v) for n, v in seen.learner.update(batch.inputs, batch.targets).items()}
    for name, gain in probe.learned(0).gain.items():
        assert float((gain - turned[name])[turned[name] != 0].abs().max()) < 1e-6
    assert at_truth(seen, batch, Learned(probe)) < 1e-12
    (seen,), _, context = scene(noisy)
    probe = probe_of(seen, context)
    assert probe is not None
    for name, gain in probe.learned(0).gain.items():
        raw, sent = probe.raw[0][name], probe.sent[0][name]
        alone = ((raw * sent).sum(0) / raw.square().sum(0))[raw.square().sum(0) > 0]
        if alone.numel() > 50:
            assert float(gain.std()) < 0.3 * float(alone.std()), name


def test_an_entry_weighs_as_surely_as_it_arrives() -> None:
    learner = make_learner()

    def spoil(weights: Named, generator: torch.Generator) -> Named:
        last = list(weights)[-2]
        noise = torch.randn(weights[last].shape, generator=generator, dtype=torch.float64)
        return {**weights, last: weights[last] + 10 * weights[last].std() * noise}

    context = make_context(simulate=client(learner, spoil), own=own_inputs())
    probe = probe_of(observe(learner, make_batch()), context)
    assert probe is not None
    weight, raw = probe.learned(0).weight, probe.raw[0]
    size = {n: v.square().mean().sqrt() for n, v in raw.items()}
    surely = {n: float((weight[n] * size[n]).median()) for n in weight}
    name = list(weight)[-2]
    assert surely[name] < 0.05 * min(value for n, value in surely.items() if n != name)


def test_what_was_learned_never_saw_the_input_it_is_judged_by() -> None:
    raw = {"w": torch.randn((4, 30), generator=torch.Generator().manual_seed(0))}
    sent = {"w": torch.randn((4, 30), generator=torch.Generator().manual_seed(1))}
    crossed = {"w": torch.randn((4, 4, 30), generator=torch.Generator().manual_seed(2))}
    probe = Probe((raw,), (sent,), crossed)
    for row in range(4):
        changed = {"w": sent["w"].clone()}
        changed["w"][row] += 100
        again = Probe((raw,), (changed,), crossed)
        assert torch.equal(probe.reliance(0, without=row).gain["w"], again.reliance(0, without=row).gain["w"])
        assert not torch.equal(probe.reliance(0).gain["w"], again.reliance(0).gain["w"])


def test_confusion_is_one_where_nothing_tells_and_zero_where_the_truth_coincides() -> None:
    (seen,), _, context = scene(lambda weights, generator: weights)
    probe = probe_of(seen, context)
    assert probe is not None
    assert probe.confusion(lambda _: Comparison) < 1e-12
    blind = probe.confusion(lambda _: lambda raw, sent: Comparison({"one": torch.ones(1)}, {"one": torch.ones(1)}))
    assert blind == 1.0
    assert confusions(probe)["plain"] < 1e-12


@pytest.mark.parametrize(
    ("stance", "spoil"), [("magnitudes", flipped(0.1)), ("robust", replaced(0.1)), ("learned", flipped(0.4, fixed=True))]
)
def test_the_search_finds_what_plain_matching_cannot(stance: str, spoil: Spoil) -> None:
    seen, batches, context = scene(spoil, dtype=torch.float32, count=2)
    seen = [
        each.replace(labels=batch.targets, threat=ThreatModel(knows=ORDINARY | {Knowledge.LABELS}))
        for each, batch in zip(seen, batches, strict=True)
    ]

    def worst(stance: str) -> float:
        attack = InvertingGradients(steps=120, signed=False, schedule="cosine", tv=1e-6, start="grey", stance=stance)
        found = attack.run(seen, context)
        assert len(found) == 2 and all(candidate.stance == stance for candidate in found)
        return max(float((c.inputs - batches[c.target].inputs).square().mean()) for c in found)

    assert worst(stance) < 0.3 * worst("plain")


def test_a_robust_search_is_compared_with_its_start_under_the_same_weights() -> None:
    seen, _, context = scene(replaced(0.1), dtype=torch.float32)
    (found,) = InvertingGradients(steps=60, signed=False, tv=1e-6, start="grey", stance="robust").run(seen, context)
    assert found.best_loss < 0.9 * found.first_loss


def test_what_renewals_cost_is_counted() -> None:
    costs = {
        stance: InvertingGradients(steps=100, stance=stance).cost().client_updates
        for stance in ("plain", "magnitudes", "learned")
    }
    assert set(costs.values()) == {0.0}
    robust, through, averaged = (
        InvertingGradients(stance=s).cost().client_updates for s in ("robust", "straight_through", "averaged")
    )
    assert 0 < robust < through < averaged


def test_without_the_clients_code_learned_compares_as_plain_does() -> None:
    seen, batch = observe(make_learner(), make_batch(), "clipping(bound=0.01)"), make_batch()
    adversary = adversary_for("learned", seen)
    evidence = adversary.evidence(seen, 0)
    assert all(bool((value == 1).all()) for name, value in evidence.items() if name.startswith((GAIN, WEIGHT)))
    simulated = adversary.replay(seen.learner, batch.inputs, batch.targets, {})
    plain = OpenAdversary().compare(OpenAdversary().evidence(seen, 0), simulated, {})
    found = adversary.compare(evidence, simulated, {})
    for name, value in plain.simulated.items():
        assert torch.equal(found.simulated[name], value) and torch.equal(found.observed[name], plain.observed[name])


def test_every_new_stance_asks_for_the_defense() -> None:
    seen = observe(make_learner(), make_batch())
    for stance in ("magnitudes", "robust", "learned"):
        attack: GradientMatching = InvertingGradients(stance=stance)
        assert Knowledge.DEFENSE in attack.needs(seen)

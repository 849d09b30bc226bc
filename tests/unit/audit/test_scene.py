"""What an audit attacks: real clients, and nothing of the truth in what the attacker is shown."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from gradveil.audit.scene import Subject, build_learner
from gradveil.audit.state import CANDIDATES
from gradveil.client.update import run_client
from gradveil.defenses import build_defense
from gradveil.defenses.base import ClientView
from gradveil.defenses.graddefense.defense import GradDefenseAdversary
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.records import Knowledge, ModelSpec, Observation
from gradveil.tensors import Named
from tests.unit.audit.small import CELL, digits, make_subject


def same(left: Named, right: Named) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def updates(subject: Subject) -> list[Named]:
    return [update.weights for target in (*subject.targets, *subject.rehearsals) for update in target.observation.updates]


@pytest.mark.usefixtures("untouched_global_rng")
def test_the_same_cell_is_the_same_subject() -> None:
    first, second = (make_subject(rehearsals=2, defense="gaussian_noise(std=0.01)") for _ in range(2))
    assert all(same(a, b) for a, b in zip(updates(first), updates(second), strict=True))
    other = make_subject(rehearsals=2, defense="gaussian_noise(std=0.01)", seed=1)
    assert not any(same(a, b) for a, b in zip(updates(first), updates(other), strict=True))


def test_records_are_where_the_positions_say() -> None:
    subject = make_subject(records=6, batch_size=2)
    shown = torch.cat([target.batch.inputs for target in subject.targets])
    assert len(subject.targets) == 3 and len(subject.candidates) == CANDIDATES
    assert torch.equal(subject.candidates[list(subject.positions)], shown)
    assert torch.equal(digits().inputs[list(subject.indices)], shown)
    assert len(set(subject.indices)) == 6


def test_rehearsals_are_not_records() -> None:
    subject = make_subject(rehearsals=3)
    assert len(subject.rehearsals) == 3
    for rehearsal in subject.rehearsals:
        nearest = (digits().inputs - rehearsal.batch.inputs).square().flatten(1).mean(1).min()
        assert float(nearest) > 1e-3


def test_the_update_is_what_the_client_computes() -> None:
    subject = make_subject()
    for target in subject.targets:
        expected = subject.learner.update(target.batch.inputs, target.batch.targets)
        assert same(target.observation.update.weights, expected)
        assert torch.equal(target.trained_inputs, target.batch.inputs)


def tensors_in(value: object) -> list[Tensor]:
    """Return every tensor reachable through the fields of a record."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v)]
    if isinstance(value, tuple | list):
        return [t for v in value for t in tensors_in(v)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for f in dataclasses.fields(value) for t in tensors_in(getattr(value, f.name))]
    return []


def test_the_truth_is_not_reachable_from_an_observation() -> None:
    for defense in ("none", "data_noise(std=0.1)"):
        for target in make_subject(defense=defense).targets:
            shown = [t for t in tensors_in(target.observation) if t.numel() == target.batch.inputs.numel()]
            hidden = (target.batch.inputs, target.trained_inputs)
            assert not any(torch.equal(t.flatten(), x.flatten()) for t in shown for x in hidden)


def test_labels_are_shown_only_where_granted() -> None:
    assert all(t.observation.labels is None for t in make_subject().targets)
    for target in make_subject(known_labels=True).targets:
        assert target.observation.labels is not None and torch.equal(target.observation.labels, target.batch.targets)
        assert Knowledge.LABELS in target.observation.threat.knows


def test_a_defense_on_data_is_seen_in_what_was_trained_on() -> None:
    subject = make_subject(defense="data_noise(std=0.1)")
    for target in subject.targets:
        assert not torch.equal(target.trained_inputs, target.batch.inputs)
        expected = subject.learner.update(target.trained_inputs, target.batch.targets)
        assert all(torch.allclose(v, expected[n]) for n, v in target.observation.update.weights.items())


def test_an_aggregate_is_the_mean_of_its_clients() -> None:
    subject = make_subject(clients=2, defense="clipping(bound=0.1)")
    assert len(subject.targets) == 2
    seen: Observation = subject.targets[0].observation
    batch = subject.targets[0].batch
    assert seen.examples == 2 and seen.learner.settings.clients == 2 and seen.threat.clients == 2
    parts = []
    for index in range(2):
        raw = subject.learner.update(batch.inputs[index : index + 1], batch.targets[index : index + 1])
        length = torch.stack([v.square().sum() for v in raw.values()]).sum().sqrt()
        parts.append({n: v * min(1.0, 0.1 / float(length)) for n, v in raw.items()})
    assert all(torch.allclose(v, (parts[0][n] + parts[1][n]) / 2, atol=1e-6) for n, v in seen.update.weights.items())


@pytest.mark.parametrize("defense", ["censor(sampling='public', trials=2)", "graddefense(std=0.1)"])
def test_clients_have_public_inputs_that_are_no_records(defense: str) -> None:
    subject, built = make_subject(defense=defense, model="lenet"), build_defense(defense)
    nearest = (digits().inputs[:, None] - subject.public[None, :4]).square().flatten(2).mean(2).min()
    assert float(nearest) > 1e-3
    spec, changed = ModelSpec.of(subject.learner.model), []
    for index, target in enumerate(subject.targets):
        own = Seed(CELL.seed).child("client", index).child(0)
        given, without = (
            built.decode(run_client(subject.learner, target.batch, built, own, public=public).payload, spec).weights
            for public in (subject.public, None)
        )
        assert same(target.observation.update.weights, given)
        changed.append(not same(given, without))
    # Slices end elsewhere, which shows only where just one of two neighbours gets noise.
    assert any(changed)


def test_the_attacker_cuts_the_slices_that_clients_cut() -> None:
    subject = make_subject(defense="graddefense(std=0.1)", model="lenet")
    seen, built = subject.targets[0].observation, subject.defense
    view = ClientView(learner=subject.learner, seed=Seed(0), public=subject.public)
    assert isinstance(seen.adversary, GradDefenseAdversary)
    assert seen.adversary._cuts(seen) == built.prepare(subject.targets[0].batch, view)["cuts"].tolist()
    assert seen.adversary._cuts(seen) != seen.adversary._cuts(seen.replace(public=None))


def test_rounds_move_the_model_on() -> None:
    subject = make_subject(rounds=2, learning_rate=0.1)
    first, second = subject.targets[0].observation.learners
    mean = {n: torch.stack([t.observation.updates[0].weights[n] for t in subject.targets]).mean(0) for n in first.weights}
    assert all(torch.allclose(second.weights[n], w - 0.1 * mean[n]) for n, w in first.weights.items())
    target = subject.targets[0]
    expected = second.update(target.batch.inputs, target.batch.targets)
    assert all(torch.allclose(v, expected[n]) for n, v in target.observation.updates[1].weights.items())


def test_the_desk_lends_the_clients_code_only_where_a_defense_acts() -> None:
    assert make_subject().context(10).simulate is None
    subject = make_subject(defense="clipping(bound=0.01)")
    context = subject.context(10)
    assert context.simulate is not None and not context.random_defense
    target = subject.targets[0]
    (sent,) = context.simulate(target.batch.inputs, target.batch.targets, 0)
    assert all(torch.allclose(v, target.observation.update.weights[n]) for n, v in sent.items())
    noisy = make_subject(defense="gaussian_noise(std=0.01)")
    lent = noisy.context(10)
    assert lent.random_defense and lent.simulate is not None
    (guess,) = lent.simulate(noisy.targets[0].batch.inputs, noisy.targets[0].batch.targets, 0)
    assert not same(guess, noisy.targets[0].observation.update.weights), "the attacker draws the victim's own noise"


def test_training_states() -> None:
    defense = build_defense("none")
    fresh, trained = (
        build_learner(CELL.replace(state=state), digits(), defense)
        for state in ("untrained", "trained(steps=30, learning_rate=0.5)")
    )
    inputs, labels = digits().inputs[:200], digits().targets[:200]
    assert trained.objective(trained.weights, inputs, labels) < 0.8 * fresh.objective(fresh.weights, inputs, labels)
    with pytest.raises(UsageError, match="write untrained, given, or trained"):
        build_learner(CELL.replace(state="half"), digits(), defense)


def test_more_records_than_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match="lower records"):
        make_subject(records=5000)

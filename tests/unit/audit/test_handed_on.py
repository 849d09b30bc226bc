"""What an audit hands on: seeds, sizes, orders of a batch, names, and what the defense measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradveil.attacks import Referee
from gradveil.audit import certified, risks, scene
from gradveil.audit.cell import _describe_defense, run_cell
from gradveil.audit.judge import best_by_truth, score
from gradveil.audit.risks import correlate
from gradveil.audit.scene import Subject
from gradveil.randomness import Seed
from gradveil.records import Reconstruction
from tests.unit.audit.small import CELL, digits, make_subject


def turned(subject: Subject) -> list[Reconstruction]:
    """Return the truth of batches of three, each turned round by one: no order that is its own inverse."""
    return [
        Reconstruction((target.batch.inputs.roll(1, 0) + 0.01).clamp(0, 1), target.batch.targets.roll(1, 0), "x", target=index)
        for index, target in enumerate(subject.targets)
    ]


def test_a_batch_is_brought_back_into_its_order() -> None:
    subject = make_subject(records=6, batch_size=3)
    assert any(len(set(target.batch.targets.tolist())) == 3 for target in subject.targets)
    scored = score(subject, turned(subject))
    assert scored.rank.tolist() == [1] * 6
    assert scored.labels is not None and scored.labels.tolist() == [1.0] * 6
    truth = torch.cat([target.batch.inputs for target in subject.targets])
    assert torch.allclose(scored.images, (truth + 0.01).clamp(0, 1))


def test_the_best_of_a_batch_is_found_in_any_order() -> None:
    subject = make_subject(records=3, batch_size=3)
    (near,) = turned(subject)
    straight = Reconstruction((subject.targets[0].batch.inputs + 0.1).clamp(0, 1), near.targets, "far")
    assert [each.recipe for each in best_by_truth(subject, [[straight, near]])] == ["x"]


def test_updates_say_how_many_examples_and_which_round() -> None:
    subject = make_subject(records=4, batch_size=2, clients=2, rounds=2)
    for target in subject.targets:
        assert [(update.examples, update.round) for update in target.observation.updates] == [(4, 0), (4, 1)]


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """Return everything about a cell that a seed draws."""
    subject = make_subject(rehearsals=2, seed=seed, state="trained(steps=2)")
    context = subject.context(10)
    return {
        "records": torch.tensor(subject.indices),
        "public": subject.public,
        "model": next(iter(subject.learner.weights.values())),
        "rehearsal": subject.rehearsals[0].batch.inputs,
        "attacker": torch.rand(4, generator=context.seed.generator("x")),
    }


def test_a_cell_s_seed_draws_records_model_public_images_and_the_attacker() -> None:
    zero, one, two = drawn(0), drawn(1), drawn(2)
    for name, value in zero.items():
        assert not torch.equal(value, one[name]) and not torch.equal(one[name], two[name]), name
        assert torch.equal(value, drawn(0)[name]), name


@pytest.mark.parametrize(("module", "inner"), [(certified, "certificate_from"), (risks, "assess")], ids=["certificate", "risk"])
def test_certificate_and_scores_of_risk_are_drawn_by_the_cell_s_seed(
    module: Any, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[object] = []

    def noting(*given: Any, **more: Any) -> Any:
        seeds.append(more["seed"])
        return called(*given, **more)

    called = getattr(module, inner)
    monkeypatch.setattr(module, inner, noting)
    for seed in (0, 1):
        subject = make_subject(seed=seed, defense="clipping + gaussian_noise", risk="auto")
        certified.certificate_of_cell(subject) if module is certified else risks.risk_of_cell(subject)
    assert seeds[0] != seeds[-1]


def test_an_attacker_with_a_list_runs_the_client_with_the_cell_s_seed_and_a_fresh_one_for_every_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[Seed] = []
    called = scene._send

    def noting(*given: Any) -> Any:
        seeds.append(given[3])
        return called(*given)

    subjects = [make_subject(seed=number, defense="clipping + gaussian_noise") for number in (0, 1)]
    monkeypatch.setattr(scene, "_send", noting)
    for subject in subjects:
        for draw in (0, 1):
            subject.observe(subject.candidates[:1], subject.candidate_labels[:1], draw)
    assert len({*seeds}) == 4


def test_what_a_defense_measures_is_told_in_the_mean_over_clients_and_targets() -> None:
    one = make_subject(defense="refiner(epsilon=1e-4, steps=1, balance=0)", model="lenet", clients=2, batch_size=1)
    told = _describe_defense(one).measured
    (name,) = told
    each = [target.measured[name] for target in one.targets]
    assert len(each) == 2 and all(0 < value < 1 for value in each)
    assert told[name] == pytest.approx(sum(each) / 2)


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("changes", "sees"), [({}, "update"), ({"cut": "cut1", "model": "lenet", "parts": "whole"}, "embedding")]
)
def test_the_ensemble_is_the_one_for_what_is_seen(changes: dict[str, Any], sees: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any) -> Any:
        raise Stop(*given)

    monkeypatch.setattr("gradveil.audit.cell.resolve", stop)
    with pytest.raises(Stop) as stopped:
        run_cell(CELL.replace(ensemble="quick", **changes), digits())
    assert stopped.value.args == ("quick", sees)


def test_names_of_records_begin_with_their_kind_and_labels_are_theirs() -> None:
    found = run_cell(CELL.replace(records=2), digits()).result
    assert all(row.pseudonym.startswith("r-") and len(row.pseudonym) == 12 for row in found.records)
    assert [row.label for row in found.records] == [int(target.batch.targets) for target in make_subject(records=2).targets]


@pytest.mark.parametrize(
    ("scores", "errors", "n"),
    [([0.1, 0.2], [0.1, 0.2], 2), ([0.1, 0.2, 0.3], [0.5, None, 0.5], 2), ([0.1, 0.2, 0.3, 0.4], [4.0, 3.0, None, 1.0], 3)],
)
def test_a_correlation_counts_the_pairs_behind_it(scores: list[float], errors: list[float | None], n: int) -> None:
    found = correlate(scores, errors, "plain")
    assert (found.n, found.attack) == (n, "plain")
    assert (found.pearson is None) == (n < 3)
    if found.pearson is not None and found.spearman is not None:
        assert found.pearson.value < -0.9 and found.spearman.value == pytest.approx(-1.0)


def test_an_untrained_referee_prefers_the_truth() -> None:
    subject = make_subject(records=1)
    target = subject.targets[0]
    guesses = [
        Reconstruction(target.batch.inputs.flip(-1), target.batch.targets, "wrong"),
        Reconstruction(target.batch.inputs, target.batch.targets, "truth"),
    ]
    assert Referee().select(target.observation, guesses).chosen == 1

"""The certificate of a cell: what it counts, when there is none, and that the attack with the list stays below it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from gradveil.audit.cell import run_cell
from gradveil.audit.certified import certificate_of_cell, certify, guarantee_of, matching_attack
from gradveil.audit.scene import build_subject
from gradveil.proofs.bounds import gaussian_bound, mixed_bound
from gradveil.study.codec import encode
from tests.unit.audit.small import CELL, digits, few_digits, make_subject

NOISY = "clipping(bound=1) + gaussian_noise(std=0.5)"


def test_one_record_and_one_round_is_the_plain_formula() -> None:
    found = certificate_of_cell(make_subject(defense=NOISY))
    assert found.identified == gaussian_bound(1 / 256, noise_multiplier=0.5)
    assert set(found.psnr) == {"15", "20", "25"} and all(value >= found.identified for value in found.psnr.values())
    assert found.epsilon == guarantee_of(make_subject(defense=NOISY)).epsilon


@pytest.mark.parametrize(
    ("changes", "kappa", "steps"),
    [
        ({"batch_size": 2}, 2 / 256, 1),  # the noise covers the whole batch
        ({"clients": 2}, 2 / 255, 1),  # the other client may be known
        ({"rounds": 2}, 1 / 253, 2),  # the model of round 2 has seen all four records
        ({"local_steps": 3}, 1 / 256, 1),  # one noisy release, however many steps
        ({"defense": "dp_sgd(noise_multiplier=0.5)", "batch_size": 2}, 2 / 255, 1),  # the noise covers one record
        ({"defense": "dp_sgd(noise_multiplier=0.5)", "local_steps": 3}, 1 / 256, 3),
    ],
)
def test_every_setting_counts_its_guesses_and_releases(changes: dict[str, Any], kappa: float, steps: int) -> None:
    found = certificate_of_cell(make_subject(**{"defense": NOISY, **changes}))
    # The clients of a sum each add noise of their own.
    multiplier = 0.5 * math.sqrt(changes.get("clients", 1))
    assert found.identified == gaussian_bound(kappa, noise_multiplier=multiplier, steps=steps)
    assert found.steps == steps


def test_known_labels_are_counted() -> None:
    subject = make_subject(defense=NOISY, known_labels=True)
    sizes = torch.bincount(subject.candidate_labels).tolist()
    found = certificate_of_cell(subject)
    assert found.label_known
    assert found.identified == pytest.approx(mixed_bound([1 / size for size in sizes], sizes, noise_multiplier=0.5))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"defense": "none"}, "nothing is done"),
        ({"defense": "gaussian_noise"}, "put clipping right before"),
        ({"defense": "pruning"}, "no proof is known"),
    ],
)
def test_without_a_proof_there_is_a_reason(changes: dict[str, Any], reason: str) -> None:
    found = certify(make_subject(**{"defense": NOISY, **changes}))
    assert found.identified is None and found.matching is None
    assert reason in found.reason and found.sentence.startswith("no certificate: ")


def test_a_model_that_has_seen_the_records_takes_the_guarantee_away() -> None:
    assert guarantee_of(make_subject(defense=NOISY)).epsilon is not None
    cell = CELL.replace(defense=NOISY, state="trained(steps=1)")
    seen = build_subject(cell, few_digits(), 0)
    assert guarantee_of(seen).epsilon is None and "trained on the audited records" in guarantee_of(seen).reason
    assert certify(seen).identified is None
    assert guarantee_of(make_subject(defense=NOISY, state="trained(steps=1)")).epsilon is not None, "they were held out"


def test_every_epoch_that_holds_a_record_spends_its_budget() -> None:
    told: dict[str, Any] = {"defense": "dp_sgd(noise_multiplier=2.0)", "batch_size": 8, "records": 8}
    once, twice = (
        guarantee_of(make_subject(**told, minibatch=2, local_epochs=epochs, momentum=0.9, **more))
        for epochs, more in ((1, dict[str, Any]()), (2, {"shuffle": True}))
    )
    assert (once.steps, twice.steps) == (1, 2), "of four and eight steps a record is in one an epoch"
    assert once.epsilon is not None and twice.epsilon is not None and once.epsilon < twice.epsilon
    pair = guarantee_of(make_subject(**{**told, "defense": NOISY}, minibatch=2, local_epochs=3))
    assert (pair.unit, pair.steps) == ("client", 1), "one update goes out, however it was made"


def test_the_attacker_with_the_list_finds_most_without_much_noise_and_little_with_much() -> None:
    weak = matching_attack(make_subject(defense="clipping(bound=1) + gaussian_noise(std=0.01)", records=16))
    assert weak is not None and weak.count == 16
    strong = matching_attack(make_subject(defense="dp_sgd(noise_multiplier=5.0)", records=16))
    assert strong is not None and strong.count <= 2


@pytest.mark.parametrize(
    ("defense", "changes"),
    [
        *[(NOISY, changes) for changes in ({}, {"rounds": 2}, {"known_labels": True}, {"local_steps": 2, "learning_rate": 1.0})],
        *[("dp_sgd(noise_multiplier=0.5)", changes) for changes in ({}, {"local_steps": 2})],
    ],
)
def test_it_never_exceeds_the_certificate(defense: str, changes: dict[str, Any]) -> None:
    found = certify(make_subject(defense=defense, records=48, **changes))
    assert found.matching is not None and found.identified is not None
    assert found.matching.low <= found.identified
    assert found.matching.count > 0  # guessing would find 0.2 on average, so this shows that it attacks


@pytest.mark.parametrize("changes", [{"batch_size": 2}, {"clients": 2}, {"local_steps": 20}])
def test_where_the_matching_attack_would_take_too_long_there_is_a_bound_alone(changes: dict[str, Any]) -> None:
    found = certify(make_subject(defense=NOISY, **changes))
    assert found.identified is not None and found.matching is None


def test_it_is_part_of_every_cell() -> None:
    for defense in ("none", NOISY):
        record = encode(run_cell(CELL.replace(defense=defense), digits()).result)
        json.dumps(record, allow_nan=False)
        assert (record["certificate"]["identified"] is None) == (defense == "none")
        if defense == NOISY:
            assert record["selected"]["identified"]["low"] <= record["certificate"]["identified"]

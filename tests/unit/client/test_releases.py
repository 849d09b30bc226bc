"""How often a record or a client is released in a run, and which runs carry a guarantee at all."""

from __future__ import annotations

from typing import Any

import pytest

from gradveil.client.guarantees import privacy_of
from gradveil.client.releases import privacy_of_training, privacy_of_updates, steps_with_one_record
from gradveil.defenses import build_defense
from gradveil.proofs.accountant import epsilon
from gradveil.study.local_training import TrainingSettings

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
ROUNDS = [(0, 1), (1, 2), (1, 0)]  # client 1 is in all three


def local(**changes: Any) -> TrainingSettings:
    return TrainingSettings(**{"shares": "weights", **changes})


@pytest.mark.parametrize(
    ("training", "examples", "expected"),
    [
        (TrainingSettings(), 4, 1),
        (local(local_steps=5), 4, 5),
        (local(epochs=3, minibatch=2), 7, 3),
        (local(epochs=3, minibatch=0), 7, 3),
        (local(local_steps=4, minibatch=2), 7, 2),  # 0 1, 2 3, 4 5, 6 0: the first record comes twice
        (local(local_steps=3, minibatch=2), 7, 1),
        (local(local_steps=3, minibatch=9), 7, 3),
    ],
)
def test_steps_that_hold_a_record_are_counted(training: TrainingSettings, examples: int, expected: int) -> None:
    assert steps_with_one_record(training, examples) == expected


def trained(spelling: str, **changes: Any) -> Any:
    asked: dict[str, Any] = {"sizes": (8, 8, 8), "rounds": ROUNDS, "weights": NAMES, **changes}
    return privacy_of_training(build_defense(spelling), local(epochs=2, minibatch=4), **asked)


def test_a_training_counts_the_record_that_was_used_most() -> None:
    found = trained("dp_sgd(noise_multiplier=3.0)")
    assert (found.unit, found.steps) == ("record", 6)  # three rounds, two epochs
    assert found.epsilon == epsilon(noise_multiplier=3.0, steps=6)
    assert any("seed stays secret" in each for each in found.assumptions)


def test_a_client_is_released_once_a_round() -> None:
    found = trained("clipping(bound=2.0) + gaussian_noise(std=6.0)")
    assert (found.unit, found.steps, found.noise_multiplier) == ("client", 3, 3.0)
    layered = trained("clipping(bound=2.0, scope='layer') + gaussian_noise(std=6.0)")
    assert layered.noise_multiplier == pytest.approx(3.0 / 2**0.5)


def test_a_larger_client_may_be_the_one_that_counts() -> None:
    steps = local(local_steps=6, minibatch=4)
    asked: dict[str, Any] = {"sizes": (4, 24), "rounds": [(1,), (1,), (0,)], "weights": NAMES}
    # Client 0 uses every record in all 6 steps of its one round; client 1 every record once in each of two.
    assert privacy_of_training(build_defense("dp_sgd"), steps, **asked).steps == 6


def test_what_breaks_an_assumption_takes_the_guarantee_away() -> None:
    found = trained("dp_sgd", fault="statistics are sent")
    assert found.epsilon is None and found.sentence == "no guarantee: statistics are sent"
    assert "no proof is known" in trained("pruning(rate=0.9)", fault="statistics are sent").reason


def test_given_weights_and_many_records_are_taken_into_account() -> None:
    assert any("began from" in each for each in trained("dp_sgd", first_weights=True).assumptions)
    assert not any("began from" in each for each in trained("dp_sgd").assumptions)
    assert trained("dp_sgd").delta == 1e-5
    assert trained("dp_sgd", sizes=(1_000_000, 8, 8)).delta == pytest.approx(1e-7, rel=1e-3)


def test_updates_under_attack_are_counted_for_themselves() -> None:
    def found(spelling: str, **changes: Any) -> Any:
        asked: dict[str, Any] = {"examples": 4, "rounds": 2, "weights": NAMES, **changes}
        return privacy_of_updates(build_defense(spelling), local(local_steps=3), **asked)

    assert found("dp_sgd").steps == 6
    assert found("clipping + gaussian_noise").steps == 2
    assert found("none").epsilon is None
    assert found("dp_sgd", fault="x").reason == "x"


def test_an_epsilon_that_promises_nothing_says_so() -> None:
    defense = build_defense("dp_sgd(noise_multiplier=1.0)")
    assert "promises nothing" not in privacy_of(defense).sentence
    assert privacy_of(defense, steps=40).sentence.endswith("; an ε this large promises nothing in practice")


@pytest.mark.filterwarnings("error")
def test_noise_too_small_to_count_is_no_guarantee() -> None:
    found = privacy_of(build_defense("dp_sgd(noise_multiplier=1e-300)"))
    assert found.epsilon is None and "too small" in found.reason


def test_the_sum_of_a_round_has_the_noise_of_all_of_it_and_the_smallest_round_counts() -> None:
    defense, training = build_defense("clipping(bound=1.0) + gaussian_noise(std=1.0, sharers=4)"), TrainingSettings()
    asked: dict[str, Any] = {"sizes": [10, 10, 10, 10, 1], "weights": ["a.weight"]}
    rounds = [[0, 1, 2, 3], [0, 1, 2]]
    sums, server = (privacy_of_training(defense, training, rounds=rounds, sums_only=only, **asked) for only in (True, False))
    assert (sums.summed, server.summed) == (3, 1) and sums.noise_multiplier == pytest.approx(0.5 * 3**0.5)
    assert server.noise_multiplier == 0.5 and sums.steps == server.steps == 2
    # Of two clients the large one hides behind its own noise alone.
    assert privacy_of_training(defense, training, rounds=[[0, 4]], sums_only=True, **asked).summed == 1


def test_an_audit_of_a_sum_counts_the_noise_of_all_its_clients() -> None:
    defense = build_defense("clipping(bound=1.0) + gaussian_noise(std=1.0)")
    found = privacy_of_updates(defense, TrainingSettings(), examples=1, rounds=1, weights=["a.weight"], summed=4)
    assert found.noise_multiplier == 2.0 and found.summed == 4

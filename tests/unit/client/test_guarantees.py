"""Which defenses carry a proof, with which unit, and what takes it away."""

from __future__ import annotations

import json

import pytest

from gradveil.client.guarantees import privacy_of
from gradveil.defenses import DEFENSES, Defense, build_defense, chain
from gradveil.defenses.base import ClientView, State
from gradveil.defenses.clipping import Clipping
from gradveil.defenses.dp_sgd import DPSGD
from gradveil.proofs.accountant import epsilon
from gradveil.study.codec import decode, encode
from gradveil.study.proved import Guarantee
from gradveil.tensors import Named
from gradveil.testing.faults import DoesNothing, FixedSeed


def test_dp_sgd_is_certified_per_record() -> None:
    found = privacy_of(build_defense("dp_sgd(noise_multiplier=1.5, bound=0.3)"), steps=20)
    assert found.epsilon == epsilon(noise_multiplier=1.5, steps=20)
    assert (found.unit, found.steps, found.method, found.reason) == ("record", 20, "exact", "")
    assert any("no sampling is counted" in each for each in found.assumptions)
    assert "per record after 20 releases" in found.sentence


def test_layers_clipped_by_themselves_get_noise_for_all_of_them() -> None:
    whole, layered = (privacy_of(build_defense(f"dp_sgd(scope='{scope}')")) for scope in ("global", "layer"))
    assert whole == layered


def test_poisson_sampling_needs_a_public_divisor() -> None:
    refused = privacy_of(build_defense("dp_sgd"), sampling_rate=0.01, steps=100)
    assert refused.epsilon is None and "expected_batch" in refused.reason
    granted = privacy_of(build_defense("dp_sgd(expected_batch=32)"), sampling_rate=0.01, steps=100)
    assert granted.epsilon == epsilon(noise_multiplier=1.0, sampling_rate=0.01, steps=100)
    assert granted.method == "rdp"
    assert any("Poisson" in each for each in granted.assumptions)


def test_clipping_and_noise_on_the_update_are_certified_per_client() -> None:
    found = privacy_of(build_defense("clipping(bound=0.5) + gaussian_noise(std=1)"), steps=3)
    assert found.epsilon == epsilon(noise_multiplier=2.0, steps=3)
    assert found.unit == "client"


def test_layerwise_clipping_asks_for_the_number_of_layers() -> None:
    defense = build_defense("clipping(bound=0.5, scope='layer') + gaussian_noise(std=1)")
    assert "how many layers" in privacy_of(defense).reason
    assert privacy_of(defense, layers=4).epsilon == epsilon(noise_multiplier=1.0)


def test_sampling_of_clients_hides_nothing() -> None:
    assert "sees who sends" in privacy_of(build_defense("clipping + gaussian_noise"), sampling_rate=0.1).reason


@pytest.mark.parametrize(
    "spelling",
    [
        "dp_sgd + pruning",
        "dp_sgd + gaussian_noise",
        "none + dp_sgd + none",
        "data_noise + dp_sgd",
        "clipping + gaussian_noise + top_k",
        "dp_sgd(noise_multiplier=0) + clipping + gaussian_noise",
    ],
)
def test_harmless_neighbours_keep_the_guarantee(spelling: str) -> None:
    assert privacy_of(build_defense(spelling)).epsilon is not None


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        ("none", "nothing is done"),
        ("gaussian_noise", "put clipping right before"),
        ("clipping", "no proof is known for clipping"),
        ("gaussian_noise + clipping", "put clipping right before"),
        ("clipping + pruning + gaussian_noise", "put clipping right before"),
        ("clipping(bound=None) + gaussian_noise", "put clipping right before"),
        ("clipping + laplace_noise", "no proof is known"),
        ("example_clipping + gaussian_noise", "put clipping right before"),
        ("dp_sgd(noise_multiplier=0)", "adds no noise"),
        ("pruning + clipping + gaussian_noise", "'pruning' comes before"),
        ("example_clipping + pruning", "no proof is known for example_clipping + pruning"),
    ],
)
def test_the_rest_is_told_why_not(spelling: str, reason: str) -> None:
    found = privacy_of(build_defense(spelling))
    assert found.epsilon is None and found.delta is None
    assert reason in found.reason
    assert found.sentence.startswith("no guarantee: ")


class Unproved(DPSGD):
    """Looks like DP-SGD, and sends what it was given."""

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        return gradient, state


@pytest.mark.parametrize(
    "parts",
    [(Unproved(),), (Clipping(bound=1.0), DoesNothing(std=1.0)), (Clipping(bound=1.0), FixedSeed(std=1.0))],
    ids=lambda parts: type(parts[-1]).__name__,
)
def test_what_a_subclass_changes_is_not_covered_by_the_proof_of_its_parent(parts: tuple[Defense, ...]) -> None:
    assert privacy_of(chain(*parts)).epsilon is None


@pytest.mark.parametrize("name", DEFENSES.names())
def test_every_defense_gets_an_answer_that_can_be_saved(name: str) -> None:
    found = privacy_of(DEFENSES.build(name))
    assert (found.epsilon is None) == bool(found.reason)
    assert json.loads(json.dumps(encode(found)))["sentence"] == found.sentence
    assert (found.epsilon is not None) == (name == "dp_sgd"), "only dp_sgd is certified alone"


def test_shared_noise_has_two_proofs_one_for_who_sees_sums_and_one_for_the_server() -> None:
    shared = build_defense("clipping(bound=2.0) + gaussian_noise(std=8.0, sharers=16)")
    sums, server = (privacy_of(shared, steps=5, summed=summed) for summed in (16, 1))
    whole = privacy_of(build_defense("clipping(bound=2.0) + gaussian_noise(std=8.0)"), steps=5)
    assert sums.epsilon == whole.epsilon == epsilon(noise_multiplier=4.0, steps=5)
    assert server.epsilon == epsilon(noise_multiplier=1.0, steps=5)
    assert (sums.summed, server.summed) == (16, 1) and sums.sentence.endswith("before who sees nothing but sums of 16 clients")
    assert (
        "sums" not in server.sentence
        and server.assumptions == sums.assumptions[:-1]
        and "takes its share" in sums.assumptions[-1]
    )
    # The noise of other clients hides no single record of one that is known to the attacker, and dp_sgd is about records.
    assert privacy_of(build_defense("dp_sgd"), summed=16) == privacy_of(build_defense("dp_sgd"))
    assert decode(Guarantee, encode(sums)) == sums

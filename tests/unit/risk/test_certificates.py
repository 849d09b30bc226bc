"""Which defense has a certificate, what it says, and that no attack gets past it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradveil.client.guarantees import privacy_of
from gradveil.client.update import run_client
from gradveil.data import load_data
from gradveil.defenses import DEFENSES, Defense, build_defense
from gradveil.errors import UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.proofs.bounds import gaussian_bound, mixed_bound, sampled_bound
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec
from gradveil.risk.certificates import Certificate, certificate_from, certificate_of
from gradveil.study.codec import encode
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import flatten

NOISY = "clipping(bound=1) + gaussian_noise(std=1)"
CLASSES = 4
COUNT = 40


def images(count: int = COUNT) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def certificate(spelling: str = NOISY, **settings: object) -> Certificate:
    return certificate_of(build_defense(spelling), **{"candidates": COUNT, **settings})  # type: ignore[arg-type]


def test_a_clipped_noisy_update_is_certified_per_client() -> None:
    found = certificate("clipping(bound=0.5) + gaussian_noise(std=1)", steps=3)
    assert found.unit == "client" and found.noise_multiplier == 2
    assert found.identified == gaussian_bound(1 / COUNT, noise_multiplier=2.0, steps=3)
    assert found.chance == 1 / COUNT and found.psnr == {} and found.confidence == 1
    assert found.epsilon == privacy_of(build_defense("clipping(bound=0.5) + gaussian_noise(std=1)"), steps=3).epsilon
    said = "at most 14 % of records can be identified by anyone among 40 candidates (noise per client, ε = "
    assert found.sentence.startswith(said)


def test_dp_sgd_is_certified_per_record_even_if_the_others_are_known() -> None:
    found = certificate("dp_sgd(noise_multiplier=2)", guesses=4, steps=5)
    assert found.unit == "record"
    assert found.identified == gaussian_bound(4 / 37, noise_multiplier=2.0, steps=5)
    assert any("4 records" in line for line in found.assumptions)
    whole = certificate("clipping + gaussian_noise(std=2)", guesses=4, steps=5)
    assert whole.identified == gaussian_bound(4 / 40, noise_multiplier=2.0, steps=5)


def test_sampled_dp_sgd_is_bounded_by_monte_carlo() -> None:
    found = certificate("dp_sgd(expected_batch=8)", steps=20, sampling_rate=0.05, samples=20_000)
    direct = sampled_bound(1 / COUNT, noise_multiplier=1.0, sampling_rate=0.05, steps=20, samples=20_000)
    assert found.identified == direct.bound and found.confidence == 0.999
    assert found.advantage is not None and 0 < found.advantage < 0.5
    again = certificate("dp_sgd(expected_batch=8)", steps=20, sampling_rate=0.05, samples=20_000)
    assert again == found


def test_a_known_label_makes_the_certificate_weaker() -> None:
    labels = torch.arange(COUNT) % CLASSES
    found = certificate(labels=labels)
    assert found.label_known and found.chance == pytest.approx(CLASSES / COUNT)
    assert found.identified == pytest.approx(mixed_bound([CLASSES / COUNT], [1], noise_multiplier=1.0))
    plain = certificate().identified
    assert found.identified is not None and plain is not None and found.identified > plain
    assert "its label" in found.assumptions[0]


def test_pictures_are_bounded_by_how_close_the_candidates_are() -> None:
    close = images()
    close[1:20] = close[0] + 0.001 * torch.arange(1, 20).reshape(-1, 1, 1, 1)
    found = certificate(candidates=close, psnr=(30.0, 80.0))
    assert found.psnr["80"] == found.identified
    assert found.psnr["30"] == gaussian_bound(20 / COUNT, noise_multiplier=1.0)


def test_the_unit_of_a_replaced_layer_clip_grows_with_the_layers() -> None:
    spelling = "clipping(bound=1, scope='layer') + gaussian_noise(std=4)"
    assert "how many layers" in certificate(spelling).reason
    assert certificate(spelling, layers=4).noise_multiplier == 2


@pytest.mark.parametrize("name", DEFENSES.names())
def test_every_defense_gets_an_answer_that_can_be_saved(name: str) -> None:
    found = certificate_of(DEFENSES.build(name), candidates=images())
    assert (found.identified is None) == bool(found.reason)
    assert (found.identified is not None) == (name == "dp_sgd"), "only dp_sgd is certified alone"
    assert found.identified is not None or found.sentence.startswith("no certificate: ")
    saved = json.loads(json.dumps(encode(found), allow_nan=False))
    assert saved["sentence"] == found.sentence


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"candidates": 1}, 1.0),
        ({"steps": 0}, 1 / COUNT),
        ({"guesses": 100}, 1.0),
        ({"candidates": 2, "known": 7}, 1.0),
    ],
)
def test_edges_have_defined_answers(settings: dict[str, Any], expected: float) -> None:
    found = certificate(**settings)
    assert found.identified == expected
    json.dumps(encode(found), allow_nan=False)
    assert ("nothing is proved" in found.sentence) == (expected == 1.0)


def test_no_noise_is_no_certificate() -> None:
    assert certificate("clipping + gaussian_noise(std=0)").identified is None
    assert certificate("dp_sgd(noise_multiplier=0)").identified is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"candidates": 0}, "no candidates"), ({"guesses": 0}, "guesses is 0"), ({"known": -1}, "known is -1")],
)
def test_senseless_settings_get_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        certificate(**settings)


def test_a_guarantee_without_bound_stays_without() -> None:
    proved = privacy_of(build_defense(NOISY))
    assert certificate_from(proved, candidates=9).identified == gaussian_bound(1 / 9, noise_multiplier=1.0)
    assert certificate_from(replace(proved, epsilon=None, reason="so it is"), candidates=9).reason == "so it is"


def learner_of(model: str) -> Learner:
    built = build_model(model, input_shape=(1, 8, 8), classes=10, seed=Seed(0))
    return Learner.of(built, loss_by_name("cross_entropy"), TrainingSettings())


def digits() -> Batch:
    return load_data("digits").batch(range(COUNT))


def shares_of(learner: Learner, quiet: Defense) -> torch.Tensor:
    """What a real client would send from each candidate without the noise."""
    spec, batch = ModelSpec.of(learner.model), digits()
    sent = (run_client(learner, Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1]), quiet, Seed(0)) for i in range(COUNT))
    return torch.stack([flatten(quiet.decode(result.payload, spec).weights) for result in sent])


def likelihoods(releases: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Log-likelihoods under Gaussian noise, up to what is the same for all candidates."""
    return releases @ shares.T - shares.square().sum(1) / 2


def hits(scores: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Whether the truth scores above all others."""
    own = scores.gather(1, truth[:, None])
    return (scores >= own).sum(1) == 1


class TestMatchingAttack:
    """The prior-aware attack on what clients send: many releases at several noise levels, never above the bound."""

    RELEASES = 4000
    SIGMAS = (0.1, 0.3, 0.5, 1.0, 3.0)

    @pytest.mark.parametrize("model", ["lenet", "convnet(width=4)"])
    @pytest.mark.parametrize(
        ("name", "quiet"),
        [
            ("clipping(bound=0.1) + gaussian_noise(std={0})", "clipping(bound=0.1)"),
            ("dp_sgd(bound=0.1, noise_multiplier={1})", "dp_sgd(bound=0.1, noise_multiplier=0)"),
        ],
    )
    def test_it_comes_close_and_never_exceeds(self, model: str, name: str, quiet: str) -> None:
        labels, generator = digits().targets, torch.Generator().manual_seed(3)
        whole = shares_of(learner_of(model), build_defense(quiet)).double()
        assert float(whole.norm(dim=1).max()) <= 0.1 * (1 + 1e-5)
        # Noise outside the span of the candidates' shares changes no score, so coordinates in that span are enough.
        shares = torch.linalg.qr(whole.T).R.T
        ratios = []
        for sigma in self.SIGMAS:
            truth = torch.randint(COUNT, (self.RELEASES,), generator=generator)
            noise = torch.randn(self.RELEASES, COUNT, generator=generator, dtype=torch.float64)
            scores = likelihoods(shares[truth] + sigma * 0.1 * noise, shares)
            told = scores.masked_fill(labels != labels[truth][:, None], float("-inf"))
            for seen, known in ((scores, None), (told, labels)):
                share = float(hits(seen, truth).double().mean())
                bound = certificate(name.format(sigma * 0.1, sigma), labels=known).identified
                assert bound is not None
                assert share <= bound + 4 * math.sqrt(bound * (1 - bound) / self.RELEASES) + 1e-9
                ratios.append(share / bound)
        # The gradients of an untrained LeNet hardly differ within a class, so there the list helps less than it could.
        assert max(ratios[4:]) > (0.7 if "convnet" in model else 0.25)

    def test_a_client_sends_its_share_plus_the_noise_the_certificate_counts(self) -> None:
        learner, defense = learner_of("lenet"), build_defense("clipping(bound=0.1) + gaussian_noise(std=0.2)")
        share = shares_of(learner, build_defense("clipping(bound=0.1)"))[0]
        spec = ModelSpec.of(learner.model)
        batch = Batch(digits().inputs[:1], digits().targets[:1])
        sent = run_client(learner, batch, defense, Seed(9))
        noise = flatten(defense.decode(sent.payload, spec).weights) - share
        assert float(noise.std()) == pytest.approx(0.2, rel=0.05)
        assert certificate_of(defense, candidates=COUNT).noise_multiplier == 2

"""The parts of attackers who hold a list: companions, numbers of a pair, how they are weighed, and the threshold of presence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradveil.attacks.listing import Hypotheses, Presence, own_evidence
from gradveil.attacks.listing.evidence import Evidence, fit_logit
from gradveil.attacks.listing.statistics import FEATURES, Laws, Scalars, Sent, features_of
from gradveil.randomness import Seed
from gradveil.tensors import Named, flatten
from tests.unit.audit.small import digits, make_subject


@pytest.fixture(scope="module", autouse=True)
def data() -> None:
    digits()  # reading it is not what a test here takes its time for


def hypotheses(count: int = 6, **changes: object) -> Hypotheses:
    made = Hypotheses(inputs=torch.arange(float(count))[:, None], labels=torch.arange(count), seed=Seed(1))
    return made.replace(**changes)


def test_a_single_record_is_its_own_batch() -> None:
    inputs, labels = hypotheses().batch(2, 5)
    assert inputs.tolist() == [[2.0]] and labels.tolist() == [2] and not hypotheses().varies


def test_unknown_companions_are_drawn_from_the_list_alike_for_all_candidates() -> None:
    made = hypotheses(count=20, size=4)
    assert made.varies
    sets = [made.companions(index, 3) for index in range(20)]
    assert all(len(rows) == 3 and index not in rows for index, rows in enumerate(sets))
    usual = max(sets, key=sets.count)
    assert sets.count(usual) >= 16 and made.companions(0, 4) != made.companions(0, 3)
    inputs, labels = made.batch(7, 3)
    assert labels.tolist() == [7, *sets[7]] and inputs[:, 0].tolist() == [7.0, *map(float, sets[7])]


def test_known_companions_keep_their_places() -> None:
    others = torch.tensor([[10.0], [11.0]]), torch.tensor([10, 11])
    made = hypotheses(size=3, others=others, place=1)
    assert not made.varies and made.companions(0, 0) == []
    assert made.batch(4, 9)[1].tolist() == [10, 4, 11]


def test_the_fit_weighs_what_tells_and_drops_what_does_not() -> None:
    generator = np.random.default_rng(0)
    truth = generator.integers(30, size=200)
    informative, noise = generator.normal(size=(200, 30)), generator.normal(size=(200, 30))
    informative[np.arange(200), truth] += 2.0
    # For unit variances the log-likelihood is 2 x - 2, so its weight is 2; one that lies against the truth gets none.
    weights = fit_logit(np.stack([informative, noise, -informative], -1), truth, np.ones((200, 30), dtype=bool))
    assert weights[0] == pytest.approx(2.0, abs=0.35) and weights[1] < 0.2 and weights[2] == 0.0


def test_the_fit_of_exact_features_stays_finite_and_of_none_gives_some_order() -> None:
    features = -np.abs(np.arange(5)[:, None] - np.arange(5))[..., None] * 1e3
    assert np.isfinite(fit_logit(features, np.arange(5), np.ones((5, 5), dtype=bool))).all()
    against = fit_logit(-features, np.arange(5), np.ones((5, 5), dtype=bool))
    assert (against > 0).all()


def test_candidates_that_filled_an_update_are_not_told_from_its_candidate() -> None:
    features = torch.zeros(4, 4, 1, dtype=torch.float64)
    features[torch.arange(4), torch.arange(4)] = 1.0
    features[0, 1] = 5.0
    apart = torch.ones(4, 4, dtype=torch.bool)
    everyone = torch.ones(4, 4, dtype=torch.bool)
    made = Evidence(name="x", informed=False, features=features, own=features, truth=torch.arange(4), apart=apart)
    assert made.ranking(everyone, everyone).rehearsed == 0.75
    apart[0, 1] = False
    assert made.ranking(everyone, everyone).rehearsed == 1.0
    only = torch.eye(4, dtype=torch.bool)
    assert torch.isinf(made.ranking(only, everyone).scores).sum() == 12


def test_presence_is_a_threshold_that_tells_own_releases_from_themselves_without_their_candidate() -> None:
    scores = torch.full((6, 5), -10.0, dtype=torch.float64) + torch.arange(5) / 100
    truth = torch.tensor([0, 1, 2, 3, 4, 0])
    scores[torch.arange(6), truth] = 0.0
    rule = Presence.learned(scores, truth)
    assert rule.rehearsed == 1.0
    assert rule.says(scores).all() and not rule.says(scores.scatter(1, truth[:, None], float("-inf"))).any()


def test_presence_sees_through_what_noise_adds_to_all_scores_of_a_release() -> None:
    generator = torch.Generator().manual_seed(0)
    common = 100 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    scores = common + torch.rand(60, 9, generator=generator, dtype=torch.float64)
    truth = torch.randint(9, (60,), generator=generator)
    scores[torch.arange(60), truth] = common[:, 0] + 3
    rule = Presence.learned(scores, truth)
    assert rule.rehearsed == 1.0 and rule.number in ("lead", "height")


def test_presence_of_nothing_to_learn_from_is_no_better_than_a_coin() -> None:
    flat = torch.zeros(8, 5, dtype=torch.float64)
    assert Presence.learned(flat, torch.arange(8) % 5).rehearsed == 0.5
    assert Presence.learned(flat[:0], torch.arange(0)).rehearsed is None


def named(generator: torch.Generator) -> Named:
    return {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)}


def test_numbers_of_a_pair_are_those_of_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [[named(generator) for _ in range(3)] for _ in range(4)]
    raws = [named(generator) for _ in range(4)]
    sent = [Sent.of(own, raw) for own, raw in zip(draws, raws, strict=True)]
    own = [named(generator) for _ in range(4)]
    own[0]["a"][0] = 0.0
    laws = Laws(own, sent)
    found = features_of(own, sent, laws)
    assert found.shape == (4, 4, len(FEATURES) + 1), "signs are the last"
    y, m, g, w = (flatten(each).double() for each in (own[0], sent[2].mean, raws[2], laws.precision))
    assert float(found[0, 2, 0]) == pytest.approx(float(-0.5 * (w * (y - m).square()).sum()))
    cosine = float((w * y * m).sum() ** 2 / ((w * y * y).sum() * (w * m * m).sum()))
    assert float(found[0, 2, 1]) == pytest.approx(-0.5 * 17 * np.log(1 - cosine))
    z = (Scalars.of(own[0], raws[2]).values - sent[2].expected) / laws.deviation
    assert found[0, 2, 3:6].tolist() == pytest.approx((-torch.log1p(z.square())).sum(0).tolist(), rel=1e-5)
    signs = sum(laws.odds[n] * float((own[0][n].sign() * sent[2].mean[n].sign()).sum()) / 2 for n in ("a", "b"))
    assert float(found[0, 2, 6]) == pytest.approx(signs)
    agree = [(each["b"].sign() * mine.mean["b"].sign()).tolist() for each, mine in zip(own, sent, strict=True)]
    same = sum(value > 0 for row in agree for value in row)
    assert laws.odds["b"] == pytest.approx(np.log((same + 1) / (20 - same + 1)))
    seen = own[0]["a"] != 0
    angle = float((own[0]["a"] * raws[2]["a"]).sum().abs() / (own[0]["a"].norm() * (raws[2]["a"] * seen).norm()))
    assert float(Scalars.of(own[0], raws[2]).values[0, 2]) == pytest.approx(angle, rel=1e-5)
    assert float((g * y).abs().sum()) > 0


def test_a_variance_of_an_entry_is_shrunk_to_that_of_its_tensor_and_never_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    still = Sent.of([{"a": torch.ones(4)}], {"a": torch.ones(4)})
    releases = [
        {"a": torch.ones(4) + torch.tensor([0.0, 0.0, 0.0, 1.0]) * torch.randn((), generator=generator)} for _ in range(64)
    ]
    precision = Laws(releases, [still] * 64).precision["a"]
    assert precision[0] > 3 * precision[3] and bool(torch.isfinite(precision).all())
    exact = Laws([{"a": torch.ones(4)}] * 4, [still] * 4).precision["a"]
    assert bool(torch.isfinite(exact).all()) and float(exact.min()) > 1e10


def test_known_gaussian_noise_is_scored_by_its_likelihood_alone() -> None:
    subject = make_subject(records=3, defense="clipping(bound=1) + gaussian_noise(std=0.3)")
    made = Hypotheses(inputs=subject.candidates[:10], labels=subject.candidate_labels[:10], seed=Seed(0))
    observations = [target.observation for target in subject.targets]
    found = own_evidence(observations, made, subject.context(1), own=10)
    assert found.optimal and found.features.shape == (3, 10, 1)
    adversary = observations[0].adversary
    share = flatten(adversary.replay(subject.learner, made.inputs[4:5], made.labels[4:5], {})).double()
    expected = -(flatten(observations[1].update.weights).double() - share).square().sum() / (2 * 0.3**2)
    assert float(found.features[1, 4, 0]) == pytest.approx(float(expected), rel=1e-5)
    assert float(share.norm()) <= 1 + 1e-6


def test_a_law_that_own_releases_belie_is_not_believed() -> None:
    # The model tells of the noise on the update, and not of that on the data before it.
    subject = make_subject(records=2, defense="data_noise(std=0.5) + gaussian_noise(std=0.001)")
    made = Hypotheses(inputs=subject.candidates[:10], labels=subject.candidate_labels[:10], seed=Seed(0))
    observations = [target.observation for target in subject.targets]
    assert observations[0].adversary.arrives(observations[0]).noise_std == pytest.approx(0.001)
    found = own_evidence(observations, made, subject.context(1), own=10)
    assert not found.optimal and found.features.shape == (2, 10, 3)


def test_unknowns_are_fitted_for_a_short_list_and_all_others_rank_below() -> None:
    subject = make_subject(records=3, defense="lrp(spread=0.9)")
    made = Hypotheses(inputs=subject.candidates[:10], labels=subject.candidate_labels[:10], seed=Seed(0))
    observations = [target.observation for target in subject.targets]
    found = own_evidence(observations, made, subject.context(1), own=4, shortlist=3)
    lowest = found.features[..., 1].sort(1).values
    assert bool((found.features[..., 1].argmax(1) == torch.arange(3)).all())
    assert torch.equal(lowest[:, 0], lowest[:, 6]) and bool((lowest[:, 6] < lowest[:, 7]).all())

"""Energies, laws and thresholds of who knows the defense and holds a list, beside those computed by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary, prefixed
from gradveil.attacks.listing import Hypotheses, generic, own, presence
from gradveil.attacks.listing.presence import Presence
from gradveil.records import Comparison, Observation, Update
from gradveil.tensors import Named
from tests.unit.attacks.listing.list_scenes import listed, rounds, running
from tests.unit.attacks.scenes import drawn

MLP = "mlp(hidden=2, activation='sigmoid')"


def test_presence_is_learned_from_three_candidates_on_and_by_whichever_number_tells_best() -> None:
    truth = torch.tensor([0, 1, 2])
    scores = torch.tensor([[5.0, 4.5, -9], [7, 9, 6.5], [20, 21, 23]]).double()
    found = Presence.learned(scores, truth)
    assert found.rehearsed is not None and found.rehearsed > 0.5
    assert Presence.learned(scores[:, :2], torch.tensor([0, 1, 1])) == Presence()
    assert Presence.learned(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)) == Presence()
    rules = [
        Presence._best(presence._number(scores, n), presence._number(without(scores, truth), n), n) for n in presence.NUMBERS
    ]
    assert found == max(rules, key=lambda rule: rule.rehearsed or 0.0)


def without(scores: Tensor, truth: Tensor) -> Tensor:
    left = scores.clone()
    left[torch.arange(len(truth)), truth] = float("-inf")
    return left


def test_every_number_of_presence_is_what_it_says() -> None:
    gone = float("-inf")
    scores = torch.tensor([[1.0, 4.0, 2.0, gone], [3.0, 3.0, -1.0, 0.0], [gone, 5.0, gone, gone]]).double()
    assert presence._number(scores, "score").tolist() == [4, 3, 5]
    assert presence._number(scores, "lead").tolist() == [2, 0, pytest.approx(1e300)]
    assert presence._number(scores, "height").tolist() == [2, 3, 0]
    assert presence._number(scores[:, :1], "lead").tolist() == [0, 0, 0]
    nobody = torch.full((1, 3), gone).double()
    assert presence._number(nobody, "height").tolist() == [-1e300] and presence._number(nobody, "score").tolist() == [-1e300]
    assert Presence(number="lead", threshold=2.0).says(scores).tolist() == [False, False, True]
    assert Presence(number="lead", threshold=1.9).says(scores).tolist() == [True, False, True]


@dataclass(frozen=True)
class Doubled(OpenAdversary):
    """Compares twice the absolute value, so that products of matrices cannot do it."""

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        seen = prefixed(evidence, OBSERVED)
        return Comparison({n: 2 * v.abs() for n, v in simulated.items()}, {n: 2 * v.abs() for n, v in seen.items()})


@pytest.mark.parametrize("adversary", [OpenAdversary(), Doubled()], ids=["plain", "own"])
@pytest.mark.parametrize("few", [True, False])
def test_energies_are_squared_residuals_by_release_candidate_round_and_tensor(
    adversary: Any, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:
        for name, value in (("COLUMNS", 8), ("COMPARED_ENTRIES", 1600), ("BLOCK", 4)):
            monkeypatch.setattr(own, name, value)
    seen = rounds().replace(adversary=adversary)
    many = [
        seen.replace(
            updates=tuple(
                Update({n: v + k * (r + 1) for n, v in u.weights.items()}, examples=1) for r, u in enumerate(seen.updates)
            )
        )
        for k in range(3)
    ]
    made = listed(6)
    found = own._Scorer(made, 2).energies(many)
    names = [(r, n) for r in (0, 1) for n in seen.update.weights]
    assert found.residuals.shape == (3, 6, len(names)) and not found.ruled_out.any() and found.ruled_out.shape == (3, 6)
    assert found.entries.tolist() == [seen.update.weights[n].numel() for _, n in names]
    factor = 1.0 if type(adversary) is OpenAdversary else 2.0
    for candidate in range(6):
        sent = [
            one.update(made.inputs[candidate : candidate + 1], made.labels[candidate : candidate + 1]) for one in seen.learners
        ]
        for release, shown in enumerate(many):
            for place, (r, n) in enumerate(names):
                y, s = shown.updates[r].weights[n], sent[r][n]
                apart = y - s if factor == 1.0 else 2 * (y.abs() - s.abs())
                assert float(found.residuals[release, candidate, place]) == pytest.approx(float(apart.square().sum()), abs=1e-9)
                assert float(found.observed[release, place]) == pytest.approx(factor**2 * float(y.square().sum()))


def test_own_evidence_is_of_releases_with_draws_that_nobody_else_has() -> None:
    seen, made, calls = rounds(), listed(6), list[Any]()
    context = running(seen, 0.05, calls)
    observations = [context.observe(*made.batch(i, 0), 70 + i) for i in (3, 1)]  # type: ignore[misc]
    calls.clear()
    found = own.own_evidence(observations, made, context, own=4)
    assert [(draw, torch.equal(x, made.inputs[i : i + 1])) for i, (x, _, draw) in enumerate(calls)] == [
        (generic.DRAWS + i, True) for i in range(4)
    ]
    assert (found.name, found.informed, found.optimal, found.draws) == ("own", True, False, 0)
    assert found.truth.tolist() == [0, 1, 2, 3] and found.apart.shape == (4, 6) and bool(found.apart.all())
    releases = [context.observe(*made.batch(i, 0), generic.DRAWS + i) for i in range(4)]  # type: ignore[misc]
    energies = own._Scorer(made, 8).energies([*observations, *releases])
    features, _ = own._features(energies, 2, found.truth, None)
    assert torch.allclose(found.features, features[:2]) and torch.allclose(found.own, features[2:])


@pytest.mark.parametrize("taught", [2, 0])
def test_features_of_energies_are_those_of_the_formulas(taught: int) -> None:
    residuals, observed = drawn(4, 3, 2), 5 * drawn(4, 2, seed=1)
    out = torch.zeros(4, 3, dtype=torch.bool)
    out[1, 2] = True
    energies = own._Energies(residuals, observed, torch.tensor([7.0, 2.0]).double(), out)
    truth = torch.tensor([2, 0])[:taught]
    found, optimal = own._features(energies, 2, truth, None)
    usual = (residuals[2, 2] + residuals[3, 0]) / 2 if taught else torch.zeros(2)
    ratio = residuals / (usual + 2.0**-40 * observed.mean(0) + 1e-30)
    entries = torch.tensor([7.0, 2.0])
    expected = torch.stack(
        [-(entries * ratio).sum(2) / 2, -(entries * (1 + ratio).log()).sum(2) / 2, -(1 + ratio).log().sum(2)], 2
    )
    assert not optimal and torch.allclose(found[~out], expected[~out])
    assert torch.allclose(found[1, 2], 2 * (expected[1].amin(0) - 1) - 1)
    told, sure = own._features(energies, 2, truth, 0.3)
    assert sure and torch.allclose(told[..., 0], -residuals.sum(2) / 0.18) and told.shape == (4, 3, 1)


def test_a_law_is_believed_where_the_truth_leaves_as_much_noise_as_it_tells() -> None:
    @dataclass(frozen=True)
    class Telling(OpenAdversary):
        std: float | None = 0.5

        def arrives(self, observation: Observation) -> Any:
            return super().arrives(observation).replace(noise_std=self.std)

    residuals = torch.full((4, 3, 2), 100.0).double()
    # Two own releases leave 0.25 of each of ten entries at their truth, candidates 2 and 1.
    residuals[2, 2], residuals[3, 1] = torch.tensor([1.0, 1.6]).double(), torch.tensor([0.9, 1.5]).double()
    energies = own._Energies(residuals, residuals[:, 0], torch.tensor([4.0, 6.0]).double(), torch.zeros(4, 3) > 0)
    truth, seen = torch.tensor([2, 1]), rounds()
    for std, told in ((0.5, 0.5), (0.49, 0.49), (0.4, None), (0.6, None), (None, None), (0.0, None)):
        assert own._told(seen.replace(adversary=Telling(std)), energies, truth) == told
    assert own._told(seen.replace(adversary=Telling(0.4)), energies, truth[:0]) == 0.4


def test_unlike_is_one_less_the_squared_cosine_over_all_tensors() -> None:
    ours, theirs = {"a": drawn(3, 4), "b": drawn(3, 2, 2, seed=1)}, {"a": drawn(3, 4, seed=2), "b": drawn(3, 2, 2, seed=3)}
    found = own._unlike({n: v - theirs[n] for n, v in ours.items()}, theirs)
    left, right = (torch.cat([v.flatten(1) for v in side.values()], 1) for side in (ours, theirs))
    assert torch.allclose(found, 1 - torch.nn.functional.cosine_similarity(left, right).square())


def test_unknowns_are_fitted_for_those_that_are_least_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    base = {"0|a": drawn(5, 3), "0|b": drawn(5, 2, seed=1)}
    seen = {"0|a": torch.ones(5, 3).double(), "0|b": torch.ones(5, 2).double()}

    def compare(observation: Any, inputs: Tensor, labels: Tensor, variables: Any, *, refit: bool = True) -> Any:
        asked.append((inputs, labels, variables, refit))
        rows = inputs.long().tolist()
        return ({n: (0.1 if refit else 1.0) * v[rows] for n, v in base.items()}, {n: v[rows] for n, v in seen.items()}, 5)

    monkeypatch.setattr(own, "compare_candidates", compare)
    made = own._Scorer(listed(5), 2)
    inputs, labels = torch.arange(5.0).double(), torch.tensor([4, 3, 2, 1, 0])
    found, sizes, entries, out = made._of_one(rounds(), inputs, labels)
    rank = own._unlike(base, seen).argsort()[:2]
    assert [each[3] for each in asked] == [False, True] and torch.equal(asked[1][0], inputs[rank])
    assert torch.equal(asked[1][1], labels[rank]) and asked[1][2] == [{}, {}] and asked[0][2] == [{}] * 5
    whole = torch.stack([v.square().sum(1) for v in base.values()], 1)
    scale = torch.where(torch.isin(torch.arange(5), rank), 0.01, 1.0)
    assert torch.allclose(found, whole * scale[:, None]) and sizes.tolist() == [3, 2] and entries.tolist() == [3, 2]
    assert out.tolist() == [index not in rank.tolist() for index in range(5)]


def test_a_short_list_is_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    inner = own._Scorer

    def noting(hypotheses: Hypotheses, shortlist: int) -> Any:
        lengths.append(shortlist)
        return inner(hypotheses, shortlist)

    monkeypatch.setattr(own, "_Scorer", noting)
    seen, made = rounds(), listed(6)
    own.own_evidence([seen], made, running(seen, 0.05), own=2, shortlist=3)
    own.own_evidence([seen], made, running(seen, 0.05), own=2)
    assert lengths == [3, own.SHORTLIST]


def test_releases_with_unknowns_are_compared_one_by_one_with_all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown(OpenAdversary):
        def variables(self, observation: Observation, generator: torch.Generator) -> Named:
            return {"a": torch.zeros(1)}

    asked: list[Any] = []

    def of_one(self: Any, observation: Observation, inputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        asked.append((observation, inputs, labels))
        place = len(asked)
        return torch.full((6, 2), 1.0 * place), torch.full((2,), 10.0 * place), torch.tensor([4.0, 5.0]), torch.arange(6) == place

    monkeypatch.setattr(own._Scorer, "_of_one", of_one)
    many, made = [rounds().replace(adversary=Unknown()) for _ in range(3)], listed(6)
    assert own._unknown(many[0]) and not own._unknown(rounds())
    found = own._Scorer(made, 2).energies(many)
    for place, (observation, inputs, labels) in enumerate(asked):
        assert observation is many[place] and torch.equal(inputs[:, 0], made.inputs) and torch.equal(labels[:, 0], made.labels)
        assert bool((found.residuals[place] == place + 1).all()) and bool((found.observed[place] == 10 * (place + 1)).all())
        assert found.ruled_out[place].nonzero().tolist() == [[place + 1]]
    assert found.entries.tolist() == [4, 5] and found.residuals.shape == (3, 6, 2)


def test_products_of_matrices_compare_only_what_is_compared_as_it_is() -> None:
    sent = {"a": drawn(3), "b": drawn(2, seed=1)}
    seen = {OBSERVED + n: v.clone() for n, v in sent.items()}
    assert own._is_plain(OpenAdversary(), [seen, seen], [sent, sent]) and not own._is_plain(Doubled(), [seen], [sent])
    assert not own._is_plain(OpenAdversary(), [seen | {OBSERVED + "c": drawn(1)}], [sent])
    assert not own._is_plain(OpenAdversary(), [{OBSERVED + "a": seen[OBSERVED + "a"]}], [sent])
    doubled = own._in_double({"a": torch.ones(2), "places": torch.tensor([3])})
    assert doubled["a"].dtype == torch.float64 and doubled["places"].dtype == torch.int64

"""What linear attackers believe: the posterior mean, the errors of the model, and the prior from public records, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from gradveil.attacks import linear_evidence, linear_model, pca_prior
from gradveil.attacks.base import PublicRecords
from gradveil.attacks.linear_evidence import evidence_of
from gradveil.attacks.linear_model import LinearModel, Posterior
from gradveil.attacks.linear_noise import Release
from gradveil.attacks.pca_prior import LinearPrior, fit_prior
from gradveil.errors import UsageError
from gradveil.tensors import Named
from tests.unit.attacks.linear_scenes import prior_of, two_rounds
from tests.unit.attacks.scenes import SHAPE, drawn, make_context, noting

MLP = "mlp(hidden=2, activation='sigmoid')"


@pytest.mark.parametrize("strength", [0.5, 4.0])
def test_a_posterior_mean_has_no_slope_left_and_says_what_it_cost(strength: float) -> None:
    root = drawn(9, 5) - 0.5
    posterior = Posterior(root.T @ root, drawn(5, seed=1) - 0.5, 2.5, drawn(2, 2, seed=2))
    found = posterior.mean(strength)
    # Of the one record's error there is the amount that is best beside these coordinates.
    step = found.point.flatten() - posterior.point.flatten()
    more = -(posterior.vector[4] + posterior.matrix[4, :4] @ step) / (posterior.matrix[4, 4] + 1)
    whole = torch.cat([step, more[None]])
    slope = posterior.vector + posterior.matrix @ whole
    assert torch.allclose(slope[:4] + strength * found.point.flatten(), torch.zeros(4).double())
    assert found.first_loss == 1.25 and found.slope == pytest.approx(float(posterior.vector[:4].norm()))
    after = 2.5 + 2 * posterior.vector @ whole + whole @ posterior.matrix @ whole
    assert found.loss == pytest.approx(float(after) / 2)


@pytest.mark.parametrize("at", [0.0, 0.4])
def test_the_model_is_the_slope_and_the_errors_of_records_about_its_point(at: float) -> None:
    prior, observation = prior_of(held=7), two_rounds()
    context = make_context()
    evidence = evidence_of(observation, "informed", context)
    labels, near = torch.tensor([0, 1]), 0.6
    mean, point = prior.mean_of(labels), at * drawn(2, 3, seed=9)
    inputs = linear_evidence.held_batches(prior, 2, 0, 3)
    names = list(evidence.simulate(mean, labels))
    gain, shift, variance = (
        {n: drawn(*v.shape, seed=s) + 0.5 for n, v in evidence.simulate(mean, labels).items()} for s in (1, 2, 3)
    )
    release = Release(gain=gain, shift=shift, variance=variance)
    model = LinearModel(prior, labels, inputs, context)
    assert model.start.shape == (2, 3) and not model.start.any() and torch.equal(model.mean, mean)
    found = model.posterior(evidence, release, point, near)
    again = model.posterior(evidence, release, point, near)

    def residual(x: Tensor) -> Named:
        return evidence.residuals(evidence.simulate(x, labels))

    jacobian = jacrev(lambda z: residual(prior.decode(z, mean)))(point)
    value = evidence.simulate(prior.decode(point, mean), labels)
    matrix, vector, misfit = torch.zeros(9, 9).double(), torch.zeros(9).double(), 0.0
    for name in names:
        own, zero = residual(prior.decode(point, mean))[name], evidence.compare(value).simulated[name]
        column = (jacobian[name] * gain[name][..., None, None]).reshape(own.numel(), 6).T
        errors = []
        for batch in inputs:
            along = prior.encode(batch, mean)
            outside = batch - prior.decode(along, mean)
            away = residual(prior.decode(point + near * along, mean) + outside)[name] - own
            errors.append((away * gain[name]).flatten() - near * along.flatten() @ column)
        error = torch.stack(errors)
        about = error - error.mean(0)
        spread = (about.square().sum(0) + 4 * about.square().mean()) / 7
        alone = 0.5 * spread + variance[name].flatten() + 1e-10 * column.square().sum(0).mean()
        rho = (own + (gain[name] - 1) * zero + shift[name]).flatten() + error.mean(0)
        rows = torch.cat([column, about * (0.5 / 3) ** 0.5])
        matrix += (rows / alone) @ rows.T
        vector += rows @ (rho / alone)
        misfit += float((rho.square() / alone).sum())
    assert torch.allclose(found.matrix, matrix) and torch.allclose(found.vector, vector)
    assert found.misfit == pytest.approx(misfit) and found.point is point
    assert torch.equal(again.matrix, found.matrix) and torch.equal(again.vector, found.vector)


def test_what_hangs_on_no_update_is_weighed_once_for_a_release_at_the_mean() -> None:
    prior, context, labels = prior_of(), make_context(), torch.tensor([0, 1])
    plain, own = (evidence_of(two_rounds(), stance, context) for stance in ("plain", "informed"))
    model = LinearModel(prior, labels, linear_evidence.held_batches(prior, 2, 0, 3), context)
    release, start = Release(noise=0.1), torch.zeros(2, 3).double()
    first = model._weighed(plain, release, start, 1.0)
    assert model._weighed(plain, release, start, 1.0) is first
    for changed in ((plain, Release(noise=0.1), start, 1.0), (plain, release, start, 0.5), (plain, release, start + 1, 1.0)):
        assert model._weighed(*changed) is not first
    other = dataclasses.replace(model, prior=dataclasses.replace(prior))
    assert other._weighed(plain, release, start, 1.0) is not model._weighed(plain, release, start, 1.0)
    # Who compares in a way of its own may let what was seen decide more than residuals.
    assert model._weighed(own, release, start, 1.0) is not model._weighed(own, release, start, 1.0)


def test_many_values_that_are_all_the_same_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pca_prior, "MOST_SQUARE", 100)
    with pytest.raises(UsageError, match="all public records are the same"):
        fit_prior(PublicRecords(torch.full((40, 60), 0.5), torch.zeros(40), "same"), 3)


def test_records_that_blow_up_are_left_out_and_without_any_the_noise_is_all() -> None:
    columns = {"a": drawn(2, 5), "b": drawn(2, 3, seed=1)}
    release = Release(noise=0.5)
    found = linear_model._weigh(columns, {"a": torch.zeros(0, 5).double(), "b": torch.zeros(0, 3).double()}, release)
    for name, column in columns.items():
        assert not found.means[name].any() and torch.equal(found.rows[name], column)
        assert torch.allclose(found.alone[name], 0.5 + 1e-10 * column.square().sum(0).mean())
    assert torch.allclose(found.matrix, torch.stack([(c / found.alone[n]) @ c.T for n, c in columns.items()]).sum(0))


def test_models_keep_what_others_can_use_and_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    prior, observation = prior_of(), two_rounds()
    context = make_context()
    evidence = evidence_of(observation, "informed", context)
    entries = linear_evidence.entries(observation)
    monkeypatch.setattr(linear_model, "KEPT_NUMBERS", 5 * entries)
    point, made = torch.zeros(2, 3).double(), list[str]()

    def keep(label: int, rows: int, what: str = "slopes", at: Tensor = point) -> list[Any]:
        model = LinearModel(prior, torch.tensor([label, 0]), prior.held[:2][:, None], context)
        return list(model._kept(what, evidence, at, lambda: iter([noting(made, f"{what} {label}", len(made) + 1)]), rows))

    assert keep(0, 3) == keep(0, 3) == [1] and keep(1, 2) == [2]
    assert keep(0, 3) == [1], "as much as may be kept"
    assert keep(0, 1, "records") == [3] and keep(0, 3) == [4], "what came first went first"
    assert keep(4, 6) == [5] and keep(4, 6) == [6], "too much to keep at all"
    assert keep(5, 1, at=point + 1) == [7] and keep(5, 1, at=point + 1) == [8], "of one update alone"
    assert keep(3, 5) == [9] and keep(3, 5) == [9]


def test_a_prior_gives_means_by_label_and_coordinates_both_ways() -> None:
    prior = prior_of()
    for targets in (torch.tensor([0.2, 0.8]), torch.tensor([[0, 1], [1, 0]]), torch.tensor([2, 9]), torch.tensor([-1, 3])):
        assert torch.equal(prior.mean_of(targets).flatten(1), prior.means[[2, 2]])
    assert torch.equal(prior.mean_of(torch.tensor([1, 0])).flatten(1), prior.means[[1, 0]])
    assert prior.rank == 3 and prior.mean_of(torch.tensor([1])).shape == (1, *SHAPE)
    z, mean = drawn(4, 3, seed=5), prior.mean_of(torch.tensor([0, 1, 2, 0]))
    inputs = prior.decode(z, mean)
    assert torch.allclose(inputs.flatten(1), mean.flatten(1) + z @ prior.synthesis.T)
    assert torch.allclose(prior.encode(inputs, mean), z) and prior.encode(inputs[:, None], mean[:, None]).shape == (4, 1, 3)
    single = prior.to(torch.zeros((), dtype=torch.float32))
    for name in ("means", "synthesis", "analysis", "held"):
        assert getattr(single, name).dtype == torch.float32 and torch.allclose(
            getattr(single, name).double(), getattr(prior, name)
        )
    elsewhere = prior.to(torch.zeros((), device="meta"))
    assert {getattr(elsewhere, n).device.type for n in ("means", "synthesis", "analysis", "held", "held_targets")} == {"meta"}
    assert single.source == "same" and single.rest == prior.rest and torch.equal(single.held_targets, prior.held_targets)


@pytest.mark.parametrize("most_square", [4096, 10])
@pytest.mark.parametrize("by_class", [True, False])
def test_every_field_of_a_prior_is_what_it_says(most_square: int, by_class: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pca_prior, "MOST_SQUARE", most_square)
    monkeypatch.setattr(pca_prior, "LEAST_OF_CLASS", 9)
    monkeypatch.setattr(pca_prior, "MOST_HELD", 11)
    monkeypatch.setattr(pca_prior, "FEW", 2)
    records = 0.8 * drawn(60, 3, 4) * torch.linspace(0.2, 1, 12).reshape(3, 4)
    targets = torch.tensor([0] * 30 + [1] * 25 + [2] * 5)
    prior = fit_prior(PublicRecords(records, targets, "other"), 4, by_class=by_class)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    held, fitted = order[:11], order[11:]
    if most_square == 10:
        fitted = fitted[:10]
    flat = records.flatten(1)
    whole = flat[fitted].mean(0)
    means = [whole]
    if by_class:
        own = [flat[fitted][targets[fitted] == label] for label in range(int(targets[fitted].max()) + 1)]
        means = [(each.sum(0) + 10 * whole) / (len(each) + 10) if len(each) >= 9 else whole for each in own] + means
    last = len(means) - 1
    about = flat - torch.stack([means[label] if label < last else whole for label in targets.tolist()])
    _, _, right = torch.linalg.svd(about[fitted])
    directions = right[:4].T * right[:4].T.gather(0, right[:4].T.abs().argmax(0, keepdim=True)).sign()
    along = about[held] @ directions
    deviations = along.square().mean(0).sqrt()
    assert torch.allclose(prior.means, torch.stack(means)) and prior.source == "other"
    assert torch.allclose(prior.synthesis, directions * deviations) and torch.allclose(
        prior.analysis, (directions / deviations).T
    )
    assert torch.equal(prior.held, records[held]) and torch.equal(prior.held_targets, targets[held])
    assert prior.rest == pytest.approx(float((about[held] - along @ directions.T).square().mean()))


def test_a_quarter_of_few_records_is_held_and_as_few_as_suffice_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pca_prior, "FEW", 1)
    fewest = PublicRecords(drawn(32, 3).round(), torch.zeros(32), "same")
    assert len(fit_prior(fewest, 2).held) == 8
    with pytest.raises(UsageError, match="31 public records"):
        fit_prior(dataclasses.replace(fewest, inputs=fewest.inputs[:31]), 2)
    for spoiled in (fewest.inputs - 0.01, fewest.inputs + 0.01):
        with pytest.raises(UsageError, match="bring them to"):
            fit_prior(dataclasses.replace(fewest, inputs=spoiled), 2)


def test_a_prior_is_fitted_once_for_what_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[Any] = []
    prior = prior_of()

    def fit(public: Any, rank: int, *, by_class: bool, device: Any = None) -> LinearPrior:
        fits.append((public, rank, by_class, device))
        return dataclasses.replace(prior, rest=float(len(fits)))

    monkeypatch.setattr(pca_prior, "fit_prior", fit)
    public = PublicRecords(drawn(40, *SHAPE), torch.arange(40), "same")
    context, observation = make_context(public=public), two_rounds()
    single = observation.replace(learners=tuple(each.to(torch.float32) for each in observation.learners))
    cases = [(observation, 5, True), (observation, 6, True), (observation, 5, False), (single, 5, True)]
    for _ in range(2):
        for place, (shown, rank, by_class) in enumerate(cases):
            found = pca_prior.prior_for(shown, context, rank, by_class=by_class, name="x")
            assert found.rest == place + 1 and found.means.dtype == next(iter(shown.learner.weights.values())).dtype
    cpu = torch.device("cpu")
    assert [each[1:] for each in fits] == [(5, True, cpu), (6, True, cpu), (5, False, cpu), (5, True, cpu)]
    assert all(each[0] is public for each in fits)


def test_a_refusal_is_its_sentence() -> None:
    def refuse() -> None:
        raise UsageError("no good")

    assert pca_prior.refused(refuse) == "no good" and pca_prior.refused(lambda: 3) is None


def test_few_records_of_many_values_have_few_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = drawn(6, 9) - 0.5
    apart[5] = apart[0]  # a rank less
    apart -= apart.mean(0)
    wide = pca_prior._directions(apart, 3)
    monkeypatch.setattr(pca_prior, "MOST_SQUARE", 4)
    with pytest.warns(RuntimeWarning, match="6 public records support 5 directions, not the 7 asked for; the prior has rank 5"):
        small = pca_prior._directions(apart, 7)
    assert small.shape == (9, 4) and torch.allclose(small[:, :3], wide)
    assert torch.allclose(small.T @ small, torch.eye(4).double())
    assert torch.equal(pca_prior._rows(torch.tensor([0, 4, -1, 1]), 3), torch.tensor([0, 2, 2, 1]))
    assert pca_prior._rows(torch.zeros(3, 2), 4).tolist() == [3, 3, 3] and pca_prior._rows(torch.tensor([0, 1]), 1).tolist() == [
        0,
        0,
    ]

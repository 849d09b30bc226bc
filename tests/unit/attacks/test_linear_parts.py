"""The linear attackers piece by piece: what they compare, the slopes, the gains and errors, the model and the prior, by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from gradveil.adversary import OBSERVED, OpenAdversary, prefixed
from gradveil.attacks import linear_evidence, linear_model, linear_noise, pca_prior
from gradveil.attacks.base import PublicRecords
from gradveil.attacks.linear_evidence import FIRST_DRAW, Evidence, evidence_of
from gradveil.attacks.linear_model import LinearModel, Posterior
from gradveil.attacks.linear_noise import Release
from gradveil.attacks.pca_prior import LinearPrior, fit_prior
from gradveil.errors import UsageError
from gradveil.learning import Learner
from gradveil.records import Comparison, Observation, Update
from gradveil.tensors import Named
from tests.unit.attacks.scenes import CLASSES, SHAPE, make_batch, make_context, make_learner, observe

MLP = "mlp(hidden=2, activation='sigmoid')"


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Scaled(OpenAdversary):
    """Sends everything times an unknown, and compares twice that with what was seen less the unknown."""

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        return {"factor": 2 + torch.rand((), generator=generator)}

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        return {n: v * variables["factor"] for n, v in update.items()}

    def penalty(self, variables: Named) -> Tensor:
        return 7 * variables["factor"].square()

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        seen = prefixed(evidence, OBSERVED)
        return Comparison({n: 2 * v for n, v in simulated.items()}, {n: v - variables["factor"] for n, v in seen.items()})


def two_rounds(adversary: Any = None, size: int = 2) -> Observation:
    first = make_learner(MLP)
    second = make_learner(MLP, seed=1)
    seen = observe(first, make_batch(size), rounds=(second,))
    return seen.replace(adversary=adversary or Scaled())


def test_what_is_compared_is_of_every_round_by_its_own_learner_with_the_unknowns() -> None:
    observation, context = two_rounds(), make_context()
    evidence = evidence_of(observation, "informed", context)
    factor = (2 + torch.rand((), generator=context.seed.child("linear", "informed").generator("start"))).double()
    assert torch.equal(evidence.variables["factor"], factor) and evidence.variables["factor"].dtype == torch.float64
    inputs, targets = make_batch(2, seed=4).inputs, torch.tensor([1, 3])
    found = evidence.simulate(inputs, targets)
    pair = evidence.compare(found)
    assert len(found) == 2 * len(observation.update.weights) == len(pair.simulated) == len(pair.observed)
    for index, (learner, update) in enumerate(zip(observation.learners, observation.updates, strict=True)):
        for name, value in learner.update(inputs, targets).items():
            key = f"{index}|{name}"
            assert torch.allclose(found[key], factor * value) and torch.allclose(pair.simulated[key], 2 * factor * value)
            assert torch.allclose(pair.observed[key], update.weights[name] - factor)
            assert torch.allclose(evidence.residuals(found)[key], pair.simulated[key] - pair.observed[key])
    plain = evidence_of(observation, "learned", context)
    assert type(plain.adversary) is OpenAdversary and plain.variables == {} and plain.share == 1.0


def test_a_share_of_entries_is_the_same_on_both_sides_and_whenever_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_evidence, "LEAST_ENTRIES", 3)
    observation, context = two_rounds(), make_context()
    whole, some = (evidence_of(observation, "informed", context, share=share) for share in (1.0, 0.101))
    found = whole.simulate(make_batch(2, seed=4).inputs, torch.tensor([1, 3]))
    everything = whole.compare(found)
    torch.manual_seed(1)
    linear_evidence._places.cache_clear()
    pair = some.compare(found)
    for name, value in everything.simulated.items():
        order = torch.randperm(value.numel(), generator=torch.Generator().manual_seed(value.numel()))
        kept = max(min(3, value.numel()), -(-101 * value.numel() // 1000))
        places = order[:kept].sort().values
        assert torch.equal(pair.simulated[name], value.flatten()[places])
        assert torch.equal(pair.observed[name], everything.observed[name].flatten()[places])


def test_numbers_seen_are_counted_and_as_many_inputs_replayed_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    observation = two_rounds()
    evidence = evidence_of(observation, "plain", make_context())
    parameters = observation.learner.parameters
    assert linear_evidence.entries(observation) == 2 * parameters
    one = 8 * (3 * parameters + 7) * 8
    inputs = torch.zeros(7, dtype=torch.float64)
    for room, fits in ((one, 1), (5 * one, 5), (5 * one - 1, 4), (1, 1), (10**12, linear_evidence.MOST_AT_ONCE)):
        monkeypatch.setattr(linear_evidence, "WORKING_BYTES", {"cpu": room})
        assert linear_evidence.at_once(evidence, inputs) == fits


def prior_of(rank: int = 3, held: int = 9, seed: int = 0) -> LinearPrior:
    size = 2 * 8 * 8
    basis, _ = torch.linalg.qr(drawn(size, rank, seed=seed) - 0.5)
    deviations = 0.3 + drawn(rank, seed=seed + 1)
    means = 0.3 + 0.4 * drawn(3, size, seed=seed + 2)
    kept, labels = drawn(held, *SHAPE, seed=seed + 3), torch.arange(held) % CLASSES
    return LinearPrior(means, basis * deviations, (basis / deviations).T.contiguous(), 0.1, kept, labels, "same")


def test_slopes_are_those_of_what_is_sent_about_the_point_as_many_at_once_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    prior, observation = prior_of(), two_rounds()
    evidence = evidence_of(observation, "informed", make_context())
    targets, point = torch.tensor([0, 1]), drawn(2, 3, seed=9)
    mean = prior.mean_of(targets)
    asked: list[Any] = []

    def at_once(given: Evidence, inputs: Tensor) -> int:
        asked.append((given, inputs))
        return 4

    monkeypatch.setattr(linear_evidence, "at_once", at_once)
    pieces = list(linear_evidence.slopes(evidence, prior, mean, point, targets))
    assert [len(next(iter(columns.values()))) for _, columns in pieces] == [4, 2]
    assert asked[0][0] is evidence and asked[0][1] is mean
    expected = jacrev(lambda z: evidence.simulate(prior.decode(z, mean), targets))(point)
    at = evidence.simulate(prior.decode(point, mean), targets)
    pushed = [evidence.push(piece) for piece in pieces]
    for name, value in at.items():
        jacobian = expected[name].flatten(-2).movedim(-1, 0)
        assert torch.allclose(pieces[1][0][name], value) and not pieces[0][0][name].requires_grad
        assert torch.allclose(torch.cat([columns[name] for _, columns in pieces]), jacobian)
        assert torch.allclose(torch.cat([each[name] for each in pushed]), 2 * jacobian)


def test_values_come_a_few_rows_at_a_time_and_held_records_round_and_round() -> None:
    asked: list[Tensor] = []

    def function(row: Tensor) -> Named:
        asked.append(row)
        return {"a": row.sum(0, keepdim=True)}

    inputs = drawn(5, 2).requires_grad_()
    pieces = list(linear_evidence.values(function, inputs, 2))
    assert [len(piece["a"]) for piece in pieces] == [2, 2, 1] and len(asked) == 3
    assert torch.allclose(torch.cat([piece["a"] for piece in pieces])[:, 0], inputs.sum(1))
    assert not pieces[0]["a"].requires_grad
    prior = prior_of(held=5)
    found = linear_evidence.held_batches(prior, 2, 3, 4)
    assert found.shape == (4, 2, *SHAPE)
    assert torch.equal(found.flatten(0, 1), prior.held[[3, 4, 0, 1, 2, 3, 4, 0]])


def test_rehearsals_are_the_clients_code_where_it_is_known_else_what_is_sent_without_a_defense() -> None:
    observation = two_rounds().replace(labels=torch.tensor([0, 1]))
    inputs, targets = drawn(3, 2, *SHAPE, seed=2), torch.tensor([1, 4])
    draws: list[int] = []

    def simulate(x: Tensor, y: Tensor, draw: int) -> tuple[Named, ...]:
        draws.append(draw)
        return tuple({n: v + 1 for n, v in one.update(x, y).items()} for one in observation.learners)

    def watch(x: Tensor, y: Tensor, draw: int) -> Observation:
        ran = simulate(x, y, draw)
        updates = tuple(Update({n: v + 1 for n, v in one.items()}, examples=2) for one in ran)
        return observation.replace(updates=updates, payloads=(cast("Any", f"payload {draw}"),), examples=99)

    for stance, context, more in (
        ("plain", make_context(simulate=simulate, observe=watch), 0),
        ("zero_mask", make_context(simulate=simulate), 0),
        ("learned", make_context(), 0),
        ("learned", make_context(simulate=simulate), 1),
        ("informed", make_context(simulate=simulate, observe=watch), 2),
    ):
        draws.clear()
        found = linear_evidence.rehearsed(observation, context, stance, inputs, targets)
        assert draws == ([FIRST_DRAW + place for place in range(3)] if more else [])
        for place, each in enumerate(found):
            assert each.labels is None and each.examples == 2 and each.learners == observation.learners
            assert each.payloads == ((f"payload {FIRST_DRAW + place}",) if more == 2 else ())
            for one, update, old in zip(observation.learners, each.updates, observation.updates, strict=True):
                assert more == 2 or update.round == old.round
                for name, value in one.update(inputs[place], targets).items():
                    assert torch.allclose(update.weights[name], value + more)
        assert len(found) == 3


def test_a_release_shifts_residuals_scales_slopes_and_names_its_errors() -> None:
    residuals, simulated = {"a": drawn(3), "b": drawn(2, seed=1)}, {"a": drawn(3, seed=2), "b": drawn(2, seed=3)}
    gain, shift = {"a": drawn(3, seed=4), "b": drawn(2, seed=5)}, {"a": drawn(3, seed=6), "b": drawn(2, seed=7)}
    release = Release(gain=gain, shift=shift, variance={"a": drawn(3, seed=8), "b": drawn(2, seed=9)}, noise=4.0)
    for n, v in release.shifted(residuals, simulated).items():
        assert torch.allclose(v, residuals[n] + (gain[n] - 1) * simulated[n] + shift[n])
    assert all(torch.allclose(v, residuals[n] * gain[n]) for n, v in release.scaled(residuals).items())
    assert torch.equal(cast("Tensor", release.error("b")), drawn(2, seed=9))
    nothing = Release(noise=4.0)
    assert nothing.shifted(residuals, simulated) is residuals and nothing.scaled(residuals) is residuals
    assert nothing.error("a") == 4.0 and Release().error("a") == 0.0


def test_what_is_learned_of_a_release_is_asked_of_who_runs_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    observation, inputs, targets = two_rounds(), drawn(3, 2, *SHAPE), torch.tensor([1, 4])
    asked: list[Any] = []
    monkeypatch.setattr(linear_noise, "release_of", lambda seen, *rest: asked.append((seen, *rest)) or "learned")
    able = make_context(simulate=lambda x, y, draw: tuple(one.update(x, y) for one in observation.learners))
    learn = linear_noise.learn_release
    for stance, context in (("plain", able), ("informed", make_context())):
        nothing = learn(observation, context, stance, inputs, targets)
        assert dataclasses.asdict(nothing) == dataclasses.asdict(Release()) and not asked
    assert cast("Any", learn(observation, able, "informed", inputs, targets, share=0.25)) == "learned"
    ((seen, x, y),) = asked
    assert len(seen) == 3 and {each.share for each in seen} == {0.25} and type(seen[0].adversary) is Scaled
    assert x is inputs and y is targets
    for place, each in enumerate(seen):
        sent = observation.learners[1].update(inputs[place], targets)
        assert all(torch.equal(each.seen[1][OBSERVED + name], value) for name, value in sent.items())


def test_noise_that_is_known_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy(Scaled):
        def arrives(self, observation: Observation) -> Any:
            return super().arrives(observation).replace(noise_std=0.3)

    observation = two_rounds(Noisy())
    assert linear_noise.known_noise(observation, "informed") == 0.3 and linear_noise.known_noise(observation, "plain") is None
    found = linear_noise.learn_release(observation, make_context(), "informed", drawn(3, 2, *SHAPE), torch.tensor([1, 4]))
    assert found.noise == pytest.approx(0.09) and not found.gain


def rehearsals_of(left: Named, right: Named) -> list[Evidence]:
    """Return what compares the rows of both sides, and checks what it is given."""

    def one(row: int) -> Any:
        def simulate(own: Tensor, targets: Tensor) -> int:
            assert int(own) == row and targets.tolist() == [7]
            return row

        side = lambda named, at: {n: v[at] for n, v in named.items()}  # noqa: E731
        return SimpleNamespace(simulate=simulate, compare=lambda at: Comparison(side(left, at), side(right, at)))

    return [one(row) for row in range(len(next(iter(left.values()))))]


def test_gains_shifts_and_errors_of_every_tensor_are_its_own() -> None:
    count = 12
    left = {"same": drawn(count, 3) - 0.5, "half": drawn(count, 2, seed=1), "noise": drawn(count, 4, seed=2)}
    error = 0.01 * (drawn(count, 2, seed=3) - 0.5)
    right = {"same": left["same"].clone(), "half": 3 + 0.5 * left["half"] + error, "noise": drawn(count, 4, seed=4)}
    found = linear_noise.release_of(rehearsals_of(left, right), torch.arange(count), torch.tensor([7]))
    assert found.gain["same"].tolist() == [1, 1, 1] and not found.shift["same"].any()
    assert not cast("Tensor", found.error("same")).any()
    about, arrived = (each["half"] - each["half"].mean(0) for each in (left, right))
    overall = float((about * arrived).sum() / about.square().sum())
    assert torch.allclose(found.gain["half"], torch.full((2,), overall).double(), atol=2e-3)
    assert torch.allclose(found.shift["half"], right["half"].mean(0) - found.gain["half"] * left["half"].mean(0))
    assert not found.gain["noise"].any() and torch.allclose(found.shift["noise"], right["noise"].mean(0))
    for name in ("half", "noise"):
        apart = (right[name] - right[name].mean(0)) - found.gain[name] * (left[name] - left[name].mean(0))
        drawn_in = (apart.square().sum(0) + 4 * apart.square().mean()) / (count + 4) * count / (count - 2)
        assert torch.allclose(cast("Tensor", found.error(name)), drawn_in)
    untouched = linear_noise.release_of(rehearsals_of(left, left), torch.arange(count), torch.tensor([7]))
    assert untouched.gain == {} and untouched.shift == {} and untouched.variance == {}


def test_gains_of_entries_are_believed_where_they_differ_by_more_than_chance() -> None:
    about = drawn(20, 6) - 0.5
    about = about - about.mean(0)
    about[:, 5] = 0
    error = 0.02 * (drawn(20, 6, seed=1) - 0.5)
    true = torch.tensor([0.2, 0.5, 1.0, 1.5, 2.0, 9.0]).double()
    found = linear_noise._gains(about, about * true + error)
    size = about.square().sum(0)
    alone = (about * (about * true + error)).sum(0) / size
    overall = float((about * (about * true + error)).sum() / size.sum())
    left = ((about * true + error - alone.nan_to_num(overall) * about).square().sum()) / (5 * 18)
    differ = ((size[:5] * (alone[:5] - overall).square()).sum() - 5 * left) / size.sum()
    expected = overall + (alone[:5] - overall) * differ / (differ + left / size[:5])
    assert torch.allclose(found[:5], expected) and float(found[5]) == pytest.approx(overall)
    same = linear_noise._gains(about, 0.7 * about + error)
    assert len(same.unique()) == 1 and float(same[0]) == pytest.approx(0.7, abs=0.02)
    assert not linear_noise._gains(about, drawn(20, 6, seed=5) - 0.5).any(), "chance is no gain"
    assert torch.allclose(linear_noise.spread_of(about), (about.square().sum(0) + 4 * about.square().mean()) / 24)


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
    assert torch.allclose(found.matrix, sum((c / found.alone[n]) @ c.T for n, c in columns.items()))


def test_models_keep_what_others_can_use_and_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    prior, observation = prior_of(), two_rounds()
    context = make_context()
    evidence = evidence_of(observation, "informed", context)
    entries = linear_evidence.entries(observation)
    monkeypatch.setattr(linear_model, "KEPT_NUMBERS", 5 * entries)
    point, made = torch.zeros(2, 3).double(), list[str]()

    def keep(label: int, rows: int, what: str = "slopes", at: Tensor = point) -> list[Any]:
        model = LinearModel(prior, torch.tensor([label, 0]), prior.held[:2][:, None], context)
        return list(model._kept(what, evidence, at, lambda: iter([made.append(f"{what} {label}") or len(made)]), rows))

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

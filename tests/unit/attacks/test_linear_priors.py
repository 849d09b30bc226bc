"""The Wiener step and the maximum a posteriori: textbook answers where there are any, and what they make of public records."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradveil.adversary import OpenAdversary
from gradveil.attacks import Attack, AttackContext, launch, linear_map, wiener
from gradveil.attacks.base import PublicRecords
from gradveil.attacks.linear_evidence import entries
from gradveil.attacks.linear_map import LinearMap
from gradveil.attacks.pca_prior import LinearPrior, fit_prior
from gradveil.attacks.wiener import Wiener
from gradveil.defenses.embedding_noise import NoisyEmbeddingAdversary
from gradveil.defenses.parts.sparse_update import ZeroedEntriesAdversary
from gradveil.errors import UsageError
from gradveil.learning import loss_by_name
from gradveil.learning.embedding import EMBEDDING, EmbeddingLearner
from gradveil.metrics import mean_squared_error
from gradveil.records import AdversaryModel, Knowledge, Observation, ThreatModel, Update
from tests.unit.attacks.scenes import CLASSES, SHAPE, make_batch, make_context, make_learner, observe, simulator

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "attacks.json").read_text())["linear_gaussian_posterior"]
BOTH: list[Any] = [Wiener(stance="informed"), LinearMap(stance="informed")]


class Straight(nn.Module):
    """A client that sends A x, or the sigmoid of it."""

    def __init__(self, matrix: Tensor, *, bent: bool = False) -> None:
        super().__init__()
        self.weight, self.bent = nn.Parameter(matrix.clone()), bent

    def forward(self, inputs: Tensor) -> Tensor:
        found = inputs.flatten(1) @ self.weight.T
        return torch.sigmoid(found) if self.bent else found


def by_hand(mean: Tensor, deviations: Tensor, held: Tensor) -> LinearPrior:
    """Return a prior along the first axes of inputs."""
    synthesis = torch.eye(len(mean), dtype=mean.dtype)[:, : len(deviations)] * deviations
    analysis = (torch.eye(len(mean), dtype=mean.dtype)[:, : len(deviations)] / deviations).T.contiguous()
    return LinearPrior(mean[None], synthesis, analysis, 0.0, held, torch.zeros(len(held), dtype=torch.int64), "same")


def shown(matrix: Tensor, sent: Tensor, adversary: AdversaryModel, *, bent: bool = False) -> Observation:
    learner = EmbeddingLearner.of_bottom(Straight(matrix, bent=bent), loss_by_name("cross_entropy"))
    threat = ThreatModel(knows=ThreatModel().knows | {Knowledge.LABELS})
    update = Update({EMBEDDING: sent[None]}, examples=1)
    labels = torch.zeros(1, dtype=torch.int64)
    return Observation((learner,), (update,), (), (matrix.shape[1],), 2, 1, threat, adversary, labels=labels)


def told(monkeypatch: pytest.MonkeyPatch, prior: LinearPrior) -> AttackContext:
    """Return a context in which attackers believe this prior and weigh as it says."""
    for module in (wiener, linear_map):
        monkeypatch.setattr(module, "prior_for", lambda *_, **__: prior)
    monkeypatch.setattr(wiener, "STRENGTHS", (1.0,))
    return make_context(200)


def closed_form(prior: LinearPrior, matrix: Tensor, sent: Tensor, variance: float) -> np.ndarray[Any, Any]:
    """Return mu + S Aᵀ (A S Aᵀ + c)⁻¹ (y - A mu)."""
    a, y, mu, vs = (value.numpy() for value in (matrix, sent, prior.means[-1], prior.synthesis))
    spread = vs @ vs.T
    gain = spread @ a.T @ np.linalg.inv(a @ spread @ a.T + variance * np.eye(len(y)))
    found: np.ndarray[Any, Any] = mu + gain @ (y - a @ mu)
    return found


@pytest.mark.parametrize("attack", BOTH, ids=lambda attack: attack.card.name)
def test_of_one_number_the_posterior_mean_is_the_golden_one(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    value = GOLDEN["value"]
    numbers = {name: torch.tensor([own], dtype=torch.float64) for name, own in value.items()}
    held = torch.linspace(0.3, 0.7, 8, dtype=torch.float64)[:, None]
    context = told(monkeypatch, by_hand(numbers["mean"], numbers["deviation"], held))
    seen = shown(numbers["slope"][None], numbers["seen"], NoisyEmbeddingAdversary(value["noise"]))
    (found,) = launch(attack, [seen], context)
    assert float(found.inputs) == pytest.approx(value["posterior"], abs=GOLDEN["tolerance"])


@pytest.mark.parametrize("attack", BOTH, ids=lambda attack: attack.card.name)
def test_what_lies_outside_the_kept_rank_counts_as_noise(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    value = GOLDEN["value"]
    away = value["outside"] * torch.tensor([1.0, -1.0] * 8, dtype=torch.float64)
    held = torch.stack([torch.linspace(0.3, 0.7, 16, dtype=torch.float64), 0.5 + away], 1)
    mean = torch.full((2,), value["mean"], dtype=torch.float64)
    prior = by_hand(mean, torch.tensor([value["deviation"]], dtype=torch.float64), held)
    matrix = torch.full((1, 2), value["slope"], dtype=torch.float64)
    sent = torch.tensor([value["seen"] + value["slope"] * value["mean"]], dtype=torch.float64)
    (found,) = launch(attack, [shown(matrix, sent, NoisyEmbeddingAdversary(value["noise"]))], told(monkeypatch, prior))
    # The mean of the twelve records on which errors are measured is that of all, so nothing is moved.
    assert found.inputs[0].tolist() == pytest.approx([value["posterior_with_outside"], value["mean"]], abs=GOLDEN["tolerance"])


def random_case(rank: int) -> tuple[LinearPrior, Tensor, Tensor]:
    """Return a prior from records that have nothing outside its directions, a client and what it sends of another record."""
    generator = torch.Generator().manual_seed(4)
    records = 0.5 + 0.08 * torch.randn((200, rank), generator=generator, dtype=torch.float64) @ torch.randn(
        (rank, 6), generator=generator, dtype=torch.float64
    ).clamp(-1, 1)
    prior = fit_prior(PublicRecords(records.clamp(0, 1), torch.zeros(200, dtype=torch.int64), "same"), 6, by_class=False)
    matrix = torch.randn((9, 6), generator=generator, dtype=torch.float64)
    return prior, matrix, matrix @ records[0] + 0.1 * torch.randn(9, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("attack", BOTH, ids=lambda attack: attack.card.name)
def test_of_a_straight_client_it_is_the_closed_form(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    prior, matrix, sent = random_case(6)
    (found,) = launch(attack, [shown(matrix, sent, NoisyEmbeddingAdversary(0.1))], told(monkeypatch, prior))
    assert prior.rank == 6
    assert np.abs(found.inputs[0].numpy() - closed_form(prior, matrix, sent, 0.01).clip(0, 1)).max() < 1e-6


@pytest.mark.parametrize("attack", BOTH, ids=lambda attack: attack.card.name)
def test_only_entries_that_were_sent_are_read(attack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prior, matrix, sent = random_case(6)
    kept = torch.tensor([True, False, True, False, False, True, True, False, True])
    (found,) = launch(attack, [shown(matrix, sent * kept, ZeroedEntriesAdversary())], told(monkeypatch, prior))
    expected = closed_form(prior, matrix[kept], sent[kept], 1e-9).clip(0, 1)
    assert np.abs(found.inputs[0].numpy() - expected).max() < 1e-4
    (blind,) = launch(
        dataclasses.replace(attack, stance="plain"), [shown(matrix, sent * kept, OpenAdversary())], make_context(200)
    )
    assert np.abs(blind.inputs[0].numpy() - expected).max() > 0.05


@pytest.mark.parametrize("attack", BOTH, ids=lambda attack: attack.card.name)
def test_known_noise_lowers_the_weight_of_what_was_seen(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    prior, matrix, sent = random_case(6)
    context, away = told(monkeypatch, prior), []
    for std in (0.01, 0.3, 1e6):
        (found,) = launch(attack, [shown(matrix, sent, NoisyEmbeddingAdversary(std))], context)
        away.append(float((found.inputs[0] - prior.means[-1]).norm()))
    assert away[0] > 1.2 * away[1] > 0 and away[2] < 1e-6


def client(defense: str = "none", *, count: int = 3, **changes: Any) -> tuple[list[Observation], Tensor, AttackContext]:
    """Return what a sigmoid LeNet sends of smooth records, their truth, and an attacker with public records of the same law."""
    learner = make_learner("lenet", **changes)
    inputs, targets = smooth(120 + count), torch.arange(120 + count) % CLASSES
    public = PublicRecords(inputs[count:], targets[count:], "same")
    batches = [make_batch().replace(inputs=inputs[i : i + 1], targets=targets[i : i + 1]) for i in range(count)]
    seen = [observe(learner, batch, defense, seed=i, labels=batch.targets) for i, batch in enumerate(batches)]
    threat = ThreatModel(knows=ThreatModel().knows | {Knowledge.LABELS})
    context = make_context(60, simulate=simulator((learner,), defense), public=public)
    return [each.replace(threat=threat) for each in seen], inputs[:count], context


def smooth(count: int) -> Tensor:
    """Return records of the scenes' shape that vary along twelve directions alone."""
    generator = torch.Generator().manual_seed(8)
    waves = torch.randn((12, *SHAPE), generator=generator, dtype=torch.float64)
    weights = torch.randn((count, 12), generator=generator, dtype=torch.float64)
    return (0.5 + 0.06 * torch.einsum("nk,kcij->ncij", weights, waves)).clamp(0, 1)


def of_mean(context: AttackContext, truth: Tensor) -> Tensor:
    """Return the error of who sees nothing but public records."""
    assert context.public is not None
    return mean_squared_error(context.public.inputs.mean(0, keepdim=True).expand_as(truth), truth)


def errors(found: list[Any], truth: Tensor) -> Tensor:
    return mean_squared_error(torch.cat([each.inputs for each in found]), truth)


@pytest.mark.parametrize("stance", ["plain", "informed", "learned"])
@pytest.mark.parametrize("kind", [Wiener, LinearMap])
def test_a_gradient_is_read_far_beyond_the_mean(kind: Any, stance: str) -> None:
    seen, truth, context = client()
    found = launch(kind(rank=12, stance=stance), seen, context)
    null = of_mean(context, truth)
    assert bool((errors(found, truth) < 0.06 * null).all())
    assert all(each.oracle_labels and each.best_loss < each.first_loss for each in found)


@pytest.mark.parametrize("kind", [Wiener, LinearMap])
def test_local_steps_are_read_as_well(kind: Any) -> None:
    seen, truth, context = client(shares="weights", local_steps=2, learning_rate=0.1)
    null = of_mean(context, truth)
    assert bool((errors(launch(kind(rank=12), seen, context), truth) < 0.06 * null).all())


def test_signs_are_read_by_gain_and_error_learned_from_releases() -> None:
    seen, truth, context = client("quantisation(mode='sign')")
    null = of_mean(context, truth).mean()
    plain, learned = (errors(launch(Wiener(rank=12, stance=s), seen, context), truth).mean() for s in ("plain", "learned"))
    assert float(learned) < 0.75 * float(null) < float(plain)


@pytest.mark.parametrize("kind", [Wiener, LinearMap])
def test_rounds_are_read_together(kind: Any) -> None:
    learner, inputs = make_learner("lenet"), smooth(126)
    context = make_context(60, public=PublicRecords(inputs[6:], torch.arange(120) % CLASSES, "same"))
    threat, wrong = ThreatModel(knows=ThreatModel().knows | {Knowledge.LABELS}), []
    for more in ((), (learner,) * 7):
        batches = [make_batch().replace(inputs=inputs[i : i + 1], targets=torch.tensor([1])) for i in range(6)]
        seen = [observe(learner, each, "gaussian_noise(std=0.003)", seed=i, rounds=more) for i, each in enumerate(batches)]
        seen = [each.replace(labels=torch.tensor([1]), threat=threat) for each in seen]
        wrong.append(float(errors(launch(kind(rank=12, stance="informed"), seen, context), inputs[:6]).mean()))
    assert wrong[1] < 0.6 * wrong[0]


def test_labels_for_which_everything_arrives_stand_beside_others() -> None:
    weight, gain = torch.full((2,), 3.0), torch.full((2,), 0.5)
    found = linear_map._stacked([{"weight/a": weight}, {"weight/a": weight, "gain/a": gain, "shift/a": gain}])
    assert found["gain/a"].tolist() == [[1, 1], [0.5, 0.5]] and found["shift/a"].tolist() == [[0, 0], [0.5, 0.5]]


def test_two_examples_with_different_labels_are_told_apart() -> None:
    learner, inputs = make_learner("lenet"), smooth(122)
    batch = make_batch(2).replace(inputs=inputs[:2], targets=torch.tensor([0, 3]))
    threat = ThreatModel(knows=ThreatModel().knows | {Knowledge.LABELS})
    seen = observe(learner, batch).replace(labels=batch.targets, threat=threat)
    context = make_context(60, public=PublicRecords(inputs[2:], torch.arange(120) % CLASSES, "same"))
    for attack in (Wiener(rank=12), LinearMap(rank=12)):
        (found,) = launch(attack, [seen], context)
        own, other = (mean_squared_error(found.inputs, truth).mean() for truth in (batch.inputs, batch.inputs.flip(0)))
        assert float(own) < 0.3 * float(other)


def test_a_second_step_straightens_a_bent_client(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    records = 0.5 + 0.15 * torch.randn((300, 4), generator=generator, dtype=torch.float64)
    prior = fit_prior(PublicRecords(records.clamp(0, 1), torch.zeros(300, dtype=torch.int64), "same"), 4, by_class=False)
    matrix = 4 * torch.randn((12, 4), generator=generator, dtype=torch.float64)
    context, wrong = told(monkeypatch, prior), []
    for steps in (1, 2):
        seen = [shown(matrix, torch.sigmoid(matrix @ x), OpenAdversary(), bent=True) for x in records[:8].clamp(0, 1)]
        wrong.append(float(errors(launch(Wiener(iterations=steps), seen, context), records[:8].clamp(0, 1)).mean()))
    assert wrong[1] < 0.5 * wrong[0]


def test_the_strength_is_chosen_without_the_update_under_attack() -> None:
    seen, _, context = client("gaussian_noise(std=0.01)")
    other = [dataclasses.replace(each, updates=(Update({n: 9 * v for n, v in each.update.weights.items()}, 1),)) for each in seen]
    plans = []
    for shown_now in (seen, other):
        context.memory.clear()
        launch(Wiener(rank=12, stance="informed"), shown_now, context)
        plans.append([value for key, value in context.memory.items() if isinstance(key, tuple) and key[0] == "wiener plan"])
    assert plans[0] == plans[1] and len(plans[0]) == 1


def test_strong_noise_that_nobody_names_is_found_in_rehearsals() -> None:
    # The stance does not look at the adversary's noise; releases of the attacker's own show it.
    seen, truth, context = client("gaussian_noise(std=0.05)")
    plain, learned = (errors(launch(LinearMap(rank=12, stance=s), seen, context), truth).mean() for s in ("plain", "learned"))
    null = of_mean(context, truth).mean()
    assert float(learned) < 1.1 * float(null) < 0.5 * float(plain)


def test_a_large_network_is_read_by_some_of_its_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, truth, context = client()
    whole = errors(launch(Wiener(rank=12), seen, context), truth).mean()
    monkeypatch.setattr(wiener, "MOST_NUMBERS", 300_000)
    context.memory.clear()
    some = errors(launch(Wiener(rank=12), seen, context), truth).mean()
    null = of_mean(context, truth).mean()
    assert float(whole) != float(some) < 0.3 * float(null)


ANY: dict[str, Any] = {"rank": 5, "errors": 9, "rehearsals": 4}
CHANGES: list[tuple[Any, dict[str, Any]]] = [
    *(
        (Wiener(rank=12, stance="learned"), change)
        for change in ({"rank": 5}, {"errors": 9}, {"rehearsals": 4}, {"by_class": False})
    ),
    *((LinearMap(rank=12, stance="learned"), change) for change in ({"rank": 5}, {"errors": 9}, {"steps": 5}, {"rehearsals": 4})),
]


@pytest.mark.parametrize(("attack", "change"), CHANGES, ids=str)
def test_every_setting_decides_what_is_found(attack: Any, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.attacks.pca_prior.LEAST_OF_CLASS", 5)
    seen, _, context = client("quantisation(bits=4)", count=1)
    before, after = (launch(each, seen, context)[0].inputs for each in (attack, dataclasses.replace(attack, **change)))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("name", ["rank", "errors", "rehearsals"])
def test_settings_that_mean_nothing_are_refused(name: str) -> None:
    kinds: list[Any] = [Wiener, LinearMap]
    for kind in kinds:
        with pytest.raises(UsageError, match=name):
            kind(**{name: 0})


def test_without_public_records_it_says_what_to_do() -> None:
    seen, _, context = client(count=1)
    for attack in (Wiener(), LinearMap()):
        with pytest.raises(UsageError, match=f"{attack.card.name}.*given none; hand some in as the context's `public`"):
            launch(attack, seen, dataclasses.replace(context, public=None))


def test_a_model_that_would_take_hours_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directions count for every record of a batch, errors of the model once."""
    (one,), _, context = client(count=1)
    two, attack = one.replace(examples=2, labels=torch.zeros(2, dtype=torch.int64)), Wiener(rank=8, errors=4)
    monkeypatch.setattr(wiener, "MOST_WORK", 12 * entries(one))
    assert attack.lacks(one, context) is None
    for dear, observation in ((attack, two), (Wiener(rank=8, errors=5), one), (Wiener(rank=9, errors=4), one)):
        assert "more than the" in str(dear.lacks(observation, context))
    with pytest.raises(UsageError, match=r"a linear model of this update has .* numbers"):
        launch(attack, [two], context)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (smooth(120)[:, :1], "public records have shape 1×8×8 and attacked inputs 2×8×8"),
        (255 * smooth(120), r"bring them to \[0, 1\]"),
        (smooth(31), "31 public records teach nothing"),
        (torch.full((60, *SHAPE), 0.25, dtype=torch.float64), "all public records are the same"),
        (torch.full((60, *SHAPE), float("nan"), dtype=torch.float64), r"bring them to \[0, 1\]"),
    ],
    ids=["shape", "range", "few", "constant", "nan"],
)
def test_bad_public_records_get_one_sentence(inputs: Tensor, sentence: str) -> None:
    seen, _, context = client(count=1)
    public = PublicRecords(inputs, torch.zeros(len(inputs), dtype=torch.int64), "same")
    with pytest.raises(UsageError, match=sentence):
        launch(Wiener(rank=4), seen, dataclasses.replace(context, public=public))


def test_few_records_lower_the_rank_and_say_so() -> None:
    public = PublicRecords(torch.rand((40, 300), generator=torch.Generator().manual_seed(0)), torch.zeros(40), "same")
    with pytest.warns(RuntimeWarning, match="30 public records support 29 directions, not the 256 asked for"):
        prior = fit_prior(public, 256)
    assert prior.rank == 29


def test_deviations_are_those_of_records_that_had_no_part_in_the_directions() -> None:
    public = PublicRecords(torch.rand((100, 60), generator=torch.Generator().manual_seed(1)), torch.zeros(100), "same")
    prior = fit_prior(public, 20)
    about = prior.encode(prior.held, prior.means[-1])
    assert torch.allclose(about.square().mean(0), torch.ones(20, dtype=torch.float64))
    # Independent values of variance 1/12 look much larger along directions fitted to 75 of them than they are.
    assert float(prior.synthesis.square().sum(0).mean()) == pytest.approx(1 / 12, rel=0.15)
    assert prior.rest == pytest.approx((60 - 20) / 60 / 12, rel=0.15)


def test_many_values_and_few_records_give_the_same_directions_either_way() -> None:
    records = torch.rand((60, 1100), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    prior = fit_prior(PublicRecords(records, torch.zeros(60), "same"), 10)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[15:]
    right = torch.linalg.svd(records[order] - records[order].mean(0)).Vh[:10]
    own = prior.analysis / prior.analysis.norm(dim=1, keepdim=True)
    assert torch.allclose((own @ right.T).abs(), torch.eye(10, dtype=torch.float64), atol=1e-6)


def test_a_class_with_enough_records_has_a_mean_of_its_own() -> None:
    generator = torch.Generator().manual_seed(3)
    targets = torch.tensor([0] * 120 + [1] * 120 + [2] * 8)
    inputs = 0.3 + 0.2 * (targets == 1)[:, None] + 0.05 * torch.rand((248, 5), generator=generator)
    public = PublicRecords(inputs, targets, "same")
    whole, apart = (fit_prior(public, 5, by_class=split) for split in (False, True))
    assert len(whole.means) == 1 and len(apart.means) == 4
    first, second, rare, unknown = apart.mean_of(torch.tensor([0, 1, 2, 7]))
    assert float((second - first).mean()) == pytest.approx(0.2, abs=0.03)
    assert torch.equal(rare, unknown) and torch.allclose(unknown, whole.mean_of(torch.tensor([0]))[0])
    assert float(apart.synthesis.square().sum()) < 0.2 * float(whole.synthesis.square().sum())

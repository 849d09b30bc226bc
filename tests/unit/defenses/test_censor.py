"""CENSOR: exactly orthogonal, as long as the gradient, never the gradient; and what the paper's and the released version send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.adversary import OpenAdversary
from gradveil.attacks.engine.labels import recover_labels
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.client.update import run_client
from gradveil.data import load_data
from gradveil.defenses import ClientView, build_defense
from gradveil.defenses.censor import (
    AT_ONCE,
    FALLBACKS,
    ROUNDS,
    Censor,
    CensorAdversary,
    fallback_rate,
    orthogonal_directions,
    select_candidate,
)
from gradveil.errors import UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, ThreatModel, Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.testing.defenses_adversary import relative_residual
from gradveil.testing.defenses_scene import CLASSES, SHAPE, Scene, draw_batch
from gradveil.testing.released_censor import PaperCensor, ReleasedCensor, raw_share, released_directions

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "defenses_pruned_and_orthogonal.json").read_text()
)


def cosines(left: Named, right: Named) -> dict[str, float]:
    """Cosine of each tensor with more than one entry."""
    pairs = {n: (v.double().reshape(-1), right[n].double().reshape(-1)) for n, v in left.items() if v.numel() > 1}
    return {n: float(torch.cosine_similarity(a, b, dim=0)) for n, (a, b) in pairs.items()}


def sent_by(defense: Censor, seed: int = 1, round_index: int = 0, **changes: Any) -> tuple[Named, Named, Scene]:
    scene = Scene.of(defense)
    view = scene.view(seed).replace(round=round_index, **changes)
    update, _ = defense.protect_update(scene.update(), view, {})
    return update.weights, scene.gradient(), scene


def lenet_learner(init: str, rate: float = 0.1) -> tuple[Learner, list[Batch]]:
    data = load_data("photos")
    model = build_model(f"lenet(init='{init}')", input_shape=data.input_shape, classes=data.classes, seed=Seed(0))
    learner = Learner.of(model, loss_by_name("cross_entropy"), TrainingSettings(learning_rate=rate))
    return learner, [data.batch([index]) for index in range(16)]


@pytest.mark.parametrize("sampling", ["normal", "public"])
def test_every_tensor_is_orthogonal_and_keeps_its_norm(sampling: str) -> None:
    public = torch.rand((6, *SHAPE), generator=torch.Generator().manual_seed(0))
    sent, raw, _ = sent_by(Censor(sampling=sampling), public=public)  # type: ignore[arg-type]
    assert max(abs(value) for value in cosines(sent, raw).values()) < GOLDEN["censor_first_order"]["tolerance"]
    for name, value in raw.items():
        if value.numel() > 1:
            assert float(sent[name].norm()) == pytest.approx(float(value.norm()), rel=1e-5)


def test_the_whole_update_is_one_vector_in_scope_whole() -> None:
    sent, raw, _ = sent_by(Censor(scope="whole"))
    left, right = (torch.cat([v.double().reshape(-1) for v in side.values()]) for side in (sent, raw))
    assert abs(float(torch.cosine_similarity(left, right, dim=0))) < 1e-6
    assert float(left.norm()) == pytest.approx(float(right.norm()), rel=1e-6)
    assert max(abs(value) for value in cosines(sent, raw).values()) > 1e-3, "tensors by themselves are not orthogonal here"


def test_one_entry_has_no_orthogonal_complement_and_zero_stays_zero() -> None:
    drawn = torch.ones((3, 1))
    assert not orthogonal_directions(drawn, torch.tensor([7.0])).any()
    assert not orthogonal_directions(torch.ones((3, 4)), torch.zeros(4)).any()
    sent, raw, _ = sent_by(Censor())
    assert raw["gain"].abs() > 0 and not sent["gain"].any()


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1.0, 1e30])
def test_directions_hold_for_gradients_of_any_size(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(50, generator=generator).double() * size
    found = orthogonal_directions(torch.randn((4, 50), generator=generator), gradient)
    assert torch.allclose(found.norm(dim=1) / gradient.norm(), torch.ones(4, dtype=torch.float64))
    assert float((found / size @ (gradient / size)).abs().max()) < 1e-12 * float((gradient / size).square().sum())


def test_a_draw_parallel_to_the_gradient_still_gives_an_orthogonal_direction() -> None:
    gradient = torch.tensor([3.0, 4.0, 0.0])
    nearly = gradient + torch.tensor([[0.0, 0.0, 1e-9]])
    found = orthogonal_directions(nearly, gradient)[0]
    assert abs(float(found @ gradient.double())) < 1e-12
    assert float(found.norm()) == pytest.approx(5.0)


def test_the_best_trial_is_sent_even_where_none_lowers_the_loss() -> None:
    learner, batches = lenet_learner("default")
    gradient = learner.update(batches[0].inputs, batches[0].targets)
    view = ClientView(learner=learner, seed=Seed(3), weights=learner.weights, raw_batch=batches[0], batch=batches[0])
    defense = Censor()
    candidates = list(defense._candidates(gradient, view))
    assert [len(next(iter(chunk.values()))) for chunk in candidates] == [20]
    chosen = select_candidate(iter(candidates), view, gradient)
    exact = learner.to(torch.float64)
    losses = []
    for index in range(20):
        moved = {n: w - 0.1 * candidates[0][n][index] for n, w in exact.weights.items()}
        losses.append(float(exact.objective(moved, batches[0].inputs.double(), batches[0].targets)))
    assert chosen.fell_back and min(losses) > chosen.start
    assert chosen.loss == pytest.approx(min(losses), rel=1e-12)
    sent, state = defense.protect_update(Update(gradient, examples=1), view, {})
    assert max(abs(value) for value in cosines(sent.weights, gradient).values()) < 1e-6
    assert (int(state[ROUNDS]), int(state[FALLBACKS])) == (1, 1)


def test_chunks_draw_and_choose_what_one_pass_does(monkeypatch: pytest.MonkeyPatch) -> None:
    together, _, scene = sent_by(Censor(trials=7))
    monkeypatch.setattr("gradveil.defenses.censor.AT_ONCE", 2 * sum(v.numel() for v in scene.gradient().values()))
    drawn = [len(next(iter(c.values()))) for c in Censor(trials=7)._candidates(scene.gradient(), scene.view())]
    assert AT_ONCE > 10**7 and drawn == [2, 2, 2, 1]
    apart, raw, _ = sent_by(Censor(trials=7))
    assert together.keys() == apart.keys()
    assert max(abs(value) for value in cosines(apart, raw).values()) < 1e-6


def test_shared_weights_are_judged_where_they_lead() -> None:
    settings = TrainingSettings(shares="weights", local_steps=3, learning_rate=0.05)
    defense = Censor(trials=5)
    scene = Scene.of(defense, settings=settings)
    result = run_client(scene.learner, scene.batch, defense, Seed(1))
    sent = scene.deliver(defense, result.payload).weights
    raw = scene.learner.update(scene.batch.inputs, scene.batch.targets)
    assert max(abs(value) for value in cosines(sent, raw).values()) < 1e-6
    view = ClientView(learner=scene.learner, seed=Seed(1), weights=scene.learner.weights, batch=scene.batch)
    chosen = select_candidate(defense._candidates(raw, view), view, raw)
    moved = {n: w - sent[n] for n, w in scene.learner.weights.items()}
    assert chosen.loss == pytest.approx(float(scene.learner.objective(moved, scene.batch.inputs, scene.batch.targets)), rel=1e-4)


def test_public_gradients_are_used_where_there_are_some_and_normal_draws_where_not() -> None:
    public = torch.rand((6, *SHAPE), generator=torch.Generator().manual_seed(0))
    normal, raw, scene = sent_by(Censor())
    fallen_back, _, _ = sent_by(Censor(sampling="public"))
    assert all(torch.equal(value, fallen_back[name]) for name, value in normal.items())
    from_public, _, _ = sent_by(Censor(sampling="public", trials=1), public=public)
    # What is left of a public gradient lies in the span of it and the raw one.
    learner = scene.learner
    spans = []
    for label in range(CLASSES):
        for image in public:
            spans.append(learner.gradient(learner.weights, image[None], torch.tensor([label]))["conv.weight"].reshape(-1))
    basis, _ = torch.linalg.qr(torch.stack([*spans, raw["conv.weight"].reshape(-1)]).double().T)
    one = from_public["conv.weight"].double().reshape(-1)
    assert float((one - basis @ (basis.T @ one)).norm() / one.norm()) < 1e-3
    other = normal["conv.weight"].double().reshape(-1)
    assert float((other - basis @ (basis.T @ other)).norm() / other.norm()) > 0.1


def test_after_the_defended_rounds_the_update_is_raw_and_nothing_is_counted() -> None:
    defense = Censor(active_rounds=2)
    scene = Scene.of(defense)
    for index, defended in ((0, True), (1, True), (2, False)):
        update, state = defense.protect_update(scene.update(), scene.view().replace(round=index), {})
        same = all(torch.equal(value, scene.gradient()[name]) for name, value in update.weights.items())
        assert same is not defended
        assert (ROUNDS in state) is defended
    always = Censor(active_rounds=0).protect_update(scene.update(), scene.view().replace(round=10_000), {})[0].weights
    assert max(abs(value) for value in cosines(always, scene.gradient()).values()) < 1e-6


def test_fallbacks_are_counted_over_clients_and_chains() -> None:
    assert fallback_rate([]) is None
    one = {ROUNDS: torch.tensor(4), FALLBACKS: torch.tensor(3)}
    two = {f"1/{ROUNDS}": torch.tensor(4), f"1/{FALLBACKS}": torch.tensor(0), "1/other": torch.tensor(9)}
    assert fallback_rate([one, two, {}]) == 3 / 8
    scene = Scene.of(Censor())
    defense = build_defense("clipping(bound=1) + censor(trials=2)")
    first = run_client(scene.learner, scene.batch, defense, Seed(1))
    second = run_client(scene.learner, scene.batch, defense, Seed(1), state=first.state, round_index=1)
    assert int(second.state[f"1/{ROUNDS}"]) == 2
    assert fallback_rate([second.state]) is not None


@pytest.mark.parametrize("row", GOLDEN["released_censor_cosine"]["value"], ids=str)
def test_the_released_projection_is_not_orthogonal(row: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    entries = int(row["entries"])
    gradient = torch.randn(entries, generator=generator).double()
    gradient = gradient / gradient.norm() * row["norm"]
    drawn = torch.randn((1500 if entries < 1000 else 60, entries), generator=generator)
    found = (released_directions(drawn, gradient) @ gradient / row["norm"] ** 2).abs().mean()
    slack = GOLDEN["released_censor_cosine"]["tolerance"] * (1 if entries < 1000 else 2)
    assert float(found) == pytest.approx(row["cosine"], abs=slack)
    assert float((orthogonal_directions(drawn, gradient) @ gradient / row["norm"] ** 2).abs().max()) < 1e-12


@pytest.mark.parametrize("init", ["default", "uniform"])
def test_the_papers_fallback_sends_the_raw_gradient_and_ours_never_does(init: str) -> None:
    learner, batches = lenet_learner(init)
    golden = GOLDEN["censor_raw_share"]
    share = raw_share(PaperCensor(), learner, batches, Seed(1))
    assert share == pytest.approx(golden["value"][init], abs=golden["tolerance"])
    assert raw_share(Censor(), learner, batches, Seed(1)) == 0
    # The released step of 1e-4 and projection have a first-order term, so some trial always descends: it hides the fallback.
    assert raw_share(ReleasedCensor(), learner, batches[:4], Seed(1)) == 0


def test_the_released_variant_leaks_the_label_and_ours_does_not() -> None:
    learner, batches = lenet_learner("uniform")
    steep = learner.replace(loss=lambda outputs, targets: 20 * loss_by_name("cross_entropy")(outputs, targets))
    found = {}
    for defense in (Censor(), ReleasedCensor()):
        angles = []
        for index, batch in enumerate(batches[:8]):
            view = ClientView(learner=steep, seed=Seed(index), weights=steep.weights, raw_batch=batch, batch=batch)
            gradient = steep.update(batch.inputs, batch.targets)
            sent, _ = defense.protect_update(Update(gradient, examples=1), view, {})
            angles.append(cosines(sent.weights, gradient)["linear.bias"])
        found[type(defense)] = sum(abs(angle) for angle in angles) / len(angles)
    assert found[Censor] < 1e-6
    assert found[ReleasedCensor] > 0.5


def observe_rounds(defense: Censor, batch: Batch, rounds: int) -> Observation:
    """Several rounds on the same data, the model standing still."""
    scene = Scene.of(defense)
    updates, payloads = [], []
    for index in range(rounds):
        payload = run_client(scene.learner, batch, defense, Seed(5), round_index=index).payload
        payloads.append(payload)
        updates.append(scene.deliver(defense, payload))
    return Observation(
        (scene.learner,) * rounds,
        tuple(updates),
        tuple(payloads),
        SHAPE,
        CLASSES,
        len(batch),
        ThreatModel(rounds=rounds),
        defense.adversary(),
    )


def test_the_attacker_finds_the_first_undefended_round() -> None:
    one = Batch(draw_batch(0).inputs[:1], draw_batch(0).targets[:1])
    observation = observe_rounds(Censor(active_rounds=2), one, 4)
    adversary = observation.adversary
    assert adversary.arrives(observation).least_protected_round == 2
    assert observation.clearest.update is observation.updates[2]
    assert adversary.arrives(observation).exact() == frozenset()
    assert adversary.arrives(observation.clearest).exact() == frozenset(observation.update.weights)
    assert recover_labels(observation, informed=True).tolist() == one.targets.tolist()
    # Nobody who does not know the defense knows which round it leaves out.
    unaware = observation.replace(threat=ThreatModel(rounds=4, knows=frozenset()))
    assert unaware.clearest is unaware


def test_defended_rounds_compare_two_numbers_per_tensor_and_others_every_entry() -> None:
    batch = draw_batch(0)
    observation = observe_rounds(Censor(active_rounds=1), batch, 2)
    adversary, learner = observation.adversary, observation.learner
    simulated = adversary.replay(learner, batch.inputs, batch.targets, {})
    first = observation.replace(updates=observation.updates[:1], learners=observation.learners[:1])
    defended = adversary.compare(adversary.evidence(first, 0), simulated, {})
    assert not any(v.any() for n, v in defended.observed.items() if n != "invariants")
    # Four of the tiny network's six tensors have more than one entry.
    assert defended.observed["invariants"].tolist() == pytest.approx([1, 0] * 4 + [2])
    assert torch.allclose(defended.simulated["invariants"], defended.observed["invariants"], atol=1e-5)
    open_round = adversary.compare(adversary.evidence(observation, 1), simulated, {})
    assert not open_round.observed["invariants"].any()
    assert all(torch.equal(v, open_round.observed[n]) for n, v in open_round.simulated.items())
    # Beside a round that tells everything the defended one is passed over, and leaves every objective at zero.
    passed_over = adversary.compare(adversary.evidence(observation, 0), simulated, {})
    assert not any(v.any() for side in (passed_over.simulated, passed_over.observed) for v in side.values())
    assert all(float(OBJECTIVES.get(name)(passed_over)) == 0 for name in OBJECTIVES.names())


@pytest.mark.parametrize(("init", "least"), [("default", 1.0), ("uniform", 0.5)])
def test_the_angle_of_the_last_bias_names_the_label(init: str, least: float) -> None:
    """The bias gradient is p - e_y and what is sent is orthogonal to it: read so, it names the class; as a gradient, never."""
    learner, batches = lenet_learner(init)
    right, naive = 0, 0
    for index, batch in enumerate(batches):
        view = ClientView(learner=learner, seed=Seed(index), weights=learner.weights, raw_batch=batch, batch=batch)
        gradient = learner.update(batch.inputs, batch.targets)
        update, _ = Censor(trials=2).protect_update(Update(gradient, examples=1), view, {})
        shape = tuple(batch.inputs.shape[1:])
        classes = int(gradient["linear.bias"].numel())
        observation = Observation((learner,), (update,), (), shape, classes, 1, ThreatModel(), Censor().adversary())
        right += recover_labels(observation, informed=True).tolist() == batch.targets.tolist()
        naive += recover_labels(observation).tolist() == batch.targets.tolist()
    assert right / len(batches) >= least
    assert naive / len(batches) <= 0.25
    whole = Censor(scope="whole").adversary()
    assert whole.arrives(observation).label_evidence is None


@pytest.mark.parametrize("scope", ["layer", "whole"])
def test_a_record_one_already_has_is_confirmed(scope: str) -> None:
    """Norms and angles hold to rounding at the truth only: 32 candidates, and the right one stands out a thousandfold."""
    defense = Censor(scope=scope, active_rounds=0)  # type: ignore[arg-type]
    scene = Scene.of(defense, dtype=torch.float64)
    truth = draw_batch(0, torch.float64)
    observation = scene.observe(defense, 1, truth)
    evidence = observation.adversary.evidence(observation, 0)

    def score(batch: Batch) -> float:
        return float(relative_residual(observation.adversary, scene.learner, evidence, batch.inputs, truth.targets, {}))

    others = [score(draw_batch(seed, torch.float64)) for seed in range(1, 33)]
    assert score(truth) < 1e-3 * min(others)


def test_an_aggregate_is_flagged() -> None:
    observation = observe_rounds(Censor(), draw_batch(0), 1)
    assert not observation.adversary.arrives(observation).incomplete
    many = observation.replace(threat=ThreatModel(clients=3))
    assert many.adversary.arrives(many).incomplete
    assert isinstance(many.adversary, CensorAdversary) and isinstance(many.adversary, OpenAdversary)


@pytest.mark.parametrize(
    "wrong", [{"trials": 0}, {"trials": 2.5}, {"active_rounds": -1}, {"scope": "layers"}, {"sampling": "uniform"}], ids=str
)
def test_settings_without_a_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="censor"):
        Censor(**wrong)

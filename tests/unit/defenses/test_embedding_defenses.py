"""Defenses of embeddings: what is sent, what the attacker makes of it, and where they may be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradveil.client.embedding import read_embedding, run_party
from gradveil.client.update import horizontal_fault, run_client
from gradveil.defenses import ClientView, Defense, build_defense
from gradveil.defenses.embedding_noise import EmbeddingNoise
from gradveil.defenses.embedding_pruning import EmbeddingPruning
from gradveil.defenses.invl.enp import InvLENP
from gradveil.errors import BadUpdate, ReplaceLayer, UsageError
from gradveil.learning import loss_by_name
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT, EmbeddingLearner
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, ThreatModel
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.testing.defenses_adversary import relative_residual
from gradveil.testing.defenses_scene import Scene

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_invl.json").read_text())
ALL = ["embedding_noise", "embedding_pruning", "embedding_dropout", "invl_enp", "invl_enp(basis='public')"]


class Stretch(nn.Module):
    """Multiplies every input value by a number of its own."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor(factors))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factors * inputs


class Bottom(nn.Module):
    """A convolution with ReLU: some entries of the embedding are zero by themselves."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3) if norm else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(inputs)))


def party(module: nn.Module, top: nn.Module | None = None, settings: TrainingSettings | None = None) -> EmbeddingLearner:
    return EmbeddingLearner.of_bottom(module, loss_by_name("cross_entropy"), settings, top=top)


def conv_party() -> EmbeddingLearner:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return party(Bottom()).to(torch.float64)


def pictures(count: int = 3) -> Batch:
    inputs = torch.rand((count, 1, 6, 6), generator=Seed(2).generator("x"), dtype=torch.float64)
    return Batch(inputs, torch.arange(count) % 2)


def sent(defense: Defense, own: EmbeddingLearner, data: Batch, seed: int = 1, public: Tensor | None = None) -> Tensor:
    return run_party(own, data, defense, Seed(seed), public=public).embedding


def observe(defense: Defense, own: EmbeddingLearner, data: Batch, public: Tensor | None = None) -> Observation:
    payload = run_party(own, data, defense, Seed(1), public=public).payload
    shape = tuple(data.inputs.shape[1:])
    update = read_embedding(payload, own, shape)
    return Observation((own,), (update,), (payload,), shape, 2, len(data), ThreatModel(), defense.adversary(), public=public)


def residual(seen: Observation, data: Batch) -> float:
    evidence = seen.adversary.evidence(seen, 0)
    return float(relative_residual(seen.adversary, seen.learner, evidence, data.inputs, data.targets, {}))


def test_noise_has_the_told_variance() -> None:
    own, data = (
        party(Stretch([1.0] * 50)),
        Batch(torch.rand((200, 50), generator=Seed(0).generator("x")), torch.zeros(200).long()),
    )
    for defense, variance in ((EmbeddingNoise(delta=0.7), 0.7), (EmbeddingNoise(delta=0.7, variance=False), 0.49)):
        assert float((sent(defense, own, data) - data.inputs).var()) == pytest.approx(variance, rel=0.03)


def test_guided_noise_goes_where_the_shares_say_and_nowhere_else() -> None:
    golden = GOLDEN["diagonal_embedding"]["value"]
    own = party(Stretch([float(each) for each in golden["diagonal"]]))
    data = Batch(torch.rand((1, 4), generator=Seed(0).generator("x")), torch.zeros(1).long())
    clean = own.embed(data.inputs)
    for defense in (InvLENP(delta=golden["delta"]), InvLENP(delta=golden["delta"], basis="public", refresh=10**6)):
        view = ClientView(learner=own, seed=Seed(0), batch=data, raw_batch=data, public=data.inputs)
        drawn: list[Tensor] = []
        state: Named = {}
        for draw in range(400):
            noisy, state = defense.protect_embedding(clean, view.replace(seed=Seed(draw)), state)
            drawn.append(noisy - clean)
        found = torch.cat(drawn).double().var(0)
        assert float(found[:2].max()) < 1e-10
        wanted = torch.tensor(golden["variances"][2:], dtype=torch.float64)
        assert torch.allclose(found[2:], wanted, rtol=0.2), found


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_pruning_keeps_the_largest_of_each_record(rate: float) -> None:
    own, data = party(Stretch([1.0] * 40)), Batch(torch.rand((5, 40), generator=Seed(0).generator("x")), torch.zeros(5).long())
    found = sent(EmbeddingPruning(rate=rate), own, data)
    for row, raw in zip(found, data.inputs, strict=True):
        kept = row != 0
        assert int(kept.sum()) == 40 - int(rate * 40) + (rate * 39 % 1 == 0)
        assert float(raw[kept].min()) > float(raw[~kept].max())
        assert torch.equal(row[kept], raw[kept])


@pytest.mark.parametrize(
    "spelling", ["embedding_pruning(rate=0.8)", "embedding_dropout(rate=0.8)", "embedding_dropout(rate=0.5, rescale=True)"]
)
def test_zeroed_entries_leave_nothing_over_at_the_truth(spelling: str) -> None:
    own, data = conv_party(), pictures()
    seen = observe(build_defense(spelling), own, data)
    assert residual(seen, data) < 1e-12
    assert residual(seen, data.replace(inputs=data.inputs.flip(0))) > 1e-3
    assert not seen.adversary.arrives(seen).incomplete


def test_a_pruned_zero_still_says_that_its_entry_is_small() -> None:
    own, data = conv_party(), pictures()
    seen = observe(EmbeddingPruning(rate=0.8), own, data)
    brighter = data.replace(inputs=data.inputs * 1.5)
    pruned = seen.adversary.evidence(seen, 0)
    masked = {EMBEDDING: own.embed(brighter.inputs) * pruned["mask/" + EMBEDDING]}
    dropped = float((masked[EMBEDDING] - seen.update.weights[EMBEDDING]).square().sum())
    both = seen.adversary.compare(pruned, own.update(brighter.inputs, brighter.targets), {}).residuals()[EMBEDDING]
    assert float(both.square().sum()) > dropped


def test_guided_noise_from_public_inputs_is_projected_out() -> None:
    own, data = conv_party(), pictures()
    public = torch.rand((6, 1, 6, 6), generator=Seed(8).generator("public"), dtype=torch.float64)
    seen = observe(InvLENP(delta=1.0, basis="public"), own, data, public)
    clean = own.embed(data.inputs)
    assert float((seen.update.weights[EMBEDDING] - clean).norm() / clean.norm()) > 0.5
    assert residual(seen, data) < 3e-5
    assert not seen.adversary.arrives(seen).incomplete
    guess = observe(InvLENP(delta=1.0), own, data, public)
    assert guess.adversary.arrives(guess).incomplete


@pytest.mark.parametrize("spelling", ALL)
def test_a_gradient_beside_the_embedding_is_not_compared_and_that_is_said(spelling: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own = party(Bottom(), top=nn.Sequential(nn.Flatten(), nn.Linear(108, 2))).to(torch.float64)
    data = pictures()
    seen = observe(build_defense(spelling), own, data, data.inputs)
    assert EMBEDDING_GRADIENT in seen.update.weights
    evidence = seen.adversary.evidence(seen, 0)
    compared = seen.adversary.compare(evidence, own.update(data.inputs, data.targets), {})
    assert list(compared.simulated) == [EMBEDDING]
    assert seen.adversary.arrives(seen).incomplete


@pytest.mark.parametrize("spelling", ALL)
def test_an_update_never_goes_out_unprotected(spelling: str) -> None:
    scene = Scene.of(build_defense("none"))
    for chained in (spelling, f"clipping(bound=1) + {spelling}"):
        assert horizontal_fault(build_defense(chained)) is not None
        with pytest.raises(UsageError, match="only vertical learning sends"):
            run_client(scene.learner, scene.batch, build_defense(chained), Seed(0))


@pytest.mark.parametrize("spelling", ALL)
def test_embeddings_that_are_not_finite_are_refused(spelling: str) -> None:
    own, data = conv_party(), pictures()
    view = ClientView(learner=own, seed=Seed(0), batch=data, raw_batch=data, public=data.inputs)
    with pytest.raises(BadUpdate, match="not finite"):
        build_defense(spelling).protect_embedding(torch.full((3, 4), torch.nan), view, {})


def test_batch_norm_on_the_batch_is_refused_in_one_sentence() -> None:
    own = party(Bottom(norm=True), settings=TrainingSettings(batch_norm="train")).to(torch.float64)
    with pytest.raises(ReplaceLayer, match="batch_norm = 'eval'"):
        sent(InvLENP(), own, pictures())


def test_guided_noise_on_data_follows_the_embedding_in_vertical_learning() -> None:
    own = party(Stretch([4.0, 3.0, 2.0, 0.1]))
    data = Batch(torch.full((1, 4), 0.5), torch.zeros(1).long())
    result = run_party(own, data, build_defense("invl_dnp(delta=1e-4)"), Seed(0))
    noise = (result.trained_batch.inputs - data.inputs)[0].abs()
    assert float(noise[3]) < 1e-7 < float(noise[:3].min())


def test_a_network_that_ignores_its_input_sends_its_embedding_as_it_is() -> None:
    own, data = party(Stretch([0.0] * 4)), Batch(torch.rand((2, 4), generator=Seed(0).generator("x")), torch.zeros(2).long())
    assert torch.equal(sent(InvLENP(), own, data), torch.zeros(2, 4))

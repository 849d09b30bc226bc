"""The honest client: what it sends is what plain PyTorch computes, and every hook is called at its station."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from gradveil.client.update import run_client
from gradveil.defenses import Chain, ClientView, Defense, DefenseCard, State, build_defense
from gradveil.defenses.clipping import Clipping
from gradveil.defenses.example_clipping import ExampleClipping
from gradveil.defenses.gaussian_noise import GaussianNoise
from gradveil.defenses.none import NoDefense
from gradveil.errors import BadUpdate, ReplaceLayer, UsageError
from gradveil.learning import Learner
from gradveil.learning.losses import cross_entropy
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.testing.defenses_scene import Scene


def send(learner: Learner, batch: Batch, defense: Defense | None = None) -> Named:
    defense = defense or NoDefense()
    return defense.decode(run_client(learner, batch, defense, Seed(1)).payload, ModelSpec.of(learner.model)).weights


@dataclass(frozen=True, kw_only=True)
class Diary(Defense):
    """Writes down, as state, what it was shown."""

    card: ClassVar[DefenseCard] = DefenseCard(name="diary", summary="For tests.")

    def prepare(self, data: Batch, view: ClientView) -> State:
        return {"prepared": torch.tensor(len(data))}

    def configure_training(self, settings: TrainingSettings, view: ClientView) -> TrainingSettings:
        return settings.replace(learning_rate=0.5)

    def protect_batch(self, batch: Batch, view: ClientView, state: State) -> tuple[Batch, State]:
        return batch.replace(inputs=batch.inputs * 0.5), state

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        assert view.batch is not None and view.raw_batch is not None and view.raw_gradient is not None
        assert torch.equal(view.batch.inputs, view.raw_batch.inputs * 0.5)
        assert view.learner.settings.learning_rate == 0.5
        moved = sum((value - view.learner.weights[name]).abs().sum() for name, value in view.weights.items())
        return gradient, {**state, f"moved {view.step}": torch.as_tensor(moved)}

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        return update, {**state, "round": torch.tensor(update.round), "examples": torch.tensor(update.examples)}


def test_hooks_see_their_station_and_state_is_carried_through() -> None:
    scene = Scene.of(Diary(), settings=TrainingSettings(shares="weights", local_steps=3))
    result = run_client(scene.learner, scene.batch, Diary(), Seed(1), round_index=5)
    state = {name: float(value) for name, value in result.state.items()}
    assert (state["prepared"], state["round"], state["examples"]) == (3.0, 5.0, 3.0)
    assert state["moved 0"] == 0.0
    assert 0 < state["moved 1"] < state["moved 2"]
    assert torch.equal(result.trained_batch.inputs, scene.batch.inputs * 0.5)
    assert (result.payload.round, result.payload.examples) == (5, 3)


def test_kept_state_is_handed_back_instead_of_preparing_again() -> None:
    scene = Scene.of(Diary())
    result = run_client(scene.learner, scene.batch, Diary(), Seed(1), state={"kept": torch.ones(())})
    assert "kept" in result.state
    assert "prepared" not in result.state


def reference(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, minibatches: list[list[int]]) -> Named:
    """Train with plain PyTorch and return global minus local weights."""
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    for chosen in minibatches:
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs[chosen]), batch.targets[chosen]).backward()
        optimizer.step()
    return {name: start[name] - value.detach() for name, value in model.named_parameters()}


def small_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4)).double()


def small_batch(examples: int = 5) -> Batch:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.rand((examples, 1, 8, 8), generator=generator, dtype=torch.float64)
    return Batch(inputs, torch.randint(4, (examples,), generator=generator))


ALL = [0, 1, 2, 3, 4]
MODES: tuple[Literal["train"], Literal["eval"]] = ("train", "eval")


@pytest.mark.parametrize(
    ("settings", "minibatches"),
    [
        (TrainingSettings(shares="weights", learning_rate=0.1), [ALL]),
        (TrainingSettings(shares="weights", learning_rate=0.1, local_steps=4), [ALL] * 4),
        (TrainingSettings(shares="weights", learning_rate=0.1, local_steps=4, momentum=0.9), [ALL] * 4),
        (TrainingSettings(shares="weights", learning_rate=0.01, local_steps=4, optimizer="adam"), [ALL] * 4),
        (TrainingSettings(shares="weights", learning_rate=0.1, local_steps=3, minibatch=2), [[0, 1], [2, 3], [4, 0]]),
        (TrainingSettings(shares="weights", learning_rate=0.1, epochs=2, minibatch=2), [[0, 1], [2, 3], [4]] * 2),
        (TrainingSettings(shares="weights", learning_rate=0.1, epochs=2, momentum=0.5), [ALL] * 2),
    ],
    ids=["one step", "steps", "momentum", "adam", "minibatches", "epochs of minibatches", "epochs"],
)
def test_local_training_equals_torch_optim(settings: TrainingSettings, minibatches: list[list[int]]) -> None:
    model, batch = small_model(), small_batch()
    learner = Learner.of(model, cross_entropy, settings)
    if settings.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    expected = reference(model, batch, optimizer, minibatches)
    sent = send(learner, batch)
    for name, value in expected.items():
        assert float((sent[name] - value).abs().max()) < 1e-6, name
        assert float(value.abs().max()) > 1e-4


def test_a_shared_gradient_is_the_gradient() -> None:
    model, batch = small_model(), small_batch()
    sent = send(Learner.of(model, cross_entropy), batch)
    cross_entropy(model(batch.inputs), batch.targets).backward()
    for name, value in model.named_parameters():
        assert value.grad is not None
        assert torch.allclose(sent[name], value.grad, atol=1e-12)


def test_per_example_hooks_leave_the_batch_gradient_when_nothing_is_clipped() -> None:
    batch = small_batch()
    learner = Learner.of(small_model(), cross_entropy, TrainingSettings(shares="weights", local_steps=2, learning_rate=0.1))
    plain, clipped = send(learner, batch), send(learner, batch, ExampleClipping(bound=1e6))
    chained = send(learner, batch, Chain(parts=(ExampleClipping(bound=1e6), NoDefense())))
    for name, value in plain.items():
        assert torch.allclose(clipped[name], value, atol=1e-12)
        assert torch.equal(clipped[name], chained[name])


def test_example_clipping_in_training_equals_clipping_by_hand() -> None:
    batch = small_batch()
    learner = Learner.of(small_model(), cross_entropy)
    total: Named = {name: torch.zeros_like(value) for name, value in learner.weights.items()}
    for index in range(len(batch)):
        one = learner.gradient(learner.weights, batch.inputs[index : index + 1], batch.targets[index : index + 1])
        length = sum(float(value.square().sum()) for value in one.values()) ** 0.5
        total = {name: total[name] + value * min(1.0, 0.5 / length) / len(batch) for name, value in one.items()}
    sent = send(learner, batch, ExampleClipping(bound=0.5))
    for name, value in total.items():
        assert torch.allclose(sent[name], value, atol=1e-12)


def test_the_same_seed_gives_the_same_bits_and_rounds_differ() -> None:
    scene = Scene.of(GaussianNoise())
    defense = build_defense("clipping(bound=1) + gaussian_noise(std=0.1)")

    def noise(seed: int, round_index: int) -> Tensor:
        payload = run_client(scene.learner, scene.batch, defense, Seed(seed), round_index=round_index).payload
        return payload.streams["weights"]["head.weight"]

    assert torch.equal(noise(1, 0), noise(1, 0))
    assert not torch.equal(noise(1, 0), noise(2, 0))
    assert not torch.equal(noise(1, 0), noise(1, 1))


def test_the_model_the_client_was_given_is_not_trained() -> None:
    model = small_model()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    learner = Learner.of(model, cross_entropy, TrainingSettings(shares="weights", local_steps=2))
    send(learner, small_batch())
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in learner.weights.items())


@dataclass(frozen=True, kw_only=True)
class Breaks(Defense):
    """Makes an infinity of the update."""

    card: ClassVar[DefenseCard] = DefenseCard(name="breaks", summary="For tests.")

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        return update.replace(weights={name: value / 0 for name, value in update.weights.items()}), state


def test_updates_that_are_not_finite_never_leave_the_client() -> None:
    scene = Scene.of(NoDefense())
    with pytest.raises(BadUpdate, match="the defended update"):
        send(scene.learner, scene.batch, Breaks())
    broken = scene.batch.replace(inputs=scene.batch.inputs * torch.nan)
    for defense in (NoDefense(), Clipping(), ExampleClipping()):
        with pytest.raises(BadUpdate, match="the client's update"):
            send(scene.learner, broken, defense)


def test_single_examples_need_a_model_that_does_not_mix_them() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4)).double()
    mixing, separate = (Learner.of(model, cross_entropy, TrainingSettings(batch_norm=mode)) for mode in MODES)
    with pytest.raises(ReplaceLayer, match="'2' is BatchNorm on the statistics of the batch"):
        send(mixing, small_batch(), ExampleClipping())
    send(mixing, small_batch(), Clipping())
    send(separate, small_batch(), ExampleClipping())


def test_a_whole_aggregate_is_not_one_client() -> None:
    scene = Scene.of(NoDefense(), settings=TrainingSettings(clients=3))
    with pytest.raises(UsageError, match="run_client runs one client"):
        send(scene.learner, scene.batch)


def test_noise_of_an_adapted_model_is_drawn_afresh_from_the_seed() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, inputs: Tensor, z: Tensor) -> Tensor:
            out: Tensor = self.layer(inputs + z)
            return out

    learner = Learner.of(Noisy(), cross_entropy).replace(noise={"z": torch.zeros(1, 4, 3)})
    batch = Batch(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    first, again, other = (run_client(learner, batch, NoDefense(), Seed(s)).payload.streams["weights"] for s in (1, 1, 2))
    assert torch.equal(first["layer.weight"], again["layer.weight"])
    assert not torch.equal(first["layer.weight"], other["layer.weight"])


def test_public_inputs_of_another_shape_are_one_sentence() -> None:
    scene = Scene.of(NoDefense())
    own = scene.batch.inputs.shape[1:]
    public = torch.zeros(4, own[0] + 2, *own[1:])
    with pytest.raises(UsageError, match=rf"^public inputs are {own[0] + 2} × .* and the client's records {own[0]} × .*$"):
        run_client(scene.learner, scene.batch, NoDefense(), Seed(0), public=public)
    assert run_client(scene.learner, scene.batch, NoDefense(), Seed(0), public=torch.zeros(4, *own)).payload is not None

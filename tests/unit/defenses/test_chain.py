"""Chains: order, state, randomness, granularity and the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from gradveil.defenses import (
    AdaptedModel,
    Chain,
    ClientView,
    Defense,
    DefenseCard,
    State,
    build_defense,
    chain,
    granularity_of,
    parts_of,
    spell_defense,
)
from gradveil.defenses.clipping import Clipping
from gradveil.defenses.example_clipping import ExampleClipping
from gradveil.defenses.gaussian_noise import GaussianNoise
from gradveil.defenses.none import NoDefense
from gradveil.defenses.pruning import Pruning
from gradveil.defenses.top_k import TopK
from gradveil.errors import DefenseOrder, UsageError
from gradveil.learning import Loss
from gradveil.records import Batch, Payload, Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.testing.defenses_scene import Scene
from gradveil.wire import SPARSE


def card(name: str) -> DefenseCard:
    return DefenseCard(name=name, summary="For tests.")


@dataclass(frozen=True, kw_only=True)
class Counts(Defense):
    """Counts its calls in its state, and adds ``add`` to everything."""

    card: ClassVar[DefenseCard] = card("counts")
    add: float = 1.0

    def prepare(self, data: Batch, view: ClientView) -> State:
        return {"calls": torch.zeros(())}

    def configure_training(self, settings: TrainingSettings, view: ClientView) -> TrainingSettings:
        return settings.replace(learning_rate=settings.learning_rate * 2)

    def protect_batch(self, batch: Batch, view: ClientView, state: State) -> tuple[Batch, State]:
        return batch, {"calls": state["calls"] + 1}

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        return {name: value + self.add for name, value in gradient.items()}, {"calls": state["calls"] + 1}

    def protect_embedding(self, embedding: Tensor, view: ClientView, state: State) -> tuple[Tensor, State]:
        return embedding + self.add, {"calls": state["calls"] + 1}

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        return update, {"calls": state["calls"] + 1}


@dataclass(frozen=True, kw_only=True)
class Doubles(Defense):
    """Doubles the gradient of each example."""

    card: ClassVar[DefenseCard] = card("doubles")
    granularity: ClassVar[Literal["batch", "example"]] = "example"

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        return {name: value * 2 for name, value in gradient.items()}, state


@dataclass(frozen=True, kw_only=True)
class Telegraph(Defense):
    """Has a wire format and aggregation weights of its own."""

    card: ClassVar[DefenseCard] = card("telegraph")

    def encode(self, update: Update, view: ClientView) -> Payload:
        return Payload(self.scheme, {}, update.examples)

    @property
    def scheme(self) -> str:
        return "telegraph-1"

    def layer_weights(self, payloads: Any) -> list[dict[str, float]]:
        return [{"w": 1.0} for _ in payloads]


def test_state_is_kept_apart_by_position() -> None:
    both = Chain(parts=(Counts(), NoDefense(), Counts(add=3.0)))
    scene = Scene.of(both, settings=TrainingSettings(shares="weights", local_steps=2))
    view = scene.view()
    state = both.prepare(scene.batch, view)
    assert sorted(state) == ["0/calls", "2/calls"]
    _, state = both.protect_batch(scene.batch, view, state)
    gradient, state = both.protect_gradient({"w": torch.zeros(2)}, view, state)
    embedding, state = both.protect_embedding(torch.zeros(2), view, state)
    _, state = both.protect_update(scene.update(), view, state)
    assert {name: float(value) for name, value in state.items()} == {"0/calls": 4.0, "2/calls": 4.0}
    assert gradient["w"].tolist() == embedding.tolist() == [4.0, 4.0]
    assert both.configure_training(TrainingSettings(learning_rate=0.1), view).learning_rate == pytest.approx(0.4)


def test_parts_act_in_the_order_given() -> None:
    clip_first, noise_first = (
        chain(Clipping(bound=0.01), GaussianNoise(std=1.0)),
        chain(GaussianNoise(std=1.0), Clipping(bound=0.01)),
    )
    scene = Scene.of(clip_first)
    length = [
        float(sum(v.square().sum() for v in scene.send(each).weights.values()) ** 0.5) for each in (clip_first, noise_first)
    ]
    assert length[0] > 1
    assert length[1] == pytest.approx(0.01, rel=1e-4)


def test_equal_parts_draw_different_noise() -> None:
    twice = Chain(parts=(GaussianNoise(std=1.0), GaussianNoise(std=1.0)))
    scene = Scene.of(twice)
    zeros = {"w": torch.zeros(50, 200)}
    once, both = (scene.release(each, zeros).weights["w"] for each in (GaussianNoise(std=1.0), twice))
    assert float((both - once).std()) == pytest.approx(1.0, rel=0.05)
    assert not torch.allclose(both, 2 * once)


def test_examples_are_averaged_once_before_the_first_part_that_sees_the_batch() -> None:
    per_example = {"w": torch.tensor([[1.0], [3.0]])}
    view = Scene.of(NoDefense()).view()
    for parts, expected in (
        ((Doubles(), Counts()), 5.0),
        ((Doubles(),), 4.0),
        ((Doubles(), Doubles(), Counts()), 9.0),
        ((GaussianNoise(std=0), Doubles()), 4.0),
    ):
        both = Chain(parts=parts)
        assert granularity_of(both) == "example"
        state = both.prepare(Scene.of(both).batch, view)
        assert both.protect_gradient(per_example, view, state)[0]["w"].tolist() == [expected]
    assert granularity_of(Chain(parts=(Counts(), Clipping()))) == "batch"


def test_a_part_that_needs_single_examples_must_come_first_and_the_message_shows_how() -> None:
    with pytest.raises(DefenseOrder, match=r"doubles needs per-example gradients, so it must come first: doubles \+ counts"):
        chain(Counts(), Doubles())
    with pytest.raises(DefenseOrder, match=r": doubles \+ example_clipping \+ counts \+ clipping$"):
        chain(Counts(), Doubles(), Clipping(), ExampleClipping())
    chain(Doubles(), ExampleClipping(), Counts(), Clipping())
    chain(Clipping(), ExampleClipping())


def test_one_wire_format_and_one_choice_of_weights() -> None:
    with pytest.raises(DefenseOrder, match="only one wire format"):
        chain(Pruning(), Telegraph())
    with pytest.raises(DefenseOrder, match="aggregation weights, not telegraph and telegraph"):
        chain(Telegraph(), Telegraph())
    with pytest.raises(DefenseOrder, match="at least one defense"):
        chain()
    both = chain(Pruning(rate=0.5), GaussianNoise(std=0), TopK(keep=0.1))
    assert both.scheme == SPARSE
    assert chain(Clipping(), GaussianNoise()).scheme == NoDefense().scheme
    assert chain(Clipping(), Telegraph()).layer_weights([Payload("x", {}, 1)]) == [{"w": 1.0}]
    assert chain(Clipping(), GaussianNoise()).layer_weights([]) is None


def test_chains_flatten_and_one_alone_stays_alone() -> None:
    a, b, c = Clipping(), GaussianNoise(), Pruning()
    assert chain(a) is a
    assert parts_of(chain(chain(a, b), c)) == parts_of(chain(a, chain(b, c))) == (a, b, c)
    assert parts_of(a) == (a,)
    assert chain(a, b).stations() == ("protect_update",)


@pytest.mark.parametrize(
    "spelling",
    [
        "none",
        "clipping(bound=0.5) + gaussian_noise(std=0.1)",
        "example_clipping(scope='layer') + pruning + laplace_noise(scale=1e+20)",
    ],
)
def test_chains_are_spelt_and_read_back(spelling: str) -> None:
    built = build_defense(spelling)
    assert build_defense(spell_defense(built)) == built


@pytest.mark.parametrize(
    "spelling", ["", "clipping + ", "cliping", "clipping(bond=1)", "clipping(1)", "none + (", "clipping(bound=-1)"]
)
def test_bad_spellings_are_refused(spelling: str) -> None:
    with pytest.raises(UsageError):
        build_defense(spelling)


class Noisy(nn.Module):
    """Adds its noise to what it wraps."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name

    def forward(self, inputs: Tensor, **noise: Tensor) -> Tensor:
        own = noise.pop(self.name)
        out: Tensor = self.inner(inputs, **noise)
        return out + own


@dataclass(frozen=True, kw_only=True)
class Adapts(Defense):
    """Wraps model and loss."""

    card: ClassVar[DefenseCard] = card("adapts")
    key: str = "a"

    def adapt_model(self, model: nn.Module) -> AdaptedModel:
        def adapt(loss: Loss) -> Loss:
            return lambda outputs, targets: loss(outputs, targets) * 10 + 1

        return AdaptedModel(Noisy(model, self.key), adapt, {self.key: (2,)})


def test_models_losses_and_noise_are_adapted_in_turn() -> None:
    adapted = chain(Adapts(key="a"), Clipping(), Adapts(key="b")).adapt_model(nn.Identity())
    assert adapted.noise_shapes == {"a": (2,), "b": (2,)}
    assert adapted.model(torch.zeros(2), a=torch.ones(2), b=torch.ones(2)).tolist() == [2.0, 2.0]
    assert adapted.adapt_loss is not None
    assert float(adapted.adapt_loss(lambda outputs, targets: outputs)(torch.tensor(1.0), torch.tensor(0))) == 111.0


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("pruning + ", "the chain 'pruning \\+ ' has an empty part"),
        ("+ pruning", "has an empty part"),
        ("pruning(rate=0.5) + + clipping", "has an empty part"),
        ("pruning:ladder", "'pruning:ladder' stands for several strengths.*`gradveil show pruning`"),
        ("clipping + gaussian_noise(std=1):ladder", "`gradveil show gaussian_noise`"),
    ],
)
def test_a_chain_that_cannot_be_built_says_what_to_write(spelling: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build_defense(spelling)

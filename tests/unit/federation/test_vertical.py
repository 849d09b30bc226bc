"""Parties, a top model, and training that equals centralised training of the same joined model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradveil.client.embedding import read_embedding, run_party, vertical_fault
from gradveil.data import Columns, Dataset, Division, LeftRight, TopBottom, Whole
from gradveil.defenses import build_defense
from gradveil.defenses.base import ClientView, Defense, DefenseCard, State
from gradveil.errors import BadUpdate, ReplaceLayer, UsageError
from gradveil.federation.parties import JoinedModel, build_parties
from gradveil.federation.vertical import VerticalFederation, VerticalState
from gradveil.learning import EmbeddingLearner, loss_by_name
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT
from gradveil.models import build_model, split_model
from gradveil.randomness import Seed
from gradveil.records import Batch, Payload
from gradveil.study.local_training import TrainingSettings
from tests.unit.federation.small import shapes

LOSS = loss_by_name("cross_entropy")
DATA = shapes(30)


def parties(spelling: str = "lenet", cut: str = "cut2", division: Division | None = None, data: Dataset = DATA) -> JoinedModel:
    return build_parties(spelling, cut, division or LeftRight(), input_shape=data.input_shape, classes=data.classes, seed=Seed(5))


def table(count: int = 30) -> Dataset:
    data = shapes(count)
    return Dataset("table", data.inputs.flatten(1), data.targets, data.classes, data.class_names, data.records)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("spelling", "cut", "division", "data"),
    [
        ("lenet", "cut2", LeftRight(), DATA),
        ("lenet", "cut1", TopBottom(), DATA),
        ("resnet20(norm='group')", "cut1", Whole(), DATA),
        ("mlp(hidden=(8, 6))", "cut1", Columns(parties=3), table()),
    ],
)
def test_training_equals_centralised_training_of_the_joined_model(
    spelling: str, cut: str, division: Division, data: Dataset, optimizer: Literal["sgd", "adam"]
) -> None:
    model = parties(spelling, cut, division, data).double()
    central = copy.deepcopy(model)
    settings = TrainingSettings(optimizer=optimizer, learning_rate=0.1 if optimizer == "sgd" else 1e-3, shares="weights")
    federation = VerticalFederation.of(model, LOSS, settings, seed=Seed(9))
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    stepper = make(central.parameters(), lr=settings.learning_rate)
    state = federation.start()
    steps = 5 if "resnet" in spelling else 12
    for step in range(steps):
        rows = torch.arange(6) + 4 * (step % 6)
        inputs, targets = data.inputs[rows].double(), data.targets[rows]
        state = federation.step(state, inputs, targets)
        stepper.zero_grad()
        nn.functional.cross_entropy(central(inputs), targets).backward()
        stepper.step()
    for own, bottom in zip(state.bottoms, central.bottoms, strict=True):
        for name, value in bottom.named_parameters():
            assert torch.allclose(own[name], value, atol=1e-6), name
    for name, value in central.top.named_parameters():
        assert torch.allclose(state.top[name], value, atol=1e-6), name
    assert torch.allclose(federation.predict(state, data.inputs[:5].double()), central(data.inputs[:5].double()), atol=1e-6)


def test_training_learns() -> None:
    federation = VerticalFederation.of(parties("lenet(activation='relu')"), LOSS, TrainingSettings(learning_rate=0.1))
    test = shapes(60, seed=7)
    before = federation.accuracy(federation.start(), test)
    state = federation.train(federation.start(), DATA, steps=150, minibatch=16)
    assert before < 0.7
    assert federation.accuracy(state, test) > 0.95


def test_a_stopped_training_goes_on_to_the_same_bits(tmp_path: object) -> None:
    settings = TrainingSettings(optimizer="adam", learning_rate=0.01, shares="weights")
    federation = VerticalFederation.of(parties(), LOSS, settings, defense=build_defense("data_noise(std=0.1)"), seed=Seed(3))
    through = federation.train(federation.start(), DATA, steps=6, minibatch=4)
    half = federation.train(federation.start(), DATA, steps=3, minibatch=4)
    file = f"{tmp_path}/state.safetensors"
    named = {f"bottom{i}/{n}": v for i, own in enumerate(half.bottoms) for n, v in own.items()}
    named |= {f"top/{n}": v for n, v in half.top.items()}
    named |= {f"memory{i}/{k}/{n}": v for i, m in enumerate(half.memories) for k, own in m.items() for n, v in own.items()}
    save_file(named, file)
    read = load_file(file)
    revived = VerticalState(
        bottoms=tuple({n: read[f"bottom{i}/{n}"] for n in own} for i, own in enumerate(half.bottoms)),
        top={n: read[f"top/{n}"] for n in half.top},
        memories=tuple(
            {k: {n: read[f"memory{i}/{k}/{n}"] for n in own} for k, own in m.items()} for i, m in enumerate(half.memories)
        ),
        defenses=half.defenses,
        step=half.step,
    )
    resumed = federation.train(revived, DATA, steps=6, minibatch=4)
    assert resumed.step == through.step == 6
    for one, other in zip((*resumed.bottoms, resumed.top), (*through.bottoms, through.top), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_what_crosses_the_wire_is_counted() -> None:
    federation = VerticalFederation.of(parties(cut="cut1"), LOSS)
    state = federation.step(federation.start(), DATA.inputs[:5], DATA.targets[:5])
    embeddings = 5 * 12 * 4 * 4 * 4  # records, channels, height, width of both halves, bytes
    assert (state.bytes_up, state.bytes_down) == (embeddings, embeddings)


@dataclass(frozen=True, kw_only=True)
class Halved(Defense):
    """Sends half of the embedding; counts its batches."""

    card: ClassVar[DefenseCard] = DefenseCard(name="halved", summary="Test.")

    def protect_embedding(self, embedding: Tensor, view: ClientView, state: State) -> tuple[Tensor, State]:
        assert isinstance(view.learner, EmbeddingLearner) and view.batch is not None
        assert torch.equal(view.learner.embed(view.batch.inputs), embedding)
        return embedding / 2, {"batches": state.get("batches", torch.zeros(())) + 1}


def test_every_party_protects_its_embedding_and_keeps_state() -> None:
    model = parties()
    federation = VerticalFederation.of(model, LOSS, defense=Halved())
    state = federation.step(federation.step(federation.start(), DATA.inputs[:4], DATA.targets[:4]), DATA.inputs, DATA.targets)
    assert [float(own["batches"]) for own in state.defenses if own] == [2.0, 2.0]
    first = federation.start()
    with torch.no_grad():
        expected = model.top(torch.cat([embedding / 2 for embedding in model.embed(DATA.inputs[:4])], dim=-1))
    assert torch.allclose(federation.predict(first, DATA.inputs[:4]), expected, atol=1e-6)


def test_whole_parts_start_from_the_weights_of_the_whole_model() -> None:
    whole = build_model("lenet", input_shape=DATA.input_shape, classes=DATA.classes, seed=Seed(5))
    alone = parties(division=Whole())
    with torch.no_grad():
        assert torch.equal(alone(DATA.inputs), whole(DATA.inputs))
    first, second = parties().bottoms
    bottom = split_model(whole, "cut2")[0]
    assert torch.equal(first.get_parameter("conv1.weight"), bottom.get_parameter("conv1.weight"))
    assert not torch.equal(second.get_parameter("conv1.weight"), bottom.get_parameter("conv1.weight"))


def test_embedding_is_read_only_as_it_must_be() -> None:
    learner = EmbeddingLearner.of_bottom(parties().bottoms[0], LOSS)
    part = DATA.inputs[:2, ..., :4]
    result = run_party(learner, Batch(part, DATA.targets[:2]), build_defense("none"), Seed(0))
    assert torch.equal(read_embedding(result.payload, learner, (1, 8, 4)).weights[EMBEDDING], result.embedding)
    for wrong in (result.embedding[:1], result.embedding.double(), result.embedding * float("nan")):
        with pytest.raises(BadUpdate):
            read_embedding(Payload("dense-1", {"weights": {EMBEDDING: wrong}}, 2), learner, (1, 8, 4))


def test_gradient_is_seen_only_with_a_top_model() -> None:
    model = parties(division=Whole())
    batch = Batch(DATA.inputs[:2], DATA.targets[:2])
    learner = EmbeddingLearner.of_bottom(model.bottoms[0], LOSS, top=model.top)
    result = run_party(learner, batch, Halved(), Seed(0))
    read = read_embedding(result.payload, learner, DATA.input_shape).weights
    sent = result.embedding.clone().requires_grad_()
    nn.functional.cross_entropy(model.top(sent), batch.targets).backward()
    assert sent.grad is not None
    assert torch.allclose(read[EMBEDDING_GRADIENT], sent.grad, atol=1e-7), "the gradient is taken at the embedding as sent"


def test_what_does_not_fit_vertical_learning_gets_one_sentence() -> None:
    assert vertical_fault(build_defense("none")) is None
    assert vertical_fault(build_defense("data_noise(std=0.1)")) is None
    assert "only embeddings leave" in (vertical_fault(build_defense("gaussian_noise(std=0.1)")) or "")
    assert "has its own" in (vertical_fault(build_defense("precode")) or "")
    assert "training loss" in (vertical_fault(build_defense("shadow")) or "")
    assert "acts at protect_gradient" in (vertical_fault(build_defense("refiner")) or ""), "half a defense is none"
    with pytest.raises(UsageError, match="only embeddings leave"):
        VerticalFederation.of(parties(), LOSS, defense=build_defense("data_noise(std=0.1) + pruning(rate=0.9)"))
    with pytest.raises(UsageError, match="one batch at a time"):
        VerticalFederation.of(parties(), LOSS, TrainingSettings(shares="weights", local_steps=2))
    with pytest.raises(ReplaceLayer, match="GroupNorm"):
        model = parties("resnet20", "cut1")
        VerticalFederation.of(model, LOSS, TrainingSettings(batch_norm="train"))
    with pytest.raises(UsageError, match="do not fit the top model"):
        parties("lenet", "cut1", LeftRight(parties=5))
    with pytest.raises(UsageError, match="cannot be taken"):
        VerticalFederation.of(parties(), LOSS).train(VerticalFederation.of(parties(), LOSS).start(), DATA, steps=1, minibatch=0)


def test_weights_of_the_whole_model_reach_every_party_that_can_use_them(tmp_path: object) -> None:
    whole = build_model("lenet", input_shape=DATA.input_shape, classes=DATA.classes, seed=Seed(8))
    file = f"{tmp_path}/whole.safetensors"
    save_file(whole.state_dict(), file)
    common = {"input_shape": DATA.input_shape, "classes": DATA.classes, "seed": Seed(5), "weights": file}
    for bottom in build_parties("lenet", "cut2", LeftRight(), **common).bottoms:  # type: ignore[arg-type]
        assert torch.equal(bottom.get_parameter("conv2.weight"), whole.get_parameter("conv2.weight"))
    dense = build_model("mlp(hidden=8)", input_shape=DATA.input_shape, classes=DATA.classes, seed=Seed(8))
    save_file(dense.state_dict(), file)
    with pytest.raises(UsageError, match="do not fit a part"):
        build_parties("mlp(hidden=8)", "cut1", LeftRight(), **common)  # type: ignore[arg-type]


def test_a_defense_that_looks_at_labels_is_refused_since_a_party_has_none() -> None:
    fault = vertical_fault(build_defense("invl_dnp(basis='class')"))
    assert fault is not None and "label owner" in fault
    assert vertical_fault(build_defense("invl_dnp")) is None


def test_two_predictions_do_not_share_their_noise() -> None:
    """Noise that is used twice cancels in the difference of two embeddings."""
    federation = VerticalFederation.of(parties(), LOSS, defense=build_defense("embedding_noise"), seed=Seed(4))
    state, inputs = federation.start(), DATA.inputs[:2]
    first, again, later = (federation.predict(state, inputs, occasion=each) for each in (0, 0, 1))
    assert torch.equal(first, again) and not torch.allclose(first, later)
    twice = Dataset(
        "twice", inputs.repeat(2, 1, 1, 1), DATA.targets[:2].repeat(2), DATA.classes, DATA.class_names, DATA.records[:4]
    )
    seen: list[Tensor] = []

    class Watched(VerticalFederation):
        def predict(self, state: VerticalState, inputs: Tensor, *, occasion: int = 0) -> Tensor:
            seen.append(super().predict(state, inputs, occasion=occasion))
            return seen[-1]

    watched = Watched(federation.parties, federation.top, federation.division, federation.settings, federation.defense, Seed(4))
    watched.accuracy(state, twice, at_once=2)
    assert len(seen) == 2 and not torch.allclose(seen[0], seen[1])

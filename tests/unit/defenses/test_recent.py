"""What many ask for in a row is kept by content: never by who asks, and never with the model it was made from."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from gradveil.defenses.parts.recent import Recent, content_of
from gradveil.learning import Learner
from gradveil.learning.losses import cross_entropy, mean_squared_error
from gradveil.models.structure import structure_of
from gradveil.tensors import digest


def model(activation: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), activation or nn.ReLU(), nn.Linear(4, 2))


def test_equal_content_is_made_once_and_only_the_last_few_are_kept() -> None:
    made: list[str] = []
    recent: Recent[str] = Recent(2)

    def get(key: str) -> str:
        def make() -> str:
            made.append(key)
            return key

        return recent.get(key, make)

    assert [get(key) for key in "aabab"] == list("aabab") and made == ["a", "b"]
    assert get("c") == "c" and get("b") == "b" and made == ["a", "b", "c"]
    assert get("a") == "a" and made == ["a", "b", "c", "a"]
    recent.clear()
    assert get("a") == "a" and len(made) == 5


def test_content_is_that_of_bits_shapes_and_precision() -> None:
    value = torch.arange(6.0)
    assert content_of(value) == content_of(value.clone()) != content_of(value.flip(0))
    assert content_of(value) != content_of(value.reshape(2, 3)) and content_of(value) != content_of(value.double())
    assert content_of(None) == "" and len({digest({"a": value}), digest({"b": value}), digest({}, {"a": value})}) == 3
    assert digest({"a": torch.tensor(1.0), "b": torch.empty(0), "c": torch.tensor(True)})


def test_a_learner_is_known_by_structure_tensors_and_loss() -> None:
    first, again = (Learner.of(model(), cross_entropy) for _ in range(2))
    assert first is not again and first.content == again.content
    moved = first.replace(weights={name: value + 1 for name, value in first.weights.items()})
    others = [moved, Learner.of(model(nn.Tanh()), cross_entropy), Learner.of(model(), mean_squared_error)]
    assert len({first.content, *(other.content for other in others)}) == 4
    assert first.replace(settings=first.settings.replace(learning_rate=0.5)).content == first.content


def test_functions_and_flags_of_a_module_are_part_of_its_structure() -> None:
    class Switch(nn.Module):
        def __init__(self, on: bool, act: object) -> None:
            super().__init__()
            self.on, self.act = on, act

    kinds = [Switch(True, torch.relu), Switch(False, torch.relu), Switch(True, torch.tanh)]
    assert len({structure_of(kind) for kind in kinds}) == 3


def test_a_model_does_not_live_on_for_having_been_asked_about() -> None:
    recent: Recent[int] = Recent(2)
    learner = Learner.of(model(), cross_entropy)
    gone = weakref.ref(learner.model)
    recent.get(learner.content, lambda: 1)
    del learner
    gc.collect()
    assert gone() is None

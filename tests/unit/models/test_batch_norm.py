from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from gradveil.errors import UsageError
from gradveil.models import batch_norm_layers, batch_norm_mode, build_model, set_batch_norm_mode
from gradveil.randomness import Seed


@pytest.fixture
def model() -> nn.Module:
    made = build_model("resnet20", input_shape=(3, 8, 8), classes=4, seed=Seed(0))
    generator = Seed(1).generator("statistics")
    for layer in batch_norm_layers(made).values():
        assert isinstance(layer, nn.BatchNorm2d)
        assert layer.running_mean is not None
        layer.running_mean.normal_(generator=generator)
    return made


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.rand(6, 3, 8, 8, generator=Seed(2).generator("inputs"))


def test_layers_are_found_by_name(model: nn.Module) -> None:
    names = list(batch_norm_layers(model))
    assert len(names) == 19
    assert names[0] == "bn1"
    assert "layer3.2.bn2" in names


def test_eval_uses_running_statistics(model: nn.Module, inputs: torch.Tensor) -> None:
    model.train()
    chosen = set_batch_norm_mode(model, "eval")
    assert not chosen.training
    assert torch.allclose(chosen(inputs)[:2], chosen(inputs[:2]), atol=1e-5)
    assert model.training


def test_train_uses_the_batch_and_tracks_nothing(model: nn.Module, inputs: torch.Tensor) -> None:
    chosen = set_batch_norm_mode(model, "train")
    assert not torch.allclose(chosen(inputs)[:2], chosen(inputs[:2]), atol=1e-3)
    reference = build_model("resnet20", input_shape=(3, 8, 8), classes=4, seed=Seed(0)).train()
    assert torch.allclose(chosen(inputs), reference(inputs), atol=1e-5)
    assert dict(chosen.named_buffers()) == {}
    assert not any(layer.training for layer in chosen.modules())


def test_the_model_given_is_not_changed(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    set_batch_norm_mode(model, "train")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert batch_norm_mode(model) == "eval"


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_both_modes_work_under_vmap(model: nn.Module, inputs: torch.Tensor, mode: str) -> None:
    chosen = set_batch_norm_mode(model, mode)
    weights: dict[str, torch.Tensor] = dict(chosen.named_parameters())
    buffers = dict(chosen.named_buffers())
    batches = inputs.reshape(2, 3, 3, 8, 8)
    batched = vmap(lambda x: functional_call(chosen, (weights, buffers), (x,)))(batches)
    assert torch.allclose(batched, torch.stack([chosen(batch) for batch in batches]), atol=1e-5)


def test_the_mode_can_be_read_off(model: nn.Module) -> None:
    assert batch_norm_mode(set_batch_norm_mode(model, "train")) == "train"
    assert batch_norm_mode(set_batch_norm_mode(model, "eval")) == "eval"
    assert batch_norm_mode(nn.Linear(2, 2)) == "none"
    assert batch_norm_mode(nn.Sequential(nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2))) == "mixed"


def test_bad_modes_are_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError, match="did you mean 'eval'"):
        set_batch_norm_mode(model, "evil")
    with pytest.raises(UsageError, match="'0' has no running statistics"):
        set_batch_norm_mode(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)), "eval")

"""The U-Net, the probe for dense outputs, and the losses for masks."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from gradveil.errors import UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model, parameter_count
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.randomness import Seed
from gradveil.study.local_training import TrainingSettings


def build(spelling: str = "unet(width=4)", side: int = 8) -> torch.nn.Module:
    return build_model(spelling, input_shape=(1, side, side), classes=1, seed=Seed(0), dense=True)


def test_one_logit_per_pixel() -> None:
    model = build_model("unet", input_shape=(3, 32, 48), classes=2, seed=Seed(0), dense=True)
    assert model(torch.rand(2, 3, 32, 48)).shape == (2, 2, 32, 48)
    assert parameter_count(build("unet", 32)) == 29_937


def test_every_pixel_sees_its_surroundings() -> None:
    """The shortcut brings detail and the lower levels bring context: one output depends on pixels several steps away."""
    model, images = build(side=16), torch.rand(1, 1, 16, 16).requires_grad_()
    (slope,) = torch.autograd.grad(model(images)[0, 0, 8, 8], images)
    assert (slope[0, 0] != 0).sum() > 100


def test_norms_and_settings() -> None:
    assert len(batch_norm_layers(build("unet(width=4, norm='batch')"))) == 10
    assert not batch_norm_layers(build())
    for spelling, words in (
        ("unet(levels=4)", "multiples of 16"),
        ("unet(width=0)", "at least 1"),
        ("unet(norm='x')", "no norm"),
    ):
        with pytest.raises(UsageError, match=words):
            build(spelling)


def test_the_probe_tells_masks_from_classes() -> None:
    with pytest.raises(UsageError, match=r"\(2, 1, 8, 8\) is needed; the data has masks, so use unet"):
        build("mlp")
    with pytest.raises(UsageError, match=r"the data has classes, so use a model that gives one row"):
        build_model("unet", input_shape=(1, 8, 8), classes=10, seed=Seed(0))


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "dice"])
def test_single_examples_add_up_and_can_be_differentiated_again(loss: str) -> None:
    learner = Learner.of(build("unet(width=2, activation='tanh')"), loss_by_name(loss), TrainingSettings()).to(torch.float64)
    images = torch.rand((3, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masks = (images > 0.5).double()
    whole = learner.update(images, masks)
    parts = learner.per_example_gradients(learner.weights, images, masks)
    assert all(torch.allclose(parts[name].mean(0), value, atol=1e-12) for name, value in whole.items())

    def size(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([v.square().sum() for v in learner.update(x, masks).values()]).sum()

    slope = vmap(grad(size))(torch.stack([images, images.flip(0)]))
    assert bool(torch.isfinite(slope).all()) and float(slope.abs().max()) > 0


def test_dice_loss_by_hand() -> None:
    truth = torch.tensor([[[[1.0, 0.0]]], [[[0.0, 0.0]]]])
    sure = torch.tensor([[[[50.0, -50.0]]], [[[-50.0, -50.0]]]])
    dice = loss_by_name("dice")
    assert dice(sure, truth).item() == pytest.approx(0, abs=1e-6)
    # All wrong: 1 - 1 / (1 + 1 + 1) and 1 - 1 / (2 + 0 + 1).
    assert dice(-sure, truth).item() == pytest.approx(2 / 3, abs=1e-6)
    assert dice(torch.zeros(1, 2), torch.tensor([1])).item() == pytest.approx(1 - 2 / 3), "class numbers are read as one-hot"


def test_cross_entropy_refuses_a_single_output() -> None:
    """It would be zero whatever the model says, and training would silently do nothing."""
    with pytest.raises(UsageError, match="binary_cross_entropy"):
        loss_by_name("cross_entropy")(torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 4))

"""Attention can be attacked: its gradients are differentiated again, mapped, and the choice of kernels is put back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradveil.cli import main
from gradveil.learning import Learner
from gradveil.learning.attention import plain_attention
from gradveil.learning.autograd import one_at_a_time
from gradveil.learning.dropout import with_dropout
from gradveil.learning.losses import cross_entropy
from gradveil.study.local_training import TrainingSettings

SHAPE = (1, 8, 8)
LAYERS = ("encoder", "attention", "function")


class Vision(nn.Module):
    """A vision transformer of one block, made of stock parts: patches of 4 × 4, a place for each, and the mean of all tokens."""

    def __init__(self, kind: str = "encoder", classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.kind, self.patches, self.head = kind, nn.Conv2d(1, width, 4, 4), nn.Linear(width, classes)
        self.place = nn.Parameter(torch.randn(1, 4, width) * 0.1)
        if kind == "encoder":
            layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
            self.inside: nn.Module = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        elif kind == "attention":
            self.inside = nn.MultiheadAttention(width, 2, batch_first=True)
        else:
            self.inside = nn.Linear(width, 3 * width)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.patches(inputs).flatten(2).transpose(1, 2) + self.place
        if self.kind == "encoder":
            tokens = self.inside(tokens)
        elif self.kind == "attention":
            tokens = tokens + self.inside(tokens, tokens, tokens, need_weights=False)[0]
        else:
            parts = self.inside(tokens).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            tokens = tokens + F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        logits: Tensor = self.head(tokens.mean(1))
        return logits


def make_vision(classes: int) -> nn.Module:
    return Vision(classes=classes)


def learner(kind: str) -> Learner:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return Learner.of(Vision(kind), cross_entropy)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.rand((2, 3, *SHAPE), generator=torch.Generator().manual_seed(1)), torch.tensor([1, 2, 3])


@pytest.mark.parametrize("kind", LAYERS)
def test_what_an_attacker_descends_has_a_slope(kind: str) -> None:
    one, (many, labels) = learner(kind), inputs()

    def energy(x: Tensor) -> Tensor:
        return torch.stack([value.square().sum() for value in one.update(x, labels).values()]).sum()

    slope = grad(energy)(many[0])
    step = torch.zeros_like(many[0])
    step[0, 0, 2, 3] = 1e-2
    numeric = (energy(many[0] + step) - energy(many[0] - step)) / 2e-2
    assert float(slope[0, 0, 2, 3]) == pytest.approx(float(numeric), rel=2e-2)
    assert torch.allclose(vmap(grad(energy))(many)[0], slope, atol=1e-5)
    leaf, alone = many[0].clone().requires_grad_(), one_at_a_time(one)
    total = torch.stack([value.square().sum() for value in alone.update(leaf, labels).values()]).sum()
    assert torch.allclose(torch.autograd.grad(total, leaf)[0], slope, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_function_is_that_of_torch(kind: str) -> None:
    one, (many, _) = learner(kind), inputs()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = Vision(kind).eval()
    with torch.no_grad():
        assert torch.allclose(one.logits(one.weights, many[0]), model(many[0]), atol=1e-5)


def test_the_choice_of_kernels_is_put_back() -> None:
    def chosen() -> tuple[bool, ...]:
        cuda = torch.backends.cuda
        return torch.backends.mha.get_fastpath_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()

    before = chosen()
    with plain_attention():
        assert chosen() == (False, False, True)
    assert chosen() == before
    with pytest.raises(ZeroDivisionError), plain_attention():
        raise ZeroDivisionError
    assert chosen() == before
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        many, labels = inputs()
        learner("function").update(many[0], labels)
        assert torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()


def test_dropout_of_a_stock_encoder_is_handed_in() -> None:
    settings = TrainingSettings(dropout=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        one = with_dropout(Learner.of(Vision("encoder"), cross_entropy, settings), SHAPE)
    assert len(one.noise) == 3 and all(value.shape[2] == 4 for value in one.noise.values()), "one entry for each token"
    (many, labels), off = inputs(), learner("encoder")
    noise = {name: torch.full((3, *value.shape[2:]), -1.0) for name, value in one.noise.items()}
    dropped = one.gradient(one.weights, many[0], labels, noise)
    assert float(dropped["inside.layers.0.linear2.weight"].abs().max()) == 0, "what is dropped trains nothing before it"
    plain, silent = off.gradient(off.weights, many[0], labels), one.gradient(one.weights, many[0], labels, one.zero_noise(3))
    assert all(torch.allclose(value, silent[name], atol=1e-6) for name, value in plain.items())


def test_a_stock_transformer_is_audited_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--data", "digits", "--model", f"{__file__}:make_vision", "--defense", "none", "--records", "2", "--device", "cpu"]
    more = [
        "--ensemble",
        "inverting_gradients(steps=3)",
        "--risk",
        "off",
        "--lists",
        "off",
        "--workers",
        "1",
        "--local-epochs",
        "1",
        "--dropout",
    ]
    assert main(["audit", *told, *more, "--out", str(tmp_path / "out"), "--quiet", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert cell["n"] == 2 if "n" in cell else cell
    checks = json.loads(next((tmp_path / "out" / "cells").glob("*[!g].json")).read_text())["checks"]
    assert {check["name"]: check["level"] for check in checks}["gradient_alive"] == "ok"

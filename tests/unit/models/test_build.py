from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.models import build_model, load_weights, parameter_count
from gradveil.randomness import Seed

SHAPE = (3, 8, 8)

FACTORIES = """
import random
import numpy as np
import torch
from torch import nn

torch.rand(3)

def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))

def told(input_shape, classes, *, width=5):
    c, h, w = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(c * h * w, width), nn.ReLU(), nn.Linear(width, classes))

def timm_like(num_classes=1000, **more):
    assert set(more) <= {"depth"}
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))

def noisy():
    model = plain()
    with torch.no_grad():
        model[1].bias.fill_(random.random() + float(np.random.rand()))
    return model

def failing():
    raise KeyError("weights of 2019")

def number():
    return 3

def narrow(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, classes - 1))

def wrong_input():
    return nn.Sequential(nn.Flatten(), nn.Linear(100, 4))

def empty():
    return nn.Flatten()

def spoiled():
    model = plain()
    with torch.no_grad():
        model[1].bias.fill_(float("nan"))
    return model

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(192, 4)
    def forward(self, x):
        return self.linear(x.flatten(1)), x

made = plain()
constant = 7
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "zoo_of_tests.py"
    path.write_text(FACTORIES)
    return path


def build(spelling: str, seed: int = 0, weights: Path | None = None, classes: int = 4) -> nn.Module:
    return build_model(spelling, input_shape=SHAPE, classes=classes, seed=Seed(seed), weights=str(weights) if weights else None)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_seed_decides_the_weights_and_globals_are_left_alone(module: Path) -> None:
    states = torch.random.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    for spelling in ("lenet", f"{module}:noisy"):
        assert torch.equal(flat(build(spelling, 1)), flat(build(spelling, 1)))
        assert not torch.equal(flat(build(spelling, 1)), flat(build(spelling, 2)))
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert str(states[1]) == str(np.random.get_state(legacy=False))
    assert states[2] == random.getstate()


def test_globals_are_left_alone_when_a_factory_fails(module: Path) -> None:
    state = torch.random.get_rng_state()
    with pytest.raises(UsageError):
        build(f"{module}:failing")
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("plain", 192 * 4 + 4),
        ("told", 192 * 5 + 5 + 24),
        ("told(width=2)", 192 * 2 + 2 + 12),
        ("timm_like", 192 * 4 + 4),
        ("timm_like(depth=3)", 192 * 4 + 4),
    ],
)
def test_a_model_of_yours_from_a_file(module: Path, name: str, count: int) -> None:
    model = build(f"{module}:{name}")
    assert parameter_count(model) == count
    assert not model.training


def test_a_model_of_yours_from_a_module(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(module.parent))
    assert parameter_count(build("zoo_of_tests:plain")) == 772


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan", "did you mean 'plain'"),
        ("told(widht=2)", "did you mean 'width'"),
        ("failing", "KeyError"),
        ("number", "returns int, not a torch.nn.Module"),
        ("narrow", "set its last layer to 4 outputs"),
        ("wrong_input", "fails on inputs of shape (2, 3, 8, 8)"),
        ("empty", "has no parameters"),
        ("spoiled", "not finite"),
        ("Pair", "returns tuple, not one tensor"),
        ("made", "give a function that makes it"),
        ("constant", "is int, not a function"),
    ],
)
def test_models_that_do_not_work_are_refused_in_one_sentence(module: Path, name: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(f"{module}:{name}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_import_is_refused(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("def factory(:\n")
    with pytest.raises(UsageError, match="SyntaxError"):
        build(f"{tmp_path / 'half.py'}:factory")
    with pytest.raises(UsageError, match="there is no file"):
        build(f"{tmp_path / 'gone.py'}:factory")
    with pytest.raises(UsageError, match="cannot import"):
        build("no_such_module_anywhere:factory")


# --- weights --------------------------------------------------------------------------------------------------------------


def test_weights_from_safetensors_and_state_dicts(tmp_path: Path) -> None:
    donor = build("lenet", 1)
    state = donor.state_dict()
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}, "epoch": 3}, tmp_path / "nested.pth")
    save_file({name: value.half() for name, value in state.items()}, tmp_path / "half.safetensors")
    for name in ("w.safetensors", "w.pt", "nested.pth"):
        assert torch.equal(flat(build("lenet", 2, tmp_path / name)), flat(donor))
    half = build("lenet", 2, tmp_path / "half.safetensors")
    assert flat(half).dtype == torch.float32
    assert torch.allclose(flat(half), flat(donor), atol=1e-3)


def test_batch_norm_counters_may_be_missing(tmp_path: Path) -> None:
    state = {k: v for k, v in build("resnet20", 1).state_dict().items() if not k.endswith("num_batches_tracked")}
    save_file(state, tmp_path / "w.safetensors")
    assert parameter_count(build("resnet20", 2, tmp_path / "w.safetensors")) > 0


def spoil(state: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    if case == "missing":
        return {name: value for name, value in state.items() if not name.startswith("conv")}
    if case == "renamed":
        return {name.replace("linear.bias", "linear.bais"): value for name, value in state.items()}
    if case == "extra":
        return {**state, "head.weight": torch.zeros(1)}
    if case == "shape":
        return {**state, "linear.bias": torch.zeros(7)}
    return {**state, "linear.bias": torch.full_like(state["linear.bias"], float("nan"))}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", ["missing conv1.weight, conv1.bias, conv2.weight and 3 more"]),
        ("renamed", ["missing linear.bias; did you mean 'linear.bais'?", "unexpected linear.bais"]),
        ("extra", ["unexpected head.weight"]),
        ("shape", ["linear.bias is (7,), not (4,)"]),
        ("nan", ["not finite in 'linear.bias'"]),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, case: str, words: list[str]) -> None:
    save_file(spoil(build("lenet").state_dict(), case), tmp_path / "w.safetensors")
    with pytest.raises(UsageError) as caught:
        build("lenet", weights=tmp_path / "w.safetensors")
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refused_weights_leave_the_model_as_it_was(tmp_path: Path) -> None:
    model = build("lenet")
    before = flat(model).clone()
    save_file(spoil(model.state_dict(), "shape"), tmp_path / "w.safetensors")
    with pytest.raises(UsageError):
        load_weights(model, str(tmp_path / "w.safetensors"))
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("w.safetensors", b"junk", "as safetensors"),
        ("w.pt", b"junk", "cannot read"),
        ("w.onnx", b"junk", "give a .safetensors file"),
        ("gone.safetensors", None, "there is no weights file"),
        ("list.pt", [1, 2], "holds no state dict"),
        ("empty.pt", {}, "holds no state dict"),
        ("model.pt", nn.Linear(2, 2), "holds more than tensors"),
    ],
)
def test_unreadable_weights_are_refused(tmp_path: Path, name: str, content: Any, words: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with pytest.raises(UsageError) as caught:
        build("lenet", weights=tmp_path / name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

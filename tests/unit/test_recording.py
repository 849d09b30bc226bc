"""Replays of a recorded function are the function; on a CPU nothing is recorded."""

from __future__ import annotations

import pytest
import torch

from gradveil.recording import Recorded
from gradveil.tensors import Named

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="recordings need a CUDA device")),
]


def step(given: Named) -> Named:
    with torch.enable_grad():
        leaf = given["weight"].detach().requires_grad_()
        loss = ((given["inputs"] @ leaf).tanh() ** 2).sum()
    (slope,) = torch.autograd.grad(loss, leaf)
    return {"slope": slope, "count": given["count"] + 1}


def draw(seed: int, rows: int, device: str) -> Named:
    generator = torch.Generator().manual_seed(seed)
    given = {"weight": torch.randn(4, 3, generator=generator), "inputs": torch.randn(rows, 4, generator=generator)}
    return {name: value.to(device) for name, value in given.items()} | {"count": torch.tensor(seed, device=device)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("patience", [0, 2])
def test_replays_follow_what_they_are_given(device: str, patience: int) -> None:
    recorded = Recorded(step, patience=patience)
    kept = []
    for seed in range(8):
        given = draw(seed, 5 + seed % 2, device)
        found = recorded(given)
        kept.append((found, step(given)))
    for found, expected in kept:  # also after later replays: results must not share memory
        assert torch.allclose(found["slope"], expected["slope"], atol=1e-6) and torch.equal(found["count"], expected["count"])


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_changed_in_place_is_noticed(device: str) -> None:
    recorded, given = Recorded(step), draw(0, 5, device)
    first = recorded(given)["slope"]
    given["weight"].mul_(2)
    second = recorded(given)["slope"]
    assert torch.allclose(second, step(given)["slope"], atol=1e-6) and not torch.allclose(first, second)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="recordings need a CUDA device")
def test_what_waits_for_the_gpu_runs_kernel_by_kernel() -> None:
    def waits(given: Named) -> Named:
        return {"twice": given["weight"] * (2 if float(given["weight"].sum()) > 0 else 3)}

    recorded = Recorded(waits)
    with pytest.warns(RuntimeWarning, match="kernel by kernel"):
        recorded({"weight": torch.ones(3, device="cuda")})
    assert torch.equal(recorded({"weight": -torch.ones(3, device="cuda")})["twice"], torch.full((3,), -3.0, device="cuda"))

"""What tests share: a folder with a user's own model, weights, defense and data; a stand-in for CUDA."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gradveil import recording
from tests.unit.fake_cuda import FakeCuda

NET = """
from torch import nn


def make(classes, width=12):
    return nn.Sequential(nn.Flatten(1), nn.Linear(64, width), nn.Sigmoid(), nn.Linear(width, classes))
"""
DEFENSE = """
from dataclasses import dataclass
from typing import ClassVar

from gradveil.defenses import Defense, DefenseCard


@dataclass(frozen=True, kw_only=True)
class Shrinking(Defense):
    card: ClassVar[DefenseCard] = DefenseCard(name="shrinking", summary="Scales the update.", acts_on=("update",))
    factor: float = 0.5

    def protect_update(self, update, view, state):
        return update.replace(weights={name: self.factor * value for name, value in update.weights.items()}), state
"""
RECORDS = 120


def pictures() -> np.ndarray:
    return np.random.default_rng(0).random((RECORDS, 8, 8), dtype=np.float32)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, and the test runs there: own_net.py, own_net.safetensors, own_defense.py, own.npz with patients."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)  # an earlier test's folder had one of that name
    Path("own_net.py").write_text(NET)
    Path("own_defense.py").write_text(DEFENSE)
    np.savez("own.npz", x=pictures(), y=np.arange(RECORDS) % 5, patient=np.array([f"Ms {i // 3}" for i in range(RECORDS)]))
    shapes = {"1.weight": (12, 64), "1.bias": (12,), "3.weight": (5, 12), "3.bias": (5,)}
    generator = torch.Generator().manual_seed(5)
    save_file({name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}, "own_net.safetensors")
    return tmp_path


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Let recordings be made on a CPU, of functions that the stand-in watches."""
    fake = FakeCuda()
    monkeypatch.setattr(recording, "RECORDABLE", ("cpu",))
    monkeypatch.setattr(recording, "_keep", fake.keep)
    monkeypatch.setattr(recording, "torch", SimpleNamespace(**{**vars(torch), "cuda": fake}))
    return fake

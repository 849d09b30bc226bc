"""What all tests share: one thread each, quiet hypothesis, and fixtures that say why they skip."""

from __future__ import annotations

import importlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from gradveil.registry import Registry, indexed
from gradveil.testing.index import REGISTRIES
from tests import time_limit

# Workers share few cores; more threads than cores is many times slower, and sums in another order are other bits.
torch.set_num_threads(1)

# Drawn inputs are the same on every run, and a busy machine is no failure.
settings.register_profile("gradveil", deadline=None, derandomize=True)
settings.load_profile("gradveil")

SHELVES: list[Registry[Any, Any]] = [getattr(importlib.import_module(home), name) for home, name in REGISTRIES.values()]
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure(config: pytest.Config) -> None:
    """Hold every test to the limit of a quick one."""
    if not config.pluginmanager.is_registered(time_limit):
        config.pluginmanager.register(time_limit)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip marked tests, with the reason, where the machine lacks what they need."""
    if item.get_closest_marker("browser") and not shutil.which("chromium"):
        pytest.skip("chromium is not installed")
    if item.get_closest_marker("shared") and not SHARED_DATA.is_dir():
        pytest.skip("there is no ../shared/data beside the checkout")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of standard datasets beside the checkout."""
    if not SHARED_DATA.is_dir():
        pytest.skip("there is no ../shared/data beside the checkout")
    return SHARED_DATA


@pytest.fixture(autouse=True)
def visitors_leave() -> Iterator[None]:
    """Take methods that a test registered off the registries again: a later test counts what the package has."""
    before = [set(registry._entries) for registry in SHELVES]
    yield
    for registry, names in zip(SHELVES, before, strict=True):
        for name in set(registry._entries) - names:
            if name not in indexed(registry.kind):
                del registry._entries[name]


def global_states() -> dict[str, object]:
    """Return the states of the global generators in a form that can be compared."""
    numpy_state = np.random.get_state(legacy=False)["state"]
    return {
        "torch": bytes(torch.get_rng_state().tolist()),
        "numpy": (numpy_state["key"].tobytes(), numpy_state["pos"]),
        "random": random.getstate(),
    }


@pytest.fixture
def untouched_global_rng() -> Iterator[None]:
    """Fail the test if it moved a global generator of torch, numpy or random."""
    before = global_states()
    yield
    moved = [name for name, state in global_states().items() if state != before[name]]
    assert not moved, f"the global generator was used: {', '.join(moved)}"

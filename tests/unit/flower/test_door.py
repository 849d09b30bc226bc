"""The door of the bridge: a client loads nothing that it does not need, and without Flower it says so in one sentence.

The second needs no Flower to be tested.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

LOADED = """
import sys
from gradveil.flower import protect, train
found = [name for name in sys.modules if name.split(".")[0] == "gradveil"]
heavy = {"gradveil.federation", "gradveil.attacks", "gradveil.data", "gradveil.cli", "ray", "scipy", "sklearn", "skimage"}
print(len(found), *sorted(heavy & set(sys.modules)))
"""
MOST = 75


def test_a_client_loads_nothing_of_the_servers_nor_of_attacks() -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'gradveil[flower]'")
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    count, *heavy = done.stdout.split()
    assert heavy == [] and int(count) <= MOST


def test_without_flower_the_door_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gradveil.flower", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"needs Flower, which is not installed; install it with: pip install 'gradveil\[flower\]'"
    ):
        importlib.import_module("gradveil.flower")


def test_a_misspelt_name_is_answered_with_the_right_ones() -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'gradveil[flower]'")
    with pytest.raises(AttributeError, match="no attribute 'protct'; it has Veiled, protect, train"):
        _ = importlib.import_module("gradveil.flower").protct

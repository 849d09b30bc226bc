"""What docs/flower.md shows runs, and what it lists is what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'gradveil[flower]'")

from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from gradveil.defenses import DEFENSES
from gradveil.flower import Veiled
from gradveil.flower.veiled import AVERAGING, COMPARING
from tests.unit.flower.stage import batch_of, built, in_a_task, net

__all__ = ["in_a_task"]

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "flower.md").read_text(encoding="utf-8")
A_FUNCTION = "\ndef train(message, context):\n    return message\n"


def blocks() -> list[str]:
    found = re.findall(r"(?:^    .*\n(?:^\n(?=    ))?)+", PAGE, flags=re.MULTILINE)
    return [re.sub(r"^    ", "", each, flags=re.MULTILINE).strip() for each in found]


def test_every_block_of_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_HOME", str(tmp_path))
    names: dict[str, Any] = {"app": ClientApp(), "Net": net, "FedAvg": FedAvg, "data": lambda context: batch_of(0)}
    ran = 0
    for block in blocks():
        if block.startswith("python "):
            continue
        names["app"] = ClientApp()
        exec(block + (A_FUNCTION if block.splitlines()[-1].startswith("@") else ""), names)
        ran += 1
    assert ran >= 5 and isinstance(names["strategy"], Veiled)


def test_the_page_names_every_defense_that_a_mod_carries_out_and_every_strategy() -> None:
    listed = PAGE[PAGE.index("carries out the defenses") : PAGE.index("and chains")]
    from_a_mod = {
        name for name in DEFENSES.names() if not built(name).needs() and built(name).stations() != ("protect_embedding",)
    }
    assert set(re.findall(r"`(\w+)`", listed)) == from_a_mod
    assert all(kind.__name__ in PAGE for kind in (*AVERAGING, *COMPARING))

"""A killed cell goes on behind the last attacker that ended, and ends with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradveil.attacks import base
from gradveil.audit import cell as measure
from gradveil.audit.cell import run_cell
from gradveil.records import Reconstruction
from gradveil.storage.partial import PartialWork
from gradveil.storage.run_folder import Store
from gradveil.study.codec import encode
from tests.unit.audit.small import CELL, digits

SMALL = CELL.replace(ensemble="quick-4", records=2, steps=3, defense="gaussian_noise(std=0.01)", risk="off")
KEY = "0123456789abcdef"


def test_what_is_put_aside_comes_back_bit_by_bit(tmp_path: Path) -> None:
    batch = torch.rand((3, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    one = Reconstruction(
        batch[1:2],
        torch.tensor([3]),
        "some",
        1,
        "informed",
        2,
        {"a/b": batch[0]},
        None,
        float("nan"),
        1e-300,
        float("inf"),
        7,
        "x",
    )
    bare = Reconstruction(batch[:1], torch.tensor([[0.5, 0.5]]), "other", unfinished=batch[2:], oracle_labels=True)
    PartialWork(tmp_path / "work").put(4, [one, bare])
    found = PartialWork(tmp_path / "work").take(4)
    assert found is not None
    for before, after in zip((one, bare), found, strict=True):
        for name in ("inputs", "targets", "unfinished"):
            left, right = getattr(before, name), getattr(after, name)
            assert (left is None and right is None) or (left.dtype == right.dtype and torch.equal(left, right))
        assert repr(
            (before.recipe, before.stance, before.first_loss, before.best_loss, before.gradient_norm, before.status)
        ) == repr((after.recipe, after.stance, after.first_loss, after.best_loss, after.gradient_norm, after.status))
        assert before.variables.keys() == after.variables.keys() and before.oracle_labels == after.oracle_labels
        assert (before.target, before.restart, before.steps) == (after.target, after.restart, after.steps)
    assert PartialWork(tmp_path / "work").take(0) is None


def test_pictures_in_another_order_of_memory_are_kept_too(tmp_path: Path) -> None:
    picture = torch.rand((1, 3, 4, 4)).to(memory_format=torch.channels_last)
    PartialWork(tmp_path).put(0, [Reconstruction(picture, torch.tensor([3]), "some")], 2.5)
    partial = PartialWork(tmp_path)
    found = partial.take(0)
    assert found is not None and torch.equal(found[0].inputs, picture) and partial.seconds == 2.5


def test_what_cannot_be_kept_costs_only_the_resumption(tmp_path: Path) -> None:
    odd = Reconstruction(torch.rand((1, 1, 2, 2)), torch.tensor([3]), "some", first_loss=torch.tensor(1.0))  # type: ignore[arg-type]
    PartialWork(tmp_path).put(0, [odd])
    assert PartialWork(tmp_path).take(0) is None


def test_shelves_of_another_plan_do_not_stay(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for key in (KEY, "f" * 16):
        PartialWork(store.partial_folder(key)).put(0, [Reconstruction(torch.rand((1, 1, 2, 2)), torch.tensor([3]), "some")])
    store.clear_shelves({KEY})
    assert [path.name for path in (tmp_path / "cells").iterdir()] == [f"{KEY}.work"]


@pytest.mark.parametrize("content", [b"", b"half a file", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_a_damaged_file_is_no_find(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "00.safetensors").write_bytes(content)
    assert PartialWork(tmp_path).take(0) is None


def test_a_cell_killed_between_attackers_ends_with_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    whole = run_cell(SMALL, digits(), key=KEY, report=lambda *each: told.append(each))
    store = Store(tmp_path)
    launched: list[str] = []
    genuine = base.launch

    def launch(attack: object, *rest: object) -> list[Reconstruction]:
        launched.append(str(attack))
        if len(launched) == 3:
            raise KeyboardInterrupt
        return genuine(attack, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(measure, "launch", launch)
    with pytest.raises(KeyboardInterrupt):
        run_cell(SMALL, digits(), key=KEY, work=store.partial_folder(KEY))
    assert len(list(store.partial_folder(KEY).iterdir())) == 2
    steps: list[tuple[int, int]] = []
    again = run_cell(SMALL, digits(), key=KEY, work=store.partial_folder(KEY), report=lambda *each: steps.append(each))
    assert len(set(launched)) < len(launched), "the attacker that was cut ran again"
    assert launched.count(launched[0]) == launched.count(launched[1]) == 1, "those that had ended did not"
    assert encode(again.result) == encode(whole.result)
    assert steps[-1][1] < told[-1][1], "what was read is no work of this run"
    assert again.result.timing.attack_steps == whole.result.timing.attack_steps, "but of the cell"
    store.write_cell(again.result, {})
    assert not store.partial_folder(KEY).exists()

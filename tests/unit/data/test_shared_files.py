"""The readers on real files; skipped where the folder beside the checkout is absent."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from gradveil.data import ByOwner, load_data
from gradveil.randomness import Seed

SHARED = Path(__file__).parents[4] / "shared" / "data"

pytestmark = [pytest.mark.shared, pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")]


def test_cifar10_is_channels_last_and_balanced() -> None:
    data = load_data(str(SHARED / "cifar10_12k.npz"), split="test")
    assert data.input_shape == (3, 32, 32)
    assert data.counts() == [200] * 10


def test_mnist_has_539_writers() -> None:
    data = load_data(str(SHARED / "mnist_with_writers.npz"))
    assert data.input_shape == (1, 28, 28)
    assert data.owners is not None
    assert len(set(data.owners)) == 539
    split = ByOwner(min_size=20).split(data, 196, Seed(0))
    assert min(len(part) for part in split) >= 20


def test_har_needs_minmax_and_knows_its_subjects() -> None:
    data = load_data(str(SHARED / "har_windows128.npz"), scale="minmax")
    assert data.input_shape == (6, 128)
    assert "SITTING_DOWN" in data.class_names
    assert len(set(data.owners or ())) == 23


def test_pneumonia_has_medmnist_names() -> None:
    assert len(load_data(str(SHARED / "pneumoniamnist.npz"))) == 4708
    assert len(load_data(str(SHARED / "pneumoniamnist.npz"), split="val")) == 524


def test_chest_pictures_with_csv(tmp_path: Path) -> None:
    with zipfile.ZipFile(SHARED / "covid_cxr_224.zip") as archive:
        archive.extractall(tmp_path)
    data = load_data(str(tmp_path), label_column="finding", limit=16, colour=False)
    assert data.input_shape == (1, 224, 224)
    assert data.owners is not None
    assert data.classes > 2


def test_class_folders_behind_splits(tmp_path: Path) -> None:
    with zipfile.ZipFile(SHARED / "tinyimagenet_20c.zip") as archive:
        by_folder: dict[str, list[str]] = {}
        for name in (name for name in archive.namelist() if name.endswith(".JPEG")):
            by_folder.setdefault(name.rpartition("/")[0], []).append(name)
        archive.extractall(tmp_path, [name for names in by_folder.values() for name in names[:4]])
    train, val = load_data(str(tmp_path), limit=40), load_data(str(tmp_path), split="val")
    assert train.input_shape == val.input_shape == (3, 64, 64)
    assert train.counts() == [2] * 20
    assert train.class_names == val.class_names

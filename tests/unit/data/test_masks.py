"""Masks as targets: how they are read, what is refused, and the built-in pictures that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
import skimage.filters
import torch

from gradveil.data import PARTITIONS, foreground, load_data
from gradveil.data.masks import otsu_threshold
from gradveil.errors import UsageError
from gradveil.randomness import Seed

# Held as Any: scikit-image has annotations on some functions only.
REFERENCE: Any = skimage.filters.threshold_otsu
PICTURES: Any = skimage.data


def save(path: Path, **arrays: np.ndarray[Any, Any]) -> str:
    np.savez(path / "scans.npz", **arrays)  # type: ignore[arg-type]
    return str(path / "scans.npz")


def pictures(count: int = 6, side: int = 8) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, side, side), dtype=np.uint8)
    return images, images > 100


@pytest.mark.parametrize("form", ["bool", "byte", "0-255", "float", "channel first", "channel last"])
@pytest.mark.parametrize("name", ["masks", "y", "train_masks"])
def test_masks_of_every_form_are_read(tmp_path: Path, form: str, name: str) -> None:
    images, mask = pictures()
    stored = {
        "bool": mask,
        "byte": mask.astype(np.uint8),
        "0-255": mask.astype(np.uint8) * 255,
        "float": mask.astype(np.float64),
        "channel first": mask[:, None],
        "channel last": mask[..., None],
    }[form]
    data = load_data(save(tmp_path, **{"train_images" if name.startswith("train") else "images": images, name: stored}))
    assert data.dense and data.classes == 1 and data.counts() == [6]
    assert data.targets.shape == (6, 1, 8, 8) and data.targets.dtype == torch.float32
    assert torch.equal(data.targets[:, 0].bool(), torch.from_numpy(mask))
    assert data.take([2, 0]).targets.shape == (2, 1, 8, 8)


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        (np.full((6, 8, 8), 7), "give 0 for background"),
        (np.zeros((6, 8, 8)), "nothing to learn"),
        (np.eye(8)[None].repeat(5, 0), "5 labels"),
        (np.eye(4)[None].repeat(6, 0), "as high and as wide"),
        (np.zeros((6, 8, 8, 3)), "without colours"),
        (np.array([[["a"]]] * 6), "give 0 for background"),
    ],
)
def test_masks_that_cannot_be_used_are_refused(tmp_path: Path, masks: np.ndarray[Any, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_data(save(tmp_path, images=pictures()[0], masks=masks))


def test_labels_win_over_masks(tmp_path: Path) -> None:
    images, masks = pictures()
    path = save(tmp_path, images=images, masks=masks, labels=np.arange(6) % 2)
    assert not load_data(path).dense
    assert load_data(path, label_column="masks").dense


def test_otsu_against_scikit_image() -> None:
    for picture in (PICTURES.coins(), PICTURES.camera(), np.random.default_rng(1).random((40, 40))):
        grey = picture / np.max(picture)
        # The two choose the same bin; scikit-image counts 8-bit values one by one, which moves the centre by less than a bin.
        assert abs(otsu_threshold(grey) - float(REFERENCE(grey, nbins=256))) < 1e-9
    assert otsu_threshold(np.full((3, 3), 0.25)) == 0.25


def test_foreground_is_what_is_bright() -> None:
    images = torch.zeros(2, 3, 4, 4)
    images[0, :, 1:3, 1:3] = 0.9
    masks = foreground(images)
    assert masks.shape == (2, 1, 4, 4)
    assert masks[0].sum() == 4 and masks[1].sum() == 0


def test_segments_are_pictures_with_masks() -> None:
    data = load_data("segments")
    assert (len(data), data.input_shape, data.dense, data.builtin) == (244, (1, 32, 32), True, True)
    shares = data.targets.mean((1, 2, 3))
    assert bool(((shares >= 0.05) & (shares <= 0.95)).all()), "a constant mask teaches nothing"
    coins, masks = data.inputs[:99], data.targets[:99]
    inside, outside = ((coins * each).sum() / each.sum() for each in (masks, 1 - masks))
    assert inside > outside + 0.2, "coins are brighter than their ground"
    assert len(set(data.records)) == 244 and data.digest() == load_data("segments").digest()


@pytest.mark.parametrize("partition", ["dirichlet(alpha=1.0)", "class_balance"])
def test_masks_cannot_be_dealt_out_by_class(partition: str) -> None:
    with pytest.raises(UsageError, match="no classes to divide by"):
        PARTITIONS.build(partition).split(load_data("segments"), 3, Seed(0))

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from gradveil.data import load_data, load_digits, load_photos, public_images
from gradveil.data.photos import PHOTOGRAPHS, PUBLIC_PHOTOGRAPH, shipped_file
from gradveil.errors import UsageError
from gradveil.randomness import Seed

SHAPES = [(3, 32, 32), (1, 28, 28), (3, 224, 224), (1, 600, 20), (4, 7, 9), (6, 128), (30,), (1,), (2, 3, 4, 5)]


def test_photos_have_nine_classes_and_five_hundred_patches() -> None:
    photos = load_photos()
    assert photos.input_shape == (3, 32, 32)
    assert photos.classes == 9
    assert len(photos) >= 500
    assert min(photos.counts()) >= 20


def test_no_patch_is_flat_or_twice_there() -> None:
    inputs = load_photos().inputs
    assert float(inputs.std((2, 3)).mean(1).min()) > 0.045
    assert len(torch.unique(inputs.flatten(1), dim=0)) == len(inputs)


def test_patches_are_the_photograph() -> None:
    photos = load_photos()
    record = photos.records.index("cat-00-00")
    pixels = torch.from_numpy(PHOTOGRAPHS[1].read().copy()).permute(2, 0, 1)  # (3, 300, 451), not reduced
    top, left = (300 % 32) // 2, (451 % 32) // 2
    assert torch.equal((photos.inputs[record] * 255).round().byte(), pixels[:, top : top + 32, left : left + 32])


def test_every_photograph_ships_inside_a_package() -> None:
    for photograph in (*PHOTOGRAPHS, PUBLIC_PHOTOGRAPH):
        with Image.open(shipped_file(photograph.package, photograph.path)) as image:
            assert image.mode == "RGB"
        assert photograph.credit
        assert photograph.licence


def test_credits_are_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    for photograph in (*PHOTOGRAPHS, PUBLIC_PHOTOGRAPH):
        row = next(line for line in page.splitlines() if line.startswith(f"| {photograph.name} "))
        assert photograph.licence in row


def test_missing_package_is_named() -> None:
    with pytest.raises(UsageError, match="pip install no_such_package_here"):
        shipped_file("no_such_package_here", "data/x.png")
    with pytest.raises(UsageError, match="scikit-image"):
        shipped_file("skimage", "data/gone.png")


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    reference = datasets.load_digits()
    ours = load_digits()
    assert torch.equal(ours.inputs[:, 0] * 16, torch.from_numpy(reference.images).float())
    assert ours.targets.tolist() == reference.target.tolist()


def test_loading_imports_neither_package() -> None:
    code = (
        "import sys; from gradveil.data import load_data; load_data('photos'); load_data('digits'); "
        "assert not {'skimage', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("shape", SHAPES)
def test_public_images_fit_any_shape(shape: tuple[int, ...]) -> None:
    images = public_images(shape, 5, Seed(3))
    assert images.shape == (5, *shape)
    assert images.dtype == torch.float32
    assert bool(torch.isfinite(images).all())
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1


def test_public_images_follow_the_seed_alone() -> None:
    state = torch.random.get_rng_state()
    first = public_images((3, 32, 32), 4, Seed(1))
    assert torch.equal(first, public_images((3, 32, 32), 4, Seed(1)))
    assert not torch.equal(first, public_images((3, 32, 32), 4, Seed(2)))
    assert torch.equal(first[:2], public_images((3, 32, 32), 2, Seed(1)))
    assert torch.equal(state, torch.random.get_rng_state())


def test_public_images_are_pictures_and_not_audited_ones() -> None:
    images, photos = public_images((3, 32, 32), 32, Seed(0)), load_photos().inputs
    assert float(images.std((2, 3)).mean(1).median()) > 0.05
    nearest = torch.cdist(images.flatten(1), photos.flatten(1)).min(1).values
    assert float(nearest.min()) > 1


def test_public_grey_images_use_luma() -> None:
    grey = public_images((1, 16, 16), 3, Seed(5))
    colour = public_images((3, 16, 16), 3, Seed(5))
    luma = (colour * torch.tensor([0.299, 0.587, 0.114])[None, :, None, None]).sum(1, keepdim=True)
    assert torch.allclose(grey, luma, atol=1e-5)


@pytest.mark.parametrize(("shape", "count"), [((3, 32, 32), 0), ((), 2), ((3, 0, 4), 2)])
def test_public_images_refuse_nothing(shape: tuple[int, ...], count: int) -> None:
    with pytest.raises(UsageError, match="at least one"):
        public_images(shape, count, Seed(0))


def test_limit_of_built_in_data_is_spread_over_classes() -> None:
    few = load_data("photos", limit=40)
    assert len(few) == 40
    assert min(few.counts()) >= 1

"""Reading pictures to train on, and changing them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.errors import UsageError
from gradveil.randomness import Seed
from scripts.pretraining.augment import augment
from scripts.pretraining.pictures import is_held_out, read_pictures
from scripts.pretraining.variety import mixed_batch, vary


def png(value: int, width: int = 12, height: int = 10) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), value, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def archive(path: Path, files: dict[str, bytes]) -> str:
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return str(path)


def test_a_zip_and_its_folder_give_the_same_pictures(tmp_path: Path) -> None:
    files = {f"{index}.png": png(10 * index) for index in range(20)}
    for name, content in files.items():
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(content)
    packed = read_pictures([archive(tmp_path / "x.zip", files)], side=8, channels=1)
    plain = read_pictures([str(tmp_path / "folder")], side=8, channels=1)
    assert torch.equal(packed.train, plain.train)
    assert torch.equal(packed.held_out, plain.held_out)
    assert packed.train.shape[1:] == (1, 8, 8)
    assert len(packed.train) + len(packed.held_out) == 20
    values = {int(value) for value in torch.cat((packed.train, packed.held_out))[:, 0, 0, 0]}
    assert values == {10 * index for index in range(20)}


def test_only_training_pictures_are_read_where_there_are_splits(tmp_path: Path) -> None:
    files = {f"train/a/{index}.png": png(1) for index in range(30)} | {f"val/a/{index}.png": png(200) for index in range(30)}
    found = read_pictures([archive(tmp_path / "x.zip", files)], side=8, channels=3)
    assert int(torch.cat((found.train, found.held_out)).max()) == 1


def test_one_owner_is_never_on_both_sides(tmp_path: Path) -> None:
    rows = "".join(f"{index}.png,{index % 7}\n" for index in range(70))
    files = {f"{index}.png": png(index % 7) for index in range(70)} | {"labels.csv": b"file,patientid\n" + rows.encode()}
    found = read_pictures([archive(tmp_path / "x.zip", files)], side=8, channels=1)
    ours, theirs = ({int(value) for value in part[:, 0, 0, 0]} for part in (found.train, found.held_out))
    assert ours
    assert theirs
    assert not ours & theirs
    assert {key for key in range(7) if is_held_out(str(key), 70)} == theirs


def test_npz_gives_its_training_split_and_sources_weigh_by_the_root_of_their_size(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_train=np.zeros((1600, 8, 8), np.uint8), x_test=np.full((9, 8, 8), 255, np.uint8))
    found = read_pictures([str(tmp_path / "x.npz"), "digits"], side=8, channels=1)
    first, second = found.sources
    assert first["train"] + first["held_out"] == 1600
    assert 0.05 < first["held_out"] / 1600 < 0.15
    share = float(found.chances[: first["train"]].sum())
    assert share == pytest.approx(first["train"] ** 0.5 / (first["train"] ** 0.5 + second["train"] ** 0.5), rel=1e-4)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.txt": b"x"}, "holds no pictures"),
        ({"a.png": b"x"}, "is damaged"),
        ({"a.png": png(1)}, "at least 8"),
    ],
)
def test_bad_archives_get_one_sentence(files: dict[str, bytes], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read_pictures([archive(tmp_path / "x.zip", files)], side=8, channels=1)


def test_bad_sources_get_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"no zip")
    (tmp_path / "x.txt").write_bytes(b"x")
    np.savez(tmp_path / "signals.npz", x=np.zeros((40, 6, 128), np.float32))
    for source, words in (
        (str(tmp_path / "x.zip"), "zip archive"),
        (str(tmp_path / "x.txt"), "cannot read pictures"),
        (str(tmp_path / "signals.npz"), "holds no pictures"),
        ("fotos", "did you mean 'photos'"),
    ):
        with pytest.raises(UsageError, match=words):
            read_pictures([source], side=8, channels=1)
    with pytest.raises(UsageError, match="nothing to train on"):
        read_pictures([], side=8, channels=1)


def test_varied_pictures_stay_pictures_and_many_are_grey() -> None:
    stored = torch.randint(256, (64, 3, 64, 64), generator=Seed(0).generator("p"), dtype=torch.uint8)
    images, grey = vary(stored, 32, Seed(1).generator("v"))
    assert images.shape == (64, 3, 32, 32)
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1
    assert 8 < int(grey.sum()) < 40
    assert torch.allclose(images[grey][:, 0], images[grey][:, 2], atol=1e-6)


def test_a_mixed_batch_holds_the_noise_it_says(untouched_global_rng: None) -> None:
    black = torch.zeros((700, 1, 16, 16), dtype=torch.uint8)
    images, ratios = mixed_batch(black, 8, Seed(1).generator("m"))
    # Some pictures are made brighter or inverted; the noise is what their entries spread by: r times that of U(0, 1).
    spread = images.flatten(1).std(1)
    assert float((spread - ratios * 12**-0.5).abs().median()) < 0.02
    grid = ((ratios * 10 - (ratios * 10).round()).abs() < 1e-4).float().mean()
    assert 0.4 < float(grid) < 0.6
    assert float(ratios.min()) == 0.0
    assert float(ratios.max()) == 1.0


def test_augmentation_follows_its_generator_and_is_differentiable(untouched_global_rng: None) -> None:
    images = torch.rand((6, 3, 16, 16), generator=Seed(0).generator("i")).requires_grad_(True)
    one, two, other = (augment(images, Seed(number).generator("a")) for number in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    one.sum().backward()
    assert images.grad is not None
    assert 0.3 < float((images.grad != 0).float().mean()) <= 1

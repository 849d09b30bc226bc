from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from gradveil.data import Dataset, load_data
from gradveil.errors import UsageError

PICTURES = np.random.default_rng(0).integers(0, 256, (6, 12, 10, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])
CODES = {"uint8": 0x08, "int32": 0x0C, "float32": 0x0D}


def save_npz(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def save_idx(path: Path, array: NDArray[Any]) -> Path:
    head = bytes([0, 0, CODES[array.dtype.name], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def save_picture(path: Path, pixels: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def expected(rows: list[int] | None = None) -> torch.Tensor:
    chosen = PICTURES if rows is None else PICTURES[rows]
    return torch.from_numpy(chosen).permute(0, 3, 1, 2).float() / 255


# --- npz ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "labels"),
    [
        ("x", "y"),
        ("X", "Y"),
        ("inputs", "targets"),
        ("images", "labels"),
        ("x_train", "y_train"),
        ("train_images", "train_labels"),
    ],
)
def test_npz_names(tmp_path: Path, inputs: str, labels: str) -> None:
    data = load_data(save_npz(tmp_path / "d.npz", **{inputs: PICTURES, labels: LABELS[:, None]}))
    assert torch.equal(data.inputs, expected())
    assert data.targets.tolist() == LABELS.tolist()
    assert (data.classes, data.builtin, data.owners) == (3, False, None)


def test_npz_split_owner_and_class_names(tmp_path: Path) -> None:
    path = save_npz(
        tmp_path / "d.npz",
        x_train=PICTURES,
        y_train=LABELS,
        writer_train=np.array([7, 7, 8, 8, 9, 9]),
        x_test=PICTURES[:3],
        y_test=np.array([1, 1, 0]),
        writer_test=np.array([1, 2, 3]),
        label_names=np.array(["ant", "bee", "cow", "dog"]),
    )
    train, test = load_data(path), load_data(path, split="test")
    assert train.owners == ("7", "7", "8", "8", "9", "9")
    assert test.owners == ("1", "2", "3")
    assert test.class_names == ("ant", "bee", "cow", "dog")
    assert test.classes == 4
    assert load_data(path, owner_column="y_train").owners == ("0", "1", "2", "0", "1", "2")


def test_npz_without_split_wins_over_train(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "d.npz", x=PICTURES[:4], y=LABELS[:4], x_train=PICTURES, y_train=LABELS)
    assert len(load_data(path)) == 4
    assert len(load_data(path, split="train")) == 6


def test_npz_with_a_label_file(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "d.npz", x=PICTURES, y=LABELS)
    (tmp_path / "l.csv").write_text("label,patient\n" + "".join(f"{word},p{word}\n" for word in "aabbcc"))
    data = load_data(path, labels=str(tmp_path / "l.csv"))
    assert data.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.class_names == ("a", "b", "c")
    assert data.owners == ("pa", "pa", "pb", "pb", "pc", "pc")
    np.save(tmp_path / "l.npy", LABELS[::-1])
    assert load_data(path, labels=str(tmp_path / "l.npy")).targets.tolist() == LABELS[::-1].tolist()


def test_limit_spreads_and_keeps_the_number_of_classes(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "d.npz", x=PICTURES, y=np.array([0, 0, 1, 1, 2, 2]))
    few = load_data(path, limit=2)
    assert few.records == ("record-0", "record-3")
    assert few.classes == 3
    assert torch.equal(few.inputs, expected([0, 3]))
    assert len(load_data(path, limit=100)) == 6


def test_classes_can_be_told(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "d.npz", x=PICTURES, y=np.zeros(6, int))
    data = load_data(path, classes=10)
    assert data.classes == 10
    assert data.class_names == tuple("0123456789")


def test_signals_need_a_scale(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(6, 3, 64)), y=LABELS)
    with pytest.raises(UsageError, match="scale='minmax'"):
        load_data(path)
    assert load_data(path, scale="minmax").input_shape == (3, 64)


# --- folders --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def class_folder(tmp_path: Path) -> Path:
    for row, label in enumerate(LABELS):
        save_picture(tmp_path / "pets" / ["ant", "bee", "cow"][label] / f"{row}.png", PICTURES[row])
    (tmp_path / "pets" / "ant" / "notes.txt").write_text("not a picture")
    (tmp_path / "pets" / ".hidden").mkdir()
    return tmp_path / "pets"


def test_folder_per_class(class_folder: Path) -> None:
    data = load_data(str(class_folder))
    assert data.class_names == ("ant", "bee", "cow")
    assert data.records == ("ant/0.png", "ant/3.png", "bee/1.png", "bee/4.png", "cow/2.png", "cow/5.png")
    assert torch.equal(data.inputs, expected([0, 3, 1, 4, 2, 5]))


def test_folder_with_limit_reads_only_what_it_keeps(class_folder: Path) -> None:
    (class_folder / "bee" / "4.png").write_bytes(b"broken")
    assert load_data(str(class_folder), limit=3).records == ("ant/0.png", "bee/1.png", "cow/2.png")


def test_folder_with_splits(class_folder: Path, tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    class_folder.rename(top / "train")
    save_picture(top / "val" / "ant" / "9.png", PICTURES[0])
    save_picture(top / "val" / "bee" / "9.png", PICTURES[1])
    save_picture(top / "val" / "elk" / "9.png", PICTURES[1])
    train, val = load_data(str(top)), load_data(str(top), split="val")
    assert len(train) == 6
    assert val.records == ("val/ant/9.png", "val/bee/9.png", "val/elk/9.png")
    assert train.class_names == val.class_names == ("ant", "bee", "cow", "elk")
    assert val.targets.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    "table",
    [
        "file,label\ntrain/0.png,a\nval/1.png,b\ntrain/2.png,c\n",
        "file,label,split\ntrain/0.png,a,Train\nval/1.png,b,val\ntrain/2.png,c,train\n",
    ],
)
def test_table_with_splits(tmp_path: Path, table: str) -> None:
    for row, part in enumerate(["train", "val", "train"]):
        save_picture(tmp_path / "t" / part / f"{row}.png", PICTURES[row])
    (tmp_path / "t" / "labels.csv").write_text(table)
    train, val = load_data(str(tmp_path / "t")), load_data(str(tmp_path / "t"), split="val")
    assert train.targets.tolist() == [0, 2]
    assert val.targets.tolist() == [1]
    assert train.class_names == val.class_names == ("a", "b", "c")
    with pytest.raises(UsageError, match="no pictures of split 'test'"):
        load_data(str(tmp_path / "t"), split="test")


def test_flat_folder_with_csv_and_owner(tmp_path: Path) -> None:
    for row in range(4):
        save_picture(tmp_path / "flat" / f"{row}.png", PICTURES[row])
    (tmp_path / "flat" / "labels.csv").write_text("File,Label,PatientID\n2.png,sick,p1\n0.png,well,p2\n")
    data = load_data(str(tmp_path / "flat"))
    assert data.records == ("2.png", "0.png")
    assert data.class_names == ("sick", "well")
    assert data.owners == ("p1", "p2")
    (tmp_path / "other.csv").write_text("image,finding,site\n1.png,3,x\n3.png,0,y\n")
    other = load_data(str(tmp_path / "flat"), labels=str(tmp_path / "other.csv"), label_column="finding", owner_column="site")
    assert other.targets.tolist() == [3, 0]
    assert other.owners == ("x", "y")


def test_grey_stays_grey_and_joins_colour(tmp_path: Path) -> None:
    save_picture(tmp_path / "g" / "a" / "0.png", PICTURES[0, :, :, 0])
    save_picture(tmp_path / "g" / "b" / "0.png", PICTURES[1, :, :, 0])
    assert load_data(str(tmp_path / "g")).input_shape == (1, 12, 10)
    save_picture(tmp_path / "g" / "b" / "1.png", PICTURES[2])
    mixed = load_data(str(tmp_path / "g"))
    assert load_data(str(tmp_path / "g"), colour=False).input_shape == (1, 12, 10)
    assert mixed.input_shape == (3, 12, 10)
    assert torch.equal(mixed.inputs[0, 0], mixed.inputs[0, 2])


def test_alpha_and_palette_become_colour(tmp_path: Path) -> None:
    save_picture(tmp_path / "g" / "a" / "0.png", np.dstack([PICTURES[0], np.full((12, 10), 255, np.uint8)]))
    (tmp_path / "g" / "b").mkdir()
    Image.fromarray(PICTURES[1]).quantize(64).save(tmp_path / "g" / "b" / "0.png")
    data = load_data(str(tmp_path / "g"))
    assert data.input_shape == (3, 12, 10)
    assert torch.equal(data.inputs[0], expected([0])[0])


def test_mixed_sizes_are_refused_by_name_or_resized(class_folder: Path) -> None:
    save_picture(class_folder / "bee" / "4.png", PICTURES[4, :8])
    with pytest.raises(UsageError, match=r"'bee/4.png' is 10×8, the first one, 'ant/0.png', is 10×12"):
        load_data(str(class_folder))
    assert load_data(str(class_folder), size=(6, 5)).input_shape == (3, 6, 5)


# --- IDX ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_finds_its_labels(tmp_path: Path, suffix: str) -> None:
    images = save_idx(tmp_path / f"train-images-idx3-ubyte{suffix}", PICTURES[..., 0])
    save_idx(tmp_path / f"train-labels-idx1-ubyte{suffix}", LABELS.astype(np.uint8))
    data = load_data(str(images))
    assert torch.equal(data.inputs, expected()[:, :1])
    assert data.targets.tolist() == LABELS.tolist()


def test_idx_of_floats_with_idx_labels_elsewhere(tmp_path: Path) -> None:
    images = save_idx(tmp_path / "pictures", (PICTURES[..., 0] / 255).astype(np.float32).repeat(2, axis=1)[:, :10])
    labels = save_idx(tmp_path / "numbers.idx", LABELS.astype(np.int32))
    assert load_data(str(images), labels=str(labels)).input_shape == (1, 10, 10)


def test_npy_with_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", PICTURES)
    np.save(tmp_path / "y.npy", LABELS)
    assert load_data(str(tmp_path / "x.npy"), labels=str(tmp_path / "y.npy")).input_shape == (3, 12, 10)


# --- refusals -------------------------------------------------------------------------------------------------------------


def text(name: str, content: str | bytes) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return str(folder / name)

    return write


def npz(**arrays: Any) -> Callable[[Path], str]:
    return lambda folder: save_npz(folder / "d.npz", **arrays)


def pictures(*names: str, csv: str | None = None) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "pics").mkdir()
        for name in names:
            save_picture(folder / "pics" / name, PICTURES[0])
        if csv is not None:
            (folder / "pics" / "labels.csv").write_text(csv)
        return str(folder / "pics")

    return write


def broken_picture(folder: Path) -> str:
    source = pictures("a/0.png", "b/0.png")(folder)
    whole = (folder / "pics" / "b" / "0.png").read_bytes()
    (folder / "pics" / "b" / "0.png").write_bytes(whole[:60])
    return source


def deep_picture(folder: Path) -> str:
    source = pictures("a/0.png")(folder)
    Image.fromarray(np.full((12, 10), 4000, np.uint16)).save(folder / "pics" / "a" / "1.png")
    return source


def short_idx(folder: Path) -> str:
    path = save_idx(folder / "images-idx3-ubyte", PICTURES[..., 0])
    path.write_bytes(path.read_bytes()[:-5])
    return str(path)


def short_gzip(folder: Path) -> str:
    path = save_idx(folder / "images-idx3-ubyte.gz", PICTURES[..., 0])
    path.write_bytes(path.read_bytes()[:40])
    return str(path)


def short_npz(folder: Path) -> str:
    source = save_npz(folder / "d.npz", x=PICTURES, y=LABELS)
    Path(source).write_bytes(Path(source).read_bytes()[:300])
    return source


OBJECTS = np.array([{"a": 1}, None], dtype=object)

BAD: list[tuple[str, Callable[[Path], str], dict[str, Any], str]] = [
    ("unknown name", lambda _: "foto", {}, "did you mean 'photos'"),
    ("unknown path", lambda _: "no/such/file.npz", {}, "there is no file or folder"),
    ("unknown split", npz(x=PICTURES, y=LABELS), {"split": "trian"}, "did you mean 'train'"),
    ("absent split", npz(x=PICTURES, y=LABELS), {"split": "test"}, "no inputs for split 'test'"),
    ("limit zero", npz(x=PICTURES, y=LABELS), {"limit": 0}, "keep at least one"),
    ("built-in with settings", lambda _: "photos", {"scale": "minmax"}, "takes no setting but limit"),
    ("size of arrays", npz(x=PICTURES, y=LABELS), {"size": (8, 8)}, "for folders of pictures"),
    ("colour of arrays", npz(x=PICTURES, y=LABELS), {"colour": True}, "for folders of pictures"),
    ("layout of pictures", pictures("a/0.png"), {"layout": "nchw"}, "layout is for arrays"),
    ("empty size", pictures("a/0.png"), {"size": (0, 8)}, "positive height and width"),
    ("split of idx", lambda f: str(save_idx(f / "x.idx", PICTURES[..., 0])), {"split": "val"}, "has no splits"),
    ("zip", text("d.zip", "x"), {}, "unpack it first"),
    ("unknown kind", text("d.parquet", "PAR1"), {}, "cannot tell what"),
    ("empty file", text("d.bin", ""), {}, "cannot tell what"),
    ("no labels", npz(x=PICTURES), {}, "has no labels"),
    ("no inputs", npz(picture=PICTURES, y=LABELS), {}, "rename the inputs to x"),
    ("pickled", npz(x=OBJECTS, y=LABELS[:2]), {}, "Python objects, which are never loaded"),
    ("not an archive", text("d.npz", "hello"), {}, "cannot read"),
    ("cut archive", short_npz, {}, "damaged"),
    ("scalar inputs", npz(x=np.array(3.0), y=LABELS), {}, "is empty"),
    ("empty inputs", npz(x=PICTURES[:0], y=LABELS[:0]), {}, "is empty"),
    ("lengths differ", npz(x=PICTURES, y=LABELS[:5]), {}, "6 inputs but 5 labels"),
    ("owners differ", npz(x=PICTURES, y=LABELS, owner=LABELS[:5]), {}, "6 inputs but 5 owners"),
    ("nan", npz(x=np.full((6, 8, 8), np.nan), y=LABELS), {}, "NaN or infinite, first in record 0"),
    ("floats to 255", npz(x=PICTURES.astype(float), y=LABELS), {}, "divide them by 255"),
    ("half labels", npz(x=PICTURES, y=LABELS + 0.5), {}, "not a whole number"),
    ("negative labels", npz(x=PICTURES, y=LABELS - 1), {}, "number the classes from 0"),
    ("ids as labels", npz(x=PICTURES, y=LABELS + 10**12), {}, "look like ids"),
    ("one class", npz(x=PICTURES, y=LABELS * 0), {}, "at least 2 classes"),
    ("one-hot", npz(x=PICTURES, y=np.eye(3)[LABELS]), {}, "labels.argmax"),
    ("too few classes told", npz(x=PICTURES, y=LABELS), {"classes": 2}, "label 2 does not fit 2 classes"),
    ("unknown array", npz(x=PICTURES, y=LABELS), {"label_column": "yy"}, "has no array 'yy'"),
    ("label file gone", npz(x=PICTURES, y=LABELS), {"labels": "gone.csv"}, "there is no label file"),
    ("npy labels missing", lambda f: text("x.npy", b"\x93NUMPY")(f), {}, "damaged"),
    ("empty folder", pictures(), {}, "it holds no pictures"),
    ("flat folder", pictures("0.png"), {}, "as a CSV with the columns file,label"),
    ("folder without split", pictures("a/0.png", "b/0.png"), {"split": "val"}, "no pictures of split 'val'"),
    ("csv lists a ghost", pictures("0.png", csv="file,label\n1.png,0\n"), {}, "lists '1.png', which is not in"),
    ("csv without label", pictures("0.png", csv="file,finding\n0.png,0\n"), {}, "none of which is called label"),
    ("csv without file", pictures("0.png", csv="label\n0\n"), {}, "add a column called file"),
    ("csv without rows", pictures("0.png", csv="file,label\n"), {}, "has no rows"),
    ("csv with a hole", pictures("0.png", csv="file,label\n0.png,\n"), {}, "line 2: a cell is empty"),
    ("csv short row", pictures("0.png", csv="file,label\n0.png\n"), {}, "line 2: a cell is empty"),
    ("csv column typo", pictures("0.png", csv="file,label\n0.png,1\n"), {"owner_column": "lable"}, "did you mean 'label'"),
    ("broken picture", broken_picture, {}, "cannot read the picture"),
    ("sixteen-bit picture", deep_picture, {}, "8 bits per colour"),
    ("cut idx", short_idx, {}, "its header promises"),
    ("cut gzip", short_gzip, {}, "cannot read"),
    ("idx without labels", lambda f: str(save_idx(f / "x.idx", PICTURES[..., 0])), {}, "has no labels"),
]


@pytest.mark.parametrize(("make", "options", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_sources_are_refused_in_one_sentence(
    tmp_path: Path, make: Callable[[Path], str], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_data(make(tmp_path), **options)
    message = str(caught.value)
    assert words in message, message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("l.txt", b"0\n1\n", "give a .csv with a header"),
        ("l.csv", b"\xff\xfe\x00", "as CSV"),
        ("l.npy", b"junk", "damaged"),
        ("l.idx", b"junk", "is not an IDX file"),
    ],
)
def test_bad_label_files_are_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        load_data(save_npz(tmp_path / "d.npz", x=PICTURES), labels=str(tmp_path / name))


def test_a_built_in_name_wins_over_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures("a/0.png", "b/0.png")(tmp_path)
    (tmp_path / "pics").rename(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    assert load_data("digits").builtin
    folder: Dataset = load_data("./digits")
    assert not folder.builtin

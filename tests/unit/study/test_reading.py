"""One text says how data is read, everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gradveil.data import load_source
from gradveil.errors import UsageError
from gradveil.federation.engine import run_training
from gradveil.run.jobs import cell_key
from gradveil.study.cell import Cell
from gradveil.study.federation import FederationSettings
from gradveil.study.reading import read_options, read_text


@pytest.fixture
def chest(tmp_path: Path) -> str:
    """Twelve pictures of two sizes with a table: the label is called finding, the owner hospital."""
    rng, rows = np.random.default_rng(0), ["file,finding,hospital"]
    for index in range(12):
        side = 10 if index % 2 else 12
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(tmp_path / f"{index}.png")
        rows.append(f"{index}.png,{'ill' if index < 6 else 'well'},h{index % 3}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(tmp_path)


READ = "size=8x8, colour=false, label_column=finding, owner_column=hospital"


def test_every_setting_reaches_the_reader(chest: str) -> None:
    data = load_source(Cell(data=chest, read=READ))
    assert (data.input_shape, data.classes, data.class_names) == ((1, 8, 8), 2, ("ill", "well"))
    assert data.owners is not None and set(data.owners) == {"h0", "h1", "h2"}


def test_a_federation_reads_the_same_way_and_divides_by_owner(chest: str) -> None:
    settings = FederationSettings(
        data=chest, read=READ, model="mlp", partition="by_owner", clients=3, clients_per_round=3, rounds=1, minibatch=4
    )
    assert run_training(settings).final_accuracy is not None


def test_how_data_is_read_is_part_of_a_results_key(chest: str) -> None:
    keys = {cell_key(Cell(data=chest, read=read)) for read in (READ, READ.replace("8x8", "9x9"))}
    assert len(keys) == 2


def test_quotes_spaces_and_order_do_not_matter() -> None:
    assert read_text(" colour = FALSE ,size='8' ") == read_text("size=8x8,colour=false") == "size=8x8, colour=false"
    assert read_text("") == ""
    assert read_options("layout='nhwc', split=val, classes=7") == {"layout": "nhwc", "split": "val", "classes": 7}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("size", "write name=value"),
        ("size=", "write name=value"),
        ("sizes=8", "did you mean 'size'"),
        ("size=8x8x8", "as in 64x48"),
        ("size=0", "as in 64x48"),
        ("size=-3", "as in 64x48"),
        ("colour=maybe", "write true or false"),
        ("classes=none", "at least 1"),
        ("layout=nhwcc", "did you mean 'nhwc'"),
        ("split=tests", "did you mean 'test'"),
        ("size=8, size=9", "given twice"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        read_options(text)
    assert "\n" not in str(caught.value)

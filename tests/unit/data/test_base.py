from __future__ import annotations

from typing import Any

import pytest
import torch

from gradveil.data import DATASETS, DataCard, Dataset, load_photos
from gradveil.errors import UsageError


def make(**changes: Any) -> Dataset:
    values: dict[str, Any] = {
        "name": "mine",
        "inputs": torch.linspace(0, 1, 24).reshape(4, 1, 2, 3),
        "targets": torch.tensor([0, 1, 0, 2]),
        "classes": 3,
        "class_names": ("a", "b", "c"),
        "records": ("r0", "r1", "r2", "r3"),
        "owners": ("ann", "bob", "ann", "bob"),
    }
    return Dataset(**{**values, **changes})


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no axes", {"inputs": torch.zeros(4)}, "give one row per record"),
    ("empty", {"inputs": torch.zeros(0, 1, 2, 3)}, "is empty"),
    ("empty axis", {"inputs": torch.zeros(4, 1, 0, 3)}, "is empty"),
    ("wrong precision", {"inputs": torch.zeros(4, 1, 2, 3, dtype=torch.float64)}, "give float32"),
    ("nan", {"inputs": torch.full((4, 1, 2, 3), float("nan"))}, "NaN or infinite, first in record 0"),
    ("infinite", {"inputs": torch.full((4, 1, 2, 3), float("inf"))}, "NaN or infinite"),
    ("bytes as floats", {"inputs": torch.full((4, 1, 2, 3), 255.0)}, "divide them by 255"),
    ("negative", {"inputs": torch.full((4, 1, 2, 3), -1.0)}, "scale='minmax'"),
    ("huge", {"inputs": torch.full((4, 1, 2, 3), 4096.0)}, "scale='minmax'"),
    ("too few labels", {"targets": torch.tensor([0, 1, 2])}, "4 inputs but 3 labels"),
    ("float labels", {"targets": torch.tensor([0.0, 1.0, 0.0, 2.0])}, "one whole class number"),
    ("label matrix", {"targets": torch.zeros(4, 3, dtype=torch.int64)}, "one whole class number"),
    ("negative label", {"targets": torch.tensor([0, -1, 0, 2])}, "number the classes from 0"),
    ("label too large", {"targets": torch.tensor([0, 1, 0, 3])}, "label 3 does not fit 3 classes"),
    ("one class", {"targets": torch.zeros(4, dtype=torch.int64), "classes": 1, "class_names": ("a",)}, "at least 2 classes"),
    ("ids as labels", {"targets": torch.tensor([0, 1, 2, 10**12]), "classes": 10**12 + 1}, "look like ids"),
    ("too few ids", {"records": ("r0",)}, "1 record ids"),
    ("too few owners", {"owners": ("ann",)}, "1 owners"),
    ("too few names", {"class_names": ("a",)}, "one name per class"),
]


@pytest.mark.parametrize(("changes", "words"), [(c, w) for _, c, w in BAD], ids=[n for n, _, _ in BAD])
def test_bad_data_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(**changes)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.startswith("'mine'")


def test_take_keeps_rows_together_and_classes() -> None:
    part = make().take([3, 0])
    assert part.records == ("r3", "r0")
    assert part.owners == ("bob", "ann")
    assert part.targets.tolist() == [2, 0]
    assert torch.equal(part.inputs, make().inputs[[3, 0]])
    assert part.classes == 3
    assert make(owners=None).take([1]).owners is None


@pytest.mark.parametrize("row", [-1, 4])
def test_take_refuses_rows_that_are_not_there(row: int) -> None:
    with pytest.raises(UsageError, match="it has records 0 to 3"):
        make().take([row])


def test_batch_carries_ids() -> None:
    batch = make().batch([2])
    assert len(batch) == 1
    assert batch.records == ("r2",)


def test_digest_follows_content_only() -> None:
    assert make().digest() == make(name="other", records=("a", "b", "c", "d")).digest()
    assert make().digest() != make(targets=torch.tensor([0, 1, 0, 1])).digest()
    assert make().digest() != make(inputs=make().inputs * 0.5).digest()
    assert make().digest() != make(inputs=make().inputs.reshape(4, 1, 3, 2)).digest()
    assert len(make().digest()) == 64


def test_digest_ignores_memory_order() -> None:
    data = make()
    strided = make(inputs=data.inputs.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2))
    assert strided.digest() == data.digest()


def test_counts_and_shape() -> None:
    assert make().counts() == [2, 1, 1]
    assert make().input_shape == (1, 2, 3)
    assert len(make()) == 4


@pytest.mark.parametrize("name", DATASETS.names())
def test_every_built_in_matches_its_card(name: str) -> None:
    data, card = DATASETS.get(name)(), DATASETS.card(name)
    assert isinstance(card, DataCard)
    assert (data.name, data.builtin) == (name, True)
    assert (data.input_shape, data.classes) == (card.shape, card.classes)
    assert card.licence
    assert card.summary.endswith(".")
    assert len(set(data.records)) == len(data)
    assert min(data.counts()) > 0
    assert f"{len(data):,}" in card.summary


def test_photos_twice_are_equal() -> None:
    assert load_photos().digest() == load_photos().digest()

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gradveil.data.layout import to_inputs, to_targets
from gradveil.errors import UsageError


def bytes_of(*shape: int) -> NDArray[np.uint8]:
    return (np.arange(np.prod(shape)) % 256).astype(np.uint8).reshape(shape)


def floats_of(*shape: int) -> NDArray[np.float64]:
    return np.linspace(0, 1, int(np.prod(shape))).reshape(shape)


@pytest.mark.parametrize(
    ("array", "layout", "shape"),
    [
        (bytes_of(5, 28, 28), "auto", (5, 1, 28, 28)),
        (bytes_of(5, 20, 30), "auto", (5, 1, 20, 30)),
        (bytes_of(5, 32, 24, 3), "auto", (5, 3, 32, 24)),
        (bytes_of(5, 32, 24, 1), "auto", (5, 1, 32, 24)),
        (bytes_of(5, 3, 32, 24), "auto", (5, 3, 32, 24)),
        (floats_of(5, 28, 28), "auto", (5, 1, 28, 28)),
        (floats_of(5, 6, 128), "auto", (5, 6, 128)),
        (floats_of(5, 30), "auto", (5, 30)),
        (bytes_of(5, 3, 7, 3), "nhwc", (5, 3, 3, 7)),
        (bytes_of(5, 3, 7, 3), "nchw", (5, 3, 7, 3)),
        (floats_of(5, 81, 40), "nhw", (5, 1, 81, 40)),
        (floats_of(5, 81, 40), "nct", (5, 81, 40)),
        (floats_of(5, 2, 8, 8), "nchw", (5, 2, 8, 8)),
    ],
)
def test_layouts_are_recognised_or_told(array: NDArray[Any], layout: str, shape: tuple[int, ...]) -> None:
    assert to_inputs(array, "x", layout=layout).shape == shape


def test_channels_last_keeps_pixels_in_place() -> None:
    array = bytes_of(2, 8, 9, 3)
    inputs = to_inputs(array, "x")
    assert float(inputs[1, 2, 4, 5]) == pytest.approx(array[1, 4, 5, 2] / 255)


BAD: list[tuple[str, NDArray[Any], dict[str, str], str]] = [
    ("both ends three", bytes_of(5, 3, 7, 3), {}, "say layout='nhwc'"),
    ("neither end", bytes_of(5, 8, 9, 7), {}, "say layout='nhwc'"),
    ("alpha", bytes_of(5, 8, 9, 4), {}, "alpha channel"),
    ("signal or picture", floats_of(5, 81, 40), {}, "say layout='nhw'"),
    ("narrow bytes", bytes_of(5, 3, 40), {}, "say layout='nhw'"),
    ("one axis", floats_of(5), {}, "give pictures"),
    ("five axes", floats_of(2, 2, 2, 2, 2), {}, "give pictures"),
    ("wrong layout", floats_of(5, 4), {"layout": "nhwc"}, "needs 4 axes"),
    ("unknown layout", floats_of(5, 4), {"layout": "nhcw"}, "did you mean"),
    ("unknown scale", floats_of(5, 4), {"scale": "min_max"}, "did you mean 'minmax'"),
    ("words", np.array([["a", "b"]]), {}, "not numbers"),
    ("complex", np.zeros((2, 2), complex), {}, "not numbers"),
    ("sixteen bits", np.full((5, 8, 8), 4000, np.uint16), {}, "range is unclear"),
    ("empty", np.zeros((0, 8, 8), np.uint8), {}, "is empty"),
]


@pytest.mark.parametrize(("array", "options", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_unclear_inputs_are_refused(array: NDArray[Any], options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        to_inputs(array, "x", **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_become_fractions_and_floats_stay() -> None:
    assert float(to_inputs(np.full((1, 4, 4), 51, np.uint8), "x").max()) == pytest.approx(0.2)
    assert float(to_inputs(np.full((1, 4, 4), 0.2), "x").max()) == pytest.approx(0.2)
    assert float(to_inputs(np.ones((1, 4, 4), np.uint8), "x", scale="none").max()) == 1
    assert float(to_inputs(np.ones((1, 4, 4), bool), "x").max()) == 1


def test_minmax_has_one_range_per_signal_channel_and_one_per_picture_set() -> None:
    signals = np.stack([np.linspace(-60, 40, 64), np.linspace(0, 1e-3, 64)])[None]  # (1, 2, 64)
    stretched = to_inputs(signals, "x", scale="minmax")
    assert stretched.amin((0, 2)).tolist() == [0, 0]
    assert stretched.amax((0, 2)).tolist() == [1, 1]
    pictures = np.zeros((1, 8, 8, 3))
    pictures[..., 0], pictures[..., 1] = 10, 5
    assert to_inputs(pictures, "x", scale="minmax").amax((0, 2, 3)).tolist() == [1, 0.5, 0]


def test_minmax_survives_constants_and_passes_nan_on() -> None:
    assert float(to_inputs(np.full((2, 3, 40), 7.0), "x", scale="minmax").abs().max()) == 0
    spoiled = np.zeros((2, 3, 40))
    spoiled[0, 0, 0] = np.nan
    spoiled[0, 1, 0] = np.inf
    assert not bool(torch.isfinite(to_inputs(spoiled, "x", scale="minmax")).all())


def test_big_endian_read_only_arrays_are_taken() -> None:
    array = np.linspace(0, 1, 64, dtype=">f4").reshape(1, 8, 8)
    array.setflags(write=False)
    assert to_inputs(array, "x").dtype == torch.float32


@pytest.mark.parametrize(
    ("labels", "numbers", "names"),
    [
        (np.array([2, 0, 1], np.uint8), [2, 0, 1], None),
        (np.array([[2], [0]]), [2, 0], None),
        (np.array([2.0, 0.0]), [2, 0], None),
        (np.array(["2", "0"]), [2, 0], None),
        (np.array([b"2", b"0"]), [2, 0], None),
        (np.array([True, False]), [1, 0], None),
        (np.array(["cat", "ant", "cat"]), [1, 0, 1], ("ant", "cat")),
        (np.array(["10", "x"]), [0, 1], ("10", "x")),
    ],
)
def test_labels_are_numbers_or_words(labels: NDArray[Any], numbers: list[int], names: tuple[str, ...] | None) -> None:
    targets, found = to_targets(labels, "x")
    assert targets.tolist() == numbers
    assert targets.dtype == torch.int64
    assert found == names


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([0.5, 1.0]), "not a whole number"),
        (np.array([np.nan, 1.0]), "not a whole number"),
        (np.eye(3), "labels.argmax"),
        (np.array(3), "one class number per record"),
        (np.array([1j, 2]), "whole numbers or words"),
    ],
)
def test_bad_labels_are_refused(labels: NDArray[Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        to_targets(labels, "x")


@given(st.lists(st.text(alphabet="ab01 ", min_size=1, max_size=20), min_size=1, max_size=30))
def test_word_labels_keep_equality(words: list[str]) -> None:
    targets, _ = to_targets(np.array(words), "x")
    for i, left in enumerate(words):
        for j, right in enumerate(words):
            if left == right:
                assert targets[i] == targets[j]

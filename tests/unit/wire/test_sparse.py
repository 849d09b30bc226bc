"""The sparse scheme: the smaller form is chosen, and positions are trusted only after they were checked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Payload, Role, TensorSpec, Update
from gradveil.wire import SPARSE, decode_sparse, encode_sparse, payload_from_bytes, payload_to_bytes, tensor_bytes
from gradveil.wire.sparse import _position_dtype

ENTRIES = 20
SPEC = ModelSpec({"w": TensorSpec((4, 5), torch.float32, Role.WEIGHT)})


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def payload(positions: Tensor, values: Tensor) -> Payload:
    return Payload(SPARSE, {"weights": {}, "positions": {"w": positions}, "values": {"w": values}}, examples=1)


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, 1e-38]), min_size=0, max_size=40),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_pattern_of_zeros_survives_and_never_takes_more_bytes(entries: list[float], dtype: torch.dtype) -> None:
    value = torch.tensor(entries, dtype=dtype)
    spec = ModelSpec({"w": TensorSpec((len(entries),), dtype, Role.WEIGHT)})
    sent = encode_sparse(Update({"w": value}, examples=1))
    got = decode_sparse(payload_from_bytes(payload_to_bytes(sent)), spec)
    assert torch.equal(got.weights["w"], value)
    assert tensor_bytes(sent) <= value.numel() * value.element_size()


def test_the_smaller_form_is_chosen_tensor_by_tensor() -> None:
    half = torch.tensor([1.0, 0.0, 1.0, 0.0])
    sent = encode_sparse(Update({"half": half, "less": half * torch.tensor([1, 1, 0, 1]), "zero": torch.zeros(3, 2)}, examples=1))
    assert list(sent.streams["weights"]) == ["half"]
    assert sent.streams["positions"]["less"].tolist() == [0]
    assert sent.streams["values"]["zero"].shape == (0,)


def test_scalars_are_sent_in_either_form() -> None:
    spec = ModelSpec({name: TensorSpec((), torch.float32, Role.WEIGHT) for name in ("zero", "one")})
    got = decode_sparse(encode_sparse(Update({"zero": torch.tensor(0.0), "one": torch.tensor(1.0)}, examples=1)), spec)
    assert {name: (value.shape, float(value)) for name, value in got.weights.items()} == {"zero": ((), 0.0), "one": ((), 1.0)}


def test_positions_widen_where_32_bits_are_too_few() -> None:
    assert _position_dtype(2**31) == torch.int32
    assert _position_dtype(2**31 + 1) == torch.int64


def test_sound_positions_are_read() -> None:
    got = decode_sparse(payload(ints(0, 7, 19), torch.tensor([1.0, 2.0, 3.0])), SPEC).weights["w"]
    assert got.reshape(-1).nonzero().reshape(-1).tolist() == [0, 7, 19]


@pytest.mark.parametrize(
    ("positions", "values", "message"),
    [
        (ints(3, 3), torch.ones(2), "not sorted and unique"),
        (ints(5, 3, 7), torch.ones(3), "not sorted and unique"),
        (ints(19, 20), torch.ones(2), "leave its 20 entries"),
        (ints(-1, 3), torch.ones(2), "leave its 20 entries"),
        (ints(5, -3, 7), torch.ones(3), "not sorted and unique"),
        (ints(5, 500, 7), torch.ones(3), "not sorted and unique"),
        (ints(1, 2), torch.ones(3), r"shape \(3,\), expected \(2,\)"),
        (ints(1, 2), torch.ones(2, 1), "shape"),
        (ints(1, 2).reshape(2, 1), torch.ones(2), "expected a flat list"),
        (torch.tensor(1, dtype=torch.int32), torch.tensor(1.0), "expected a flat list"),
        (ints(1, 2, dtype=torch.int64), torch.ones(2), "torch.int64, expected torch.int32"),
        (torch.tensor([1.0, 2.0]), torch.ones(2), "torch.float32, expected torch.int32"),
        (ints(1, 2), torch.ones(2, dtype=torch.float64), "torch.float64, expected torch.float32"),
        (ints(1, 2), torch.tensor([1.0, torch.nan]), "not finite"),
    ],
)
def test_unsound_positions_and_values_are_refused(positions: Tensor, values: Tensor, message: str) -> None:
    with pytest.raises(BadUpdate, match=message):
        decode_sparse(payload(positions, values), SPEC)


def test_each_tensor_comes_exactly_once() -> None:
    one = {"w": ints(1)}, {"w": torch.ones(1)}
    whole = {"w": torch.ones(4, 5)}
    for streams, message in (
        ({"weights": whole, "positions": one[0], "values": one[1]}, "both as a whole"),
        ({"weights": {}, "positions": one[0], "values": {}}, "positions without values"),
        ({"weights": {}, "positions": {}, "values": one[1]}, "positions without values"),
        ({}, r"lacks \['w'\]"),
        ({"weights": {**whole, "v": torch.ones(1)}}, r"unexpected \['v'\]"),
    ):
        with pytest.raises(BadUpdate, match=message):
            decode_sparse(Payload(SPARSE, streams, examples=1), SPEC)

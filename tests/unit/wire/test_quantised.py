"""The quantised scheme: bits in and out, nothing changes on the wire, and every lie is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradveil.errors import BadUpdate
from gradveil.records import Payload, Update
from gradveil.testing.defenses_scene import spec_of
from gradveil.testing.defenses_wire import mutated, refuses_or_reads
from gradveil.wire import Grid, decode_quantised, encode_quantised, payload_to_bytes, tensor_bytes
from gradveil.wire.quantised import pack, unpack

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_transforms.json").read_text())
GRIDS = {"a": Grid(7), "b": Grid(16, symmetric=False), "none": Grid(7)}


def on_grid(value: Tensor, grid: Grid) -> Tensor:
    ends = grid.ends(value)
    return grid.values(grid.positions(value, ends).round(), ends)


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(3, 5, generator=generator), torch.randn(11, generator=generator) + 3
    return {"a": on_grid(a, GRIDS["a"]), "b": on_grid(b, GRIDS["b"]), "none": torch.empty(0)}


def payload() -> Payload:
    return encode_quantised(Update(weights(), examples=2), GRIDS)


def changed(stream: str, name: str, value: Tensor) -> Payload:
    good = payload()
    return replace(good, streams={**good.streams, stream: {**good.streams[stream], name: value}})


def test_bytes_by_hand() -> None:
    case = GOLDEN["packed_three_bits"]["value"]
    assert pack(torch.tensor(case["codes"]), case["bits"]).tolist() == case["bytes"]
    assert unpack(torch.tensor(case["bytes"], dtype=torch.uint8), case["bits"], len(case["codes"])).tolist() == case["codes"]


@given(st.integers(1, 16), st.lists(st.integers(0, 2**16 - 1), max_size=40))
def test_packing_loses_nothing(bits: int, codes: list[int]) -> None:
    own = torch.tensor([code % 2**bits for code in codes], dtype=torch.int64)
    packed = pack(own, bits)
    assert packed.numel() == -(-len(codes) * bits // 8)
    assert torch.equal(unpack(packed, bits, len(codes)), own)


def test_packing_goes_on_past_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.wire.quantised._CHUNK", 16)
    codes = torch.arange(53) % 8
    assert torch.equal(unpack(pack(codes, 3), 3, 53), codes)


def test_values_come_back_to_the_bit_and_are_small() -> None:
    sent = payload()
    back = decode_quantised(sent, spec_of(weights()), GRIDS)
    assert all(torch.equal(back.weights[name], value) for name, value in weights().items())
    assert list(sent.streams["codes"]) == ["a", "b", "none"] and not sent.streams["weights"]
    # 15 codes of three bits and one end, 11 of four bits and two ends, and the one end of nothing.
    assert tensor_bytes(sent) == (6 + 4) + (6 + 8) + 4


def test_what_is_not_on_its_grid_is_sent_as_it_is() -> None:
    own = {**weights(), "a": weights()["a"] + torch.linspace(0, 0.1, 15).reshape(3, 5)}
    sent = encode_quantised(Update(own, examples=1), GRIDS)
    assert set(sent.streams["weights"]) == {"a"}
    assert torch.equal(decode_quantised(sent, spec_of(own), GRIDS).weights["a"], own["a"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: changed("codes", "a", payload().streams["codes"]["a"][:-1]), "expected 6 bytes"),
        (lambda: changed("codes", "a", payload().streams["codes"]["a"].float()), "expected 6 bytes"),
        (lambda: changed("codes", "a", torch.full((6,), 255, dtype=torch.uint8)), "filled up"),
        (lambda: changed("codes", "a", torch.tensor([255] * 5 + [31], dtype=torch.uint8)), "only 7 levels"),
        (lambda: changed("ends", "a", torch.tensor([-1.0])), "ends before it begins"),
        (lambda: changed("ends", "b", torch.tensor([2.0, 1.0])), "ends before it begins"),
        (lambda: changed("ends", "b", torch.tensor([1.0])), "shape"),
        (lambda: changed("ends", "a", torch.tensor([torch.nan])), "not finite"),
        (lambda: changed("ends", "a", torch.tensor([1.0], dtype=torch.float64)), "convert it"),
        (lambda: changed("ends", "c", torch.tensor([1.0])), "without codes"),
        (lambda: changed("weights", "a", weights()["a"]), "both as values and as codes"),
        (lambda: changed("weights", "c", weights()["a"]), "unexpected"),
    ],
)
def test_lies_are_refused_by_name(wrong: Any, words: str) -> None:
    with pytest.raises(BadUpdate, match=words):
        decode_quantised(wrong(), spec_of(weights()), GRIDS)


def test_codes_without_a_grid_are_refused() -> None:
    with pytest.raises(BadUpdate, match="has no grid"):
        decode_quantised(payload(), spec_of(weights()), {"a": GRIDS["a"]})


def test_thousands_of_damaged_payloads_raise_named_errors_only() -> None:
    spec = spec_of(weights())
    complaints = {
        refuses_or_reads(data, lambda each, own: decode_quantised(each, own, GRIDS), spec)
        for data in mutated(payload_to_bytes(payload()), 3000, seed=2)
    }
    assert complaints == {""}

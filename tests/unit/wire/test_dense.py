"""The dense scheme refuses what a model does not expect, whatever is wrong with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Payload, Update
from gradveil.testing.defenses_wire import damaged, mutated, refuses_or_reads
from gradveil.wire import (
    DENSE,
    SPARSE,
    decode_dense,
    decode_sparse,
    encode_dense,
    encode_sparse,
    payload_from_bytes,
    payload_to_bytes,
)

Decode = Callable[[Payload, ModelSpec], Update]
SCHEMES = [(encode_dense, decode_dense), (encode_sparse, decode_sparse)]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 4), nn.BatchNorm1d(4))


def spec() -> ModelSpec:
    return ModelSpec.of(model())


def update(sparse: bool = False) -> Update:
    generator = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(tuple(p.shape), generator=generator) for name, p in model().named_parameters()}
    if sparse:
        weights["0.weight"] = weights["0.weight"] * (weights["0.weight"].abs() > 1.5)
        weights["1.bias"] = torch.zeros(4)
    buffers = {name: b.clone() for name, b in model().named_buffers()}
    return Update(weights, examples=5, round=2, buffers=buffers)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("encode", "decode"), SCHEMES)
def test_what_goes_in_comes_out_in_the_models_order(encode: Callable[[Update], Payload], decode: Decode, sparse: bool) -> None:
    sent = update(sparse)
    payload = encode(replace(sent, weights=dict(reversed(sent.weights.items()))))
    got = decode(payload, spec())
    assert list(got.weights) == [name for name, _ in model().named_parameters()]
    assert list(got.buffers) == [name for name, _ in model().named_buffers()]
    assert (got.examples, got.round) == (5, 2)
    for stream in ("weights", "buffers"):
        for name, value in getattr(sent, stream).items():
            assert torch.equal(getattr(got, stream)[name], value)
            assert getattr(got, stream)[name].dtype == value.dtype


@pytest.mark.parametrize(("encode", "decode"), SCHEMES)
def test_buffers_may_be_left_out(encode: Callable[[Update], Payload], decode: Decode) -> None:
    assert decode(encode(update().replace(buffers={})), spec()).buffers == {}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("encode", "decode"), SCHEMES)
def test_every_wrong_field_is_refused(encode: Callable[[Update], Payload], decode: Decode, sparse: bool) -> None:
    payload = encode(update(sparse))
    found = 0
    for what, wrong in damaged(payload):
        if what.startswith("buffers/") and what.endswith("missing"):
            continue
        with pytest.raises(BadUpdate):
            decode(wrong, spec())
        found += 1
    assert found > 30


@pytest.mark.parametrize(("examples", "round_"), [(0, 0), (-1, 0), (1, -1), (2**60, 0), (1, 2**60)])
def test_counts_must_be_sensible(examples: int, round_: int) -> None:
    for encode, decode in SCHEMES:
        wrong = replace(encode(update()), examples=examples, round=round_)
        with pytest.raises(BadUpdate, match="sensible counts"):
            decode(wrong, spec())


def test_a_scheme_is_not_read_as_another() -> None:
    with pytest.raises(BadUpdate, match=f"scheme is '{SPARSE}', expected '{DENSE}'"):
        decode_dense(encode_sparse(update()), spec())
    with pytest.raises(BadUpdate, match=f"scheme is '{DENSE}', expected '{SPARSE}'"):
        decode_sparse(encode_dense(update()), spec())


def test_precision_is_checked_before_values_are_used() -> None:
    weights = {**update().weights, "0.bias": torch.ones(4, dtype=torch.float8_e4m3fn)}
    with pytest.raises(BadUpdate, match=r"'0.bias' is torch.float8_e4m3fn, expected torch.float32"):
        decode_dense(encode_dense(update().replace(weights=weights)), spec())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("encode", "decode"), SCHEMES)
def test_thousands_of_damaged_bytes_are_refused_or_read_soundly(
    encode: Callable[[Update], Payload], decode: Decode, sparse: bool
) -> None:
    data = payload_to_bytes(encode(update(sparse)))
    expected, read = spec(), 0
    for broken in mutated(data, 2500, seed=17 + sparse):
        assert refuses_or_reads(broken, decode, expected) == ""
        with contextlib.suppress(BadUpdate):
            decode(payload_from_bytes(broken), expected)
            read += 1
    assert read < 1250, "so much damage that goes unnoticed means that little damage is done"

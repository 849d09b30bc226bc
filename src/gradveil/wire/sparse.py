"""The sparse scheme: of a tensor with many zeros only the rest is sent, as positions and values, where that is smaller.

A tensor of n entries of s bytes, k of them not zero, takes k (i + s) bytes instead of n s, with i = 4 bytes per position (8 above
2³¹ entries). So at single precision it pays below half of the entries; any tensor where it does not pay is sent as it is.

Streams: ``weights`` (dense tensors), ``positions`` and ``values`` (flat, one pair per sparse tensor), ``buffers`` (as they are).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Payload, Role, TensorSpec, Update
from gradveil.tensors import Named
from gradveil.wire.dense import check_payload_head, check_stream, in_order

__all__ = ["SPARSE", "decode_sparse", "encode_sparse"]

SPARSE = "sparse-1"
_STREAMS = {"weights", "positions", "values", "buffers"}


def encode_sparse(update: Update) -> Payload:
    """Send each weight tensor in the smaller of the two forms; buffers are sent as they are."""
    streams: dict[str, Named] = {"weights": {}, "positions": {}, "values": {}}
    for name, value in update.weights.items():
        flat = value.reshape(-1)
        positions = flat.nonzero().reshape(-1).to(_position_dtype(flat.numel()))
        if positions.numel() * (positions.element_size() + flat.element_size()) < flat.numel() * flat.element_size():
            streams["positions"][name] = positions
            streams["values"][name] = flat[positions.long()]
        else:
            streams["weights"][name] = value
    if update.buffers:
        streams["buffers"] = dict(update.buffers)
    return Payload(SPARSE, streams, update.examples, update.round)


def decode_sparse(payload: Payload, spec: ModelSpec) -> Update:
    """Read a sparse payload, or raise `BadUpdate` with the first fault. Sizes come from the model, never from the payload."""
    check_payload_head(payload, SPARSE, _STREAMS)
    dense, positions, values = (payload.streams.get(name, {}) for name in ("weights", "positions", "values"))
    buffers = payload.streams.get("buffers", {})
    expected = spec.named(Role.WEIGHT)
    _check_names(dense, positions, values, expected)
    check_stream(dense, {name: expected[name] for name in dense}, complete=True)
    check_stream(buffers, spec.named(Role.BUFFER) | spec.named(Role.COUNTER), complete=False)
    weights = dict(dense)
    for name in positions:
        weights[name] = _fill(name, positions[name], values[name], expected[name])
    return Update(in_order(weights, spec), payload.examples, payload.round, in_order(buffers, spec))


def _position_dtype(entries: int) -> torch.dtype:
    return torch.int32 if entries <= 2**31 else torch.int64


def _check_names(dense: Named, positions: Named, values: Named, expected: dict[str, TensorSpec]) -> None:
    if positions.keys() != values.keys():
        odd = sorted(positions.keys() ^ values.keys())
        raise BadUpdate(f"the payload has positions without values, or values without positions, for {odd}")
    twice = sorted(dense.keys() & positions.keys())
    if twice:
        raise BadUpdate(f"the payload has {twice} both as a whole and as single entries")
    found = dense.keys() | positions.keys()
    missing, unknown = sorted(expected.keys() - found), sorted(found - expected.keys())
    if missing or unknown:
        raise BadUpdate(f"the payload lacks {missing or 'nothing'} and has unexpected {unknown or 'nothing'}")


def _fill(name: str, positions: Tensor, values: Tensor, expected: TensorSpec) -> Tensor:
    """Return the whole tensor, after checking that positions are sorted, unique and inside it."""
    entries = torch.Size(expected.shape).numel()
    if positions.dtype != _position_dtype(entries):
        raise BadUpdate(f"the positions in {name!r} are {positions.dtype}, expected {_position_dtype(entries)}")
    if positions.ndim != 1 or positions.numel() > entries:
        shape = tuple(positions.shape)
        raise BadUpdate(f"the positions in {name!r} have shape {shape}, expected a flat list of at most {entries}")
    check_stream({name: values}, {name: TensorSpec(tuple(positions.shape), expected.dtype, Role.WEIGHT)}, complete=True)
    if positions.numel() and not (int(positions[0]) >= 0 and int(positions[-1]) < entries):
        raise BadUpdate(f"the positions in {name!r} leave its {entries} entries")
    if bool((positions[1:] <= positions[:-1]).any()):
        raise BadUpdate(f"the positions in {name!r} are not sorted and unique")
    whole = torch.zeros(entries, dtype=values.dtype, device=values.device)
    return whole.index_copy(0, positions.long(), values).reshape(expected.shape)

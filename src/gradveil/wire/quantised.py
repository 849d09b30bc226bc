"""The quantised scheme: a tensor whose values lie on a grid is sent as small codes, packed bit by bit, and the ends of its grid.

A `Grid` of L levels puts its values at equal distances between two ends, and a code of ⌈log2 L⌉ bits says which. How fine the
grid of each tensor is, both sides know from the defense's settings; only the ends travel. A tensor that is not on its grid,
because something after the quantisation changed it, is sent as it is, so that no value ever changes on the wire.

Streams: ``codes`` (bytes, flat) and ``ends`` (one number for a grid symmetric about zero, else two), one pair per quantised
tensor; ``weights`` (the rest); ``buffers`` (as they are).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Payload, Role, TensorSpec, Update
from gradveil.tensors import Named
from gradveil.wire.dense import check_payload_head, check_stream, in_order

__all__ = ["QUANTISED", "Grid", "decode_quantised", "encode_quantised", "pack", "unpack"]

QUANTISED = "quantised-1"
_STREAMS = {"weights", "codes", "ends", "buffers"}
_CHUNK = 2**20
"""Codes packed at once: their single bits take one byte each for a moment. A multiple of eight, so that chunks end on bytes."""


@dataclass(frozen=True)
class Grid:
    """Equidistant values between two ends.

    Attributes:
        levels: How many, at least two.
        symmetric: Whether the ends are -m and m; then zero is a level where their number is odd.
    """

    levels: int
    symmetric: bool = True

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return (self.levels - 1).bit_length()

    def ends(self, value: Tensor) -> Tensor:
        """Return the ends that just hold all of ``value``: (m,) or (low, high); zeros for an empty tensor."""
        if value.numel() == 0:
            return value.new_zeros(1 if self.symmetric else 2)
        if self.symmetric:
            return value.abs().max().reshape(1)
        return torch.stack([value.min(), value.max()])

    def positions(self, value: Tensor, ends: Tensor) -> Tensor:
        """Return where the values lie between the ends, in steps from the lower one, as double precision in [0, levels - 1]."""
        low, high = self._low_high(ends)
        width = torch.where(high > low, high - low, torch.ones_like(high))
        return ((value.double() - low) / width * (self.levels - 1)).clamp(0, self.levels - 1)

    def values(self, codes: Tensor, ends: Tensor) -> Tensor:
        """Return the values behind codes, in the precision of ``ends``; the first and last code give the ends to the bit."""
        low, high = self._low_high(ends)
        share = codes.double() / (self.levels - 1)
        return (low * (1 - share) + high * share).to(ends.dtype)

    def step(self, ends: Tensor) -> Tensor:
        """Return the distance between two levels."""
        low, high = self._low_high(ends)
        return ((high - low) / (self.levels - 1)).to(ends.dtype)

    def _low_high(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        wide = ends.double()
        return (-wide[0], wide[0]) if self.symmetric else (wide[0], wide[1])


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return ⌈n · bits / 8⌉ bytes that hold n codes of ``bits`` bits, low bits first, the last byte filled up with zeros."""
    device, pieces = codes.device, []
    shifts, values = torch.arange(bits, device=device), 2 ** torch.arange(8, device=device)
    for part in codes.reshape(-1).split(_CHUNK):
        single = ((part.to(torch.int64).unsqueeze(1) >> shifts) & 1).reshape(-1)
        single = torch.nn.functional.pad(single, (0, -single.numel() % 8))
        pieces.append((single.reshape(-1, 8) * values).sum(1).to(torch.uint8))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)


def unpack(data: Tensor, bits: int, count: int) -> Tensor:
    """Return the ``count`` codes that `pack` wrote, as 64-bit integers; refuse padding that is not zero."""
    device, pieces = data.device, []
    shifts, values = torch.arange(8, device=device), 2 ** torch.arange(bits, device=device)
    for start in range(0, count, _CHUNK):
        here = min(_CHUNK, count - start)
        part = data[start * bits // 8 : (start + here) * bits // 8 + bool((start + here) * bits % 8)]
        single = ((part.to(torch.int64).unsqueeze(1) >> shifts) & 1).reshape(-1)
        if bool(single[here * bits :].any()):
            raise BadUpdate("the last byte of packed codes is filled up with something else than zeros")
        pieces.append((single[: here * bits].reshape(here, bits) * values).sum(1))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def encode_quantised(update: Update, grids: Mapping[str, Grid]) -> Payload:
    """Send every weight tensor that is on its grid as codes, and the rest as it is."""
    streams: dict[str, Named] = {"weights": {}, "codes": {}, "ends": {}}
    for name, value in update.weights.items():
        grid = grids.get(name)
        found = None if grid is None else _codes(value, grid)
        if grid is None or found is None:
            streams["weights"][name] = value
        else:
            streams["codes"][name], streams["ends"][name] = pack(found[0], grid.bits), found[1]
    if update.buffers:
        streams["buffers"] = dict(update.buffers)
    return Payload(QUANTISED, streams, update.examples, update.round)


def _codes(value: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
    """Return codes and ends, or None where they would not give back the same values."""
    ends = grid.ends(value)
    codes = grid.positions(value, ends).round().to(torch.int64).reshape(-1)
    same = torch.equal(grid.values(codes, ends), value.reshape(-1))
    return (codes, ends) if same else None


def decode_quantised(payload: Payload, spec: ModelSpec, grids: Mapping[str, Grid]) -> Update:
    """Read a quantised payload, or raise `BadUpdate` with the first fault. Sizes come from model and grids, never from it."""
    check_payload_head(payload, QUANTISED, _STREAMS)
    dense, codes, ends = (payload.streams.get(name, {}) for name in ("weights", "codes", "ends"))
    buffers = payload.streams.get("buffers", {})
    expected = spec.named(Role.WEIGHT)
    _check_names(dense, codes, ends, expected)
    check_stream(dense, {name: expected[name] for name in dense}, complete=True)
    check_stream(buffers, spec.named(Role.BUFFER) | spec.named(Role.COUNTER), complete=False)
    weights = dict(dense)
    for name in codes:
        if name not in grids:
            raise BadUpdate(f"{name!r} is sent as codes, but has no grid; both sides must run the same defense")
        weights[name] = _values(name, codes[name], ends[name], expected[name], grids[name])
    return Update(in_order(weights, spec), payload.examples, payload.round, in_order(buffers, spec))


def _check_names(dense: Named, codes: Named, ends: Named, expected: dict[str, TensorSpec]) -> None:
    if codes.keys() != ends.keys():
        raise BadUpdate(f"the payload has codes without ends, or ends without codes, for {sorted(codes.keys() ^ ends.keys())}")
    twice = sorted(dense.keys() & codes.keys())
    if twice:
        raise BadUpdate(f"the payload has {twice} both as values and as codes")
    found = dense.keys() | codes.keys()
    missing, unknown = sorted(expected.keys() - found), sorted(found - expected.keys())
    if missing or unknown:
        raise BadUpdate(f"the payload lacks {missing or 'nothing'} and has unexpected {unknown or 'nothing'}")


def _values(name: str, data: Tensor, ends: Tensor, expected: TensorSpec, grid: Grid) -> Tensor:
    """Return the whole tensor, after checking bytes, ends and every code."""
    entries = torch.Size(expected.shape).numel()
    size = -(-entries * grid.bits // 8)
    if data.dtype != torch.uint8 or tuple(data.shape) != (size,):
        raise BadUpdate(f"the codes of {name!r} are {tuple(data.shape)} of {data.dtype}, expected {size} bytes")
    shape = (1,) if grid.symmetric else (2,)
    check_stream({name: ends}, {name: TensorSpec(shape, expected.dtype, Role.WEIGHT)}, complete=True)
    if bool(ends[0] < 0) if grid.symmetric else bool(ends[0] > ends[1]):
        raise BadUpdate(f"the grid of {name!r} ends before it begins: {ends.tolist()}")
    codes = unpack(data, grid.bits, entries)
    if entries and int(codes.max()) >= grid.levels:
        raise BadUpdate(f"{name!r} has code {int(codes.max())}, but its grid has only {grid.levels} levels")
    return grid.values(codes, ends).reshape(expected.shape)

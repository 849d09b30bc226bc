"""The factor scheme: a weight matrix crosses as the factors of a low-rank approximation, where these are smaller than it.

A tensor with two or more axes is read as a matrix of p rows (its first axis) and q columns (the rest). With rank k its
factors take p k + k + k q entries, and p more where channel weights travel with them, instead of p q; where that is not
less, the approximation is sent as a whole. Scalars, vectors, empty tensors and single columns have nothing to truncate and
are sent as they are.

Streams: ``weights`` (whole tensors), ``scale`` (I), ``left`` (U), ``sigma`` (S) and ``right`` (V^T) of the factored ones,
``entropy`` (one number per matrix), ``buffers`` (as they are).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Payload, Role, TensorSpec, Update
from gradveil.tensors import Named, check_finite
from gradveil.wire.dense import check_payload_head, check_stream, in_order

__all__ = ["FACTORS", "Factors", "decode_factors", "encode_factors", "entropies_of", "factors_of", "matrix_shape"]

FACTORS = "factors-1"
_PARTS = ("scale", "left", "sigma", "right")
_STREAMS = {"weights", "buffers", "entropy", *_PARTS}
_ENTROPY = TensorSpec((), torch.float64, Role.WEIGHT)
_SLACK = 1e-6
"""Rounding allowed above the largest entropy a matrix can have."""


@dataclass(frozen=True)
class Factors:
    """A matrix as ``max(I) I^+ U diag(S) V^T``, with ``I^+`` zero where I is; without I as ``U diag(S) V^T``.

    I is divided by its largest entry, so that S stays in the range of the matrix itself: huge updates do not overflow.

    Attributes:
        scale: (p,) channel weights I, or None.
        left: (p, k) left factor.
        sigma: (k,) singular values, falling.
        right: (k, q) right factor.
    """

    scale: Tensor | None
    left: Tensor
    sigma: Tensor
    right: Tensor

    def whole(self) -> Tensor:
        """Return the (p, q) matrix."""
        left = self.left * self.sigma
        if self.scale is not None:
            alive = self.scale > 0
            inverse = torch.where(alive, self.scale.max() / torch.where(alive, self.scale, torch.ones_like(self.scale)), 0.0)
            left = left * inverse[:, None]
        return left @ self.right

    @property
    def entries(self) -> int:
        """How many numbers cross the wire."""
        return sum(value.numel() for value in (self.scale, self.left, self.sigma, self.right) if value is not None)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return (p, q) of a tensor that is read as a matrix, or None where there is nothing to truncate."""
    if len(shape) < 2 or 0 in shape:
        return None
    columns = math.prod(shape[1:])
    return (shape[0], columns) if columns > 1 else None


def encode_factors(update: Update, factors: Mapping[str, Factors], entropies: Mapping[str, float]) -> Payload:
    """Send every matrix in the smaller of its two forms, the rest of the update as it is, and one entropy per matrix."""
    streams: dict[str, Named] = {"weights": {}, "entropy": {}, **{part: {} for part in _PARTS}}
    for name, value in update.weights.items():
        own = factors.get(name)
        if own is None:
            streams["weights"][name] = value
            continue
        streams["entropy"][name] = torch.tensor(entropies[name], dtype=torch.float64, device=value.device)
        if own.entries >= value.numel():
            streams["weights"][name] = own.whole().reshape(value.shape)
            continue
        for part in _PARTS:
            tensor = getattr(own, part)
            if tensor is not None:
                streams[part][name] = tensor
    if update.buffers:
        streams["buffers"] = dict(update.buffers)
    return Payload(FACTORS, streams, update.examples, update.round)


def factors_of(payload: Payload, name: str) -> Factors | None:
    """Return the factors of one matrix, or None where it was sent as a whole."""
    left = payload.streams.get("left", {}).get(name)
    if left is None:
        return None
    scale = payload.streams.get("scale", {}).get(name)
    return Factors(scale, left, payload.streams["sigma"][name], payload.streams["right"][name])


def entropies_of(payload: Payload) -> dict[str, float]:
    """Return the entropy of every matrix."""
    return {name: float(value) for name, value in payload.streams.get("entropy", {}).items()}


def decode_factors(payload: Payload, spec: ModelSpec, *, scaled: bool) -> Update:
    """Read a payload of factors, or raise `BadUpdate` with the first fault. Sizes come from the model, never from the payload.

    Args:
        payload: What arrived.
        spec: The model.
        scaled: Whether channel weights must come with the factors; without, they must not.
    """
    check_payload_head(payload, FACTORS, _STREAMS)
    expected = spec.named(Role.WEIGHT)
    dense, buffers = payload.streams.get("weights", {}), payload.streams.get("buffers", {})
    factored = _factored_names(payload, scaled=scaled)
    _check_names(dense, factored, expected)
    check_stream(dense, {name: expected[name] for name in dense}, complete=True)
    check_stream(buffers, spec.named(Role.BUFFER) | spec.named(Role.COUNTER), complete=False)
    _check_entropies(payload.streams.get("entropy", {}), expected)
    weights = dict(dense)
    for name in factored:
        own = factors_of(payload, name)
        assert own is not None  # `factored` holds the names in the stream `left`
        weights[name] = _multiply(name, own, expected[name])
    return Update(in_order(weights, spec), payload.examples, payload.round, in_order(buffers, spec))


def _factored_names(payload: Payload, *, scaled: bool) -> set[str]:
    found = {part: set(payload.streams.get(part, {})) for part in _PARTS}
    if not scaled and found["scale"]:
        raise BadUpdate(f"the payload has channel weights of {sorted(found['scale'])}, which this defense does not send")
    needed = [found[part] for part in _PARTS if scaled or part != "scale"]
    complete = needed[0].intersection(*needed)
    odd = sorted(needed[0].union(*needed) - complete)
    if odd:
        raise BadUpdate(f"the payload lacks some of the factors of {odd}")
    return complete


def _check_names(dense: Named, factored: set[str], expected: Mapping[str, TensorSpec]) -> None:
    twice = sorted(dense.keys() & factored)
    if twice:
        raise BadUpdate(f"the payload has {twice} both as a whole and as factors")
    flat = sorted(name for name in factored & expected.keys() if matrix_shape(expected[name].shape) is None)
    if flat:
        raise BadUpdate(f"the payload has factors of {flat}, which are no matrices")
    found = dense.keys() | factored
    missing, unknown = sorted(expected.keys() - found), sorted(found - expected.keys())
    if missing or unknown:
        raise BadUpdate(f"the payload lacks {missing or 'nothing'} and has unexpected {unknown or 'nothing'}")


def _check_entropies(entropies: Named, expected: Mapping[str, TensorSpec]) -> None:
    shapes = {name: matrix_shape(spec.shape) for name, spec in expected.items()}
    check_stream(entropies, {name: _ENTROPY for name, shape in shapes.items() if shape is not None}, complete=True)
    for name, value in entropies.items():
        shape = shapes[name]
        assert shape is not None  # `check_stream` has refused other names
        most = math.log(min(shape))
        if not 0 <= float(value) <= most + _SLACK:
            raise BadUpdate(
                f"the entropy of {name!r} is {float(value)}; of {min(shape)} singular values it is from 0 to {most:.4g}"
            )


def _multiply(name: str, factors: Factors, expected: TensorSpec) -> Tensor:
    """Return the whole tensor, after checking every factor against the model's own sizes."""
    shape = matrix_shape(expected.shape)
    assert shape is not None  # `_check_names` has refused other tensors
    rows, columns = shape
    rank = factors.sigma.numel()
    if not 1 <= rank <= min(shape):
        raise BadUpdate(f"the factors of {name!r} claim rank {rank}; it is from 1 to {min(shape)}")
    sizes = {"left": (rows, rank), "sigma": (rank,), "right": (rank, columns)} | (
        {} if factors.scale is None else {"scale": (rows,)}
    )
    parts = {part: getattr(factors, part) for part in sizes}
    wanted = {f"{part} of {name}": TensorSpec(size, expected.dtype, Role.WEIGHT) for part, size in sizes.items()}
    check_stream({f"{part} of {name}": value for part, value in parts.items()}, wanted, complete=True)
    if factors.entries >= rows * columns:
        raise BadUpdate(f"the factors of {name!r} at rank {rank} are larger than the matrix; it must be sent as a whole")
    if bool((factors.sigma < 0).any()) or bool((factors.sigma[1:] > factors.sigma[:-1]).any()):
        raise BadUpdate(f"the singular values of {name!r} are not a falling list of numbers from 0 up")
    if factors.scale is not None and bool((factors.scale < 0).any()):
        raise BadUpdate(f"the channel weights of {name!r} are not all from 0 up")
    whole = factors.whole().reshape(expected.shape)
    check_finite({name: whole}, "the product of the factors")
    return whole

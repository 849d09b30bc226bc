"""The default scheme: every tensor as it is. Decoding checks names, shapes and values before anything is used."""

from __future__ import annotations

from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Payload, Role, TensorSpec, Update
from gradveil.tensors import Named, check_finite

__all__ = ["DENSE", "check_payload_head", "check_stream", "decode_dense", "encode_dense", "in_order"]

DENSE = "dense-1"
_MOST = 2**53
"""Counts above this are no longer exact as float64, in which aggregation weights are computed."""


def encode_dense(update: Update) -> Payload:
    """Put weights and buffers into their streams unchanged."""
    streams = {"weights": dict(update.weights)}
    if update.buffers:
        streams["buffers"] = dict(update.buffers)
    return Payload(DENSE, streams, update.examples, update.round)


def decode_dense(payload: Payload, spec: ModelSpec) -> Update:
    """Read a dense payload, or raise `BadUpdate` with the first fault."""
    check_payload_head(payload, DENSE, {"weights", "buffers"})
    weights = payload.streams.get("weights", {})
    buffers = payload.streams.get("buffers", {})
    check_stream(weights, spec.named(Role.WEIGHT), complete=True)
    check_stream(buffers, spec.named(Role.BUFFER) | spec.named(Role.COUNTER), complete=False)
    return Update(
        weights=in_order(weights, spec), examples=payload.examples, round=payload.round, buffers=in_order(buffers, spec)
    )


def in_order(stream: Named, spec: ModelSpec) -> Named:
    """Return the tensors in the model's own order, which a file does not keep."""
    return {name: stream[name] for name in spec.tensors if name in stream}


def check_payload_head(payload: Payload, scheme: str, streams: set[str]) -> None:
    """Refuse another scheme, unknown streams and impossible counts."""
    if payload.scheme != scheme:
        raise BadUpdate(f"the payload's scheme is {payload.scheme!r}, expected {scheme!r}; both sides must run the same defense")
    unknown = sorted(set(payload.streams) - streams)
    if unknown:
        raise BadUpdate(f"the payload has an unknown stream {unknown[0]!r}")
    if not (1 <= payload.examples <= _MOST and 0 <= payload.round <= _MOST):
        raise BadUpdate(f"the payload claims {payload.examples} examples in round {payload.round}; both must be sensible counts")


def check_stream(stream: Named, expected: dict[str, TensorSpec], *, complete: bool) -> None:
    """Refuse missing or unknown names, wrong shapes or precision, and values that are not finite."""
    unknown = sorted(set(stream) - set(expected))
    missing = sorted(set(expected) - set(stream))
    if unknown or (complete and missing):
        raise BadUpdate(f"the payload lacks {missing or 'nothing'} and has unexpected {unknown or 'nothing'}")
    for name, value in stream.items():
        if tuple(value.shape) != expected[name].shape:
            raise BadUpdate(f"{name!r} has shape {tuple(value.shape)}, expected {expected[name].shape}")
        if value.dtype != expected[name].dtype:
            raise BadUpdate(f"{name!r} is {value.dtype}, expected {expected[name].dtype}; convert it before sending")
    check_finite(stream, "the payload")

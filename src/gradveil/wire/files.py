"""Payloads as bytes and files: safetensors with a JSON head in its metadata. Nothing here can execute code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from gradveil.errors import BadUpdate, UsageError
from gradveil.records import Payload
from gradveil.storage.files import write_whole
from gradveil.study.checks import is_whole
from gradveil.tensors import Named
from gradveil.wire.dense import DENSE

__all__ = ["payload_from_bytes", "payload_to_bytes", "read_payload", "tensor_bytes", "write_payload"]

FORMAT = "gradveil-payload-1"
_SEPARATOR = "::"


def payload_to_bytes(payload: Payload) -> bytes:
    """Serialise a payload."""
    # Clones, because safetensors refuses tensors that share memory, as tied weights and expanded views do.
    flat = {
        f"{stream}{_SEPARATOR}{name}": value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for stream, named in payload.streams.items()
        for name, value in named.items()
    }
    head = {
        "format": FORMAT,
        "scheme": payload.scheme,
        "examples": payload.examples,
        "round": payload.round,
        "notes": dict(payload.notes),
        "streams": sorted(payload.streams),
    }
    return save(flat, metadata={"gradveil": json.dumps(head, sort_keys=True)})


def payload_from_bytes(data: bytes) -> Payload:
    """Parse a payload, or raise `BadUpdate`. Content is checked against a model later, by ``decode``."""
    try:
        length = int.from_bytes(data[:8], "little")
        head = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["gradveil"])
        flat = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"this is no Gradveil payload: {type(error).__name__}; capture it with gradveil.wire.write_payload"
        raise BadUpdate(reason) from error
    return _assemble(head, flat)


def _assemble(head: Any, flat: Named) -> Payload:
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        found = head.get("format") if isinstance(head, dict) else head
        raise BadUpdate(f"the payload's format is {found!r}, expected {FORMAT!r}")
    scheme, examples, round_, notes, names = (
        cast("Any", head.get(k)) for k in ("scheme", "examples", "round", "notes", "streams")
    )
    whole = all(is_whole(v) for v in (examples, round_))
    named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not (isinstance(scheme, str) and whole and named and _are_notes(notes)):
        raise BadUpdate("the payload's head is malformed: scheme, examples, round, notes and streams are needed")
    streams: dict[str, Named] = {name: {} for name in names}
    for key, value in flat.items():
        stream, separator, name = key.partition(_SEPARATOR)
        if not separator or stream not in streams:
            raise BadUpdate(f"the payload has a tensor {key!r} outside its declared streams")
        streams[stream][name] = value
    return Payload(scheme, streams, examples, round_, notes)


def _are_notes(notes: Any) -> bool:
    """Whether notes are what a record may hold: texts and finite numbers."""
    if not isinstance(notes, dict):
        return False
    return all(isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)) for value in notes.values())


def write_payload(payload: Payload, path: Path) -> None:
    """Write a payload to a file, whole or not at all."""
    write_whole(path, payload_to_bytes(payload))


def read_payload(path: Path) -> Payload:
    """Read a captured payload. A plain safetensors file of named tensors is read as a dense update of one example."""
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}")
    try:
        with safe_open(str(path), framework="pt") as opened:
            metadata = opened.metadata() or {}
            if "gradveil" not in metadata:
                weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                return Payload(DENSE, {"weights": weights}, 1)
    except (SafetensorError, OSError) as error:
        raise BadUpdate(f"{str(path)!r} is not a safetensors file; save the update with gradveil.wire.write_payload") from error
    return payload_from_bytes(path.read_bytes())


def tensor_bytes(payload: Payload) -> int:
    """Return the bytes the payload's tensors take on the wire, without the head."""
    return sum(v.numel() * v.element_size() for tensors in payload.streams.values() for v in tensors.values())

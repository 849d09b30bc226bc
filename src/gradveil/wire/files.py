"""Payloads as bytes and files: safetensors with a JSON head in its metadata. Nothing here can execute code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from gradveil.errors import BadUpdate, UsageError
from gradveil.records import Payload
from gradveil.storage.files import write_whole
from gradveil.wire.dense import DENSE
from gradveil.wire.head import flat_tensors, head_as_json, payload_of

__all__ = ["payload_from_bytes", "payload_to_bytes", "read_payload", "tensor_bytes", "write_payload"]


def payload_to_bytes(payload: Payload) -> bytes:
    """Serialise a payload."""
    # Clones, because safetensors refuses tensors that share memory, as tied weights and expanded views do.
    flat = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in flat_tensors(payload).items()
    }
    return save(flat, metadata={"gradveil": head_as_json(payload)})


def payload_from_bytes(data: bytes) -> Payload:
    """Parse a payload, or raise `BadUpdate`. Content is checked against a model later, by ``decode``."""
    try:
        length = int.from_bytes(data[:8], "little")
        head = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["gradveil"])
        flat = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"this is no Gradveil payload: {type(error).__name__}; capture it with gradveil.wire.write_payload"
        raise BadUpdate(reason) from error
    return payload_of(head, flat)


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

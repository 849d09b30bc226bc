"""What a defense promises about the wire: payloads survive being bytes, and damaged ones are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from gradveil.defenses.base import Defense
from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Payload, Role
from gradveil.tensors import Named
from gradveil.testing.contract import require
from gradveil.testing.defenses_scene import Scene
from gradveil.wire.files import payload_from_bytes, payload_to_bytes

__all__ = ["WIRE_CHECKS", "damaged", "mutated", "refuses_or_reads"]

MUTATIONS = 150


def payload_survives_bytes(defense: Defense, scene: Scene) -> None:
    """A payload as bytes and back is the same payload, and decodes to the same update."""
    payload = _payload(defense, scene)
    require(payload.scheme == defense.scheme, f"the payload's scheme is {payload.scheme!r}, the defense says {defense.scheme!r}")
    back = payload_from_bytes(payload_to_bytes(payload))
    head = (
        (back.scheme, back.examples, back.round, dict(back.notes)),
        (payload.scheme, payload.examples, payload.round, dict(payload.notes)),
    )
    require(head[0] == head[1], f"the head of the payload changes from {head[1]} to {head[0]}")
    require(back.streams.keys() == payload.streams.keys(), "the payload's streams change")
    left, right = defense.decode(back, scene.spec).weights, defense.decode(payload, scene.spec).weights
    for name, value in right.items():
        require(torch.equal(left[name], value), f"{name!r} changes on the wire")
    require(list(left) == list(scene.spec.named(Role.WEIGHT)), "decoded tensors are not in the model's order")


def damaged_payloads_are_refused(defense: Defense, scene: Scene) -> None:
    """A payload with a wrong name, shape, precision, count, scheme or value raises `BadUpdate`, and so do broken bytes."""
    payload = _payload(defense, scene)
    for what, wrong in damaged(payload):
        try:
            defense.decode(wrong, scene.spec)
        except BadUpdate:
            continue
        except Exception as error:
            require(False, f"{what}: raises {type(error).__name__} instead of BadUpdate: {error}")
        require(False, f"{what}: is accepted")
    for data in mutated(payload_to_bytes(payload), MUTATIONS, seed=5):
        complaint = refuses_or_reads(data, defense.decode, scene.spec)
        require(not complaint, complaint)


def damaged(payload: Payload) -> Iterator[tuple[str, Payload]]:
    """Yield payloads that are wrong for certain, each with what is wrong."""
    yield "another scheme", replace(payload, scheme="another-1")
    yield "no examples", replace(payload, examples=0)
    yield "a negative round", replace(payload, round=-1)
    yield "an unknown stream", replace(payload, streams={**payload.streams, "extra": {}})
    for stream, named in payload.streams.items():
        for name, value in named.items():
            here = f"{stream}/{name}"
            rest = {other: tensor for other, tensor in named.items() if other != name}
            yield f"{here} missing", _with(payload, stream, rest)
            yield f"{here} renamed", _with(payload, stream, {**rest, name + "x": value})
            yield f"{here} in another shape", _with(payload, stream, {**rest, name: value.reshape(-1, 1, 1)})
            yield f"{here} in half precision", _with(payload, stream, {**rest, name: value.to(torch.float16)})
            if value.is_floating_point() and value.numel():
                yield f"{here} with a NaN", _with(payload, stream, {**rest, name: value * torch.nan})


def mutated(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield copies of ``data`` with single bits flipped, bytes replaced, ends cut off, or pieces moved."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        broken = bytearray(data)
        # Half of the damage goes to the head, which is short and says how the rest is read.
        reach = min(len(broken), 2000) if index % 2 else len(broken)
        place = int(rng.integers(reach))
        match index % 5:
            case 0:
                broken[place] ^= 1 << int(rng.integers(8))
            case 1:
                broken[place] = int(rng.integers(256))
            case 2:
                del broken[place:]
            case 3:
                broken[place:place] = rng.bytes(int(rng.integers(1, 9)))
            case _:
                other = int(rng.integers(reach))
                broken[place], broken[other] = broken[other], broken[place]
        yield bytes(broken)


def refuses_or_reads(data: bytes, decode: Callable[[Payload, ModelSpec], object], spec: ModelSpec) -> str:
    """Return an empty text where bytes are either refused with `BadUpdate` or read as a sound update, else what happened."""
    try:
        update = decode(payload_from_bytes(data), spec)
    except BadUpdate:
        return ""
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return f"damaged bytes raise {type(error).__name__} instead of BadUpdate: {error}"
    weights: Named = update.weights  # type: ignore[attr-defined]
    for name, expected in spec.named(Role.WEIGHT).items():
        if name not in weights or tuple(weights[name].shape) != expected.shape or weights[name].dtype != expected.dtype:
            return f"damaged bytes are read, but {name!r} is not what the model expects"
        if not bool(torch.isfinite(weights[name]).all()):
            return f"damaged bytes are read, but {name!r} is not finite"
    return ""


def _payload(defense: Defense, scene: Scene) -> Payload:
    return scene.payload(defense)


def _with(payload: Payload, stream: str, named: Named) -> Payload:
    streams: Mapping[str, Named] = {**payload.streams, stream: named}
    return replace(payload, streams=streams)


WIRE_CHECKS = (payload_survives_bytes, damaged_payloads_are_refused)

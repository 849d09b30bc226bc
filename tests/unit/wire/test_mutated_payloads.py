"""Thousands of mutated payloads at ``decode`` of every registered defense: a sound update comes out, or a named error.

A real client makes each payload; up to four changes are drawn for it, in the tensors, the head or the bytes. What hypothesis
finds it shrinks to the fewest changes. Memory is limited while decoding, so that a payload which lies about its size cannot take
it all.
"""

from __future__ import annotations

import math
import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradveil.defenses import DEFENSES, Defense, build_defense
from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Payload, Role, TensorSpec, Update
from gradveil.tensors import Named
from gradveil.testing.defenses_scene import Scene
from gradveil.testing.defenses_wire import mutated
from gradveil.wire.files import payload_from_bytes, payload_to_bytes

MUTATIONS = 120
"""Per registered defense."""
SPARE_MEMORY = 2**30
"""Bytes that decoding may ask for beyond what the process has; the model has 2 kB."""
ENDLESS = 2**41
"""Entries no machine has room for; a view of one entry claims them."""

BUFFERS = {
    "bn.running_mean": TensorSpec((3,), torch.float32, Role.BUFFER),
    "bn.num_batches_tracked": TensorSpec((), torch.int64, Role.COUNTER),
}
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
ODD_NUMBERS = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, -1.0, 0.0, 2.0**31, 2.0**63)
ODD_COUNTS = (0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**63, 10**30, -(10**30))
ODD_NOTES = (math.nan, math.inf, -1, 10**400, "", "nan", "\x00", "gain", True, 0.5, 2**63)


@dataclass(frozen=True)
class Case:
    """A defense at one rung, with what its client sent and what its server expects."""

    defense: Defense
    payload: Payload
    spec: ModelSpec


@cache
def cases(name: str) -> tuple[Case, ...]:
    rungs = [DEFENSES.build({"name": name, **rung}) for rung in DEFENSES.card(name).ladder] or [DEFENSES.build(name)]
    return tuple(case_of(defense.quick()) for defense in rungs)  # effort changes the numbers sent, not how they are written


def case_of(defense: Defense) -> Case:
    scene = Scene.of(defense)
    payload = scene.payload(defense)
    buffers = {"bn.running_mean": torch.ones(3), "bn.num_batches_tracked": torch.tensor(-2)}
    spec = ModelSpec({**scene.spec.tensors, **BUFFERS})
    return Case(defense, replace(payload, streams={**payload.streams, "buffers": buffers}), spec)


Change = Callable[[Payload, random.Random], Payload]
TensorChange = Callable[[Tensor, random.Random], Tensor]


def places(payload: Payload) -> list[tuple[str, str]]:
    return [(stream, name) for stream, named in payload.streams.items() for name in named]


def put(payload: Payload, stream: str, named: Named) -> Payload:
    return replace(payload, streams={**payload.streams, stream: named})


def without(payload: Payload, stream: str, name: str) -> Payload:
    return put(payload, stream, {other: value for other, value in payload.streams[stream].items() if other != name})


def on_tensor(change: TensorChange) -> Change:
    """Change one tensor and leave it where it is."""

    def apply(payload: Payload, rng: random.Random) -> Payload:
        if not places(payload):
            return payload
        stream, name = rng.choice(places(payload))
        value = payload.streams[stream][name]
        if value.numel() >= ENDLESS:  # there is no room for a changed copy
            return payload
        try:
            changed = change(value, rng)
        except NotImplementedError:  # torch can do next to nothing with eight-bit floats
            return payload
        return put(payload, stream, {**payload.streams[stream], name: changed})

    apply.__name__ = change.__name__
    return apply


def another_dtype(value: Tensor, rng: random.Random) -> Tensor:
    # A second change of the same tensor may find it complex; dropping its imaginary part is what is meant then.
    value = torch.view_as_real(value)[..., 0] if value.is_complex() else value
    return value.to(rng.choice(DTYPES))


def another_shape(value: Tensor, rng: random.Random) -> Tensor:
    flat = value.reshape(-1)
    shapes: list[Tensor] = [
        flat,
        value.unsqueeze(0),
        value.unsqueeze(-1),
        flat[: flat.numel() // 2],
        torch.cat([flat, flat]),
        value[None].expand(3, *value.shape),
        flat[:1].reshape(()) if flat.numel() else flat,
        value.reshape(*value.shape, *([1] * 12)),
    ]
    return rng.choice(shapes)


def no_entries(value: Tensor, rng: random.Random) -> Tensor:
    return value.new_empty(rng.choice([(0,), (0, 5), (3, 0), (0, *value.shape)]))


def in_another_order(value: Tensor, rng: random.Random) -> Tensor:
    return rng.choice([value.flip(0) if value.ndim else value, value.mT.contiguous().mT if value.ndim > 1 else value])


def one_entry_everywhere(value: Tensor, rng: random.Random) -> Tensor:
    return value.reshape(-1)[:1].expand(value.numel()).reshape(value.shape) if value.numel() else value


def endless(value: Tensor, rng: random.Random) -> Tensor:
    one = value.reshape(-1)[:1] if value.numel() else value.new_zeros(1)
    shapes = [(ENDLESS,), (ENDLESS, 1), (1, ENDLESS), (*value.shape, ENDLESS), (ENDLESS, *value.shape[1:])]
    return one.reshape(1).expand(rng.choice([shape for shape in shapes if 0 not in shape]))


def odd_entries(value: Tensor, rng: random.Random) -> Tensor:
    changed = value.clone().reshape(-1)
    if not changed.numel() or value.dtype == torch.bool:
        return value
    where: Any = rng.choice([slice(None), rng.randrange(changed.numel()), slice(0, None, 2)])
    if value.is_floating_point() or value.is_complex():
        changed[where] = rng.choice(ODD_NUMBERS)
    else:
        limits = torch.iinfo(value.dtype)
        changed[where] = rng.choice(
            [
                limits.min,
                limits.max,
                0,
                1,
                min(limits.max, 10**6),
                int(changed[-1]) + (0 if limits.max == int(changed[-1]) else 1),
            ]
        )
    return changed.reshape(value.shape)


def negated(value: Tensor, rng: random.Random) -> Tensor:
    return value if value.dtype == torch.bool else -value


def drop(payload: Payload, rng: random.Random) -> Payload:
    return without(payload, *rng.choice(places(payload))) if places(payload) else payload


def rename(payload: Payload, rng: random.Random) -> Payload:
    if not places(payload):
        return payload
    stream, name = rng.choice(places(payload))
    value = payload.streams[stream][name]
    new = rng.choice([name + "x", "", name.upper(), "\x00", "é" * 300, rng.choice(places(payload))[1], name + "::" + name])
    return put(without(payload, stream, name), stream, {**without(payload, stream, name).streams[stream], new: value})


def swap(payload: Payload, rng: random.Random) -> Payload:
    """Exchange two tensors, within a stream or across."""
    if len(places(payload)) < 2:
        return payload
    (s, n), (t, m) = rng.sample(places(payload), 2)
    left, right = payload.streams[s][n], payload.streams[t][m]
    payload = put(payload, s, {**payload.streams[s], n: right})
    return put(payload, t, {**payload.streams[t], m: left})


def move(payload: Payload, rng: random.Random) -> Payload:
    """Put a tensor under the same name into another stream, or leave a copy where it was."""
    if not places(payload):
        return payload
    stream, name = rng.choice(places(payload))
    value, target = payload.streams[stream][name], rng.choice([*payload.streams, "extra"])
    rest = payload if rng.random() < 0.5 else without(payload, stream, name)
    return put(rest, target, {**rest.streams.get(target, {}), name: value})


def endless_twins(payload: Payload, rng: random.Random) -> Payload:
    """Make a tensor endless in every stream that has it, so that parts which must agree in length still do."""
    if not places(payload):
        return payload
    _, name = rng.choice(places(payload))
    for stream, named in payload.streams.items():
        if name in named:
            one = named[name].reshape(-1)[:1] if named[name].numel() else named[name].new_zeros(1)
            payload = put(payload, stream, {**named, name: one.expand(ENDLESS)})
    return payload


def streams(payload: Payload, rng: random.Random) -> Payload:
    """Lose, empty, rename, exchange or add a stream."""
    names = list(payload.streams) or ["weights"]
    payload = payload if payload.streams else replace(payload, streams={"weights": {}})
    first, second = rng.choice(names), rng.choice(names)
    rest = {name: named for name, named in payload.streams.items() if name != first}
    changed = rng.choice(
        [
            rest,
            {**payload.streams, first: {}},
            {**rest, first + "2": payload.streams[first]},
            {**payload.streams, first: payload.streams[second], second: payload.streams[first]},
            {**payload.streams, "extra": {}},
            {},
        ]
    )
    return replace(payload, streams=changed)


def head(payload: Payload, rng: random.Random) -> Payload:
    """Lie about the scheme, the counts or the notes."""
    odd = {rng.choice([*payload.notes, "rank", "bits", ""]): rng.choice(ODD_NOTES)}
    return rng.choice(
        [
            replace(payload, scheme=rng.choice(["dense-1", "sparse-1", "", "another-1", payload.scheme.upper()])),
            replace(payload, examples=rng.choice(ODD_COUNTS)),
            replace(payload, round=rng.choice(ODD_COUNTS)),
            replace(payload, notes={**payload.notes, **odd}),
            replace(payload, notes={}),
            replace(payload, notes={str(index): "x" * 1000 for index in range(50)}),
        ]
    )


CHANGES: tuple[Change, ...] = (
    *(on_tensor(change) for change in (another_dtype, another_shape, no_entries, in_another_order, one_entry_everywhere)),
    *(on_tensor(change) for change in (endless, odd_entries, odd_entries, negated)),
    *(drop, rename, swap, move, endless_twins, streams, head, head),
)


@contextmanager
def limited_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def complaint(case: Case, make: Callable[[], Payload]) -> str:
    """Return what is wrong with the answer to a payload; an empty text where it is refused by name or read as a sound update."""
    try:
        with limited_memory():
            update = case.defense.decode(make(), case.spec)
    except BadUpdate as error:
        return "" if len(str(error)) > 10 else f"the refusal says nothing: {error!r}"
    except Exception as error:
        return f"raises {type(error).__name__} instead of BadUpdate: {error}"
    return unsound(update, case.spec)


def unsound(update: Update, spec: ModelSpec) -> str:
    """Return what is wrong with a decoded update."""
    if list(update.weights) != list(spec.named(Role.WEIGHT)):
        return f"is read with the weights {list(update.weights)}"
    if not (1 <= update.examples <= 2**53 and 0 <= update.round <= 2**53):
        return f"is read with {update.examples} examples in round {update.round}"
    for name, value in {**update.weights, **update.buffers}.items():
        expected = spec.tensors.get(name)
        if expected is None or tuple(value.shape) != expected.shape or value.dtype != expected.dtype:
            return f"is read with {name!r} of shape {tuple(value.shape)} and {value.dtype}"
        if not bool(torch.isfinite(value).all()):
            return f"is read with entries of {name!r} that are not finite"
    return ""


@pytest.mark.parametrize("name", DEFENSES.names())
def test_what_clients_send_is_read(name: str) -> None:
    for case in cases(name):
        assert complaint(case, lambda case=case: case.payload) == ""  # type: ignore[misc]
        update = case.defense.decode(case.payload, case.spec)
        assert update.buffers.keys() == BUFFERS.keys()


@pytest.mark.parametrize("name", DEFENSES.names())
@settings(max_examples=MUTATIONS, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(
    rung=st.integers(0, 9),
    changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_mutated_payloads_are_refused_by_name_or_read_as_sound_updates(
    name: str, rung: int, changes: list[Change], seed: int
) -> None:
    case, rng = cases(name)[rung % len(cases(name))], random.Random(seed)
    payload = case.payload
    for change in changes:
        payload = change(payload, rng)
    found = complaint(case, lambda: payload)
    assert not found, f"{case.defense}, after {[change.__name__ for change in changes]}: {found}"


@pytest.mark.parametrize("name", DEFENSES.names())
def test_mutated_bytes_are_refused_by_name_or_read_as_sound_updates(name: str) -> None:
    case = cases(name)[-1]
    for index, data in enumerate(mutated(payload_to_bytes(case.payload), MUTATIONS, seed=17)):
        found = complaint(case, lambda data=data: payload_from_bytes(data))  # type: ignore[misc]
        assert not found, f"{case.defense}, bytes {index}: {found}"


def test_chains_decode_like_their_parts() -> None:
    case = case_of(build_defense("clipping + top_k"))
    rng = random.Random(0)
    for _ in range(MUTATIONS):
        change = rng.choice(CHANGES)
        payload = change(case.payload, rng)
        assert not complaint(case, lambda payload=payload: payload)  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class Careless(Defense):
    """Trusts the payload, as much released code does."""

    def decode(self, payload: Payload, spec: ModelSpec) -> Update:
        return Update(dict(payload.streams["weights"]), payload.examples, payload.round)


def test_a_careless_decoder_is_noticed() -> None:
    case = replace(cases("none")[0], defense=Careless())
    rng = random.Random(1)
    payloads = [CHANGES[index % len(CHANGES)](case.payload, rng) for index in range(100)]
    found = {bool(complaint(case, lambda payload=payload: payload)) for payload in payloads}  # type: ignore[misc]
    assert found == {True, False}


def test_memory_is_limited_while_decoding() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Greedy(Careless):
        def decode(self, payload: Payload, spec: ModelSpec) -> Update:
            return Update({"w": torch.ones(2**31)}, 1)

    assert "instead of BadUpdate" in complaint(replace(cases("none")[0], defense=Greedy()), lambda: cases("none")[0].payload)

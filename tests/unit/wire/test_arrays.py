"""Payloads as named arrays: what comes back is what was sent, or one `BadUpdate`, and memory is never more than what came."""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import resource
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.defenses import build_defense
from gradveil.errors import BadUpdate, UsageError
from gradveil.records import Payload
from gradveil.wire import payload_from_arrays, payload_from_npy, payload_to_arrays, payload_to_bytes, tensor_from_npy
from tests.unit.wire.test_mutated_payloads import CHANGES, case_of, complaint

MUTATIONS = 3000
MANY_MUTATIONS = 100_000
SPARE = 256 * 2**20
"""Bytes that a hundred thousand refusals may leave behind, in a process that has everything loaded."""
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
)


def payload(**changes: Any) -> Payload:
    streams = {"weights": {"a::b": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(1.0)}, "buffers": {}}
    return replace(Payload("x-1", streams, examples=3, round=4, notes={"rank": 2, "k": "v"}), **changes)


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def as_npy(sent: Payload) -> tuple[dict[str, bytes], str]:
    arrays, head = payload_to_arrays(sent)
    return {name: npy(value, allow_pickle=False) for name, value in arrays.items()}, head


def with_header(text: str, content: bytes = bytes(24)) -> bytes:
    header = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def test_both_ways_give_back_what_was_sent_to_the_bit() -> None:
    odd = torch.arange(12).reshape(3, 4)
    kinds = {str(dtype): (odd % 2 if dtype == torch.bool else odd).to(dtype) for dtype in DTYPES}
    shapes = {"": torch.ones(0, 3), "turned": torch.arange(6.0).reshape(2, 3).T, "wide": torch.ones(1).expand(5)}
    nan = {"nan": torch.tensor([float("nan"), -0.0]), "half": torch.tensor([float("nan"), 1e-40], dtype=torch.bfloat16)}
    sent = payload(streams={"weights": kinds, "s": shapes | nan, "none": {}})
    expected = payload_to_bytes(replace(sent, streams={**sent.streams}))
    arrays, head = payload_to_arrays(sent)
    assert payload_to_bytes(payload_from_arrays(arrays, head)) == expected
    assert payload_to_bytes(payload_from_npy(*as_npy(sent))) == expected


@pytest.mark.parametrize("name", ["none", "svdefense", "pfgd", "top_k", "quantisation", "mq", "precode"])
def test_what_defenses_send_comes_back_to_the_bit(name: str) -> None:
    sent = case_of(build_defense(name).quick()).payload
    assert payload_to_bytes(payload_from_npy(*as_npy(sent))) == payload_to_bytes(sent)


def test_arrays_are_copies_and_tensors_too() -> None:
    value = torch.zeros(3)
    arrays, head = payload_to_arrays(payload(streams={"weights": {"w": value}}))
    value += 1
    read = payload_from_arrays(arrays, head)
    arrays["weights::w"] += 2
    assert read.streams["weights"]["w"].tolist() == [0, 0, 0]


def test_a_precision_that_numpy_lacks_is_refused_before_it_is_sent() -> None:
    with pytest.raises(UsageError, match="float8_e4m3fn, which numpy cannot hold; convert the model"):
        payload_to_arrays(payload(streams={"weights": {"w": torch.zeros(3).to(torch.float8_e4m3fn)}}))


FLOATS = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999, 999999), }"),
            "claims 9999999 × 999999 entries",
        ),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4), }"), "claims 4294967296"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3), }"), "no header"),
        (with_header("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }"), "column by column"),
        (with_header("{'descr': '|O', 'fortran_order': False, 'shape': (3,), }"), "no header"),
        (with_header("{'descr': '|O8', 'fortran_order': False, 'shape': (3,), }"), "entries of type '|O8'"),
        (with_header("{'descr': '<m8', 'fortran_order': False, 'shape': (3,), }"), "entries of type '<m8'"),
        (with_header("{'descr': '>f4', 'fortran_order': False, 'shape': (2, 3), }"), "no header"),
        (with_header("{'descr': '<u4', 'fortran_order': False, 'shape': (2, 3), }"), "entries of type '<u4'"),
        (with_header("{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (6,), }"), "no header"),
        (with_header("{'descr': '|b1', 'fortran_order': False, 'shape': (24,), }", bytes(23) + b"\x02"), "neither 0 nor 1"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (0" + ", 4611686018427387904" * 2 + "), }", b""), "axes"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3" + ", 1" * 31 + "), }"), "33 axes"),
        (with_header(FLOATS + " " * 2000), "no header"),
        (with_header(FLOATS, bytes(23)), "claims 2 × 3 entries of 4 bytes, and 23 bytes came"),
        (with_header(FLOATS, bytes(25)), "and 25 bytes came"),
        (npy(np.zeros(3))[:-20], "claims 3 entries"),
        (npy(np.array([print, 1], dtype=object), allow_pickle=True), "no header"),
        (b"\x93NUMPY\x02\x00" + npy(np.zeros(3))[8:], "no header"),
        (pickle.dumps([1]), "no header"),
        (b"", "no header"),
        ("text", "no content"),
        (None, "no content"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_no_plain_array_is_refused_before_anything_is_allocated(content: Any, words: str) -> None:
    assert tensor_from_npy(with_header(FLOATS)).shape == (2, 3)
    with pytest.raises(BadUpdate, match=re.escape(words)):
        payload_from_npy({"weights::w": content}, payload_to_arrays(payload())[1])


def test_columns_before_rows_are_read_where_a_framework_may_write_them() -> None:
    value = torch.arange(24.0).reshape(2, 3, 4)
    turned = npy(np.asfortranarray(value.numpy()))
    assert torch.equal(tensor_from_npy(turned, turned=True), value) and tensor_from_npy(turned, turned=True).is_contiguous()


def head(**changes: Any) -> str:
    return json.dumps({**json.loads(payload_to_arrays(payload())[1]), **changes})


@pytest.mark.parametrize(
    "told",
    [
        head(streams=["weights", "weights", "buffers"]),
        head(streams=["buffers"]),
        head(bfloat16=["nowhere"]),
        head(bfloat16=["weights::s"]),
        head(bfloat16=3),
        head(bfloat16=[[]]),
        head(examples=True),
        head(notes={"x": [1]}),
        head()[:-1] + ', "round": 7}',
        "[" * 100_000,
        "1" * 10_000,
        "null",
        "",
        " " * 2**21,
        3,
        None,
    ],
)
def test_a_head_that_lies_is_refused(told: Any) -> None:
    with pytest.raises(BadUpdate):
        payload_from_npy(as_npy(payload())[0], told)


@pytest.mark.parametrize(
    "value",
    [
        np.array([None]),
        np.zeros(3, dtype=">f4"),
        np.zeros(3, dtype="M8[s]"),
        np.broadcast_to(np.zeros(1), (2**40,)),
        np.zeros((2, 3)).T,
        [1.0],
        b"bytes",
        None,
    ],
)
def test_foreign_arrays_are_refused(value: Any) -> None:
    with pytest.raises(BadUpdate):
        payload_from_arrays({"weights::w": value}, head())


SIZES = ("9999999999, 9", "0, 9999999999999999999", "-3,", "3", ", ".join("1" * 40), "", "1e9,", "True,")
KINDS = ("|O", "<f2", "<f8", "|b1", "<i8", ">f4", "|S9", "<U4", "<c16", "|V4", "{}", "<f4" * 99)
LIES = (("1", "-1"), ('"weights"', '"w"'), (":", ","), ("[", "[" * 50), ("4", "4" * 5000))


def odd_content(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 8))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    ways = (
        bytes(changed),
        content[: rng.randrange(len(content))],
        content + bytes(rng.randrange(1, 99)),
        re.sub(rb"\((.*?)\)", f"({rng.choice(SIZES)})".encode(), content, count=1),
        re.sub(rb"'[<|][a-z]\d+'", f"'{rng.choice(KINDS)}'".encode(), content, count=1),
        content.replace(b"False", b"True", 1),
    )
    return rng.choice(ways)


def odd_head(told: str, rng: random.Random) -> str:
    if rng.random() < 0.5:
        return told.replace(*rng.choice(LIES), 1)
    at = rng.randrange(len(told) or 1)
    return told[:at] + rng.choice(("", "\x00", '"', "{", "9" * 400, "NaN", told[:at])) + told[at + 1 :]


def mutated_content(contents: dict[str, bytes], told: str, rng: random.Random) -> tuple[dict[str, bytes], str]:
    """Change one or two things of what is on the wire: bytes, headers, names, the head."""
    changed = dict(contents)
    for _ in range(rng.choice((1, 1, 2))):
        name, other = (rng.choice(list(changed)) for _ in range(2))
        way = rng.random()
        if way < 0.7:
            changed[name] = odd_content(changed[name] or b"x", rng)
        elif way < 0.85:
            new = rng.choice((name + "x", other, "", "::", "weights", "weights::", "extra::w", "\x00", "é" * 300))
            changed[new] = changed.pop(name)
        else:
            told = odd_head(told, rng)
    return changed, told


def run_mutations(count: int, seed: int) -> dict[bool, int]:
    """Return how many of so many mutated payloads were read, and how many refused; complain about anything else."""
    rng, found = random.Random(seed), {True: 0, False: 0}
    chosen = [case_of(build_defense(name)) for name in ("none", "svdefense", "top_k", "quantisation")]
    written = [as_npy(case.payload) for case in chosen]
    for index in range(count):
        case, (contents, told) = chosen[index % 4], written[index % 4]
        given = mutated_content(contents, told, rng)
        try:
            read = payload_from_npy(*given)
        except BadUpdate:
            found[False] += 1
            continue
        found[True] += 1
        assert not complaint(case, lambda read=read: read), f"mutation {index}"  # type: ignore[misc]
    return found


def test_thousands_of_mutated_arrays_are_refused_or_read_as_sound_updates() -> None:
    found = run_mutations(MUTATIONS, seed=19)
    assert found[False] > MUTATIONS / 2 and found[True] > 100


@pytest.mark.deploy
def test_a_hundred_thousand_mutated_arrays_leave_no_memory_behind() -> None:
    run_mutations(2000, seed=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = run_mutations(MANY_MUTATIONS, seed=20)
    assert found[False] > MANY_MUTATIONS / 2 and found[True] > 1000
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < SPARE


def test_changed_payloads_cross_as_arrays_as_they_do_as_bytes() -> None:
    case, rng = case_of(build_defense("svdefense")), random.Random(3)
    for index in range(300):
        sent = CHANGES[index % len(CHANGES)](case.payload, rng)
        if any(value.numel() > 10**6 for named in sent.streams.values() for value in named.values()):
            continue
        try:
            contents: Mapping[str, bytes] = as_npy(sent)[0]
        except UsageError:
            continue
        told = payload_to_arrays(sent)[1]
        assert not complaint(case, lambda contents=contents, told=told: payload_from_npy(contents, told))  # type: ignore[misc]

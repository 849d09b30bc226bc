"""Payloads as bytes and files: whole or not at all, and nothing but `BadUpdate` for what is broken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from gradveil.errors import BadUpdate, UsageError
from gradveil.records import Payload
from gradveil.wire import DENSE, payload_from_bytes, payload_to_bytes, read_payload, tensor_bytes, write_payload


def payload(**changes: Any) -> Payload:
    streams = {"weights": {"a::b": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(1.0)}, "buffers": {}}
    return replace(Payload("x-1", streams, examples=3, round=4, notes={"rank": 2, "k": "v"}), **changes)


def same(left: Payload, right: Payload) -> bool:
    heads = [(p.scheme, p.examples, p.round, dict(p.notes), {s: sorted(t) for s, t in p.streams.items()}) for p in (left, right)]
    return heads[0] == heads[1] and all(
        torch.equal(value, right.streams[stream][name]) for stream, named in left.streams.items() for name, value in named.items()
    )


def test_bytes_keep_everything_even_empty_streams_and_odd_names() -> None:
    assert same(payload_from_bytes(payload_to_bytes(payload())), payload())
    assert payload_to_bytes(payload()) == payload_to_bytes(payload())


def test_tensors_that_share_memory_or_are_views_can_be_sent() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    streams = {"weights": {"a": base, "tied": base, "turned": base.T, "wide": torch.ones(1).expand(5)}}
    assert same(payload_from_bytes(payload_to_bytes(payload(streams=streams))), payload(streams=streams))


def test_bytes_count_tensors_only() -> None:
    assert tensor_bytes(payload()) == 28


def test_files_are_written_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "update.safetensors"
    write_payload(payload(), path)
    assert same(read_payload(path), payload())
    assert [each.name for each in tmp_path.iterdir()] == ["update.safetensors"]


def test_a_plain_safetensors_file_is_a_dense_update_of_one_example(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    save_file({"w": torch.ones(2)}, path)
    assert same(read_payload(path), Payload(DENSE, {"weights": {"w": torch.ones(2)}}, examples=1))


def test_missing_and_foreign_files_get_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        read_payload(tmp_path / "none")
    for content in (b"", b"hello", b"\x80\x04pickle", bytes(100)):
        (tmp_path / "odd").write_bytes(content)
        with pytest.raises(BadUpdate, match="not a safetensors file"):
            read_payload(tmp_path / "odd")


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadUpdate):
        payload_from_bytes(data)


def with_head(head: object) -> bytes:
    """Return the bytes of a payload whose head is replaced."""
    data = payload_to_bytes(payload())
    length = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + length])
    outer["__metadata__"]["gradveil"] = head if isinstance(head, str) else json.dumps(head)
    packed = json.dumps(outer).encode()
    packed += b" " * (-len(packed) % 8)
    return len(packed).to_bytes(8, "little") + packed + data[8 + length :]


def good_head(**changes: object) -> dict[str, object]:
    head = {
        "format": "gradveil-payload-1",
        "scheme": "x-1",
        "examples": 3,
        "round": 4,
        "notes": {},
        "streams": ["weights", "buffers"],
    }
    return head | changes


def test_the_head_builder_of_these_tests_builds_a_right_head() -> None:
    assert same(payload_from_bytes(with_head(good_head())), payload(notes={}))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "gradveil-payload-9"},
        {"format": None},
        {"scheme": 1},
        {"examples": "3"},
        {"examples": True},
        {"examples": 3.5},
        {"examples": None},
        {"round": []},
        {"notes": []},
        {"notes": {"a": [1]}},
        {"notes": {"a": None}},
        {"notes": {"a": float("nan")}},
        {"notes": {"a": float("inf")}},
        {"streams": "weights"},
        {"streams": [1]},
        {"streams": ["buffers"]},
        {"streams": []},
    ],
    ids=str,
)
def test_malformed_heads_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadUpdate):
        payload_from_bytes(with_head(good_head(**changes)))


@pytest.mark.parametrize("head", ["[]", "3", '"x"', "null", "{", "", "[" * 100_000], ids=lambda text: text[:5])
def test_heads_that_are_no_object_are_refused(head: str) -> None:
    with pytest.raises(BadUpdate):
        payload_from_bytes(with_head(head))

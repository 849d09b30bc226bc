"""The codec: what is written is read, what is odd becomes the default, and only what cannot be used is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.study.codec import BESIDE, NEEDED, OMITTED, REASONS, Malformed, decode, encode, named, read_json


class Kind(Enum):
    ROUND = "round"
    FLAT = "flat"


@dataclass(frozen=True, kw_only=True)
class Part:
    value: float
    count: int = 0
    words: str = field(default="", metadata=NEEDED)


@dataclass(frozen=True, kw_only=True)
class Whole:
    KEYS = ("format", "name", "parts", "by_name", "one", "level", "kind", "told", "more", "double", "extra")
    format = "whole-1"

    title: str = field(default="", metadata=named("name"))
    parts: tuple[Part, ...] = ()
    by_name: Mapping[str, Part] = field(default_factory=dict)
    one: Part | None = None
    level: Literal["low", "high"] = "low"
    kind: Kind = Kind.FLAT
    told: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    needed: int = field(default=1, metadata=BESIDE)
    extra: int | str | None = field(default=None, metadata=OMITTED)
    why: Mapping[str, str] = field(default_factory=dict, metadata=REASONS)

    @property
    def double(self) -> float | None:
        return None if self.one is None else 2 * self.one.value


PART = Part(value=0.5, count=2, words="w")
FULL = Whole(title="t", parts=(PART,), by_name={"a": PART}, one=PART, level="high", kind=Kind.ROUND, told=("x",), more={"k": [1]})


def test_what_is_written_is_read_and_properties_are_only_written() -> None:
    written = encode(FULL)
    assert list(written) == ["format", "name", "parts", "by_name", "one", "level", "kind", "told", "more", "double"]
    assert (written["format"], written["kind"], written["double"]) == ("whole-1", "round", 1.0)
    assert decode(Whole, json.loads(json.dumps(written, allow_nan=False))) == FULL


def test_what_is_kept_beside_is_neither_written_nor_read() -> None:
    assert "needed" not in encode(Whole(needed=7)) and decode(Whole, {"needed": 7}).needed == 1


def test_a_reason_stands_in_the_place_of_what_there_is_not() -> None:
    lacking = Whole(why={"one": "too few"})
    assert encode(lacking)["one"] == {"unavailable": "too few"}
    assert decode(Whole, encode(lacking)) == lacking


LACKING: tuple[dict[str, object], ...] = ({}, {"value": 1.0}, {"value": "1", "words": "w"}, {"value": 1.0, "words": ""})
ODD: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "name": ("", (None, [], {}, True)),
    "level": ("low", ("panic", 3, ["high"])),
    "kind": (Kind.FLAT, ("square", None, [])),
    "one": (None, (3, [], *LACKING)),
    "parts": ((), (3, {}, [1], list(LACKING), [{"value": math.inf, "words": "w"}])),
    "by_name": ({}, (3, [], {"a": 1})),
    "more": ({}, (None, [], "x")),
    "extra": (None, (True, [], {}, math.nan)),
}


@pytest.mark.parametrize(("key", "odd"), [(key, value) for key, (_, values) in ODD.items() for value in values])
def test_an_odd_value_becomes_the_default(key: str, odd: Any) -> None:
    assert getattr(decode(Whole, {key: odd}), {"name": "title"}.get(key, key)) == ODD[key][0]


def test_numbers_are_read_as_they_were_written() -> None:
    for value in (1, 1.0, 0.1 + 0.2, -3):
        again = encode(decode(Part, {"value": value, "words": "w"}))["value"]
        assert (again, type(again)) == (value, type(value))
    found = decode(Part, {"value": 2, "count": 7.9, "words": 3})
    assert (found.count, found.words) == (7, "3")
    assert decode(Part, {"value": 1.0, "count": 10**400, "words": "w"}).count == 0


def test_a_single_text_is_a_list_of_one_and_others_are_left_out() -> None:
    assert decode(Whole, {"told": "x"}).told == ("x",)
    assert decode(Whole, {"told": ["x", None, 2]}).told == ("x", "2")


@pytest.mark.parametrize(
    ("values", "says"), [([], "holds no JSON object"), ({}, "lacks 'value'"), ({"value": "x"}, "strange 'value'")]
)
def test_what_cannot_be_used_at_all_is_refused_in_one_sentence(values: Any, says: str) -> None:
    with pytest.raises(Malformed, match=says) as caught:
        decode(Part, values, "part.json")
    assert str(caught.value).startswith("part.json ")


SCALARS = st.none() | st.booleans() | st.floats() | st.integers() | st.text()
NAMES = st.sampled_from([*Whole.KEYS, "value", "words"])


@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)))
def test_whatever_a_file_holds_nothing_but_malformed_is_raised(values: Any) -> None:
    for kind in (Whole, Part):
        try:
            found = decode(kind, values)
        except Malformed:
            continue
        json.dumps(encode(found), allow_nan=False)


def test_what_is_no_finite_number_is_null() -> None:
    assert encode({"a": (math.nan, np.float32(0.5), np.int64(3), np.bool_(True)), 5: math.inf}) == {
        "a": [None, 0.5, 3, True],
        "5": None,
    }


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_file_without_an_object_is_malformed(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(Malformed, match=r"x\.json"):
        read_json(path)

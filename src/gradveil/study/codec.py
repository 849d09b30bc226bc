"""Results between dataclasses and JSON: what a class declares is the schema, and no other place repeats it.

`encode` turns frozen dataclasses into plain JSON values, and `decode` reads them back by their type hints. Reading is patient,
because folders are old, half-written or edited by hand: a value that is missing or odd becomes the field's default, a part that
lacks what it cannot do without counts as missing itself, and only a whole that lacks it is `Malformed`. Nothing odd gets further.

Fields say the rest in their metadata:

    named("cell")     the JSON key, where it is not the field's name
    OMITTED           left out of the JSON where it has its default
    BESIDE            not in this JSON at all: it is kept in another file, or in memory only
    NEEDED            a part whose JSON lacks it, or has it empty, counts as missing, whatever the default
    REASONS           a mapping from a field to why there is no value; in JSON ``{"unavailable": reason}`` in the field's place
    UNREAD            a mapping from a key to what no field can hold: a strange value, or the value of an unknown key, which are
                      written again as they were; None, which is not written, for a key that is missing

A class may have a tuple ``KEYS``, the JSON keys in order, where they are not its fields in order: properties among them are
written and not read. A tuple ``BRIEF`` names the keys that remain where ``reason`` says why there is no result. A class method
``upgrade`` brings the JSON of older versions to the present form before it is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gradveil.study.checks import is_number

__all__ = ["BESIDE", "NEEDED", "OMITTED", "REASONS", "UNREAD", "Malformed", "decode", "encode", "named", "read_json"]

T = TypeVar("T")
OMITTED = {"omitted": True}
BESIDE = {"beside": True}
NEEDED = {"needed": True}
REASONS = {"reasons": True, **BESIDE}
UNREAD = {"unread": True, **BESIDE}
UNAVAILABLE = "unavailable"


class Malformed(ValueError):
    """JSON that cannot be used; the message is the start of a sentence."""


def named(key: str, **more: bool) -> dict[str, Any]:
    """Return the metadata of a field that has another name in JSON; ``more`` is as in ``OMITTED``."""
    return {"key": key, **more}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        Malformed: It cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError) as error:
        raise Malformed(f"{path.name} cannot be read") from error
    if not isinstance(found, dict):
        raise Malformed(f"{path.name} holds no JSON object")
    return found


def encode(value: Any) -> Any:
    """Return plain JSON values; what is not a finite number is null, as readers expect: no hour of work is lost over one."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_fields(value)
    if isinstance(value, Mapping):
        return {str(name): encode(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(each) for each in value]
    if isinstance(value, Enum):
        return encode(value.value)
    if not isinstance(value, (str, int, float)) and hasattr(value, "item"):
        value = value.item()  # a number of numpy's
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _encode_fields(record: Any) -> dict[str, Any]:
    schema = _schema(type(record))
    why = getattr(record, schema.reasons) if schema.reasons else {}
    unread = getattr(record, schema.unread) if schema.unread else {}
    keys = schema.brief if schema.brief and record.reason else schema.keys
    written: dict[str, Any] = {}
    for key in keys:
        if key in unread:
            continue
        field = schema.fields.get(key)
        value = getattr(record, field.name if field else key)
        if value is None and field is not None and field.name in why:
            written[key] = {UNAVAILABLE: why[field.name]}
        elif not (field is not None and field.omitted and value == field.default()):
            written[key] = encode(value)
    return written | {key: encode(value) for key, value in unread.items() if value is not None}


def decode(cls: type[T], values: object, where: str = "") -> T:
    """Return the record that a JSON object describes.

    Args:
        cls: A dataclass.
        values: What the JSON holds.
        where: The file, for the message.

    Raises:
        Malformed: It is no object, or lacks what the record cannot do without.
    """
    try:
        found: T = _decode_fields(cls, values)
    except Malformed as error:
        raise Malformed(f"{where or cls.__name__} {error}") from error
    return found


def _decode_fields(cls: type[Any], values: object) -> Any:
    if not isinstance(values, Mapping):
        raise Malformed("holds no JSON object")
    schema = _schema(cls)
    given = cls.upgrade(dict(values)) if hasattr(cls, "upgrade") else values
    found: dict[str, Any] = {}
    for key, field in schema.fields.items():
        try:
            if key not in given:
                raise Malformed(f"lacks {key!r}")
            found[field.name] = _decode_value(field.type, given[key])
        except Malformed as error:
            if field.needed:
                raise Malformed(f"lacks {key!r}" if key not in given else f"has a strange {key!r}") from error
        if field.filled and not found[field.name]:
            raise Malformed(f"lacks {key!r}")
    if schema.reasons:
        told = {field.name: given[key] for key, field in schema.fields.items() if isinstance(given.get(key), Mapping)}
        found[schema.reasons] = {name: str(each[UNAVAILABLE]) for name, each in told.items() if UNAVAILABLE in each}
    if schema.unread:
        read = {key for key in given if (schema.fields[key].name in found if key in schema.fields else key in schema.keys)}
        all_of_it = dict.fromkeys(schema.keys) | {key: value for key, value in given.items() if value is not None}
        found[schema.unread] = {key: value for key, value in all_of_it.items() if key not in read}
    return cls(**found)


def _decode_value(kind: Any, value: Any) -> Any:
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(inside, value)
    if origin is Literal:
        _expect(isinstance(value, str) and value in inside)
        return value
    if origin is tuple:
        _expect(isinstance(value, (str, list, tuple)))
        return tuple(_kept(inside[0], [value] if isinstance(value, str) else value))  # a single text is a list of one
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(value, Mapping))
        pairs = [(str(name), _kept(inside[1], [each])) for name, each in value.items()]
        return {name: kept[0] for name, kept in pairs if kept}
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, value)  # type: ignore[arg-type]
    if issubclass(kind, Enum):
        _expect(any(value == each.value for each in kind))
        return kind(value)
    return _decode_scalar(kind, value)


def _decode_union(kinds: tuple[Any, ...], value: Any) -> Any:
    """Return the first form that fits; where none does, None if that is one of them."""
    for kind in kinds:
        if kind is not type(None):
            try:
                return _decode_value(kind, value)
            except Malformed:
                continue
    _expect(type(None) in kinds)
    return None


def _decode_scalar(kind: Any, value: Any) -> Any:
    if kind in (bool, str) and isinstance(value, kind):
        return value
    _expect(kind is not bool)
    number = _finite(value)
    if kind is str:
        return f"{number:g}"
    # A whole number stands for itself where a fraction is expected, so that what is read and written again is the same text.
    return int(number) if kind is int else number


def _finite(value: Any) -> float:
    _expect(is_number(value))
    return float(value) if isinstance(value, float) else int(value)


def _kept(kind: Any, values: Any) -> list[Any]:
    """Return the values that fit; others are left out."""
    found = []
    for value in values:
        try:
            found.append(_decode_value(kind, value))
        except Malformed:
            continue
    return found


def _expect(fits: bool) -> None:
    if not fits:
        raise Malformed("has a strange value")


@dataclasses.dataclass(frozen=True)
class _Field:
    """What the codec knows about one field."""

    name: str
    type: Any
    own: dataclasses.Field[Any]

    @property
    def omitted(self) -> bool:
        return bool(self.own.metadata.get("omitted"))

    @property
    def filled(self) -> bool:
        return bool(self.own.metadata.get("needed"))

    @property
    def needed(self) -> bool:
        return self.filled or (self.own.default is dataclasses.MISSING and self.own.default_factory is dataclasses.MISSING)

    def default(self) -> Any:
        factory = self.own.default_factory
        return self.own.default if factory is dataclasses.MISSING else factory()


@dataclasses.dataclass(frozen=True)
class _Schema:
    fields: Mapping[str, _Field]
    keys: tuple[str, ...]
    brief: tuple[str, ...]
    reasons: str
    unread: str


_schemas: dict[type[Any], _Schema] = {}


def _schema(cls: type[Any]) -> _Schema:
    if cls not in _schemas:
        _schemas[cls] = _read_schema(cls)
    return _schemas[cls]


def _read_schema(cls: type[Any]) -> _Schema:
    hints = get_type_hints(cls)
    own = dataclasses.fields(cls)
    kept = [_Field(each.name, hints[each.name], each) for each in own if not each.metadata.get("beside")]
    fields = {str(each.own.metadata.get("key", each.name)): each for each in kept}
    reasons, unread = (next((each.name for each in own if each.metadata.get(kind)), "") for kind in ("reasons", "unread"))
    return _Schema(fields, getattr(cls, "KEYS", tuple(fields)), getattr(cls, "BRIEF", ()), reasons, unread)

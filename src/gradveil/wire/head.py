"""The head of a payload: all but its tensors, as one JSON object, and the names its tensors travel under."""

from __future__ import annotations

import json
import math
from typing import Any, cast

from torch import Tensor

from gradveil.errors import BadUpdate
from gradveil.records import Payload
from gradveil.study.checks import is_whole
from gradveil.tensors import Named

__all__ = ["flat_tensors", "head_as_json", "payload_of"]

FORMAT = "gradveil-payload-1"
_SEPARATOR = "::"


def flat_tensors(payload: Payload) -> dict[str, Tensor]:
    """Return a payload's tensors under one name each: that of the stream, and its own."""
    return {f"{stream}{_SEPARATOR}{name}": value for stream, named in payload.streams.items() for name, value in named.items()}


def head_as_json(payload: Payload, **more: Any) -> str:
    """Return scheme, counts, notes and the names of the streams, with what else a wire needs to say."""
    head = {
        "format": FORMAT,
        "scheme": payload.scheme,
        "examples": payload.examples,
        "round": payload.round,
        "notes": dict(payload.notes),
        "streams": sorted(payload.streams),
    }
    return json.dumps(head | more, sort_keys=True)


def payload_of(head: Any, flat: Named) -> Payload:
    """Put head and tensors together again, or raise `BadUpdate`. Content is checked against a model later, by ``decode``."""
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        found = head.get("format") if isinstance(head, dict) else head
        raise BadUpdate(f"the payload's format is {str(found)[:80]!r}, expected {FORMAT!r}")
    scheme, examples, round_, notes, names = (
        cast("Any", head.get(k)) for k in ("scheme", "examples", "round", "notes", "streams")
    )
    whole = all(is_whole(v) for v in (examples, round_))
    named = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    if not (isinstance(scheme, str) and whole and named and _are_notes(notes)):
        raise BadUpdate("the payload's head is malformed: scheme, examples, round, notes and streams, each once, are needed")
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

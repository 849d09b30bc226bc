"""What a client's reply holds: the payload's arrays, its head, and how many examples are behind it; nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from gradveil.errors import BadUpdate
from gradveil.flower.layout import npy_of
from gradveil.records import Payload
from gradveil.study.checks import is_whole
from gradveil.wire.arrays import payload_from_npy, payload_to_arrays

__all__ = ["EXAMPLES", "Reply", "read_reply", "write_reply"]

ARRAYS, METRICS, HEAD = "arrays", "metrics", "gradveil"
EXAMPLES = "num-examples"


@dataclass(frozen=True)
class Reply:
    """A payload, and the place of its client in the order of all; -1 where it names none."""

    payload: Payload
    place: int = -1


def write_reply(reply: Reply) -> RecordDict:
    """Return a reply's content."""
    arrays, head = payload_to_arrays(reply.payload)
    return RecordDict(
        {
            ARRAYS: ArrayRecord({name: Array(value) for name, value in arrays.items()}),
            METRICS: MetricRecord({EXAMPLES: reply.payload.examples}),
            HEAD: ConfigRecord({"head": head, "place": reply.place}),
        }
    )


def read_reply(message: Message) -> Reply:
    """Read what a client replied, or raise `BadUpdate`; its claims beside the payload are not believed, and not even read."""
    if not message.has_content():
        raise BadUpdate("the reply holds nothing")
    content = message.content
    arrays, heads = content.array_records.get(ARRAYS), content.config_records.get(HEAD)
    if arrays is None or heads is None or set(content) != {ARRAYS, METRICS, HEAD}:
        raise BadUpdate(f"the reply holds {sorted(map(str, content))[:6]}, no payload; does the client's app have `protect`?")
    place = heads.get("place", -1)
    payload = payload_from_npy({name: npy_of(array, name) for name, array in arrays.items()}, heads.get("head"))
    return Reply(payload, place if is_whole(place) and -1 <= place < 2**53 else -1)

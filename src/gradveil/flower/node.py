"""One client's node: it reads what it is asked, answers out of its diary, and where something is wrong says one sentence."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message

from gradveil.client.diary import Diary, digest_of
from gradveil.client.secrets import SecretSeed
from gradveil.client.update import ClientResult
from gradveil.defenses.base import State
from gradveil.errors import BadUpdate, GradveilError, UsageError
from gradveil.flower.layout import Layout
from gradveil.flower.replies import Reply, write_reply
from gradveil.randomness import Seed
from gradveil.study.checks import is_whole
from gradveil.tensors import Named

__all__ = ["Asked", "Node", "node_of"]

HOME, UNSAFE = "GRADVEIL_HOME", "GRADVEIL_UNSAFE_SEEDS"
ROUND = "server-round"
APP_RAISED, REFUSED = 2, 6
"""Codes that Flower knows: the app raised; a mod found something that it cannot work with."""

log = logging.getLogger("gradveil.flower")


@dataclass(frozen=True)
class Asked:
    """What the server asked: the global model, the round from 0, other settings; and a digest of all of it."""

    weights: Named
    buffers: Named
    round_index: int
    config: dict[str, Any]
    digest: str


Work = Callable[[Asked, State | None, Seed], ClientResult]


@dataclass(frozen=True)
class Node:
    """Where a client keeps what it must not forget, and where its randomness comes from.

    Attributes:
        layout: The model's tensors.
        folder: Of the diaries, on the node's own disk.
        most: Releases after which it answers no new request; 0 is no limit.
        seed: For tests alone: makes noise foreseeable.
    """

    layout: Layout
    folder: Path
    most: int
    seed: int | None

    def answer(self, message: Message, context: Context, work: Work) -> Message:
        """Return a reply with a protected payload, or an error that holds no array and nothing that others wrote."""
        try:
            asked = self._read(message)
            diary = Diary(self.folder, run=str(context.run_id), node=str(context.node_id), most=self.most)
            place = context.node_config.get("partition-id", -1)
            place = place if is_whole(place) else -1
            payload = diary.answer(asked.round_index, asked.digest, lambda state: work(asked, state, self._seed(place)))
            return Message(write_reply(Reply(payload, place)), reply_to=message)
        except GradveilError as error:
            log.warning("nothing is sent: %s", error)
            return Message(Error(REFUSED, str(error).replace(str(self.folder), "its folder")), reply_to=message)
        except Exception as error:
            # What it says may hold data; it stays in the node's own log.
            log.exception("nothing is sent")
            return Message(Error(APP_RAISED, f"the client's app raised {type(error).__name__}"), reply_to=message)

    def _seed(self, place: int) -> Seed:
        return SecretSeed.fresh() if self.seed is None else Seed(self.seed).child("client", place)

    def _read(self, message: Message) -> Asked:
        content = message.content
        if len(content.array_records) != 1 or len(content.config_records) != 1:
            raise BadUpdate("the request must hold one record of arrays and one of settings, as FedAvg sends them")
        (record,), (config,) = content.array_records.values(), content.config_records.values()
        told = config.get(ROUND)
        if not is_whole(told) or told < 1:
            raise BadUpdate(f"the request names no round: {ROUND!r} is {str(told)[:40]!r}, and must be a whole number from 1 on")
        weights, buffers = self.layout.split(self.layout.read(record, "the global arrays"))
        metrics = {str(key): dict(value) for key, value in content.metric_records.items()}
        others = {"config": dict(config), "metrics": metrics, "type": message.metadata.message_type}
        digest = digest_of({"weights": weights, "buffers": buffers}, **others)
        return Asked(weights, buffers, told - 1, dict(config), digest)


def node_of(layout: Layout, folder: Path | str | None, most: int, seed: int | None) -> Node:
    """Return a node, or refuse what a real client must not have."""
    if not is_whole(most) or most < 0:
        raise UsageError(f"most is {most!r}; give a whole number of releases, or 0 for no limit")
    if seed is not None and os.environ.get(UNSAFE) != "1":
        raise UsageError(
            f"who knows the seed subtracts the noise, so a real client refuses one; for tests set {UNSAFE}=1 on the node"
        )
    home = Path(os.environ.get(HOME) or Path.home() / ".gradveil")
    return Node(layout, (home / "diaries" if folder is None else Path(folder)).expanduser(), most, seed)

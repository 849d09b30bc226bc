"""What a client has sent, and what its defense keeps from one round to the next, on the node's own disk.

diary = Diary(folder, run="17", node="hospital-a")
payload = diary.answer(round_index, digest_of_request, lambda state: run_client(...))

A process that answers may die at any moment, and a server may ask twice. So what was answered is on the disk before it is sent:
the same request gets the same bytes and costs nothing; another request under the same round number starts from the state before
that round, draws fresh noise and is counted. One file, written last, says which others belong to it; what it does not name did
not happen. Nobody but the owner of the process may read any of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gradveil.client.update import ClientResult
from gradveil.defenses.base import State
from gradveil.errors import UsageError
from gradveil.records import Payload
from gradveil.storage.files import write_whole
from gradveil.tensors import Named
from gradveil.wire.files import payload_from_bytes, payload_to_bytes

try:
    import fcntl
except ImportError:  # not on Windows; there, two processes of one node are not kept apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["Diary", "digest_of"]

FORMAT = "gradveil-diary-1"
INDEX, LOCK = "diary.json", "lock"
KEPT_ROUNDS = 2
"""Rounds whose answers and states are kept: a server that asks again asks for the last one, or for the one before."""
PATIENCE = 600.0
"""Seconds that one answer waits for another of the same node."""


def digest_of(tensors: Mapping[str, Named], **told: Any) -> str:
    """Return a digest of what a client was asked: global tensors by kind, and plain values beside them."""
    found = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for kind in sorted(tensors):
        for name, value in tensors[kind].items():
            whole = value.detach().cpu().contiguous()
            found.update(f"\0{kind}\0{name}\0{whole.dtype}\0{tuple(whole.shape)}\0".encode())
            found.update(whole.flatten().view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return found.hexdigest()


@dataclass(frozen=True)
class _Entry:
    """One answer: the request it is to, and the names of its files; an empty name is a state that nobody kept."""

    round: int
    digest: str
    payload: str
    before: str
    after: str


@dataclass(frozen=True)
class _Index:
    released: int = 0
    entries: tuple[_Entry, ...] = ()

    @property
    def files(self) -> set[str]:
        return {name for entry in self.entries for name in (entry.payload, entry.before, entry.after) if name}


@dataclass(frozen=True)
class Diary:
    """The answers of one node in one run.

    Attributes:
        folder: Where diaries lie; each run and node has a folder of its own below.
        run: Name or number of the run, from the framework.
        node: Name or number of the node.
        most: Releases after which the client answers no new request; 0 is no limit.
    """

    folder: Path
    run: str
    node: str
    most: int = 0

    @property
    def path(self) -> Path:
        """The folder of this run and node; names may hold anything, so it is called by their digest."""
        return self.folder / hashlib.sha256(json.dumps([self.run, self.node]).encode()).hexdigest()[:24]

    def answer(self, round_index: int, digest: str, work: Callable[[State | None], ClientResult]) -> Payload:
        """Return what was answered to this very request, or do the work, keep the answer, and return it.

        Args:
            round_index: The number that the server gives to the round.
            digest: Of everything the server asked (`digest_of`).
            work: Makes an answer from the state that the defense kept, None in the first round. It must draw fresh randomness.

        Raises:
            UsageError: The round is too long ago, the budget is spent, or the diary cannot be read.
        """
        with self._alone():
            index = self._read()
            for entry in reversed(index.entries):
                if (entry.round, entry.digest) == (round_index, digest):
                    return payload_from_bytes(self._content(entry.payload))
            if self.most and index.released >= self.most:
                raise UsageError(
                    f"this client has released {index.released} updates, all that its budget allows; raise `most` to go on"
                )
            before = self._before(index, round_index)
            made = work(self._state(before))
            return self._keep(index, round_index, digest, before, made)

    @property
    def released(self) -> int:
        """How many updates were released: what a privacy budget counts."""
        return self._read().released

    def _before(self, index: _Index, round_index: int) -> str:
        """Return the file of the state before a round."""
        if not index.entries:
            return ""
        same = [entry for entry in index.entries if entry.round == round_index]
        if same:
            return same[0].before
        last = index.entries[-1]
        if round_index < last.round:
            raise UsageError(
                f"the server asks for round {round_index}, and this client has answered round {last.round}; "
                "a server that begins again needs a new run"
            )
        return last.after

    def _keep(self, index: _Index, round_index: int, digest: str, before: str, made: ClientResult) -> Payload:
        number = index.released + 1
        entry = _Entry(round_index, digest, f"payload-{number}", before, f"state-{number}" if made.state else "")
        # Counted before anything is there to be sent: a process that dies here has spent without sending, never the reverse.
        self._write(INDEX, _as_json(replace(index, released=number)))
        content = payload_to_bytes(made.payload)
        self._write(entry.payload, content)
        if entry.after:
            self._write(entry.after, save({name: _alone(value) for name, value in made.state.items()}))
        rounds = sorted({each.round for each in (*index.entries, entry)})[-KEPT_ROUNDS:]
        kept = _Index(number, tuple(each for each in (*index.entries, entry) if each.round in rounds))
        self._write(INDEX, _as_json(kept))
        for path in self.path.iterdir():
            if path.name not in kept.files | {INDEX, LOCK}:
                path.unlink(missing_ok=True)
        # What is sent is read from what was kept, so both are the same bytes.
        return payload_from_bytes(content)

    def _state(self, name: str) -> State | None:
        if not name:
            return None
        try:
            return load(self._content(name))
        except SafetensorError as error:
            raise self._damaged(name) from error

    def _content(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise self._damaged(name) from error

    def _read(self) -> _Index:
        path = self.path / INDEX
        if not path.exists():
            return _Index()
        try:
            found = json.loads(path.read_bytes())
            if found["format"] != FORMAT:
                raise ValueError(found["format"])
            return _Index(int(found["released"]), tuple(_Entry(**entry) for entry in found["entries"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(INDEX) from error

    def _damaged(self, name: str) -> UsageError:
        return UsageError(
            f"the file {name!r} of this client's diary cannot be read; nothing is sent, since what was released is not known any "
            f"more. Restore {str(self.path)!r} from a backup, or remove it and count its releases as spent"
        )

    def _write(self, name: str, content: bytes) -> None:
        write_whole(self.path / name, content, private=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes of this node out; the system lets go of the lock when a process ends, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"cannot keep a diary in {str(self.folder)!r}: {reason}; name a folder of this node's own"
            ) from error
        try:
            _wait(handle)
            yield
        finally:
            os.close(handle)


def _wait(handle: int) -> None:
    until = time.monotonic() + PATIENCE
    while fcntl is not None:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise UsageError(f"another process of this node has been answering for {PATIENCE:.0f} seconds; end it") from None
            time.sleep(0.02)


def _as_json(index: _Index) -> bytes:
    return json.dumps({"format": FORMAT, **asdict(index)}).encode()


def _alone(value: Tensor) -> Tensor:
    """Return a tensor that shares no memory with others, which safetensors would refuse."""
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)

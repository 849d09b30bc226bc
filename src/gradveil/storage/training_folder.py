"""The folder of a training run: whole files only, so that it can be killed at any moment and continued to the same weights.

After a round, its line is appended to rounds.jsonl, then the state is written, and checkpoint.json last: it names the files
that belong together, and a round that it does not name did not happen. The state of clients is kept in one file per round, with
only the clients of that round in it; files that no client needs any more are removed. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from safetensors import SafetensorError, safe_open

from gradveil.errors import UsageError
from gradveil.storage.files import json_bytes, locked_folder, write_whole
from gradveil.study.codec import decode, encode
from gradveil.study.training_result import RoundRecord, TrainingResult

if TYPE_CHECKING:
    from gradveil.tensors import Named

__all__ = ["Checkpoint", "TrainingFolder"]

CHECKPOINT_FORMAT = "gradveil-checkpoint-1"
NOT_SETTINGS = {
    "training records": "other training records",
    "test records": "other test records",
    "content of weights": "other content of the weights file",
    "content of your own files": "other content of your own files",
    "gradveil's code": "another version of gradveil",
    "torch": "another version of torch",
}
"""What nobody asks for by an option, in words."""
STATE, CONTROL = "state/", "control/"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything a run needs to go on after a round.

    Attributes:
        round: Rounds done.
        server: The server's tensors: weights, buffers, memory, control variate, by a name that tells which.
        states: Client to what its defense keeps; only clients that took part so far.
        controls: Client to its control variate, where there are any.
        threads: Of the run that began it.
    """

    round: int
    server: Named
    states: Mapping[int, Named] = field(default_factory=dict)
    controls: Mapping[int, Named] = field(default_factory=dict)
    threads: int = 1


class TrainingFolder:
    """Reads and writes the folder that docs/results-format.md describes."""

    def __init__(self, out: Path) -> None:
        """Make the folder where it is missing.

        Raises:
            UsageError: It cannot be made or written to, or holds an audit.
        """
        self.out = Path(out)
        if (self.out / "run.json").is_file():
            # Both would write report.html, and the later one would hide the other.
            raise UsageError(f"{str(self.out)!r} holds the results of an audit; choose another folder with --out")
        self._files: dict[int, str] = {}
        try:
            (self.out / "checkpoint").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _refuse(self.out, error)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs out inside the block; the system lets go when the process ends, however it ends."""
        with locked_folder(self.out):
            yield

    def read(self, identity: Mapping[str, Any]) -> tuple[Checkpoint, list[RoundRecord]] | None:
        """Return the last whole round and the records up to it, or None where there is none.

        Args:
            identity: What decides the result; a folder made with anything else is refused.
        """
        path = self.out / "checkpoint.json"
        if not path.exists():
            return None
        try:
            index = json.loads(path.read_bytes())
            done, names, found, threads = int(index["round"]), index["clients"], dict(index["identity"]), int(index["threads"])
            if index["format"] != CHECKPOINT_FORMAT:
                raise ValueError(index["format"])
            self._files = {int(client): str(name) for client, name in names.items()}
            server = self._load(str(index["server"]))
            kept: dict[str, Named] = {name: self._load(name) if name else {} for name in sorted(set(self._files.values()))}
            states = {client: _part(kept[name], f"{client}/{STATE}") for client, name in self._files.items()}
            controls = {client: _part(kept[name], f"{client}/{CONTROL}") for client, name in self._files.items()}
            records = self._records(done)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self._damaged(error)
        _compare(found, identity, self.out)
        present = {client: named for client, named in controls.items() if named}
        return Checkpoint(done, server, states, present, threads), records

    def _records(self, done: int) -> list[RoundRecord]:
        lines = (self.out / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[:done]
        records = [decode(RoundRecord, json.loads(line)) for line in lines]
        if [record.round for record in records] != list(range(1, done + 1)):
            raise ValueError("rounds.jsonl lacks rounds")
        return records

    def begin(self, records: Sequence[RoundRecord]) -> None:
        """Drop what a killed run wrote of a round that did not end."""
        text = "".join(_line(record) for record in records)
        self._write("rounds.jsonl", text.encode())

    def append(self, record: RoundRecord) -> None:
        """Add one finished round to rounds.jsonl."""
        try:
            with (self.out / "rounds.jsonl").open("ab") as handle:
                handle.write(_line(record).encode())
                handle.flush()
                os.fsync(handle.fileno())
        except OSError as error:
            _refuse(self.out, error)

    def save(self, checkpoint: Checkpoint, changed: Sequence[int], identity: Mapping[str, Any]) -> None:
        """Write the state after a round, and then that it is whole.

        Args:
            checkpoint: The state.
            changed: Clients whose state is not yet on the disk.
            identity: What decides the result.
        """
        server = f"server-{checkpoint.round}.safetensors"
        self._store(server, checkpoint.server)
        clients = f"clients-{checkpoint.round}.safetensors"
        flat: Named = {}
        for client in changed:
            for kind, values in ((STATE, checkpoint.states.get(client)), (CONTROL, checkpoint.controls.get(client))):
                flat |= {f"{client}/{kind}{name}": value for name, value in (values or {}).items()}
        if flat:
            self._store(clients, flat)
        # Who took part and keeps nothing is named too: without a name, its defense would prepare again.
        self._files |= {client: clients if any(key.startswith(f"{client}/") for key in flat) else "" for client in changed}
        index = {
            "format": CHECKPOINT_FORMAT,
            "round": checkpoint.round,
            "server": server,
            "clients": {str(client): name for client, name in sorted(self._files.items())},
            "threads": checkpoint.threads,
            "identity": dict(identity),
        }
        self._write("checkpoint.json", json_bytes(index))
        needed = {server, *self._files.values()}
        for path in (self.out / "checkpoint").iterdir():
            if path.name not in needed:
                with contextlib.suppress(OSError):
                    path.unlink()

    def write_summary(self, summary: TrainingResult) -> None:
        """Write training.json."""
        self._write("training.json", json_bytes(summary))

    def write_model(self, tensors: Named) -> None:
        """Write model.safetensors, which `--weights` reads."""
        self._write("model.safetensors", _safetensors(tensors))

    def _store(self, name: str, tensors: Named) -> None:
        self._write(f"checkpoint/{name}", _safetensors(tensors))

    def _load(self, name: str) -> Named:
        with safe_open(str(self.out / "checkpoint" / Path(name).name), framework="pt") as opened:
            order = json.loads((opened.metadata() or {}).get("order", "[]"))
            return {key: opened.get_tensor(key) for key in order}

    def _write(self, name: str, content: bytes) -> None:
        path = self.out / name
        try:
            write_whole(path, content)
        except OSError as error:
            _refuse(path, error)

    def _damaged(self, error: Exception) -> NoReturn:
        raise UsageError(
            f"cannot continue from {str(self.out)!r}: its checkpoint is damaged ({type(error).__name__}); remove the folder, or "
            "choose another with --out"
        ) from error


def _line(record: RoundRecord) -> str:
    return json.dumps(encode(record), ensure_ascii=False, allow_nan=False) + "\n"


def _safetensors(tensors: Named) -> bytes:
    from safetensors.torch import save  # whoever has tensors to keep has loaded torch; whoever only looks at folders need not

    # Clones, because safetensors refuses tensors that share memory; the order, because it sorts names and sums run in order.
    flat = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    return save(flat, metadata={"order": json.dumps(list(flat))})


def _part(flat: Named, prefix: str) -> Named:
    return {name.removeprefix(prefix): value for name, value in flat.items() if name.startswith(prefix)}


def _compare(found: Mapping[str, Any], wanted: Mapping[str, Any], out: Path) -> None:
    for name in dict.fromkeys((*wanted, *found)):
        if found.get(name) != wanted.get(name):
            if name in NOT_SETTINGS:
                raise UsageError(
                    f"the run in {str(out)!r} was made with {NOT_SETTINGS[name]}, so it cannot go on to the same weights; choose "
                    "another folder with --out"
                )
            raise UsageError(
                f"the run in {str(out)!r} was made with {name} = {found.get(name)!r}, not {wanted.get(name)!r}; ask for the "
                "same, or choose another folder with --out"
            )


def _refuse(path: Path, error: OSError) -> NoReturn:
    raise UsageError(
        f"cannot write to {str(path)!r}: {error.strerror or error}; choose another folder with --out, or make room"
    ) from error

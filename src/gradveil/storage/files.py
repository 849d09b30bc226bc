"""Files that are whole or not there, and folders that one run has to itself: what is kept must survive a kill at any moment."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError
from gradveil.study.codec import encode

try:
    import fcntl
except ImportError:  # not on Windows; there, two runs in one folder are not noticed
    fcntl = None  # type: ignore[assignment]

__all__ = ["json_bytes", "locked_folder", "write_whole"]

LOCK = ".lock"


def write_whole(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write beside the place, bring it to the disk, and rename, so that no reader ever meets half a file.

    Args:
        path: The place.
        content: What will stand there.
        private: Whether nobody but its owner may read it.

    Raises:
        OSError: The file cannot be written; nothing is left beside its place.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666), "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        beside.replace(path)
        _sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked_folder(out: Path) -> Iterator[None]:
    """Keep other runs out of a folder inside the block; what a killed run left behind is no obstacle.

    Raises:
        UsageError: Another run is at work here, or the folder cannot be written to.
    """
    path = out / LOCK
    handle = _locked(path, out)
    try:
        yield
    finally:
        # Removed before it is let go: who waits for this file finds that it is gone, and makes a new one.
        path.unlink(missing_ok=True)
        os.close(handle)


def json_bytes(value: Any) -> bytes:
    """Return a result, or plain values, as JSON text; what is not a finite number is null."""
    return (json.dumps(encode(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk; not every system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _locked(path: Path, out: Path) -> int:
    """Return an open file that only this run holds.

    The system lets go of it when the process ends, however it ends, so there are no stale locks to guess about; the number inside
    is for people only. A file that was removed between opening and locking is another run's that just ended: try again.
    """
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UsageError(
                f"cannot write to {str(out)!r}: {error.strerror or error}; choose another folder with --out"
            ) from error
        if fcntl is None:
            return handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            os.close(handle)
            who = f"another run (process {holder or 'unknown'}) is at work in {str(out)!r}"
            raise UsageError(f"{who}; wait for it, or choose another folder with --out") from None
        except OSError:
            return handle  # a network folder without locks: better to run than to refuse
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
                return handle
        os.close(handle)

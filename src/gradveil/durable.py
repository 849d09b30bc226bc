"""Files that are whole or not there: what audits and trainings keep must survive a kill at any moment."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["json_bytes", "plain_json", "write_whole"]


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the place, bring it to the disk, and rename, so that no reader ever meets half a file.

    Raises:
        OSError: The file cannot be written; nothing is left beside its place.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        beside.replace(path)
        _sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return JSON text; what is not a finite number is null."""
    return (json.dumps(plain_json(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def plain_json(value: Any) -> Any:
    """Return plain JSON values; what is not a finite number is null, as the report reads it: no hour of work is lost over one."""
    if isinstance(value, Mapping):
        return {str(name): plain_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk; not every system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

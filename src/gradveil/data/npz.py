"""`.npz` archives: which array is what.

| what | names, first found wins |
|---|---|
| inputs | x, inputs, images, data |
| labels | y, targets, labels, label |
| owners | owner, patient, subject, writer, speaker, client, user (also with s, or _id) |
| class names | class_names, label_names |

All but class names may carry the split, as ``x_train`` or ``train_images`` (train, val, test). Upper case does not matter.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradveil.data.label_files import OWNER_NAMES
from gradveil.errors import UsageError, suggest
from gradveil.study.reading import SPLITS

__all__ = ["Archive", "read_npz"]

INPUT_NAMES = ("x", "inputs", "images", "data")
TARGET_NAMES = ("y", "targets", "labels", "label", "masks", "mask")
CLASS_NAMES = ("class_names", "label_names")


@dataclass(frozen=True)
class Archive:
    """The arrays of an `.npz` that matter; None where there is none."""

    inputs: NDArray[Any]
    labels: NDArray[Any] | None
    owners: NDArray[Any] | None
    class_names: tuple[str, ...] | None


def read_npz(
    path: Path, split: str | None = None, *, label_column: str | None = None, owner_column: str | None = None
) -> Archive:
    """Read inputs, labels, owners and class names.

    Args:
        path: The archive; nothing in it is ever unpickled.
        split: train, val or test. None takes arrays without a split in their name, else train.
        label_column: Exact name of the array of labels, where it is none of the known ones.
        owner_column: Exact name of the array of owners.
    """
    try:
        # Opened here: numpy leaves a damaged file open.
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as archive:
            names = list(archive.files)
            inputs = _find(names, INPUT_NAMES, split)
            if inputs is None:
                raise UsageError(_no_inputs(path, names, split))
            chosen = _split_of(inputs)
            labels = _asked(path, names, label_column) or _find(names, TARGET_NAMES, chosen, exact=True)
            owners = _asked(path, names, owner_column) or _find(names, _owner_names(), chosen, exact=True)
            words = _find(names, CLASS_NAMES, None)
            return Archive(
                inputs=archive[inputs],
                labels=archive[labels] if labels else None,
                owners=archive[owners] if owners else None,
                class_names=tuple(str(word) for word in archive[words].reshape(-1)) if words else None,
            )
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError) as error:
        raise UsageError(f"cannot read {str(path)!r}: it is damaged or no .npz archive; copy or download it again") from error
    except ValueError as error:
        raise UsageError(
            f"cannot read {str(path)!r}: it holds Python objects, which are never loaded; save plain numbers with numpy.savez"
        ) from error


def _owner_names() -> tuple[str, ...]:
    return (*OWNER_NAMES, *(f"{name}s" for name in OWNER_NAMES), *(f"{name}_id" for name in OWNER_NAMES))


def _find(names: list[str], known: tuple[str, ...], split: str | None, *, exact: bool = False) -> str | None:
    """Return the archive's name for the first known array of a split; ``exact`` None means without split only."""
    splits: tuple[str | None, ...] = (split,) if exact or split else (None, "train")
    for part in splits:
        for name in known:
            spellings = (name,) if part is None else (f"{name}_{part}", f"{part}_{name}")
            found = next((real for real in names if real.lower() in spellings), None)
            if found is not None:
                return found
    return None


def _split_of(name: str) -> str | None:
    lowered = name.lower()
    return next((part for part in SPLITS if lowered.endswith(f"_{part}") or lowered.startswith(f"{part}_")), None)


def _asked(path: Path, names: list[str], asked: str | None) -> str | None:
    if asked is not None and asked not in names:
        raise UsageError(f"{str(path)!r} has no array {asked!r}{suggest(asked, names)}")
    return asked


def _no_inputs(path: Path, names: list[str], split: str | None) -> str:
    held = ", ".join(names[:8]) or "none"
    if split is None:
        known = ", ".join(INPUT_NAMES)
        return f"{str(path)!r} holds the arrays {held}, none of which is called {known} or x_train; rename the inputs to x"
    return f"{str(path)!r} has no inputs for split {split!r}, such as x_{split}; it holds the arrays {held}"

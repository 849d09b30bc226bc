"""One file a study: a run folder packed into ``NAME.json.xz``, and unpacked where something reads folders.

Equal content gives equal bytes: keys are sorted, and the archive holds neither time nor name. Pictures stay out, so that a file
can be published whatever the data was. What was kept before there were run folders is packed as ``documents``, by name.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError
from gradveil.storage.files import json_bytes, write_whole
from gradveil.study.codec import Malformed, encode, read_json
from gradveil.study.published import BEFORE, STUDY_FORMAT

__all__ = ["as_folder", "is_study_file", "pack_folder", "read_study", "rounded", "unpack_study", "write_study"]

SUFFIX = ".json.xz"
DIGITS = 6
"""Of every number in published results: no table shows more than three, and digits of noise are most of a file's weight."""
RUN_FORMAT = "gradveil-run-1"
OWN = ("name", "study", "spellings", "timings", "trainings", "training_timings", "documents")
"""Parts of a study file that run.json does not have."""


def is_study_file(path: Path) -> bool:
    """Whether a path names the results of a study rather than a folder."""
    return path.name.endswith(SUFFIX) and not path.is_dir()


def read_study(path: Path) -> dict[str, Any]:
    """Return what a study file holds.

    Raises:
        UsageError: It is missing, damaged, or of another format.
    """
    try:
        found = json.loads(lzma.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, RecursionError, lzma.LZMAError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else "it is damaged or no packed JSON"
        raise UsageError(f"cannot read the results {str(path)!r}: {why}; `gradveil study run` writes them") from error
    if not isinstance(found, dict) or found.get("format") != STUDY_FORMAT:
        said = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise UsageError(f"{str(path)!r} has format {said!r} and this gradveil reads {STUDY_FORMAT!r}")
    return found


def write_study(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a study file, whole or not at all, and return its path.

    Raises:
        UsageError: It cannot be written.
    """
    text = json.dumps(encode(content), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}; name another file with --out") from error
    return path


def rounded(value: Any) -> Any:
    """Return plain values with their numbers to `DIGITS` digits; whole numbers and words as they are.

    >>> rounded({"p": 1 / 3e9, "n": 1234567, "psnr": [14.123456789]})
    {'p': 3.33333e-10, 'n': 1234567, 'psnr': [14.1235]}
    """
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def pack_folder(
    folder: Path, name: str, study: Mapping[str, Any] | None = None, *, trainings: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the content of a study file: the run of a folder, if it has one, and every other JSON file as a document.

    Args:
        folder: A run folder, or one of JSON files of older studies.
        name: Of the study.
        study: How its results are shown, as `gradveil.study.published.Layout.as_dict` gives it.
        trainings: Keys of those that belong to the run; what else is in the folder, left by another plan or other code, is then
            no part of the study. None packs whatever is there.

    Raises:
        UsageError: A cell or a training of the run is not done.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.json")) if path.is_file()}
    content: dict[str, Any] = {"format": STUDY_FORMAT, "name": name, "study": dict(study or {}), "provenance": BEFORE}
    if "run.json" in files:
        run = _read(files.pop("run.json"))
        keys = run.pop("cells", [])
        found = [path.stem for each, path in files.items() if each.startswith("utility/") and "." not in path.stem]
        trained = found if trainings is None else list(trainings)
        wanted = [*(f"cells/{key}.json" for key in keys), *(f"utility/{key}.json" for key in trained)]
        missing = [each for each in wanted if each not in files]
        if missing:
            raise UsageError(
                f"{len(missing)} of {len(wanted)} results in {str(folder)!r} are not done; run the same command again"
            )
        content = {**content, **run, "format": STUDY_FORMAT, "provenance": run.get("provenance") or BEFORE}
        content["cells"] = [_read(files.pop(f"cells/{key}.json")) for key in keys]
        content["timings"] = _timings(files, "cells", keys)
        content["trainings"] = [_read(files.pop(f"utility/{key}.json")) for key in trained]
        content["training_timings"] = _timings(files, "utility", trained)
    content["documents"] = {each: _read_any(path) for each, path in files.items()} if trainings is None else {}
    return content


def unpack_study(content: Mapping[str, Any], folder: Path) -> Path:
    """Write the run of a study file as a run folder, and return the folder.

    Raises:
        UsageError: It holds no run, only documents.
    """
    if not content.get("cells"):
        raise UsageError(
            f"the results of {content.get('name')!r} hold no attacked cell; `gradveil study table` shows what there is"
        )
    run = {name: value for name, value in content.items() if name not in OWN}
    # Cells that were measured one by one, before there was a study of them, have no key; their place stands for it.
    cells = [{**cell, "key": cell["key"] or f"{number:016x}"} for number, cell in enumerate(content["cells"])]
    run["format"], run["cells"] = RUN_FORMAT, [cell["key"] for cell in cells]
    run["provenance"] = run["provenance"] if isinstance(run.get("provenance"), dict) else {}
    rooms = {
        "cells": (cells, content.get("timings", {})),
        "utility": (content.get("trainings", []), content.get("training_timings", {})),
    }
    for room, (records, timings) in rooms.items():
        (folder / room).mkdir(parents=True, exist_ok=True)
        for record in records:
            (folder / room / f"{record['key']}.json").write_bytes(json_bytes(record))
        for key, timing in timings.items():
            (folder / room / f"{key}.timing.json").write_bytes(json_bytes(timing))
    (folder / "run.json").write_bytes(json_bytes(run))
    return folder


@contextlib.contextmanager
def as_folder(path: Path) -> Iterator[Path]:
    """Give a results folder to whoever reads one: the path itself, or a study file unpacked for the time of the block."""
    if not is_study_file(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="gradveil-study-") as folder:
        yield unpack_study(read_study(path), Path(folder))


def _timings(files: dict[str, Path], room: str, keys: list[str]) -> dict[str, Any]:
    names = {key: f"{room}/{key}.timing.json" for key in keys}
    return {key: _read(files.pop(name)) for key, name in names.items() if name in files}


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except Malformed as error:
        raise UsageError(
            f"{error}, so {str(path.parent)!r} cannot be packed; delete the file and run the same command again"
        ) from error


def _read_any(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(path)!r} is no JSON, so it cannot be packed") from error

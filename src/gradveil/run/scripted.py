"""Run a study that no plan says: a script beside its file measures it unit by unit, resumably, into one file of results.

The script has three functions, and ``[settings]`` of the study are attributes of what they get:

    def units(settings): ...                    # names of what is measured, each by itself
    def measure(unit, settings, work): ...      # plain values: the document of one unit; ``work`` is a folder all units share
    def tables(documents): ...                  # Markdown by part, of documents by unit in order of names; "": the only part

A unit is what is resumed: its document is kept under a key of its name, the settings, the content of data and weights, and the
code of package and script. Tables go into the results, so that whoever shows them runs no script.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gradveil.data import DATASETS
from gradveil.errors import GradveilError, UsageError
from gradveil.provenance import code_version, provenance
from gradveil.registry import import_object
from gradveil.run.jobs import Progress
from gradveil.run.studies import moved_files
from gradveil.storage.files import json_bytes, locked_folder, write_whole
from gradveil.storage.study_file import write_study
from gradveil.study.codec import Malformed, encode, read_json
from gradveil.study.published import STUDY_FORMAT, ScriptedStudy

__all__ = ["place_settings", "run_scripted", "tables_of"]

FILES = ("data", "weights")
"""Settings that name files, one or a list."""
SUFFIX = ".json"


def place_settings(
    study: ScriptedStudy, *, data: Sequence[Path] = (), weights: Sequence[Path] = (), device: str | None = None
) -> ScriptedStudy:
    """Return the study with files where they are on this machine; those it names start at its own folder."""
    settings = dict(study.settings)
    for kind, given in zip(FILES, (data, weights), strict=True):
        named = [text for text in _listed(settings.get(kind, [])) if text and text not in DATASETS.names()]
        places = {text: str(study.script.parent / text) for text in named} | moved_files(named, given, kind)
        found = [places.get(text, text) for text in _listed(settings.get(kind, []))]
        if kind in settings:
            settings[kind] = found if isinstance(settings[kind], list) else found[0]
    return dataclasses.replace(study, settings=settings | ({"device": device} if device else {}))


def run_scripted(
    study: ScriptedStudy,
    *,
    work: Path,
    out: Path,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Measure the units that are not yet in the work folder, pack all and their tables into one file, and return its path.

    Args:
        study: What to measure.
        work: Folder of documents; the same one goes on with a run that was stopped.
        out: The file of results.
        workers: Processes; by default one, this one.
        on_progress: Told after every unit.
    """
    _check_files(study)
    names = [str(name) for name in _call(study, "units", SimpleNamespace(**study.settings))]
    if not names or len({*names}) < len(names):
        raise UsageError(f"{study.script}: units() must name at least one unit, each once; it gave {names}")
    code = _code_of(study.script)
    places = {name: work / "units" / f"{_key(name, study, code)}{SUFFIX}" for name in names}
    work.mkdir(parents=True, exist_ok=True)
    with locked_folder(work):
        # What units share, as trained weights, is of one state of settings and code, like their documents.
        shared = work / "files" / _key("", study, code)
        for folder in (work / "units", shared):
            folder.mkdir(parents=True, exist_ok=True)
        waiting = {name: place for name, place in places.items() if not _is_whole(place)}
        for done, name in enumerate(_measured(study, waiting, shared, workers or 1), start=len(names) - len(waiting) + 1):
            if on_progress:
                on_progress(Progress(done, len(names), 0, 0, name))
    documents = {f"{name}{SUFFIX}": read_json(place)["document"] for name, place in places.items()}
    settings = {kind: _by_name(value) if kind in FILES else value for kind, value in study.settings.items()}
    seed, device = study.settings.get("seed", 0), torch.device(study.settings.get("device", "cpu")).type
    content = {
        "format": STUDY_FORMAT,
        "name": study.name,
        "study": study.layout.as_dict(),
        "settings": settings,
        "command": f"gradveil study run studies/{study.name}.toml",
        "provenance": {**provenance(seed if isinstance(seed, int) else 0, device), "script": code},
        "documents": documents,
        "tables": tables_of(study, documents),
    }
    return write_study(out, content)


def tables_of(study: ScriptedStudy, documents: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables that the script makes of documents, by part."""
    found = _call(study, "tables", {name.removesuffix(SUFFIX): documents[name] for name in sorted(documents)})
    if not isinstance(found, Mapping) or not all(isinstance(each, str) for pair in found.items() for each in pair):
        raise UsageError(f"{study.script}: tables() must return Markdown by name of the part, {{'': '| a |...'}}")
    return {name: text.rstrip("\n") + "\n" for name, text in found.items()}


def _measured(study: ScriptedStudy, waiting: Mapping[str, Path], work: Path, workers: int) -> Iterator[str]:
    """Measure units, in this process or in some, and give the name of each when its document is there."""
    if workers == 1 or len(waiting) < 2:
        before = torch.get_num_threads()
        try:
            for name, place in waiting.items():
                _measure(study, name, place, work)
                yield name
        finally:
            torch.set_num_threads(before)
        return
    with ProcessPoolExecutor(min(workers, len(waiting)), mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(_measure, study, name, place, work): name for name, place in waiting.items()}
        try:
            for job in as_completed(jobs):
                job.result()
                yield jobs[job]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _measure(study: ScriptedStudy, name: str, place: Path, work: Path) -> None:
    torch.set_num_threads(1)
    document = _call(study, "measure", name, SimpleNamespace(**study.settings), work)
    try:
        content = json_bytes({"unit": name, "document": encode(document)})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{study.script}: measure({name!r}) must return plain values; {error}") from error
    write_whole(place, content)


def _call(study: ScriptedStudy, function: str, *given: Any) -> Any:
    """Call a function of the script; whatever goes wrong in it is one sentence, with the fault behind it."""
    folder = str(study.script.resolve().parent.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # scripts of one folder share helpers: from studies.NAME import ...
    called = import_object(f"{study.script}:{function}")
    try:
        found = called(*given)
        return list(found) if function == "units" else found
    except GradveilError:
        raise
    except Exception as error:
        what = f"{function}({given[0]!r})" if function == "measure" else f"{function}()"
        raise UsageError(f"{study.script}: {what} failed with {type(error).__name__}: {error}") from error


def _check_files(study: ScriptedStudy) -> None:
    for kind in FILES:
        for text in _listed(study.settings.get(kind, [])):
            if text and text not in DATASETS.names() and not Path(text).exists():
                raise UsageError(f"there is no file {text!r} for {kind}; say where it is with --{kind} FILE")


def _key(name: str, study: ScriptedStudy, code: str) -> str:
    decides = [name, {kind: _by_name(value) if kind in FILES else value for kind, value in study.settings.items()}]
    contents = [
        hashlib.sha256(Path(text).read_bytes()).hexdigest()
        for kind in FILES
        for text in _listed(study.settings.get(kind, []))
        if Path(text).is_file()
    ]
    text = json.dumps([*decides, contents, code_version(), code], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code_of(script: Path) -> str:
    """Return a digest of the script and of the files beside it that it imports, at any depth."""
    digest, waiting, known = hashlib.sha256(), [script], {script}
    while waiting:
        source = waiting.pop().read_bytes()
        digest.update(source)
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module or "", *(f"{node.module}.{each.name}" for each in node.names)}
        beside = sorted({script.parent / f"{name.rpartition('.')[2]}.py" for name in names} - known)
        known |= {*beside}
        waiting += [path for path in beside if path.is_file()]
    return digest.hexdigest()[:16]


def _is_whole(place: Path) -> bool:
    try:
        return "document" in read_json(place)
    except (Malformed, OSError):
        return False


def _listed(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def _by_name(value: Any) -> Any:
    names = [Path(text).name for text in _listed(value)]
    return names if isinstance(value, list) else names[0]

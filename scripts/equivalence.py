"""Show that a refactor changed no result: record runs before and after it, and compare them bit by bit.

python scripts/equivalence.py record before
python scripts/equivalence.py record after
python scripts/equivalence.py compare before after

Runs go through the public command line, in the interpreter of this script, on one thread of the CPU and on built-in data alone.
A folder belongs to one state of the sources; recording into it again does what is still missing. ``--only`` takes a part
(``audit``, ``horizontal``, ``vertical``, ``training``) or one run of it, as in ``horizontal/shadow``. Pictures, trained weights,
metrics and everything else in the results must be equal to the bit; intervals, p-values and correlations to 1e-12.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

PARTS = ("audit", "horizontal", "vertical", "training")
ABOUT, OUTCOME, RESULTS = "about.json", "outcome.json", "results"

# Spelled out, not asked of `gradveil list`: a defense that a refactor lost must be missed.
HORIZONTAL = (
    "none",
    "censor",
    "clipping",
    "data_noise",
    "dgp",
    "dp_sgd",
    "entry_dropout",
    "example_clipping",
    "gaussian_noise",
    "graddefense",
    "invl_dnp",
    "invl_gnp",
    "laplace_noise",
    "lrp",
    "mq",
    "outpost",
    "percentile_noise",
    "pfgd",
    "precode",
    "pruning",
    "quantisation",
    "refiner",
    "shadow",
    "soteria",
    "svdefense",
    "top_k",
)
VERTICAL = ("none", "embedding_dropout", "embedding_noise", "embedding_pruning", "invl_enp")
# What keeps a state from round to round, what has a wire of its own, and the other aggregation.
TRAINING: Mapping[str, tuple[str, ...]] = {
    "svdefense": ("--defense", "svdefense"),
    "dgp": ("--defense", "dgp"),
    "censor": ("--defense", "censor(active_rounds=2)"),
    "graddefense": ("--defense", "graddefense"),
    "scaffold": ("--aggregation", "scaffold"),
}
HORIZONTAL_PLAN = """
[audit]
records = 4
steps = 20
device = "cpu"

[data]
source = "photos"

[grid]
model = "lenet"
rounds = {rounds}
defense = "{defense}"
"""
VERTICAL_PLAN = """
[audit]
records = 4
steps = 20
device = "cpu"

[data]
source = "digits"

[grid]
model = "lenet(activation='relu')"
defense = "{defense}"

[vertical]
cut = "cut1"
parts = "left_right"
"""

IGNORED = frozenset({"key", "format", "version", "command", "out", "provenance", "seconds", "client_seconds", "latency", "rdlv"})
"""What differs between any two runs; and ``rdlv``, a metric that cells held until it was taken out on purpose."""
"""Names of values that may differ between two runs of the same code: keys hold its digest, and times are times."""
STATISTICS = frozenset({"low", "high", "interval", "p", "p_value", "pearson", "spearman"})
"""Names of intervals, p-values and correlations: floats at or below them are equal within `TOLERANCE`."""
TOLERANCE = 1e-12


# --- recording ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One call of the command line.

    Attributes:
        name: ``PART/NAME``, also its place in the folder.
        arguments: What follows ``gradveil``, without the folders.
        plan: Text of the plan it reads; empty for none.
    """

    name: str
    arguments: tuple[str, ...]
    plan: str = ""


def runs(only: str = "") -> list[Run]:
    """Return the runs of all parts, of one part, or one run."""
    audit = ("audit", "--workers", "1", "--quiet")
    small = ("--model", "lenet", "--rounds", "3", "--clients", "4", "--local-steps", "2")
    train = ("train", *small, "--device", "cpu", "--no-latency", "--quiet")
    every = [
        Run("audit/default", (*audit, "--device", "cpu")),
        *(Run(f"horizontal/{name}", audit, HORIZONTAL_PLAN.format(rounds=1, defense=name)) for name in HORIZONTAL),
        Run("horizontal/dgp_two_rounds", audit, HORIZONTAL_PLAN.format(rounds=2, defense="dgp")),
        *(Run(f"vertical/{name}", audit, VERTICAL_PLAN.format(defense=name)) for name in VERTICAL),
        *(Run(f"training/{name}", (*train, *options)) for name, options in TRAINING.items()),
    ]
    return [run for run in every if _wanted(run.name, only)]


def _wanted(name: str, only: str) -> bool:
    return not only or name == only or name.split("/")[0] == only


def record(folder: Path, only: str = "") -> int:
    """Do every run that the folder does not hold yet; return 1 where one of them broke instead of refusing."""
    folder.mkdir(parents=True, exist_ok=True)
    about = _about()
    place = folder / ABOUT
    if place.is_file() and json.loads(place.read_text(encoding="utf-8")) != about:
        print(f"{folder} was recorded with other sources or another interpreter, see {ABOUT}; choose another folder")
        return 2
    place.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    broken = 0
    for run in runs(only):
        outcome = _outcome(folder, run)
        broken += outcome["code"] not in (0, 2)
        print(f"{run.name}: exit code {outcome['code']}, {outcome['seconds']:.0f} s {outcome['message']}".rstrip(), flush=True)
    return int(broken > 0)


def _outcome(folder: Path, run: Run) -> dict[str, Any]:
    """Return how a run ended, now or when it was recorded."""
    own = folder / run.name
    place = own / OUTCOME
    if place.is_file():
        found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        return found
    own.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gradveil", run.arguments[0]]
    if run.plan:
        (own / "plan.toml").write_text(run.plan.lstrip(), encoding="utf-8")
        command.append(str(own / "plan.toml"))
    command += [*run.arguments[1:], "--out", str(own / RESULTS)]
    start = time.monotonic()
    ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    (own / "output.txt").write_text(ended.stdout + ended.stderr, encoding="utf-8")
    said = [line for line in ended.stderr.splitlines() if line.strip()] if ended.returncode else []
    outcome = {
        "code": ended.returncode,
        "message": said[-1].replace(str(own), "FOLDER") if said else "",
        "seconds": round(time.monotonic() - start, 1),
    }
    if ended.returncode >= 0:  # a run that was killed is done again
        place.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    return outcome


def _about() -> dict[str, str]:
    """Return which sources the runs use, as the commit of the folder that gradveil is imported from, and what runs them."""
    code = "import gradveil, numpy, torch; print(gradveil.__file__, torch.__version__, numpy.__version__, sep='\\n')"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    package, torch, numpy = told[-3:]
    about = {"gradveil": package, "python": sys.version.split()[0], "torch": torch, "numpy": numpy}
    for name, question in (("commit", ["rev-parse", "HEAD"]), ("changed", ["diff", "HEAD", "--stat", "--", "."])):
        command = ["git", "-C", str(Path(package).parent), *question]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        about[name] = answer.stdout.strip() if answer.returncode == 0 else "unknown"
    return about


# --- reading ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """A cell, a training or the plan of a run: what it holds, without how it was stored."""

    values: dict[str, Any]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


def load_run(results: Path) -> dict[str, Item]:
    """Return what a results folder holds, by settings.

    The only function that knows how results are stored: where a later version stores them otherwise, teach this one both, and
    give back the same dictionaries. Cards are left out, for they are texts about the code; a training's checkpoint is, too.
    """
    found: dict[str, Item] = {}
    if (results / "run.json").is_file():
        run = _json(results / "run.json")
        found["plan"] = Item({name: value for name, value in run.items() if name not in ("cards", "cells")})
        for key in run["cells"]:  # not whatever lies there: a folder may hold cells of other plans
            cell = results / "cells" / key
            values = _json(cell.with_name(f"{key}.json"))
            pictures = cell.with_name(f"{key}.npz")
            arrays = dict(np.load(pictures, allow_pickle=False)) if pictures.is_file() else {}
            name = _name("cell", values["cell"])
            if name in found:
                raise ValueError(f"two cells of {results} have the same settings: {name}")
            found[name] = Item(values, arrays)
    if (results / "training.json").is_file():
        values = _json(results / "training.json")
        found[_name("training", values["settings"])] = Item(values, load_file(results / "model.safetensors"))
    return found


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _name(kind: str, settings: Mapping[str, Any]) -> str:
    return f"{kind} {json.dumps(settings, sort_keys=True)}"


# --- comparing ----------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How much was compared."""

    runs: int = 0
    failed: int = 0
    items: int = 0
    arrays: int = 0
    values: int = 0


def compare(before: Path, after: Path, only: str = "") -> int:
    """Print one line per difference and a summary; return 1 where anything differs or nothing was compared."""
    tally = Tally()
    count = 0
    for line in differences(before, after, only, tally):
        print(line)
        count += 1
    told = f"{tally.runs} runs ({tally.failed} of them refused on both sides), {tally.items} cells, trainings and plans, "
    print(f"{told}{tally.arrays} arrays and {tally.values} values compared: {count or 'no'} differences")
    return int(count > 0 or tally.arrays == 0)


def differences(before: Path, after: Path, only: str, tally: Tally) -> Iterator[str]:
    """Find what differs between two recordings."""
    names = [{str(p.parent.relative_to(folder)) for p in folder.glob(f"*/*/{OUTCOME}")} for folder in (before, after)]
    for name in sorted(n for n in names[0] | names[1] if _wanted(n, only)):
        if name not in names[0] or name not in names[1]:
            yield _missing(name, name in names[0])
            continue
        tally.runs += 1
        outcomes = [_json(folder / name / OUTCOME) for folder in (before, after)]
        tally.failed += all(outcome["code"] for outcome in outcomes)
        yield from _values(name, outcomes[0], outcomes[1], False, tally)
        yield from _items(name, load_run(before / name / RESULTS), load_run(after / name / RESULTS), tally)


def _items(run: str, before: Mapping[str, Item], after: Mapping[str, Item], tally: Tally) -> Iterator[str]:
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            yield _missing(f"{run}: {name}", name in before)
            continue
        tally.items += 1
        path = f"{run}: {_short(name)}"
        yield from _values(path, before[name].values, after[name].values, False, tally)
        yield from _arrays(path, before[name].arrays, after[name].arrays, tally)


def _short(name: str) -> str:
    """Return a name that fits a line: the kind and the defense, which is what differs inside a run."""
    kind, _, settings = name.partition(" ")
    return f"{kind} {json.loads(settings).get('defense', '')}".rstrip() if settings else kind


def _missing(path: str, in_before: bool) -> str:
    return f"{path}: only in {'BEFORE' if in_before else 'AFTER'}"


def _arrays(path: str, before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]], tally: Tally) -> Iterator[str]:
    for name in sorted({*before, *after}):
        own = f"{path} [{name}]"
        if name not in before or name not in after:
            yield _missing(own, name in before)
            continue
        tally.arrays += 1
        a, b = before[name], after[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"{own}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
            continue
        # Bytes, not numbers: NaN equals itself, and -0.0 is not 0.0.
        raw = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, -1) for x in (a, b)] if a.size else []
        changed = np.flatnonzero((raw[0] != raw[1]).any(axis=1)) if raw else np.zeros(0, dtype=np.int64)
        if changed.size:
            first = tuple(int(i) for i in np.unravel_index(changed[0], a.shape))
            yield f"{own}: {changed.size} of {a.size} entries differ, the first at {first}: {a[first]!r} and {b[first]!r}"


def _values(path: str, before: Any, after: Any, statistic: bool, tally: Tally) -> Iterator[str]:
    """Compare two values of JSON, and everything in them."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after} - IGNORED):
            own = f"{path}.{name}"
            if name not in before or name not in after:
                yield _missing(own, name in before)
            else:
                yield from _values(own, before[name], after[name], statistic or name in STATISTICS, tally)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (a, b) in enumerate(zip(before, after, strict=True)):
            yield from _values(f"{path}[{index}]", a, b, statistic, tally)
    else:
        tally.values += 1
        if not _equal(before, after, statistic):
            yield f"{path}: {before!r} and {after!r}"


def _equal(before: Any, after: Any, statistic: bool) -> bool:
    if type(before) is not type(after):
        return False
    if not isinstance(before, float):
        return bool(before == after)
    if repr(before) == repr(after):  # all digits; NaN equals itself
        return True
    return statistic and math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def main(arguments: list[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="do the runs that FOLDER does not hold yet")
    recorder.add_argument("folder", type=Path)
    comparer = commands.add_parser("compare", help="compare two recordings; exit with 1 if anything differs")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    for one in (recorder, comparer):
        one.add_argument("--only", default="", metavar="PART", help=f"one of {', '.join(PARTS)}, or one run: horizontal/shadow")
    asked = parser.parse_args(arguments)
    if not runs(asked.only):
        parser.error(f"there is no part or run {asked.only!r}")
    if asked.command == "record":
        return record(asked.folder.resolve(), asked.only)
    return compare(asked.before, asked.after, asked.only)


if __name__ == "__main__":
    sys.exit(main())

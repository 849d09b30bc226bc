"""A run: its files, what a second run leaves alone, and that being killed at any moment costs nothing but time."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from gradveil.cli import main
from gradveil.run import pool
from gradveil.run.jobs import do_job
from gradveil.run.pool import Progress, cell_key, run_audit
from gradveil.storage.run_folder import Store
from gradveil.study.cell import Cell
from gradveil.study.plan import Plan
from tests.unit.audit.forms import CELL, DEFENDED, LEVELS, RUN, SOMETIMES, SUMMARY, TIMING
from tests.unit.run.processes import SOURCE, children, finish, gone, kill, start, start_quickly, wait_for

Captured = pytest.CaptureFixture[str]

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"data": "digits", "model": "mlp(hidden=16)", "records": 4, "lists": "32", "device": "cpu"}
PLAN = Plan.default(defense=["none", "gaussian_noise(std=0.01)"], steps=5, title="two cells", **SMALL)
COMMAND = (
    *("audit", "--data", "digits", "--model", "mlp(hidden=16)", "--records", "4", "--device", "cpu", "--quiet"),
    *("--defense", "none", "--defense", "gaussian_noise(std=0.01)", "--defense", "pruning(rate=0.9)"),
    *("--lists", "32", "--ensemble", "inverting_gradients(steps=5, signed=False)"),
)
CELLS = 3


def misfits(value: Any, form: Any, where: str = "") -> Iterator[str]:
    """Name every place where a value differs from its form."""
    if isinstance(form, tuple):
        if all(list(misfits(value, each, where)) for each in form):
            yield f"{where} is {value!r}"
    elif isinstance(form, dict) and isinstance(value, dict):
        if form.keys() != value.keys():
            yield f"{where} has {sorted(form.keys() ^ value.keys())} too many or too few"
        for name in form.keys() & value.keys():
            yield from misfits(value[name], form[name], f"{where}.{name}")
    elif isinstance(form, list) and isinstance(value, list):
        for index, each in enumerate(value):
            yield from misfits(each, form[0], f"{where}[{index}]")
    elif value != form and not (isinstance(form, type) and type(value) is form):
        yield f"{where} is {value!r}"


def refuse_nan(text: str) -> NoReturn:
    raise AssertionError(f"the file holds {text}")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_nan)


def contents(out: Path) -> dict[str, bytes]:
    """Return what must be the same on every run."""
    return {path.name: path.read_bytes() for path in sorted((out / "cells").iterdir()) if "timing" not in path.name}


@pytest.fixture(scope="module")
def told() -> list[Progress]:
    return []


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, told: list[Progress]) -> Path:
    """A finished run of two cells."""
    folder = tmp_path_factory.mktemp("run") / "results"
    result = run_audit(PLAN, folder, command="gradveil audit", workers=1, on_progress=told.append)
    assert [cell.defense.spelling for cell in result.cells] == list(PLAN.defense)
    assert (result.out, result.missing) == (folder, ())
    return folder


def test_the_folder_is_as_its_format_says(out: Path) -> None:
    run = read(out / "run.json")
    assert list(misfits(run, RUN)) == []
    assert (run["title"], run["builtin_data"], len(run["cells"])) == ("two cells", True, 2)
    assert set(run["cards"]["defenses"]) == {"none", "gaussian_noise"}
    names = {f"{key}{suffix}" for key in run["cells"] for suffix in (".json", ".timing.json", ".npz")}
    assert {path.name for path in (out / "cells").iterdir()} == names
    assert {path.name for path in out.iterdir()} == {"run.json", "cells"}
    for key in run["cells"]:
        cell = read(out / "cells" / f"{key}.json")
        assert list(misfits(cell, CELL if cell["cell"]["defense"] == "none" else DEFENDED)) == []
        assert (cell["key"], cell["n"], len(cell["records"])) == (key, 4, 4)
        assert cell["informed"] is None or cell["cell"]["defense"] != "none"
        assert list(misfits(read(out / "cells" / f"{key}.timing.json"), TIMING)) == []


def test_a_wrong_file_would_be_noticed(out: Path) -> None:
    cell = read(out / "cells" / f"{read(out / 'run.json')['cells'][0]}.json")
    assert list(misfits({**cell, "n": 4.0}, CELL)) == [".n is 4.0"]
    assert list(misfits({**cell, "more": 1}, CELL)) == [" has ['more'] too many or too few"]
    assert len(list(misfits({**cell, "plain": {}, "risk": 1, "checks": [{}]}, CELL))) == 3


def test_the_document_names_what_the_files_hold(out: Path) -> None:
    text = (ROOT / "docs" / "results-format.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: set(re.findall(r'"(\w+)":', part)) for part in text.split("\n## ")}
    run = read(out / "run.json")
    cell = read(out / "cells" / f"{run['cells'][0]}.json")
    told = {*DEFENDED, *SUMMARY, *names_in(LEVELS), *CELL["records"][0], *CELL["attackers"][0], *SOMETIMES}
    assert told <= sections["cells/KEY.json"]
    assert sections["cells/KEY.json"] <= {*names_in(DEFENDED), *SOMETIMES, *cell["cell"]}
    assert set(TIMING) == sections["cells/KEY.timing.json"]
    assert sections["run.json"] <= {*RUN, *RUN["cards"], *run["provenance"], "NAME"}
    assert set(RUN) <= sections["run.json"]


def names_in(form: Any) -> set[str]:
    if isinstance(form, dict):
        return {*form, *(name for each in form.values() for name in names_in(each))}
    return {name for each in form for name in names_in(each)} if isinstance(form, list | tuple) else set()


def test_pictures_are_one_row_per_record(out: Path) -> None:
    run = read(out / "run.json")
    common = {"original", "selected", "plain", "best_by_truth", "null_grey", "null_data_mean", "null_prior_only"}
    for key, extra in zip(run["cells"], (set[str](), {"informed"}), strict=True):
        with np.load(out / "cells" / f"{key}.npz", allow_pickle=False) as arrays:
            assert set(arrays) == common | extra
            for name in arrays:
                assert (arrays[name].dtype, arrays[name].shape) == (np.dtype(np.float32), (4, 1, 8, 8)), name
                assert 0 <= arrays[name].min() <= arrays[name].max() <= 1, name


def test_progress_counts_up_to_the_end(out: Path, told: list[Progress]) -> None:
    assert (told[0].done_cells, told[0].cells, told[0].label) == (0, 2, "starting")
    assert (told[-1].done_cells, told[-1].done_steps) == (2, told[-1].steps)
    assert [p.done_cells for p in told] == sorted(p.done_cells for p in told)
    assert [p.done_steps for p in told] == sorted(p.done_steps for p in told)


def test_a_second_run_does_nothing(out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    result = run_audit(PLAN, out, workers=1)
    assert {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()} == before
    assert len(result.cells) == 2


def test_a_half_written_cell_is_measured_again_and_alone(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = contents(out)
    first, second = (out / "cells" / f"{key}.json" for key in read(out / "run.json")["cells"])
    kept = second.stat().st_mtime_ns
    half = first.read_bytes()[: first.stat().st_size // 2]
    first.write_bytes(half)
    first.with_suffix(".npz").write_bytes(b"PK")
    run_audit(PLAN, out, workers=1)
    after = contents(out)
    aside = first.with_name(f"{first.name}.corrupt")
    assert after.pop(aside.name) == half
    assert after == before
    assert second.stat().st_mtime_ns == kept
    assert "half-written or damaged" in caplog.text
    aside.unlink()


def test_a_folder_that_cannot_be_written_to_is_one_sentence(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    assert main([*COMMAND, "--out", str(tmp_path / "file" / "results")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: cannot write to ") and said.err.count("\n") == 1
    assert "choose another folder with --out" in said.err


def test_two_runs_in_one_folder_are_one_sentence(tmp_path: Path, capsys: Captured) -> None:
    with Store(tmp_path).lock():
        assert main([*COMMAND, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"another run (process {os.getpid()}) is at work" in said and said.count("\n") == 1
    assert not (tmp_path / "run.json").exists()


def asked_for(out: Path, workers: int) -> list[str]:
    return [*COMMAND, "--out", str(out), "--workers", str(workers)]


def finished_cells(out: Path) -> list[Path]:
    return [path for path in out.glob("cells/*.json") if re.fullmatch(r"[0-9a-f]{16}\.json", path.name)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main([*COMMAND, "--out", str(folder), "--workers", "1"]) == 0
    return contents(folder)


def killed(out: Path, workers: int) -> dict[Path, int]:
    """Kill the command when it has finished a cell; return what it finished and when, which is not all."""
    asked = asked_for(out, workers)
    first = start(asked) if workers > 1 else start_quickly(asked, out / "said")
    wait_for(lambda: finished_cells(out) or first.poll() is not None)
    helpers = children(first.pid)
    kill(first)
    wait_for(lambda: all(gone(helper) for helper in helpers), 30)
    kept = {path: path.stat().st_mtime_ns for path in finished_cells(out)}
    assert kept
    if len(kept) == CELLS:
        pytest.skip("the run ended before it could be killed")
    return kept


def check_whole(out: Path, kept: dict[Path, int], undisturbed: dict[str, bytes]) -> None:
    """Check that a run which was killed and continued has left what was kept, and ended as one that nothing happened to."""
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    found = {name: content for name, content in contents(out).items() if not name.endswith(".part")}
    assert len(undisturbed) == 2 * CELLS
    assert found == undisturbed
    assert (out / "report.html").is_file()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_ends_with_the_same_bytes(workers: int, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    kept = killed(tmp_path, workers)
    assert main([*COMMAND, "--out", str(tmp_path), "--workers", "1"]) == 0
    check_whole(tmp_path, kept, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_command_continues_a_killed_run(workers: int, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    kept = killed(tmp_path, workers)
    finish(start(asked_for(tmp_path, workers)), 0)
    check_whole(tmp_path, kept, undisturbed)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_run_in_processes_ends_with_the_same_bytes(
    tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One fork does what two new interpreters would do, each of which takes seconds to start; a killed run has those.
    context = {"mp_context": multiprocessing.get_context("fork")} if not torch.cuda.is_available() else {}
    monkeypatch.setattr(pool, "ProcessPoolExecutor", lambda _, **more: ProcessPoolExecutor(1, **{**more, **context}))
    here = os.getpid()

    def elsewhere(*given: Any) -> str:
        assert os.getpid() != here, "the work is not done here"
        return do_job(*given)

    monkeypatch.setattr(pool, "do_job", elsewhere)
    assert main([*COMMAND, "--out", str(tmp_path), "--workers", "2"]) == 0
    check_whole(tmp_path, {}, undisturbed)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--fail-if", "identified[none]>0.05"), 1, "none is beyond identified[none]>0.05: 4 of 4 records identified"),
        (("--fail-if", "psnr[none]>60"), 0, ""),
        (("--fail-if", "identified[top_k]>0.05"), 2, "fits none of the defenses"),
    ],
)
def test_limits_decide_the_exit_code(options: tuple[str, ...], code: int, says: str, tmp_path: Path, capsys: Captured) -> None:
    command = [*COMMAND[:-2], "--ensemble", "linear_layer", "--workers", "1", "--out", str(tmp_path / "out"), *options]
    assert main(command) == code
    said = capsys.readouterr()
    assert says in said.err
    assert (tmp_path / "out" / "report.html").exists() == (code != 2)


def test_a_result_that_cannot_be_trusted_is_3(tmp_path: Path, capsys: Captured) -> None:
    idle = [*COMMAND[:-2], "--ensemble", "inverting_gradients(steps=3, learning_rate=1e-9)", "--workers", "1"]
    assert main([*idle, "--fail-if", "identified>0.99", "--out", str(tmp_path)]) == 3
    said = capsys.readouterr()
    assert "a trust check failed (No attack's objective ever fell" in said.err
    assert "no verdict" in said.out
    assert main([*idle, "--out", str(tmp_path)]) == 0


def test_the_report_of_a_run_needs_no_torch(out: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from gradveil.report import write_report; write_report(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", script, str(out)], env=environment, check=True)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "two cells" in page and "data:image" in page
    (out / "report.html").unlink()


def test_the_key_follows_data_weights_and_the_users_code(own: Path) -> None:
    cell = Cell(data="own.npz", model="own_net.py:make", weights="own_net.safetensors", defense="own_defense.py:Shrinking")
    keys = [cell_key(cell)]
    for name, content in {
        "own_net.py": Path("own_net.py").read_bytes() + b"# more\n",
        "own_defense.py": Path("own_defense.py").read_bytes() + b"# more\n",
        "own_net.safetensors": Path("own_net.safetensors").read_bytes() + b"\0",
        "own.npz": npz_of_other_data(),
    }.items():
        assert cell_key(cell) == keys[-1]
        Path(name).write_bytes(content)
        keys.append(cell_key(cell))
    assert len(set(keys)) == 5
    module = cell.replace(model="own_net:make")
    before = cell_key(module)
    Path("own_net.py").write_text("def make(): ...\n")
    assert cell_key(module) != before


def npz_of_other_data() -> bytes:
    np.savez("other.npz", x=np.full((20, 8, 8), 0.5, np.float32), y=np.arange(20) % 5)
    return Path("other.npz").read_bytes()

"""The folder of a run: continuing gives the same bits, other settings are refused, and a kill at any moment loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradveil.cli import main
from gradveil.errors import UsageError
from gradveil.federation.engine import run_training
from gradveil.storage.training_folder import TrainingFolder
from gradveil.study.codec import decode, encode
from gradveil.study.federation import FederationSettings
from gradveil.study.training_result import RoundRecord, TrainingResult
from tests.unit.federation.small import settings, shapes

TRAIN, TEST = shapes(40), shapes(12, seed=1)
TIMES = ("client_seconds", "seconds")

REMEMBER = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradveil.defenses import Defense, DefenseCard


@dataclass(frozen=True, kw_only=True)
class Remember(Defense):
    card: ClassVar[DefenseCard] = DefenseCard(name="remember", summary="Sends what it rounded off one round later.")

    def prepare(self, data, view):
        return {"calls": torch.zeros((), dtype=torch.int64)}

    def protect_update(self, update, view, state):
        whole = {n: v + state.get(n, torch.zeros_like(v)) for n, v in update.weights.items()}
        sent = {n: (v * 50).round() / 50 for n, v in whole.items()}
        rest = {n: v - sent[n] for n, v in whole.items()}
        return update.replace(weights=sent), {**rest, "calls": state["calls"] + 1}
"""


@pytest.fixture
def remember(tmp_path: Path) -> str:
    (tmp_path / "remember.py").write_text(REMEMBER, encoding="utf-8")
    return f"{tmp_path}/remember.py:Remember"


def run(asked: FederationSettings, **more: Any) -> TrainingResult:
    return run_training(asked, dataset=TRAIN, test=TEST, **more)


def assert_equal(left: TrainingResult, right: TrainingResult) -> None:
    assert list(left.weights) == list(right.weights)
    assert list(left.buffers) == list(right.buffers)
    for one, two in ((left.weights, right.weights), (left.buffers, right.buffers)):
        assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert [timeless(record) for record in left.rounds] == [timeless(record) for record in right.rounds]


def timeless(record: RoundRecord) -> dict[str, Any]:
    return {name: value for name, value in encode(record).items() if name not in TIMES}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "noise": {"defense": "clipping(bound=1.0) + gaussian_noise(std=0.01)"},
    "scaffold": {"aggregation": "scaffold", "clients_per_round": 3},
    "momentum": {"server_momentum": 0.9},
    "adam": {"server_optimizer": "adam", "server_learning_rate": 0.01},
    "batch norm": {"model": 'convnet(width=2, norm="batch")', "local_epochs": 2},
    "adapted": {"model": "lenet", "defense": "gaussian_noise(std=0.01) + pruning(rate=0.5)", "evaluate_every": 3},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_continued_run_ends_with_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    asked = settings(rounds=5, **changes)
    whole = run(asked)
    for stop in (1, 2, 4):
        part = run(asked, out=tmp_path, stop_after=stop)
        assert len(part.rounds) == stop
        assert json.loads((tmp_path / "training.json").read_text())["finished"] is False
    assert_equal(run(asked, out=tmp_path), whole)
    assert_equal(run(asked, out=tmp_path), whole)  # a finished run is read back


def test_what_a_defense_keeps_is_continued_too(remember: str, tmp_path: Path) -> None:
    asked = settings(rounds=6, clients_per_round=2, defense=remember, aggregation="scaffold")
    whole = run(asked)
    without_memory = run(asked.replace(defense="none"))
    assert not torch.equal(whole.weights["2.weight"], without_memory.weights["2.weight"])
    for stop in (1, 2, 3, 5):
        run(asked, out=tmp_path / "out", stop_after=stop, checkpoint_every=2)
    assert_equal(run(asked, out=tmp_path / "out"), whole)
    # Every round two clients count one call more; the mean is over the clients of the round.
    assert whole.rounds[0].counters == {"calls": 1.0}
    assert sum(record.counters["calls"] for record in whole.rounds) > 6
    files = {path.name for path in (tmp_path / "out" / "checkpoint").iterdir()}
    named = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
    assert files == {named["server"], *named["clients"].values()}


def test_training_longer_continues_and_shorter_is_refused(tmp_path: Path) -> None:
    run(settings(rounds=2), out=tmp_path)
    assert_equal(run(settings(rounds=4), out=tmp_path), run(settings(rounds=4)))
    with pytest.raises(UsageError, match="already has 4 rounds; ask for at least as many"):
        run(settings(rounds=3), out=tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learning_rate": 0.1}, "was made with learning_rate = 0.2, not 0.1"),
        ({"defense": "pruning"}, "was made with defense = 'none', not 'pruning'"),
        ({"seed": 4}, "was made with seed = 0, not 4"),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    run(settings(), out=tmp_path, stop_after=1)
    before = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(UsageError, match=says):
        run(settings(**changes), out=tmp_path)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before


def test_other_records_and_other_code_of_ones_own_are_refused(remember: str, tmp_path: Path) -> None:
    run(settings(defense=remember), out=tmp_path / "out", stop_after=1)
    with pytest.raises(UsageError, match="was made with other training records, so it cannot go on"):
        run_training(settings(defense=remember), dataset=shapes(40, seed=9), test=TEST, out=tmp_path / "out")
    (tmp_path / "remember.py").write_text(REMEMBER + "# another\n", encoding="utf-8")
    with pytest.raises(UsageError, match="was made with other content of your own files, so"):
        run(settings(defense=remember), out=tmp_path / "out")


def test_what_a_killed_run_left_of_a_round_is_dropped(tmp_path: Path) -> None:
    asked = settings(rounds=4)
    run(asked, out=tmp_path, stop_after=2)
    with (tmp_path / "rounds.jsonl").open("a") as lines:
        lines.write('{"round": 3, "accuracy": 0.5, "lo')
    (tmp_path / "checkpoint" / "server-3.safetensors").write_bytes(b"half")
    (tmp_path / ".training.json.77.part").write_bytes(b"{")
    assert_equal(run(asked, out=tmp_path), run(asked))
    lines_after = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines_after] == [1, 2, 3, 4]


@pytest.mark.parametrize("file", ["checkpoint.json", "rounds.jsonl", "checkpoint/server-1.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe\x00"])
def test_damage_is_one_sentence(file: str, content: bytes, tmp_path: Path) -> None:
    run(settings(), out=tmp_path, stop_after=1)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UsageError, match="its checkpoint is damaged"):
        run(settings(), out=tmp_path)


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    with TrainingFolder(tmp_path).lock(), pytest.raises(UsageError, match=r"another run .* is at work"):
        run(settings(), out=tmp_path)
    run(settings(), out=tmp_path)


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="cannot write to "):
        run(settings(), out=tmp_path / "file")


def test_the_summary_is_what_the_format_promises(tmp_path: Path) -> None:
    result = run(settings(defense="pruning(rate=0.9)"), out=tmp_path, latency=True, command="gradveil train x")
    found = json.loads((tmp_path / "training.json").read_text())
    top = "format version command settings data parameters rounds finished final_accuracy best_accuracy bytes latency refused"
    assert list(found) == [*top.split(), "guarantee", "seconds", "provenance"]
    assert found["format"] == "gradveil-training-1"
    assert found["command"] == "gradveil train x"
    assert found["settings"] == result.settings.as_dict()
    assert found["rounds"] == [encode(record) for record in result.rounds]
    assert [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()] == found["rounds"]
    assert tuple(decode(RoundRecord, values) for values in found["rounds"]) == result.rounds
    assert found["final_accuracy"] == result.final_accuracy
    assert found["data"]["train"] == sum(found["data"]["client_sizes"]) == 40
    assert found["bytes"]["up"] == result.bytes.up < found["bytes"]["dense_per_round"] * 3
    assert found["bytes"]["down_per_round"] == found["bytes"]["dense_per_round"]
    assert found["latency"]["ratio"] > 0.5
    assert found["provenance"]["seed"] == 0
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in result.weights.items())


COMMAND = (
    "train --data digits --model mlp(hidden=8) --clients 6 --clients-per-round 3 --rounds 30 --minibatch 64 "
    "--aggregation scaffold --device cpu --no-latency --quiet"
)


def words(folder: Path, remember: str) -> list[str]:
    return [*COMMAND.split(), "--defense", f"gaussian_noise(std=0.001) + {remember}", "--out", str(folder)]


def start(folder: Path, remember: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gradveil", *words(folder, remember)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def wait_for_rounds(process: subprocess.Popen[bytes], out: Path, more: int) -> None:
    """Wait until a run has finished some rounds more."""
    lines = out / "rounds.jsonl"
    before, end = len(lines.read_bytes().splitlines()) if lines.exists() else 0, time.monotonic() + 120
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError("the run ended before it could be killed")
        if lines.exists() and len(lines.read_bytes().splitlines()) >= before + more:
            return
        time.sleep(0.005)
    raise AssertionError("the run makes no progress")


def test_a_killed_command_continues_to_the_same_weights(remember: str, tmp_path: Path) -> None:
    """Really killed, twice, wherever it happens to be; the same command then ends with the weights of an undisturbed run."""
    for _ in range(2):
        process = start(tmp_path / "killed", remember)
        try:
            wait_for_rounds(process, tmp_path / "killed", 4)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.returncode == -signal.SIGKILL
    assert main(words(tmp_path / "killed", remember)) == 0
    assert main(words(tmp_path / "whole", remember)) == 0
    killed, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("killed", "whole"))
    assert killed.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in killed.items())
    first, second = (json.loads((tmp_path / name / "training.json").read_text()) for name in ("killed", "whole"))
    for record in (*first["rounds"], *second["rounds"]):
        for name in TIMES:
            del record[name]
    assert first["rounds"] == second["rounds"]
    assert len(first["rounds"]) == 30

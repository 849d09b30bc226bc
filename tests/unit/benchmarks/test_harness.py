"""The harness of the speed benchmarks: ways in turns, the fastest of each, and one file that says where it comes from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import harness


def test_ways_are_timed_in_turns_and_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, called = [0.0], list[str]()
    durations = {"slow": iter((5.0, 5.0, 3.0, 3.0)), "fast": iter((1.0, 1.0, 2.0, 2.0))}
    monkeypatch.setitem(harness.CLOCKS, "wall", lambda: now[0])

    def work(name: str) -> None:
        called.append(name)
        now[0] += next(durations[name])

    ways = {name: (lambda name=name: work(name)) for name in durations}
    assert harness.in_turns(ways, "cpu", rounds=2, repeats=2) == {"slow": 3.0, "fast": 1.0}
    assert called == ["slow", "slow", "fast", "fast"] * 2


def test_one_file_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "x.json"
    monkeypatch.setattr(sys, "argv", ["x.py", "--rounds", "2", "--out", str(out)])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    options = harness.read(harness.arguments("What is timed.", rounds=5))
    harness.finish("x", {"ratio": 2.5}, options)
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record == json.loads(capsys.readouterr().out)
    assert (record["format"], record["benchmark"], record["rounds"], record["ratio"]) == (harness.FORMAT, "x", 2, 2.5)
    assert record["command"] == "python -m benchmarks.x --rounds 2 --out x.json"
    assert record["provenance"]["code"] and record["provenance"]["commit"]

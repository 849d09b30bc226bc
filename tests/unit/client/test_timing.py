"""Times with and without a defense are the best of several, in turns."""

from __future__ import annotations

import time

import pytest
import torch

from gradveil.client.timing import FEW_TURNS, MOST_TURNS, best_seconds, measure_latency_of, run_seconds


def test_the_shortest_run_of_each_counts_and_they_take_turns() -> None:
    done: list[str] = []
    pauses = iter([0.02, 0.0, 0.02, 0.004])

    def work(name: str) -> None:
        done.append(name)
        time.sleep(next(pauses))

    first, second = best_seconds([lambda: work("a"), lambda: work("b")], "cpu", most=2)
    assert done == ["a", "b", "a", "b"]
    assert first >= 0.02 and second < 0.02


def test_it_stops_after_its_time_but_not_before_one_turn() -> None:
    done: list[int] = []
    best_seconds([lambda: done.append(1)], "cpu", seconds=-1)
    assert len(done) == 1
    best_seconds([lambda: done.append(1)], "cpu", seconds=60, most=4)
    assert len(done) == 5


def test_without_a_defense_the_two_are_one_measurement() -> None:
    done: list[int] = []
    found = measure_latency_of(lambda: done.append(1), None, "cpu")
    assert found.ratio == 1 and len(done) == FEW_TURNS
    done.clear()
    slow = measure_latency_of(lambda: time.sleep(0.003), lambda: done.append(1), "cpu", seconds=60)
    assert slow.ratio > 1 and slow.defended_ms >= 3 and len(done) == MOST_TURNS


def test_what_a_gpu_still_has_to_do_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    run_seconds(lambda: waited.append("work"), "cuda")
    assert waited == ["cuda", "work", "cuda"]

"""What all benchmarks of speed share: ways timed in turns, the fastest of each, and one JSON file that says where it comes from.

Ways to do the same work are compared in one run and in turns, so that a busy machine harms all alike; other work only ever makes
a time longer, so the fastest of several is the nearest to the truth. Where others use the same processor even that is not
enough: ``--clock cpu`` counts the time this process ran. Benchmarks run from the root: ``python -m benchmarks.NAME``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gradveil.provenance import provenance

__all__ = ["FORMAT", "Timer", "arguments", "finish", "in_turns", "read"]

FORMAT = "gradveil-benchmark-1"
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Timer:
    """Times calls and keeps the fastest of each name, in seconds."""

    def __init__(self, device: torch.device | str, clock: str = "wall") -> None:
        """Start with nothing timed; on a GPU a call counts until the device is idle."""
        self.best: dict[str, float] = {}
        self._on_gpu, self._clock = torch.device(device).type == "cuda", CLOCKS[clock]

    def __call__(self, name: str, work: Callable[[], object], repeats: int = 1) -> float:
        """Time ``repeats`` calls and return the seconds of one."""
        begun = self._now()
        for _ in range(repeats):
            work()
        took = (self._now() - begun) / repeats
        self.best[name] = min(self.best.get(name, float("inf")), took)
        return took

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return self._clock()


def in_turns(
    ways: Mapping[str, Callable[[], object]], device: torch.device | str, *, rounds: int, repeats: int = 1, clock: str = "wall"
) -> dict[str, float]:
    """Return the fastest seconds of one call of every way: all in turn, ``rounds`` times."""
    timer = Timer(device, clock)
    for _ in range(rounds):
        for name, work in ways.items():
            timer(name, work, repeats)
    return timer.best


def arguments(doc: str | None, *, rounds: int, device: str = "cpu", clock: str = "wall") -> argparse.ArgumentParser:
    """Return a command line with the options that all have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=device)
    parser.add_argument("--rounds", type=int, default=rounds, help="turns; the fastest counts")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default=clock, help="cpu: the time this process ran")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser


def read(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line and set the threads; of work on a GPU a processor's time says nothing, so the wall counts."""
    options = parser.parse_args()
    options.clock = "wall" if torch.device(options.device).type == "cuda" else options.clock
    torch.set_num_threads(options.threads)
    return options


def finish(name: str, figures: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print the figures with their provenance, and write them where asked."""
    device = torch.device(options.device).type
    words = [word if not Path(word).is_absolute() else Path(word).name for word in sys.argv[1:]]
    record = {
        "format": FORMAT,
        "benchmark": name,
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *words]),
        "clock": options.clock,
        "rounds": options.rounds,
        **figures,
        "provenance": {**provenance(0, device), "threads": options.threads},
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    sys.stdout.write(text + "\n")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")

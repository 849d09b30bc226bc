"""Which faults are tried: a published lottery, layered by room and kind."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

from scripts.mutants.sites import Mutant

SEEDS = {
    "first": "gradveil mutants, first sample",
    "second": "gradveil mutants, second sample",
    "practice": "gradveil mutants, practice",
    "third": "gradveil mutants, third sample",
}
"""The seeds of the samples. Each is drawn from what those before it left, so tests written for one do not flatter the next."""

SIZE = 300
PRACTICE = 600
"""Faults in the sample that is looked at as often as one likes."""


def draw(mutants: Sequence[Mutant], sample: str, size: int | None = None) -> list[Mutant]:
    """Draw a sample: rooms and kinds take turns, and the lowest rank of each layer goes first."""
    taken = {each.key for name in takewhile(lambda name: name != sample, SEEDS) for each in draw(mutants, name)}
    size = size or (PRACTICE if sample == "practice" else SIZE)
    return _lottery([each for each in mutants if each.key not in taken], SEEDS[sample], size)


def _lottery(mutants: Collection[Mutant], seed: str, size: int) -> list[Mutant]:
    layers: dict[tuple[str, str], list[Mutant]] = {}
    for one in sorted(mutants, key=lambda each: each.rank(seed)):
        layers.setdefault((one.room, one.kind), []).append(one)
    chosen: list[Mutant] = []
    for turn in range(max((len(layer) for layer in layers.values()), default=0)):
        for name in sorted(layers):
            if turn < len(layers[name]):
                chosen.append(layers[name][turn])
    return chosen[:size]

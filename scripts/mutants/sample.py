"""Which faults are tried: a published lottery, layered by room and kind."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from scripts.mutants.sites import Mutant

SEEDS = {"first": "gradveil mutants, first sample", "second": "gradveil mutants, second sample"}
"""The seeds of the two samples. The second is drawn from what the first left, after the tests for the first were written."""

SIZE = 300


def draw(mutants: Sequence[Mutant], sample: str, size: int = SIZE) -> list[Mutant]:
    """Draw a sample: rooms and kinds take turns, and the lowest rank of each layer goes first."""
    taken: frozenset[str] = frozenset()
    if sample == "second":
        taken = frozenset(each.key for each in draw(mutants, "first", size))
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

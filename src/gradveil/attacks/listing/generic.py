"""The attacker with a list who needs no author: it sends every candidate through the defended client and compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext
from gradveil.attacks.listing.client import ListClient, joined
from gradveil.attacks.listing.evidence import Evidence
from gradveil.attacks.listing.hypotheses import Hypotheses
from gradveil.attacks.listing.joint import Joint
from gradveil.attacks.listing.statistics import Laws, Sent, features_of
from gradveil.records import Observation
from gradveil.tensors import Named

__all__ = ["DRAWS", "GENERIC", "generic_evidence", "releases_of_own"]

GENERIC = "generic"
DRAWS = 3
"""Draws of every candidate that make its mean; a fourth is a release of the attacker's own, to learn from."""
HELD_ENTRIES = 2**27
"""Entries of releases and candidates held at one time, half a gigabyte."""
LEAST_OWN = 8
BLOCK = 32
TAUGHT = 64
"""Releases of its own that teach it what to trust where all candidates are fitted together."""


def releases_of_own(count: int, parameters: int) -> int:
    """Return of how many candidates the attacker makes a release to learn from: of all, or of as many as fit."""
    return min(count, max(LEAST_OWN, HELD_ENTRIES // (4 * max(1, parameters))))


def generic_evidence(observations: Sequence[Observation], hypotheses: Hypotheses, context: AttackContext) -> Evidence:
    """Compare every release with what the client sends for every candidate.

    Every candidate goes through the client's own code a few times with random numbers that are the same for all candidates, so
    that additive noise cancels between them. Some, as many as fit, are sent once more with fresh random numbers: of these
    the attacker knows the truth, and learns from them by how much each entry varies and what to trust (`Evidence`). Six numbers
    of a pair (`gradveil.attacks.listing.statistics.FEATURES`) are kept, never the releases of all candidates.

    Departs from: likelihood-ratio membership tests (Carlini et al. 2022) fit a law per candidate from many runs; here one law
    is pooled over candidates, because a client costs too much to run often.

    Cost: four client runs a candidate, one where nothing is drawn, and a product of releases and candidates. Known weakness:
    under additive noise the mean of three draws costs it a seventh of the noise's scale; who knows the law needs no draws.

    Args:
        observations: Releases under attack.
        hypotheses: The list.
        context: With the client's code.
    """
    client = ListClient(observations[0], hypotheses, context)
    releases = [joined(each) for each in observations]
    varies = client.varies()
    runs = _Runs(client, DRAWS if varies else 1, varies)
    count = releases_of_own(len(hypotheses), sum(value.numel() for value in releases[0].values()))
    ran = [runs.run(index) for index in range(count)]
    learned, own = [sent for sent, _ in ran], [runs.release(index, draws) for index, (_, draws) in enumerate(ran)]
    del ran
    laws = Laws(own, learned)
    everything = [*releases, *own]
    columns = [features_of(everything, block, laws) for block in _blocks(runs, learned, len(hypotheses))]
    features, signs = torch.cat(columns, dim=1).tensor_split([-1], dim=-1)
    # Fitting all candidates together costs a tenth of a second a release; fewer of its own teach the attacker as well.
    taught = min(count, TAUGHT) if hypotheses.varies else count
    return Evidence(
        name=GENERIC,
        informed=False,
        features=features[: len(releases)],
        own=features[len(releases) : len(releases) + taught],
        truth=torch.arange(taught),
        apart=apart_of(hypotheses, [runs.draw_of_release(index) for index in range(taught)]),
        joint=Joint.of(observations, own[:taught], hypotheses) if hypotheses.varies else None,
        draws=DRAWS + 1 if varies else 1,
        signs=(signs[: len(releases), :, 0], signs[len(releases) : len(releases) + taught, :, 0]),
    )


def apart_of(hypotheses: Hypotheses, draws: Sequence[int]) -> Tensor:
    """Return (S, N) whether a candidate is none of those that filled the update of each of the first S candidates."""
    found = torch.ones(len(draws), len(hypotheses), dtype=torch.bool)
    for index, draw in enumerate(draws):
        found[index, hypotheses.companions(index, draw)] = False
    return found


@dataclass(frozen=True)
class _Runs:
    client: ListClient
    draws: int
    varies: bool

    def sent(self, index: int) -> Sent:
        """Return a candidate's mean over the draws that all candidates share."""
        return self.run(index)[0]

    def run(self, index: int) -> tuple[Sent, list[Named]]:
        """Return the same, and the only draw where nothing is drawn."""
        draws = [joined(self.client.observe(index, draw)) for draw in range(self.draws)]
        raws = [self.client.raw(index, draw) for draw in range(self.draws if self.client.hypotheses.varies else 1)]
        mean = {name: torch.stack([raw[name] for raw in raws]).mean(0) for name in raws[0]}
        return Sent.of(draws, mean), [] if self.varies else draws

    def draw_of_release(self, index: int) -> int:
        """Return the draw of a candidate's own release: one that nothing else has, where there is anything to draw."""
        return self.draws + index if self.varies else 0

    def release(self, index: int, draws: list[Named]) -> Named:
        """Return a release the attacker makes of a candidate: where nothing is drawn, the one that it has."""
        return draws[0] if draws else joined(self.client.observe(index, self.draw_of_release(index)))


def _blocks(runs: _Runs, learned: list[Sent], count: int) -> Iterator[list[Sent]]:
    """Yield all candidates, some at a time: first those held already."""
    entries = sum(value.numel() for value in learned[0].mean.values())
    step = max(1, min(BLOCK, HELD_ENTRIES // (4 * max(1, entries))))
    for start in range(0, len(learned), step):
        yield learned[start : start + step]
    for start in range(len(learned), count, step):
        yield [runs.sent(index) for index in range(start, min(start + step, count))]

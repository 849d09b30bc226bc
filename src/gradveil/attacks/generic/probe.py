"""What an attacker learns about a defense by running the client's code on public inputs of its own.

Nobody has to describe a defense to be found out: of P own inputs the attacker knows both the raw update and the defended one.
From these pairs follow, entry by entry, how much of the raw value arrives and how much else (`Reliance`), and for any way of
comparing whether it tells the truth from other inputs better than comparing values does (`Probe.confusion`).

Letters: P own inputs (each one client's whole batch), R rounds seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.execution import chunk_size
from gradveil.attacks.engine.matrix_convolution import quicker
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.learning.learner import Learner
from gradveil.records import Comparison, Observation
from gradveil.tensors import Named, stack

__all__ = ["MOST_ENTRIES", "Probe", "Reliance", "probe_of", "raw_updates"]

MOST_ENTRIES = 16_000_000
"""Numbers of raw updates that are held at once."""
FEWEST, MOST = 2, 8
"""Own inputs: enough to tell an entry that never arrives from one that does, few enough for a client that is dear to run."""
PRIOR = 1.0
"""Weight, in own inputs, of the error of a whole tensor beside that of one entry."""
FLOOR = 0.01
"""Error that is never doubted away, over the square of what arrives: a share of what P inputs show is chance."""

Compare = Callable[[Named, Named], Comparison]
"""``(raw, sent) -> what is compared``."""


@dataclass(frozen=True)
class Reliance:
    """How entries of the raw update arrive: ``sent ≈ gain · raw``, with an error of deviation ``1 / weight`` up to a unit."""

    gain: Named
    weight: Named


@dataclass(frozen=True)
class Probe:
    """Pairs of raw and defended updates.

    Attributes:
        raw: Per round, the raw updates of the own inputs, (P, ...).
        sent: Per round, what the server would have read of each, (P, ...).
        crossed: Raw updates (P, P, ...) of the first round: row p has the labels of input p with the pictures of all.
    """

    raw: tuple[Named, ...]
    sent: tuple[Named, ...]
    crossed: Named
    known: dict[int, Reliance] = field(default_factory=dict, repr=False, compare=False)

    def learned(self, round_index: int) -> Reliance:
        """Return gains and weights of one round, learned from all own inputs; the same tensors whenever it is asked."""
        if round_index not in self.known:
            self.known[round_index] = self.reliance(round_index)
        return self.known[round_index]

    def reliance(self, round_index: int, without: int | None = None) -> Reliance:
        """Return gains and weights of one round, learned from all own inputs, or from all ``without`` one.

        With d sent and r raw, a the least-squares gain of a whole tensor and s its mean square: the gain of an entry is
        (Σ d r + κ a) / (Σ r² + κ), where κ is the variance of the errors over that of true gains about a, both as the tensor
        shows them (empirical Bayes): gains that differ from entry to entry are believed, those that only look so by chance are
        not. The weight is (E + FLOOR a² s)^-½, with E the mean of (d - gain r)² drawn towards the tensor's own.
        """
        rows = [row for row in range(len(next(iter(self.raw[0].values())))) if row != without]
        gains, weights = {}, {}
        for name, every in self.raw[round_index].items():
            raw, sent = every[rows].double(), self.sent[round_index][name][rows].double()
            gain, overall = _gains(raw, sent)
            error = (sent - gain * raw).square()
            drawn = (error.sum(0) + PRIOR * error.mean()) / (len(rows) + PRIOR) if error.numel() else error.sum(0)
            bottom = drawn + FLOOR * overall**2 * (float(raw.square().mean()) if raw.numel() else 0.0)
            weights[name] = torch.where(bottom > 0, bottom.clamp_min(1e-300).rsqrt(), torch.zeros_like(bottom))
            gains[name] = gain.to(every)
        top = max((float(value.max()) for value in weights.values() if value.numel()), default=1.0)
        unit = 1.0 if top == 0 else 1 / top
        return Reliance(gains, {name: (value * unit).to(gains[name]) for name, value in weights.items()})

    def confusion(self, compare_of: Callable[[int], Compare]) -> float:
        """Return how near other inputs of the same label come: the truth's distance over theirs, in the median over own inputs.

        Zero where the two sides coincide at the truth alone, one where the truth cannot be told from any other picture.

        Args:
            compare_of: For each own input how to compare, since what was learned must not have seen it.
        """
        cosine, count = OBJECTIVES.get("cosine"), len(next(iter(self.raw[0].values())))
        found = []
        for row in range(count):
            compare, sent = compare_of(row), {name: value[row] for name, value in self.sent[0].items()}
            far = [float(cosine(compare({n: v[row, col] for n, v in self.crossed.items()}, sent))) for col in range(count)]
            near, others = far.pop(row), sorted(far)
            middle = others[len(others) // 2]
            found.append(near / middle if middle > 0 and math.isfinite(near) else 1.0)
        return sorted(found)[len(found) // 2]


def _gains(raw: Tensor, sent: Tensor) -> tuple[Tensor, float]:
    """Return the gain of every entry, and that of the whole tensor, from (P, ...) pairs."""
    size, count = raw.square().sum(0), len(raw)
    overall = float((raw * sent).sum() / raw.square().sum().clamp_min(1e-300))
    alone = torch.where(size > 0, (raw * sent).sum(0) / size.clamp_min(1e-300), torch.full_like(size, overall))
    seen = size > 0
    if not bool(seen.any()):
        return torch.full_like(size, overall), overall
    # Errors by entry are too few to be told apart by size, so the tensor's serve all.
    error = float((sent - alone * raw).square().sum(0)[seen].mean()) / max(1, count - 1)
    spread = (alone - overall).square()[seen] - error / size[seen]
    # Weighted by how well each gain is known: of an entry without energy nothing is.
    differ = float((spread * size[seen]).sum() / size[seen].sum())
    kappa = error / differ if differ > 0 else float("inf")
    if not math.isfinite(kappa):
        return torch.full_like(size, overall), overall
    return ((raw * sent).sum(0) + kappa * overall) / (size + kappa).clamp_min(1e-300), overall


def raw_updates(learner: Learner, inputs: Tensor, targets: Tensor) -> Named:
    """Return the undefended updates of all candidates, a few at a time: each holds a gradient as large as the model."""
    few = max(1, MOST_ENTRIES // max(1, learner.parameters))
    if inputs.device.type == "cuda":  # where small parts would leave most of it idle
        few = max(few, chunk_size(inputs.device, learner.parameters, len(inputs), inputs.shape[1]))
    quick = quicker(learner, tuple(inputs.shape[2:]))
    return dict(vmap(quick.update, chunk_size=few)(inputs, targets))


def probe_of(observation: Observation, context: AttackContext) -> Probe | None:
    """Return what the client's code does to the attacker's own inputs; None where it has neither the code nor inputs.

    Run once for a context: the context remembers it.
    """
    if context.simulate is None or context.own is None:
        return None
    key = ("probe", *(learner.content for learner in observation.learners))
    if key not in context.memory:
        context.memory[key] = _run(observation.learners, context)
    found: Probe | None = context.memory[key]
    return found


def _run(learners: Sequence[Learner], context: AttackContext) -> Probe | None:
    assert context.own is not None and context.simulate is not None
    inputs, targets = context.own
    count = min(len(inputs), MOST, max(FEWEST, MOST_ENTRIES // max(1, learners[0].parameters)))
    if count < FEWEST:
        return None
    inputs, targets = inputs[:count], targets[:count]
    # The client's own code is not made for vmap, so it runs input by input: a few times in a whole attack.
    ran = [context.simulate(x, y, -1 - place) for place, (x, y) in enumerate(zip(inputs, targets, strict=True))]
    sent = tuple(stack([row[index] for row in ran]) for index in range(len(learners)))
    raw = tuple(raw_updates(learner, inputs, targets) for learner in learners)
    pictures = inputs.repeat(count, *[1] * (inputs.ndim - 1))
    labels = targets.repeat_interleave(count, 0)
    crossed = raw_updates(learners[0], pictures, labels)
    parted = {name: value.reshape(count, count, *value.shape[1:]) for name, value in crossed.items()}
    return Probe(tuple(map(_detached, raw)), tuple(map(_detached, sent)), _detached(parted))


def _detached(named: Named) -> Named:
    return {name: value.detach() for name, value in named.items()}

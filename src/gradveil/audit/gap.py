"""Search told from information: does the truth explain the update better than what was found, or no better?

For every update, under one objective, the referee's (float64, no prior, the whole defended client replayed by the defense's own
attacker, its unknowns refitted; the likelihood where the noise is known):

    gap = objective(what the attacker chose) - objective(the truth)

Where a wrong picture was chosen, a gap above zero says that the search failed: a better explanation existed and was not found, so
nothing follows about the defense. A gap at or below zero says that a wrong picture explains the update as well as the truth does:
what tells them apart is not in the update, as far as this attacker can use it. That is evidence for the defense.

**How far above zero is above.** Both scores are of one update, so whatever was drawn for it is in both and cancels; what counts
is how much better the truth explains it. Let each of n entries carry independent noise. With R the mean squared residual, its
scale fitted, the data speak for the truth with the likelihood ratio (R_found / R_truth)^(n/2), and with `EVIDENCE` to one where

    gap > R_truth · 2 ln(EVIDENCE) / n        (to first order)

For noise of known law the score is the negative log-likelihood per entry, R_truth is 1/2, and this is the exact ratio. Where
the law is not known, entries may hang together; then n is at most 2/s², where s is the relative scatter of the scores that truths
have in rehearsal: the score of n independent entries scatters by √(2/n). Where the truth leaves no residual there is no noise to
excuse a gap, and only rounding at the client is left.

The spread of truths itself would be the wrong tolerance: it is mostly that of norms from one picture to the next, which a
comparison within one update does not have, and the wider the tolerance, the more failed searches pass as evidence for a defense.

**Nearly there.** Searches stop before their objective is exactly zero, and most under another objective than the referee's. Where
nothing is drawn and a wrong picture leaves no more than `NEAR` unexplained, L-BFGS takes it to the nearest picture that explains
the update, if there is one. If that is still a wrong picture, its score is what counts; if it is the record, the search had
failed.

Cost: one score an update, two where unknowns are fitted; up to `POLISH` evaluations of one picture for those nearly there.
Weakness: the chosen candidate is looked at, not the lowest score, so a smooth picture that the rehearsal preferred over one that
fits better counts as a failed search. That errs towards "cannot tell". Where a defense brings an attacker who does not know it,
its objective says nothing about the information.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.attacks.referee import ROUNDING, Referee, Verdict
from gradveil.audit.scene import Subject
from gradveil.metrics import assign, median, ranks, share_of
from gradveil.records import Observation, Reconstruction
from gradveil.study.evidence import Gap

__all__ = ["EVIDENCE", "Explained", "explain", "gap_of", "tolerance_at"]

EVIDENCE = 20.0
"""Odds at which the data are said to speak for the truth."""
NEAR = 0.01
"""Weighted share of the update that a picture may leave unexplained to be worth finishing."""
POLISH = 60


@dataclass(frozen=True)
class Explained:
    """How well one update is explained, by the referee's score; lower is better.

    Attributes:
        found: By what the attacker chose.
        truth: By the inputs that were trained on.
        tolerance: How far above the truth a score may lie and still explain the update as well.
        likelihood: Whether the noise is known, so that the scores are likelihoods.
    """

    found: float
    truth: float
    tolerance: float = ROUNDING
    likelihood: bool = False

    @property
    def gap(self) -> float:
        """What was found minus the truth."""
        return self.found - self.truth

    @property
    def search_failed(self) -> bool:
        """Whether the truth explains the update better than what was found; a score that is no number says so too."""
        return not self.gap <= self.tolerance


def explain(
    subject: Subject, chosen: Sequence[Reconstruction], verdicts: Sequence[Verdict], referee: Referee, rank: Tensor
) -> tuple[Explained, ...]:
    """Score the truth of every update beside what was chosen for it.

    Args:
        subject: The updates with their truth.
        chosen: One candidate an update.
        verdicts: With the scores of the chosen ones.
        referee: Who scored them.
        rank: (n,) rank of every record's picture; what was found needs no finishing.
    """
    rows = []
    size = len(rank) // len(chosen)
    for index, (target, candidate, verdict) in enumerate(zip(subject.targets, chosen, verdicts, strict=True)):
        observation = target.observation
        device = next(iter(observation.update.weights.values())).device
        truth = Reconstruction(target.replayed_inputs.detach(), target.batch.targets.to(device), recipe="truth")
        # Fitted from one start alone, the unknowns may stay where the truth looks worse than it is.
        starts = [truth, truth.replace(variables=candidate.variables)] if candidate.variables else [truth]
        at_truth = min(referee.scores(observation, starts))
        tolerance = tolerance_at(at_truth, _independent(referee, observation))
        known = bool(observation.adversary.arrives(observation).noise_std)
        row = Explained(verdict.scores[verdict.chosen], at_truth, tolerance, known)
        wrong = bool((rank[index * size : (index + 1) * size] != 1).any())
        nearly = row.search_failed and row.found <= NEAR and at_truth <= ROUNDING and not known
        rows.append(_finished(subject, index, candidate, referee, row) if wrong and nearly else row)
    return tuple(rows)


def _finished(subject: Subject, index: int, candidate: Reconstruction, referee: Referee, row: Explained) -> Explained:
    """Return how well the nearest picture explains the update that explains it best, unless that is a record found after all."""
    observation = subject.targets[index].observation
    if observation.adversary.variables(observation, torch.Generator().manual_seed(0)):
        return row
    misfit = referee.misfit(observation, candidate)
    matched = candidate.inputs if candidate.unfinished is None else candidate.unfinished
    inputs = matched.to(observation.learner.device).double().clone().requires_grad_()
    search = torch.optim.LBFGS([inputs], max_iter=POLISH, max_eval=POLISH, tolerance_grad=0, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        value, inputs.grad = misfit(inputs)
        return value

    search.step(closure)
    end = candidate.replace(inputs=inputs.detach().clamp(0, 1), unfinished=None, recipe="finished")
    (score,) = referee.scores(observation, [end])
    if not score < row.found or _anybody(subject, index, end.inputs.cpu().float()):
        return row
    return replace(row, found=score)


def _anybody(subject: Subject, index: int, inputs: Tensor) -> bool:
    """Whether a record of an update is identified in these pictures."""
    size = len(inputs)
    order = assign(inputs, subject.targets[index].batch.inputs)
    positions = torch.tensor(subject.positions[index * size : (index + 1) * size])
    return bool((ranks(inputs[order], positions, subject.candidates) == 1).any())


def tolerance_at(truth: float, entries: float) -> float:
    """Return how far above the truth's score another may lie before the data speak for the truth with `EVIDENCE` to one."""
    return max(ROUNDING, 2 * math.log(EVIDENCE) * truth / entries) if math.isfinite(truth) else ROUNDING


def _independent(referee: Referee, observation: Observation) -> float:
    """Return how many independent entries a score is worth."""
    entries, truths = float(referee.entries[observation.content]), referee.truths
    if observation.adversary.arrives(observation).noise_std or len(truths) < 2 or not min(truths) > ROUNDING:
        return entries
    middle = sum(truths) / len(truths)
    scatter = sum((value - middle) ** 2 for value in truths) / (len(truths) - 1) / middle**2
    return min(entries, 2 / scatter) if scatter > 0 else entries


def gap_of(explained: Sequence[Explained], rank: Tensor) -> Gap:
    """Return the shares of records that were found, whose search failed, and whose information is gone.

    Args:
        explained: One an update.
        rank: (n,) rank of every record among the candidates; the records of an update stand together.
    """
    n = len(rank)
    size = n // len(explained)
    found = rank == 1
    failed = torch.tensor([row.search_failed for row in explained]).repeat_interleave(size) & ~found
    ratios = torch.tensor([row.gap / row.truth if row.truth > ROUNDING else math.nan for row in explained], dtype=torch.float64)
    return Gap(
        search_failed=share_of(int(failed.sum()), n),
        information_gone=share_of(int((~failed & ~found).sum()), n),
        found=share_of(int(found.sum()), n),
        median=median(ratios) if bool(ratios.isfinite().all()) else None,
        objective="likelihood" if explained[0].likelihood else "residual",
    )

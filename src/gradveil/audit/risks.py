"""The risk of every attacked record without an attack: InvRE with and without the defense, and how well it foretold the error.

A correlation stands beside its null, that of the error with the record's contrast, its squared distance from the mean of records
that were not attacked: a flat picture is rebuilt with less error whatever is sent. What the score adds is told by
the partial correlation.

Scores are those of each record alone in one update, whatever the batch, the clients and the rounds of the cell. Where a defense
only adds noise, the decomposition behind its score is that of the undefended update, so each is made once per process and used by
all cells with the same model, weights and records. It is the same numbers either way, and a resumed run gives the same bits.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from gradveil.audit.scene import Subject, build_learner
from gradveil.errors import GradveilError
from gradveil.learning import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.calibration import read_alpha
from gradveil.risk.exposure import assess
from gradveil.risk.invloss import MEANING
from gradveil.risk.invre import BETA
from gradveil.spectra.jacobians import Jacobian
from gradveil.spectra.spectrum import Spectrum, choose_mode
from gradveil.study.cell import Cell
from gradveil.study.risks import Assessment, CellRisk, Coefficient, Correlation, RiskRecord, RiskSide

__all__ = ["OFF", "Scores", "correlate", "quick_mode", "risk_of_cell", "same_update"]

OFF = "off"
EXACT_INPUTS = 1024
"""Largest input whose m × m matrix is decomposed in an audit unless the plan asks for it; beyond, leading values are faster."""
LEADING_ERROR = 0.02
"""How far InvRE of ``leading`` lay from the exact one at most, where both were measured."""
FEWEST = 3
"""Records that a correlation needs."""
EXACT = 7
"""Records up to which all orders are counted for Spearman's p; there are 5,040 of seven."""
_known: defaultdict[Hashable, dict[Hashable, Spectrum]] = defaultdict(dict)
MOST_KNOWN = 16
"""Models whose spectra are remembered."""


@dataclass(frozen=True)
class Scores:
    """The scores of a cell's records, or why there are none.

    Attributes:
        defended: With the cell's defense.
        undefended: Without.
        alpha: Centre of the score.
        reason: Why there are no scores; empty where there are.
        contrasts: Mean squared distance of each record from the mean of those that were not attacked.
        note: What the setting means for them, as where an update holds several records.
        seconds: Time this cell spent on them.
    """

    defended: Assessment | None = None
    undefended: Assessment | None = None
    alpha: float = 0.0
    contrasts: tuple[float, ...] = ()
    reason: str = ""
    note: str = ""
    seconds: float = 0.0

    def beside(self, names: Sequence[str], errors: Sequence[float | None], attack: str) -> CellRisk:
        """Return the scores beside what attacks reached, without times, which differ from run to run.

        Args:
            names: Pseudonyms of the records, in their order.
            errors: Mean squared error of the best attack on each.
            attack: Whose error that is: ``informed``, or ``plain`` where there was no informed attacker.
        """
        if self.defended is None or self.undefended is None:
            return CellRisk(reason=self.reason, meaning=MEANING)
        scores = self.defended.records
        records = tuple(
            RiskRecord(
                pseudonym=name,
                invre=own.invre,
                low=own.low,
                high=own.high,
                score=own.score,
                undefended=bare.invre,
                error=error,
                contrast=contrast,
            )
            for name, own, bare, error, contrast in zip(
                names, scores, self.undefended.records, errors, self.contrasts, strict=True
            )
        )
        notes = (self.note, *_too_close(self.defended), *self.defended.notes, *self.undefended.notes)
        return CellRisk(
            meaning=MEANING,
            alpha=self.alpha,
            beta=BETA,
            gap_rule=scores[0].gap_rule,
            noise_form="inverse",
            defended=_side(self.defended),
            undefended=_side(self.undefended),
            records=records,
            correlation=correlate([own.invre for own in scores], errors, attack, self.contrasts),
            notes=tuple(dict.fromkeys(filter(None, notes))),
        )


def _too_close(found: Assessment) -> list[str]:
    """Warn where records differ by less than leading singular values can tell."""
    scores = [record.invre for record in found.records]
    if max(scores) - min(scores) >= LEADING_ERROR or all(record.mode != "leading" for record in found.records):
        return []
    told = f"scores from leading singular values are good to about {LEADING_ERROR:g}, and these records differ by less"
    return [f"{told}: to rank them, score exactly with risk = 'gram'"] if len(scores) > 1 else []


def _side(found: Assessment) -> RiskSide:
    return RiskSide(mean=found.mean_invre, worst=found.worst_invre, high=found.high, mode=found.mode)


def quick_mode(jacobian: Jacobian) -> str:
    """Return the cheapest way for an audit: exact where that takes about a second, else the leading singular values.

    The m × m matrix of a 32-pixel colour picture takes ten times as long as its leading values, which an audit of many cells
    cannot spend on a hint.
    """
    chosen = choose_mode(jacobian)
    return "leading" if chosen == "gram" and jacobian.inputs > EXACT_INPUTS else chosen


def risk_of_cell(subject: Subject) -> Scores | None:
    """Score the attacked records with and without the defense; None where the cell asks for no scores."""
    cell = subject.cell
    if cell.risk == OFF:
        return None
    begun = time.perf_counter()
    # Each record by itself: a batch, an aggregate or several rounds would have a Jacobian with respect to all their records.
    alone = cell.replace(records=len(subject.indices), batch_size=1, clients=1, rounds=1, minibatch=0)
    alpha = read_alpha(None)
    try:
        defended, undefended = (_assess(alone.replace(defense=name), subject, alpha) for name in (cell.defense, "none"))
    except GradveilError as error:
        return Scores(reason=str(error), seconds=time.perf_counter() - begun)
    return Scores(defended, undefended, alpha, _contrasts(subject), note=_together(cell), seconds=time.perf_counter() - begun)


def _contrasts(subject: Subject) -> tuple[float, ...]:
    """Return how far each attacked record lies from the mean of the others, as the mean squared error of that mean."""
    attacked = list(subject.indices)
    inputs = subject.own.inputs.flatten(1).double()
    others = torch.ones(len(inputs), dtype=torch.bool)
    others[attacked] = False
    mean = inputs[others if bool(others.any()) else ~others].mean(0)
    return tuple((inputs[attacked] - mean).square().mean(1).tolist())


def _together(cell: Cell) -> str:
    """Say what the scores leave out where a record is not alone in one update."""
    others = []
    if cell.batch_size * cell.clients > 1 and not cell.cut:  # embeddings of a batch stand side by side
        others.append(f"an update here holds {cell.batch_size * cell.clients}, which hide one another")
    if cell.rounds > 1:
        others.append(f"{cell.rounds} rounds are seen, which tell more than one")
    return f"scores are those of each record alone in one update; {'; '.join(others)}" if others else ""


def _assess(cell: Cell, subject: Subject, alpha: float) -> Assessment:
    defense = subject.materials.defense(cell.defense)
    learner = build_learner(cell, subject.dataset, defense, subject.materials)
    batch = Batch(subject.own.inputs[list(subject.indices)], subject.dataset.targets[list(subject.indices)])
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    return assess(
        learner,
        batch,
        defense,
        alpha=alpha,
        mode=quick_mode if cell.risk == "auto" else cell.risk,
        model=cell.model,
        rows=subject.indices,
        seed=Seed(cell.seed),
        known=_known[same_update(cell, learner, subject)],
    )


def same_update(cell: Cell, learner: Learner, subject: Subject) -> str:
    """Return what decides a record's undefended update, beside its row: the function that is shared, and the seed."""
    digest = hashlib.sha256(repr((cell.replace(defense="", ensemble=""), subject.dataset.digest())).encode())
    for name, value in learner.weights.items():
        digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def correlate(
    scores: Sequence[float], errors: Sequence[float | None], attack: str = "", contrasts: Sequence[float] = ()
) -> Correlation:
    """Return Pearson's and Spearman's correlation of risk and error with two-sided p; None where one side does not vary.

    A negative one says that records with higher risk were rebuilt with less error, as they should be.

    Args:
        scores: Of every record.
        errors: Of every record, where one was attacked.
        attack: Whose errors these are.
        contrasts: Of every record, for the null and for what the score adds to it; may be left out.
    """
    known = [place for place, error in enumerate(errors) if error is not None]
    x, y = (np.array([side[place] for place in known], dtype=np.float64) for side in (scores, errors))
    z = np.array([contrasts[place] for place in known], dtype=np.float64) if contrasts else np.zeros(len(known))
    varies = _varies(x) and _varies(y)
    pearson = stats.pearsonr(x, y) if varies else None
    return Correlation(
        attack=attack,
        pearson=None if pearson is None else Coefficient(value=float(pearson.statistic), p=float(pearson.pvalue)),
        spearman=_spearman(x, y) if varies else None,
        contrast=_spearman(z, y) if _varies(z) and _varies(y) else None,
        partial=_partial(x, y, z) if varies and _varies(z) else None,
        n=len(known),
    )


def _varies(values: NDArray[np.float64]) -> bool:
    return len(values) >= FEWEST and bool(np.ptp(values) > 1e-12 * np.abs(values).max())


def _spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> Coefficient:
    found = stats.spearmanr(x, y)
    p = _exact_p(stats.rankdata(x), stats.rankdata(y)) if x.size <= EXACT else float(found.pvalue)
    return Coefficient(value=float(found.statistic), p=p)


def _partial(x: NDArray[np.float64], y: NDArray[np.float64], given: NDArray[np.float64]) -> Coefficient | None:
    """Return the correlation of what contrast leaves of the ranks of both; its p is Student's with one degree of freedom less."""
    ranks = np.stack([stats.rankdata(each) for each in (x, y, given)])
    ranks -= ranks.mean(1, keepdims=True)
    left = ranks[:2] - np.outer(ranks[:2] @ ranks[2], ranks[2]) / (ranks[2] @ ranks[2])
    lengths = np.linalg.norm(left, axis=1)
    free = ranks.shape[1] - 3
    if free < 1 or bool((lengths <= 1e-9 * np.linalg.norm(ranks)).any()):
        return None
    value = float(np.clip(left[0] @ left[1] / lengths.prod(), -1.0, 1.0))
    t = value * np.sqrt(free / max(1e-300, 1 - value**2))
    return Coefficient(value=value, p=float(2 * stats.t.sf(abs(t), free)))


def _exact_p(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the share of all orders whose ranks agree or disagree at least as well: 2 of 6 where three records fall in line.

    The usual approximation says p = 0 there.
    """
    centred = first - first.mean()
    orders = np.array(list(itertools.permutations(second - second.mean())))
    strength = np.abs(orders @ centred)
    return float((strength >= strength[0] - 1e-9).mean())

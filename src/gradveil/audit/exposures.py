"""How exposed every attacked record is without an attack, in decibels, and how well that foretold what attacks gained.

The attacker behind the decibels holds the same public records as those who attack the cell (`gradveil.audit.prior`). What an
update does along the directions of the prior is the same for all defenses that only add noise to it, so it is found once per
process and used by all cells with the same model, weights and records. It is the same numbers either way.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gradveil.attacks.base import Attack, AttackContext
from gradveil.audit.attained import Attained, attained, regression_of
from gradveil.audit.risks import OFF, correlate, same_update
from gradveil.audit.scene import Subject, build_learner
from gradveil.errors import GradveilError, UsageError
from gradveil.learning import Learner
from gradveil.metrics import PSNR_CAP
from gradveil.randomness import Seed
from gradveil.records import Batch, Reconstruction
from gradveil.risk.linear_bayes import decibels
from gradveil.risk.oracle import Along, expose
from gradveil.risk.prior import WORDS, Prior, public_prior
from gradveil.study.cell import Cell
from gradveil.study.cell_exposure import CellExposure, ExposedRecord
from gradveil.study.exposures import Exposure, PublicRecords, RecordExposure

__all__ = ["Exposures", "exposure_of_cell"]

RANK = 128
"""Directions of the prior in an audit; ``gradveil risk`` takes twice as many."""
LISTED = 32
"""Other candidates that distances are taken to."""
MOST_WORK = 2**41
"""Multiplications and additions of a cell, by the update of one record: about three minutes of a core."""
FASTER = 64
"""By how much a GPU may do more."""
MOST_KNOWN = 4
"""Models and priors of which something is remembered."""
LEAST_ERROR = 10 ** (-PSNR_CAP / 10)
_priors: dict[str, Prior] = {}
_known: defaultdict[Hashable, dict[Hashable, Along]] = defaultdict(dict)


@dataclass(frozen=True)
class Exposures:
    """The exposure of a cell's records, or why there is none.

    Attributes:
        found: Record by record; None where not even a prior could be made.
        learned: What a regression attained of each; None where nobody asked.
        reason: Why there is none.
        notes: What the setting means for the numbers.
        seconds: Time this cell spent on them.
    """

    found: Exposure | None = None
    learned: Attained | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def beside(
        self, names: Sequence[str], owners: Sequence[str | None], errors: Sequence[float | None], attack: str
    ) -> CellExposure:
        """Return the decibels beside what attacks gained, without times, which differ from run to run.

        Args:
            names: Pseudonyms of the records, in their order.
            owners: Pseudonyms of their owners.
            errors: Mean squared error of the best attack on each.
            attack: Whose error that is: ``informed``, or ``plain`` where there was no informed attacker.
        """
        if self.found is None:
            return CellExposure(reason=self.reason)
        learned = self.learned or Attained()
        records = tuple(
            ExposedRecord(
                pseudonym=name,
                owner=owner,
                exposure=own.exposure,
                linear=own.linear,
                null=own.null,
                listed=own.listed,
                gain=None if error is None or own.null <= 0 else decibels(own.null, max(error, LEAST_ERROR)),
                **learned.of(place, own.null),
            )
            for place, (name, owner, own, error) in enumerate(zip(names, owners, self.found.records, errors, strict=True))
        )
        scored = [each for each in records if each.exposure is not None]
        return CellExposure(
            public=self.found.public,
            records=records,
            reason=self.found.reason,
            unlisted=self.found.unlisted,
            unattained=learned.reason,
            correlation=correlate(
                [each.exposure or 0.0 for each in scored], [each.gain for each in scored], attack, [each.null for each in scored]
            ),
            notes=self.notes,
        )


def exposure_of_cell(
    subject: Subject,
    context: AttackContext | None = None,
    attacks: Sequence[Attack] = (),
    found: Sequence[Sequence[Reconstruction]] = (),
) -> Exposures | None:
    """Score the attacked records under the cell's defense; None where the cell asks for no scores.

    Args:
        subject: The cell.
        context: Its attackers' context; None asks for no regression.
        attacks: Its attackers.
        found: What they found for each update.
    """
    if subject.cell.risk == OFF:
        return None
    begun = time.perf_counter()
    batch = Batch(subject.own.inputs[list(subject.indices)], subject.dataset.targets[list(subject.indices)])
    try:
        prior = _prior(subject, batch.inputs)
    except GradveilError as error:
        return Exposures(reason=str(error), seconds=time.perf_counter() - begun)
    learned = None
    if context is not None:
        learned = attained(subject, context, subject.prior, attack=regression_of(attacks), found=found)
    try:
        scored, notes = _expose(subject, batch, prior)
    except GradveilError as error:  # then there is no oracle, and who learns from public records may get something all the same
        scored, notes = _unscored(subject, batch, prior, str(error)), ()
    return Exposures(scored, learned, notes=notes, seconds=time.perf_counter() - begun)


def _expose(subject: Subject, batch: Batch, prior: Prior) -> tuple[Exposure, tuple[str, ...]]:
    cell = subject.cell
    alone = cell.replace(records=len(subject.indices), batch_size=1, clients=1, rounds=1, minibatch=0)
    learner = build_learner(alone, subject.dataset, subject.defense, subject.materials)
    _check_work(learner, batch, prior.rank)
    # Embeddings of a batch stand side by side; in an update records hide one another.
    beside = 0 if cell.cut else cell.batch_size * cell.clients - 1
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    found = expose(
        learner,
        batch,
        subject.defense,
        prior=prior,
        others=_others(subject),
        beside=beside,
        model=cell.model,
        rows=subject.indices,
        seed=Seed(cell.seed),
        known=_known[same_update(alone, learner, subject), _digest(prior.mean, prior.basis)],
    )
    return found, _notes(cell, beside)


def _unscored(subject: Subject, batch: Batch, prior: Prior, reason: str) -> Exposure:
    """Return the records with their nulls alone."""
    away = (batch.inputs.flatten(1).double().cpu() - prior.mean).square().mean(1)
    rows = [RecordExposure(row=row, null=null) for row, null in zip(subject.indices, away.tolist(), strict=True)]
    known = PublicRecords(source=prior.source, records=prior.records, rank=prior.rank, kept=prior.kept)
    cell = subject.cell
    return Exposure(model=cell.model, defense=cell.defense, public=known, records=tuple(rows), reason=reason, unlisted=reason)


def _prior(subject: Subject, like: Tensor) -> Prior:
    """Return mean and directions of the attackers' public records, made once for all cells that have the same ones."""
    public, cell = subject.prior, subject.cell
    key = f"{cell.seed} {_digest(public.inputs)}"
    if key not in _priors:
        if len(_priors) >= MOST_KNOWN:
            _priors.clear()
        _priors[key] = public_prior(public.inputs, like=like, most=RANK, seed=Seed(cell.seed).child("public"))
    return replace(_priors[key], source=WORDS[public.source].format(subject.dataset.name, "attacked"))


def _digest(*values: Tensor) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(repr(tuple(value.shape)).encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check_work(learner: Learner, batch: Batch, rank: int) -> None:
    """Refuse what would take an audit longer than a hint is worth; counted, not timed, so that every machine says the same."""
    device = learner.device
    with _Counted() as counted:  # type: ignore[no-untyped-call]
        learner.update(batch.inputs[:1].to(device), batch.targets[:1].to(device))
    work = counted.operations * rank * len(batch)
    most = MOST_WORK * (FASTER if device.type == "cuda" else 1)
    if work > most:
        raise UsageError(
            f"scoring {len(batch)} records of this network takes {work / most:.1f} times what an audit spends on exposure; "
            "audit fewer records, or score some with gradveil risk"
        )


class _Counted(TorchDispatchMode):
    """Counts multiplications and additions of products and convolutions; torch's own counter hooks modules, which some forbid."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=out)
        return out


def _others(subject: Subject) -> Batch | None:
    """Return candidates that are no copies of an attacked record."""
    attacked = {int(subject.copies[place]) for place in subject.positions}
    rows = [row for row, first in enumerate(subject.copies.tolist()) if first not in attacked][:LISTED]
    return Batch(subject.candidates[rows], subject.candidate_labels[rows]) if len(rows) > 1 else None


def _notes(cell: Cell, beside: int) -> tuple[str, ...]:
    """Say what the numbers leave out."""
    found = []
    if beside:
        word = "another record" if beside == 1 else f"{beside} other records"
        found.append(f"the list is that of each record alone; for decibels {word} of the update count as noise")
    if beside and (cell.local_steps > 1 or cell.local_epochs):
        found.append("records of one update are taken to add up, which after several local steps they do not quite")
    if cell.rounds > 1:
        found.append(f"{cell.rounds} rounds are seen, which tell more than the one that is scored")
    return tuple(found)

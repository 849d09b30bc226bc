"""What a regression on public records attains of each attacked record, through the client's own defended code.

The oracle of `gradveil.risk.oracle` is told more than any attacker has; this is an attacker, the one that needs nothing but the
client's code and public records (`gradveil.attacks.kernel_regression`), so there is a number for every defense, random or not.
Nothing under attack is learned from. It is told the labels, as the oracle is, so beside it stands what labels alone give.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from gradveil.attacks import launch
from gradveil.attacks.adaptive import SIMULATED
from gradveil.attacks.base import Attack, AttackContext, PublicRecords
from gradveil.attacks.engine.affordable import seconds_of
from gradveil.attacks.kernel_regression import LEAST, KernelRegression
from gradveil.audit.judge import originals
from gradveil.audit.nulls import public_means
from gradveil.audit.scene import Subject, Target
from gradveil.errors import GradveilError, UsageError
from gradveil.metrics import assign
from gradveil.randomness import Seed
from gradveil.records import Knowledge, Observation, Reconstruction

__all__ = ["Attained", "attained", "regression_of"]

SHORT = KernelRegression(records=100, seconds=2.0)
"""Where the ensemble of a cell has no regression of its own: what an audit spends on a hint."""
DEAR = 30.0
"""Seconds that the fewest releases may take together in that case."""
TINY = 1e-12


class Learned(TypedDict, total=False):
    """The fields of a record."""

    attained: float
    by_label: float
    rehearsed: float


@dataclass(frozen=True)
class Attained:
    """What was attained of each record, in the order of the records; empty, with a reason, where nothing could be learned.

    Attributes:
        errors: Mean squared error of the regression.
        means: That of the mean of the public records with the record's label.
        rehearsed: What the regression got of public records left out, in dB above the mean of those sent with that label.
        reason: Why there is nothing.
    """

    errors: tuple[float, ...] = ()
    means: tuple[float, ...] = ()
    rehearsed: tuple[float, ...] = ()
    reason: str = ""

    def of(self, place: int, null: float) -> Learned:
        """Return the fields of a record, in dB above its null; nothing where there are none."""
        if not self.errors or null <= TINY:
            return {}
        error, mean = max(self.errors[place], TINY), max(self.means[place], TINY)
        return {
            "attained": 10 * math.log10(null / error),
            "by_label": 10 * math.log10(null / mean),
            "rehearsed": self.rehearsed[place],
        }


def regression_of(attacks: Sequence[Attack]) -> KernelRegression | None:
    """Return the regression among the attackers of a cell, in the stance that knows the defense where there is one."""
    found = [attack for attack in attacks if isinstance(attack, KernelRegression)]
    return max(found, key=lambda attack: attack.stance == SIMULATED, default=None)


def attained(
    subject: Subject,
    context: AttackContext,
    public: PublicRecords,
    *,
    attack: KernelRegression | None = None,
    found: Sequence[Sequence[Reconstruction]] = (),
) -> Attained:
    """Return what a regression attains of the attacked records.

    Args:
        subject: The cell.
        context: Its attackers' context.
        public: What is learned from.
        attack: The regression; None takes a short one, and none where even that would take long.
        found: What attackers of the cell found for each update; the regression's answers with the right labels are taken from
            there.
    """
    stance = "plain" if context.simulate is None else SIMULATED
    chosen = dataclasses.replace(attack or SHORT, stance=stance)
    answers = {place: own for place, each in enumerate(found) if (own := _answer(subject, subject.targets[place], each, stance))}
    missing = [place for place in range(len(subject.targets)) if place not in answers]
    try:
        if missing and attack is None:
            _check_cost(subject, context, missing)
        told = dataclasses.replace(context, public=public, progress=None)
        seen = [_with_labels(subject.targets[place]) for place in missing]
        answers |= {missing[each.target]: each for each in launch(chosen, seen, told)}
    except GradveilError as error:
        return Attained(reason=str(error))
    pairs = [(target, answers[place]) for place, target in enumerate(subject.targets)]
    errors = torch.cat([_errors(target, answer) for target, answer in pairs])
    means = (public_means(subject, public) - originals(subject)).double().square().flatten(1).mean(1)
    size = len(subject.targets[0].batch)
    return Attained(
        errors=tuple(errors.tolist()),
        means=tuple(means.tolist()),
        rehearsed=tuple(_rehearsed(answer) for _, answer in pairs for _ in range(size)),
    )


def _answer(subject: Subject, target: Target, found: Sequence[Reconstruction], stance: str) -> Reconstruction | None:
    """Return what the regression of the cell answered with the right labels, if it did."""
    needed = not subject.dataset.dense and subject.cell.tells_labels
    truth = sorted(target.batch.targets.tolist()) if needed else None
    for each in found:
        same = not needed or sorted(each.targets.tolist()) == truth
        if each.recipe == KernelRegression.card.name and each.stance == stance and same:
            return each
    return None


def _with_labels(target: Target) -> Observation:
    """Return what was seen, the labels told."""
    seen = target.observation
    knows = seen.threat.knows | KernelRegression.card.needs | {Knowledge.LABELS}
    labels = target.batch.targets.to(seen.learner.device)
    return seen.replace(labels=labels, threat=dataclasses.replace(seen.threat, knows=knows))


def _check_cost(subject: Subject, context: AttackContext, missing: Sequence[int]) -> None:
    """Refuse what would take long even with the fewest releases."""
    batch = subject.targets[missing[0]].batch
    inputs, targets = batch.inputs.to(subject.cell.device), batch.targets.to(subject.cell.device)
    moved = batch.replace(inputs=inputs, targets=targets)
    defense = subject.defense if context.simulate is None else subject.defense.quick()
    each = seconds_of(lambda place: subject.replay(moved, defense, Seed(subject.cell.seed).child("attained", place)))
    tells = not subject.dataset.dense and subject.cell.tells_labels
    labels = {tuple(subject.targets[place].batch.targets.tolist()) for place in missing} if tells else {()}
    if each * LEAST * len(labels) > DEAR:
        raise UsageError(
            f"nothing was learned from public records: one run of this client takes {each:.1f} s; "
            "attack with an ensemble that has the regression, as quick does"
        )


def _errors(target: Target, answer: Reconstruction) -> torch.Tensor:
    """Return the mean squared error of every record, batches matched as those of all attackers are."""
    inputs = answer.inputs.detach().cpu().float()
    order = assign(inputs, target.batch.inputs)
    return (inputs[order] - target.batch.inputs).double().square().flatten(1).mean(1)


def _rehearsed(answer: Reconstruction) -> float:
    return 10 * math.log10(max(answer.first_loss, TINY) / max(answer.best_loss, TINY))

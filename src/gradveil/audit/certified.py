"""What is proved about a cell: its guarantee, its certificate, and the attack that shows how much of the certificate is real."""

from __future__ import annotations

from dataclasses import replace

from gradveil.audit.floors import mean_error_of_cell
from gradveil.audit.list_level import matching_share
from gradveil.audit.scene import Subject
from gradveil.client.releases import RANGE_OF_DATA, privacy_of_updates
from gradveil.randomness import Seed
from gradveil.risk.certificates import certificate_from
from gradveil.study.measures import Share
from gradveil.study.proved import Certificate, Guarantee

__all__ = ["certificate_of_cell", "certify", "guarantee_of", "matching_attack"]

MOST_REPLAYS = 5000
"""Local steps that the matching attack may replay, over all candidates and rounds; beyond it would outlast the audit."""
TRAINED = "the model was trained on the audited records without noise, so it may reveal them beside the update"
STATISTICS = "running statistics of BatchNorm are sent as they are; set bn_statistics = false, or use a model with GroupNorm"
EMBEDDED = "an embedding is sent, and only updates of weights are accounted for here"


def guarantee_of(subject: Subject) -> Guarantee:
    """Return the differential privacy of the updates under attack; none where the model itself has seen the records."""
    cell = subject.cell
    fault = RANGE_OF_DATA if cell.scale == "minmax" else ""
    if subject.seen.attacked:
        fault = TRAINED
    if cell.cut:
        fault = EMBEDDED
    if subject.learner.running:
        fault = STATISTICS
    return privacy_of_updates(
        subject.defense,
        cell.training(),
        examples=cell.batch_size,
        rounds=cell.rounds,
        weights=subject.learner.weights,
        fault=fault,
        summed=cell.clients,
    )


def certify(subject: Subject) -> Certificate:
    """Return the certificate of a cell with the matching attack and the least mean error beside it."""
    found = certificate_of_cell(subject)
    matching = matching_attack(subject) if found.identified is not None else None
    return replace(found, matching=matching, mean_error=mean_error_of_cell(subject))


def certificate_of_cell(subject: Subject) -> Certificate:
    """Return what no attacker of this cell can exceed, or why there is no certificate.

    Of a secure aggregate the noise of all its clients counts for whole clients; for single records that of their own client alone
    does, which only makes the bound larger.
    """
    cell = subject.cell
    proved = guarantee_of(subject)
    return certificate_from(
        proved,
        candidates=subject.candidates,
        labels=subject.candidate_labels if cell.known_labels else None,
        guesses=cell.batch_size * cell.clients,
        known=_known(subject, proved),
        seed=Seed(cell.seed).child("certificate"),
    )


def _known(subject: Subject, proved: Guarantee) -> int:
    """Return how many other candidates the attacker is taken to know, and so to rule out.

    All whose data is in what the attacker sees beside the unit's own noisy share: the rest of the batch where the noise covers
    one record, other clients of the aggregate, and after the first round, through the model, everyone.
    """
    cell = subject.cell
    everyone = len(subject.indices) if cell.rounds > 1 else cell.batch_size * cell.clients
    return everyone - (1 if proved.unit == "record" else cell.batch_size)


def matching_attack(subject: Subject) -> Share | None:
    """Let an attacker with the list of candidates pick the one that explains each update best.

    It is the attacker with a list who knows the defense (`gradveil.attacks.listing.own`). For one record in an update, and noise
    added to that update, no attacker with this list does better; noise in several local steps bends the path it replays, and
    then one might.

    Returns:
        Share identified with its Wilson interval; None where an update holds several records, since it would have to try all
        sets of them, or where there are more local steps to replay than `MOST_REPLAYS`.
    """
    cell = subject.cell
    if cell.batch_size * cell.clients > 1 or len(subject.candidates) * cell.rounds * cell.training().steps(1) > MOST_REPLAYS:
        return None
    return matching_share(subject)

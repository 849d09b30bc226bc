"""Measure one cell: let the clients send, let the ensemble attack, and judge what it found beside the nulls."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gradveil.attacks import Attack, AttackContext, Ensemble, informed_twins, launch, line_up, resolve
from gradveil.audit.candidate_checks import check_lists, check_present
from gradveil.audit.certified import certify, guarantee_of
from gradveil.audit.exposures import Exposures, exposure_of_cell
from gradveil.audit.gap import Explained, explain, gap_of
from gradveil.audit.informed import informed_by
from gradveil.audit.judge import Referees, Scored, best_by_truth, per_recipe, score, select, select_plain
from gradveil.audit.label_level import label_level
from gradveil.audit.list_level import list_level
from gradveil.audit.materials import Materials
from gradveil.audit.nulls import bars, derangements, null_rows
from gradveil.audit.owners import owners_level
from gradveil.audit.regions import region_of_cell
from gradveil.audit.risks import Scores, risk_of_cell
from gradveil.audit.scene import Subject, build_subject
from gradveil.audit.threat import threat_of
from gradveil.audit.trust import LARGE_REGRET_DB, Evidence, run_checks
from gradveil.client.send import send
from gradveil.client.timing import measure_latency_of
from gradveil.data import Dataset
from gradveil.defenses import Defense, parts_of
from gradveil.errors import UsageError
from gradveil.metrics import median
from gradveil.randomness import Seed
from gradveil.records import Observation, Reconstruction
from gradveil.significance import mcnemar
from gradveil.storage.partial import PartialWork
from gradveil.study.cell import Cell
from gradveil.study.cell_exposure import CellExposure
from gradveil.study.codec import decode
from gradveil.study.headline import ALL, IGNORES, INFORMED, PLAIN, choices, told
from gradveil.study.kept import KeptCell
from gradveil.study.levels import Levels
from gradveil.study.measures import Paired
from gradveil.study.results import Attacker, CellResult, Record, Region, Regret, Sent, Threat, Timing
from gradveil.study.results import Defense as DefenseResult
from gradveil.study.risks import CellRisk
from gradveil.wire import encode_dense, tensor_bytes

__all__ = ["MeasuredCell", "attack_all", "planned_steps", "run_cell"]

STEP_LIMIT = 1_000_000


@dataclass(frozen=True)
class MeasuredCell:
    """One cell and its pictures, which are kept as arrays beside it."""

    result: CellResult
    pictures: dict[str, NDArray[np.float32]]


def run_cell(
    cell: Cell,
    dataset: Dataset | None = None,
    *,
    materials: Materials | None = None,
    key: str = "",
    report: Callable[[int, int], None] | None = None,
    work: Path | None = None,
) -> MeasuredCell:
    """Attack one cell with its ensemble and judge the result.

    Args:
        cell: The settings.
        dataset: Its data, where it is not what the cell names.
        materials: What the run has read and built so far.
        key: Under which the result is kept.
        report: Told ``(steps done, steps planned)``, in candidate-steps, as the attack goes on.
        work: Where attackers' finds are kept until the cell is done, so that a killed run need not repeat them.
    """
    started = time.perf_counter()
    materials = materials or Materials()
    dataset = dataset or materials.dataset(cell)
    ensemble = resolve(cell.ensemble, threat_of(cell).sees)
    subject = build_subject(cell, dataset, ensemble.rehearsals, materials)
    counter = _Counter(report)
    context = subject.context(STEP_LIMIT, counter)
    everyone = [t.observation for t in (*subject.targets, *subject.rehearsals)]
    attacks = line_up(ensemble, everyone[0], context)
    if not attacks:
        raise UsageError(f"no attack of {ensemble.name!r} applies to this model and batch size; choose another ensemble")
    partial = PartialWork(work, cell.device)
    # What an earlier run did is neither planned nor done in this one, or the time left would be wrong.
    counter.planned = planned_steps([a for place, a in enumerate(attacks) if not partial.has(place)], context, everyone)
    found = attack_all(attacks, everyone, context, partial)
    count = len(subject.targets)
    referees = Referees.rehearsed(subject, found[count:])
    foretold = _Foretold(risk_of_cell(subject), exposure_of_cell(subject, context, attacks, found[:count]))
    result, pictures = _judge(subject, ensemble, context, found[:count], referees, foretold)
    seconds, steps = time.perf_counter() - started + partial.seconds, counter.done + partial.steps
    timing = Timing(
        key=key,
        seconds=round(seconds, 3),
        attack_steps=steps,
        steps_per_second=round(steps / max(seconds, 1e-9), 1),
        risk_seconds=round(foretold.seconds, 3),
        peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        **_latency(subject),
    )
    asked = max(attack.cost().steps for attack in attacks)
    result = replace(result, checks=(*result.checks, check_lists(result), check_present(ensemble, everyone[0], context)))
    return MeasuredCell(replace(result, key=key, timing=timing, asked_steps=asked), pictures)


@dataclass(frozen=True)
class _Foretold:
    """What was found without an attack; None where the cell asks for nothing."""

    risk: Scores | None
    exposure: Exposures | None

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in (self.risk, self.exposure) if each is not None)

    def beside(self, records: Sequence[Record], rows: Mapping[str, Scored]) -> tuple[CellRisk | None, CellExposure | None]:
        """Return it beside the error of the attackers who know the defense; where there are none, of those there are."""
        informed = rows.get("informed")
        errors, attack = (informed or rows["selected"]).column("mse"), "informed" if informed else "plain"
        names, owners = [record.pseudonym for record in records], [record.owner for record in records]
        return (
            None if self.risk is None else self.risk.beside(names, errors, attack),
            None if self.exposure is None else self.exposure.beside(names, owners, errors, attack),
        )


class _Counter:
    """Counts candidate-steps and passes them on."""

    def __init__(self, report: Callable[[int, int], None] | None) -> None:
        self.done = self.planned = 0
        self._report = report

    def __call__(self, steps: int) -> None:
        self.done += steps
        if self._report is not None:
            self._report(self.done, self.planned)


def planned_steps(attacks: Sequence[Attack], context: AttackContext, observations: Sequence[Observation]) -> int:
    """Return the candidate-steps the attacks would spend if none stopped early, over all plausible labels."""
    total = 0
    for attack in attacks:
        cost = attack.cost()
        labels = sum(attack.hypotheses(observation, context) for observation in observations)
        total += context.steps(cost.steps) * cost.restarts * labels
    return total


def attack_all(
    attacks: Sequence[Attack], observations: Sequence[Observation], context: AttackContext, partial: PartialWork | None = None
) -> list[list[Reconstruction]]:
    """Launch every attacker on all observations together; return the candidates of each observation."""
    found: list[list[Reconstruction]] = [[] for _ in observations]
    partial = partial or PartialWork(None)
    for place, attack in enumerate(attacks):
        candidates = partial.take(place)
        if candidates is None:
            begun = time.perf_counter()
            candidates = launch(attack, observations, context)
            partial.put(place, candidates, time.perf_counter() - begun)
        for candidate in (*candidates, *informed_twins(candidates, observations)):
            found[candidate.target].append(candidate)
    return found


def _judge(
    subject: Subject,
    ensemble: Ensemble,
    context: AttackContext,
    candidates: Sequence[Sequence[Reconstruction]],
    referees: Referees,
    foretold: _Foretold,
) -> tuple[CellResult, dict[str, NDArray[np.float32]]]:
    seed = Seed(subject.cell.seed).child("summary")
    kept, verdicts = select(subject, candidates, referees.informed)
    rows = _choices(subject, candidates, kept, referees)
    selected, best = rows["selected"], rows["best_by_truth"]
    attackers = per_recipe(subject, candidates, referees, kept, seed)
    tried = _tried(rows, attackers)
    drawn = derangements(subject, list(tried.values()), seed)
    owners = owners_level(subject, tried, seed)
    nulls = null_rows(subject, ensemble, context, len(candidates[0]), drawn)
    certificate = certify(subject)
    explained = explain(subject, kept, verdicts, referees.informed, selected.rank)
    table = [row for row, _ in attackers]
    evidence = Evidence(
        subject,
        candidates,
        kept,
        verdicts,
        referees.informed,
        selected,
        best,
        nulls,
        certificate,
        table,
        explained,
        plain=rows.get("plain"),
        alone={told(row.recipe, row.stance): scored for row, scored in attackers},
    )
    records = _records(subject, selected, best, kept, explained)
    risk, exposure = foretold.beside(records, rows)
    region = region_of_cell(subject, {**rows, "data_mean": nulls["data_mean"]}, seed.child("region"))
    summaries = {name: row.summary(seed.child(name)) for name, row in rows.items() if name != "informed"}
    result = CellResult(
        settings=decode(KeptCell, {**subject.cell.as_dict(), "ensemble": ensemble.name, "threads": torch.get_num_threads()}),
        defense=_describe_defense(subject),
        threat=decode(Threat, subject.targets[0].observation.threat.as_dict()),
        n=len(subject.positions),
        candidates=len(subject.candidates),
        chance=1 / subject.distinct,
        selected=summaries["selected"],
        best_by_truth=summaries["best_by_truth"],
        plain=summaries.get("plain"),
        informed=summaries["selected"] if "informed" in rows else None,
        informed_gain=_gain(rows),
        informed_by=informed_by(subject, candidates),
        gap=gap_of(explained, selected.rank),
        duplicates=len(subject.candidates) - subject.distinct,
        region=region if isinstance(region, Region) else None,
        regret=_regret(selected, best),
        attackers=tuple(table),
        nulls={name: null.summary(seed.child("null", name)) for name, null in nulls.items()},
        bar=bars(nulls, drawn),
        records=records,
        checks=tuple(run_checks(evidence)),
        bytes=_bytes(subject),
        certificate=certificate,
        levels=Levels(label=label_level(subject, context), listed=list_level(subject, selected.images), owners=owners),
        risk=risk,
        exposure=exposure,
        unavailable={"region": region} if isinstance(region, str) else {},
    )
    pictures = {name: row.images.numpy().astype(np.float32) for name, row in rows.items()}
    pictures["original"] = torch.cat([t.batch.inputs for t in subject.targets]).numpy().astype(np.float32)
    pictures |= {f"null_{name}": nulls[name].images.numpy().astype(np.float32) for name in ("grey", "data_mean", "prior_only")}
    return result, pictures


def _choices(
    subject: Subject, candidates: Sequence[Sequence[Reconstruction]], kept: Sequence[Reconstruction], referees: Referees
) -> dict[str, Scored]:
    """Return what is chosen among all, by truth, by who ignores the defense, and by who knows it; the last has all candidates."""
    rows = {"selected": score(subject, kept), "best_by_truth": score(subject, best_by_truth(subject, candidates))}
    plain = select_plain(subject, candidates, referees)
    if plain is not None:
        rows["plain"] = score(subject, plain)
    if any(candidate.stance != IGNORES for candidate in candidates[0]):
        rows["informed"] = rows["selected"]
    return rows


def _tried(rows: Mapping[str, Scored], attackers: Sequence[tuple[Attacker, Scored]]) -> dict[str, Scored]:
    """Return what everybody whose count may be the headline found, by name."""
    found = {ALL: rows["selected"], PLAIN: rows.get("plain"), INFORMED: rows.get("informed")}
    asked = choices([row.stance for row, _ in attackers])
    chosen = {name: row for name, row in found.items() if row is not None and name in asked}
    return chosen | {told(row.recipe, row.stance): scored for row, scored in attackers}


def _gain(rows: Mapping[str, Scored]) -> Paired | None:
    """Compare who knows the defense with who ignores it, record by record; by cluster where records share their luck."""
    plain, informed = rows.get("plain"), rows.get("informed")
    if plain is None or informed is None:
        return None
    left, right = informed.hits, plain.hits
    pairs = list(zip(left, right, strict=True))
    fewest = min(informed.clusters, key=lambda names: len(set(names)), default=None)
    p = mcnemar(left, right, fewest)
    return Paired(first=sum(a and not b for a, b in pairs), second=sum(b and not a for a, b in pairs), p=p)


def _regret(selected: Scored, best: Scored) -> Regret:
    chosen, limit = selected.values["psnr"], best.values["psnr"]
    assert isinstance(chosen, torch.Tensor) and isinstance(limit, torch.Tensor)
    regret = (limit - chosen).clamp_min(0)
    middle = median(regret)
    return Regret(median=middle, worst=float(regret.max()), flagged=middle > LARGE_REGRET_DB)


def _describe_defense(subject: Subject) -> DefenseResult:
    parts = parts_of(subject.defense)
    ladder = [type(parts[0])(**rung) for rung in parts[0].card.ladder] if len(parts) == 1 else []
    return DefenseResult(
        spelling=subject.cell.defense,
        parts=tuple(part.card.name for part in parts),
        rung=ladder.index(parts[0]) + 1 if parts[0] in ladder else None,
        rungs=len(ladder),
        random=any(part.random for part in parts),
        acts_on=tuple(sorted({station for part in parts for station in part.card.acts_on})),
        secure_aggregation=all(part.card.secure_aggregation for part in parts),
        guarantee=guarantee_of(subject),
        measured=_measured(subject),
    )


def _measured(subject: Subject) -> dict[str, float]:
    """Return what the defense tells about itself, in the mean over targets."""
    names = dict.fromkeys(name for target in subject.targets for name in target.measured)
    return {name: sum(t.measured.get(name, 0.0) for t in subject.targets) / len(subject.targets) for name in names}


def _records(
    subject: Subject, selected: Scored, best: Scored, kept: Sequence[Reconstruction], explained: Sequence[Explained]
) -> tuple[Record, ...]:
    size = len(subject.targets[0].batch)
    columns = {name: selected.column(name) for name in ("psnr", "ssim", "mse", "lpips")}
    limit = best.column("psnr")
    dense = subject.dataset.dense
    labels = [None] * len(subject.indices) if dense else torch.cat([t.batch.targets for t in subject.targets]).tolist()
    owners = subject.dataset.owners
    return tuple(
        Record(
            pseudonym=_pseudonym("r", subject.dataset.records[index], subject),
            owner=_pseudonym("o", owners[index], subject) if owners else None,
            label=labels[i],
            label_correct=bool(selected.labels[i] > 0.5) if selected.labels is not None else None,
            identified=bool(selected.rank[i] == 1),
            rank=int(selected.rank[i]),
            **{name: column[i] for name, column in columns.items()},
            recipe=kept[i // size].recipe,
            stance=kept[i // size].stance,
            regret_db=max(0.0, (limit[i] or 0.0) - (columns["psnr"][i] or 0.0)),
            gap=explained[i // size].gap,
        )
        for i, index in enumerate(subject.indices)
    )


def _pseudonym(kind: str, identity: str, subject: Subject) -> str:
    """Return a name that is stable within this data set and seed but does not reveal the id without the data.

    The salt is a digest of its own: the ordinary one stands in alpha.json and risk.json, and with it ids could be guessed.
    """
    salt = f"{subject.dataset.digest('pseudonyms')}|{subject.cell.seed}|{kind}|{identity}"
    return f"{kind}-{hashlib.sha256(salt.encode()).hexdigest()[:10]}"


def _bytes(subject: Subject) -> Sent:
    target = subject.targets[0]
    dense = tensor_bytes(encode_dense(target.observation.update))
    return Sent(up=tensor_bytes(target.sent[0]), dense=dense)


def _latency(subject: Subject) -> dict[str, float]:
    """Time one client's update with and without the defense."""
    batch, size, device = subject.targets[0].batch, subject.cell.batch_size, subject.cell.device
    small = type(batch)(batch.inputs[:size].to(device), batch.targets[:size].to(device))
    plain = subject.materials.defense("none")

    def work(defense: Defense) -> Callable[[], object]:
        return lambda: send(subject.learner, small, defense, Seed(0), public=subject.public)

    found = measure_latency_of(work(subject.defense), None if subject.defense == plain else work(plain), device)
    return {"defense_ms": round(found.defended_ms, 3), "undefended_ms": round(found.undefended_ms, 3)}

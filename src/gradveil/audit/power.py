"""How strong the attackers of a cell are: the same ensemble against weaker settings of the defense, and against a planted leak.

**The planted leak.** Any defense, with or without a knob of its own, can be weakened by letting some of the raw update out beside
what it releases. With r the release as the server decodes it, g what the client would have sent without a defense (what a plain
attacker replays at the truth), and norms over all tensors of a round together, the attackers see

    s · ((1 - a) · r/|r| + a · g/|g|),    s = |r|^(1-a) · |g|^a

which is the release plus the raw update, a/(1 - a) times as loud as the release, brought back to the scale of an update. What a
means:

* a = 0 is the release itself, a = 1 the raw update itself; both ends are exact, so a likelihood is right at one, and attacks
  that match scale are at home at the other. Where the defense changes the model, "raw" is that model's own update, its noise off:
  what everybody in that federation would send who does nothing more.
* In between, a is the leak's part of the loudness: at 0.5 both are equally loud, at 0.9 the leak is nine times as loud, at 0.01
  it is a hundredth. Loudness is measured in units of the release, so a means the same whether a defense sends 30 times the norm
  of a gradient (noise) or a thousandth of it (clipping).
* Adding the raw update at its own norm would be no test: under noise 30 times as loud no attacker at all finds it, and
  under clipping to a thousandth everyone does.
* Norms are of the whole update: a factor per tensor would bend the direction of g, and then nobody's replay fits, not even at
  the truth.

Under additive noise a is a signal-to-noise ratio and nothing else, and no attacker finds a small one; there a curve says how
much clearer the update must be for these attackers. Under a defense that takes something out, it says how small a remainder they
would notice.

**Who attacks** is the same ensemble with the same rehearsals. Plain attackers see release and leak together. Informed ones
replay the defended client and do not know of the plant: nobody who audits a defense would tell its attackers where it is
broken. Payloads stay those of the client, so an attacker who reads them does not see the leak at all.

Cost: that of the ensemble on `RECORDS` records a point, and `gradveil.run.power` says which points are needed. Weakness: few
records, so intervals are wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks import Referee, line_up, resolve
from gradveil.attacks.referee import recipe_key
from gradveil.audit.canaries import check_canaries
from gradveil.audit.cell import STEP_LIMIT, attack_all, planned_steps
from gradveil.audit.materials import Materials
from gradveil.audit.scene import Subject, Target, build_subject
from gradveil.audit.threat import threat_of
from gradveil.errors import UsageError
from gradveil.metrics import assign, median, ranks, share_of, wilson
from gradveil.records import Reconstruction, Update
from gradveil.storage.partial import PartialWork
from gradveil.study.codec import decode
from gradveil.study.evidence import Rung
from gradveil.study.kept import KeptCell
from gradveil.study.measures import Bar
from gradveil.study.rung import RungRecord, RungTask
from gradveil.tensors import Named, norm

__all__ = ["RECORDS", "blend", "measure_rung", "plant"]

RECORDS = 16
"""Most records of one point: with all found, the lower bound of their share is 81 %; with none, the upper one 19 %."""


def blend(release: Named, raw: Named, leak: float) -> Named:
    """Return release and raw update together, the latter with weight ``leak`` by norm; see this module.

    A release of zeros is silence, beside which any leak is heard at its weight; without a raw update there is nothing to leak.
    """
    loud, own = float(norm(release)), float(norm(raw))
    if leak == 0 or own == 0:
        return dict(release)
    if leak == 1:
        return dict(raw)
    if loud == 0:
        return {name: leak * value for name, value in raw.items()}
    scale = loud ** (1 - leak) * own**leak
    left, right = scale * (1 - leak) / loud, scale * leak / own
    return {name: left * value + right * raw[name] for name, value in release.items()}


def plant(subject: Subject, leak: float) -> Subject:
    """Return the subject whose targets leak their raw updates beside the release; rehearsals stay the attacker's own."""
    return replace(subject, targets=tuple(_planted(target, leak) for target in subject.targets))


def _planted(target: Target, leak: float) -> Target:
    observation = target.observation
    inputs, labels = target.batch.inputs.to(observation.learner.device), target.batch.targets.to(observation.learner.device)

    def leaking(update: Update, index: int) -> Update:
        raw = OpenAdversary().replay(observation.learners[index], inputs, labels, {})
        return update.replace(weights=blend(update.weights, {name: value.detach() for name, value in raw.items()}, leak))

    updates = tuple(leaking(update, index) for index, update in enumerate(observation.updates))
    return replace(target, observation=observation.replace(updates=updates))


def measure_rung(
    task: RungTask,
    *,
    materials: Materials | None = None,
    key: str = "",
    report: Callable[[int, int], None] | None = None,
    work: Path | None = None,
) -> RungRecord:
    """Attack one point of a curve; with the whole update leaked, look at the canaries, too.

    Args:
        task: What to measure.
        materials: What the run has read and built so far.
        key: Under which the result is kept.
        report: Told ``(steps done, steps planned)``.
        work: Where attackers' finds are kept until the point is done.
    """
    cell, materials = task.cell, materials or Materials()
    ensemble = resolve(cell.ensemble, threat_of(cell).sees)
    subject = plant(build_subject(cell, materials.dataset(cell), ensemble.rehearsals, materials), task.leak)
    done = [0, 0]

    def count_steps(steps: int) -> None:
        done[0] += steps
        if report is not None:
            report(done[0], done[1])

    context = subject.context(STEP_LIMIT, count_steps)
    everyone = [t.observation for t in (*subject.targets, *subject.rehearsals)]
    attacks = line_up(ensemble, everyone[0], context)
    if not attacks:
        raise UsageError(f"no attack of {ensemble.name!r} applies to this model and batch size; choose another ensemble")
    partial = PartialWork(work, cell.device)
    done[1] = planned_steps([a for place, a in enumerate(attacks) if not partial.has(place)], context, everyone)
    found = attack_all(attacks, everyone, context, partial)
    count = len(subject.targets)
    referee = Referee.rehearsed(
        [r.observation for r in subject.rehearsals],
        [(r.replayed_inputs, r.batch.targets.to(cell.device)) for r in subject.rehearsals],
        [r.batch.inputs.to(cell.device) for r in subject.rehearsals],
        found[count:],
    )
    rung = _judged(subject, found[:count], referee)
    checks = check_canaries(subject, attacks, context, found[:count], rung.identified) if task.leak == 1 else []
    told = {**cell.as_dict(), "ensemble": ensemble.name, "threads": torch.get_num_threads()}
    return RungRecord(key=key, settings=decode(KeptCell, told), rung=replace(rung, leak=task.leak), checks=tuple(checks))


def _judged(subject: Subject, candidates: Sequence[Sequence[Reconstruction]], referee: Referee) -> Rung:
    """Count as a cell does: the largest of what the choice among all and each attacker alone identified, each by its own referee.

    The lower end allows for the choice of the largest, and the null has as many draws.
    """
    shown = {"": _chosen(subject, candidates, referee)}
    for name in dict.fromkeys(recipe_key(c) for c in candidates[0]):
        shown[name] = _chosen(subject, [[c for c in many if recipe_key(c) == name] for many in candidates], referee)
    positions = torch.tensor(subject.positions)
    hits = {name: _hits(subject, images, positions) for name, images in shown.items()}
    best = max(hits, key=lambda name: hits[name])
    truth = torch.cat([target.batch.inputs for target in subject.targets])
    errors = (shown[best] - truth).square().flatten(1).mean(1).clamp_min(1e-10)
    n = len(positions)
    low = wilson(hits[best], n, 1 - 0.05 / len(shown))[0]
    return Rung(
        identified=replace(share_of(hits[best], n), low=low),
        psnr=median(-10 * errors.log10()),
        null=_null(subject, list(shown.values())),
    )


def _chosen(subject: Subject, candidates: Sequence[Sequence[Reconstruction]], referee: Referee) -> Tensor:
    """Return one picture per record, as the attacker would choose; those of a batch are assigned to its records."""
    pictures = []
    for target, many in zip(subject.targets, candidates, strict=True):
        ignorant = all(candidate.stance == "plain" for candidate in many)
        # Who ignores the defense compares as if there were none.
        seen = target.observation.replace(adversary=OpenAdversary()) if ignorant else target.observation
        judge = Referee() if ignorant else referee
        inputs = many[judge.select(seen, many).chosen].inputs.detach().cpu().float()
        pictures.append(inputs[assign(inputs, target.batch.inputs)])
    return torch.cat(pictures)


def _hits(subject: Subject, images: Tensor, positions: Tensor) -> int:
    return int((ranks(images, positions, subject.candidates, copies=subject.copies) == 1).sum())


def _null(subject: Subject, tried: Sequence[Tensor]) -> Bar:
    """Return the best of those nulls that take no search: grey, the mean of the data, and pictures of other records."""
    positions = torch.tensor(subject.positions)
    n = len(positions)
    # A single record has no other attacked one; the candidates have.
    others = positions.roll(-1) if n > 1 else torch.tensor([len(subject.candidates) - 1])
    grey, mean = torch.full_like(tried[0], 0.5), subject.candidates.mean(0, keepdim=True).expand_as(tried[0])
    hits = {
        "grey": _hits(subject, grey, positions),
        "data_mean": _hits(subject, mean, positions),
        "derangement": max(_hits(subject, images, others) for images in tried),
    }
    best = max(hits, key=lambda name: hits[name])
    return Bar(null=best, value=hits[best] / n, high=wilson(hits[best], n)[1])

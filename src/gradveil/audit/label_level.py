"""The label level: what an update says about the labels behind it, whether or not anybody rebuilds a picture.

Three attackers read labels: the plain one, who knows nothing of the defense; the defense's own, whose author says how labels are
read; and a generic one, who needs no author and learns from releases of its own making (`gradveil.attacks.engine.label_belief`).
It does not matter here whether the searching attackers were given the labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from scipy import stats
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.label_belief import informed_belief
from gradveil.attacks.engine.labels import classifier_layer, recover_labels
from gradveil.audit.judge import clusters
from gradveil.audit.scene import Subject
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.metrics import label_hits, share_of, wilson
from gradveil.records import Knowledge, Observation
from gradveil.significance import effective_number
from gradveil.study.levels import Level, Reach
from gradveil.study.measures import Bar, Share

__all__ = ["label_level", "label_null", "strongest"]

CONFIDENCE = 0.95

_Reader = Callable[[Observation], Tensor]


def label_level(subject: Subject, context: AttackContext) -> Level:
    """Return how many labels each attacker reads off the updates; of batches, the overlap of the two multisets.

    Args:
        subject: What was sent, with the truth.
        context: The attackers' own, whose ``simulate`` the generic one uses.
    """
    reason = _unmeasured(subject)
    if reason:
        return Level(reason=reason)
    truths = [target.batch.targets for target in subject.targets]
    reached = []
    for name, read in _readers(subject.targets[0].observation, context).items():
        found = [read(target.observation).cpu() for target in subject.targets]
        hits = torch.cat([label_hits(own, truth) for own, truth in zip(found, truths, strict=True)]).tolist()
        share = share_of(int(sum(hits)), len(hits), effective_number(hits, *clusters(subject)))
        reached.append(Reach(attacker=name, share=share, informed=name != "plain"))
    share, attacker = strongest(reached)
    null = label_null(subject.candidate_labels, subject.dataset.classes, len(truths[0]), share.n)
    return Level(share=share, attacker=attacker, null=null, reached=tuple(reached))


def _unmeasured(subject: Subject) -> str:
    """Return why there are no labels to read, or nothing."""
    observation = subject.targets[0].observation
    if subject.dataset.dense:
        return "targets are masks, which no attack here reads off an update"
    if not subject.cell.tells_labels:
        return "an embedding does not depend on labels"
    if observation.classes == 0:
        return "targets are no classes"
    layer = classifier_layer(observation.update.weights, observation.classes)
    if layer is None and not isinstance(observation.learner, EmbeddingLearner):
        # Every attacker would name class 0, and be right by chance.
        return "the model ends in no linear layer with one row per class, so there is nothing to read labels off"
    return ""


def _readers(observation: Observation, context: AttackContext) -> dict[str, _Reader]:
    """Return who can be tried: the plain attacker always, the others where a defense is known."""
    readers: dict[str, _Reader] = {"plain": lambda seen: recover_labels(_unlabelled(seen))}
    if Knowledge.DEFENSE not in observation.threat.knows or isinstance(observation.learner, EmbeddingLearner):
        return readers
    if type(observation.adversary) is not OpenAdversary:
        readers["own"] = lambda seen: recover_labels(_unlabelled(seen), informed=True)
    if context.simulate is not None:
        readers["generic"] = lambda seen: informed_belief(_unlabelled(seen), context, ask_author=False).best
    return readers


def _unlabelled(observation: Observation) -> Observation:
    """Return the same without the labels that searching attackers may have been granted."""
    return observation.replace(labels=None)


def strongest(reached: Sequence[Reach]) -> tuple[Share, str]:
    """Return the largest count and whose it is: its lower end allows for the choice, its upper end is the largest of all."""
    best = max(reached, key=lambda each: each.share.count)
    top, sure = best.share, 1 - (1 - CONFIDENCE) / len(reached)
    low = Share.of(top.count, top.n, confidence=sure, effective=top.effective).low
    return dataclasses.replace(top, low=low, high=max(each.share.high for each in reached)), best.attacker


def label_null(labels: Tensor, classes: int, batch: int, records: int) -> Bar:
    """Return what the best fixed answer reaches without the update: the commonest class, or the best multiset for batches.

    With shares q_c of the classes, a fixed multiset m hits ``sum_c E min(m_c, N_c) = sum_c sum_{k <= m_c} P(N_c >= k)`` labels of
    a batch, N_c being binomial. Each further copy of a class adds less, so the B largest terms of all are the best multiset.

    Args:
        labels: Of the candidates, which stand for the population.
        classes: How many there are.
        batch: Examples behind one update.
        records: How many are attacked: the upper end is that of as many draws.
    """
    shares = torch.bincount(labels.reshape(-1).to(torch.int64).cpu(), minlength=classes).double() / labels.numel()
    present = shares[shares > 0].numpy()
    gains = stats.binom.sf(torch.arange(batch).numpy()[:, None], batch, present[None, :]).reshape(-1)
    value = float(torch.from_numpy(gains).sort(descending=True).values[:batch].sum()) / batch
    value = min(1.0, value)
    name = "commonest class" if batch == 1 else "best fixed labels"
    return Bar(null=name, value=value, high=wilson(round(value * records), records)[1])

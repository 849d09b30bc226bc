"""Every check says what it found, how much of it, and what to do, at the very edge of its levels; with hand-made evidence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from gradveil.attacks.adaptive import AUTHORLESS
from gradveil.audit import informed, trust
from gradveil.audit.gap import Explained
from gradveil.audit.judge import Scored
from gradveil.audit.trust import SURE, Evidence
from gradveil.learning.dropout import HandedDropout
from gradveil.metrics import share_of, wilson
from gradveil.models.batch_norm import set_batch_norm_mode
from gradveil.records import Knowledge, Reconstruction
from gradveil.study.measures import Summary
from gradveil.study.proved import Certificate
from gradveil.study.results import Attacker, Check
from tests.unit.stand_ins import fake, noted


def candidate(**changes: Any) -> Reconstruction:
    told = {"first_loss": 1.0, "best_loss": 0.5, "gradient_norm": 1.0, "steps": 5, **changes}
    return Reconstruction(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), told.pop("recipe", "x"), **told)


def evidence(*candidates: Reconstruction, **changes: Any) -> Any:
    return fake(**{"candidates": [list(candidates)], "explained": (), **changes})


def is_said(check: Check, name: str, level: str, *words: str, remedy: str = "") -> None:
    assert (check.name, check.level) == (name, level)
    assert check.sentence.endswith(".") and all(each in check.sentence for each in words), check.sentence
    assert check.remedy.startswith(remedy) and bool(check.remedy) == bool(remedy)


STUCK, IDLE = {"best_loss": 0.999}, {"steps": 0, "best_loss": 1.0, "gradient_norm": 0.0}
NOWHERE, SOMEWHERE = Explained(0.0, 1.0), Explained(1.0, 0.0)


def test_objectives_that_never_fell_are_counted() -> None:
    name = "matching_loss_fell"
    fell = candidate(best_loss=0.9989)
    is_said(trust._loss_fell(evidence(fell, candidate(**IDLE))), name, "ok", "The attacks' objectives fell.")
    is_said(trust._loss_fell(evidence()), name, "ok", "The attacks' objectives fell.")
    stuck = candidate(**STUCK)
    is_said(trust._loss_fell(evidence(stuck)), name, "fail", "did not work as attacks", remedy="Look for detached")
    both = evidence(stuck, explained=(NOWHERE, SOMEWHERE))
    is_said(trust._loss_fell(both), name, "fail", "did not work as attacks", remedy="Look for detached")
    is_said(trust._loss_fell(evidence(stuck, explained=(NOWHERE,))), name, "ok", "the truth would not have made it fall either")
    is_said(trust._loss_fell(evidence(stuck, fell, fell, fell)), name, "ok", "The attacks' objectives fell.")
    two = evidence(candidate(**STUCK, recipe="b", stance="robust"), candidate(**STUCK, recipe="a"), *[fell] * 5)
    is_said(trust._loss_fell(two), name, "warn", "for 2 of 7 candidates (a/plain, b/robust).", remedy="Those attackers count")


def test_dead_gradients_and_broken_values_are_counted() -> None:
    dead, well = candidate(gradient_norm=0.0), candidate()
    found = trust._gradient_alive(evidence(dead, candidate(gradient_norm=math.inf)))
    is_said(found, "gradient_alive", "fail", "constant or detached", remedy="Check that the model")
    found = trust._gradient_alive(evidence(dead, well, candidate(**IDLE)))
    is_said(found, "gradient_alive", "warn", "1 of 2 candidates started", remedy="See the attackers table")
    is_said(trust._gradient_alive(evidence(well, candidate(**IDLE))), "gradient_alive", "ok", "The matching loss has a gradient.")
    broken = candidate(status="not finite")
    is_said(trust._finite(evidence(broken)), "finite", "fail", "1 of 1 candidates", remedy="Their last good")
    is_said(trust._finite(evidence(broken, well)), "finite", "warn", "1 of 2 candidates", remedy="Their last good")
    is_said(trust._finite(evidence(well)), "finite", "ok", "All candidates stayed finite.")


def test_truths_that_score_worse_than_what_was_found_are_counted() -> None:
    name, worse, well = "truth_is_minimum", Explained(1.0, 1.2), Explained(1.0, 1.04)
    for rows, level in (((worse, well), "ok"), ((worse, worse, well), "warn"), ((well,), "ok")):
        told = evidence(explained=rows, referee=fake(truth_score=0.0))
        found = trust._truth_is_minimum(told)
        remedy = "Read this row" if level == "warn" else ""
        is_said(found, name, level, "For 2 of 3 targets" if level == "warn" else "among the best explanations", remedy=remedy)
    easy = evidence(explained=(worse, worse), referee=fake(truth_score=1.15))
    is_said(trust._truth_is_minimum(easy), name, "ok", "among the best explanations")


def test_victim_and_attacker_are_compared() -> None:
    loss = object()
    plain, normed = nn.Linear(1, 1), set_batch_norm_mode(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), "eval")

    def seen(model: nn.Module, own: object = loss) -> Check:
        target = fake(observation=fake(learner=fake(model=model, loss=own)))
        return trust._same_mode(evidence(subject=fake(learner=fake(model=normed, loss=loss), targets=[target])))

    is_said(seen(normed), "same_mode", "ok", "use the same loss and BatchNorm in eval mode.")
    is_said(seen(plain), "same_mode", "fail", "differ in their loss or BatchNorm mode", remedy="Give both")
    is_said(seen(normed, object()), "same_mode", "fail", "differ in their loss", remedy="Give both")
    alone = fake(learner=fake(model=plain, loss=loss), targets=[fake(observation=fake(learner=fake(model=plain, loss=loss)))])
    is_said(trust._same_mode(evidence(subject=alone)), "same_mode", "ok", "the model has no BatchNorm")


@pytest.mark.parametrize(
    ("tells", "given", "dense", "level", "words", "remedy"),
    [
        (False, True, False, "ok", "Labels play no part", ""),
        (True, False, False, "ok", "Labels were recovered", ""),
        (True, True, False, "warn", "given the true labels.", "Set known_labels"),
        (True, True, True, "warn", "given the true masks.", "No attack here"),
    ],
)
def test_given_labels_are_said(tells: bool, given: bool, dense: bool, level: str, words: str, remedy: str) -> None:
    subject = fake(cell=fake(tells_labels=tells), dataset=fake(dense=dense))
    found = trust._oracle_labels(evidence(candidate(), candidate(oracle_labels=given), subject=subject))
    is_said(found, "oracle_labels", level, words, remedy=remedy)


def scored(rank: list[int], psnr: list[float], *clusters: tuple[int, ...]) -> Scored:
    values: dict[str, Any] = {"psnr": torch.tensor(psnr)}
    return Scored(torch.zeros(len(rank), 1), values, torch.tensor(rank), None, clusters)


def whole(selected: Scored, nulls: dict[str, Scored], **changes: Any) -> Evidence:
    subject = fake(cell=fake(seed=3), positions=range(len(selected.rank)), distinct=100)
    told: dict[str, Any] = {"selected": selected, "best": selected, "nulls": nulls, **changes}
    return Evidence(subject, [], [], [], fake(), **told)


@pytest.mark.parametrize(
    ("hits", "psnr", "luck", "level", "words"),
    [
        (8, 12.0, 0, "ok", "beat every null baseline."),
        (8, 10.0, 0, "ok", "by the share identified, and not by PSNR."),
        (1, 12.0, 0, "ok", "by PSNR, and not by the share identified."),
        (1, 10.0, 0, "warn", "(1 of 16 identified)"),
        (3, 10.0, 1, "warn", "(3 of 16 identified)"),
        (3, 10.0, 0, "ok", "by the share identified"),
    ],
)
def test_what_beats_guessing_is_told_by_decibels_and_by_records(
    hits: int, psnr: float, luck: int, level: str, words: str
) -> None:
    selected = scored([1] * hits + [5] * (16 - hits), [psnr] * 16)
    nulls = {"a": scored([5] * 16, [10.0] * 16), "b": scored([1] * luck + [5] * (16 - luck), [7.0] * 16)}
    remedy = "This says these attackers failed" if level == "warn" else ""
    is_said(trust._better_than_null(whole(selected, nulls)), "better_than_null", level, words, remedy=remedy)


@pytest.mark.parametrize(
    ("n", "level", "words"),
    [
        (1, "warn", "Only 1 record was"),
        (2, "warn", "Only 2 records were"),
        (15, "warn", "Only 15"),
        (16, "ok", "16 records were attacked."),
    ],
)
def test_few_records_are_said(n: int, level: str, words: str) -> None:
    found = trust._enough_records(evidence(subject=fake(positions=range(n))))
    is_said(found, "enough_records", level, words, remedy="Attack at least 16 records." if level == "warn" else "")


@pytest.mark.parametrize(("psnr", "hits", "level"), [(16.0, 1, "fail"), (15.9, 1, "ok"), (16.0, 2, "ok"), (30.0, 0, "fail")])
def test_near_pictures_of_nobody_contradict_themselves(psnr: float, hits: int, level: str) -> None:
    selected = scored([1] * hits + [5] * (16 - hits), [psnr] * 16)
    nulls = {"a": scored([1, *[5] * 15], [7.0] * 16), "b": scored([5] * 16, [10.0] * 16)}
    words = f"{psnr - 10:.0f} dB nearer than the best null, and yet only {hits} records" if level == "fail" else "same story"
    found = trust._picture_without_identity(whole(selected, nulls))
    is_said(found, "picture_without_identity", level, words, remedy="Look for candidates" if level == "fail" else "")


@pytest.mark.parametrize(("gain", "level"), [(3.0, "ok"), (3.5, "warn")])
def test_a_better_candidate_is_said(gain: float, level: str) -> None:
    selected = scored([1] * 3, [10.0, 20.0, 30.0])
    best = scored([1] * 3, [10.0 + gain, 20.0 + gain, 29.0])
    found = trust._regret(whole(selected, {}, best=best))
    remedy = "The attacker could not tell" if level == "warn" else ""
    is_said(found, "regret", level, "gain 3.5 dB" if level == "warn" else "close to the best", remedy=remedy)


@pytest.mark.parametrize("incomplete", [True, False])
def test_an_author_who_knows_only_part_is_said(incomplete: bool) -> None:
    seen = fake(adversary=fake(arrives=lambda given: fake(incomplete=incomplete)))
    found = trust._informed(evidence(subject=fake(targets=[fake(observation=seen)])))
    words = ("Informed incomplete", "The generic attackers") if incomplete else ("knows the whole defense", "")
    is_said(found, "informed_complete", "warn" if incomplete else "ok", words[0], remedy=words[1])


def test_dropout_is_counted_on_and_off() -> None:
    def said(*layers: nn.Module) -> Check:
        return trust._dropout(evidence(subject=fake(learner=fake(model=nn.Sequential(*layers)))))

    off, on = [nn.Dropout(0.5), nn.Dropout(0.25)], [HandedDropout(0.5, [(2,)], [0]) for _ in range(2)]
    attention = nn.MultiheadAttention(2, 1, dropout=0.5)
    is_said(said(nn.Linear(1, 1), nn.MultiheadAttention(2, 1)), "dropout", "ok", "The model has no dropout.")
    is_said(said(*off, attention), "dropout", "warn", "has 3 dropout layers", remedy="Clients who train with dropout on")
    found = said(*on)
    is_said(found, "dropout", "warn", "with 2 dropout layers on", "dropout off.", remedy="Read this row as a lower bound")
    assert "inside attention" not in found.sentence and "Dropout inside attention layers is off." in said(*on, attention).sentence


@pytest.mark.parametrize(
    ("hits", "above", "matching", "alone"), [(12, 0, 0, 0), (0, 13, 0, 0), (0, 0, 14, 0), (0, 0, 0, 15), (5, 5, 5, 5)]
)
def test_whoever_is_beyond_a_certificate_is_named_with_the_share_that_is_sure(
    hits: int, above: int, matching: int, alone: int
) -> None:
    selected = scored([1] * hits + [5] * (16 - hits), [25.0] * above + [24.9] * (16 - above))
    rows = [
        Attacker(recipe="one_two", stance="plain", summary=Summary(identified=share_of(alone, 16))),
        Attacker(recipe="x", stance="y"),
    ]
    certificate = Certificate(identified=0.2, psnr={"25": 0.25}, matching=share_of(matching, 16))
    found = trust._within_certificate(whole(selected, {}, attackers=rows, certificate=certificate))
    sure = 1 - (1 - SURE) / 3
    told = {
        "the attackers identified 12": (12, "20.0%"),
        "the attackers rebuilt at 25 dB or better 13": (13, "25.0%"),
        "an attacker with the list of candidates identified 14": (14, "20.0%"),
        "one two (plain) alone identified 15": (15, "20.0%"),
    }
    wanted = [(who, *each) for who, each in told.items() if max(hits, above, matching, alone) == each[0]]
    if not wanted:
        is_said(found, "within_certificate", "ok", "No attack got beyond")
    for who, count, bound in wanted:
        words = f"{who} of 16 records, at least {wilson(count, 16, sure)[0]:.1%}, and no more than {bound} were possible ("
        is_said(found, "within_certificate", "fail", words, remedy="Either an assumption")
    none = trust._within_certificate(whole(selected, {}))
    is_said(none, "within_certificate", "ok", "There is no certificate")


def test_searches_of_who_knows_the_defense_are_counted() -> None:
    name = "informed_moved"

    def said(*candidates: Reconstruction, explained: Any = ()) -> Check:
        return informed.check_informed_moved(fake(), [list(candidates)], explained)

    own = {"stance": "informed"}
    is_said(said(candidate(), candidate(**own, steps=0)), name, "ok", "No attacker who knows the defense had to search.")
    still = candidate(**own, best_loss=0.999)
    is_said(said(still, candidate()), name, "warn", "in any of the 1 searches", remedy="This run cannot tell")
    is_said(said(still, still, explained=(NOWHERE,)), name, "ok", "the 2 searches", "would not have made it fall either")
    is_said(said(still, explained=(NOWHERE, SOMEWHERE)), name, "warn", "the 1 searches", remedy="This run cannot tell")
    fell = candidate(stance=AUTHORLESS[0], best_loss=0.9989)
    is_said(said(still, fell, fell, explained=(NOWHERE,)), name, "ok", "fell in 2 of the 3 searches")
    assert (
        informed.nowhere_to_go([NOWHERE]) and not informed.nowhere_to_go([]) and not informed.nowhere_to_go([NOWHERE, SOMEWHERE])
    )


@pytest.mark.parametrize(
    ("knows", "who", "otherwise", "stances", "level", "words", "remedy"),
    [
        (False, "none", False, (), "ok", "were not told the defense", ""),
        (True, "", False, (), "ok", "There is nothing about the defense", ""),
        (True, "own", True, (), "ok", "in a way of its own", ""),
        (
            True,
            "none",
            False,
            (),
            "warn",
            "cannot tell the truth from a grey picture; and no generic attacker",
            "Let its adversary",
        ),
        (True, "generic", False, AUTHORLESS[:2], "warn", "only generic attackers (", "Let its adversary"),
        (True, "none", True, (), "warn", "no attack of this ensemble takes the stance", "Name an ensemble"),
    ],
)
def test_whether_anybody_informed_ran_is_said(
    knows: bool,
    who: str,
    otherwise: bool,
    stances: tuple[str, ...],
    level: str,
    words: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(informed, "informed_by", lambda *given: who)
    monkeypatch.setattr(informed, "_searches_otherwise", lambda given, ran=True: noted(asked, ran) or otherwise)
    subject = fake(targets=[fake(observation=fake(threat=fake(knows={Knowledge.DEFENSE} if knows else set())))])
    found = informed.check_informed_ran(subject, [[candidate(stance=each)] for each in ("plain", *stances)])
    is_said(found, "informed_ran", level, words, remedy=remedy)
    assert asked == ([False] if level == "warn" else [])
    if stances:
        assert f"({' and '.join(each.replace('_', ' ') for each in stances)}) took account of it" in found.sentence


@pytest.mark.parametrize(
    ("something", "otherwise", "stances", "who"),
    [
        (False, True, ("informed",), ""),
        (True, True, ("informed",), "own"),
        (True, False, ("informed",), "none"),
        (True, True, ("plain",), "none"),
        (True, False, ("informed", AUTHORLESS[0]), "generic"),
    ],
)
def test_who_used_knowledge_of_the_defense(
    something: bool, otherwise: bool, stances: tuple[str, ...], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informed, "_something_to_know", lambda given: something)
    monkeypatch.setattr(informed, "_searches_otherwise", lambda given: otherwise)
    assert informed.informed_by(fake(), [[candidate(stance=each)] for each in stances]) == who

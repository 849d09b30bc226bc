"""Every reason to doubt a number is noticed where it is there, and only there."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gradveil.adversary import OpenAdversary
from gradveil.attacks.referee import Referee, Verdict
from gradveil.audit import trust as checks
from gradveil.audit.gap import explain
from gradveil.audit.judge import score
from gradveil.audit.scene import Subject, Target
from gradveil.audit.trust import Evidence, run_checks
from gradveil.learning.dropout import HandedDropout
from gradveil.metrics import share_of
from gradveil.models.batch_norm import set_batch_norm_mode
from gradveil.records import Observation, Reconstruction, WhatArrives
from gradveil.study.codec import encode
from gradveil.study.measures import Summary
from gradveil.study.proved import Certificate
from gradveil.study.results import Attacker, Check
from tests.unit.audit.small import make_subject


@functools.cache
def subject() -> Subject:
    return make_subject(records=16)


def found(target: int, inputs: Tensor, **changes: object) -> Reconstruction:
    batch = subject().targets[target].batch
    healthy = {"target": target, "first_loss": 1.0, "best_loss": 0.1, "gradient_norm": 1.0, "steps": 10}
    return Reconstruction(inputs, batch.targets, "some", **(healthy | changes))  # type: ignore[arg-type]


def near(target: int, error: float = 0.02) -> Tensor:
    inputs = subject().targets[target].batch.inputs
    return (inputs + error * torch.sin(3 * torch.arange(64.0)).reshape(inputs.shape)).clamp(0, 1)


def evidence_of(many: list[list[Reconstruction]]) -> Evidence:
    """Return evidence in which the first candidate of every target was chosen and is the best."""
    referee = Referee()
    verdicts = [Verdict(0, referee.scores(t.observation, row), [0]) for t, row in zip(subject().targets, many, strict=True)]
    chosen = [row[0] for row in many]
    scored = score(subject(), chosen)
    grey = score(subject(), [found(i, torch.full_like(c.inputs, 0.5)) for i, c in enumerate(chosen)])
    explained = explain(subject(), chosen, verdicts, referee, scored.rank)
    return Evidence(subject(), many, chosen, verdicts, referee, scored, scored, {"grey": grey}, explained=explained)


@functools.cache
def healthy() -> Evidence:
    return evidence_of([[found(i, near(i)), found(i, near(i, 0.03))] for i in range(16)])


def with_candidates(share: float, **changes: object) -> Evidence:
    """Spoil a share of the candidates."""
    rows = [list(row) for row in healthy().candidates]
    flat = [(i, j) for i, row in enumerate(rows) for j in range(len(row))]
    for i, j in flat[: round(share * len(flat))]:
        rows[i][j] = rows[i][j].replace(**changes)
    return dataclasses.replace(healthy(), candidates=rows)


def with_model(model: nn.Module, replayed: nn.Module | None = None) -> Evidence:
    """Return evidence in which the victim trains ``model`` and the attackers replay another one."""
    learner = subject().learner.replace(model=model)
    first, *others = subject().targets
    replayer = first.observation.learner if replayed is None else learner.replace(model=replayed)
    targets = (dataclasses.replace(first, observation=first.observation.replace(learners=(replayer,))), *others)
    return dataclasses.replace(healthy(), subject=dataclasses.replace(subject(), learner=learner, targets=targets))


def with_truth_elsewhere() -> Evidence:
    """The update under attack belongs to other inputs than the ones said to be behind it."""

    def moved(index: int, target: Target) -> Target:
        return dataclasses.replace(target, trained_inputs=subject().targets[index - 1].trained_inputs)

    targets = tuple(moved(i, t) for i, t in enumerate(subject().targets))
    elsewhere, sound = dataclasses.replace(subject(), targets=targets), healthy()
    explained = explain(elsewhere, sound.chosen, sound.verdicts, sound.referee, sound.selected.rank)
    return dataclasses.replace(sound, subject=elsewhere, explained=explained)


def chosen_instead(inputs: Callable[[int], Tensor]) -> Evidence:
    """The attacker chose something else than the best."""
    worse = score(subject(), [found(i, inputs(i)) for i in range(16)])
    return dataclasses.replace(healthy(), selected=worse)


def with_hits(count: int, candidates: int) -> Evidence:
    """Nothing but grey was found, and for ``count`` of 16 records the original is nearest all the same."""
    grey = chosen_instead(lambda i: torch.full_like(near(i), 0.5)).selected
    rank = torch.where(torch.arange(16) < count, 1, 2)
    fewer = dataclasses.replace(subject(), candidates=subject().candidates[:candidates])
    return dataclasses.replace(healthy(), subject=fewer, selected=dataclasses.replace(grey, rank=rank))


@dataclasses.dataclass(frozen=True)
class Partial(OpenAdversary):
    def arrives(self, observation: Observation) -> WhatArrives:
        return super().arrives(observation).replace(incomplete=True)


def with_partial_adversary() -> Evidence:
    targets = tuple(dataclasses.replace(t, observation=t.observation.replace(adversary=Partial())) for t in subject().targets)
    return dataclasses.replace(healthy(), subject=dataclasses.replace(subject(), targets=targets))


def with_lazy_author() -> Evidence:
    """The update is pruned, and the defense's own attacker compares as one who ignores that."""
    defended = make_subject(records=16, defense="pruning(rate=0.9)")
    targets = tuple(dataclasses.replace(t, observation=t.observation.replace(adversary=Partial())) for t in defended.targets)
    return dataclasses.replace(healthy(), subject=dataclasses.replace(defended, targets=targets))


def with_candidates_and_records(records: int, candidates: int) -> Evidence:
    fewer = dataclasses.replace(subject(), positions=subject().positions[:records], candidates=subject().candidates[:candidates])
    return dataclasses.replace(healthy(), subject=fewer)


def with_certificate(identified: float | None, psnr: float = 1.0, matching: int | None = None) -> Evidence:
    """All 16 records were identified and rebuilt at 30 dB or better, whatever is said to be possible."""
    listed = None if matching is None else share_of(matching, 16)
    return dataclasses.replace(healthy(), certificate=Certificate(identified=identified, psnr={"25": psnr}, matching=listed))


def with_matching_alone(count: int) -> Evidence:
    """The ensemble found nothing, and the attacker with the list of candidates ``count`` of 16."""
    nothing = chosen_instead(lambda i: torch.full_like(near(i), 0.5))
    return dataclasses.replace(nothing, certificate=with_certificate(0.1, matching=count).certificate)


def with_attacker_ahead() -> Evidence:
    """The choice identified nobody, and one of two attackers alone 12 of 16."""
    rows = [
        Attacker(recipe="stay_smooth", stance=stance, summary=Summary(identified=share_of(count, 16)))
        for stance, count in (("plain", 4), ("zero_mask", 12))
    ]
    nothing = chosen_instead(lambda i: torch.full_like(near(i), 0.5))
    ranks = torch.where(torch.arange(16) < 12, 1, 2)
    alone = {"stay smooth (zero mask)": dataclasses.replace(nothing.selected, rank=ranks)}
    return dataclasses.replace(nothing, attackers=rows, alone=alone)


def test_a_little_ahead_of_the_choice_is_chance() -> None:
    """12 against 10 of 16: the headline counts 12, and no doubt stands beside it."""
    ahead = with_attacker_ahead()
    close = dataclasses.replace(ahead.selected, rank=torch.where(torch.arange(16) < 10, 1, 2))
    evidence = dataclasses.replace(ahead, selected=close)
    assert evidence.cell.identified.count == 12
    assert look(evidence)["nobody_ahead"].level == "ok"


def test_the_certificate_is_told_who_is_beyond() -> None:
    assert "stay smooth (zero mask) alone identified 12 of 16" in look(with_attacker_beyond())["within_certificate"].sentence


def with_attacker_beyond() -> Evidence:
    """The certificate allows a tenth; one attacker alone identified 12 of 16, and the choice nobody."""
    return dataclasses.replace(with_attacker_ahead(), certificate=Certificate(identified=0.1))


def with_copies() -> Evidence:
    """One candidate is stored twice."""
    pool = subject().candidates
    doubled = dataclasses.replace(subject(), candidates=torch.cat([pool[:-1], pool[:1]]))
    return dataclasses.replace(healthy(), subject=doubled)


def with_many_copies() -> Evidence:
    """A hundred candidates, and fifty records."""
    pool = subject().candidates[:50]
    return dataclasses.replace(healthy(), subject=dataclasses.replace(subject(), candidates=torch.cat([pool, pool])))


def with_one_record() -> Evidence:
    """Every candidate is the same picture."""
    same = subject().candidates[:1].expand_as(subject().candidates)
    return dataclasses.replace(healthy(), subject=dataclasses.replace(subject(), candidates=same))


def with_pictures_of_nobody() -> Evidence:
    """Pictures are as near as ever, and rank after others all the same."""
    near_by = dataclasses.replace(healthy().selected, rank=torch.full((16,), 2))
    return dataclasses.replace(healthy(), selected=near_by)


def test_a_few_identities_beside_good_pictures_are_no_contradiction() -> None:
    rank = torch.where(torch.arange(16) < 3, 1, 2)
    few = dataclasses.replace(healthy(), selected=dataclasses.replace(healthy().selected, rank=rank))
    assert look(few)["picture_without_identity"].level == "ok"
    poor = dataclasses.replace(with_attacker_ahead(), attackers=())
    assert look(poor)["picture_without_identity"].level == "ok", "grey pictures contradict nothing"


NAN = float("nan")
FIRING: list[tuple[str, str, Callable[[], Evidence]]] = [
    ("matching_loss_fell", "fail", lambda: with_candidates(1.0, best_loss=1.0)),
    ("matching_loss_fell", "fail", lambda: with_candidates(1.0, best_loss=NAN)),
    ("matching_loss_fell", "warn", lambda: with_candidates(0.5, best_loss=0.9999)),
    ("gradient_alive", "fail", lambda: with_candidates(1.0, gradient_norm=0.0)),
    ("gradient_alive", "fail", lambda: with_candidates(1.0, gradient_norm=NAN)),
    ("gradient_alive", "warn", lambda: with_candidates(0.1, gradient_norm=0.0)),
    ("finite", "fail", lambda: with_candidates(1.0, status="not finite")),
    ("finite", "warn", lambda: with_candidates(0.1, status="not finite")),
    ("truth_is_minimum", "warn", with_truth_elsewhere),
    ("oracle_labels", "warn", lambda: with_candidates(0.1, oracle_labels=True)),
    ("better_than_null", "warn", lambda: chosen_instead(lambda i: torch.full_like(near(i), 0.5))),
    ("better_than_null", "warn", lambda: with_hits(1, 100)),  # 15 % of all attackers who know nothing have one of 16
    ("better_than_null", "warn", lambda: with_hits(1, 256)),  # 6 %
    ("better_than_null", "warn", lambda: with_hits(2, 30)),  # 9 %, and too few candidates anyway
    ("enough_records", "warn", lambda: with_candidates_and_records(15, 256)),
    ("enough_candidates", "warn", lambda: with_candidates_and_records(16, 99)),
    ("enough_candidates", "warn", with_many_copies),
    ("enough_candidates", "fail", with_one_record),
    ("duplicates", "warn", with_copies),
    ("picture_without_identity", "fail", with_pictures_of_nobody),
    ("regret", "warn", lambda: chosen_instead(lambda i: near(i, 0.2))),
    ("nobody_ahead", "warn", with_attacker_ahead),
    ("informed_complete", "warn", with_partial_adversary),
    ("informed_ran", "warn", with_lazy_author),
    ("informed_moved", "warn", lambda: with_candidates(1.0, stance="informed", best_loss=1.0)),
    ("dropout", "warn", lambda: with_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))),
    ("dropout", "warn", lambda: with_model(nn.Sequential(nn.Linear(2, 2), HandedDropout(0.5, [(2,)], [0])))),
    ("dropout", "warn", lambda: with_model(nn.MultiheadAttention(2, 1, dropout=0.5))),
    ("within_certificate", "fail", lambda: with_certificate(0.25)),
    ("within_certificate", "fail", lambda: with_certificate(1.0, psnr=0.25)),
    ("within_certificate", "fail", lambda: with_matching_alone(15)),
    ("within_certificate", "fail", with_attacker_beyond),
]


def look(evidence: Evidence) -> dict[str, Check]:
    return {check.name: check for check in run_checks(evidence)}


def test_a_sound_cell_gives_no_reason_to_doubt() -> None:
    assert {name: check.level for name, check in look(healthy()).items()} == dict.fromkeys(look(healthy()), "ok")


@pytest.mark.parametrize(("name", "level", "make"), FIRING, ids=lambda value: value if isinstance(value, str) else "")
def test_a_reason_to_doubt_is_noticed(name: str, level: str, make: Callable[[], Evidence]) -> None:
    check = look(make())[name]
    assert check.level == level
    assert check.sentence.endswith(".") and check.remedy, "a doubt says what is wrong and what to do"


def test_every_check_is_explained() -> None:
    page = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")
    assert [name for name in look(healthy()) if f"| `{name}` |" not in page] == []


def test_every_check_fires_somewhere() -> None:
    tested_below = {"same_mode"}
    assert set(look(healthy())) - {name for name, _, _ in FIRING} == tested_below


def test_a_victim_who_trains_in_another_mode_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    evidence = with_model(set_batch_norm_mode(model, "train"), replayed=set_batch_norm_mode(model, "eval"))
    assert checks._same_mode(evidence).level == "fail"


def test_the_mode_of_batch_norm_is_said() -> None:
    assert "no BatchNorm" in look(healthy())["same_mode"].sentence
    model = set_batch_norm_mode(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "eval")
    assert "eval mode" in checks._same_mode(with_model(model, replayed=model)).sentence


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("matching_loss_fell", lambda: with_candidates(0.2, best_loss=1.0)),
        ("matching_loss_fell", lambda: with_candidates(1.0, steps=0, best_loss=NAN)),
        ("gradient_alive", lambda: with_candidates(1.0, steps=0, gradient_norm=NAN)),
        ("better_than_null", lambda: chosen_instead(lambda i: near(i, 0.2))),
        ("better_than_null", lambda: with_hits(2, 100)),  # 1 %
        ("regret", lambda: chosen_instead(lambda i: near(i, 0.021))),
        ("informed_moved", lambda: with_candidates(0.5, stance="informed", best_loss=1.0, first_loss=1.0, steps=0)),
        ("informed_moved", lambda: with_candidates(0.9, best_loss=1.0)),  # plain ones; nobody informed had to search
        ("enough_records", lambda: with_candidates_and_records(16, 256)),
        ("enough_candidates", lambda: with_candidates_and_records(16, 100)),
        ("dropout", lambda: with_model(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))),
        ("within_certificate", lambda: with_certificate(None)),
        ("within_certificate", lambda: with_certificate(0.62, psnr=0.62, matching=16)),  # 16 of 16 show at least 59.6 %
        ("within_certificate", lambda: with_matching_alone(2)),
    ],
)
def test_near_misses_do_not_fire(name: str, make: Callable[[], Evidence]) -> None:
    assert look(make())[name].level == "ok"


def test_checks_are_plain_values() -> None:
    assert encode(look(healthy())["finite"]) == {
        "name": "finite",
        "level": "ok",
        "sentence": "All candidates stayed finite.",
        "remedy": "",
    }


def test_given_masks_are_not_called_labels_that_could_be_withheld() -> None:
    """Data with masks is refused without --known-labels, so the remedy must not ask for that."""
    told = SimpleNamespace(
        subject=SimpleNamespace(cell=SimpleNamespace(tells_labels=True), dataset=SimpleNamespace(dense=True)),
        candidates=[[SimpleNamespace(oracle_labels=True)]],
    )
    check = checks._oracle_labels(told)  # type: ignore[arg-type]
    assert check.level == "warn" and "masks" in check.sentence and "known_labels" not in check.remedy


def test_the_attacker_who_is_ahead_is_named() -> None:
    told = look(with_attacker_ahead())["nobody_ahead"].sentence
    assert told.startswith("One attacker alone, stay smooth (zero mask), identified 12 of 16 records")


def test_the_regret_of_an_even_number_of_records_is_the_mean_of_the_middle_two() -> None:
    """Half of the records lose 2 dB and half 6: 4 dB in the median, above the limit."""
    best = healthy().best
    psnr = best.values["psnr"]
    assert isinstance(psnr, Tensor)
    lost = torch.where(torch.arange(16) % 2 == 0, 2.0, 6.0).to(psnr)
    chosen = dataclasses.replace(best, values={**best.values, "psnr": psnr - lost})
    check = look(dataclasses.replace(healthy(), selected=chosen))["regret"]
    assert check.level == "warn" and "4.0 dB" in check.sentence


def test_what_beats_guessing_is_said() -> None:
    assert look(healthy())["better_than_null"].sentence.endswith("beat every null baseline.")
    assert "by the share identified, and not by PSNR" in look(with_hits(16, 100))["better_than_null"].sentence
    assert "(1 of 16 identified)" in look(with_hits(1, 100))["better_than_null"].sentence


@pytest.mark.parametrize("share", [0.0, 1 / 256, 0.01, 0.3, 0.5, 0.9, 1.0])
def test_luck_is_the_sum_over_all_ways_to_be_lucky(share: float) -> None:
    for n in (1, 2, 7, 16, 32, 128):
        for count in range(n + 1):
            summed = math.fsum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(count, n + 1))
            assert checks._at_least(count, n, share) == pytest.approx(summed, abs=1e-12)

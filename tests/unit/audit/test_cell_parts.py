"""The parts of a cell one by one, by hand-made subjects: what whole audits reach too late to say what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradveil.attacks.base import Attack, AttackContext, Cost
from gradveil.audit import cell as audited
from gradveil.audit.judge import Scored
from gradveil.defenses import build_defense
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, Reconstruction
from gradveil.significance import mcnemar
from gradveil.storage.partial import PartialWork
from gradveil.study.headline import ALL, INFORMED, PLAIN
from gradveil.study.measures import Paired
from gradveil.study.results import Attacker, Record
from gradveil.study.training_result import Latency
from tests.unit.stand_ins import fake


def scored(hits: list[bool], *clusters: tuple[int, ...], **values: list[float]) -> Scored:
    rank = torch.tensor([1 if hit else 7 for hit in hits])
    return Scored(torch.zeros(len(hits), 1), {n: torch.tensor(v) for n, v in values.items()}, rank, None, clusters)


KNOWS = [True] * 8 + [False] * 4
IGNORES = [False] * 5 + [True] * 5 + [False] * 2


def test_the_gain_counts_records_that_only_one_of_both_found() -> None:
    found = audited._gain({"informed": scored(KNOWS), "plain": scored(IGNORES)})
    assert found == Paired(first=5, second=2, p=mcnemar(KNOWS, IGNORES))
    pairs, triples = tuple(i // 2 for i in range(12)), tuple(i // 3 for i in range(12))
    by = [mcnemar(KNOWS, IGNORES, names) for names in (None, pairs, triples)]
    assert len({*by}) == 3
    clustered = audited._gain({"informed": scored(KNOWS, pairs, triples), "plain": scored(IGNORES)})
    assert clustered is not None and clustered.p == by[2], "the coarser of two ways to belong together"
    assert audited._gain({"informed": scored(KNOWS)}) is None and audited._gain({"plain": scored(KNOWS)}) is None


def test_regret_is_what_the_best_would_have_gained_record_by_record() -> None:
    chosen, best = scored([True] * 4, psnr=[10.0, 20.0, 30.0, 12.0]), scored([True] * 4, psnr=[14.0, 19.0, 33.0, 21.0])
    found = audited._regret(chosen, best)
    assert (found.median, found.worst, found.flagged) == (3.5, 9.0, True)
    level = audited._regret(scored([True], psnr=[10.0]), scored([True], psnr=[13.0]))
    assert (level.median, level.worst, level.flagged) == (3.0, 3.0, False)
    assert audited._regret(best, best).worst == 0.0


class Plain(Attack):
    """Answers at once; ``labels`` many labels are plausible."""

    def __init__(self, name: str, steps: int = 5, restarts: int = 1, labels: int = 1) -> None:
        object.__setattr__(self, "told", (name, steps, restarts, labels))

    def cost(self) -> Cost:
        return Cost(steps=vars(self)["told"][1], restarts=vars(self)["told"][2])

    def hypotheses(self, observation: Observation, context: AttackContext) -> int:
        return int(vars(self)["told"][3]) + observation.examples


def test_planned_steps_are_counted_over_attacks_restarts_and_labels_within_the_budget() -> None:
    attacks = [Plain("one", steps=5, restarts=3, labels=1), Plain("two", steps=50, restarts=2, labels=4)]
    seen: Any = [fake(examples=0), fake(examples=2)]
    context = AttackContext(seed=Seed(0), budget=20)
    assert audited.planned_steps(attacks, context, seen) == 5 * 3 * (1 + 3) + 20 * 2 * (4 + 6)
    assert audited.planned_steps(attacks[:1], context, seen[:1]) == 15 and audited.planned_steps([], context, seen) == 0


def candidate(name: str, target: int) -> Reconstruction:
    return Reconstruction(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), name, target=target, steps=4)


class Kept(PartialWork):
    """Has what the second attacker found, and notes what is put."""

    def __init__(self) -> None:
        super().__init__(None)
        self.noted: list[tuple[int, list[Reconstruction], float]] = []

    def take(self, place: int) -> list[Reconstruction] | None:
        return [candidate("kept", 1), candidate("kept", 0)] if place == 1 else None

    def put(self, place: int, found: list[Reconstruction], seconds: float = 0.0) -> None:
        self.noted.append((place, found, seconds))


def test_every_attacker_is_launched_once_kept_with_its_time_and_sorted_by_target(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    seen: Any = ["observation 0", "observation 1"]
    context = AttackContext(seed=Seed(0))

    def launch(attack: Plain, *given: Any) -> list[Reconstruction]:
        launched.append((attack, *given))
        return [candidate(vars(attack)["told"][0], target) for target in (1, 0)]

    def twins(candidates: list[Reconstruction], observations: Any) -> list[Reconstruction]:
        assert observations is seen
        return [each.replace(stance="twin") for each in candidates if each.recipe == "third"]

    monkeypatch.setattr(audited, "launch", launch)
    monkeypatch.setattr(audited, "informed_twins", twins)
    ticks = iter([10.0, 12.5, 20.0, 27.0])
    monkeypatch.setattr(audited, "time", fake(perf_counter=lambda: next(ticks)))
    partial, attacks = Kept(), [Plain("first"), Plain("second"), Plain("third")]
    found = audited.attack_all(attacks, seen, context, partial)
    assert [(each[0], each[1] is seen, each[2] is context) for each in launched] == [
        (attacks[0], True, True),
        (attacks[2], True, True),
    ]
    assert [(place, [each.recipe for each in own], seconds) for place, own, seconds in partial.noted] == [
        (0, ["first", "first"], 2.5),
        (2, ["third", "third"], 7.0),
    ]
    told = [[(each.recipe, each.stance, each.target) for each in own] for own in found]
    names = [("first", "plain"), ("kept", "plain"), ("third", "plain"), ("third", "twin")]
    assert told == [[(*name, target) for name in names] for target in (0, 1)]


def test_steps_done_are_told_beside_those_planned() -> None:
    said: list[tuple[int, int]] = []
    counter = audited._Counter(lambda done, planned: said.append((done, planned)))
    counter.planned = 9
    counter(2)
    counter(5)
    assert said == [(2, 9), (7, 9)] and counter.done == 7
    silent = audited._Counter(None)
    silent(3)
    assert silent.done == 3


def rows(*stances: str) -> list[tuple[Attacker, Scored]]:
    return [(Attacker(recipe=f"recipe_{place}", stance=each), scored([True])) for place, each in enumerate(stances)]


@pytest.mark.parametrize(
    ("stances", "choices"),
    [
        (("plain", "informed"), [ALL]),
        (("plain", "plain", "informed"), [ALL, PLAIN]),
        (("plain", "informed", "averaged"), [ALL, INFORMED]),
        (("plain",), []),
        (("plain", "plain", "informed", "informed"), [ALL, PLAIN, INFORMED]),
    ],
)
def test_whoever_may_be_the_headline_is_counted_once(stances: tuple[str, ...], choices: list[str]) -> None:
    chosen = {"selected": scored([True]), "plain": scored([False]), "informed": scored([True])}
    alone = rows(*stances)
    found = audited._tried(chosen, alone)
    assert list(found) == choices + [f"recipe {place} ({stance})" for place, stance in enumerate(stances)]
    kinds = {ALL: "selected", PLAIN: "plain", INFORMED: "informed"}
    assert all(found[name] is chosen[kinds[name]] for name in choices)
    assert [found[f"recipe {place} ({stance})"] for place, stance in enumerate(stances)] == [own for _, own in alone]
    assert PLAIN not in audited._tried({"selected": chosen["selected"]}, alone)


@pytest.mark.parametrize(
    ("stances", "names"), [(("plain",), ["plain"]), (("informed",), ["informed"]), (("plain", "robust"), ["plain", "informed"])]
)
def test_a_choice_is_scored_for_whoever_has_candidates(
    stances: tuple[str, ...], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject: Any = "the cell"
    found = [[candidate("x", 0).replace(stance=each) for each in stances]]
    referees: Any = "who chooses"
    monkeypatch.setattr(audited, "score", lambda given, chosen: (given, chosen))
    monkeypatch.setattr(audited, "best_by_truth", lambda given, many: ("best", given, many))
    monkeypatch.setattr(
        audited, "select_plain", lambda given, many, who: ("plain", given, many, who) if "plain" in stances else None
    )
    kept: Any = ["kept"]
    made: dict[str, Any] = dict(audited._choices(subject, found, kept, referees))
    assert list(made) == ["selected", "best_by_truth", *names]
    assert made["selected"] == (subject, kept) and made["best_by_truth"] == (subject, ("best", subject, found))
    if "plain" in names:
        assert made["plain"] == (subject, ("plain", subject, found, referees))
    assert "informed" not in names or made["informed"] is made["selected"]


@pytest.mark.parametrize("informed", [True, False])
def test_risk_stands_beside_the_errors_of_who_knows_the_defense_where_there_is_one(informed: bool) -> None:
    risk: Any = fake(beside=lambda *given: given, seconds=1.0)
    exposure: Any = fake(beside=lambda *given: given, seconds=0.5)
    own, other = scored([True] * 2, mse=[0.25, 0.5]), scored([True] * 2, mse=[1.0, 2.0])
    rows = {"selected": other} | ({"informed": own} if informed else {})
    records = [Record(pseudonym="a", owner="x"), Record(pseudonym="b", owner="y")]
    found: Any = audited._Foretold(risk, exposure).beside(records, rows)
    beside = ([0.25, 0.5], "informed") if informed else ([1.0, 2.0], "plain")
    assert found == ((["a", "b"], *beside), (["a", "b"], ["x", "y"], *beside))
    assert audited._Foretold(None, None).beside(records, rows) == (None, None)
    assert audited._Foretold(risk, exposure).seconds == 1.5 and audited._Foretold(None, exposure).seconds == 0.5


@pytest.mark.parametrize(
    ("spelling", "rung", "rungs", "random", "acts_on", "aggregates"),
    [
        ("gaussian_noise(std=0.01)", 3, 4, True, ("update",), True),
        ("gaussian_noise(std=0.0123)", None, 4, True, ("update",), True),
        ("clipping + gaussian_noise", None, 0, True, ("update",), True),
        ("none", 1, 1, False, (), True),
        ("data_noise + clipping", None, 0, True, ("data", "update"), True),
    ],
)
def test_a_defense_is_told_by_its_card(
    spelling: str, rung: int | None, rungs: int, random: bool, acts_on: tuple[str, ...], aggregates: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(audited, "guarantee_of", lambda subject: ("guarantee", subject))
    subject: Any = fake(
        defense=build_defense(spelling), cell=fake(defense=spelling), targets=(fake(measured={"x": 1.0}), fake(measured={}))
    )
    found: Any = audited._describe_defense(subject)
    assert (found.spelling, found.rung, found.rungs, found.random) == (spelling, rung, rungs, random)
    assert (found.acts_on, found.secure_aggregation, found.measured) == (acts_on, aggregates, {"x": 0.5})
    assert found.guarantee == ("guarantee", subject)
    assert found.parts == tuple(each.split("(")[0].strip() for each in spelling.split("+"))


@pytest.mark.parametrize("spelling", ["none", "clipping"])
def test_one_client_is_timed_with_its_defense_and_beside_none_where_it_has_one(
    spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Any] = []
    sent: list[Any] = []
    plain = build_defense("none")

    def measure(defended: Any, undefended: Any, device: Any) -> Latency:
        timed.append((defended(), undefended and undefended(), device))
        return Latency(defended_ms=1.23456, undefended_ms=7.65432)

    def sending(learner: Any, batch: Any, defense: Any, seed: Any, **more: Any) -> Any:
        sent.append((learner, batch, seed, more))
        return defense

    monkeypatch.setattr(audited, "measure_latency_of", measure)
    monkeypatch.setattr(audited, "send", sending)
    subject = fake(
        targets=(fake(batch=Batch(torch.arange(4.0)[:, None], torch.tensor([3, 2, 1, 0]))), fake(batch=None)),
        cell=fake(batch_size=2, device="cpu"),
        materials=fake(defense={"none": plain}.__getitem__),
        defense=build_defense(spelling),
        learner="learner",
        public="public",
    )
    found = audited._latency(subject)
    assert found == {"defense_ms": 1.235, "undefended_ms": 7.654}
    assert timed == [(subject.defense, None if spelling == "none" else plain, "cpu")]
    learner, batch, seed, more = sent[0]
    assert (learner, seed, more) == ("learner", Seed(0), {"public": "public"})
    assert batch.inputs.tolist() == [[0.0], [1.0]] and batch.targets.tolist() == [3, 2]


def test_bytes_are_those_of_what_the_first_client_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited, "tensor_bytes", len)
    monkeypatch.setattr(audited, "encode_dense", lambda update: update * 3)
    first, second = fake(sent=["abcd", "x"], observation=fake(update="ab")), fake(sent=["y"], observation=fake(update="z"))
    subject: Any = fake(targets=(first, second))
    found = audited._bytes(subject)
    assert (found.up, found.dense) == (4, 6)

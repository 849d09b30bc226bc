"""How candidates become counts, argument by argument: referees, clusters, labels, nulls, and the reasons to doubt them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.attacks import Referee
from gradveil.attacks.referee import Verdict
from gradveil.audit import candidate_checks, judge, label_level, nulls, trust
from gradveil.audit.judge import Referees, Scored
from gradveil.audit.nulls import Deranged
from gradveil.audit.trust import RARE, Evidence
from gradveil.metrics import label_hits, share_of, wilson
from gradveil.randomness import Seed
from gradveil.records import Batch, Knowledge, Reconstruction
from gradveil.significance import effective_number, mcnemar
from gradveil.study.levels import Reach
from gradveil.study.measures import Summary
from gradveil.study.results import Attacker
from tests.unit.audit.small import CELL
from tests.unit.stand_ins import fake, noted


def candidate(place: int, recipe: str = "x", stance: str = "plain") -> Reconstruction:
    return Reconstruction(torch.full((1, 1), float(place)), torch.tensor([place]), recipe, stance=stance)


class Chooses(Referee):
    """Keeps the candidate at a place, and notes what it was asked."""

    def __init__(self, place: int) -> None:
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "asked", [])

    def select(self, observation: Any, candidates: Any) -> Any:
        vars(self)["asked"].append((observation, list(candidates)))
        return Verdict(min(vars(self)["place"], len(candidates) - 1), [0.0] * len(candidates), [])


class Knows(OpenAdversary):
    pass


def observation(adversary: Any) -> Any:
    return fake(adversary=adversary, replace=lambda adversary: observation(adversary))


@pytest.mark.parametrize("batch", [1, 2])
def test_records_belong_together_by_update_and_by_owner_where_several_share_one(batch: int) -> None:
    made: Any = fake(targets=[fake(batch=range(batch))], indices=(3, 0, 2, 1), dataset=fake(owners=list("abca")))
    updates = ((0, 0, 1, 1),) if batch == 2 else ()
    assert judge.clusters(made) == (*updates, ("a", "a", "c", "b"))
    made.dataset.owners = list("abcd")
    assert judge.clusters(made) == updates
    made.dataset.owners = None
    assert judge.clusters(made) == updates


def test_what_is_scored_has_its_ranks_measures_labels_and_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    made: Any = fake(positions=(1, 0), candidates="candidates", copies="copies")
    monkeypatch.setattr(judge, "ranks", lambda *given, **more: noted(asked, (*given, more)) or "ranks")
    monkeypatch.setattr(judge, "originals", lambda given: ("truth", given))
    monkeypatch.setattr(judge, "measured", lambda *given: given)
    monkeypatch.setattr(judge, "clusters", lambda given: ("clusters", given))
    found: Any = judge.scored_images(made, "images", "labels")  # type: ignore[arg-type]
    assert asked[0][0] == "images" and asked[0][1].tolist() == [1, 0] and asked[0][2:] == ("candidates", {"copies": "copies"})
    assert (found.images, found.rank, found.labels) == ("images", "ranks", "labels")
    assert found.values == (made, "images", ("truth", made)) and found.clusters == ("clusters", made)


def test_pictures_are_measured_beside_the_mean_of_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "measure", lambda *given: given)
    found: Any = judge.measured(fake(candidates=torch.tensor([[1.0], [4.0]])), "images", "truth")  # type: ignore[arg-type]
    assert found[:3] == ("images", "truth", judge.NAMES) and found[3]["prior"].tolist() == [2.5]


def scored(rank: list[int], *clusters: tuple[Any, ...], labels: list[float] | None = None, **values: list[float]) -> Scored:
    told = None if labels is None else torch.tensor(labels)
    return Scored(torch.zeros(len(rank), 1), {n: torch.tensor(v) for n, v in values.items()}, torch.tensor(rank), told, clusters)


def test_a_summary_counts_ranks_up_to_k_and_labels_by_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = [1, 2, 1, 4, 5, 1, 3, 9]
    pairs = (0, 0, 1, 1, 2, 2, 3, 3)
    found = scored(rank, pairs, labels=[1, 0, 0, 0, 1, 1, 1, 1], mse=[float(each * place**2) for place, each in enumerate(rank)])
    summary = found.summary(Seed(4))
    for name, hits in (
        ("identified", [each == 1 for each in rank]),
        *((f"iip_{k}", [each <= k for each in rank]) for k in (1, 3, 5)),
        ("label_accuracy", [True, False, False, False, True, True, True, True]),
    ):
        assert getattr(summary, name) == share_of(sum(hits), 8, effective_number([float(hit) for hit in hits], pairs)), name
    assert found.share == summary.identified and found.hits == [each == 1 for each in rank]
    monkeypatch.setattr(judge, "summarise", lambda rows, *given: given)
    assert found.summary(Seed(5)) == (Seed(5), Summary, (pairs,))  # type: ignore[comparison-overlap]
    monkeypatch.undo()
    assert scored(rank, mse=[1.0] * 8).summary(Seed(0)).label_accuracy is None


@pytest.mark.parametrize("defended", [True, False])
def test_who_knows_the_defense_rehearses_on_what_is_replayed_and_who_does_not_on_raw_records(
    defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = observation(Knows() if defended else OpenAdversary())
    rehearsals = [
        fake(batch=Batch(torch.ones(1, 1), torch.tensor([place])), replayed_inputs=f"replayed {place}", observation=seen)
        for place in range(2)
    ]
    made: Any = fake(cell=fake(device="cpu"), rehearsals=rehearsals, targets=[fake(observation=seen)])
    many = [[candidate(0), candidate(1, stance="informed")], [candidate(2), candidate(3, stance="robust")]]
    asked: list[Any] = []
    monkeypatch.setattr(Referee, "rehearsed", lambda *given: noted(asked, given) or Chooses(len(asked)))
    found = Referees.rehearsed(made, many)
    informed = asked[0]
    assert informed[0] == [seen, seen] and informed[3] is many
    assert [(inputs, int(labels)) for inputs, labels in informed[1]] == [("replayed 0", 0), ("replayed 1", 1)]
    assert all(torch.equal(image, torch.ones(1, 1)) for image in informed[2])
    if not defended:
        assert len(asked) == 1 and found.informed is found.plain
        return
    plain = asked[1]
    assert [type(each.adversary) for each in plain[0]] == [OpenAdversary] * 2 and plain[2] == informed[2]
    assert [(inputs.tolist(), int(labels)) for inputs, labels in plain[1]] == [([[1.0]], 0), ([[1.0]], 1)]
    assert plain[3] == [many[0][:1], many[1][:1]]
    assert [vars(each)["place"] for each in (found.informed, found.plain)] == [1, 2]


def test_every_attacker_is_judged_by_its_own_referee_and_keeps_its_own() -> None:
    informed, plain = Chooses(1), Chooses(0)
    referees, seen = Referees(informed, plain), observation(Knows())
    ignorant, knowing = [candidate(0), candidate(1)], [candidate(2), candidate(3, stance="informed")]
    assert referees.choose(seen, ignorant).chosen == 0 and referees.choose(seen, knowing).chosen == 1
    asked = vars(plain)["asked"]
    assert type(asked[0][0].adversary) is OpenAdversary and asked[0][1] == ignorant
    assert vars(informed)["asked"] == [(seen, knowing)] and judge.undefended(seen) is not seen
    bare = observation(OpenAdversary())
    assert judge.undefended(bare) is bare
    made: Any = fake(targets=[fake(observation=seen), fake(observation=bare)])
    kept, verdicts = judge.select(made, [knowing, ignorant], informed)
    assert kept == [knowing[1], ignorant[1]] and [each.chosen for each in verdicts] == [1, 1]
    assert vars(informed)["asked"][-2:] == [(seen, knowing), (bare, ignorant)]
    chosen = judge.select_plain(made, [knowing, ignorant], referees)
    assert chosen == [knowing[0], ignorant[0]] and judge.select_plain(made, [knowing[1:], ignorant], referees) is None


def test_a_row_of_attackers_tells_its_tries_choices_and_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [
        [candidate(0, "a"), candidate(1, "a"), candidate(2, "b", "robust")],
        [candidate(3, "a"), candidate(4, "b", "robust"), candidate(5, "a"), candidate(6, "a")],
    ]
    seen = observation(Knows())
    made: Any = fake(targets=[fake(observation=seen)] * 2)
    monkeypatch.setattr(judge, "score", lambda given, kept: fake(summary=lambda seed: (given, kept, seed)))
    informed, plain = Chooses(0), Chooses(1)
    object.__setattr__(informed, "rehearsal", {"a/plain": 1.5, "b/robust": 2.5})
    found = judge.per_recipe(made, many, Referees(informed, plain), [many[0][2], many[1][0]], Seed(3))
    rows: list[Any] = [row for row, _ in found]
    assert [(row.recipe, row.stance, row.tries, row.chosen, row.rehearsal_psnr) for row in rows] == [
        ("a", "plain", 3, 1, 1.5),
        ("b", "robust", 1, 1, 2.5),
    ]
    keys = ["a/plain", "b/robust"]
    kept = [[many[0][1], many[1][2]], [many[0][2], many[1][1]]]
    assert [row.summary for row in rows] == [(made, own, Seed(3).child(key)) for own, key in zip(kept, keys, strict=True)]


def test_labels_that_were_read_are_compared_with_the_true_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches the first of two equal labels gets the credit: turned round, owners would share other hits."""
    truths = [torch.tensor([1, 2]), torch.tensor([0, 0])]
    reads = {"first": torch.tensor([2, 3]), "second": torch.tensor([0, 5])}
    targets = [
        fake(batch=Batch(torch.zeros(2, 1), own), observation=fake(name=name)) for own, name in zip(truths, reads, strict=True)
    ]
    made: Any = fake(
        targets=targets,
        indices=(0, 1, 2, 3),
        candidate_labels=torch.tensor([0, 0, 1, 2, 4]),
        dataset=fake(classes=6, owners=None, dense=False),
    )
    monkeypatch.setattr(label_level, "_unmeasured", lambda given: "")
    monkeypatch.setattr(
        label_level,
        "_readers",
        lambda seen, context: {"plain": lambda each: reads[each.name], "own": lambda each: torch.tensor([1, 0])},
    )
    compared: list[Any] = []
    called = label_hits
    monkeypatch.setattr(label_level, "label_hits", lambda *given: noted(compared, given) or called(*given))
    found = label_level.label_level(made, "context")  # type: ignore[arg-type]
    assert all(compared[place][1] is truths[place % 2] for place in range(4)) and compared[0][0] is reads["first"]
    plain = share_of(2, 4, effective_number([0.0, 1.0, 1.0, 0.0], (0, 0, 1, 1)))
    own = share_of(2, 4, effective_number([1.0, 0.0, 1.0, 0.0], (0, 0, 1, 1)))
    assert found.reached == (
        Reach(attacker="plain", share=plain, informed=False),
        Reach(attacker="own", share=own, informed=True),
    )
    assert (found.share, found.attacker) == label_level.strongest(found.reached)
    assert found.null == label_level.label_null(made.candidate_labels, 6, 2, 4)


def test_who_reads_labels_is_never_shown_them(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(label_level, "recover_labels", lambda seen, informed=False: noted(read, (seen, informed)) or "labels")
    monkeypatch.setattr(label_level, "informed_belief", lambda *given, **more: noted(read, (*given, more)) or fake(best="best"))

    def given(adversary: Any, knows: frozenset[Knowledge]) -> Any:
        return fake(adversary=adversary, learner=None, threat=fake(knows=knows), replace=lambda labels: ("without", labels))

    seen, context = given(Knows(), frozenset({Knowledge.DEFENSE})), fake(simulate="client")
    readers = label_level._readers(seen, context)
    assert [reader(seen) for reader in readers.values()] == ["labels", "labels", "best"]
    assert list(readers) == ["plain", "own", "generic"]
    bare = ("without", None)
    assert read == [(bare, False), (bare, True), (bare, context, {"ask_author": False})]
    assert list(label_level._readers(given(OpenAdversary(), frozenset({Knowledge.DEFENSE})), fake(simulate=None))) == ["plain"]
    assert list(label_level._readers(given(Knows(), frozenset()), context)) == ["plain"]


def test_the_strongest_reader_has_the_lower_end_of_a_choice_and_the_upper_end_of_all() -> None:
    reached = [Reach(attacker=str(count), share=share_of(count, 16, worth)) for count, worth in ((3, None), (9, None), (5, 4.0))]
    share, who = label_level.strongest(reached)
    assert (who, share.count, share.n) == ("9", 9, 16) and share.low == wilson(9, 16, 1 - 0.05 / 3)[0]
    assert share.high == max(each.share.high for each in reached)
    alone, _ = label_level.strongest([Reach(attacker="x", share=share_of(5, 16, 4.0))])
    assert alone == share_of(5, 16, 4.0)


@pytest.mark.parametrize(("batch", "name", "value"), [(1, "commonest class", 0.5), (2, "best fixed labels", (0.75 + 0.4375) / 2)])
def test_the_null_of_labels_is_the_best_fixed_answer(batch: int, name: str, value: float) -> None:
    found = label_level.label_null(torch.tensor([3, 3, 1, 0]), 4, batch, 7)
    assert found.null == name and found.value == pytest.approx(value)
    assert found.high == wilson(round(value * 7), 7)[1]


@pytest.mark.parametrize(("updates", "batch"), [(1, 3), (3, 1), (1, 1), (2, 2)])
def test_of_a_single_update_the_other_records_are_all_other_candidates(
    updates: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    count = updates * batch
    made: Any = fake(
        targets=[fake(batch=range(batch))] * updates,
        positions=tuple(range(count)),
        candidates=range(7),
        copies=torch.tensor([0, 1, 2, 3, 4, 0, 6]),
        candidate_labels=torch.arange(7) * 2,
        cell=fake(known_labels=True),
        dataset=fake(dense=False),
    )
    monkeypatch.setattr(nulls, "deranged", lambda *given: noted(asked, given) or [*range(count - 1, -1, -1), 9, 9])
    generator = np.random.default_rng(0)
    found = nulls._other_rows(made, fake(labels=None), generator)
    spare = list(range(count, 7)) if updates == 1 else []
    rows = [*range(count), *spare]
    assert found.tolist() == list(range(count - 1, -1, -1)) and asked[0][3] is generator
    assert asked[0][0] == [2 * row for row in rows] and asked[0][2] == [made.copies[row] for row in rows]
    assert asked[0][1] == [place // batch for place in range(count)] + [-1 - place for place in range(len(spare))]


@pytest.mark.parametrize(
    ("known", "told", "labels"), [(True, [0.0, 1.0], [5, 6, 7]), (False, [0.0, 1.0], [None, 6, 7]), (False, None, [None] * 3)]
)
def test_other_records_share_the_label_where_it_is_known_or_was_read(
    known: bool, told: list[float] | None, labels: list[Any]
) -> None:
    made: Any = fake(cell=fake(known_labels=known), dataset=fake(dense=False), candidate_labels=torch.tensor([0, 5, 6, 7]))
    attacker: Any = fake(labels=None if told is None else torch.tensor(told))
    assert nulls._labels(made, attacker, [1, 2, 3]) == labels
    made.dataset.dense = True
    assert nulls._labels(made, attacker, [1, 2, 3]) == [None] * 3


def test_every_attacker_is_deranged_by_a_draw_of_its_own_and_the_luckiest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    draws = [torch.tensor([2, 0]), torch.tensor([1, 2]), torch.tensor([0, 1])]
    ranked = [torch.tensor([1, 5]), torch.tensor([1, 1]), torch.tensor([2, 2])]
    made: Any = fake(candidates=torch.tensor([[0.0], [1.0], [2.0]]), copies="copies")
    attackers: Any = [fake(images=f"images {place}", clusters=f"clusters {place}") for place in range(3)]

    def rows(given: Any, attacker: Any, generator: np.random.Generator) -> Tensor:
        asked.append((given, attacker, generator.integers(10**9)))
        return draws[len(asked) - 1]

    monkeypatch.setattr(nulls, "_other_rows", rows)
    monkeypatch.setattr(nulls, "_matched", lambda given, images, own: f"matched {images}")
    monkeypatch.setattr(
        nulls, "ranks", lambda images, own, *given, **more: noted(asked, (images, own, *given, more)) or ranked[int(images[-1])]
    )
    order = iter(range(3))

    def ranks(images: Any, own: Tensor, candidates: Any, copies: Any) -> Tensor:
        place = next(order)
        assert (
            images == f"matched images {place}" and own is draws[place] and candidates is made.candidates and copies == "copies"
        )
        return ranked[place]

    monkeypatch.setattr(nulls, "ranks", ranks)
    monkeypatch.setattr(nulls, "measured", lambda *given: given)
    found: Any = nulls.derangements(made, attackers, Seed(8))
    seeds = [Seed(8).child("derangement", place).numpy("rows").integers(10**9) for place in range(3)]
    assert asked == [(made, attackers[place], seeds[place]) for place in range(3)]
    assert found.counts == (1, 2, 0) and found.largest.rank is ranked[1] and found.largest.images == "matched images 1"
    assert found.largest.values[:2] == (made, "matched images 1") and found.largest.values[2].tolist() == [[1.0], [2.0]]
    assert found.largest.clusters == "clusters 0" and found.largest.labels is None


def test_a_bar_is_the_best_null_and_of_equal_ones_the_derangement() -> None:
    pairs = (0, 0, 1, 1)
    drawn = Deranged(scored([1, 2, 2, 2], pairs, psnr=[1.0, 1.0, 1.0, 1.0]), (1, 0, 1))
    rows = {"grey": scored([1, 2, 3, 4], psnr=[4.0, 6.0, 1.0, 9.0]), "derangement": drawn.largest}
    found = nulls.bars(rows, drawn)
    worth = effective_number([1.0, 0.0, 0.0, 0.0], pairs)
    assert found.identified == nulls.largest_of((1, 0, 1), 4, worth) and found.identified is not None
    assert (found.identified.value, found.identified.draws) == (0.25, 3)
    assert found.identified.high == max(0.25, share_of(2, 12, 3 * worth).high)
    assert found.psnr is not None and (found.psnr.null, found.psnr.value) == ("grey", 5.0)
    lucky = scored([1, 1, 1, 4], pairs, psnr=[0.0] * 4)
    other = nulls.bars({**rows, "data_mean": lucky}, drawn).identified
    assert other is not None and (other.null, other.value, other.high) == ("data_mean", 0.75, lucky.share.high)


@pytest.mark.parametrize(
    ("count", "level", "words"),
    [
        (1, "fail", "All candidates are copies of one record"),
        (2, "warn", "among 2 candidates only"),
        (99, "warn", "among 99 candidates only"),
        (100, "ok", "Records were identified among 100 candidates."),
    ],
)
def test_candidates_are_counted_as_few_or_enough(count: int, level: str, words: str) -> None:
    made: Any = fake(distinct=count, candidates=range(count + 3))
    found = candidate_checks.check_enough_candidates(made)
    assert (found.name, found.level) == ("enough_candidates", level) and words in found.sentence
    assert bool(found.remedy) == (level != "ok") and (level != "warn" or "at least 100 records" in found.remedy)
    copies = candidate_checks.check_duplicates(made)
    assert (copies.name, copies.level) == ("duplicates", "warn") and copies.remedy.startswith("Take copies out")
    assert copies.sentence.startswith(f"Of {count + 3} candidates 3 are copies of others")
    made.candidates = range(count)
    alone = candidate_checks.check_duplicates(made)
    assert (alone.level, alone.sentence, alone.remedy) == ("ok", "No candidate is a copy of another.", "")


def share(count: int, n: int) -> Any:
    return share_of(count, n)


@pytest.mark.parametrize(
    ("listed", "owners", "said"),
    [
        (15, None, ""),
        (2, None, "16 of 16 records were identified by pictures, 2 of 16 pointed out on lists"),
        (15, 1, "8 of 8 owners were identified by pictures, 1 of 8 pointed out on lists"),
        (15, 8, ""),
    ],
)
def test_lists_that_name_fewer_than_pictures_identify_are_said(listed: int, owners: int | None, said: str) -> None:
    lists = fake(headline=fake(share=share(listed, 16), owners=None if owners is None else share(owners, 8)))
    cell: Any = fake(identified=share(16, 16), levels=fake(listed=lists, owners=fake(share=share(8, 8)) if owners else None))
    found = candidate_checks.check_lists(cell)
    assert found.name == "lists_reach_pictures" and found.level == ("warn" if said else "ok") and said in found.sentence
    assert bool(found.remedy) == bool(said)
    assert bool(said) or found.sentence == "Lists point out no fewer than pictures identify, within noise."
    for nothing in (fake(levels=None), fake(levels=fake(listed=None)), fake(levels=fake(listed=fake(headline=None)))):
        assert candidate_checks.check_lists(nothing).sentence == "No list was tested."


def test_somebody_is_ahead_only_beyond_what_clusters_leave_to_luck() -> None:
    alone, chosen = [1] * 12 + [7] * 4, [7] * 16
    pairs, quads = tuple(place // 2 for place in range(16)), tuple(place // 4 for place in range(16))
    row = Attacker(recipe="sharp", stance="plain", summary=Summary(identified=share_of(12, 16)))

    def ahead(*clusters: tuple[int, ...], attackers: int = 1) -> str:
        selected = scored(chosen, *clusters, psnr=[0.0] * 16)
        others = [
            Attacker(recipe=f"o{i}", stance="plain", summary=Summary(identified=share_of(0, 16))) for i in range(attackers - 1)
        ]
        made: Any = fake(cell=CELL)
        evidence = Evidence(
            made, [], [], [], Referee(), selected, selected, {}, attackers=[row, *others], alone={"sharp (plain)": scored(alone)}
        )
        return trust._nobody_ahead(evidence).level

    hits, missed = [each == 1 for each in alone], [False] * 16
    p = [mcnemar(hits, missed, names) for names in (None, pairs, quads)]
    assert p[0] < RARE / 4 and p[1] < RARE < p[2]
    assert [ahead(), ahead(pairs), ahead(quads), ahead(pairs, quads)] == ["warn", "warn", "ok", "ok"]
    assert p[1] >= RARE / 20 and ahead(pairs, attackers=20) == "ok"

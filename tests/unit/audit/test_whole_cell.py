"""One cheap audit with everybody watched: every part is handed what it is about, and lands in its field of the result."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.audit import cell as audited
from gradveil.audit.candidate_checks import check_lists
from gradveil.audit.cell import MeasuredCell, run_cell
from gradveil.audit.materials import Materials
from gradveil.audit.trust import Evidence
from gradveil.randomness import Seed
from gradveil.study.headline import ALL, INFORMED, PLAIN, told
from gradveil.study.results import CellResult
from tests.unit.audit.small import CELL, people

WHOLE = CELL.replace(
    records=6,
    batch_size=2,
    seed=5,
    model="mlp(hidden=8)",
    defense="clipping(bound=1.0) + gaussian_noise(std=0.01)",
    ensemble="inverting_gradients(steps=2)",
    lists="4",
    risk="gram",
    steps=3,
)
STEPS = (
    *(
        "resolve",
        "build_subject",
        "line_up",
        "planned_steps",
        "attack_all",
        "risk_of_cell",
        "exposure_of_cell",
        "select",
        "score",
        "best_by_truth",
    ),
    *(
        "select_plain",
        "per_recipe",
        "derangements",
        "owners_level",
        "null_rows",
        "certify",
        "explain",
        "region_of_cell",
        "gap_of",
    ),
    *(
        "bars",
        "run_checks",
        "label_level",
        "list_level",
        "informed_by",
        "check_lists",
        "check_present",
        "measure_latency_of",
        "PartialWork",
    ),
)


class Call:
    """One call: what was handed on by the names of the parameters, and what came back."""

    def __init__(self, given: dict[str, Any], answer: Any) -> None:
        self.given = SimpleNamespace(**given)
        self.answer = answer


class Watch(dict[str, list[Call]]):
    """Notes what is handed to functions of a module and what they return."""

    def on(self, patch: pytest.MonkeyPatch, name: str, inner: Callable[..., Any]) -> None:
        signature = inspect.signature(inner)

        def noting(*given: Any, **more: Any) -> Any:
            bound = signature.bind(*given, **more)
            bound.apply_defaults()
            answer = inner(*given, **more)
            self.setdefault(name, []).append(Call(dict(bound.arguments), answer))
            return answer

        patch.setattr(audited, name, noting)

    def only(self, name: str) -> Call:
        (found,) = self[name]
        return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[MeasuredCell, Watch, dict[str, Any]]:
    watch = Watch()
    given: dict[str, Any] = {"materials": Materials(), "key": "0123456789abcdef", "work": tmp_path_factory.mktemp("work")}
    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            watch.on(patch, name, vars(audited)[name])
        found = run_cell(WHOLE, people(), **given)
    return found, watch, given


def same(left: Any, right: Any) -> bool:
    """Say whether two sequences hold the very same things."""
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))


def test_every_part_of_a_result_is_about_this_cell_and_lands_in_its_field(whole: Any) -> None:
    measured, watch, handed = whole
    found: CellResult = measured.result
    ensemble, subject = watch.only("resolve").answer, watch.only("build_subject").answer
    assert list(vars(watch.only("resolve").given).values()) == [WHOLE.ensemble, "update"]
    given = watch.only("build_subject").given
    assert (given.cell, given.dataset, given.rehearsals) == (WHOLE, people(), ensemble.rehearsals)
    assert given.materials is handed["materials"] is subject.materials
    everyone = [each.observation for each in (*subject.targets, *subject.rehearsals)]
    assert len(everyone) == 3 + ensemble.rehearsals > 3
    # Who attacks, and what they find.
    lined = watch.only("line_up")
    context = lined.given.context
    assert lined.given.ensemble is ensemble and lined.given.observation is everyone[0]
    assert (context.seed, context.budget) == (Seed(5).child("attacker"), 3)
    attacks = lined.answer
    attacked = watch.only("attack_all")
    assert same(attacked.given.attacks, attacks) and same(attacked.given.observations, everyone)
    partial = watch.only("PartialWork")
    assert attacked.given.context is context and attacked.given.partial is partial.answer
    assert (partial.given.folder, partial.given.device) == (handed["work"], "cpu")
    candidates = attacked.answer[:3]
    # Who chooses.
    selected, best = (call.answer for call in watch["score"][:2])
    chosen = watch.only("select")
    assert chosen.given.subject is subject and same(chosen.given.candidates, candidates)
    kept, verdicts = chosen.answer
    referee = chosen.given.referee
    assert watch["score"][0].given.chosen is kept and watch["score"][1].given.chosen is watch.only("best_by_truth").answer
    assert same(watch.only("best_by_truth").given.candidates, candidates)
    plain = watch["score"][2]
    assert plain.given.chosen is watch.only("select_plain").answer and same(
        watch.only("select_plain").given.candidates, candidates
    )
    assert watch.only("select_plain").given.referees.informed is referee
    assert {each.stance for each in plain.given.chosen} == {"plain"}
    # What is counted.
    seed = Seed(5).child("summary")
    alone = watch.only("per_recipe")
    assert same(alone.given.candidates, candidates) and alone.given.chosen is kept and alone.given.seed == seed
    assert alone.given.referees.informed is referee
    table, scored = zip(*alone.answer, strict=True)
    names = [told(row.recipe, row.stance) for row in table]
    tried = watch.only("owners_level").given.attackers
    assert list(tried) == [ALL, INFORMED, *names] and PLAIN not in tried
    assert same(list(tried.values()), [selected, selected, *scored])
    drawn = watch.only("derangements")
    assert drawn.given.seed == seed == watch.only("owners_level").given.seed
    assert same(drawn.given.attackers, list(tried.values()))
    nulls = watch.only("null_rows")
    assert nulls.given.ensemble is ensemble and nulls.given.context is context and nulls.given.deranged is drawn.answer
    assert nulls.given.tries == len(candidates[0]) > 1
    explained = watch.only("explain")
    assert explained.given.chosen is kept and explained.given.verdicts is verdicts and explained.given.referee is referee
    assert explained.given.rank is selected.rank is watch.only("gap_of").given.rank
    assert watch.only("gap_of").given.explained is explained.answer
    region = watch.only("region_of_cell")
    assert region.given.seed == seed.child("region")
    rows = region.given.rows
    assert list(rows) == ["selected", "best_by_truth", "plain", "informed", "data_mean"]
    assert same(list(rows.values()), [selected, best, plain.answer, selected, nulls.answer["data_mean"]])
    assert watch.only("bars").given.nulls is nulls.answer and watch.only("bars").given.deranged is drawn.answer
    assert watch.only("label_level").given.context is context
    assert watch.only("list_level").given.pictures is selected.images
    assert same(watch.only("informed_by").given.candidates, candidates)
    for name in ("risk_of_cell", "certify", "informed_by", "label_level", "list_level", "derangements", "owners_level"):
        assert watch.only(name).given.subject is subject, name
    for name in ("explain", "null_rows", "region_of_cell", "per_recipe", "best_by_truth", "select_plain"):
        assert watch.only(name).given.subject is subject, name
    # What the checks see.
    evidence: Evidence = watch.only("run_checks").given.evidence
    assert evidence.subject is subject and same(evidence.candidates, candidates) and evidence.referee is referee
    assert evidence.chosen is kept and evidence.verdicts is verdicts and evidence.plain is plain.answer
    assert evidence.best is best and evidence.selected is selected
    assert evidence.nulls is nulls.answer and evidence.certificate is watch.only("certify").answer
    assert same(evidence.attackers, table) and evidence.explained is explained.answer
    assert list(evidence.alone) == names and same(list(evidence.alone.values()), scored)
    # Where it all lands.
    assert found.attackers == tuple(table) and found.bar is watch.only("bars").answer and found.gap is watch.only("gap_of").answer
    assert found.selected == found.informed == selected.summary(seed.child("selected")) != selected.summary(seed.child("plain"))
    assert found.best_by_truth == best.summary(seed.child("best_by_truth"))
    assert evidence.plain is not None and found.plain == evidence.plain.summary(seed.child("plain"))
    assert found.nulls == {name: null.summary(seed.child("null", name)) for name, null in nulls.answer.items()}
    assert set(found.nulls) == {"grey", "data_mean", "prior_only", "derangement"}
    assert found.levels is not None and found.levels.owners is watch.only("owners_level").answer is not None
    assert found.levels.label is watch.only("label_level").answer and found.levels.listed is watch.only("list_level").answer
    assert found.certificate is watch.only("certify").answer and found.informed_by == watch.only("informed_by").answer == "own"
    assert found.region is region.answer is not None and found.unavailable == {}
    assert found.checks[:-2] == tuple(watch.only("run_checks").answer) and found.checks[-2] == check_lists(found)
    assert found.checks[-2] == watch.only("check_lists").answer and len({each.name for each in found.checks}) == 20
    present = watch.only("check_present")
    assert found.checks[-1] == present.answer and present.given.context is context
    assert present.given.observation is watch.only("attack_all").given.observations[0]
    assert present.given.ensemble is watch.only("resolve").answer
    assert (found.n, found.candidates, found.duplicates, found.chance) == (6, 40, 0, 1 / 40)
    assert found.settings.ensemble == ensemble.name and found.settings.threads == torch.get_num_threads()
    assert found.settings.defense == WHOLE.defense and found.settings.seed == 5 and found.settings.records == 6
    assert found.threat.knows == tuple(sorted(each.name.lower() for each in everyone[0].threat.knows))


def test_records_names_and_pictures_stand_in_the_order_of_the_attack(whole: Any) -> None:
    measured, watch, _ = whole
    found, subject = measured.result, watch.only("build_subject").answer
    selected, best = (call.answer for call in watch["score"][:2])
    kept, explained = watch.only("select").answer[0], watch.only("explain").answer
    assert subject.indices == tuple(Seed(5).child("records").numpy("choice").permutation(40)[:6].tolist())
    assert len({*subject.indices}) == 6 and subject.positions == tuple(range(6))
    truth = people().inputs[list(subject.indices)]
    for place, (row, index) in enumerate(zip(found.records, subject.indices, strict=True)):
        assert row.label == int(people().targets[index])
        assert row.pseudonym == audited._pseudonym("r", f"record {index}", subject)
        assert row.owner == audited._pseudonym("o", f"person {index * 7 % 20}", subject) != row.pseudonym
        assert (row.rank, row.identified) == (int(selected.rank[place]), bool(selected.rank[place] == 1))
        assert row.label_correct == bool(selected.labels[place]) and row.gap == explained[place // 2].gap
        assert (row.recipe, row.stance) == (kept[place // 2].recipe, kept[place // 2].stance)
        error = float((torch.from_numpy(measured.pictures["selected"][place]) - truth[place]).square().mean())
        assert row.mse == pytest.approx(error, rel=1e-5) and row.psnr == pytest.approx(-10 * np.log10(error), rel=1e-5)
        assert row.regret_db == pytest.approx(max(0.0, float(best.values["psnr"][place]) - row.psnr), abs=1e-6)
    assert len({row.pseudonym for row in found.records}) == 6 and len({row.gap for row in found.records}) == 3
    assert found.risk is not None and found.risk.correlation is not None and found.risk.correlation.attack == "informed"
    assert [each.pseudonym for each in found.risk.records] == [row.pseudonym for row in found.records]
    assert [each.error for each in found.risk.records] == [row.mse for row in found.records]
    pictures = measured.pictures
    rows = watch.only("region_of_cell").given.rows
    nulls = watch.only("null_rows").answer
    wanted = {name: rows[name].images for name in ("selected", "best_by_truth", "plain", "informed")} | {"original": truth}
    wanted |= {f"null_{name}": nulls[name].images for name in ("grey", "data_mean", "prior_only")}
    assert set(pictures) == set(wanted) and all(np.array_equal(pictures[name], each.numpy()) for name, each in wanted.items())


def test_time_and_steps_are_those_of_the_work(whole: Any) -> None:
    measured, watch, _ = whole
    timing, found = measured.result.timing, measured.result
    everyone = watch.only("attack_all").given.observations
    stances = len(found.attackers)
    # Two steps of every stance and observation; the authors' unknown draws cost nothing here.
    assert watch.only("planned_steps").answer == timing.attack_steps == 2 * stances * len(everyone)
    assert found.asked_steps == 2 and timing.key == found.key == "0123456789abcdef"
    assert timing.seconds > timing.risk_seconds > 0 and timing.peak_memory_mb > 50
    foretold = [watch.only(name).answer.seconds for name in ("risk_of_cell", "exposure_of_cell")]
    assert min(foretold) > 0 and timing.risk_seconds == round(sum(foretold), 3)
    assert timing.steps_per_second == pytest.approx(timing.attack_steps / timing.seconds, rel=0.05)
    latency = watch.only("measure_latency_of")
    assert latency.given.device == "cpu" and latency.given.undefended is not None
    assert timing.defense_ms == round(latency.answer.defended_ms, 3) > 0
    assert timing.undefended_ms == round(latency.answer.undefended_ms, 3) > 0
    parameters = 36 * 8 + 8 + 8 * 5 + 5
    assert (found.bytes.up, found.bytes.dense) == (4 * parameters, 4 * parameters)
    described = dataclasses.asdict(found.defense)
    assert described["parts"] == ("clipping", "gaussian_noise") and (described["rung"], described["rungs"]) == (None, 0)
    assert described["random"] is True and described["spelling"] == WHOLE.defense and described["measured"] == {}


def test_what_was_kept_is_neither_planned_nor_done_again_but_counted(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, watch, handed = whole
    kept = sorted(Path(handed["work"]).iterdir())
    assert len(kept) == len(watch.only("line_up").answer) > 2
    for path in kept[1:]:  # the first was still at work when the run was killed
        (tmp_path / path.name).write_bytes(path.read_bytes())
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(audited, "region_of_cell", lambda *given: "no region")
    cell = WHOLE.replace(lists="off", risk="off")
    again = run_cell(cell, people(), work=tmp_path, report=lambda done, planned: said.append((done, planned))).result
    own = 2 * len(watch.only("attack_all").given.observations)
    assert said[-1] == (own, own) and {planned for _, planned in said} == {own}
    assert again.timing.attack_steps == measured.result.timing.attack_steps
    assert again.records == measured.result.records and again.attackers == measured.result.attackers
    assert again.region is None and again.unavailable == {"region": "no region"}
    assert again.timing.risk_seconds == 0.0 and again.risk is None and again.levels is not None and again.levels.listed is None

"""Power curves: which points are needed, what they say, and that neither a kill nor haste changes a byte."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradveil.attacks import ENSEMBLES
from gradveil.audit.materials import Materials
from gradveil.audit.power import measure_rung
from gradveil.metrics import share_of
from gradveil.run import jobs, pool
from gradveil.run.estimate import estimate_plan
from gradveil.run.jobs import Progress
from gradveil.run.pool import run_audit
from gradveil.run.power import WEIGHTS, Curve, Measured, Point, always_measured, curve_of, ensemble_name, half_found
from gradveil.storage.run_folder import Store
from gradveil.study.cell import Cell
from gradveil.study.evidence import Power, Rung
from gradveil.study.measures import Bar
from gradveil.study.plan import Plan
from gradveil.study.results import Check
from gradveil.study.run_result import Run
from gradveil.study.rung import RungRecord, RungTask

BASE = Cell(data="digits", model="mlp(hidden=16)", records=32, ensemble="quick-3", device="cpu")


def found(count: int, n: int = 16) -> Rung:
    return Rung(identified=share_of(count, n), null=Bar(null="grey", value=0.0, high=share_of(0, n).high))


def curve(defense: str = "gaussian_noise(std=0.01)", **cells: Cell) -> Curve:
    cell = BASE.replace(defense=defense)
    return curve_of(cell, Cell.key, {cell.key(): cell, **{each.key(): each for each in cells.values()}}, Materials())


class Folder:
    """Counts by weight of the leak and by setting; what is asked for is measured in the order a single worker takes."""

    def __init__(self, own: int, leaks: dict[float, int], settings: dict[str, int] | None = None) -> None:
        self.own, self.leaks, self.settings = own, leaks, settings or {}
        self.measured: dict[Point, Measured] = {}

    def read(self, point: Point) -> Measured | None:
        return self.measured.get(point)

    def measure(self, point: Point, curve: Curve) -> None:
        task = point.task
        count = self.own if point == curve.cell else self.leaks[task.leak] if task.leak else self.settings[task.cell.defense]
        self.measured[point] = (found(count), (Check(name="canary_found", level="ok"),) if task.leak == 1 else ())

    def run(self, curve: Curve) -> Power:
        self.measure(curve.cell, curve)
        for point in curve.points:
            assert curve.power(self.read) is None or not curve.wants(point, self.read)
            if curve.wants(point, self.read):
                self.measure(point, curve)
        power = curve.power(self.read)
        assert power is not None
        return power[0]


EASY = {"none": 16, "gaussian_noise(std=0.0001)": 16, "gaussian_noise(std=0.001)": 16}


@pytest.mark.parametrize(
    ("own", "leaks", "tried", "a50"),
    [
        (0, {1.0: 16, 0.5: 16, 0.1: 0}, [0.1, 0.5, 1.0], 0.25),
        (0, {1.0: 16, 0.5: 16, 0.1: 16, 0.01: 0}, [0.01, 0.1, 0.5, 1.0], 0.032416),
        (0, {1.0: 16, 0.5: 16, 0.1: 16, 0.01: 16}, [0.01, 0.1, 0.5, 1.0], 0.01),
        (0, {1.0: 16, 0.5: 0, 0.9: 16}, [0.5, 0.9, 1.0], 0.75),
        (0, {1.0: 16, 0.5: 0, 0.9: 0, 0.99: 16}, [0.5, 0.9, 0.99, 1.0], 0.967584),
        (0, {1.0: 16, 0.5: 0, 0.9: 0, 0.99: 0}, [0.5, 0.9, 0.99, 1.0], 1.0),
        (0, {1.0: 7}, [1.0], None),
        (9, {1.0: 16}, [1.0], 0.0),
    ],
)
def test_leaks_are_tried_only_where_they_narrow_down_where_half_is_found(
    own: int, leaks: dict[float, int], tried: list[float], a50: float | None
) -> None:
    power = Folder(own, leaks, EASY).run(curve())
    assert [rung.leak for rung in power.planted] == tried
    assert power.a50 == (None if a50 is None else pytest.approx(a50, abs=1e-5))
    assert power.shown  # by the ladder: the weaker settings are broken


@pytest.mark.parametrize(
    ("settings", "tried"),
    [
        ({"none": 16, "gaussian_noise(std=0.001)": 16}, ["none", "gaussian_noise(std=0.001)"]),
        (
            {"none": 16, "gaussian_noise(std=0.001)": 2, "gaussian_noise(std=0.0001)": 3},
            ["none", "gaussian_noise(std=0.0001)", "gaussian_noise(std=0.001)"],
        ),
        ({"none": 1}, ["none"]),
    ],
)
def test_settings_are_tried_from_the_nearest_down_to_the_first_that_is_broken(settings: dict[str, int], tried: list[str]) -> None:
    power = Folder(0, {1.0: 16, 0.5: 0, 0.9: 0, 0.99: 0}, settings).run(curve())
    assert [rung.spelling for rung in power.ladder] == tried
    assert power.shown == (settings.get("gaussian_noise(std=0.001)") == 16)


def test_attackers_who_win_only_where_nothing_is_defended_have_not_shown_power() -> None:
    power = Folder(0, {1.0: 16, 0.5: 0, 0.9: 3, 0.99: 5}, EASY | dict.fromkeys(list(EASY)[1:], 1)).run(curve())
    assert power.ladder[0].broken and power.planted[-1].broken and not power.shown


def test_of_a_broken_defense_no_weaker_setting_is_tried_and_a_dead_canary_is_no_excuse_for_it() -> None:
    mine, broken = curve(), Folder(9, {1.0: 9})
    broken.run(mine)
    point = mine.planted[0]
    broken.measured[point] = (found(9), (Check(name="canary_found", level="fail"), Check(name="no_oracle", level="fail")))
    told = mine.power(broken.read)
    assert told is not None
    power, checks = told
    assert power.ladder == () and "broken as it is" in power.reason and power.shown
    assert {check.name: check.level for check in checks} == {"canary_found": "warn", "no_oracle": "fail"}
    broken.measured[mine.cell] = (found(0), ())
    assert mine.wants(mine.ladder[0], broken.read)


def test_the_undefended_update_has_a_canary_and_no_curve() -> None:
    mine = curve("none")
    assert [point.task.leak for point in mine.points] == [1.0]
    assert Folder(16, {1.0: 16}).run(mine).reason == ""


@pytest.mark.parametrize(("rounds", "tried"), [(1, ["none"]), (3, ["none", "censor(active_rounds=1)"])])
def test_what_lasts_as_long_as_is_seen_is_no_point_of_a_curve(rounds: int, tried: list[str]) -> None:
    cell = BASE.replace(defense="censor(active_rounds=5)", rounds=rounds)
    mine = curve_of(cell, Cell.key, {cell.key(): cell}, Materials())
    assert [point.task.cell.defense for point in mine.ladder] == tried


def test_the_order_in_which_points_were_measured_changes_nothing() -> None:
    counts = Folder(0, {1.0: 16, 0.5: 0, 0.9: 16, 0.1: 0, 0.99: 16, 0.01: 0}, EASY)
    mine = curve()
    alone = counts.run(mine)
    hasty = Folder(counts.own, counts.leaks, EASY)  # did everything before it looked
    for point in (mine.cell, *mine.points):
        hasty.measure(point, mine)
    both = mine.power(hasty.read)
    assert both is not None and both[0] == alone
    for missing in (mine.cell, *(point for point in mine.points if point in counts.measured)):
        known = {point: value for point, value in counts.measured.items() if point != missing}
        assert mine.power(known.get) is None or not mine.wants(missing, known.get)


def test_what_is_not_wanted_once_is_never_wanted_again() -> None:
    mine = curve()
    for leaks in itertools.product((0, 16), repeat=3):
        counts = Folder(0, dict(zip(WEIGHTS, (16, *leaks, leaks[1], leaks[0]), strict=True)), EASY)
        refused: set[Point] = set()
        for point in (mine.cell, *mine.points):
            assert not any(mine.wants(each, counts.read) for each in refused)
            refused |= {each for each in mine.points if not mine.wants(each, counts.read)}
            counts.measure(point, mine)


def test_shares_that_fall_are_evened_out_before_half_is_looked_for() -> None:
    shares = {0.0: 0, 0.1: 12, 0.5: 4, 0.9: 16, 1.0: 16}
    # 12 and 4 of 16 are one half each when made to grow: half is found where the pool begins.
    assert half_found({a: share_of(count, 16) for a, count in shares.items()}) == 0.1
    assert half_found({0.0: share_of(0, 16), 1.0: share_of(7, 16)}) is None


def test_a_cell_of_the_run_with_as_many_records_is_a_point_by_itself() -> None:
    undefended = BASE.replace(defense="none")
    weak = BASE.replace(defense="gaussian_noise(std=0.001)", records=16, risk="off")
    few = BASE.replace(defense="gaussian_noise(std=0.0001)", records=8)
    mine = curve(a=undefended, b=weak, c=few)
    assert [(point.task.cell.defense, point.is_cell) for point in mine.ladder] == [
        ("none", True),
        ("gaussian_noise(std=0.001)", True),
        ("gaussian_noise(std=0.0001)", False),  # the cell has fewer records than a point
    ]
    assert mine.ladder[0].key == undefended.key()
    assert all(point.task.cell.records == 16 and not point.is_cell for point in mine.planted)
    assert len({point.key for point in mine.points}) == len(mine.points)
    others = curve(a=undefended.replace(seed=1))
    assert not others.ladder[0].is_cell


def test_a_judgement_always_comes_with_power_and_published_ensembles_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    some = next(iter(ENSEMBLES.values()))
    names = {"standard-4": True, "standard-12": True, "strong-1": True, "embedding-standard-2": True, "quick-4": False}
    for name in names:
        monkeypatch.setitem(ENSEMBLES, name, replace(some, name=name))
    names |= {"standard-3": False, "standard-1": False, "embedding-standard-1": False, "linear_layer": False}
    assert {name: always_measured(BASE.replace(ensemble=name)) for name in names} == names


def test_a_cap_on_steps_is_part_of_who_attacked() -> None:
    assert ensemble_name(BASE) == "quick-3"
    assert ensemble_name(BASE.replace(steps=40)) == "quick-3, at most 40 steps"


# From here on with real attackers.

PLAN = Plan.default(
    data="digits",
    model="mlp(hidden=16)",
    records=4,
    device="cpu",
    defense=["none", "gaussian_noise(std=1.0)"],
    ensemble="linear_layer",
    power=True,
    risk="off",
    lists="off",
)


def contents(out: Path) -> dict[str, bytes]:
    return {
        f"{room}/{path.name}": path.read_bytes()
        for room in ("cells", "power")
        for path in sorted((out / room).iterdir())
        if "timing" not in path.name
    }


@pytest.fixture(scope="module")
def told() -> list[Progress]:
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, told: list[Progress]) -> tuple[Path, Run]:
    """A finished run in which the noise drowns everything."""
    out = tmp_path_factory.mktemp("power") / "results"
    return out, run_audit(PLAN, out, workers=1, on_progress=told.append)


def power_of(run: Run, defense: str) -> Power:
    power = run.cell(defense=defense).power
    assert power is not None
    return power


def test_noise_whose_strength_decides_gives_a_curve_that_never_falls(whole: tuple[Path, Run]) -> None:
    power = power_of(whole[1], "gaussian_noise(std=1.0)")
    leaks = [rung.leak for rung in power.planted]
    assert leaks == sorted(leaks) and leaks[-1] == 1.0 and len(leaks) >= 3
    counts = [rung.identified.count for rung in power.planted]
    assert counts == sorted(counts) and counts[-1] == 4
    by_setting = [rung.identified.count for rung in power.ladder]
    assert by_setting == sorted(by_setting, reverse=True) and by_setting[0] == 4
    assert power.ladder[0].spelling == "none" and power.a50 is not None and 0 < power.a50 <= 1


def test_canaries_stand_in_the_cell_and_progress_counts_the_points(whole: tuple[Path, Run], told: list[Progress]) -> None:
    out, run = whole
    for cell in run.cells:
        names = [check.name for check in cell.checks]
        assert {"canary_found", "no_oracle"} <= set(names) and len(names) == len(set(names))
        assert next(check for check in cell.checks if check.name == "canary_found").level == "ok"
    assert told[-1].done_cells == told[-1].cells > 2 + len(list((out / "power").glob("*.json"))) - 1
    assert [each.done_cells for each in told] == sorted(each.done_cells for each in told)


def test_points_are_kept_whole_and_without_pictures(whole: tuple[Path, Run]) -> None:
    out, run = whole
    assert run.notes == ()  # no file seems to belong to another plan
    kept = list((out / "power").iterdir())
    assert kept and all(path.suffix == ".json" for path in kept)
    record = Store(out).read_rung(kept[0].stem)
    assert record is not None and record.rung.identified.n == 4


def test_a_second_run_measures_nothing(whole: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = whole
    before = contents(out)
    monkeypatch.setattr(jobs, "measure_rung", None)
    monkeypatch.setattr(jobs, "run_cell", None)
    run_audit(PLAN, out, workers=1)
    assert contents(out) == before


class Killed(BaseException):
    """What a kill looks like from inside."""


def test_a_run_killed_between_points_ends_with_the_same_bytes(
    whole: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = 3
    out = tmp_path / "results"
    count = itertools.count(1)
    whole_rung: Callable[..., RungRecord] = measure_rung

    def dying(task: RungTask, **more: Any) -> RungRecord:
        if next(count) > after:
            raise Killed
        return whole_rung(task, **more)

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "measure_rung", dying)
        with pytest.raises(Killed):
            run_audit(PLAN, out, workers=1)
    assert len(list((out / "power").glob("*.json"))) == after
    run_audit(PLAN, out, workers=1)
    assert contents(out) == contents(whole[0])


def test_points_that_haste_measured_in_vain_change_no_cell(
    whole: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Curve, "wants", lambda self, point, read: True)
    monkeypatch.setattr(Curve, "power", lambda self, read: None)
    out = tmp_path / "results"
    run_audit(PLAN, out, workers=1)
    assert len(list((out / "power").iterdir())) > len(list((whole[0] / "power").iterdir()))
    monkeypatch.undo()
    run_audit(PLAN, out, workers=1)
    assert {n: c for n, c in contents(out).items() if n.startswith("cells")} == {
        n: c for n, c in contents(whole[0]).items() if n.startswith("cells")
    }


def test_a_damaged_point_is_measured_again(whole: tuple[Path, Run]) -> None:
    out, _ = whole
    before = contents(out)
    path = next((out / "power").glob("*.json"))
    path.write_bytes(path.read_bytes()[:50])
    run_audit(PLAN, out, workers=1)
    aside = path.with_name(f"{path.name}.corrupt")
    assert aside.is_file()
    aside.unlink()
    assert contents(out) == before


def test_without_the_key_nothing_is_measured_and_asking_later_keeps_the_cells(tmp_path: Path) -> None:
    out = tmp_path / "results"
    plan = PLAN.replace(power=False, defense=("none",))
    run = run_audit(plan, out, workers=1)
    assert run.cells[0].power is None and not (out / "power").exists()
    pictures = {path: path.stat().st_mtime_ns for path in (out / "cells").glob("*.npz")}
    again = run_audit(plan.replace(power=True), out, workers=1)
    assert again.cells[0].power is not None
    assert {path: path.stat().st_mtime_ns for path in (out / "cells").glob("*.npz")} == pictures


def test_attackers_that_never_move_show_no_power_and_the_row_says_so(tmp_path: Path) -> None:
    idle = PLAN.replace(ensemble=("inverting_gradients(steps=2, learning_rate=1e-9)",), defense=("gaussian_noise(std=1.0)",))
    (cell,) = run_audit(idle, tmp_path / "results", workers=1).cells
    assert cell.power is not None and not cell.power.shown and cell.power.a50 is None
    assert len(cell.power.planted) == len(cell.power.ladder) == 1  # nothing below the first that fails is tried
    assert "canary_found" in {check.name for check in cell.failures}


def test_an_estimate_counts_the_points() -> None:
    with_power = estimate_plan(PLAN, 1)
    bare = replace(with_power, power=())
    assert with_power.steps == bare.steps + sum(e.points * e.point.steps for e in with_power.power)
    assert with_power.seconds > bare.seconds and with_power.steps > bare.steps
    assert estimate_plan(PLAN.replace(power=False, defense=("none",)), 1).power == ()
    counts = {each.point.cell.defense: each.points for each in with_power.power}
    # One canary without a defense; four leaks with it, and four weaker settings; off is a cell of the plan.
    assert counts["none"] == 1 and counts["gaussian_noise(std=1.0)"] == 4 and sum(counts.values()) == 9
    assert json.loads(json.dumps(with_power.as_dict()))["power"][0]["points"] == 1


def test_the_key_stands_in_a_plan_and_in_no_cell() -> None:
    assert Plan.from_dict(PLAN.as_dict()) == PLAN and PLAN.as_dict()["audit"]["power"] is True
    assert "power" not in BASE.as_dict()
    assert pool.cell_key(BASE) == pool.cell_key(BASE)

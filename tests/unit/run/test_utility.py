"""Utility: which trainings a plan needs, that each is run and kept once, and that one command leads from there to a decision."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradveil.audit.materials import Materials
from gradveil.cli import main
from gradveil.errors import UsageError
from gradveil.run import jobs as audit_jobs
from gradveil.run.estimate import estimate_plan
from gradveil.run.grid import cells_of, check_inputs, check_plan
from gradveil.run.jobs import Progress, training_key
from gradveil.run.pool import run_audit
from gradveil.run.trainings import all_trainings, cell_utility, trainings_of
from gradveil.study.cell import Cell
from gradveil.study.codec import decode
from gradveil.study.federation import UtilitySettings
from gradveil.study.kept import KeptTraining
from gradveil.study.plan import Plan
from gradveil.study.proved import Guarantee
from gradveil.study.training import Training
from gradveil.study.training_result import TrainingRecord
from tests.unit.run.processes import kill, start_quickly, wait_for

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[3]
TINY = UtilitySettings(rounds=2, clients=4, clients_per_round=2, learning_rate=0.3, seeds=2)
PLAN = Plan.default(
    data="digits",
    model="mlp(hidden=16)",
    records=4,
    device="cpu",
    ensemble="linear_layer",
    lists="32",
    defense=["none", "gaussian_noise(std=0.3)"],
    utility=TINY,
)
KEY = "0123456789abcdef"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def told() -> list[Progress]:
    return []


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, told: list[Progress]) -> Path:
    """A finished run of two cells and four trainings."""
    folder = tmp_path_factory.mktemp("utility") / "results"
    run_audit(PLAN, folder, workers=1, on_progress=told.append)
    return folder


def trainings(out: Path) -> list[dict[str, Any]]:
    return [read(path) for path in sorted((out / "utility").glob("*.json")) if ".timing" not in path.name]


def cells(out: Path) -> list[dict[str, Any]]:
    return [read(out / "cells" / f"{key}.json") for key in read(out / "run.json")["cells"]]


def test_cells_of_one_defense_share_their_trainings() -> None:
    plan = PLAN.override(batch_size=[1, 2], ensemble=["linear_layer", "quick"], defense=["none", "pruning(rate=0.9)"])
    assert len(cells_of(plan)) == 8
    found = all_trainings(cells_of(plan), TINY)
    assert [(each.seed, each.defense) for each in found] == [
        (0, "none"),
        (0, "pruning(rate=0.9)"),
        (1, "none"),
        (1, "pruning(rate=0.9)"),
    ]


def test_the_undefended_training_is_there_without_being_asked_for() -> None:
    found = all_trainings([Cell(defense="pruning(rate=0.9)")], TINY.replace(seeds=1))
    assert [each.defense for each in found] == ["none", "pruning(rate=0.9)"]


def test_the_number_of_seeds_changes_no_training() -> None:
    cell = Cell(data="digits", model="mlp")
    few, many = (trainings_of(cell, TINY.replace(seeds=count)) for count in (1, 3))
    assert few == many[:1] and len(set(many)) == 3
    assert len({each.key() for each in many}) == 3


@pytest.mark.parametrize("change", ["rounds", "clients", "partition", "learning_rate", "test_share"])
def test_every_setting_is_part_of_the_key(change: str) -> None:
    base = Training.of(TINY, data="digits", model="mlp")
    value = {"partition": "dirichlet(alpha=1.0)"}.get(change, getattr(TINY, change) * 2)
    other = Training.of(TINY.replace(**{change: value}), data="digits", model="mlp")
    assert base.key() != other.key()
    assert base.key(data="a") != base.key(data="b")


def test_a_training_of_other_data_has_another_key(tmp_path: Path) -> None:
    materials = Materials()
    keys = []
    for name, value in (("a", 0.1), ("b", 0.2)):
        np.savez(tmp_path / f"{name}.npz", x=np.full((8, 4, 4), value, np.float32), y=np.arange(8) % 2)
        keys.append(training_key(Training.of(TINY, data=str(tmp_path / f"{name}.npz"), model="mlp"), materials))
    assert len(set(keys)) == 2


def test_the_folder_holds_every_training_once(out: Path) -> None:
    found = trainings(out)
    assert sorted((each["training"]["defense"], each["training"]["seed"]) for each in found) == [
        ("gaussian_noise(std=0.3)", 0),
        ("gaussian_noise(std=0.3)", 1),
        ("none", 0),
        ("none", 1),
    ]
    for each in found:
        assert (each["format"], len(each["rounds"])) == ("gradveil-utility-1", 2)
        assert each["final_accuracy"] == each["rounds"][-1]["accuracy"]
        assert 0.09 < each["chance"] < 0.12  # ten digits, about equally frequent
        timing = read(out / "utility" / f"{each['key']}.timing.json")
        assert len(timing["client_seconds"]) == 2 and timing["latency"]["ratio"] > 0
    assert {path.suffix for path in (out / "utility").iterdir()} == {".json"}  # no checkpoints are left


def test_a_cell_gets_its_utility_from_pairs(out: Path) -> None:
    accuracy = {(each["training"]["defense"], each["training"]["seed"]): each["final_accuracy"] for each in trainings(out)}
    bare, noisy = (cell["utility"] for cell in cells(out))
    assert bare["difference"]["per_seed"] == [0.0, 0.0] and bare["trainings"] == bare["baseline"] == noisy["baseline"]
    wanted = [accuracy["gaussian_noise(std=0.3)", seed] - accuracy["none", seed] for seed in (0, 1)]
    assert noisy["difference"]["per_seed"] == wanted
    assert noisy["pmm"]["value"] == pytest.approx(
        np.mean([accuracy["gaussian_noise(std=0.3)", s] / accuracy["none", s] for s in (0, 1)])
    )
    assert noisy["accuracy"]["n"] == 2 and noisy["settings"]["rounds"] == 2
    # Noise does not change what is sent: as many bytes both ways as without it.
    assert noisy["bytes"]["up"] == noisy["bytes"]["undefended_up"] > 0
    assert noisy["bytes"]["down"] == noisy["bytes"]["undefended_down"] > 0
    assert "put clipping right before it" in noisy["guarantee"]["reason"]


def test_a_guarantee_holds_for_every_seed() -> None:
    def record(seed: int, guarantee: Guarantee | None) -> TrainingRecord:
        return TrainingRecord(key="k", settings=decode(KeptTraining, {"seed": seed}), final_accuracy=0.5, guarantee=guarantee)

    def found(*guarantees: Guarantee | None) -> Guarantee | None:
        own = [record(seed, each) for seed, each in enumerate(guarantees)]
        told = cell_utility(UtilitySettings(), own, own)
        assert told is not None
        return told.guarantee

    weak, strong, none = Guarantee(epsilon=3.0, delta=1e-5), Guarantee(epsilon=2.0, delta=1e-5), Guarantee(reason="no noise")
    assert found(strong, weak) == weak
    assert found(strong, none) == none
    assert found(strong, None) is None  # of an older version


def test_the_document_names_what_the_files_hold(out: Path) -> None:
    text = (ROOT / "docs" / "results-format.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: set(re.findall(r'"(\w+)":', part)) for part in text.split("\n## ")}
    training, utility = trainings(out)[0], cells(out)[0]["utility"]
    assert {*training, *training["rounds"][0], *training["bytes"]} <= sections["utility/KEY.json"]
    assert {*read(out / "utility" / f"{training['key']}.timing.json")} <= sections["utility/KEY.timing.json"]
    assert {*utility, *utility["accuracy"], *utility["bytes"]} <= sections["utility in a cell"]


def test_progress_counts_trainings_and_their_rounds(out: Path, told: list[Progress]) -> None:
    assert (told[0].trainings, told[0].done_trainings, told[0].rounds) == (4, 0, 8)
    assert (told[-1].done_cells, told[-1].done_trainings, told[-1].done_rounds) == (2, 4, 8)
    rounds = [each.done_rounds for each in told]
    assert rounds == sorted(rounds) and set(rounds) == set(range(9))
    assert any(each.label == "training with none, seed 1" for each in told)


def test_a_second_run_does_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for room in ("cells", "utility") for path in (out / room).iterdir()}
    monkeypatch.setattr(audit_jobs, "train_once", None)
    monkeypatch.setattr(audit_jobs, "run_cell", None)
    result = run_audit(PLAN, out, workers=1)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert all(cell.accuracy is not None and cell.accuracy.n == 2 for cell in result.cells)


def test_more_seeds_keep_those_that_are_there(out: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(out, tmp_path / "copy")
    kept = {path.name: path.stat().st_mtime_ns for path in (folder / "utility").iterdir()}
    run_audit(PLAN.override(utility=TINY.replace(seeds=3)), folder, workers=1)
    assert {name: (folder / "utility" / name).stat().st_mtime_ns for name in kept} == kept
    assert [cell["utility"]["accuracy"]["n"] for cell in cells(folder)] == [3, 3]


def test_a_damaged_training_is_put_aside_and_run_again_alone(out: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(out, tmp_path / "copy")
    victim = cells(folder)[1]["utility"]["trainings"][0]
    path = folder / "utility" / f"{victim}.json"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    others = {p: p.stat().st_mtime_ns for p in (folder / "utility").iterdir() if not p.name.startswith(victim)}
    run_audit(PLAN, folder, workers=1)
    assert path.read_bytes() == whole  # the same bits again
    assert path.with_name(f"{path.name}.corrupt").is_file()
    assert {p: p.stat().st_mtime_ns for p in others} == others


def test_whole_pairs_count_before_all_trainings_are_done() -> None:
    def done(seed: int, accuracy: float) -> TrainingRecord:
        return TrainingRecord(key=KEY, settings=decode(KeptTraining, {"seed": seed}), final_accuracy=accuracy, chance=0.1)

    assert cell_utility(TINY, [done(0, 0.5), None], [None, done(1, 0.6)]) is None
    found = cell_utility(TINY, [done(0, 0.5), done(1, 0.4)], [done(0, 0.6), None])
    assert found is not None
    assert found.seeds == (0,) and found.difference is not None
    assert found.difference.value == pytest.approx(-0.1) and found.difference.low is None


def test_the_estimate_counts_trainings() -> None:
    found = estimate_plan(PLAN, workers=1)
    assert [(each.training.defense, each.seeds) for each in found.trainings] == [("none", 2), ("gaussian_noise(std=0.3)", 2)]
    assert found.seconds > sum(row.seconds for row in found.rows)
    assert len(found.as_dict()["trainings"]) == 2
    alone = PLAN.replace(utility=None)
    assert estimate_plan(alone, workers=1).trainings == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[utility]\nround = 3", "[utility] has no key 'round'; did you mean 'rounds'?"),
        ("[utility]\nrounds = 0", "rounds in [utility] is 0; give a whole number of at least 1"),
        ("[utility]\nrounds = [1, 2]", "rounds in [utility] is a list"),
        ("[utility]\nclients = 2\nclients_per_round = 3", "clients_per_round is 3 and there are 2 clients"),
        ("[utility]\ntest_share = 1", "give a share between 0 and 1"),
        ("[utility]\nlearning_rate = -1", "give a number above 0"),
        ("[utility]\npartition = 'dirichlt'", "did you mean 'dirichlet'?"),
        ("[utility]\npartition = 'dirichlet(alpha=-1)'", "alpha is -1"),
        ("[utility]\naggregation = 'fedavgg'", "did you mean 'fedavg'?"),
        ("[utility]\nseeds = 0", "seeds in [utility] is 0"),
        ("utility = 3", "write it as a section"),
        ("[utilty]\nrounds = 3", "did you mean 'utility'?"),
    ],
)
def test_a_wrong_utility_gets_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        check_plan(Plan.from_toml(tmp_path / "plan.toml"))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_section_asks_with_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[utility]\n")
    plan = Plan.from_toml(tmp_path / "plan.toml")
    assert plan.utility == UtilitySettings() and plan.utility.seeds == 3
    assert Plan.from_dict(plan.as_dict()) == plan
    assert "utility" not in Plan().as_dict() and Plan().utility is None
    assert "rounds = 20" in plan.to_toml().partition("[utility]")[2] and "[utility]" not in Plan().to_toml()


def test_too_many_clients_for_the_records_are_noticed_before_any_work(tmp_path: Path) -> None:
    np.savez(tmp_path / "few.npz", x=np.random.default_rng(0).random((12, 4, 4), dtype=np.float32), y=np.arange(12) % 2)
    plan = Plan.default(data=str(tmp_path / "few.npz"), model="mlp", records=4, defense="none", utility=TINY.replace(clients=40))
    with pytest.raises(UsageError, match="40 clients cannot share"):
        check_inputs(plan)


COMMAND = (
    *("audit", "--data", "digits", "--model", "mlp(hidden=32)", "--records", "16", "--device", "cpu", "--quiet"),
    *("--defense", "none", "--defense", "gaussian_noise(std=0.3)", "--ensemble", "linear_layer"),
    *("--risk", "off", "--lists", "32", "--utility", "3", "--workers", "1"),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one command leaves behind: two cells, six trainings and a report."""
    folder = tmp_path_factory.mktemp("measured") / "out"
    assert main([*COMMAND, "--out", str(folder)]) == 0
    return folder


def test_one_command_measures_and_another_decides(measured: Path, capsys: Captured) -> None:
    out = measured
    assert main([*COMMAND, "--out", str(out), "--json"]) == 0  # all is there already
    found = json.loads(capsys.readouterr().out)
    assert [row["utility"]["accuracy"]["n"] for row in found["cells"]] == [3, 3]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Privacy against accuracy" in page and "Accuracy by round" in page

    assert main(["recommend", str(out), "--max-accuracy-drop", "90", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recommended"] == "gaussian_noise(std=0.3)"
    assert main(["recommend", str(out), "--max-accuracy-drop", "0"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("none qualifies: of 1 defense, gaussian_noise(std=0.3) comes nearest, but ") and said.err == ""


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["recommend", "nowhere", "--max-time", "1"], "there is no results folder"),
        (["recommend", ".", "--max-time", "1"], "has no run.json"),
        (["recommend", ".", "--max-time", "soon"], "is not a valid float"),
        (["recommend", "."], "give at least one limit"),
        (["audit", "--utility", "0"], "--utility is 0; ask for at least 1 round"),
        (["audit", "--utility", "2", "--update", "plan.toml", "--defense", "none"], "leave utility out with --update"),
    ],
)
def test_bad_input_is_one_sentence(
    command: list[str], says: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text("")
    assert main(command) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and said.out == ""


def whole(out: Path, room: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / room).glob("????????????????.json"))}


@pytest.mark.slow
def test_a_run_killed_among_its_trainings_ends_with_the_same_bytes(measured: Path, tmp_path: Path) -> None:
    one, two = measured, tmp_path
    first = start_quickly([*COMMAND, "--out", str(two)], two / "said")
    wait_for(lambda: whole(two, "utility") or first.poll() is not None)
    kill(first)
    kept = {path: path.stat().st_mtime_ns for path in (two / "utility").glob("????????????????.json")}
    if len(kept) == 6:
        pytest.skip("the run ended before it could be killed")
    assert main([*COMMAND, "--out", str(two)]) == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept and kept
    assert whole(two, "utility") == whole(one, "utility") and len(whole(one, "utility")) == 6
    assert whole(two, "cells") == whole(one, "cells") and len(whole(one, "cells")) == 2

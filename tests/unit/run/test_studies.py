"""A tiny study from its file to its table: run, stopped, continued, packed into one file that names nobody's folders."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from gradveil.attacks.ensembles import resolve
from gradveil.cli import main
from gradveil.errors import UsageError
from gradveil.models import MODELS
from gradveil.registry import import_object, parse_call
from gradveil.run import jobs as audit_jobs
from gradveil.run import pool
from gradveil.run.jobs import Job
from gradveil.run.ladders import expand_defense
from gradveil.run.studies import cells_of_study, place_files, run_study
from gradveil.storage.study_file import read_study
from gradveil.study.published import ScriptedStudy, Study, load_study

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[3]
TEXT = """
[study]
title = "two defenses"
notes = "on two records"

[study.rows]
"none" = "nothing"
"pruning" = "Prune"

[audit]
records = 2
ensemble = "inverting_gradients(steps=3)"
device = "cpu"
risk = "off"

[data]
source = "elsewhere.npz"

[grid]
model = "own_net.py:make"
defense = ["none", "pruning"]
"""
ACCURACY = """
[study]
table = "accuracy"

[audit]
device = "cpu"

[data]
source = "digits"

[grid]
model = "mlp(hidden=8)"
defense = ["none", "pruning"]

[utility]
rounds = 1
clients = 4
clients_per_round = 2
seeds = 2
"""


def study_file(folder: Path, text: str) -> str:
    path = folder / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_from_a_file_to_a_table_and_a_report(own: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    do_job = audit_jobs.do_job

    def counted(job: Job, *rest: object) -> str:
        if len(done) == 1 and stopping:
            raise KeyboardInterrupt
        done.append(job.label)
        return do_job(job, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "do_job", counted)
    command = ["study", "run", study_file(own, TEXT), "--data", str(own / "own.npz"), "--workers", "1", "--quiet"]
    stopping = True
    assert main(command) == 130
    assert done == ["pruning(rate=0.9)"]
    assert not Path("results/tiny.json.xz").exists()
    stopping = False
    assert main(command) == 0
    assert done == ["pruning(rate=0.9)", "none"]
    first = Path("results/tiny.json.xz").read_bytes()
    content = read_study(Path("results/tiny.json.xz"))
    assert main(command) == 0
    assert len(done) == 2, "what is done was run again"

    assert content["command"] == "gradveil study run studies/tiny.toml"
    assert [cell["cell"]["defense"] for cell in content["cells"]] == ["none", "pruning(rate=0.9)"]
    assert {cell["cell"]["data"] for cell in content["cells"]} == {"own.npz"}
    assert content["plan"]["data"]["source"] == "own.npz"
    assert content["provenance"]["code"] and content["provenance"]["commit"] and content["provenance"]["platform"]
    assert set(content["timings"]) == {cell["key"] for cell in content["cells"]}
    assert str(own).encode() not in first and str(own) not in str(content)

    capsys.readouterr()
    assert main(["study", "table", "results/tiny.json.xz"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split(" | ")[0] for line in lines]
    assert lines[0].startswith("| defense | label | list | strongest: identified | plain: identified | PSNR, dB | informed: ")
    assert heads == ["| defense", "|" + "---|" * 12, "| nothing", "| Prune", "", "on two records"]
    assert main(["report", "results/tiny.json.xz", "--out", "page.html"]) == 0
    assert "pruning" in Path("page.html").read_text(encoding="utf-8")
    assert main(["report", "results/tiny.json.xz"]) == 0
    assert Path("tiny.html").is_file()


def test_accuracies_are_trained_for_and_nothing_is_attacked(own: Path, capsys: Captured) -> None:
    assert (
        main(["study", "run", study_file(own, ACCURACY), "--workers", "1", "--out", "a.json.xz", "--work", "w", "--quiet"]) == 0
    )
    content = read_study(Path("a.json.xz"))
    assert content["cells"] == []
    assert len(content["trainings"]) == 4
    assert len(content["training_timings"]) == 4
    capsys.readouterr()
    assert main(["study", "table", "a.json.xz", "--json"]) == 0
    assert "| `pruning` | " in capsys.readouterr().out
    assert main(["report", "a.json.xz"]) == 2


def test_grids_share_cells(own: Path) -> None:
    grids = '\n[[study.grids]]\nbatch_size = [1, 2]\n\n[[study.grids]]\nbatch_size = 1\nsource = "own.npz"\n'
    study = place_files(Study.from_toml(Path(study_file(own, TEXT + grids))), data=[own / "elsewhere.npz"])
    with pytest.raises(UsageError, match=r"elsewhere\.npz"):
        cells_of_study(study)
    study = Study.from_toml(Path(study_file(own, TEXT.replace("elsewhere", "own") + grids)))
    assert len(cells_of_study(study)) == 4


def test_files_are_found_by_name(own: Path) -> None:
    study = Study.from_toml(Path(study_file(own, TEXT)))
    assert place_files(study, data=[Path("any.npz")], device="cuda").plan.data == ("any.npz",)
    assert place_files(study, device="cuda").plans[0].device == "cuda"
    with pytest.raises(UsageError, match="the study names the weights files none"):
        place_files(study, weights=[Path("w.pt")])
    with pytest.raises(UsageError, match=r"any\.npz"):
        run_study(place_files(study, data=[Path("any.npz")]), work=own / "w", out=own / "r.json.xz")


@pytest.mark.parametrize("file", sorted(ROOT.glob("studies/*.toml")), ids=lambda file: file.stem)
def test_everything_that_published_studies_name_exists(file: Path) -> None:
    study = load_study(file)
    assert study.layout.title
    if isinstance(study, ScriptedStudy):
        units = import_object(f"{study.script}:units")(SimpleNamespace(**study.settings))
        assert list(units), "nothing to measure"
        return
    for plan in study.plans:
        assert [spelling for text in plan.defense for spelling in expand_defense(text)]
        assert [resolve(ensemble).name for ensemble in plan.ensemble]
        for model in plan.model:
            name, _ = parse_call(model)
            assert Path(name.partition(":")[0]).is_file() if ":" in name else MODELS.get(name)
    spelt = {text for plan in study.plans for text in (*plan.defense, *plan.model, *plan.ensemble)}
    if study.layout.table == "attacks" or not study.attacks:
        assert {spelling for spelling, _ in study.layout.rows} <= spelt, "a row that nothing fills"

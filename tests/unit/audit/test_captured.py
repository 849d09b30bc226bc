"""A captured update: attacked as it is, compared with the user's records, and refused in one sentence where it does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from gradveil.audit import captured
from gradveil.audit.captured import audit_captured
from gradveil.audit.scene import build_learner, build_subject, load_cell_data
from gradveil.cli import main
from gradveil.client.update import run_client
from gradveil.defenses import build_defense
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.records import Payload
from gradveil.study.cell import Cell
from gradveil.wire import write_payload
from tests.unit.audit.small import CELL, digits

Captured = pytest.CaptureFixture[str]

FILE = Path("update.safetensors")


def send(rows: list[int], defense: str = "none", **changes: object) -> Payload:
    """Return what a client would send for some rows of the data, with randomness the auditor does not know."""
    cell = CELL.replace(defense=defense, batch_size=len(rows), **changes)
    built = build_defense(defense)
    return run_client(build_learner(cell, digits(), built), digits().batch(rows), built, Seed(987)).payload


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def attack(*options: str, model: str = "mlp(hidden=16)", out: str = "out", code: int = 0) -> None:
    common = ("--data", "digits", "--model", model, "--device", "cpu", "--ensemble", "linear_layer", "--out", out)
    assert main(["audit", "--update", str(FILE), *common, *options]) == code


def complaint(capsys: Captured, *options: str, **changes: str) -> str:
    attack(*options, **changes, code=2)
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert not Path("out").exists()
    return said.err


def test_the_record_behind_an_undefended_update_is_the_nearest(capsys: Captured) -> None:
    write_payload(send([42]), FILE)
    attack("--json")
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "gradveil-captured-1"
    (nearest,) = found["nearest"]
    assert nearest["row"] == 42 and nearest["psnr"] > 50 > 30 > nearest["next_psnr"]
    assert found["labels"] == [int(digits().targets[42])]
    assert found["unexplained"]["best"] < 1e-6 < 0.1 < found["unexplained"]["null"]
    assert (found["candidates"], found["recipe"], found["update"]) == (len(digits()), "linear_layer", FILE.name)
    with np.load("out/captured.npz", allow_pickle=False) as arrays:
        assert np.abs(arrays["reconstruction"] - digits().inputs[42:43].numpy()).max() < 1e-3

    attack()
    said = capsys.readouterr().out
    assert "of 1797 records, the nearest is row 42 (60.0 dB)" in said
    assert "is for you to say: the audit does not know the truth" in said
    written = json.loads(Path("out/captured.json").read_text())
    assert {name: found[name] for name in ("nearest", "labels", "unexplained")} == {
        name: written[name] for name in ("nearest", "labels", "unexplained")
    }


def test_known_noise_is_the_unit_of_what_is_left(capsys: Captured) -> None:
    write_payload(send([42], "gaussian_noise(std=0.01)"), FILE)
    attack("--defense", "gaussian_noise(std=0.01)", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["nearest"][0]["row"] == 42
    assert found["unexplained"]["unit"] == "power of the known noise"
    assert found["unexplained"]["best"] == pytest.approx(1.0, abs=0.15) and found["unexplained"]["null"] > 2
    attack("--defense", "gaussian_noise(std=0.01)")
    assert "times the power of the known noise" in capsys.readouterr().out


def test_a_sparse_update_and_a_batch_are_read() -> None:
    write_payload(send([42], "pruning(rate=0.5)"), FILE)
    found = audit_captured(FILE, CELL.replace(defense="pruning(rate=0.5)"), Path("sparse"))
    assert found.record["nearest"][0]["row"] == 42
    write_payload(send([3, 9]), FILE)
    found = audit_captured(FILE, CELL.replace(batch_size=2, ensemble="dlg(steps=30)"), Path("two"))
    assert sorted(row["row"] for row in found.record["nearest"]) == [3, 9]


def test_a_plain_file_of_tensors_counts_as_many_examples_as_one_says() -> None:
    for rows in ([42], [3, 9]):
        save_file(dict(send(rows).streams["weights"]), FILE)
        found = audit_captured(FILE, CELL.replace(batch_size=len(rows)), Path("out"))
        assert len(found.record["nearest"]) == len(rows)


def test_what_does_not_fit_is_one_sentence(capsys: Captured) -> None:
    write_payload(send([42]), FILE)
    wrong = complaint(capsys, model="mlp(hidden=8)")
    assert "the captured update does not fit model and defense" in wrong and "has shape" in wrong
    assert "lacks" in complaint(capsys, model="lenet")
    assert "both sides must run the same defense" in complaint(capsys, "--defense", "pruning(rate=0.5)")
    assert "set minibatch to at most 1" in complaint(capsys, "--minibatch", "4", "--local-epochs", "1")
    assert "a client counts one of them" in complaint(capsys, "--local-steps", "2", "--local-epochs", "1")
    assert "the update claims 1 examples, not 4; say --batch-size 1" in complaint(capsys, "--batch-size", "4")
    write_payload(send([3, 9]), FILE)
    assert "the update claims 2 examples, not 1; say --batch-size 2" in complaint(capsys)
    FILE.write_bytes(FILE.read_bytes()[:100])
    assert "not a safetensors file" in complaint(capsys)


def test_an_update_of_other_weights_names_nobody(capsys: Captured) -> None:
    """The client trained other weights than the attacker is told of: what was read off the first layer explains nothing."""
    write_payload(send([42], seed=5), FILE)
    attack(code=3)
    said = capsys.readouterr()
    assert "the nearest is row" not in said.out and "those a new model has with seed 0; give --weights" in said.out
    assert said.err.count("\n") == 1 and "check --weights" in said.err
    assert json.loads(Path("out/captured.json").read_text())["nearest"], "nothing is lost"


TRAINED: dict[str, Any] = {"local_epochs": 2, "minibatch": 1, "momentum": 0.5, "learning_rate": 0.02}
FLAGS = ("--local-epochs", "2", "--minibatch", "1", "--momentum", "0.5", "--learning-rate", "0.02", "--batch-size", "2")


def test_an_update_of_epochs_takes_the_flags_of_every_training(capsys: Captured) -> None:
    write_payload(send([3, 9], **TRAINED), FILE)
    plan = Path("plan.toml")
    plan.write_text("[audit]\nensemble = 'dlg(steps=40)'\n[grid]\ndefense = 'none'\n")
    told = ("--data", "digits", "--model", "mlp(hidden=16)", "--device", "cpu", "--out", "out", *FLAGS)
    assert main(["audit", str(plan), "--update", str(FILE), *told, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(row["row"] for row in found["nearest"]) == [3, 9]
    assert found["cell"]["local_epochs"] == 2 and found["unexplained"]["best"] < 0.1


def test_an_update_of_an_unknown_training_asks_how_the_client_trained(capsys: Captured) -> None:
    write_payload(send([3, 9], **TRAINED), FILE)
    attack("--batch-size", "2", code=3)
    said = capsys.readouterr()
    assert "the nearest is row" not in said.out and said.err.count("\n") == 1
    assert "without --local-epochs or --local-steps the update is taken for the gradient of one batch" in said.err
    assert "times as large as one that this training makes of other records" in said.out
    attack("--batch-size", "2", "--local-epochs", "1", "--learning-rate", "50", code=3)
    said = capsys.readouterr()
    assert "--local-epochs or --local-steps, --minibatch, --momentum" in said.err and "is taken for" not in said.err


def test_an_update_of_zeros_is_refused(capsys: Captured) -> None:
    save_file({name: 0 * value for name, value in send([42]).streams["weights"].items()}, FILE)
    assert "zero everywhere" in complaint(capsys)


def test_settings_without_an_answer_are_one_sentence() -> None:
    write_payload(send([42]), FILE)
    with pytest.raises(UsageError, match="set rounds = 1"):
        audit_captured(FILE, CELL.replace(rounds=2), Path("out"))
    write_payload(send([42], model="convnet(width=1)"), FILE)
    with pytest.raises(UsageError, match="no attack of 'linear_layer' applies"):
        audit_captured(FILE, CELL.replace(model="convnet(width=1)"), Path("out"))


def test_a_folder_is_refused_before_the_work_and_its_results_are_kept(capsys: Captured) -> None:
    write_payload(send([42]), FILE)
    Path("file").write_text("")
    assert "cannot write to 'file/out'" in complaint(capsys, out="file/out")
    small = ("--data", "digits", "--model", "mlp(hidden=16)", "--defense", "none", "--ensemble", "linear_layer")
    assert main(["audit", *small, "--records", "2", "--out", "out"]) == 0
    before = {path.name: path.read_bytes() for path in Path("out").iterdir() if path.is_file()}
    attack()
    after = {path.name: path.read_bytes() for path in Path("out").iterdir() if path.is_file()}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"captured.json", "captured.npz"}


def test_the_attacker_of_a_captured_update_keeps_pictures_to_learn_from() -> None:
    cell = Cell(data="digits", model="mlp", records=1)
    subject = build_subject(cell, load_cell_data(cell), rehearsals=0)
    made = subject.targets[0].observation
    seen = captured._observe(subject, made.payloads[0])
    assert seen.public is None and made.public is not None
    assert seen.pictures is made.public and made.pictures is made.public


def test_a_captured_result_says_where_its_draws_begin() -> None:
    write_payload(send([42], seed=3), FILE)
    attack("--seed", "3")
    found = json.loads(Path("out/captured.json").read_text())
    assert found["provenance"]["seed"] == found["cell"]["seed"] == 3 and found["nearest"][0]["row"] == 42
    assert found["provenance"]["device"].startswith("cpu") and found["tries"] >= 1


def test_a_captured_result_knows_its_folder_and_how_to_run_it_again(tmp_path: Path) -> None:
    write_payload(send([42]), FILE)
    found = audit_captured(FILE, CELL.replace(device="cpu"), tmp_path / "there", command="again")
    assert found.out == tmp_path / "there" and (found.out / "captured.json").is_file()
    assert (found.record["command"], found.record["update"]) == ("again", FILE.name)

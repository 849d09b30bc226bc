"""One cell, from clients to numbers, in every setting a plan can ask for; all of it tiny."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradveil.attacks.referee import Referee, Verdict
from gradveil.audit.cell import _pseudonym, run_cell
from gradveil.audit.scene import build_learner
from gradveil.cli import main
from gradveil.defenses import build_defense
from gradveil.errors import UsageError
from gradveil.records import Observation, Reconstruction
from gradveil.study.codec import encode
from gradveil.tensors import Named
from tests.unit.audit.small import CELL, digits, make_subject

Captured = pytest.CaptureFixture[str]

MATCHING = "inverting_gradients(steps=5, signed=False)"
BATCH_NORM = {"model": "convnet(width=1, norm='batch')", "batch_size": 2, "ensemble": MATCHING}


def measure(**changes: object) -> dict[str, Any]:
    """Return the record of a small cell; no number in it is NaN or infinite."""
    record: dict[str, Any] = encode(run_cell(CELL.replace(**changes), digits()).result)
    json.dumps(record, allow_nan=False)
    return record


def check(record: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in record["checks"] if each["name"] == name)


@pytest.mark.usefixtures("untouched_global_rng")
def test_an_undefended_perceptron_is_read_off_its_first_layer() -> None:
    record = measure(records=3)
    assert record["selected"]["identified"]["count"] == record["n"] == 3
    assert record["selected"]["psnr"]["median"] == 60
    assert record["informed"] is None and record["plain"] is not None
    assert record["bytes"]["up"] == record["bytes"]["dense"] == 4 * (64 * 16 + 16 + 16 * 10 + 10)
    assert (record["candidates"], record["chance"]) == (256, 1 / 256)
    assert len({row["pseudonym"] for row in record["records"]}) == 3


def test_steps_are_counted_as_they_are_planned() -> None:
    told: list[tuple[int, int]] = []
    result = run_cell(
        CELL.replace(ensemble=MATCHING, records=2, steps=3), digits(), report=lambda done, planned: told.append((done, planned))
    )
    assert told[-1] == (3 * (2 + 2), 3 * (2 + 2))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert result.result.timing.attack_steps == 12


def test_a_secure_aggregate_shows_only_a_sum() -> None:
    record = measure(clients=2)
    assert (record["threat"]["clients"], record["n"], len(record["records"])) == (2, 4, 4)
    assert "only the secure aggregate of 2 clients" in record["threat"]["sentences"][0]
    alone = measure(batch_size=2)
    assert record["bytes"] == alone["bytes"]
    # Without a defense the mean of two clients with one record each is the gradient of a batch of two.
    assert record["selected"]["psnr"]["median"] == pytest.approx(alone["selected"]["psnr"]["median"], abs=0.5)


@pytest.mark.parametrize("defense", ["none", "gaussian_noise(std=0.01)"])
def test_several_rounds_are_seen(defense: str) -> None:
    record = measure(rounds=2, defense=defense, ensemble=MATCHING, records=2)
    assert record["threat"]["rounds"] == 2
    assert "in 2 rounds on the same data" in record["threat"]["sentences"][0]
    assert check(record, "matching_loss_fell")["level"] == "ok"
    assert (record["informed"] is None) == (defense == "none")


def test_local_steps_of_sgd_still_give_a_perceptron_away() -> None:
    record = measure(local_steps=3)
    assert record["cell"]["shares"] == "weights"
    assert record["selected"]["identified"]["count"] == record["n"] == 4


@pytest.mark.parametrize("steps", [1, 3])
def test_local_steps_of_adam_are_replayed(steps: int) -> None:
    record = measure(local_steps=steps, optimizer="adam", ensemble=MATCHING, records=2)
    assert record["cell"]["shares"] == "weights"
    assert check(record, "gradient_alive")["level"] == "ok"
    assert check(record, "truth_is_minimum")["level"] == "ok"


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_mode_of_batch_norm_is_the_same_on_both_sides_and_said(mode: str) -> None:
    record = measure(batch_norm=mode, **BATCH_NORM)
    assert record["cell"]["batch_norm"] == mode
    assert f"BatchNorm in {mode} mode" in check(record, "same_mode")["sentence"]
    assert check(record, "truth_is_minimum")["level"] == "ok"


def test_batch_norm_of_the_batch_and_gradients_of_examples_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="set batch_norm = 'eval'"):
        measure(batch_norm="train", defense="example_clipping(bound=1.0)", **BATCH_NORM)


def test_given_labels_are_flagged() -> None:
    told = measure(known_labels=True, ensemble=MATCHING, records=2)
    assert check(told, "oracle_labels")["level"] == "warn"
    assert "labels" in told["threat"]["knows"]
    assert told["selected"]["label_accuracy"]["value"] == 1
    assert check(measure(ensemble=MATCHING, records=2), "oracle_labels")["level"] == "ok"


def test_a_trained_model_is_another_model() -> None:
    defense = build_defense("none")

    def weights(state: str) -> Named:
        return build_learner(CELL.replace(state=state), digits(), defense).weights

    fresh, trained, again = (weights(state) for state in ("untrained", "trained(steps=5)", "trained(steps=5)"))
    assert all(bool((trained[name] != value).any()) for name, value in fresh.items())
    assert all(bool((trained[name] == value).all()) for name, value in again.items())
    record = measure(state="trained(steps=5)")
    assert record["cell"]["state"] == "trained(steps=5)"
    assert record["selected"]["identified"]["count"] == 4


def test_no_attack_that_applies_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="no attack of 'linear_layer' applies to this model"):
        measure(model="convnet(width=1)")


def audited(*options: str) -> Path:
    """Run an audit of the user's own things, and return its folder."""
    common = ("--data", "own.npz", "--records", "3", "--workers", "1", "--device", "cpu", "--quiet", "--out", "out")
    assert main(["audit", *common, "--ensemble", "linear_layer", *options]) == 0
    return Path("out")


def cells(out: Path) -> list[dict[str, Any]]:
    keys = json.loads((out / "run.json").read_text())["cells"]
    return [json.loads((out / "cells" / f"{key}.json").read_text()) for key in keys]


@pytest.mark.usefixtures("own")
def test_a_users_model_weights_and_defense_are_audited(capsys: Captured) -> None:
    out = audited("--model", "own_net.py:make(width=12)", "--weights", "own_net.safetensors", "--defense", "none")
    (given,) = cells(out)
    assert (given["cell"]["state"], given["cell"]["weights"]) == ("given", "own_net.safetensors")
    assert given["selected"]["identified"]["count"] == 3
    (fresh,) = cells(audited("--model", "own_net.py:make", "--defense", "none"))
    assert fresh["cell"]["state"] == "untrained"
    assert fresh["key"] != given["key"]
    (own,) = cells(audited("--model", "own_net.py:make", "--defense", "own_defense.py:Shrinking(factor=0.25)"))
    assert own["defense"]["spelling"] == "own_defense.py:Shrinking(factor=0.25)"
    assert (own["defense"]["parts"], own["defense"]["acts_on"]) == (["shrinking"], ["update"])
    assert own["selected"]["identified"]["count"] == 3, "a factor hides nothing from a ratio"
    assert "own_defense.py:Shrinking(factor=0.25)" in capsys.readouterr().out


@pytest.mark.usefixtures("own")
def test_pictures_and_names_of_users_stay_out_of_the_report(capsys: Captured) -> None:
    out = audited("--model", "mlp(hidden=16)", "--defense", "none")
    shared = (out / "report.html").read_text()
    assert "data:image" not in shared
    assert "Ms 1" not in shared
    assert not (out / "report-private.html").exists()
    audited("--model", "mlp(hidden=16)", "--defense", "none", "--private")
    assert "data:image" in (out / "report-private.html").read_text()
    assert "data:image" not in (out / "report.html").read_text()
    (cell,) = cells(out)
    owners = [row["owner"] for row in cell["records"]]
    assert all(owner.startswith("o-") for owner in owners) and "Ms" not in json.dumps(cell)


def test_a_users_defense_may_register_itself(own: Path, capsys: Captured) -> None:
    text = Path("own_defense.py").read_text().replace("import Defense, DefenseCard", "import DEFENSES, Defense, DefenseCard")
    Path("own_registered.py").write_text(text + "\nDEFENSES.register(Shrinking.card)(Shrinking)\n")
    (cell,) = cells(audited("--model", "mlp(hidden=16)", "--defense", "own_registered.py:Shrinking"))
    assert cell["defense"]["parts"] == ["shrinking"]


def test_an_exact_reconstruction_is_selected() -> None:
    record = measure(rounds=2, ensemble="quick-4", steps=5)
    assert record["best_by_truth"]["identified"]["count"] == 4
    assert record["regret_db"]["worst"] == 0


def test_the_headline_is_what_the_referee_chose_even_where_it_chose_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    def badly(self: Referee, observation: Observation, candidates: Sequence[Reconstruction]) -> Verdict:
        scores = self.scores(observation, candidates)
        return Verdict(scores.index(max(scores)), scores, [])

    monkeypatch.setattr(Referee, "select", badly)
    record = measure(ensemble="quick-4", steps=5, records=2)
    (row,) = [each for each in record["attackers"] if each["chosen"] == 2]
    assert record["selected"]["psnr"]["median"] == row["summary"]["psnr"]["median"]
    assert record["best_by_truth"]["psnr"]["median"] > record["selected"]["psnr"]["median"] + 1
    assert record["regret_db"]["worst"] > 1
    assert check(record, "regret")["level"] != "ok"


def test_medians_are_the_same_wherever_they_stand() -> None:
    """Four records, an even number: the lower of the two in the middle is not their median."""
    record = measure(ensemble="quick-4", steps=5)
    medians = {name: null["psnr"]["median"] for name, null in record["nulls"].items()}
    assert record["bar"]["psnr"]["value"] == max(medians.values()) == medians[record["bar"]["psnr"]["null"]]
    assert record["regret_db"]["median"] == pytest.approx(statistics.median(row["regret_db"] for row in record["records"]))


def test_the_null_of_a_single_record_is_another_record() -> None:
    record = measure(records=1)
    assert record["nulls"]["derangement"]["psnr"]["median"] < 30
    assert check(record, "better_than_null")["level"] == "ok"


def test_a_result_holds_one_picture_per_record() -> None:
    found = run_cell(CELL.replace(records=3, batch_size=2), digits())
    assert {value.shape for value in found.pictures.values()} == {(4, 1, 8, 8)}
    assert len(found.result.records) == found.result.n == 4


def test_a_pseudonym_cannot_be_guessed_from_what_is_shared() -> None:
    """The seed is in every report and the digest of the data in alpha.json: with both, a list of names must still not help."""
    subject = make_subject()
    shared = f"{subject.dataset.digest()}|{subject.cell.seed}|r|someone"
    assert _pseudonym("r", "someone", subject) != f"r-{hashlib.sha256(shared.encode()).hexdigest()[:6]}"
    assert _pseudonym("r", "someone", subject) == _pseudonym("r", "someone", make_subject(seed=subject.cell.seed))
    assert subject.dataset.digest("pseudonyms") != subject.dataset.digest()

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from gradveil.cli import main
from gradveil.defenses import ClientView, Defense, DefenseCard, State, adapt, build_defense
from gradveil.errors import UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch, Update
from gradveil.risk.calibration import built_in_calibration, calibrate, read_alpha
from gradveil.risk.exposure import Assessment, RecordRisk, assess, defended_release
from gradveil.risk.invre import risk_score
from gradveil.spectra.spectrum import Spectrum, spectrum
from gradveil.study.codec import encode

SHAPE = (1, 6, 6)
BATCH = Batch(torch.rand((3, *SHAPE), generator=Seed(1).generator("inputs")), torch.tensor([0, 1, 2]))


def learner() -> Learner:
    model = build_model("mlp", input_shape=SHAPE, classes=3, seed=Seed(0))
    return Learner.of(model, loss_by_name("cross_entropy"))


def scored(spelling: str, mode: str = "auto", form: str = "inverse") -> Assessment:
    return assess(learner(), BATCH, build_defense(spelling), alpha=0.9, mode=mode, model="mlp", noise_form=form)


def test_a_stronger_defense_scores_lower() -> None:
    for name, knob, strengths in (
        ("gaussian_noise", "std", (1e-4, 0.3, 10.0)),
        ("data_noise", "std", (0.01, 0.5, 3.0)),
    ):
        for form in ("paper", "inverse"):
            means = [scored("none").mean_invre, *(scored(f"{name}({knob}={value})", form=form).mean_invre for value in strengths)]
            assert all(weaker > stronger for weaker, stronger in pairwise(means)), (name, form)
        assert means[-1] < 0.05 < means[0], name


def test_pruned_entries_are_rows_that_are_gone() -> None:
    release = defended_release(learner(), BATCH.inputs[0], BATCH.targets[0], build_defense("pruning(rate=0.99)"), Seed(0))
    plain = defended_release(learner(), BATCH.inputs[0], BATCH.targets[0], build_defense("none"), Seed(0))
    J, whole = (each.jacobian.push(torch.eye(36, dtype=torch.float64)).T for each in (release, plain))
    kept = (J != 0).any(1)
    assert 0 < int(kept.sum()) < 0.05 * len(J)
    assert torch.allclose(J[kept], whole[kept])
    by_rows, dense = (spectrum(release.jacobian, mode=mode) for mode in ("gram", "dense"))
    # Rows are skipped only where the matrix is too large to hold at once.
    small = type(release.jacobian)(release.jacobian.share, release.jacobian.at, working_bytes=1)
    streamed = spectrum(small, mode="gram")
    for found in (by_rows, streamed):
        assert risk_score(found, alpha=0.9).invre == pytest.approx(risk_score(dense, alpha=0.9).invre, abs=1e-9)


def test_modes_agree_and_say_what_they_did() -> None:
    found = {mode: scored("none", mode) for mode in ("dense", "gram", "leading")}
    for mode, each in found.items():
        assert {record.mode for record in each.records} == {mode}
        assert each.mean_invre == pytest.approx(found["dense"].mean_invre, abs=1e-5 if mode == "gram" else 0.02)


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("clipping(bound=0.1) + gaussian_noise(std=0.1)", ""),
        ("pfgd", ""),
        ("svdefense", ""),
        ("precode", "randomness"),
        ("laplace_noise(scale=0.1)", ""),
    ],
)
def test_every_kind_of_defense_has_a_finite_score(spelling: str, words: str) -> None:
    defense = build_defense(spelling)
    adapted = adapt(defense, build_model("mlp", input_shape=SHAPE, classes=3, seed=Seed(0)))
    loss = loss_by_name("cross_entropy")
    own = Learner.of(adapted.model, adapted.adapt_loss(loss) if adapted.adapt_loss else loss)
    own = own.replace(noise={name: torch.zeros((1, 1, *shape)) for name, shape in adapted.noise_shapes.items()})
    each = assess(own, BATCH, defense, alpha=0.9)
    assert all(0 <= record.invre <= 1 for record in each.records)
    assert words in " ".join(each.notes)
    json.dumps(encode(each), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Secret(Defense):
    """Does something of which its author told no attacker."""

    card: ClassVar[DefenseCard] = DefenseCard(name="secret", summary="Turns the update around.")

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        return update.replace(weights={name: -value for name, value in update.weights.items()}), state


def test_a_defense_the_score_does_not_see_is_said_to_be_so() -> None:
    each = assess(learner(), BATCH, Secret(), alpha=0.9)
    assert "does not see" in each.notes[0]
    assert each.mean_invre == pytest.approx(scored("none").mean_invre)


def test_a_black_record_is_scored_and_noted() -> None:
    black = Batch(torch.zeros((1, *SHAPE)), torch.tensor([0]))
    each = assess(learner(), black, build_defense("none"), alpha=0.9)
    assert "black" in each.notes[-1]
    json.dumps(encode(each), allow_nan=False)


def test_alpha_is_the_mean_undefended_score() -> None:
    made = calibrate(scored("none"), data="x", digest="d", weights="", seed=0)
    assert made.alpha == pytest.approx(scored("none").mean_score)
    with pytest.raises(UsageError, match="undefended"):
        calibrate(scored("gaussian_noise(std=0.1)"), data="x", digest="d", weights="", seed=0)


def test_the_packaged_alpha_says_where_it_is_from(tmp_path: Path) -> None:
    shipped = built_in_calibration()
    assert 0 < shipped.alpha <= 1 and shipped.records >= 16
    assert (shipped.data, shipped.model, shipped.gap_rule) == ("photos", "lenet", "merge")
    assert read_alpha(None) == shipped.alpha and read_alpha("0.25") == 0.25
    (tmp_path / "a.json").write_text(json.dumps({**shipped.as_dict(), "alpha": 0.5}), encoding="utf-8")
    assert read_alpha(str(tmp_path / "a.json")) == 0.5
    for wrong in ("nan", "-1", str(tmp_path / "none.json")):
        with pytest.raises(UsageError):
            read_alpha(wrong)


def timeless(found: Assessment) -> list[RecordRisk]:
    return [replace(record, seconds=0.0) for record in found.records]


def test_a_spectrum_is_made_once_for_all_defenses_that_only_add_noise() -> None:
    known: dict[Hashable, Spectrum] = {}
    noisy, plain, pruned = (
        assess(learner(), BATCH, build_defense(spelling), alpha=0.9, known=known)
        for spelling in ("gaussian_noise(std=10.0)", "none", "pruning(rate=0.5)")
    )
    assert len(known) == len(BATCH)  # none of the pruned ones
    assert timeless(plain) == timeless(scored("none"))
    assert timeless(noisy) == timeless(scored("gaussian_noise(std=10.0)"))
    assert pruned.mean_invre != plain.mean_invre


def test_leading_values_refuse_noise_and_the_command_takes_the_exact_ones_then(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1, 10, 10)
    own = Learner.of(build_model("mlp(hidden=[8])", input_shape=shape, classes=3, seed=Seed(0)), loss_by_name("cross_entropy"))
    batch = Batch(torch.rand((1, *shape), generator=Seed(1).generator("inputs")), torch.tensor([0]))
    noisy, bare = build_defense("gaussian_noise(std=0.01)"), build_defense("none")
    with pytest.raises(UsageError, match="gram or dense"):
        assess(own, batch, noisy, alpha=0.9, mode="leading")
    monkeypatch.setattr("gradveil.risk.exposure.choose_mode", lambda _: "leading")
    found = [assess(own, batch, defense, alpha=0.9) for defense in (bare, noisy, build_defense("data_noise(std=0.1)"))]
    assert [each.mode for each in found] == ["leading", "gram", "gram"]


def test_the_mode_may_be_chosen_record_by_record() -> None:
    found = assess(learner(), BATCH, build_defense("none"), alpha=0.9, mode=lambda jacobian: "gram")
    assert {record.mode for record in found.records} == {"gram"}


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (["invre>0.9"], 0),
        (["invre[none]>0.01"], 1),
        (["invre>0.0001"], 1),
        (["invre[pruning]>0.4"], 3),
        (["invre<0.4"], 2),
        (["invre>x"], 2),
        (["psnr>20"], 2),
        (["invre>7"], 2),
    ],
)
def test_the_command_is_gated(limits: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "risk",
        "--data",
        "digits",
        "--records",
        "2",
        "--quiet",
        "--prior",
        "off",
        "--model",
        "mlp(hidden=[8])",
        "--model",
        "mlp(hidden=[4])",
    ]
    asked = [word for text in limits for word in ("--fail-if", text)]
    assert main([*base, "--defense", "gaussian_noise(std=0.01)", *asked]) == code
    said = capsys.readouterr().err
    lines = said.splitlines()
    assert code == 0 or "invre" in lines[-1]
    # A limit that can be judged is said to be no band.
    assert len(lines) == (1 if code == 2 else len(limits) + (code != 0)) and (code == 2 or "is no band" in lines[0])
    # Every model is judged, each record is named by its row.
    assert code != 1 or ("under mlp(hidden=[8])" in said and "under mlp(hidden=[4])" in said and "InvRE of row" in said)


def test_the_command_scores_ranks_writes_and_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["risk", "--data", "digits", "--records", "2", "--quiet"]
    models = ["--model", "mlp(hidden=[8])", "--model", "mlp(hidden=[16])"]
    assert main([*base, *models, "--compare", "--json", "--out", str(tmp_path), "--calibrate"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "does not acquit" in result["meaning"]
    assert len(result["ranking"]) == 2
    assert result["ranking"][0]["exposure"] <= result["ranking"][1]["exposure"] and "mean_invre" in result["ranking"][0]
    assert json.loads((tmp_path / "risk.json").read_text())["assessments"] == result["assessments"]
    assert read_alpha(str(tmp_path / "alpha.json")) == pytest.approx(result["assessments"][0]["mean_score"])
    limited = [*base, "--model", "mlp(hidden=[8])", "--defense", "gaussian_noise(std=0.01)", "--fail-if"]
    assert main([*limited, "invre>0.0001"]) == 1
    shown = capsys.readouterr()
    assert "does not acquit" in shown.out and "most exposed" in shown.out and "mode dense" in shown.out
    assert "beyond invre>0.0001" in shown.err
    assert main([*base, "--mode", "grm"]) == 2
    assert main([*base, "--fail-if", "mse>1"]) == 2
    assert main(["risk", "--data", "digits", "--records", "0"]) == 2

"""Exposure of real releases: what defenses do to it, when there is none, and what the command makes of it."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from gradveil.cli import main
from gradveil.data import load_source
from gradveil.defenses import build_defense
from gradveil.learning import EmbeddingLearner, Learner, loss_by_name
from gradveil.models import build_model, split_model
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.defended import Releases
from gradveil.risk.oracle import _hidden, _residuals, expose
from gradveil.risk.prior import Prior, public_prior
from gradveil.spectra.along import _by_products, grams_along, layout_of
from gradveil.study.cell import Cell
from gradveil.study.exposures import Exposure, RecordExposure

DIGITS = load_source(Cell(data="digits"))
PUBLIC = DIGITS.inputs[100:700]
BATCH = Batch(DIGITS.inputs[:2], DIGITS.targets[:2])
OTHERS = Batch(DIGITS.inputs[100:132], DIGITS.targets[100:132])
PRIOR = public_prior(PUBLIC, like=BATCH.inputs, rank=16)
LEARNER = Learner.of(
    build_model("lenet", input_shape=DIGITS.input_shape, classes=10, seed=Seed(0)), loss_by_name("cross_entropy")
)


def exposed(spelling: str, *, prior: Prior = PRIOR, beside: int = 0, learner: Learner = LEARNER) -> Exposure:
    return expose(learner, BATCH, build_defense(spelling), prior=prior, others=OTHERS, beside=beside, model="lenet")


def means(*spellings: str) -> list[float]:
    found = [exposed(spelling).mean for spelling in spellings]
    return [value for value in found if value is not None]


@pytest.mark.parametrize(
    "ladder",
    [
        ["none", *(f"gaussian_noise(std={std})" for std in (1e-3, 1e-1))],
        [f"clipping(bound=0.01) + gaussian_noise(std={std})" for std in (1e-5, 1e-4, 1e-3)],
        ["none", *(f"pruning(rate={rate})" for rate in (0.9, 0.99, 0.999))],
        ["none", *(f"data_noise(std={std})" for std in (0.1, 0.3, 1.0))],
        ["quantisation(bits=4)", "quantisation(bits=3)", "quantisation(bits=2)"],
    ],
)
def test_a_stronger_defense_leaves_less(ladder: list[str]) -> None:
    found = means(*ladder)
    assert len(found) == len(ladder)
    assert all(weaker > stronger for weaker, stronger in pairwise(found)), found


def test_noise_that_drowns_all_leaves_nothing_and_a_list_no_more_than_chance() -> None:
    found = exposed("gaussian_noise(std=1000.0)")
    assert found.mean == pytest.approx(0.0, abs=1e-3) and found.mean_linear == pytest.approx(0.0, abs=1e-3)
    assert found.mean_listed == pytest.approx(1 / 256, rel=0.02)
    assert exposed("none").mean_listed == 1.0
    shares = [exposed(f"gaussian_noise(std={std})").mean_listed or 0.0 for std in (0.01, 0.03, 0.1, 0.3)]
    assert all(before > after for before, after in pairwise(shares)) and 0.01 < shares[2] < 0.99


def test_null_is_the_contrast_and_the_error_what_the_decibels_say() -> None:
    found = exposed("none")
    assert found.doubt == "" or found.mean_linear is not None
    for record, x in zip(found.records, BATCH.inputs, strict=True):
        assert record.null == pytest.approx(float((x.flatten().double() - PRIOR.mean).square().mean()))
        assert record.exposure is not None and record.error is not None and record.linear is not None
        assert record.exposure == pytest.approx(10 * math.log10(record.null / record.error))
    assert found.public.rank == 16 and found.public.records == 600 and 0.5 < found.public.kept < 1


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("quantisation(mode='qsgd')", "unknown law"),
        ("invl_gnp", "directions of its own"),
    ],
)
def test_without_a_known_law_there_are_no_decibels(spelling: str, words: str) -> None:
    found = exposed(spelling)
    assert found.reason.startswith("no decibels, attack it instead") and words in found.reason
    assert found.mean is None and found.mean_listed is None and found.unlisted


@pytest.mark.parametrize(
    "spelling",
    ["clipping(bound=0.01)", "pruning(rate=0.9)", "entry_dropout(rate=0.5)", "svdefense", "pfgd", "top_k(keep=0.1)"],
)
def test_what_the_attacker_pictures_is_what_was_sent(spelling: str) -> None:
    """So nothing is taken for rounding that is none, and a mask that shows is no hidden randomness."""
    release = Releases(LEARNER, build_defense(spelling)).of(BATCH.inputs[0], BATCH.targets[0], Seed(0), torch.float32)
    assert not _hidden(release)
    assert all(value < 1e-8 for value in _residuals(release, gain=False).values())


def test_rounding_counts_as_noise_after_the_best_factor() -> None:
    release = Releases(LEARNER, build_defense("quantisation(mode='sign')")).of(
        BATCH.inputs[0], BATCH.targets[0], Seed(0), torch.float32
    )
    assert release.sent is not None
    update = LEARNER.update(BATCH.inputs[:1], BATCH.targets[:1])
    found = _residuals(release, gain=True)
    own = torch.cat([update[f"linear.{part}"].flatten() for part in ("weight", "bias")]).double()
    sent = torch.cat([release.sent[f"linear.{part}"].flatten() for part in ("weight", "bias")]).double()
    factor = float(own @ sent / (own @ own))
    assert found["linear"] == pytest.approx(float((sent / factor - own).square().mean()), rel=1e-4)


def test_layers_summed_apart_are_those_of_direct_products() -> None:
    release = Releases(LEARNER, build_defense("none")).of(BATCH.inputs[0], BATCH.targets[0], Seed(0), torch.float32)
    layout = layout_of(release.jacobian)
    directions = torch.cat([PRIOR.basis.T[:5], BATCH.inputs[0].flatten().double().unsqueeze(0)])
    by_layers = grams_along(release.jacobian, directions, layout, most_bytes=1)  # a layer a sweep
    direct = _by_products(release.jacobian, directions, layout, 2**30)
    assert set(by_layers) == set(direct) == set(layout.sizes) and len(layout.sizes) == 4
    for layer, gram in direct.items():
        assert torch.allclose(by_layers[layer], gram, rtol=1e-3, atol=1e-5 * float(gram.max()))


def test_others_in_the_update_hide_a_record() -> None:
    alone, two, many = (exposed("gaussian_noise(std=0.001)", beside=beside) for beside in (0, 1, 15))
    assert alone.mean is not None and two.mean is not None and many.mean is not None
    assert alone.mean > two.mean > many.mean >= -0.5
    assert two.mean_listed is None and "other records" in two.unlisted
    assert "mean of a batch" in exposed("pruning(rate=0.9)", beside=1).reason


def test_an_embedding_is_exposed_by_its_cut() -> None:
    model = build_model("lenet", input_shape=DIGITS.input_shape, classes=10, seed=Seed(0))
    parties = [EmbeddingLearner.of_bottom(split_model(model, cut)[0], loss_by_name("cross_entropy")) for cut in ("cut1", "cut2")]
    first, second = (exposed("embedding_noise(delta=0.01)", learner=party).mean for party in parties)
    assert first is not None and second is not None and first > second


def test_who_reads_the_label_begins_at_the_mean_of_its_class_and_who_sees_an_embedding_does_not() -> None:
    told = public_prior(PUBLIC, like=BATCH.inputs, rank=16, labels=DIGITS.targets[100:700])
    model = build_model("lenet", input_shape=DIGITS.input_shape, classes=10, seed=Seed(0))
    party = EmbeddingLearner.of_bottom(split_model(model, "cut1")[0], loss_by_name("cross_entropy"))
    update, embedding = exposed("none", prior=told), exposed("embedding_noise(delta=0.01)", prior=told, learner=party)
    crowd = exposed("gaussian_noise(std=0.001)", prior=told, beside=3)
    for place, (x, label) in enumerate(zip(BATCH.inputs, BATCH.targets.tolist(), strict=True)):
        own, whole = (float((x.flatten().double() - told.mean_of(each)).square().mean()) for each in (label, None))
        assert own < whole and update.records[place].null == pytest.approx(own)
        assert embedding.records[place].null == pytest.approx(whole) == crowd.records[place].null


def test_a_record_that_is_the_mean_has_no_exposure() -> None:
    flat = Prior(BATCH.inputs[0].flatten().double(), PRIOR.basis, PRIOR.variances, PRIOR.outside, 600)
    assert "mean of the public ones" in exposed("none", prior=flat).reason


BASE = ["risk", "--records", "3", "--model", "mlp(hidden=[8])", "--quiet", "--mode", "off", "--no-attained"]


@pytest.mark.parametrize(
    ("limits", "code", "words"),
    [
        (["exposure>60"], 0, ""),
        (["exposure>0.5"], 1, "gaussian_noise(std=0.001) is beyond exposure>0.5: row"),
        (["exposure[quantisation]>60"], 3, "there is no exposure (no decibels"),
        (["exposure[pruning]>3"], 3, "fits no cell"),
        (["exposure<3"], 2, "write exposure>3"),
        (["invre>0.4"], 3, "invre was not scored"),
    ],
)
def test_the_command_is_gated(limits: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [word for text in limits for word in ("--fail-if", text)]
    names = ["gaussian_noise(std=0.001)", *(["quantisation(mode='qsgd')"] if "quantisation" in limits[0] else [])]
    defenses = [word for name in names for word in ("--defense", name)]
    assert main([*BASE, "--data", "digits", "--rank", "16", *defenses, *asked]) == code
    assert words in capsys.readouterr().err


def test_the_command_tells_exposure_and_ranks_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*BASE, "--data", "digits", "--rank", "16", "--defense", "gaussian_noise(std=0.1)", "--compare"]
    assert main([*asked, "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "mean exposure" in said and "named on a list of 256" in said and "no bound" in said and "InvRE" not in said
    assert "16 directions of" in said and "(digits, not scored)" in said
    found = json.loads((tmp_path / "risk.json").read_text())
    assert [row["defense"] for row in found["ranking"]] == ["gaussian_noise(std=0.1)", "none"]
    assert found["assessments"] == [] and not (tmp_path / "risk.html").exists()
    bare = found["exposures"][0]
    assert set(bare["records"][0]) >= {"row", "label", "exposure", "linear", "error", "null", "listed"}
    assert bare["mean"] == pytest.approx(sum(record["exposure"] for record in bare["records"]) / 3)


def test_public_records_may_be_of_another_source_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*options: str) -> str:
        assert main([*BASE, "--json", *options]) == 0
        return capsys.readouterr().out

    asked = ("same", "other", "none")
    same, other, law = (json.loads(said("--data", "digits", "--prior", name))["exposures"][0] for name in asked)
    assert other["public"]["source"] == "pieces of built-in photographs" and "1/f²" in law["public"]["source"]
    assert len({each["mean"] for each in (same, other, law)}) == 3
    assert same["records"][0]["listed"] == law["records"][0]["listed"] == 1.0, "candidates are records, whatever the prior"
    assert "exposures" not in json.loads(said("--data", "digits", "--prior", "off"))
    rng = np.random.default_rng(0)
    features, labels = rng.random((12, 20), dtype=np.float32), np.arange(12) % 3
    np.savez(tmp_path / "few.npz", x=features, y=labels)
    found = json.loads(said("--data", str(tmp_path / "few.npz")))
    assert "at least 16 public records" in found["notes"][0] and "--prior none" in found["notes"][0] and "exposures" not in found
    law = json.loads(said("--data", str(tmp_path / "few.npz"), "--prior", "none"))["exposures"][0]
    assert law["public"]["records"] == 1024 and law["mean"] > 0 and "1/f²" in law["public"]["source"]
    for options, words in (
        (["--prior", "other"], "no pictures"),
        (["--prior", "same"], "at least 16 public records, and there are 9"),
    ):
        assert main([*BASE, "--data", str(tmp_path / "few.npz"), *options]) == 2
        assert words in capsys.readouterr().err


def test_copies_of_scored_records_are_not_public(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    features = np.repeat(rng.random((20, 6), dtype=np.float32), 4, axis=0)
    np.savez(tmp_path / "copies.npz", x=features, y=np.arange(80) % 3)
    assert main([*BASE, "--json", "--data", str(tmp_path / "copies.npz")]) == 0
    records = json.loads(capsys.readouterr().out)["exposures"][0]
    scored = {record["row"] // 4 for record in records["records"]}
    assert records["public"]["records"] == 80 - 4 * len(scored)


def test_the_command_tells_what_is_attained_by_record_and_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = slice(0, 240)
    owners = np.array([f"writer {row % 40}" for row in range(240)])
    np.savez(tmp_path / "own.npz", x=DIGITS.inputs[rows].numpy(), y=DIGITS.targets[rows].numpy(), owners=owners)
    asked = [word for word in BASE if word != "--no-attained"] + ["--data", str(tmp_path / "own.npz"), "--rank", "16"]
    defended = [*asked, "--defense", "quantisation(mode='qsgd')", "--fail-if", "exposure[quantisation]>1"]
    assert main([*defended, "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr()
    said = " ".join(told.out.split())
    assert "mean attained" in said and "labels alone" in said and "owner" in said and "writer" in said
    assert "gave a regression" in told.err
    bare, random = json.loads((tmp_path / "out" / "risk.json").read_text())["exposures"]
    assert random["mean"] is None and random["reason"] and random["mean_attained"] > 1
    assert bare["mean_attained"] > random["mean_attained"] > random["mean_by_label"]
    own: dict[str, list[float]] = {record["owner"]: [] for record in bare["records"]}
    for record in bare["records"]:
        own[record["owner"]].append(record["exposure"])
        assert record["owner"] == owners[record["row"]] and record["attained"] > 3
    assert [(each["owner"], each["n"], each["worst"]) for each in bare["owners"]] == sorted(
        ((name, len(values), max(values)) for name, values in own.items()), key=lambda each: -each[2]
    )


def test_a_wide_range_between_both_is_said() -> None:
    def told(attained: float, exposure: float | None = 9.0) -> str:
        record = RecordExposure(row=0, null=0.1, exposure=exposure, attained=attained, owner="a")
        return Exposure(model="m", defense="none", records=(record,)).range

    assert "a regression attains 2.5 dB" in told(2.5) and "9.0; what attackers can do" in told(2.5)
    assert told(3.5) == told(12.0) == told(0.0, None) == ""

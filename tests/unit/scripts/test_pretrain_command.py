"""``scripts/pretrain.py`` from data to a network that loads, in seconds on built-in pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gradveil.cli import main
from gradveil.data import load_data
from gradveil.errors import UsageError
from gradveil.networks import cards
from gradveil.networks.cards import network_card
from gradveil.networks.evaluation import EvaluationNetwork
from gradveil.networks.store import load_network
from gradveil.networks.style import StyleGenerator
from gradveil.randomness import Seed
from scripts.pretrain import main as pretrain_main
from scripts.pretraining import pretraining
from scripts.pretraining.pretraining import default_settings, pretrain
from scripts.pretraining.quality import calibration

Captured = pytest.CaptureFixture[str]
STYLE = {"size": 8, "channels": 1, "latent": 8, "depth": 2, "widths": {"4": 8, "8": 8}}


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cards, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(pretraining, "MEASURED", 8)


def test_a_small_evaluation_network_learns_noise_in_seconds(tmp_path: Path, untouched_global_rng: None) -> None:
    settings = default_settings("evaluation-32", device="cpu", steps=150, batch=32, learning_rate=3e-3)
    widths = {"widths": (16, 16, 16)}
    made = pretrain("evaluation-32", ["photos"], settings, tmp_path, network_settings=widths, licence="CC0 and others")
    network = load_network(str(made.card))
    assert isinstance(network, EvaluationNetwork)
    photos = load_data("photos", limit=100).inputs
    found, untrained = (calibration(each, photos, Seed(1)) for each in (network, EvaluationNetwork(widths=(16, 16, 16)).eval()))
    assert found["bias"] < 0.25 < untrained["bias"]
    assert found["mean"][10] - found["mean"][0] > 0.5
    told = network_card(str(made.card))
    assert told["licence"] == "CC0 and others"
    assert told["data"][0]["source"] == "photos"
    assert told["training"]["steps"] == 150
    assert told["metrics"]["held_out_reduced"]["bias"] < 0.35
    assert not list(tmp_path.glob("*.training.*")), "the checkpoint is left behind"


def test_a_generator_is_trained_measured_and_kept(tmp_path: Path) -> None:
    settings = default_settings("style-32-grey", device="cpu", steps=3, batch=8)
    made = pretrain("style-32-grey", ["digits"], settings, tmp_path, network_settings=STYLE)
    network = load_network(str(made.card.with_suffix(".safetensors")))
    assert isinstance(network, StyleGenerator)
    assert network(torch.zeros(1, 8)).shape == (1, 1, 8, 8)
    assert made.metrics["pictures_compared"] > 100
    assert network_card(str(made.card))["settings"] == STYLE


def test_other_data_does_not_continue_a_stopped_training(tmp_path: Path) -> None:
    settings = default_settings("style-32-grey", device="cpu", steps=2, batch=8, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        pretrain("style-32-grey", ["digits"], settings, tmp_path, network_settings=STYLE, on_progress=_interrupt)
    assert list(tmp_path.glob("*.training.safetensors"))
    with pytest.raises(UsageError, match="other settings or data"):
        pretrain("style-32-grey", ["photos"], settings, tmp_path, network_settings=STYLE)
    assert pretrain("style-32-grey", ["digits"], settings, tmp_path, network_settings=STYLE).steps == 2


def _interrupt(progress: object) -> None:
    raise KeyboardInterrupt


def test_the_command_trains_and_the_name_is_found_in_the_cache(tmp_path: Path, capsys: Captured) -> None:
    arguments = ["evaluation-32", "--data", "photos", "--steps", "1", "--batch", "4", "--device", "cpu", "--json"]
    assert pretrain_main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["network"] == "evaluation-32"
    assert Path(told["card"]).parent == tmp_path / "cache" / "networks"
    assert isinstance(load_network("evaluation-32"), EvaluationNetwork)
    assert main(["show", "evaluation-32"]) == 0
    assert "pictures of photos" in capsys.readouterr().out
    url = Path(told["card"]).with_suffix(".safetensors").as_uri()
    assert pretrain_main(["evaluation-32", "--url", url, "--out", str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy" / "evaluation-32.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluation-33", "--data", "photos"], "did you mean 'evaluation-32'"),
        (["evaluation-32"], "nothing to train on"),
        (["evaluation-32", "--data", "nowhere"], "there is no data"),
        (["evaluation-32", "--data", "photos", "--minutes", "0"], "above 0"),
        (["evaluation-32", "--data", "photos", "--device", "gpu"], "device is 'gpu'"),
        (["evaluation-32", "--data", "photos", "--sha256", "0"], "belongs to --url"),
    ],
)
def test_bad_requests_get_one_sentence(arguments: list[str], words: str, capsys: Captured) -> None:
    assert pretrain_main([*arguments, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


@pytest.mark.parametrize("bad", [float("nan"), 7.0])
def test_values_that_are_no_pixels_are_refused_not_clamped(bad: float, tmp_path: Path, capsys: Captured) -> None:
    pictures = np.full((20, 8, 8), 0.5, dtype=np.float32)
    pictures[3, 0, 0] = bad
    np.savez(tmp_path / "scans.npz", images=pictures)
    options = ["--data", str(tmp_path / "scans.npz"), "--steps", "1", "--quiet", "--out", str(tmp_path / "made")]
    assert pretrain_main(["style-32-grey", *options]) == 2
    assert ("NaN or infinite, first in record 3" if bad != bad else "must lie in [0, 1]") in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_found_before_the_training(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "pretrain", lambda *given, **named: pytest.fail("trained all the same"))
        assert pretrain_main(["style-32-grey", "--data", "digits", "--out", str(tmp_path / "file" / "deep")]) == 2
    assert "choose another folder with --out" in capsys.readouterr().err

"""Gates of the spectra on embeddings: the three modes agree on a split ResNet."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gradveil.cli.entry import main
from gradveil.data.public import public_images
from gradveil.defenses import build_defense
from gradveil.learning import EmbeddingLearner, loss_by_name
from gradveil.models import split_model
from gradveil.models.resnet import ResNet
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.calibration import read_alpha
from gradveil.risk.exposure import assess
from gradveil.risk.invre import risk_score
from gradveil.spectra.jacobians import gradient_jacobian
from gradveil.spectra.spectrum import spectrum

SHAPE = (3, 12, 12)
CUTS = ("cut1", "cut2", "cut3")
ALPHA = read_alpha(None)


def small_resnet() -> nn.Module:
    """ResNet-18 in its structure, an eighth as wide; BatchNorm on statistics other than those it starts with."""
    model = ResNet(SHAPE, 10, (8, 16, 32, 64), 2, norm="batch", activation="relu", shortcut="projection", normalize="cifar10")
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in model.parameters():
            scale = (2 / value[0].numel()) ** 0.5 if value.ndim > 1 else 0.1
            value.copy_(scale * torch.randn(value.shape, generator=generator) + (1.0 if value.ndim == 1 else 0.0))
        for name, running in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                running.copy_(0.5 + torch.rand(running.shape, generator=generator))
    return model.eval()


def party(cut: str) -> EmbeddingLearner:
    return EmbeddingLearner.of_bottom(split_model(small_resnet(), cut)[0], loss_by_name("cross_entropy"))


@pytest.mark.parametrize("cut", CUTS)
def test_modes_agree_on_a_split_resnet(cut: str) -> None:
    learner = party(cut)
    for index, record in enumerate(public_images(SHAPE, 2, Seed(5))):
        jacobian = gradient_jacobian(learner, record, torch.tensor(0))
        found = {mode: spectrum(jacobian, mode=mode, seed=Seed(index)) for mode in ("dense", "gram", "leading")}
        scores = {mode: risk_score(each, alpha=ALPHA).invre for mode, each in found.items()}
        assert found["gram"].outputs == learner.embed(record[None]).numel()
        assert abs(scores["gram"] - scores["dense"]) < 1e-5
        assert abs(scores["leading"] - scores["dense"]) < 0.02
        assert 0 < scores["dense"] < 1


def test_the_part_of_the_input_that_no_embedding_sees_counts_as_missed() -> None:
    """Where fewer values are shared than the input has, the complete residual is above the paper's sum."""
    record = public_images(SHAPE, 1, Seed(5))[0]
    found = spectrum(gradient_jacobian(party("cut3"), record, torch.tensor(0)), mode="dense")
    assert found.outputs < found.inputs
    whole, paper = (risk_score(found, alpha=ALPHA, residual=kind).score for kind in ("complete", "paper"))
    assert whole > paper


def test_noise_on_the_embedding_lowers_the_score() -> None:
    pictures = public_images(SHAPE, 2, Seed(5))
    batch = Batch(pictures, torch.zeros(2, dtype=torch.int64))
    kinds = ("none", "embedding_noise(delta=1.0)", "embedding_noise(delta=100.0)")
    means = [assess(party("cut3"), batch, build_defense(kind), alpha=ALPHA).mean_invre for kind in kinds]
    assert means[0] > means[1] > means[2]


def test_command_ranks_cuts_beside_the_update(capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "risk",
        "--data",
        "digits",
        "--records",
        "2",
        "--quiet",
        "--no-attained",
        "--model",
        "lenet(activation='relu')",
        "--json",
    ]
    assert main([*base, "--cut", "none", "--cut", "cut1", "--cut", "cut3", "--defense", "embedding_noise(delta=100.0)"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {(each["model"], each["defense"]) for each in found["assessments"]}
    lenet, noise = "lenet(activation='relu')", "embedding_noise(delta=100.0)"
    assert names == {
        (lenet, "none"),
        (f"{lenet} · cut1", "none"),
        (f"{lenet} · cut1", noise),
        (f"{lenet} · cut3", "none"),
        (f"{lenet} · cut3", noise),
    }, "the noise has no place where an update is sent"
    assert [row["exposure"] for row in found["ranking"]] == sorted(row["exposure"] for row in found["ranking"])
    assert [(each["model"], each["defense"]) for each in found["exposures"]] == [
        (each["model"], each["defense"]) for each in found["assessments"]
    ]
    assert found["ranking"][0]["defense"] == noise


def test_command_scores_the_part_of_one_party(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["risk", "--data", "digits", "--records", "1", "--quiet", "--model", "lenet(activation='relu')", "--json"]
    found = []
    for party in ("0", "1"):
        assert main([*base, "--cut", "cut1", "--parts", "left_right", "--party", party]) == 0
        found.append(json.loads(capsys.readouterr().out)["assessments"][0]["records"][0])
    assert found[0]["row"] == found[1]["row"] and found[0]["score"] != found[1]["score"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--cut", "cut7"], "no cut 'cut7'"),
        (["--cut", "cut1", "--party", "1"], "no party 1"),
        (["--cut", "cut1", "--defense", "pruning(rate=0.9)"], "only embeddings leave a party"),
        (["--defense", "embedding_noise"], "only vertical learning sends"),
        (["--parts", "left_right"], "add --cut"),
        (["--cut", "none", "--party", "1"], "add --cut"),
        (["--out", f"{__file__}/here"], "choose another --out"),
    ],
)
def test_command_refuses_in_one_sentence(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["risk", "--data", "digits", "--records", "1", "--quiet", *options]) == 2
    assert sentence in capsys.readouterr().err

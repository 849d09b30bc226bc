"""``gradveil init``: what it finds out about a model and data, and the plan it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.errors import UsageError
from gradveil.run.estimate import estimate_plan
from gradveil.run.grid import cells_of, check_inputs
from gradveil.run.starter_plan import write_plan
from gradveil.study.plan import Plan

NET = """
from torch import nn
def make(classes):
    return nn.Sequential(nn.Flatten(1), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Dropout(0.0),
                         nn.Linear(8, classes, bias=False))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's data, model and weights."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"x": rng.random((12, 4, 4, 3), dtype=np.float32), "y": np.arange(12) % 3}
    np.savez("scans.npz", patient=np.arange(12) // 3, **arrays)
    Path("net.py").write_text(NET)
    off = (nn.Identity(), nn.Identity())
    layers = nn.Sequential(nn.Flatten(1), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.ReLU(), *off, nn.Linear(8, 3, bias=False))
    save_file({name: value.contiguous() for name, value in layers.state_dict().items()}, "net.safetensors")
    return tmp_path


def test_what_matters_is_found_and_the_plan_runs(own: Path) -> None:
    path, found = write_plan(Path("plan.toml"), data="scans.npz", model="net.py:make", weights="net.safetensors")
    assert (found.shape, found.classes, found.counts, found.owners) == ((3, 4, 4), 3, (4, 4, 4), 4)
    assert (found.batch_norm, found.dropout, found.bias, found.relu) == (1, 1, False, True)
    assert found.parameters == 48 * 8 + 8 + 16 + 24
    text = path.read_text()
    for words in ("BatchNorm: 1 layers", "dropout: 1 layers", "has no bias", "ReLU", "few records", "owners: 4", "--private"):
        assert words in text
    plan = Plan.from_toml(path)
    check_inputs(plan)
    assert (plan.data, plan.records, cells_of(plan)[0].state) == (("scans.npz",), 12, "given")


def test_paths_are_written_as_the_plan_sees_them(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plan(Path("plans/a.toml"), data="scans.npz", model="net.py:make", weights="net.safetensors")
    monkeypatch.chdir(own / "plans")
    plan = Plan.from_toml(Path("a.toml"))
    assert (plan.data, plan.model, plan.weights) == (("../scans.npz",), ("../net.py:make",), ("../net.safetensors",))
    check_inputs(plan)


def test_what_was_asked_for_is_written_though_the_examples_say_the_same(own: Path) -> None:
    Path("net.safetensors").rename("model.safetensors")
    np.save("pictures.npy", np.random.default_rng(0).random((12, 4, 4, 3), dtype=np.float32))
    Path("labels.csv").write_text("row,label,patient\n" + "".join(f"{i},{i % 3},{i // 3}\n" for i in range(12)))
    asked: dict[str, Any] = {"data": "pictures.npy", "labels": "labels.csv", "scale": "minmax", "read": "owner_column=patient"}
    path, _ = write_plan(Path("plan.toml"), model="net.py:make", weights="model.safetensors", **asked)
    plan = Plan.from_toml(path)
    assert (plan.labels, plan.scale, plan.read) == (("labels.csv",), "minmax", "owner_column=patient")
    assert plan.weights == ("model.safetensors",)
    assert "# steps = 0" in path.read_text(), "what nobody asked for stays switched off"


def test_a_plan_is_not_overwritten_without_being_asked(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("precious")
    with pytest.raises(UsageError, match="--force"):
        write_plan(path)
    assert path.read_text() == "precious"
    write_plan(path, force=True)
    assert Plan.from_toml(path).data == ("photos",)
    with pytest.raises(UsageError, match="is a folder"):
        write_plan(tmp_path, force=True)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"data": "photo"}, "did you mean 'photos'?"),
        ({"model": "lenett"}, "did you mean 'lenet'?"),
        ({"data": "scans.npz", "model": "lenet(activation='rell')"}, "did you mean 'relu'?"),
        ({"data": "scans.npz", "model": "net.py:mak"}, "did you mean 'make'?"),
        ({"data": "scans.npz", "model": "mlp", "weights": "net.safetensors"}, "do not fit the model"),
        ({"data": "photos", "labels": "net.py"}, "takes no setting but limit"),
    ],
)
def test_what_does_not_fit_gets_one_sentence_and_no_plan(own: Path, choices: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        write_plan(Path("plan.toml"), **choices)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("plan.toml").exists()


def test_a_folder_that_cannot_be_written_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the plan"):
        write_plan(tmp_path / "file" / "plan.toml")


def test_an_estimate_counts_steps_and_says_that_it_is_one(own: Path) -> None:
    threads = torch.get_num_threads()
    attack = "inverting_gradients(steps=50, restarts=2)"
    defenses = ["none", "pruning(rate=0.9)"]
    plan = Plan.default(data="scans.npz", model="mlp", ensemble=attack, records=4, defense=defenses, device="cpu")
    found = estimate_plan(plan, workers=1)
    none, pruning = found.rows
    assert none.stances == ("plain",)
    assert none.steps == 50 * 2 * (4 + 2)
    assert pruning.steps == none.steps * len(pruning.stances)
    assert "zero_mask" in pruning.stances
    assert 0 < none.seconds < pruning.seconds < found.seconds < 120
    assert 50 < found.memory_mb < 20_000
    assert found.as_dict()["estimate"] is True
    capped = estimate_plan(plan.override(steps=10, defense="none"), workers=1)
    assert capped.steps == 10 * 2 * (4 + 2)
    assert torch.get_num_threads() == threads


def test_an_estimate_notices_that_no_attack_applies(own: Path) -> None:
    with pytest.raises(UsageError, match="no attack of 'linear_layer' applies"):
        estimate_plan(Plan.default(ensemble="linear_layer", defense="none"), workers=1)

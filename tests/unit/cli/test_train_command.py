"""``gradveil train``: what it says, what it writes, how it ends, and that Ctrl-C loses nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradveil.cli import main, training_progress
from gradveil.client.update import run_client
from gradveil.federation import engine
from gradveil.study.codec import decode
from gradveil.study.federation import FederationSettings
from gradveil.study.kept import KeptTraining
from gradveil.study.training_result import RoundRecord, TrainingResult

Captured = pytest.CaptureFixture[str]
SMALL = "train --data digits --model mlp(hidden=8) --clients 5 --rounds 3 --device cpu"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_trains_and_ends_with_one_line(capsys: Captured, here: Path) -> None:
    assert main([*SMALL.split(), "--defense", "pruning(rate=0.9)", "--out", "o"]) == 0
    said = capsys.readouterr()
    line, privacy, seed, results = said.out.splitlines()
    assert privacy == "privacy: no guarantee: no proof is known for pruning"
    pattern = (
        r"accuracy \d+\.\d % after 3\srounds \(best \d+\.\d %\) · [\d.]+\s\w+ up and [\d.]+\s\w+ down per round · "
        r"client time [\d.]+× of undefended"
    )
    assert re.fullmatch(pattern, line)
    assert (seed, results) == ("seed 0", "results: o")
    assert "seed 0 · results go to o\n" in said.err
    assert "round 3/3 · accuracy " in said.err
    assert {path.name for path in (here / "o").iterdir()} >= {
        *("training.json", "rounds.jsonl", "model.safetensors", "checkpoint.json", "checkpoint"),
    }
    found = json.loads((here / "o" / "training.json").read_text())
    assert found["settings"]["clients_per_round"] == 5
    assert 0 < found["bytes"]["up"] < 0.5 * found["bytes"]["down"]
    assert found["finished"] is True


def test_it_ends_with_what_is_proved_about_all_rounds(capsys: Captured, here: Path) -> None:
    command = [*SMALL.split(), "--no-latency", "--quiet", "--defense", "dp_sgd(noise_multiplier=4)", "--local-epochs", "2"]
    assert main(command) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith("privacy: ε = ") and "per record after 6 releases" in said and "training.json" in said
    first = json.loads((here / "train-results" / "training.json").read_text())["guarantee"]
    assert main([*command, "--rounds", "4"]) == 0
    more = json.loads((here / "train-results" / "training.json").read_text())["guarantee"]
    assert (first["steps"], more["steps"]) == (6, 8) and first["epsilon"] < more["epsilon"]


def test_the_same_command_continues_and_other_settings_are_refused(capsys: Captured) -> None:
    command = [*SMALL.split(), "--no-latency"]
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*command, "--rounds", "4"]) == 0
    assert "results go to train-results · continuing after round 3\n" in capsys.readouterr().err
    assert main([*command, "--learning-rate", "0.3"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: the run in 'train-results' was made with learning_rate = 0.1, not 0.3; ")
    assert said.err.count("\n") == 1


def test_json_is_the_summary(capsys: Captured, here: Path) -> None:
    assert main([*SMALL.split(), "--json", "--quiet", "--no-latency", "--out", "o"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("out") == "o"
    assert found == json.loads((here / "o" / "training.json").read_text())
    assert found["latency"] is None


def test_ctrl_c_loses_nothing(capsys: Captured, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def interrupted(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 13:  # in the middle of round 3
            raise KeyboardInterrupt
        return run_client(*arguments, **more)

    command = [*SMALL.split(), "--rounds", "5", "--no-latency"]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "run_client", interrupted)
        assert main([*command, "--out", "stopped"]) == 130
    assert "stopped; what is finished is kept, and the same command continues" in capsys.readouterr().err
    assert len((here / "stopped" / "rounds.jsonl").read_text().splitlines()) == 2
    assert main([*command, "--out", "stopped"]) == 0
    assert "continuing after round 2" in capsys.readouterr().err
    assert main([*command, "--out", "whole"]) == 0
    stopped, whole = (load_file(here / name / "model.safetensors") for name in ("stopped", "whole"))
    assert all(torch.equal(value, stopped[name]) for name, value in whole.items())


def test_a_training_in_which_nobody_counted_is_not_to_be_trusted(capsys: Captured) -> None:
    assert main([*SMALL.split(), "--learning-rate", "1e30", "--minibatch", "1", "--rounds", "1", "--no-latency"]) == 3
    said = capsys.readouterr()
    assert "5\u00a0updates refused; rounds.jsonl says why" in said.out
    assert "error: no round changed the model; the last one says: the weights stay as they were: " in said.err


def test_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fake(settings: FederationSettings, **more: Any) -> TrainingResult:
        asked.update(more, settings=settings)
        record = RoundRecord(round=1, accuracy=0.5, loss=1.0, bytes_up=10, bytes_down=10)
        return TrainingResult.of([record], {}, settings=decode(KeptTraining, settings.as_dict()))

    monkeypatch.setattr(engine, "run_training", fake)
    options = (
        "--data d.npz --labels l.csv --scale minmax --read size=8 --model lenet --weights w.pt --defense pruning --clients 7 "
        "--clients-per-round 3 --rounds 9 --partition by_owner --local-epochs 2 --local-steps 4 --minibatch 5 "
        "--learning-rate 0.3 --momentum 0.1 --server-optimizer adam --server-learning-rate 0.02 --batch-norm eval "
        "--loss mean_squared_error --test-share 0.3 --evaluate-every 2 --seed 8 --device cpu --checkpoint-every 4 --out o --quiet"
    )
    assert main(["train", *options.split()]) == 0
    wanted = FederationSettings(
        data="d.npz",
        labels="l.csv",
        scale="minmax",
        read="size=8x8",
        model="lenet",
        weights="w.pt",
        defense="pruning",
        clients=7,
        clients_per_round=3,
        rounds=9,
        partition="by_owner",
        local_epochs=2,
        local_steps=4,
        minibatch=5,
        learning_rate=0.3,
        momentum=0.1,
        server_optimizer="adam",
        server_learning_rate=0.02,
        batch_norm="eval",
        loss="mean_squared_error",
        test_share=0.3,
        evaluate_every=2,
        seed=8,
    )
    assert asked["settings"] == wanted
    assert (asked["checkpoint_every"], asked["out"], asked["latency"], asked["on_round"]) == (4, Path("o"), True, None)
    assert main(["train", "--scale", "auto", "--optimizer", "adam", "--aggregation", "fedavg", "--server-momentum", "0.4"]) == 0
    settings = asked["settings"]
    assert (settings.scale, settings.optimizer, settings.server_momentum, settings.clients_per_round) == ("", "adam", 0.4, 10)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--data photo", "did you mean 'photos'?"),
        ("--data nowhere.npz", "there is no file or folder 'nowhere.npz'"),
        ("--model convnett", "did you mean 'convnet'?"),
        ("--weights nope.safetensors", "there is no weights file 'nope.safetensors'"),
        ("--defense prunning", "did you mean 'pruning'?"),
        ("--defense pruning(rat=0.1)", "did you mean 'rate'?"),
        ("--clients 0", "clients is 0"),
        ("--clients 3 --clients-per-round 4", "clients_per_round is 4, but there are 3 clients"),
        ("--rounds none", "'none' is not a valid integer"),
        ("--rounds 0", "rounds is 0"),
        ("--partition dirichlet(alpha=-1)", "alpha is -1"),
        ("--partition by_owner", "does not say who owns which record"),
        ("--optimizer sdg", "did you mean 'sgd'?"),
        ("--aggregation scafold", "did you mean 'scaffold'?"),
        ("--aggregation scaffold --optimizer adam", "scaffold's control variates"),
        ("--device gpu", "device is 'gpu'"),
        ("--checkpoint-every 0", "checkpoint_every is 0"),
        ("--loss crossentropy", "did you mean 'cross_entropy'?"),
        ("--test-share 0.0001", "leaves nothing to train or to test on"),
        ("--model resnet20 --minibatch 1", "minibatch is 1, and BatchNorm"),
        ("--ronds 3", "Did you mean "),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(arguments: str, says: str, capsys: Captured, here: Path) -> None:
    assert main(["train", *arguments.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert says in said.err
    assert list(here.iterdir()) == []


def test_lines_come_now_and_then_and_at_the_end(capsys: Captured) -> None:
    moments = iter(range(0, 1000, 4))
    report = training_progress._lines(6, lambda: float(next(moments)))
    for number in range(1, 7):
        report(RoundRecord(round=number, accuracy=0.25 if number % 2 else None, refused=int(number == 6)))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "round 1/6 · accuracy 25.0 % · time left not known yet"
    assert lines[-1] == "round 6/6 · 1 refused · about 0\u00a0s left"
    assert 2 < len(lines) < 6


def test_audits_and_trainings_do_not_share_a_folder(capsys: Captured, here: Path) -> None:
    (here / "audited").mkdir()
    (here / "audited" / "run.json").write_text("{}")
    assert main([*SMALL.split(), "--out", "audited"]) == 2
    assert capsys.readouterr().err == "error: 'audited' holds the results of an audit; choose another folder with --out\n"
    (here / "trained").mkdir()
    (here / "trained" / "training.json").write_text("{}")
    audit = "audit --data digits --model mlp(hidden=8) --ensemble linear_layer --records 1 --defense none --quiet --out trained"
    assert main(audit.split()) == 2
    assert "holds a training of `gradveil train`; choose another folder" in capsys.readouterr().err
    assert sorted(path.name for path in (here / "trained").iterdir()) == ["training.json"]

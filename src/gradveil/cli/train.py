"""``gradveil train``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli.output import READ_HELP, AsJson, note, out_path, print_json
from gradveil.errors import Unreliable, UsageError, suggest

if TYPE_CHECKING:
    from gradveil.study.federation import FederationSettings
    from gradveil.study.proved import Guarantee
    from gradveil.study.training_result import TrainingResult

__all__ = ["train"]

Text = str | None
Whole = int | None
Number = float | None
DEVICES = ("auto", "cpu", "cuda")
PARTITION_HELP = "Who owns what: iid, 'dirichlet(alpha=0.5)', by_owner or 'class_balance(rho=0.5)' [iid]."
LATENCY_HELP = "Time one client with and without the defense at the end [yes]."
OUT_HELP = "Folder for results; the same folder continues a run [train-results]."
BATCH_NORM_HELP = "train tracks running statistics, eval leaves them [train]."


def train(
    data: Annotated[Text, typer.Option(help="Built-in name, .npz, .npy, IDX or folder of pictures [photos].")] = None,
    labels: Annotated[Text, typer.Option(help="Label file (.csv, .npy or IDX).")] = None,
    scale: Annotated[Text, typer.Option(help="How values come to [0, 1]: auto, minmax or none.")] = None,
    read: Annotated[Text, typer.Option(metavar="SETTINGS", help=READ_HELP)] = None,
    model: Annotated[Text, typer.Option(help="Built-in name, module:factory or file.py:factory [convnet].")] = None,
    weights: Annotated[Text, typer.Option(help="Weights to start from: .safetensors, .pt or .pth.")] = None,
    defense: Annotated[Text, typer.Option(help="Defense or chain that every client runs [none].")] = None,
    clients: Annotated[Whole, typer.Option(help="Clients there are [10].")] = None,
    clients_per_round: Annotated[Whole, typer.Option(help="Clients drawn in every round [10, or all].")] = None,
    rounds: Annotated[Whole, typer.Option(help="Rounds to train [20].")] = None,
    partition: Annotated[Text, typer.Option(help=PARTITION_HELP)] = None,
    local_epochs: Annotated[Whole, typer.Option(help="Passes of a client over its records in one round [1].")] = None,
    local_steps: Annotated[Whole, typer.Option(help="Local steps instead of epochs.")] = None,
    minibatch: Annotated[Whole, typer.Option(help="Records per local step, 0 for all [32].")] = None,
    learning_rate: Annotated[Number, typer.Option(help="Of the local steps [0.1].")] = None,
    momentum: Annotated[Number, typer.Option(help="Of the local steps [0].")] = None,
    optimizer: Annotated[Text, typer.Option(help="sgd or adam, for the local steps [sgd].")] = None,
    aggregation: Annotated[Text, typer.Option(help="fedavg or scaffold [fedavg].")] = None,
    server_optimizer: Annotated[Text, typer.Option(help="sgd or adam, on the aggregate [sgd].")] = None,
    server_learning_rate: Annotated[Number, typer.Option(help="1 with sgd is federated averaging [1].")] = None,
    server_momentum: Annotated[Number, typer.Option(help="For the server's sgd [0].")] = None,
    batch_norm: Annotated[Text, typer.Option(help=BATCH_NORM_HELP)] = None,
    loss: Annotated[Text, typer.Option(help="Registered loss or module:function [cross_entropy].")] = None,
    test_share: Annotated[Number, typer.Option(help="Share held out, where the data has no test split [0.2].")] = None,
    evaluate_every: Annotated[Whole, typer.Option(help="Rounds between two evaluations [1].")] = None,
    seed: Annotated[Whole, typer.Option(help="Root of all randomness [0].")] = None,
    device: Annotated[Text, typer.Option(help="auto, cpu or cuda [auto].")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", parser=out_path, help=OUT_HELP)] = None,
    checkpoint_every: Annotated[Whole, typer.Option(help="Rounds between two checkpoints [1].")] = None,
    latency: Annotated[bool, typer.Option("--latency/--no-latency", help=LATENCY_HELP, show_default=False)] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model federatedly, with or without a defense.

    Shows accuracy, bytes and what the defense costs in client time. A stopped run continues with the same command, to the same
    weights.

    Example: gradveil train --data photos --model convnet --defense 'pruning(rate=0.9)' --rounds 20 --out pruned
    """
    asked = {
        "data": data,
        "labels": labels,
        "scale": "" if scale == "auto" else scale,
        "read": read,
        "model": model,
        "weights": weights,
        "defense": defense,
        "clients": clients,
        "clients_per_round": clients_per_round,
        "rounds": rounds,
        "partition": partition,
        "local_epochs": local_epochs,
        "local_steps": local_steps,
        "minibatch": minibatch,
        "learning_rate": learning_rate,
        "momentum": momentum,
        "optimizer": optimizer,
        "aggregation": aggregation,
        "server_optimizer": server_optimizer,
        "server_learning_rate": server_learning_rate,
        "server_momentum": server_momentum,
        "batch_norm": batch_norm,
        "loss": loss,
        "test_share": test_share,
        "evaluate_every": evaluate_every,
        "seed": seed,
    }
    settings = _settings({name: value for name, value in asked.items() if value is not None}, device or "auto")
    folder = out or Path("train-results")
    options = {"checkpoint_every": 1 if checkpoint_every is None else checkpoint_every, "latency": latency}
    result = _run(settings, folder, quiet, options)
    if as_json:
        print_json({"out": str(folder), **json.loads((folder / "training.json").read_text(encoding="utf-8"))})
    else:
        typer.echo(_sentence(result))
        if result.guarantee:
            typer.echo(_privacy(result.guarantee))
        typer.echo(f"seed {settings.seed}\nresults: {folder}")
    idle = [record.note for record in result.rounds if record.note]
    if len(idle) == len(result.rounds):
        raise Unreliable(f"no round changed the model; the last one says: {idle[-1]}")


def _settings(asked: dict[str, Any], device: str) -> FederationSettings:
    if device not in DEVICES:
        raise UsageError(f"device is {device!r}{suggest(device, DEVICES)}")
    from gradveil.study.federation import FederationSettings
    from gradveil.tensors import find_device

    if "clients" in asked:
        # Who asks for five clients and says no more wants all five in every round.
        asked = {"clients_per_round": min(FederationSettings.clients_per_round, max(asked["clients"], 1)), **asked}
    return FederationSettings(**asked, device=find_device(device))


def _run(settings: FederationSettings, out: Path, quiet: bool, options: dict[str, Any]) -> TrainingResult:
    from gradveil.cli.training_progress import show_rounds
    from gradveil.federation import engine

    def on_start(done: int) -> None:
        # Said once everything asked for has been found and looked at.
        if not quiet:
            note(f"seed {settings.seed} · results go to {out}" + (f" · continuing after round {done}" if done else ""))

    with show_rounds(settings.rounds, quiet=quiet) as on_round:
        command = shlex.join(["gradveil", *sys.argv[1:]])
        return engine.train(settings, out=out, on_start=on_start, on_round=on_round, command=command, **options)


def _sentence(result: TrainingResult) -> str:
    """Return the outcome in one line."""
    from gradveil.cli.training_progress import SCORES, accurate
    from gradveil.verdict.numbers import count, size, times

    rounds = len(result.rounds)
    parts = [
        f"{SCORES[result.score]} {accurate(result.final_accuracy)} after {count(rounds, 'round')} "
        f"(best {accurate(result.best_accuracy)})",
        *([] if result.final_f1 is None else [f"F1 {accurate(result.final_f1)}"]),
        f"{size(result.bytes.up_per_round)} up and {size(result.bytes.down_per_round)} down per round",
    ]
    if result.latency is not None:
        parts.append(f"client time {times(result.latency.ratio)} of undefended")
    if result.refused:
        parts.append(f"{count(result.refused, 'update')} refused; rounds.jsonl says why")
    return " · ".join(parts)


def _privacy(guarantee: Guarantee) -> str:
    """Return what is proved about the whole run, or that nothing is."""
    told = f"privacy: {guarantee.sentence}"
    return told if guarantee.epsilon is None else f"{told}; training.json lists what must hold for it"

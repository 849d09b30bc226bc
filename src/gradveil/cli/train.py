"""``gradveil train``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli.options import with_options
from gradveil.cli.output import AsJson, note, out_path, print_json
from gradveil.errors import Unreliable
from gradveil.study import readers
from gradveil.study.declare import keys_of
from gradveil.study.federation import FederationSettings

if TYPE_CHECKING:
    from gradveil.study.proved import Guarantee
    from gradveil.study.training_result import TrainingResult

__all__ = ["train"]

ASKED = tuple(key for key in keys_of(FederationSettings) if key.name != "device")
DEVICE_HELP = "auto takes a GPU if there is one; cpu, cuda [auto]."
LATENCY_HELP = "Time one client with and without the defense at the end [yes]."
OUT_HELP = "Folder for results; the same folder continues a run [train-results]."


@with_options(ASKED, defaults=True)
def train(
    device: Annotated[str, typer.Option(help=DEVICE_HELP, show_default=False)] = "auto",
    out: Annotated[Path | None, typer.Option(metavar="DIR", parser=out_path, help=OUT_HELP)] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Rounds between two checkpoints [1].", show_default=False)] = 1,
    latency: Annotated[bool, typer.Option("--latency/--no-latency", help=LATENCY_HELP, show_default=False)] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: AsJson = False,
    **asked: Any,
) -> None:
    """Train a model federatedly, with or without a defense.

    Shows accuracy, bytes and what the defense costs in client time. A stopped run continues with the same command, to the same
    weights.

    Example: gradveil train --data photos --model convnet --defense 'pruning(rate=0.9)' --rounds 20 --out pruned
    """
    from gradveil.verdict.words import tested_words

    settings = _settings(asked, device)
    folder = out or Path("train-results")
    options = {"checkpoint_every": checkpoint_every, "latency": latency}
    result = _run(settings, folder, quiet, options)
    if as_json:
        print_json({"out": str(folder), **json.loads((folder / "training.json").read_text(encoding="utf-8"))})
    else:
        typer.echo(_sentence(result))
        if settings.weights:
            typer.echo(f"measured on {tested_words(settings.weights)}")
        if result.guarantee:
            typer.echo(_privacy(result.guarantee))
        if result.guarantee_of_sums:
            typer.echo(_privacy(result.guarantee_of_sums))
        typer.echo(f"seed {settings.seed}\nresults: {folder}")
    idle = [record.note for record in result.rounds if record.note]
    if len(idle) == len(result.rounds):
        raise Unreliable(f"no round changed the model; the last one says: {idle[-1]}")


def _settings(asked: dict[str, Any], device: str) -> FederationSettings:
    readers.device("device", device)
    from gradveil.tensors import find_device

    if asked.get("scale") == "auto":
        asked["scale"] = ""
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
        return engine.run_training(settings, out=out, on_start=on_start, on_round=on_round, command=command, **options)


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

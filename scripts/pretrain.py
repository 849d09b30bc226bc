"""Train, or download, a network that defenses and attacks use, from the root of the source tree.

python -m scripts.pretrain evaluation-32 --data pictures.zip --minutes 30
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli.entry import run_application
from gradveil.cli.output import AsJson, note, out_path, print_json
from gradveil.errors import UsageError, suggest

if TYPE_CHECKING:
    from scripts.pretraining.training import Progress

__all__ = ["main"]

DEVICES = ("auto", "cpu", "cuda")
LINE_EVERY = 10.0
DATA_HELP = "Folder or .zip of pictures, .npz, or built-in name; may be given several times. No labels are needed."
OUT_HELP = "Folder for weights and card; the same folder continues a stopped training [your cache folder]."
URL_HELP = "Download this .safetensors file, with its card beside it as .json, instead of training."


def pretrain(
    name: Annotated[str, typer.Argument(metavar="NAME", hidden=True)],
    data: Annotated[list[str] | None, typer.Option(help=DATA_HELP)] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes to train at most [no limit].")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train at most [10000 or 20000, by network].")] = None,
    batch: Annotated[int | None, typer.Option(help="Pictures per step [512 or 64, by network].")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of Adam [0.001 or 0.002, by network].")] = None,
    seed: Annotated[int | None, typer.Option(help="Root of all randomness [0].")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(metavar="DIR", parser=out_path, help=OUT_HELP)] = None,
    licence: Annotated[str, typer.Option(help="Terms of the data, for the card.", show_default=False)] = "",
    url: Annotated[str | None, typer.Option(help=URL_HELP)] = None,
    sha256: Annotated[str | None, typer.Option(help="With --url: what the weights must hash to.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train or download a network that defenses and attacks use.

    NAME is a network, as `gradveil list networks` shows it. Part of the data is kept back and measured on. A stopped training
    continues with the same command.

    Example: python -m scripts.pretrain evaluation-32 --data pictures.zip --minutes 30
    """
    from gradveil.networks.base import NETWORKS
    from gradveil.networks.cards import cache_folder

    NETWORKS.card(name)
    folder = out or cache_folder()
    _make(folder)
    if url is not None:
        _download(name, url, folder, sha256, as_json)
        return
    if sha256 is not None:
        raise UsageError("--sha256 belongs to --url; a training has no hash to be compared with")
    asked = {"steps": steps, "minutes": minutes, "batch": batch, "learning_rate": learning_rate, "seed": seed}
    _train(
        name,
        data or [],
        device,
        folder,
        {key: value for key, value in asked.items() if value is not None},
        licence,
        quiet,
        as_json,
    )


def _make(folder: Path) -> None:
    """Make the folder and see that it can be written to, before hours of training are spent on it."""
    import tempfile

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to {str(folder)!r} ({error.strerror}); choose another folder with --out") from error


def _download(name: str, url: str, folder: Path, sha256: str | None, as_json: bool) -> None:
    from gradveil.networks.cards import network_card
    from scripts.pretraining.download import download_network

    card = download_network(name, url, folder, sha256=sha256)
    if as_json:
        print_json({"card": str(card), **network_card(str(card))})
    else:
        typer.echo(f"{name}: verified and kept as {card.with_suffix('.safetensors')}")


def _train(
    name: str, data: list[str], device: str, out: Path, asked: dict[str, Any], licence: str, quiet: bool, as_json: bool
) -> None:
    if device not in DEVICES:
        raise UsageError(f"device is {device!r}{suggest(device, DEVICES)}")
    from gradveil.networks.cards import network_card
    from gradveil.tensors import find_device
    from scripts.pretraining import pretraining

    settings = pretraining.default_settings(name, device=find_device(device), **asked)
    if not quiet:
        note(f"{name} · seed {settings.seed} · {settings.device} · weights go to {out}")
    tell: Callable[[Progress], None] = (lambda progress: None) if quiet else _lines()
    made = pretraining.pretrain(name, data, settings, out, licence=licence, on_progress=tell)
    if as_json:
        print_json({"card": str(made.card), **network_card(str(made.card))})
        return
    for metric, value in made.metrics.items():
        typer.echo(f"{metric}: {_shown(value)}")
    weights = made.card.with_suffix(".safetensors")
    typer.echo(f"{name}: {made.steps} steps in {made.seconds:.0f} s; use it by its path: {weights}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items() if not isinstance(each, list))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _lines(now: Callable[[], float] = time.monotonic) -> Callable[[Progress], None]:
    last = -LINE_EVERY

    def tell(progress: Progress) -> None:
        nonlocal last
        if now() - last < LINE_EVERY and progress.done < 1:
            return
        last = now()
        left = progress.seconds * (1 - progress.done) / progress.done if progress.done > 0 else 0.0
        losses = ", ".join(f"{name} {value:.3f}" for name, value in progress.losses.items())
        note(f"{progress.done:.0%} · step {progress.step} · about {left:.0f} s left · {losses}")

    return tell


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(pretrain)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script and return the exit code; what goes wrong is one sentence."""
    return run_application(app, "python -m scripts.pretrain", arguments)


if __name__ == "__main__":
    sys.exit(main())

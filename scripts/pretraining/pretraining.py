"""From pictures to a stored network: read, train, measure, save with a card. Behind `scripts/pretrain.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.networks.base import NETWORKS, NetworkCard
from gradveil.networks.cards import find_card
from gradveil.networks.evaluation import EvaluationNetwork
from gradveil.networks.store import save_network
from gradveil.randomness import Seed
from scripts.pretraining.adversarial import AdversarialRecipe, AdversarialTrainer
from scripts.pretraining.pictures import Pictures, read_pictures
from scripts.pretraining.quality import calibration, generator_quality
from scripts.pretraining.regression import EvaluationTrainer, PaperTrainer
from scripts.pretraining.training import Progress, Trainer, TrainingSettings, run

__all__ = ["MOST_CHANGE", "Pretrained", "default_settings", "pretrain", "probes"]

PROBES = 256
MEASURED = 500
"""Held-out pictures an evaluation network is measured on at most."""

MOST_CHANGE = {"evaluation": 1e-3, "generator": 12**-0.5 / 255}
"""Half precision is kept where answers move by less than this (root mean square): for pictures, by less than storing them as
bytes moves them."""


@dataclass(frozen=True)
class Pretrained:
    """What a training gave.

    Attributes:
        card: Path of the card; the weights lie beside it.
        metrics: What was measured, as on the card.
        steps: Steps taken.
        seconds: Time they took.
    """

    card: Path
    metrics: dict[str, Any]
    steps: int
    seconds: float


def default_settings(name: str, *, device: str, **asked: Any) -> TrainingSettings:
    """Return the settings a network is trained with unless others are asked for."""
    card = NETWORKS.card(name)
    if card.family == "evaluation":
        known: dict[str, Any] = {"steps": 10_000, "batch": 512, "learning_rate": 1e-3}
    else:
        known = {"steps": 20_000, "batch": 64, "learning_rate": 2e-3}
    return TrainingSettings(**{**known, "device": device, **asked})


def pretrain(
    name: str,
    sources: Sequence[str],
    settings: TrainingSettings,
    out: Path,
    *,
    network_settings: dict[str, Any] | None = None,
    licence: str = "",
    note: str = "",
    paper: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Pretrained:
    """Train a network by name and store it.

    Args:
        name: A registered network.
        sources: What to train on; see `scripts.pretraining.pictures`.
        settings: Budget, seed and device.
        out: Folder for the weights and the card; a stopped training in it is continued.
        network_settings: Other sizes or widths than the name stands for.
        licence: Terms of the data, for the card.
        note: A sentence for the card.
        paper: Train an evaluation network as its paper does, for comparison.
        on_progress: Told how far it is.

    Raises:
        UsageError: In one sentence that says what to change.
    """
    card = NETWORKS.card(name)
    chosen = network_settings or {}
    seed = Seed(settings.seed).child("pretrain", name)
    network = NETWORKS.get(name)(**chosen, generator=seed.generator("first weights"))
    size, channels = int(network.size), int(network.channels)  # type: ignore[arg-type]
    pictures = read_pictures(sources, side=2 * size if card.family == "evaluation" else size, channels=channels)
    _fits(settings, pictures)
    trainer = _trainer(card, network, pictures, settings, paper)
    key = {
        "network": name,
        "paper": paper,
        "settings": _plain(chosen),
        "data": [each["sha256"] for each in pictures.sources],
        **settings.key(),
    }
    checkpoint = out / f"{name}.training.safetensors"
    ended = run(trainer, settings, checkpoint, key, on_progress)
    trained = trainer.result()
    rounded, change = _rounded(card, trained, seed)
    half = change <= MOST_CHANGE[card.family]
    metrics = _measure(card, rounded if half else trained, pictures, seed, settings.device)
    metrics["half_precision_changes_by"] = change
    told = {
        "network": name,
        "settings": _plain(chosen),
        "data": list(pictures.sources),
        "licence": licence or "not stated",
        "note": note,
        "training": {**asdict(settings), "steps": ended.step, "pictures_seen": ended.step * settings.batch, "paper": paper},
        "seconds": round(ended.seconds, 1),
        "losses": dict(ended.losses),
        "metrics": metrics,
    }
    path = save_network(trained, out / f"{name}.safetensors", told, half=half)
    find_card(str(path))
    checkpoint.unlink(missing_ok=True)
    return Pretrained(path, metrics, ended.step, ended.seconds)


def _trainer(card: NetworkCard, network: nn.Module, pictures: Pictures, settings: TrainingSettings, paper: bool) -> Trainer:
    if isinstance(network, EvaluationNetwork):
        kind = PaperTrainer if paper else EvaluationTrainer
        return kind(network, pictures.train, pictures.chances, settings)
    if paper or card.family != "generator":
        raise UsageError(f"network {card.name!r} is of the family {card.family!r}, which nothing here trains that way")
    recipe = AdversarialRecipe(flip=card.flip, penalty=0.05 if card.size <= 32 else 0.1)
    return AdversarialTrainer(network, pictures.train, pictures.chances, settings, recipe)


def _fits(settings: TrainingSettings, pictures: Pictures) -> None:
    if min(len(pictures.train), len(pictures.held_out)) < 4:
        raise UsageError(
            f"there are {len(pictures.train)} pictures to train on and {len(pictures.held_out)} to measure with; "
            "give at least 4 of each"
        )


def _rounded(card: NetworkCard, network: nn.Module, seed: Seed) -> tuple[nn.Module, float]:
    """Return the network as half precision would bring it back, and by how much answers change (root mean square)."""
    rounded = copy.deepcopy(network)
    rounded.load_state_dict({k: v.half().float() if v.is_floating_point() else v for k, v in network.state_dict().items()})
    shown = probes(card, network, seed)
    with torch.no_grad():
        change = float((network(shown) - rounded(shown)).square().mean().sqrt())
    return rounded, change if change == change else float("inf")


def probes(card: NetworkCard, network: nn.Module, seed: Seed) -> Tensor:
    """Return what a network is shown to see whether rounding its weights changes its answers: pictures or codes of chance."""
    generator = seed.generator("probes")
    if card.family == "evaluation":
        return torch.rand((PROBES, int(network.channels), card.size, card.size), generator=generator)  # type: ignore[arg-type]
    return torch.randn((PROBES, int(network.latent)), generator=generator)  # type: ignore[arg-type]


def _measure(card: NetworkCard, network: nn.Module, pictures: Pictures, seed: Seed, device: str) -> dict[str, Any]:
    network = copy.deepcopy(network).to(device)
    if card.family == "evaluation":
        shown = pictures.held_out[:MEASURED].to(torch.float32) / 255
        reduced = torch.nn.functional.avg_pool2d(shown, 2)
        return {
            "held_out_by_tiles": calibration(network, shown, seed.child("tiles")),
            "held_out_reduced": calibration(network, reduced, seed.child("reduced")),
            "held_out_grey": calibration(network, reduced.mean(1, keepdim=True), seed.child("grey")),
        }
    return generator_quality(network, pictures.train, pictures.held_out, seed)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}

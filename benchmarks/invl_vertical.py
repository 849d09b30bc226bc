"""Accuracy of the vertical rows of `invl_defenses.py` (Table 3 of the InvRE paper).

The paper adds noise when the trained parties predict; Gradveil's plans have the defense on in training too. Both are measured:
``predicted`` is a split model that was trained without a defense and predicts with one, ``final_accuracy`` was trained with it
as well. Bases of their own for every record of every step are out of reach in training; such rows have ``predicted`` alone.
The undefended training is kept in the output folder and shared by all rows of a seed; `weights` writes it as a file of the whole
model, so that rows are attacked at the same weights.

    python benchmarks/invl_vertical.py cifar10.npz cifar10_16x16.npz --factor 2      # smaller pictures, for a core
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from gradveil.errors import BadUpdate
from gradveil.federation.vertical import VerticalState
from gradveil.federation.vertical_training import VerticalTraining, build_vertical, train_vertical
from gradveil.metrics.summary import wilson
from gradveil.study.federation import FederationSettings


def shrink(source: Path, target: Path, factor: int) -> None:
    """Write pictures with the mean of ``factor`` × ``factor`` pixels for each block: a core can decompose their Jacobians."""
    with np.load(source, allow_pickle=False) as archive:
        arrays = dict(archive)
    for name in (name for name in arrays if name.startswith("x_")):
        count, height, width, channels = arrays[name].shape
        blocks = arrays[name].reshape(count, height // factor, factor, width // factor, factor, channels)
        arrays[name] = blocks.mean((2, 4)).round().astype(np.uint8)
    np.savez_compressed(target, **arrays)


def settings_of(options: argparse.Namespace, defense: str) -> FederationSettings:
    """Return the schedule; it was chosen on the undefended training alone."""
    return FederationSettings(
        data=options.data,
        labels=options.labels,
        model=options.model,
        defense=defense,
        rounds=options.rounds,
        minibatch=options.minibatch,
        learning_rate=options.server_rate,
        optimizer="adam",
        evaluate_every=options.rounds,
        seed=options.seed,
        device=options.device,
    )


def undefended(options: argparse.Namespace) -> tuple[VerticalTraining, VerticalState]:
    """Train without a defense, or read what was trained before, and return its last state."""
    folder = Path(options.out) / f"undefended-vertical-{options.seed}"
    settings = settings_of(options, "none")
    weights = train_vertical(settings, cut=options.cut, parts=options.parts, out=folder).weights
    training = build_vertical(settings, options.cut, options.parts)
    start = training.federation.start()
    bottoms = tuple({name: weights[f"bottoms.{party}.{name}"] for name in own} for party, own in enumerate(start.bottoms))
    top = {name: weights[f"top.{name}"] for name in start.top}
    return training, dataclasses.replace(start, bottoms=bottoms, top=top)


def write_weights(options: argparse.Namespace) -> None:
    """Write the undefended training as weights of the whole model, for attacks with ``--weights``."""
    if options.parts != "whole":
        sys.exit("the weights of several parties are not those of one model; set --parts whole")
    _, state = undefended(options)
    path = Path(options.out) / f"trained-vertical-{options.seed}.safetensors"
    save_file({name: value.contiguous() for own in (*state.bottoms, state.top) for name, value in own.items()}, str(path))
    print(path)


def accuracy(spelling: str, trained: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return accuracy with the defense on at prediction alone, and in training too.

    Args:
        spelling: The row's defense.
        trained: What is trained with; empty where training with it is out of reach.
        options: The command line.
    """
    plain, state = undefended(options)
    test = plain.test if not options.predicted else plain.test.take(range(min(options.predicted, len(plain.test))))
    shielded = build_vertical(settings_of(options, spelling), options.cut, options.parts, data=(plain.train, test))
    settings = settings_of(options, spelling).as_dict()
    found: dict[str, Any] = {
        "defense": spelling,
        "settings": {**settings, "data": Path(options.data).name},
        "cut": options.cut,
        "parts": options.parts,
        "tested": len(test),
        "predicted": shielded.scores(state)[0],
        "predicted_undefended": dataclasses.replace(plain, test=test).scores(state)[0],
        "trained": trained,
        "final_accuracy": None,
        "diverged": False,
    }
    if trained:
        try:
            result = train_vertical(settings_of(options, trained), cut=options.cut, parts=options.parts)
            found["final_accuracy"], found["refused"] = result.final_accuracy, result.refused
        except BadUpdate:
            found["diverged"] = True
    return found


def pooled(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return attacks on several draws of records as one: counts are added, and of medians the mean is taken."""
    first = records[0]
    if len(records) == 1:
        return first
    n = sum(record["n"] for record in records)
    sides: dict[str, Any] = {}
    for side in ("plain", "informed"):
        found = [record[side] for record in records]
        if any(each is None for each in found):
            sides[side] = None
            continue
        count = sum(each["identified"]["count"] for each in found)
        low, high = wilson(count, n)
        sides[side] = {"identified": {"value": count / n, "low": low, "high": high, "count": count, "n": n}}
        for name in ("mse", "psnr", "ssim"):
            sides[side][name] = {"median": float(np.mean([each[name]["median"] for each in found]))}
    return {**first, "n": n, **sides}


def told(records: list[dict[str, Any]]) -> str:
    """Return the accuracies of a row in words, as means over seeds."""
    if not records:
        return "–"
    parts = [f"{_mean(records, 'predicted')} % predicting (undefended {_mean(records, 'predicted_undefended')} %)"]
    trained = [record for record in records if record["final_accuracy"] is not None]
    parts += [f"{_mean(trained, 'final_accuracy')} % trained with it"] if trained else []
    return "; ".join(parts) + f" ({len(records)} seeds)"


def _mean(records: list[dict[str, Any]], name: str) -> str:
    return f"{100 * float(np.mean([record[name] for record in records])):.1f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write smaller pictures.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--factor", type=int, default=2)
    chosen = parser.parse_args()
    shrink(chosen.source, chosen.target, chosen.factor)

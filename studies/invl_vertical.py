"""Accuracy of the vertical rows of `invl_defenses.py` (Table 3 of the InvRE paper).

The paper adds noise when the trained parties predict; Gradveil's plans have the defense on in training too. Both are measured:
``predicted`` is a split model that was trained without a defense and predicts with one, ``final_accuracy`` was trained with it
as well. Bases of their own for every record of every step are out of reach in training; such rows have ``predicted`` alone.
The undefended training is kept in the work folder and shared by all rows, and the rows are attacked at its weights.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.torch import save

from gradveil.errors import BadUpdate
from gradveil.federation.vertical import VerticalState
from gradveil.federation.vertical_training import VerticalTraining, build_vertical, train_vertical
from gradveil.storage.files import write_whole
from gradveil.study.federation import FederationSettings


def shrink(source: Path, target: Path, factor: int) -> None:
    """Write pictures with the mean of ``factor`` × ``factor`` pixels for each block: a core can decompose their Jacobians."""
    with np.load(source, allow_pickle=False) as archive:
        arrays = dict(archive)
    for name in (name for name in arrays if name.startswith("x_")):
        count, height, width, channels = arrays[name].shape
        blocks = arrays[name].reshape(count, height // factor, factor, width // factor, factor, channels)
        arrays[name] = blocks.mean((2, 4)).round().astype(np.uint8)
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write_whole(target, packed.getvalue())


def settings_of(options: SimpleNamespace, defense: str) -> FederationSettings:
    """Return the schedule; it was chosen on the undefended training alone."""
    return FederationSettings(
        data=options.data,
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


def undefended(options: SimpleNamespace) -> tuple[VerticalTraining, VerticalState]:
    """Train without a defense, or read what was trained before, and return its last state."""
    folder = Path(options.out) / f"undefended-vertical-{options.seed}"
    settings = settings_of(options, "none")
    weights = train_vertical(settings, cut=options.cut, parts=options.parts, out=folder).weights
    training = build_vertical(settings, options.cut, options.parts)
    start = training.federation.start()
    bottoms = tuple({name: weights[f"bottoms.{party}.{name}"] for name in own} for party, own in enumerate(start.bottoms))
    top = {name: weights[f"top.{name}"] for name in start.top}
    return training, dataclasses.replace(start, bottoms=bottoms, top=top)


def weights_of(options: SimpleNamespace) -> str:
    """Return a file of the undefended training as weights of the whole model, for attacks."""
    _, state = undefended(options)
    path = Path(options.out) / f"trained-vertical-{options.seed}.safetensors"
    write_whole(path, save({name: value.contiguous() for own in (*state.bottoms, state.top) for name, value in own.items()}))
    return str(path)


def accuracy(spelling: str, trained: str, options: SimpleNamespace) -> dict[str, Any]:
    """Return accuracy with the defense on at prediction alone, and in training too.

    Args:
        spelling: The row's defense.
        trained: What is trained with; empty where training with it is out of reach.
        options: The settings of the row.
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

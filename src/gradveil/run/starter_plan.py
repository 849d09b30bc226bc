"""``gradveil init``: look at a model and its data, and write a commented plan that fits them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from gradveil.attacks.engine.labels import classifier_layer
from gradveil.data import DATASETS, Dataset, load_source
from gradveil.errors import UsageError
from gradveil.models import batch_norm_layers, build_model, parameter_count
from gradveil.randomness import Seed
from gradveil.run.grid import check_plan
from gradveil.storage.files import write_whole
from gradveil.study.cell import Cell
from gradveil.study.document import KEYS, SECTIONS, toml_text
from gradveil.study.federation import UtilitySettings
from gradveil.study.plan import Plan

__all__ = ["Inspection", "inspect_inputs", "plan_text", "write_plan"]

FEW_CANDIDATES = 100
DEFAULT_RECORDS = 64
QUIET_KEYS = frozenset({"steps", "execution", "risk", "lists", "out", "fail_if", "labels", "scale", "read", "weights", "state"})
"""Shown as a comment where the plan does not set them."""

EXAMPLES: dict[str, Any] = {
    "steps": 0,
    "execution": "auto",
    "risk": "auto",
    "lists": "auto",
    "out": "results",
    "fail_if": "identified>0.05",
    "labels": "labels.csv",
    "scale": "minmax",
    "read": "owner_column=patient",
    "weights": "model.safetensors",
    "state": ["untrained", "trained(steps=200)"],
}
VERTICAL_EXAMPLES: dict[str, Any] = {"cut": ["none", "cut1"], "parts": "left_right", "party": 0, "sees": "embedding"}
UTILITY = "Accuracy, bytes and time beside privacy, for `gradveil recommend`: take the marks away to train with every defense."
VERTICAL = "Vertical learning beside it: models are cut, parties have parts of every record and send embeddings."


@dataclass(frozen=True)
class Inspection:
    """What was found out about a model and its data.

    Attributes:
        shape: Shape of one input.
        classes: Number of classes.
        counts: Records per class.
        owners: Number of natural owners, 0 where unknown.
        builtin: Whether the data ships with public packages.
        parameters: Trainable entries of the model.
        batch_norm: Number of BatchNorm layers.
        dropout: Number of dropout layers that are not off.
        classifier: Name of the last layer with one row per class, or empty.
        bias: Whether that layer has a bias.
        relu: Whether the model has ReLUs.
    """

    shape: tuple[int, ...]
    classes: int
    counts: tuple[int, ...]
    owners: int
    builtin: bool
    parameters: int
    batch_norm: int
    dropout: int
    classifier: str
    bias: bool
    relu: bool

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(self.counts)

    def sentences(self) -> list[str]:
        """Return what was found, and what it means for an audit, one sentence each."""
        shape = "×".join(str(side) for side in self.shape)
        present = [count for count in self.counts if count]
        several = f"in {self.classes} classes, {min(present)} to {max(present)} of each"
        found = [
            f"data: {self.records} records of shape {shape} {several if self.classes > 1 else 'with a mask each'}",
            f"model: {self.parameters:,} parameters",
        ]
        if self.owners:
            found.append(f"owners: {self.owners}; the report shows exposure for each of them under a pseudonym")
        if self.records < FEW_CANDIDATES:
            found.append(f"few records: identifying one among fewer than {FEW_CANDIDATES} is easier than it sounds")
        found += self._about_the_model()
        if not self.builtin:
            found.append("your data: pictures and record ids stay out of the report unless you ask with --private")
        return found

    def _about_the_model(self) -> list[str]:
        found = []
        if self.batch_norm:
            found.append(f"BatchNorm: {self.batch_norm} layers; say below whether clients train in eval or train mode")
        if self.dropout:
            found.append(f"dropout: {self.dropout} layers; the audit switches them off; with them on, updates leak a little less")
        if not self.classifier:
            found.append("last layer: none with one row per class, so labels cannot be read off the update")
        elif self.bias:
            found.append(f"last layer: {self.classifier!r} has a bias, from whose gradient labels are read off exactly")
        else:
            found.append(f"last layer: {self.classifier!r} has no bias; labels are guessed from its weights instead")
        if self.relu:
            found.append("ReLU: harder for plain gradient matching; the ensembles have a recipe for it")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return what was found as plain JSON values."""
        return {
            "shape": list(self.shape),
            "classes": self.classes,
            "records": self.records,
            "counts": list(self.counts),
            "owners": self.owners,
            "parameters": self.parameters,
            "batch_norm_layers": self.batch_norm,
            "dropout_layers": self.dropout,
            "classifier": self.classifier,
            "classifier_bias": self.bias,
            "relu": self.relu,
            "sentences": self.sentences(),
        }


def inspect_inputs(plan: Plan) -> Inspection:
    """Load the first data of a plan and build its first model, and look at both."""
    data = load_source(Cell(data=plan.data[0], labels="".join(plan.labels[:1]), scale=plan.scale, read=plan.read))
    weights = plan.weights[0] if plan.weights else None
    seed = Seed(plan.seed).child("model")
    shapes: dict[str, Any] = {"input_shape": data.input_shape, "classes": data.classes, "dense": data.dense}
    model = build_model(plan.model[0], seed=seed, weights=weights, **shapes)
    return _inspect(data, model)


def _inspect(data: Dataset, model: nn.Module) -> Inspection:
    named = dict(model.named_parameters())
    layer = "" if data.dense else classifier_layer(dict(named), data.classes) or ""
    return Inspection(
        shape=data.input_shape,
        classes=data.classes,
        counts=tuple(data.counts()),
        owners=len(set(data.owners)) if data.owners else 0,
        builtin=data.builtin,
        parameters=parameter_count(model),
        batch_norm=len(batch_norm_layers(model)),
        dropout=sum(isinstance(part, _DropoutNd) and part.p > 0 for part in model.modules()),
        classifier=layer.removesuffix(".weight"),
        bias=bool(layer) and layer.removesuffix("weight") + "bias" in named,
        relu=any(isinstance(part, (nn.ReLU, nn.ReLU6, nn.LeakyReLU)) for part in model.modules()),
    )


def write_plan(path: Path, *, force: bool = False, **choices: Any) -> tuple[Path, Inspection]:
    """Inspect model and data, and write a commented plan for them.

    Args:
        path: The file to write.
        force: Whether a file that is there already may be replaced.
        choices: Fields of `Plan`: data, labels, scale, read, model, weights.

    Returns:
        The path, and what was found.

    Raises:
        UsageError: The file is there already or cannot be written, or model and data do not fit.
    """
    if path.is_dir():
        raise UsageError(f"{str(path)!r} is a folder; name a file, as in {str(path / 'plan.toml')!r}")
    if path.exists() and not force:
        raise UsageError(f"{str(path)!r} is there already; choose another name with --out, or replace it with --force")
    plan = Plan.default(**choices)
    check_plan(plan)
    found = inspect_inputs(plan)
    title = f"Audit of {plan.model[0]} on {Path(plan.data[0]).name}"
    plan = plan.override(title=title, records=min(DEFAULT_RECORDS, found.records))
    text = plan_text(_from_folder(plan, path.parent), found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError as error:
        raise UsageError(f"cannot write the plan to {str(path)!r}: {error.strerror or error}") from error
    return path, found


def plan_text(plan: Plan, found: Inspection) -> str:
    """Return a plan as TOML with a comment for every key; keys that are not set are shown, switched off."""
    document, usual = plan.as_dict(), Plan().as_dict()
    lines = ["# A plan for gradveil audit; every key is explained in docs/plans.md.", "#"]
    lines += [f"# {sentence}" for sentence in found.sentences()]
    for section in SECTIONS:
        if section not in document:
            lines += _switched_off(section)
            continue
        lines += ["", f"[{section}]"]
        for key in (key for key in KEYS if key.section == section):
            value, off = document[section].get(key.toml), ""
            # What was asked for is written, be it what the example says too: people have files called labels.csv.
            if key.toml in QUIET_KEYS and value == usual[section].get(key.toml):
                value, off = EXAMPLES[key.toml], "# "
            if value is None:
                continue
            lines.append(f"{off}{key.toml} = {_laid_out(value, off)}{_comment(key.meaning, value)}")
    return "\n".join(lines) + "\n"


def _switched_off(section: str) -> list[str]:
    """Return a whole section as comments; only those of utility and of vertical learning can be left out of a plan."""
    values, why = (UtilitySettings().as_dict(), UTILITY) if section == "utility" else (VERTICAL_EXAMPLES, VERTICAL)
    lines = ["", f"# {why}", f"# [{section}]"]
    keys = [key for key in KEYS if key.section == section]
    return lines + [f"# {key.toml} = {toml_text(values[key.toml])}{_comment(key.meaning, values[key.toml])}" for key in keys]


def _laid_out(value: Any, off: str) -> str:
    """Return a value as TOML, a long list one entry per line."""
    text = toml_text(value)
    if isinstance(value, list) and len(text) > 60:
        return "[\n" + "".join(f"{off}  {toml_text(each)},\n" for each in value) + f"{off}]"
    return text


def _comment(meaning: str, value: Any) -> str:
    return f"  # {meaning}" if len(toml_text(value)) < 60 or isinstance(value, list) else f"\n#   {meaning}"


def _from_folder(plan: Plan, folder: Path) -> Plan:
    """Return the plan with relative paths as they read from the folder the plan is written to."""

    def seen(path: str) -> str:
        return path if not path or os.path.isabs(path) else os.path.relpath(path, folder)

    def seen_source(source: str) -> str:
        if source in DATASETS.names():
            return source
        path = seen(source)
        return os.path.join(".", path) if path in DATASETS.names() else path

    def seen_code(text: str) -> str:
        file, colon, rest = text.partition(":")
        return f"{seen(file)}{colon}{rest}" if file.endswith(".py") else text

    return plan.override(
        data=tuple(seen_source(source) for source in plan.data),
        labels=tuple(seen(path) for path in plan.labels),
        scale=plan.scale,
        read=plan.read,
        model=tuple(seen_code(model) for model in plan.model),
        weights=tuple(seen(path) for path in plan.weights),
    )

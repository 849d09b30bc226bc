"""A plan: a validated grid data × model × training state × batch size × local steps × defense × attack.

    plan = Plan.from_toml(Path("plan.toml"))       # or Plan.default(records=64, defense=["none", "pruning:ladder"])
    cells = cells_of(plan)                         # gradveil.run.grid: every name is looked up there, before any work

Paths in a plan file are relative to its folder. All keys are in docs/plans.md.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError, suggest
from gradveil.study.keys import KEYS, SECTIONS, read_document, read_value, start_at, toml_text
from gradveil.study.utility import UtilitySettings

__all__ = ["DEFAULT_DEFENSES", "Plan"]

DEFAULT_DEFENSES = (
    "none",
    "gaussian_noise(std=0.001)",
    "data_noise(std=0.1)",
    "clipping(bound=1.0) + gaussian_noise(std=0.001)",
    "pruning(rate=0.9)",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure. Tuples are axes of the grid; one value may be given for a tuple of one.

    Attributes:
        title: What the report is called.
        seed: Root of all randomness.
        records: How many records are attacked in every cell.
        ensemble: Named ensembles, or spellings of single attacks.
        steps: Cap on optimisation steps per recipe; 0 leaves the ensemble's own.
        device: ``auto``, ``cpu`` or ``cuda``.
        execution: ``auto``, ``batched``, ``looped``, ``captured`` or ``compiled``.
        risk: How risk without an attack is scored: ``auto``, ``dense``, ``gram``, ``leading``; ``off`` leaves it out.
        fail_if: Limits; see `gradveil.verdict.limits`.
        out: Folder for results, or empty.
        data: Built-in names or paths.
        labels: One label file for all data, or one for each.
        scale: How values of files come to [0, 1].
        read: How files are read otherwise; see `gradveil.data.reading`.
        loss: Registered loss or ``module:function``.
        batch_norm: ``eval`` or ``train``.
        optimizer: ``sgd`` or ``adam``.
        learning_rate: Of the local steps.
        known_labels: Whether the attacker is given the labels.
        bn_statistics: Whether uploads carry BatchNorm statistics, which the attacker then uses; needs ``batch_norm = train``.
        model: Built-in spellings or ``module:factory``.
        weights: One weights file for all models, or one for each.
        state: ``untrained``, ``given``, ``trained(steps=N)``; empty means given where there are weights, else untrained.
        batch_size: Records behind one update.
        local_steps: Local steps behind one update.
        clients: Clients behind one sum.
        rounds: Rounds seen on the same records.
        defense: Spellings; ``name:ladder`` stands for all strengths of a defense.
        cut: Where models are cut for vertical learning; ``none`` stands for horizontal learning beside it; empty is horizontal.
        parts: Who owns which features of a cut model; see `gradveil.data.divisions`.
        party: Which party is attacked.
        sees: What the attacker sees of it: ``embedding``, or ``embedding_gradient``.
        utility: How to train with every defense, to measure accuracy, bytes and time; None measures privacy alone.
    """

    title: str = ""
    seed: int = 0
    records: int = 16
    ensemble: tuple[str, ...] = ("quick",)
    steps: int = 0
    device: str = "auto"
    execution: str = "auto"
    risk: str = "auto"
    fail_if: tuple[str, ...] = ()
    out: str = ""
    data: tuple[str, ...] = ("photos",)
    labels: tuple[str, ...] = ()
    scale: str = ""
    read: str = ""
    loss: str = "cross_entropy"
    batch_norm: str = "eval"
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    known_labels: bool = False
    bn_statistics: bool = False
    model: tuple[str, ...] = ("lenet",)
    weights: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    batch_size: tuple[int, ...] = (1,)
    local_steps: tuple[int, ...] = (1,)
    clients: tuple[int, ...] = (1,)
    rounds: tuple[int, ...] = (1,)
    defense: tuple[str, ...] = DEFAULT_DEFENSES
    cut: tuple[str, ...] = ()
    parts: str = "whole"
    party: int = 0
    sees: str = "embedding"
    utility: UtilitySettings | None = None

    def __post_init__(self) -> None:
        """Check every value; names are looked up later, by `gradveil.run.grid`."""
        for key in (key for key in KEYS if key.section != "utility"):
            value = read_value(key, key.name if key.field == key.name else key.field, getattr(self, key.field))
            object.__setattr__(self, key.field, _expand_home(value) if key.field in ("data", "labels", "weights") else value)
        for name in ("ensemble", "data", "model", "batch_size", "local_steps", "clients", "rounds", "defense"):
            if not getattr(self, name):
                raise UsageError(f"{name} is empty; name at least one")
        object.__setattr__(self, "scale", "" if self.scale == "auto" else self.scale)
        for name, partner in (("labels", "data"), ("weights", "model")):
            given, wanted = len(getattr(self, name)), len(getattr(self, partner))
            if given not in (0, 1, wanted):
                raise UsageError(f"there are {given} {name} for {wanted} entries of {partner}; give one for all, or one for each")

    @classmethod
    def default(cls, **overrides: Any) -> Plan:
        """Return the plan that runs without a plan file, with some values changed."""
        return cls().override(**overrides)

    @classmethod
    def from_toml(cls, path: Path) -> Plan:
        """Read a plan file; raise one sentence for whatever is wrong with it."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{str(path)!r} cannot be read as TOML: {error}") from error
        except OSError as error:
            raise UsageError(f"cannot read the plan {str(path)!r}: {error.strerror or error}") from error
        return cls.from_dict(document, where=str(path), folder=path.parent)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], *, where: str = "plan", folder: Path | None = None) -> Plan:
        """Return the plan of a parsed document, as `as_dict` gives it.

        Args:
            document: Sections with their keys.
            where: What to call it in sentences.
            folder: Where relative paths start; None leaves them alone.
        """
        fields = read_document(document, where)
        try:
            if "utility" in fields:
                fields["utility"] = UtilitySettings(**fields["utility"])
            return cls(**(fields if folder is None else start_at(fields, folder)))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error

    def override(self, **changes: Any) -> Plan:
        """Return a copy with some values changed; None leaves a value alone.

        What belongs to a replaced value goes with it: labels, scale and read with the data, weights with the model.
        """
        given = {name: value for name, value in changes.items() if value is not None}
        names = [field.name for field in dataclasses.fields(self)]
        for name in given:
            if name not in names:
                raise UsageError(f"a plan has no {name!r}{suggest(name, names)}")
        if "data" in given:
            given = {"labels": (), "scale": "", "read": "", **given}
        if "model" in given:
            given = {"weights": (), "state": tuple(s for s in self.state if s != "given"), **given}
        if given.get("weights") and "state" not in changes:
            given["state"] = ()
        return dataclasses.replace(self, **given)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the plan as sections of plain values, without those that are empty; no utility or cut, no section for it."""
        absent = {"utility" if self.utility is None else "", "" if self.cut else "vertical"}
        asked = [section for section in SECTIONS if section not in absent]
        document: dict[str, dict[str, Any]] = {section: {} for section in asked}
        for key in (key for key in KEYS if key.section in asked):
            value = getattr(self.utility if key.section == "utility" else self, key.field)
            if isinstance(value, tuple):
                value = value[0] if len(value) == 1 else list(value)
            if value not in ("", []):
                document[key.section][key.name] = value
        return document

    def to_toml(self) -> str:
        """Return the plan as a file that `from_toml` reads; paths are written as they are."""
        parts = []
        for section, table in self.as_dict().items():
            parts.append("\n".join([f"[{section}]", *(f"{name} = {toml_text(value)}" for name, value in table.items())]))
        return "\n\n".join(parts) + "\n"


def _expand_home(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(os.path.expanduser(value) for value in values)

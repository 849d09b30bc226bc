"""A plan: a validated grid data × model × training state × batch size × local steps × defense × attack.

    plan = Plan.from_toml(Path("plan.toml"))       # or Plan.default(records=64, defense=["none", "pruning:ladder"])
    cells = plan.cells()                           # every name is looked up here, before any work

Paths in a plan file are relative to its folder. All keys are in docs/plans.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradveil.audit.ladders import expand_defense, look_up
from gradveil.audit.plan_keys import KEYS, SECTIONS, read_document, read_value, start_at, toml_text
from gradveil.audit.utility_settings import UtilitySettings
from gradveil.audit.vertical import HORIZONTAL, check_cuts, fitting_cells
from gradveil.errors import UsageError, suggest
from gradveil.registry import parse_call

if TYPE_CHECKING:
    from gradveil.audit.cells import Cell

__all__ = ["DEFAULT_DEFENSES", "Plan", "find_device"]

DEFAULT_DEFENSES = (
    "none",
    "gaussian_noise(std=0.001)",
    "data_noise(std=0.1)",
    "clipping(bound=1.0) + gaussian_noise(std=0.001)",
    "pruning(rate=0.9)",
)
STATES = ("untrained", "given", "trained")
TRAINED_SETTINGS = ("steps", "learning_rate", "batch")


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
        fail_if: Limits; see `gradveil.audit.limits`.
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
        parts: Who owns which features of a cut model; see `gradveil.data.vertical`.
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
        """Check every value; names are looked up later, by `cells`."""
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

    def check(self) -> None:
        """Look up every name, without loading data or building models.

        Raises:
            UsageError: With the nearest right name.
        """
        from gradveil.attacks.ensembles import resolve
        from gradveil.data import DIVISIONS
        from gradveil.learning.losses import loss_by_name
        from gradveil.models import MODELS

        for defense in self.defense:
            expand_defense(defense)
        for model in self.model:
            name, _ = parse_call(model)
            if ":" not in name:
                MODELS.get(name)
        for ensemble in self.ensemble:
            look_up(ensemble, resolve)
        look_up(self.loss, loss_by_name)
        look_up(self.parts, DIVISIONS.build)
        self._check_files()
        if self.bn_statistics and self.batch_norm != "train":
            raise UsageError("bn_statistics: with batch_norm = 'eval' statistics stay as they are; set batch_norm = 'train'")
        self._check_limits()
        self._check_utility()
        find_device(self.device)

    def _check_files(self) -> None:
        from gradveil.data import DATASETS

        for source in self.data:
            if source not in DATASETS.names() and not Path(source).exists():
                hint = suggest(source, DATASETS.names())
                raise UsageError(f"{source!r} is neither built-in data nor a file or folder{hint}")
        for kind, files in (("label", self.labels), ("weights", self.weights)):
            for file in files:
                if file and not Path(file).is_file():
                    raise UsageError(f"there is no {kind} file {file!r}")

    def _check_limits(self) -> None:
        from gradveil.audit.limits import parse_limit

        defenses = self.defenses() if self.fail_if else []
        for text in self.fail_if:
            limit = parse_limit(text)
            if limit.metric == "invre" and self.risk == "off":
                raise UsageError(f"the limit {text!r} needs scores of risk, and risk is off; set it to auto")
            if not any(limit.covers(spelling) for spelling in defenses):
                raise UsageError(
                    f"the limit {text!r} fits none of the defenses {', '.join(defenses)}; name one of them in brackets"
                )

    def _check_utility(self) -> None:
        from gradveil.audit.trainings import Training
        from gradveil.data import PARTITIONS

        if self.utility is not None:
            look_up(self.utility.partition, PARTITIONS.build)
            Training(data=self.data[0], model=self.model[0], utility=self.utility).federation()

    def check_inputs(self) -> None:
        """Load all data and build all models once, so that the last cell cannot fail for what could be seen before the first.

        Raises:
            UsageError: One sentence about shapes, values, weights or too few records.
        """
        from gradveil.audit.cells import Cell
        from gradveil.audit.subjects import check_masks
        from gradveil.data import load_source
        from gradveil.models import build_model
        from gradveil.randomness import Seed

        self.check()
        seed = Seed(self.seed).child("model")
        for source, labels in self._sources():
            data = load_source(Cell(data=source, labels=labels, scale=self.scale, read=self.read))
            units = [size * clients for size in self.batch_size for clients in self.clients]
            wanted = max(-(-self.records // unit) * unit for unit in units)
            if wanted > len(data):
                cure = "lower records, batch_size or clients"
                raise UsageError(f"the audit needs {wanted} records and {source!r} has {len(data)}; {cure}")
            check_masks(data, self.known_labels)
            shapes: dict[str, Any] = {"input_shape": data.input_shape, "classes": data.classes, "dense": data.dense}
            for model, weights, _ in self._models():
                build_model(model, seed=seed, weights=weights or None, **shapes)
        check_cuts(self.cells())
        if self.utility is not None:
            from gradveil.audit.trainings import check_trainings

            check_trainings(self.cells(), self.utility)

    def defenses(self) -> list[str]:
        """Return all defenses with ladders expanded, in one spelling each."""
        return list(dict.fromkeys(spelling for text in self.defense for spelling in expand_defense(text)))

    def _sources(self) -> list[tuple[str, str]]:
        return list(zip(self.data, _spread(self.labels, len(self.data)), strict=True))

    def _models(self) -> list[tuple[str, str, str]]:
        """Return model, weights and state of every point; weights belong to the state ``given``."""
        points = []
        for model, weights in zip(self.model, _spread(self.weights, len(self.model)), strict=True):
            states = [_check_state(state) for state in self.state] or ["given" if weights else "untrained"]
            if weights and "given" not in states:
                raise UsageError(f"the weights {weights!r} would not be used: add 'given' to state, or leave them out")
            if "given" in states and not weights:
                raise UsageError(f"the state 'given' needs weights for model {model!r}; name a weights file")
            points += [(model, weights if state == "given" else "", state) for state in states]
        return points

    def cells(self) -> list[Cell]:
        """Return every point of the grid, defenses of one setting next to each other; all names are looked up first."""
        from gradveil.audit.cells import Cell

        self.check()
        grid = itertools.product(
            self._sources(),
            self._models(),
            self.batch_size,
            self.local_steps,
            self.clients,
            self.rounds,
            self.cut or (HORIZONTAL,),
            self.ensemble,
            self.defenses(),
        )
        common: dict[str, Any] = {
            "scale": self.scale,
            "read": self.read,
            "records": self.records,
            "seed": self.seed,
            "batch_norm": self.batch_norm,
            "loss": self.loss,
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "known_labels": self.known_labels,
            "bn_statistics": self.bn_statistics,
            "steps": self.steps,
            "execution": self.execution,
            "risk": self.risk,
            "device": find_device(self.device),
        }
        vertical: dict[str, Any] = {"parts": self.parts, "party": self.party, "sees": self.sees}
        cells = [
            Cell(
                data=source,
                labels=labels,
                model=model,
                weights=weights,
                state=state,
                batch_size=size,
                local_steps=steps,
                clients=clients,
                rounds=rounds,
                ensemble=ensemble,
                defense=defense,
                **common,
                **({"cut": cut, **vertical} if cut != HORIZONTAL else {}),
            )
            for (source, labels), (model, weights, state), size, steps, clients, rounds, cut, ensemble, defense in grid
        ]
        fitting = fitting_cells(list(dict.fromkeys(cells)), strict=self.defense != DEFAULT_DEFENSES) if self.cut else cells
        return list(dict.fromkeys(fitting))


def find_device(wanted: str) -> str:
    """Return ``cpu`` or ``cuda``; ``auto`` takes a GPU if there is one."""
    import torch

    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UsageError("device is 'cuda', and torch finds no GPU here; use auto or cpu")
    return "cuda" if wanted != "cpu" and there else "cpu"


def _check_state(state: str) -> str:
    name, settings = parse_call(state)
    if name not in STATES:
        raise UsageError(f"there is no training state {name!r}{suggest(name, STATES)}")
    known = TRAINED_SETTINGS if name == "trained" else ()
    for key, value in settings.items():
        if key not in known:
            raise UsageError(f"training state {name!r} has no setting {key!r}{suggest(key, known)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise UsageError(f"training state {state!r}: {key} is {value!r}; give a number above 0")
    return state


def _spread(values: tuple[str, ...], count: int) -> tuple[str, ...]:
    return values if len(values) == count else (values or ("",)) * count


def _expand_home(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(os.path.expanduser(value) for value in values)

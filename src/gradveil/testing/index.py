"""Make the index of methods from the methods themselves: what `gradveil.registry.INDEX` must hold.

Every module of a room is imported here, and what it registered is described; nothing else lists methods.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from gradveil.registry import Registry, spell

__all__ = ["REGISTRIES", "describe_method", "make_index"]

REGISTRIES = {
    "defenses": ("gradveil.defenses.base", "DEFENSES"),
    "attacks": ("gradveil.attacks.base", "ATTACKS"),
    "metrics": ("gradveil.metrics.base", "METRICS"),
    "models": ("gradveil.models.base", "MODELS"),
    "datasets": ("gradveil.data.base", "DATASETS"),
    "partitions": ("gradveil.data.partitions", "PARTITIONS"),
    "divisions": ("gradveil.data.divisions", "DIVISIONS"),
    "losses": ("gradveil.learning.losses", "LOSSES"),
    "networks": ("gradveil.networks.base", "NETWORKS"),
}
"""Kinds in the plural, as people ask for them, and where their registry lives."""
HANDED_IN = ("input_shape", "classes", "generator")
"""Settings of a model that the data decides, and the draw of a network's first weights."""


def make_index() -> dict[str, dict[str, Any]]:
    """Return every method by kind and name: the module that registers it, and its entry in the catalogue."""
    index: dict[str, dict[str, Any]] = {}
    for plural, (home, name) in REGISTRIES.items():
        _import_all(home.rpartition(".")[0])
        registry: Registry[Any, Any] = getattr(importlib.import_module(home), name)
        index[registry.kind] = {
            each: {"module": method.__module__, "entry": describe_method(plural, card.as_dict(), method)}
            for each, (method, card) in registry.registered().items()
            if method.__module__.startswith("gradveil.")
        }
    index["ensemble"] = {each["name"]: {"module": "gradveil.attacks.ensembles", "entry": each} for each in _ensembles()}
    return index


def _import_all(package: str) -> None:
    room = importlib.import_module(package)
    for found in pkgutil.walk_packages(room.__path__, f"{package}."):
        importlib.import_module(found.name)


def describe_method(kind: str, card: dict[str, Any], method: Any) -> dict[str, Any]:
    """Return the catalogue entry of one method: its card, its settings with their defaults, and its description."""
    found = {"kind": kind, **card, "settings": _settings(method), "description": inspect.getdoc(method) or ""}
    if kind == "defenses":
        found["stations"] = list(method.stations(method))
        found["guarantee"] = _guarantees(method)
    return found


def _guarantees(method: Any) -> list[str]:
    """Return what is proved about every rung of the ladder, one release each, or nothing where nothing is."""
    from gradveil.client.guarantees import privacy_of

    proved = [(rung, privacy_of(method(**rung))) for rung in method.card.ladder]
    return [f"{_rung(rung)}: {found.sentence}" for rung, found in proved if found.epsilon is not None]


def _rung(rung: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in rung.items())


def _settings(method: Any) -> dict[str, Any]:
    if isinstance(method, type) and dataclasses.is_dataclass(method):
        return {field.name: _default(field) for field in dataclasses.fields(method) if field.init}
    if isinstance(method, type) or not callable(method):
        return {}
    return _parameters(method)


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings of a function: parameters with a default."""
    found = inspect.signature(function).parameters.values()
    return {p.name: _plain(p.default) for p in found if p.default is not p.empty and p.name not in HANDED_IN}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return _plain(field.default)
    return _plain(field.default_factory()) if field.default_factory is not dataclasses.MISSING else None


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _ensembles() -> list[dict[str, Any]]:
    from gradveil.attacks.ensembles import ENSEMBLES

    return [
        {
            "kind": "ensembles",
            "name": ensemble.name,
            "summary": ensemble.summary,
            "rehearsals": ensemble.rehearsals,
            "members": [{"attack": spell(member.attack), "stances": list(member.stances)} for member in ensemble.members],
        }
        for ensemble in ENSEMBLES.values()
    ]

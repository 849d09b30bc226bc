"""What there is: every registered method of every kind, with its card, settings and description."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from gradveil.errors import UsageError, suggest

__all__ = ["KINDS", "entries", "find"]

REGISTRIES = {
    "defenses": ("gradveil.defenses", "DEFENSES"),
    "attacks": ("gradveil.attacks", "ATTACKS"),
    "metrics": ("gradveil.metrics", "METRICS"),
    "models": ("gradveil.models", "MODELS"),
    "datasets": ("gradveil.data", "DATASETS"),
    "partitions": ("gradveil.data", "PARTITIONS"),
    "divisions": ("gradveil.data", "DIVISIONS"),
    "losses": ("gradveil.learning", "LOSSES"),
    "networks": ("gradveil.generators", "NETWORKS"),
}
KINDS = (*REGISTRIES, "ensembles")
HANDED_IN = ("input_shape", "classes", "generator")
"""Settings of a model that the data decides, and the draw of a network's first weights."""


def entries(kind: str) -> list[dict[str, Any]]:
    """Return all methods of one kind: card, settings with their defaults, and description.

    Raises:
        UsageError: There is no such kind.
    """
    known = kind if kind in KINDS else next((name for name in KINDS if kind and name in (kind + "s", kind + "es")), None)
    if known is None:
        raise UsageError(f"there is no kind {kind!r}{suggest(kind, KINDS)}")
    if known == "ensembles":
        return _ensembles()
    module, name = REGISTRIES[known]
    registry = getattr(importlib.import_module(module), name)
    return [_entry(known, card.as_dict(), registry.get(card.name)) for card in registry.cards()]


def find(name: str) -> list[dict[str, Any]]:
    """Return every method of any kind that has this name; a short name of an ensemble stands for its versions, newest first.

    Raises:
        UsageError: There is none, with the nearest name.
    """
    bare = name.partition("(")[0].strip()
    everything = [entry for kind in KINDS for entry in entries(kind)]
    found = [entry for entry in everything if entry["name"] == bare or _unversioned(entry) == bare]
    if not found:
        raise UsageError(f"there is no method called {bare!r}{suggest(bare, {entry['name'] for entry in everything})}")
    if all(_unversioned(entry) == bare for entry in found):
        found.reverse()  # they are listed by number, and the short name means the newest
    return found


def _unversioned(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rpartition("-")[0] if entry["kind"] == "ensembles" else ""


def _entry(kind: str, card: dict[str, Any], method: Any) -> dict[str, Any]:
    found = {"kind": kind, **card, "settings": _settings(method), "description": inspect.getdoc(method) or ""}
    if kind == "defenses":
        found["stations"] = list(method.stations(method))
        found["guarantee"] = _guarantees(method)
    if kind == "networks":
        found["weights"], found["measured"] = _weights(card["name"])
    return found


def _weights(name: str) -> tuple[str, dict[str, Any]]:
    """Return which trained weights there are, or how to make them, and what was measured of them."""
    from gradveil.generators.store import find_card, network_card

    try:
        path, told = find_card(name), network_card(name)
    except UsageError as error:
        return str(error), {}
    data = ", ".join(f"{each['train']} pictures of {each['source']}" for each in told.get("data", ()))
    told_of = f"{path.stem}.safetensors, {told['bytes'] / 1e6:.1f} MB, trained on {data}; licence: {told['licence']}"
    return told_of, dict(told.get("metrics", {}))


def _guarantees(method: Any) -> list[str]:
    """Return what is proved about every rung of the ladder, one release each, or nothing where nothing is."""
    from gradveil.risk import privacy_of

    proved = [(rung, privacy_of(method(**rung))) for rung in method.card.ladder]
    return [f"{_rung(rung)}: {found.sentence()}" for rung, found in proved if found.epsilon is not None]


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
    from gradveil.registry import spell

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

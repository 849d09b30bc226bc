"""What there is: every registered method of every kind, with its card, settings and description.

All of it stands in the index that comes with the package, so nothing here loads torch; only plug-ins are asked themselves.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from gradveil.errors import UsageError, suggest
from gradveil.registry import indexed

__all__ = ["KINDS", "entries", "find"]

KINDS = {
    "defenses": "defense",
    "attacks": "attack",
    "metrics": "metric",
    "models": "model",
    "datasets": "dataset",
    "partitions": "partition",
    "divisions": "division",
    "losses": "loss",
    "networks": "network",
    "ensembles": "ensemble",
}
"""Kinds as people ask for them, and what their registry calls one of them."""


def entries(kind: str) -> list[dict[str, Any]]:
    """Return all methods of one kind: card, settings with their defaults, and description.

    Raises:
        UsageError: There is no such kind.
    """
    known = kind if kind in KINDS else next((name for name in KINDS if kind and kind == KINDS[name]), None)
    if known is None:
        raise UsageError(f"there is no kind {kind!r}{suggest(kind, KINDS)}")
    found = [dict(each["entry"]) for each in indexed(KINDS[known]).values()] + _plugged_in(known)
    return [entry | _weights(entry["name"]) for entry in found] if known == "networks" else found


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


def _plugged_in(kind: str) -> list[dict[str, Any]]:
    """Return what other packages registered."""
    if not importlib.metadata.entry_points(group=f"gradveil.{KINDS[kind]}"):
        return []
    from gradveil.testing.index import REGISTRIES, describe_method

    home, name = REGISTRIES[kind]
    registry = getattr(importlib.import_module(home), name)
    own = indexed(registry.kind)
    return [
        describe_method(kind, registry.card(each).as_dict(), registry.get(each)) for each in registry.names() if each not in own
    ]


def _weights(name: str) -> dict[str, Any]:
    """Return which trained weights there are, or how to make them, and what was measured of them."""
    from gradveil.networks.cards import find_card, network_card, weights_beside

    try:
        path, told = find_card(name), network_card(name)
    except UsageError as error:
        return {"weights": str(error), "measured": {}}
    data = ", ".join(f"{each['train']} pictures of {each['source']}" for each in told.get("data", ()))
    told_of = f"{weights_beside(path).name}, {told['bytes'] / 1e6:.1f} MB, trained on {data}; licence: {told['licence']}"
    return {"weights": told_of, "measured": dict(told.get("metrics", {}))}

"""``gradveil show``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gradveil.cli.output import AsJson, print_json

__all__ = ["show"]

APART = ("kind", "name", "summary", "settings", "description", "members", "ladder", "guarantee")


def show(name: Annotated[str, typer.Argument(metavar="NAME", hidden=True)], as_json: AsJson = False) -> None:
    """Show all about one method.

    NAME is a method of any kind, as `gradveil list` shows it. What it does, its settings, cost, weakness and paper.

    Example: gradveil show gaussian_noise
    """
    from gradveil.cli.catalogue import find

    found = find(name)
    if as_json:
        print_json(found)
        return
    typer.echo("\n\n".join(_text(entry) for entry in found))


def _text(entry: dict[str, Any]) -> str:
    lines = [f"{entry['name']} ({entry['kind']})", entry["summary"], ""]
    lines += [
        f"{key.replace('_', ' ')}: {_value(value)}"
        for key, value in entry.items()
        if key not in APART and value not in ("", [], None)
    ]
    if entry.get("settings"):
        lines.append("settings: " + ", ".join(f"{key}={value!r}" for key, value in entry["settings"].items()))
    if entry.get("ladder"):
        lines.append("strengths, weak to strong: " + " < ".join(_call(entry["name"], rung) for rung in entry["ladder"]))
    if entry["kind"] == "defenses":
        lines.append("differential privacy:" + ("" if entry["guarantee"] else " no guarantee by itself"))
        lines += [f"  {each}" for each in entry["guarantee"]]
    lines += [f"member: {member['attack']}, {' / '.join(member['stances'])}" for member in entry.get("members", ())]
    if entry.get("description"):
        lines += ["", entry["description"]]
    return "\n".join(lines)


def _call(name: str, settings: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(each) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={_part(each)}" for key, each in value.items()) or "{}"
    return str(value)


def _part(value: Any) -> str:
    """Return a value inside another one: measured numbers with four digits, not seventeen."""
    if isinstance(value, dict):
        return f"({_value(value)})"
    if isinstance(value, list):
        return f"[{', '.join(_part(each) for each in value)}]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)

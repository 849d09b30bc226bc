"""Every key a plan may hold: its section, what it means, and how its value is read.

This table is the only list of keys; reading, writing, the commented plan of ``gradveil init`` and a test of docs/plans.md use it.
Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError, suggest
from gradveil.registry import indexed, split_chain
from gradveil.study.checks import check_choice, check_number, check_whole, is_number
from gradveil.study.reading import read_text

__all__ = ["KEYS", "SECTIONS", "Key", "read_document", "read_value", "start_at", "toml_text"]

Reader = Callable[[str, Any], Any]
DEVICES = ("auto", "cpu", "cuda")
EXECUTIONS = ("auto", "batched", "looped", "captured", "compiled")
RISKS = ("auto", "off", "dense", "gram", "leading")
SEES = ("embedding", "embedding_gradient")
LARGEST = 2**53
NETWORK_FILE = re.compile(r"""(["'])([^"']+\.(?:safetensors|json))\1""")
"""Weights, or the card beside them, that a setting inside a spelling names, as in refiner(network='own.safetensors')."""


@dataclass(frozen=True)
class Key:
    """One key of a plan.

    Attributes:
        section: The TOML table it belongs to.
        name: Its name there.
        read: Checks one value: ``(place, value) -> value``.
        meaning: One phrase, for documentation and the commented plan.
        field: Name of the field of `Plan`.
        many: Whether a list spans an axis of the grid.
    """

    section: str
    name: str
    read: Reader
    meaning: str
    field: str
    many: bool = False


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f'{place} is {value!r}; give it as text in quotes, as in "name"')
    return value.strip()


def _named(place: str, value: Any) -> str:
    text = _text(place, value)
    if not text:
        raise UsageError(f"{place} is empty; name one, or leave the key out")
    return text


def _flag(place: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{place} is {value!r}; write true or false")
    return value


def _whole(least: int) -> Reader:
    def read(place: str, value: Any) -> int:
        check_whole("", place, value, least, ask="give")
        if value >= LARGEST:
            raise UsageError(f"{place} is {value!r}; give a whole number below {LARGEST}")
        return int(value)

    return read


def _positive(place: str, value: Any) -> float:
    check_number("", place, value, open_below=True, ask="give")
    return float(value)


def _part(place: str, value: Any) -> float:
    if not is_number(value) or not 0 < value < 1:
        raise UsageError(f"{place} is {value!r}; give a share between 0 and 1, as in 0.2")
    return float(value)


def _choice(*choices: str) -> Reader:
    def read(place: str, value: Any) -> str:
        text = _text(place, value)
        check_choice("", place, text, choices)
        return text

    return read


def _risk(place: str, value: Any) -> str:
    """A mode, or true and false for the usual one and none."""
    return ("off", "auto")[value] if isinstance(value, bool) else _choice(*RISKS)(place, value)


def _reading(place: str, value: Any) -> str:
    text = _text(place, value)
    if not text:
        return ""
    return read_text(text)


def _key(section: str, name: str, read: Reader, meaning: str, *, field: str = "", many: bool = False) -> Key:
    return Key(section, name, read, meaning, field or name, many)


KEYS = (
    _key("audit", "title", _text, "what the report is called"),
    _key("audit", "seed", _whole(0), "root of all randomness"),
    _key("audit", "records", _whole(1), "how many records are attacked"),
    _key("audit", "ensemble", _named, "named ensemble (quick, standard) or one attack; a list compares them", many=True),
    _key("audit", "steps", _whole(0), "cap on optimisation steps per recipe; 0 leaves the ensemble's own"),
    _key("audit", "device", _choice(*DEVICES), "auto takes a GPU if there is one"),
    _key("audit", "execution", _choice(*EXECUTIONS), "how attacks are batched; auto decides by device and model"),
    _key("audit", "risk", _risk, "scores of exposure without an attack: auto, off, or a mode (dense, gram, leading)"),
    _key("audit", "fail_if", _named, "limits such as identified>0.05; above one, the exit code is 1", many=True),
    _key("audit", "out", _text, "folder for results"),
    _key("data", "source", _named, "built-in name, .npz, .npy, IDX or folder of pictures", field="data", many=True),
    _key("data", "labels", _text, "label file; one for all sources, or one per source", many=True),
    _key("data", "scale", _choice("", "auto", "minmax", "none"), "how values of files come to [0, 1]: auto, minmax or none"),
    _key("data", "read", _reading, "how files are read otherwise, as in size=64x64, owner_column=patient"),
    _key("training", "loss", _named, "registered loss or module:function"),
    _key("training", "batch_norm", _choice("eval", "train"), "eval uses running statistics, train those of the batch"),
    _key("training", "optimizer", _choice("sgd", "adam"), "of the local steps"),
    _key("training", "learning_rate", _positive, "of the local steps"),
    _key("training", "known_labels", _flag, "whether the attacker is given the true labels"),
    _key("training", "bn_statistics", _flag, "whether uploads carry BatchNorm statistics, which the attacker then uses"),
    _key("grid", "model", _named, "built-in model with settings, or module:factory", many=True),
    _key("grid", "weights", _text, "weights file; one for all models, or one per model", many=True),
    _key("grid", "state", _named, "untrained, given (with weights), or trained(steps=200)", many=True),
    _key("grid", "batch_size", _whole(1), "records behind one update", many=True),
    _key("grid", "local_steps", _whole(1), "local steps behind one update; above 1, weights are shared", many=True),
    _key("grid", "clients", _whole(1), "above 1, the attacker sees only the sum of that many clients", many=True),
    _key("grid", "rounds", _whole(1), "rounds seen on the same records", many=True),
    _key("grid", "defense", _named, "defense or chain; name:ladder expands to all its strengths", many=True),
    _key("vertical", "cut", _named, "where models are cut, as in cut1; none is horizontal learning, beside it", many=True),
    _key("vertical", "parts", _named, "who owns which features: whole, left_right, top_bottom, columns(parties=2)"),
    _key("vertical", "party", _whole(0), "which party is attacked, counted from 0"),
    _key("vertical", "sees", _choice(*SEES), "embedding at prediction; embedding_gradient: in training, its gradient too"),
    _key("utility", "rounds", _whole(1), "federated rounds of one training"),
    _key("utility", "clients", _whole(1), "clients that share the data"),
    _key("utility", "clients_per_round", _whole(1), "clients that train in one round"),
    _key("utility", "partition", _named, "who owns what: iid, dirichlet(alpha=0.5), by_owner, class_balance(rho=0.5)"),
    _key("utility", "local_epochs", _whole(1), "passes of a client over its records in one round"),
    _key("utility", "minibatch", _whole(0), "records of one local step; 0 takes all of a client's"),
    _key("utility", "learning_rate", _positive, "of the local steps"),
    _key("utility", "aggregation", _named, "how the server combines what it receives"),
    _key("utility", "test_share", _part, "share of the records kept back to measure accuracy on"),
    _key("utility", "evaluate_every", _whole(1), "rounds between two looks at the accuracy"),
    _key("utility", "seeds", _whole(1), "trainings per defense, each paired with an undefended one"),
)
SECTIONS = tuple(dict.fromkeys(key.section for key in KEYS))


def read_value(key: Key, place: str, value: Any) -> Any:
    """Return the checked value of a key: one value, or a tuple for a key that may be a list."""
    if not key.many:
        if isinstance(value, (list, tuple)):
            raise UsageError(f"{place} is a list; only {', '.join(k.name for k in KEYS if k.many)} may be lists")
        return key.read(place, value)
    values = value if isinstance(value, (list, tuple)) else [value]
    # Equal points of an axis would be the same cells twice; lists that pair up with another one are kept as they are.
    checked = [key.read(place, each) for each in values]
    return tuple(checked if key.name in ("labels", "weights", "model", "source") else dict.fromkeys(checked))


def read_document(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a plan from its parsed TOML, or raise with the nearest right section or key.

    The section ``utility`` becomes one field, a table of its own; that it is there, be it empty, asks for utility.

    Args:
        document: Sections with their keys.
        where: Name of the file, for sentences.
    """
    fields: dict[str, Any] = {}
    for section, table in document.items():
        if section not in SECTIONS:
            raise UsageError(f"{where}: {_unknown_section(section, table)}")
        if not isinstance(table, Mapping):
            raise UsageError(f"{where}: {section} is {table!r}; write it as a section, [{section}], with keys below it")
        found = fields.setdefault("utility", {}) if section == "utility" else fields
        for name, value in table.items():
            key = next((key for key in KEYS if (key.section, key.name) == (section, name)), None)
            if key is None:
                raise UsageError(f"{where}: {_unknown_key(section, name)}")
            place = f"{where}: {name} in [{section}]"
            if key.many and value == []:
                raise UsageError(f"{place} is an empty list; name at least one, or leave the key out")
            found[key.field] = read_value(key, place, value)
    return fields


def _unknown_section(section: str, table: Any) -> str:
    home = next((key.section for key in KEYS if key.name == section), None)
    if home is not None and not isinstance(table, Mapping):
        return f"{section!r} stands outside a section; it belongs in [{home}]"
    return f"there is no section [{section}]{suggest(section, SECTIONS)}"


def _unknown_key(section: str, name: str) -> str:
    homes = [key.section for key in KEYS if key.name == name]
    if homes:
        return f"[{section}] has no key {name!r}; it belongs in [{homes[0]}]"
    own = suggest(name, [key.name for key in KEYS if key.section == section])
    if own.endswith("?"):
        return f"[{section}] has no key {name!r}{own}"
    anywhere = suggest(name, [key.name for key in KEYS])
    if anywhere.endswith("?"):
        right = anywhere.split("'")[1]
        home = next(key.section for key in KEYS if key.name == right)
        return f"[{section}] has no key {name!r}; did you mean {right!r} in [{home}]?"
    return f"[{section}] has no key {name!r}{own}"


def toml_text(value: Any) -> str:
    """Return a value as TOML; texts, numbers, flags and lists of them.

    >>> toml_text(["a", True, 1e-3])
    '["a", true, 0.001]'
    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_text(each) for each in value)}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def start_at(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields with relative paths starting at the plan's folder."""
    base = "" if folder == Path() else str(folder)

    def join(text: str) -> str:
        return text if not text or text.startswith("~") else os.path.join(base, text)

    def join_source(text: str) -> str:
        named = not (os.sep in text or "/" in text or Path(text).suffix)
        return text if named and _is_name(text, base) else join(text)

    def join_code(text: str) -> str:
        parts = [re.sub(r"^[^(:]+\.py(?=:)", lambda file: join(file[0]), part) for part in split_chain(text)]
        return " + ".join(NETWORK_FILE.sub(lambda found: f"{found[1]}{join(found[2])}{found[1]}", part) for part in parts)

    moves = {
        **dict.fromkeys(("labels", "weights", "out"), join),
        **dict.fromkeys(("model", "loss", "defense"), join_code),
        "data": join_source,
    }
    moved = dict(fields)
    for name, move in moves.items():
        if name in fields:
            value = fields[name]
            moved[name] = tuple(move(each) for each in value) if isinstance(value, tuple) else move(value)
    return moved


def _is_name(text: str, base: str) -> bool:
    """Whether a bare word is a built-in name rather than a folder beside the plan."""
    if not os.path.exists(os.path.join(base, text)):
        return True
    return text in indexed("dataset")

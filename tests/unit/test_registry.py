"""Cards, lookup, spelling and rebuilding of methods."""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.defenses.base import DEFENSES, Defense, DefenseCard
from gradveil.errors import GradveilError, UsageError
from gradveil.registry import Card, Registry, config_of, import_object, parse_call, spell, split_chain

NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
LITERALS = st.one_of(
    st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(), st.text(max_size=8)
)


def fresh() -> Registry[type, Card]:
    return Registry("thing", "gradveil.registry")


def card(name: str) -> Card:
    return Card(name=name, summary="For tests.")


@dataclass(frozen=True, kw_only=True)
class Thing:
    """Something with settings."""

    card: ClassVar[Card] = card("thing")
    size: float = 1.0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size is below zero")


def registry() -> Registry[type, Card]:
    things = fresh()
    things.register(card("thing"))(Thing)
    return things


THINGS = registry()


def test_methods_are_found_by_name_and_pattern() -> None:
    things = registry()
    things.register(card("other_thing"))(type("Other", (), {}))
    assert things.names() == ["other_thing", "thing"]
    assert things.names("other*") == ["other_thing"]
    assert things.get("thing") is Thing
    assert [each.name for each in things.cards("t*")] == ["thing"]
    assert things.card("thing").as_dict()["summary"] == "For tests."


def test_unknown_names_and_settings_are_answered_with_the_nearest() -> None:
    things = registry()
    with pytest.raises(UsageError, match="there is no thing called 'thnig'; did you mean 'thing'"):
        things.get("thnig")
    with pytest.raises(UsageError, match="has no setting 'sise'; did you mean 'size'"):
        things.build("thing(sise=3)")
    with pytest.raises(UsageError, match="has no setting 'None'"):
        things.build("thing(**{'size': 3})")
    with pytest.raises(UsageError, match="has no setting 'card'"):
        things.build({"name": "thing", "card": 1})


def test_duplicates_and_bad_names_are_refused() -> None:
    things = registry()
    with pytest.raises(GradveilError, match="two things are called 'thing'"):
        things.register(card("thing"))(Thing)
    for wrong in ("Thing", "two words", "", "a-b"):
        with pytest.raises(GradveilError, match="is no name for a thing"):
            things.register(card(wrong))(Thing)


def test_methods_are_built_from_text_or_values_and_errors_keep_their_words() -> None:
    things = registry()
    assert things.build("thing") == Thing()
    assert things.build(" thing ( size = 2.5 ) ") == Thing(size=2.5)
    assert things.build({"name": "thing", "names": ["a", "b"]}) == Thing(names=("a", "b"))
    with pytest.raises(UsageError, match="size is below zero"):
        things.build("thing(size=-1)")
    with pytest.raises(UsageError, match="'thing'"):
        things.build("thing(size='big')")
    with pytest.raises(UsageError, match="there is no thing called ''"):
        things.build({})


@given(st.floats(0, 1e300), st.lists(st.text(max_size=5), max_size=3).map(tuple))
def test_saved_and_rebuilt_is_equal(size: float, names: tuple[str, ...]) -> None:
    one = Thing(size=size, names=names)
    assert THINGS.build(config_of(one)) == one
    assert THINGS.build(spell(one)) == one


def test_defaults_are_not_spelt() -> None:
    assert spell(Thing()) == "thing"
    assert spell(Thing(size=2.0)) == "thing(size=2.0)"


@given(
    NAMES, st.dictionaries(NAMES.filter(lambda name: name.isidentifier() and not keyword.iskeyword(name)), LITERALS, max_size=3)
)
def test_any_call_with_literal_settings_is_read_back(name: str, settings: dict[str, Any]) -> None:
    text = f"{name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"
    assert parse_call(text) == (name, settings)
    assert split_chain(" + ".join(["a(x=1e+3)", "b"])) == ["a(x=1e+3)", "b"]


@pytest.mark.parametrize(
    "text",
    ["", "(a=1)", "x(", "x(1)", "x(a=)", "x(a=open('f'))", "x(a=1))", "x(a=b)", "x(a=1) y", "x(a=__import__('os'))"],
)
def test_what_is_no_plain_call_is_refused_and_never_run(text: str) -> None:
    with pytest.raises(UsageError):
        parse_call(text)


def test_objects_are_imported_from_modules_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_object("gradveil.registry:Card") is Card
    file = tmp_path / "their_defense.py"
    file.write_text("class Mine:\n    answer = 42\n", encoding="utf-8")
    assert import_object(f"{file}:Mine").answer == 42
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_module.py").write_text("value = 3\n", encoding="utf-8")
    assert import_object("their_module:value") == 3


def test_what_cannot_be_imported_gets_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot import 'no_such_module'"):
        import_object("no_such_module:X")
    with pytest.raises(UsageError, match="has no 'Crad'; did you mean 'Card'"):
        import_object("gradveil.registry:Crad")
    with pytest.raises(UsageError, match="there is no file"):
        import_object(f"{tmp_path / 'none.py'}:X")


@pytest.mark.parametrize("again", range(2))
def test_what_a_test_registers_is_gone_for_the_next_and_what_it_first_loads_stays(again: int) -> None:
    assert "visitor" not in DEFENSES.names(), "the test before left its defense behind"
    loaded = DEFENSES.get("outpost")
    DEFENSES.register(DefenseCard(name="visitor", summary="For a test.", acts_on=()))(type("Visitor", (Defense,), {}))
    assert "visitor" in DEFENSES.names() and DEFENSES.registered()["outpost"][0] is loaded

"""One declaration of a key is all there is to it: file, JSON, content key, option, message and reference follow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import click
import pytest

from gradveil.cli.options import with_options
from gradveil.errors import UsageError
from gradveil.study.cell import Cell
from gradveil.study.declare import again, check_values, key, keys_of, part_of, read_value
from gradveil.study.document import KEYS, OF_PLAN, SECTIONS
from gradveil.study.federation import FederationSettings, UtilitySettings
from gradveil.study.plan import Plan
from gradveil.study.readers import positive, whole
from gradveil.study.settings import DataSource, Federation, LocalTraining
from gradveil.study.training import Training


@dataclass(frozen=True, kw_only=True)
class Larger(Cell):
    """A cell with one more setting."""

    patience: int = key(3, whole(1), "rounds without progress", section="grid", axis=True)


PATIENCE = next(each for each in keys_of(Larger) if each.name == "patience")


def test_everything_about_a_key_follows_from_its_declaration() -> None:
    assert (PATIENCE.section, PATIENCE.toml, PATIENCE.option, PATIENCE.in_plan) == ("grid", "patience", "--patience", (3,))
    assert Larger().as_dict()["patience"] == 3
    assert Larger().key() != Larger(patience=4).key()
    with pytest.raises(UsageError, match=r"patience in \[grid\] is 0; give a whole number of at least 1"):
        read_value(PATIENCE, "patience in [grid]", [2, 0])


def test_a_key_becomes_an_option_with_its_meaning() -> None:
    import typer  # after gradveil.cli, which keeps its deprecation warnings from being errors

    asked: dict[str, Any] = {}

    @with_options([PATIENCE], repeatable=["patience"])
    def command(**settings: Any) -> None:
        asked.update(settings)

    app = typer.Typer(add_completion=False)
    app.command()(command)
    made = typer.main.get_command(app)
    made.main(["--patience", "2", "--patience", "5"], standalone_mode=False)
    assert asked == {"patience": [2, 5]}
    help_text = made.get_help(click.Context(made))
    assert "--patience" in help_text and "Rounds without progress; repeatable." in help_text
    asked.clear()
    made.main([], standalone_mode=False)
    assert asked == {}, "what was not asked for is not handed on"


def test_another_default_keeps_everything_else() -> None:
    first, second = (next(each for each in keys_of(kind) if each.name == "minibatch") for kind in (Federation, UtilitySettings))
    assert (first.default, second.default) == (32, 16)
    assert first.meaning == second.meaning and first.read is second.read


def test_every_field_of_settings_is_declared() -> None:
    for kind in (Cell, FederationSettings, UtilitySettings, Training):
        assert [field.name for field in dataclasses.fields(kind)] == [each.name for each in keys_of(kind)]


def test_every_key_has_a_section_and_a_plan_has_all_of_a_cell() -> None:
    assert {each.section for each in KEYS} == set(SECTIONS)
    assert {each.name for each in keys_of(Cell)} <= {each.name for each in OF_PLAN} <= set(vars(Plan()))
    assert len({(each.section, each.toml) for each in KEYS}) == len(KEYS)


def test_a_part_is_taken_from_a_whole() -> None:
    cell = Cell(data="digits", scale="none", learning_rate=0.5)
    assert part_of(DataSource, cell) == DataSource(data="digits", scale="none")
    assert part_of(LocalTraining, cell).learning_rate == 0.5


def test_values_are_checked_where_they_are_made() -> None:
    @dataclass(frozen=True)
    class Small:
        rate: float = key(1, positive, "a rate")
        other: float = again(LocalTraining, "learning_rate", 2.0)

    made = Small()
    check_values(made)
    assert isinstance(made.rate, float)
    with pytest.raises(UsageError, match="here rate is nan; give a number above 0"):
        check_values(Small(rate=float("nan")), "here ")


def test_a_plan_is_a_value() -> None:
    plan = Plan.default(records=3)
    assert plan == Plan(records=3) and hash(plan) == hash(Plan(records=3)) and plan != Plan()
    assert repr(plan) == "Plan(records=3)"
    with pytest.raises(AttributeError, match=r"override\(records=...\)"):
        plan.records = 4
    with pytest.raises(AttributeError, match="did you mean 'records'"):
        _ = plan.recrods
    with pytest.raises(UsageError, match="did you mean 'records'"):
        Plan(recrods=3)

"""Command-line options from declared settings: what a key means, and how it is spelt, stands in one place."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import typer

from gradveil.study.declare import Key

__all__ = ["with_options"]

F = TypeVar("F", bound=Callable[..., None])


def with_options(keys: Iterable[Key], *, repeatable: Iterable[str] = (), defaults: bool = False) -> Callable[[F], F]:
    """Give a command one option for every key, handed to it in ``**asked`` where the user set it.

    Args:
        keys: The settings that can be asked for.
        repeatable: Names of those that may be given several times; their values are lists.
        defaults: Whether the help tells what counts where nothing is said.
    """
    made = {key.name: _annotation(key, key.name in set(repeatable), defaults) for key in keys}

    def decorate(command: F) -> F:
        own = inspect.signature(command, eval_str=True).parameters.values()
        options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=made[name]) for name in made]
        # In help texts the options of the settings come first, as people ask for those most.
        fixed = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        first = [each for each in fixed if typing.get_origin(each.annotation) is Annotated and _is_argument(each.annotation)]
        rest = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in fixed if each not in first]

        @functools.wraps(command)
        def run(*arguments: Any, **given: Any) -> None:
            asked = {name: given.pop(name) for name in made}
            command(*arguments, **given, **{name: value for name, value in asked.items() if value not in (None, [])})

        signature = inspect.Signature([*first, *options, *rest])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
        return typing.cast(F, run)

    return decorate


def _is_argument(annotation: Any) -> bool:
    return any(isinstance(each, typer.models.ArgumentInfo) for each in typing.get_args(annotation))


def _annotation(key: Key, many: bool, defaults: bool) -> Any:
    kind = type(key.default)
    meaning = f"{key.meaning[:1].upper()}{key.meaning[1:]}"
    shown = f" [{key.default}]" if defaults and key.default not in ("", False) else ""
    help_text = f"{meaning}{'; repeatable' if many else ''}{shown}."
    if kind is bool:
        return Annotated[bool | None, typer.Option(key.option, help=help_text, show_default=False)]
    option = typer.Option(key.option, help=help_text, metavar=key.metavar or None)
    return Annotated[list[kind] | None if many else kind | None, option]  # type: ignore[valid-type]

"""Which contract suite a method has to pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradveil.errors import GradveilError, UsageError, suggest
from gradveil.registry import import_object, parse_call

if TYPE_CHECKING:
    from gradveil.testing.contract import CheckResult

__all__ = ["run_contract"]


def run_contract(spelling: str) -> tuple[str, list[CheckResult]]:
    """Find out what kind of method a spelling names, and run that kind's contract suite.

    Raises:
        UsageError: It cannot be found, or is none of a defense, an attack and a metric.
    """
    from gradveil.attacks import ATTACKS, Attack
    from gradveil.defenses import DEFENSES, Defense
    from gradveil.metrics import METRICS

    name, _ = parse_call(spelling)
    method = _import(name) if ":" in name else None
    if name in DEFENSES.names() or (isinstance(method, type) and issubclass(method, Defense)):
        return "defense", _check_defense(spelling)
    if name in METRICS.names() or (callable(method) and not isinstance(method, type)):
        return "metric", _check_metric(name, method)
    if name in ATTACKS.names() or (isinstance(method, type) and issubclass(method, Attack)):
        return "attack", _check_attack(spelling)
    if method is None:
        known = [*DEFENSES.names(), *ATTACKS.names(), *METRICS.names()]
        raise UsageError(f"there is no defense, attack or metric called {name!r}{suggest(name, known)}")
    raise UsageError(
        f"{name!r} is none of a defense (a subclass of gradveil.defenses.Defense), an attack (a subclass of "
        "gradveil.attacks.Attack) and a metric"
    )


def _import(name: str) -> Any:
    try:
        return import_object(name)
    except GradveilError:
        raise
    except Exception as error:  # anything may go wrong in code that is not ours
        raise UsageError(f"importing {name!r} fails ({type(error).__name__}: {error}); correct it first") from error


def _check_defense(spelling: str) -> list[CheckResult]:
    from gradveil.defenses import DEFENSES
    from gradveil.testing.defenses import check_defense

    defense = DEFENSES.build(spelling)
    if not hasattr(type(defense), "card"):
        raise UsageError(f"{spelling!r} has no card; register it with DEFENSES.register(DefenseCard(...))")
    return check_defense(defense)


def _check_metric(name: str, method: Any) -> list[CheckResult]:
    from gradveil.metrics import METRICS, Unavailable
    from gradveil.testing.contract import NotApplicable, run_checks
    from gradveil.testing.metrics import METRIC_CHECKS

    metric = METRICS.get(name) if method is None else method
    card = next((card for card in METRICS.cards() if METRICS.get(card.name) is metric), None)
    if card is None:
        raise UsageError(f"{name!r} has no card; register it with METRICS.register(MetricCard(...))")

    def patient(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def ask(*arguments: Any) -> None:
            try:
                check(*arguments)
            except Unavailable as missing:  # weights that are not here break no promise
                raise NotApplicable(missing.reason) from missing

        return ask

    return run_checks([patient(check) for check in METRIC_CHECKS], metric, card)


def _check_attack(spelling: str) -> list[CheckResult]:
    from gradveil.attacks import ATTACKS
    from gradveil.testing.attacks import check_attack

    return check_attack(ATTACKS.build(spelling))

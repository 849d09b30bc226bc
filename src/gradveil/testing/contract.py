"""What all contract suites share: a broken promise, a promise that does not apply, and the result of asking."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CheckResult", "ContractFailure", "NotApplicable", "require", "require_frozen_dataclass", "run_checks"]


class ContractFailure(AssertionError):
    """A promise of the contract is broken; the message says which and how, in one sentence."""


class NotApplicable(Exception):
    """A promise means nothing for this method; the message says why."""


@dataclass(frozen=True)
class CheckResult:
    """One check on one method.

    Attributes:
        check: Name of the check.
        status: ``passed``, ``failed``, or ``skipped`` where it does not apply.
        message: Why it failed or was skipped; empty where it passed.
    """

    check: str
    status: Literal["passed", "failed", "skipped"]
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.status != "failed"


def require(condition: bool, message: str) -> None:
    """Raise `ContractFailure` unless the condition holds; ``assert`` would vanish under python -O."""
    if not condition:
        raise ContractFailure(message)


def run_checks(checks: Sequence[Callable[..., None]], *arguments: Any) -> list[CheckResult]:
    """Run every check, whatever the others say: an author fixes all faults in one go."""
    return [_run(check, arguments) for check in checks]


def _run(check: Callable[..., None], arguments: tuple[Any, ...]) -> CheckResult:
    try:
        check(*arguments)
    except NotApplicable as reason:
        return CheckResult(check.__name__, "skipped", str(reason))
    except ContractFailure as failure:
        return CheckResult(check.__name__, "failed", str(failure))
    except Exception as error:
        # A foreign method may raise anything at all; every one of them is a broken promise, and the rest still runs.
        return CheckResult(check.__name__, "failed", f"raised {type(error).__name__}: {error}")
    return CheckResult(check.__name__, "passed")


def require_frozen_dataclass(kind: Any) -> None:
    """Require a frozen dataclass that needs no arguments, whose equal settings make equal objects."""
    require(dataclasses.is_dataclass(kind), "the class is not a dataclass")
    require(kind() == kind(), "two objects with default settings are not equal")
    require(hash(kind()) == hash(kind()), "equal objects have different hashes")
    for field in dataclasses.fields(kind):
        try:
            setattr(kind(), field.name, None)
        except dataclasses.FrozenInstanceError:
            continue
        require(False, f"{field.name!r} can be changed; the dataclass must be frozen")

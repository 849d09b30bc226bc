"""One set of validators: what they refuse, and in which words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gradveil.errors import UsageError
from gradveil.study.checks import check_choice, check_flag, check_number, check_share, check_whole, is_number, is_whole


@pytest.mark.parametrize("value", [True, None, "1", math.nan, math.inf, [1], 1j])
def test_what_is_no_number(value: object) -> None:
    assert not is_number(value) and not is_whole(value)
    for check in (check_number, check_share):
        with pytest.raises(UsageError):
            check("owner", "setting", value)
    with pytest.raises(UsageError, match="whole number of at least 0"):
        check_whole("owner", "setting", value, 0)


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (lambda: check_number("dgp", "rate", -1), "dgp: rate is -1; it must be a number at least 0"),
        (lambda: check_number("", "rate", 0, open_below=True), "rate is 0; it must be a number above 0"),
        (lambda: check_number("", "rate", 0, open_below=True, ask="give"), "rate is 0; give a number above 0"),
        (lambda: check_number("", "rate", 1, below=1), "rate is 1; it must be a number at least 0 and below 1"),
        (lambda: check_share("", "rate", 1.5), "rate is 1.5; it must be between 0 and 1"),
        (lambda: check_share("", "delta", 1, open_ends=True), "delta is 1; it must be above 0 and below 1"),
        (lambda: check_whole("", "steps", 1.5, 0), "steps is 1.5; it must be a whole number of at least 0"),
        (lambda: check_whole("mq", "bits", 17, 2, 16), "mq: bits is 17; it must be a whole number from 2 to 16"),
        (lambda: check_choice("", "scope", "layr", ("layer", "global")), "scope is 'layr'; did you mean 'layer'?"),
        (lambda: check_flag("pfgd", "exact", 1), "pfgd: exact is 1; it must be True or False"),
    ],
)
def test_the_sentence_names_setting_value_and_remedy(check: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        check()
    assert str(refused.value) == sentence


def test_a_whole_number_that_no_float_can_hold_is_refused_and_does_not_crash() -> None:
    assert is_whole(10**400) and not is_number(10**400)
    with pytest.raises(UsageError):
        check_share("", "x", -(10**400))


def test_what_is_in_range_passes() -> None:
    check_number("", "x", 0)
    check_number("", "x", 0.5, open_below=True, below=1)
    check_share("", "x", 0)
    check_share("", "x", 1)
    check_share("", "x", 0.5, open_ends=True)
    check_whole("", "x", 2, 2, 2)
    check_choice("", "x", "a", {"a": 1})
    check_flag("", "x", False)

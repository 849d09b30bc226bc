"""A quick test is quick: one that is not marked slow fails when it takes more than five seconds.

Counted are the seconds a processor works for the test, here and in processes that it started and waited for, not those on the
wall: that another program keeps the machine busy is no fault of a test. What is set up for several tests counts for the first of
them, apart from what that test does itself. A test that makes torch import what it needs to map functions has more time: none is
to blame for being the first, and on a busy machine that alone takes most of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest

LIMIT = 5.0
IMPORTS = 5.0
"""Seconds more for the test that meets the first use of a part of torch that is imported late."""
LATE = "torch._dynamo"


def spent() -> float:
    """Return the seconds that processors worked so far for this process and for children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def limited(item: pytest.Item, what: str) -> Generator[None, object, object]:
    """Let the rest go on; then fail the test where it took too long."""
    before, loaded = spent(), LATE in sys.modules
    result = yield
    took = spent() - before
    limit = LIMIT if loaded or LATE not in sys.modules else LIMIT + IMPORTS
    if took > limit and item.get_closest_marker("slow") is None:
        advice = "make it quicker, or mark it slow if there is a quick test of the same thing"
        pytest.fail(f"{what} took {took:.1f} s of processor time, more than {LIMIT:g} s: {advice}", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Limit what is set up for a test."""
    return (yield from limited(item, "setting up the test"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the test itself."""
    return (yield from limited(item, "the test"))

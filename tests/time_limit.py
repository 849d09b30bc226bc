"""A quick test is quick: one that is not marked slow warns when it takes more than five seconds, and fails at half as many again.

Counted are the seconds a processor works for the test, here and in processes that it started and waited for, not those on the
wall: that another program keeps the machine busy is no fault of a test. Nor is a slow processor, or a core shared with another
program, on which the same work takes twice as many: a test over the limit is judged by what a fixed errand takes right after it.
What is set up for several tests counts for the first of them, apart from what that test does itself. A test that makes torch
import what it needs to map functions has more time: none is to blame for being the first.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Generator

import pytest

LIMIT = 5.0
LONG = ("slow", "deploy")
"""Marks of tests that may take longer."""
GRACE = 1.5
"""Times the limit a test may take before it fails; in between it warns, since no test takes the same every time."""
IMPORTS = 5.0
"""Seconds more for the test that meets the first use of a part of torch that is imported late."""
LATE = "torch._dynamo"
REFERENCE = 0.025
"""Seconds that the errand takes on an idle core of the machine where the limit was set."""


def spent() -> float:
    """Return the seconds that processors worked so far for this process and for children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def errand() -> float:
    """Do what tests do most, plain Python, small tensors and new memory; return the processor seconds it took."""
    import torch  # not where this file is imported, which need not have it

    before = time.process_time()
    sum(i * i for i in range(200_000))
    for _ in range(6):
        torch.full((1_000_000,), 0.5).add_(1)
    weight, images = torch.linspace(-1, 1, 12 * 25).reshape(12, 1, 5, 5), torch.linspace(0, 1, 4 * 256).reshape(4, 1, 16, 16)
    for _ in range(60):
        weight.requires_grad_()
        loss = torch.nn.functional.conv2d(images, weight).sigmoid().square().mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = weight.detach() - gradient
    return time.process_time() - before


def pace() -> float:
    """Return how many times longer the same work takes now than where the limit was set; never below one."""
    return max(1.0, statistics.median(errand() for _ in range(5)) / REFERENCE)


def limited(item: pytest.Item, what: str) -> Generator[None, object, object]:
    """Let the rest go on; then warn, or fail the test, where it took too long."""
    before, loaded = spent(), LATE in sys.modules
    result = yield
    took = spent() - before
    limit = LIMIT if loaded or LATE not in sys.modules else LIMIT + IMPORTS
    if took > limit and not any(map(item.get_closest_marker, LONG)):
        limit *= (slower := pace())
        advice = "make it quicker, or mark it slow if there is a quick test of the same thing"
        here = f" at a pace of {slower:.1f}" if slower > 1 else ""
        said = f"{what} took {took:.1f} s of processor time{here}, more than {limit:.2g} s: {advice}"
        if took > GRACE * limit:
            pytest.fail(said, pytrace=False)
        if took > limit:
            item.warn(pytest.PytestWarning(said))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Limit what is set up for a test."""
    return (yield from limited(item, "setting up the test"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Limit the test itself."""
    return (yield from limited(item, "the test"))

"""Whatever an audit draws, it draws from the seed of its cell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradveil.audit.cell import run_cell
from gradveil.audit.power import measure_rung
from gradveil.audit.scene import PROBED
from gradveil.randomness import Seed
from gradveil.study.rung import RungTask
from tests.unit.audit.small import CELL, digits, make_subject

SEED = 7
FIXED = {0}
"""Draws that all clients and attackers share whatever the cell, as a defense's public sets."""
SEARCH = "inverting_gradients(steps=2)"
EMBEDDING: dict[str, Any] = {"cut": "cut1", "model": "lenet", "parts": "whole"}
CASES: list[dict[str, Any]] = [
    {"defense": "clipping + gaussian_noise", "lists": 12, "risk": "auto"},
    {"state": "trained(steps=1)", "ensemble": SEARCH, "rounds": 2},
    {"batch_size": 2, "clients": 2, "ensemble": SEARCH, "defense": "pruning"},
    {**EMBEDDING, "defense": "embedding_noise", "ensemble": SEARCH},
    {**EMBEDDING, "state": "trained(steps=1)", "ensemble": SEARCH},
]


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the root of every seed that is made."""
    values: list[int] = []
    made = Seed.__init__

    def noting(self: Seed, value: int, path: tuple[str, ...] = ()) -> None:
        values.append(value)
        made(self, value, path)

    monkeypatch.setattr(Seed, "__init__", noting)
    return values


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_every_draw_of_a_cell_begins_at_its_seed(changes: dict[str, Any], roots: list[int]) -> None:
    run_cell(CELL.replace(records=2, seed=SEED, **changes), digits())
    assert SEED in roots and set(roots) <= {SEED, *FIXED}


def test_every_draw_of_a_planted_leak_begins_at_its_seed(roots: list[int]) -> None:
    measure_rung(RungTask(cell=CELL.replace(records=8, seed=SEED, device="cpu", risk="off"), leak=1.0))
    assert SEED in roots and set(roots) <= {SEED, *FIXED}


def test_what_an_attacker_draws_by_itself_begins_there_too(roots: list[int]) -> None:
    subject = make_subject(seed=SEED, defense="gaussian_noise", rehearsals=1)
    context = subject.context(5)
    inputs, labels = subject.candidates[:1], subject.candidate_labels[:1]
    assert context.simulate is not None and context.simulate_many is not None and context.observe is not None
    context.simulate(inputs, labels, 1)
    context.simulate_many(inputs[None], labels[None], 1)
    context.observe(inputs, labels, 1)
    assert context.seed == Seed(SEED).child("attacker") and set(roots) <= {SEED, *FIXED}


@pytest.mark.parametrize("changes", [{}, {"batch_size": 2, "clients": 2, "records": 4}], ids=str)
def test_an_attacker_has_inputs_of_its_own_to_try_the_client_on(changes: dict[str, Any]) -> None:
    subject = make_subject(defense="gaussian_noise", rehearsals=1, **changes)
    context, size = subject.context(5), subject.cell.batch_size * subject.cell.clients
    assert context.own is not None and context.random_defense and context.budget == 5
    inputs, labels = context.own
    assert inputs.shape == (PROBED, size, *subject.own.input_shape) and labels.shape == (PROBED, size)
    assert labels.flatten().tolist() == [place % 10 for place in range(PROBED * size)]
    rehearsed = subject.rehearsals[0].batch.inputs[0]
    assert not any(torch.equal(each, rehearsed) for each in inputs.flatten(0, 1))
    idle = make_subject(**changes).context(5)
    assert (idle.own, idle.simulate, idle.simulate_many, idle.random_defense) == (None, None, None, False)
    assert idle.observe is not None and make_subject(steps=3).context(5).budget == 3
    assert not make_subject(defense="pruning").context(5).random_defense

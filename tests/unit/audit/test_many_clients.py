"""Many clients at once do what each does alone; who cannot be mapped runs alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.client_runs import run_clients
from gradveil.audit.scene import Subject
from gradveil.client.update import horizontal_fault
from gradveil.defenses import DEFENSES
from gradveil.errors import BadUpdate
from gradveil.learning import Learner
from gradveil.tensors import Named
from tests.unit.audit.small import make_subject

MAPPED = (
    "gaussian_noise",
    "laplace_noise",
    "clipping + gaussian_noise",
    "percentile_noise",
    "pruning",
    "top_k",
    "entry_dropout",
    "dgp",
    "outpost",
    "quantisation",
    "quantisation(mode='qsgd')",
    "quantisation(mode='sign')",
    "mq",
    "lrp",
    "pfgd",
    "data_noise",
    "example_clipping",
    "dp_sgd",
    "precode",
    "svdefense",
    "clipping + svdefense(weights='none', adaptive=False)",
)
ALONE = ("soteria", "censor", "svdefense(hardened=True)", "graddefense", "invl_dnp", "invl_gnp")
DEAR = ("refiner", "shadow")
"""They search for what they send, with loops that end when they have it; each takes longer than a test may."""


def guesses(subject: Subject, count: int = 4) -> tuple[Tensor, Tensor]:
    generator, size = torch.Generator().manual_seed(3), subject.cell.batch_size * subject.cell.clients
    inputs = torch.rand((count, size, *subject.own.input_shape), generator=generator)
    return inputs, torch.randint(subject.dataset.classes, (count, size), generator=generator)


def check(subject: Subject) -> AttackContext:
    """Run both ways, compare, and return the context, which remembers how it went."""
    context, given = subject.context(1), guesses(subject)
    alone = run_clients(dataclasses.replace(context, simulate_many=None, memory={}), *given, 5)
    found = run_clients(context, *given, 5)
    assert len(found) == subject.cell.rounds
    for one, many in zip(alone, found, strict=True):
        assert list(one) == list(many)
        for name, value in one.items():
            assert torch.allclose(many[name], value, rtol=1e-4, atol=1e-6 * max(1.0, float(value.abs().max()))), name
    return context


@pytest.mark.parametrize("defense", MAPPED)
def test_defenses_that_are_mapped_send_the_same(defense: str) -> None:
    assert list(check(make_subject(defense=defense)).memory.values()) == [True]


@pytest.mark.parametrize("defense", ALONE)
def test_defenses_that_look_into_their_tensors_run_one_by_one(defense: str) -> None:
    assert list(check(make_subject(defense=defense)).memory.values()) == [False]


def test_of_every_defense_of_updates_it_is_known_how_it_runs() -> None:
    tried = {spelled.partition("(")[0] for chained in (*MAPPED, *ALONE, *DEAR) for spelled in chained.split(" + ")}
    horizontal = {name for name in DEFENSES.names() if horizontal_fault(DEFENSES.build(name)) is None}
    assert tried == horizontal - {"none"}


@pytest.mark.parametrize(
    "settings",
    [
        {"rounds": 3, "defense": "dgp"},
        {"batch_size": 2, "clients": 2, "records": 4, "defense": "gaussian_noise"},
        {"batch_size": 4, "local_epochs": 2, "minibatch": 2, "shuffle": True, "defense": "pruning"},
        {"rounds": 2, "batch_size": 2, "local_steps": 2, "defense": "clipping + laplace_noise"},
    ],
    ids=str,
)
def test_rounds_clients_and_local_steps_are_mapped_too(settings: dict[str, Any]) -> None:
    assert list(check(make_subject(**settings)).memory.values()) == [True]


def test_another_draw_is_other_noise_and_all_candidates_share_it() -> None:
    context = make_subject(defense="gaussian_noise").context(1)
    inputs, targets = guesses(make_subject(), 1)
    same = inputs.expand(2, *inputs.shape[1:]), targets.expand(2, *targets.shape[1:])
    (first,), (second,) = (run_clients(context, *same, draw) for draw in (1, 2))
    for name, value in first.items():
        assert torch.equal(value[0], value[1]) and not torch.equal(value, second[name])


@pytest.mark.parametrize(("defense", "trainings"), [("gaussian_noise", 2), ("outpost", 4), ("clipping + data_noise", 4)])
def test_draws_behind_the_training_train_once(defense: str, trainings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, trained = make_subject(defense=defense), list[int]()
    context, (inputs, targets) = subject.context(1), guesses(subject)
    update = Learner.update

    def counted(*given: Any) -> Named:
        trained.append(1)
        return update(*given)

    monkeypatch.setattr(Learner, "update", counted)
    assert context.simulate_many is not None
    first = [context.simulate_many(inputs, targets, draw) for draw in range(2)]
    moved = inputs + 0.1
    second = [context.simulate_many(moved, targets, draw) for draw in range(2)]
    assert len(trained) == trainings
    assert context.simulate is not None
    for sent, given in ((first, inputs), (second, moved)):
        for draw, (found,) in enumerate(sent):
            (alone,) = context.simulate(given[1], targets[1], draw)
            assert all(torch.allclose(found[name][1], value, rtol=1e-4, atol=1e-6) for name, value in alone.items())
    moved.mul_(0.5)
    context.simulate_many(moved, targets, 0)
    assert len(trained) > trainings + 4


def test_an_update_that_is_not_finite_is_refused_either_way() -> None:
    context = make_subject(defense="pruning").context(1)
    inputs, targets = guesses(make_subject())
    with pytest.raises(BadUpdate, match="not finite"):
        run_clients(context, inputs * torch.inf, targets, 0)

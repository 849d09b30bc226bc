"""Whole vertical trainings: they learn, pair up, go on after a kill, and count what crosses the wire."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from gradveil.data import Dataset, load_data
from gradveil.defenses import DEFENSES, Defense
from gradveil.defenses.base import ClientView, State
from gradveil.defenses.none import NoDefense
from gradveil.errors import UsageError
from gradveil.federation.setup import build_federation
from gradveil.federation.vertical_training import build_vertical, train_vertical
from gradveil.study.federation import FederationSettings
from gradveil.study.training_result import TrainingResult

MLP = "mlp(hidden=32)"
SETTINGS = FederationSettings(data="digits", model=MLP, rounds=2, minibatch=32, learning_rate=0.1)


def digits() -> tuple[Dataset, Dataset]:
    data = load_data("digits")
    return data.take(range(400)), data.take(range(400, 600))


def run(defense: str = "none", **changes: object) -> TrainingResult:
    options = {"cut": "cut1", "parts": "whole", "data": digits(), **changes}
    settings = SETTINGS.replace(defense=defense, **options.pop("settings", {}))  # type: ignore[arg-type]
    return train_vertical(settings, **options)  # type: ignore[arg-type]


def same(a: TrainingResult, b: TrainingResult) -> bool:
    return all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


def test_it_learns_and_counts_what_crosses_the_wire() -> None:
    found = run(settings={"rounds": 12})
    assert found.final_accuracy is not None and found.final_accuracy > 0.7
    outputs = build_vertical(SETTINGS, "cut1", "whole", data=digits()).federation
    width = outputs.parties[0].embed(digits()[0].inputs[:1]).numel()
    assert [record.bytes_up for record in found.rounds] == [400 * width * 4] * 12
    assert found.bytes.down == found.bytes.up, "the gradient of an embedding has its size"
    assert found.guarantee is not None and found.guarantee.epsilon is None and "no accounted noise" in found.guarantee.sentence


def test_the_held_out_records_are_those_of_a_horizontal_training() -> None:
    settings = SETTINGS.replace(clients=4, clients_per_round=1, seed=3)
    vertical, horizontal = build_vertical(settings, "cut1", "whole"), build_federation(settings)
    assert vertical.test.digest() == horizontal.test.digest() and vertical.train.digest() == horizontal.train.digest()


def test_two_defenses_of_one_seed_see_the_same_batches_and_first_weights() -> None:
    assert same(run(), run("embedding_noise(delta=0.0)")), "noise of no size changes nothing"
    assert not same(run(), run("embedding_noise(delta=0.5)"))
    assert not same(run(), run(settings={"seed": 1}))


@pytest.mark.parametrize("defense", ["embedding_noise(delta=0.1)", "invl_enp(basis='public', refresh=30, mode='gram')"])
def test_a_killed_training_goes_on_to_the_same_bits(tmp_path: Path, defense: str) -> None:
    changes = {"parts": "left_right", "settings": {"rounds": 3}}
    whole = run(defense, **changes)
    run(defense, **changes, out=tmp_path, stop_after=2)
    again = run(defense, **changes, out=tmp_path)
    assert same(whole, again) and [r.accuracy for r in whole.rounds] == [r.accuracy for r in again.rounds]
    assert [r.bytes_up for r in whole.rounds] == [r.bytes_up for r in again.rounds]
    with pytest.raises(UsageError, match="was made with parts = 'left_right'"):
        run(defense, **{**changes, "parts": "top_bottom"}, out=tmp_path)


def test_results_tell_which_statistics_batch_norm_used() -> None:
    assert run(settings={"batch_norm": "train", "rounds": 1}).settings.batch_norm == "eval"


def test_a_party_is_timed_with_and_without_its_defense() -> None:
    found = run("invl_enp(delta=0.1)", cut="cut1", latency=True, settings={"rounds": 1, "minibatch": 4, "evaluate_every": 9})
    assert found.latency is not None and found.latency.ratio > 1.5, "a Jacobian for every record takes longer than none"
    plain = run(latency=True, settings={"rounds": 1})
    assert plain.latency is not None and plain.latency.ratio == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Breaks(Defense):
    def protect_embedding(self, embedding: torch.Tensor, view: ClientView, state: State) -> tuple[torch.Tensor, State]:
        return embedding * torch.inf, state


def test_steps_that_are_not_finite_are_refused_and_do_not_end_the_run() -> None:
    built = build_vertical(SETTINGS, "cut1", "whole", data=digits())
    broken = dataclasses.replace(built, federation=dataclasses.replace(built.federation, defense=_Breaks()))
    state, refused = broken.round(broken.federation.start(), 0)
    assert refused == broken.steps == 13
    assert all(torch.equal(state.top[name], value) for name, value in broken.federation.top.weights.items())
    assert broken.scores(state) == (0.0, None)


PREPARES = """
from dataclasses import dataclass
import torch
from gradveil.defenses import Defense

@dataclass(frozen=True, kw_only=True)
class Prepares(Defense):
    acts_on = ("embedding",)

    def prepare(self, data, view):
        return {"factor": torch.tensor(0.5)}

    def protect_embedding(self, embedding, view, state):
        return embedding * state["factor"], state
"""


def test_a_defense_that_kept_nothing_yet_prepares_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PREPARES)
    defense, changes = f"{tmp_path / 'own.py'}:Prepares", {"settings": {"rounds": 2, "learning_rate": 1e300}}
    whole = run(defense, **changes)
    run(defense, **changes, out=tmp_path / "out", stop_after=1)
    again = run(defense, **changes, out=tmp_path / "out")
    assert [record.refused for record in again.rounds] == [13, 13], "no step is finite at this rate"
    assert whole.final_accuracy == again.final_accuracy and same(whole, again)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="no cut"):
        run(cut="cut9")
    with pytest.raises(UsageError, match="only embeddings leave a party"):
        run("pruning(rate=0.5)")
    with pytest.raises(UsageError, match="set local_epochs"):
        run(settings={"local_steps": 3})
    assert isinstance(build_vertical(SETTINGS, "cut1", "whole", data=digits()).federation.defense, NoDefense)


def test_every_embedding_defense_can_be_trained_with_over_its_ladder() -> None:
    names = [name for name in DEFENSES.names() if DEFENSES.card(name).acts_on == ("embedding",)]
    assert {"embedding_noise", "embedding_pruning", "embedding_dropout", "invl_enp"} <= set(names)
    few = tuple(part.take(range(24)) for part in digits())
    for name in names:
        for rung in DEFENSES.card(name).ladder:
            spelling = f"{name}({', '.join(f'{key}={value!r}' for key, value in rung.items())})"
            found = run(spelling, cut="cut1", data=few, settings={"rounds": 1, "minibatch": 12})
            assert found.final_accuracy is not None, spelling

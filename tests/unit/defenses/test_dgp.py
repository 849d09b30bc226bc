"""Dual gradient pruning: what is kept, what is carried on, and what its attacker can trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.func import vmap

from gradveil.adversary import OBSERVED
from gradveil.attacks.engine.labels import recover_labels
from gradveil.client.update import run_client
from gradveil.defenses.dgp import DGP, ERROR, middle_mask
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, ThreatModel
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.testing.defenses_adversary import relative_residual
from gradveil.testing.defenses_scene import CLASSES, SHAPE, Scene, draw_batch
from gradveil.wire import tensor_bytes

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "defenses_pruned_and_orthogonal.json").read_text()
)
SINE = torch.sin(torch.arange(101.0, dtype=torch.float64))
ARRAYS = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-100, 100, width=32))


def step(defense: DGP, gradient: Named, state: Named) -> tuple[Named, Named]:
    return defense.protect_gradient(gradient, Scene.of(defense).view(), state)


@pytest.mark.parametrize("row", GOLDEN["dgp_of_sine"]["value"], ids=str)
def test_the_middle_agrees_with_a_sort(row: dict[str, float]) -> None:
    left = SINE * middle_mask(SINE, row["largest"], row["smallest"])
    assert int((left != 0).sum()) == row["kept"]
    assert float(left.sum()) == pytest.approx(row["sum"], abs=GOLDEN["dgp_of_sine"]["tolerance"])


def test_error_feedback_agrees_with_numpy() -> None:
    golden = GOLDEN["dgp_error_feedback"]
    first, state = step(DGP(), {"a": SINE}, {})
    second, state = step(DGP(), {"a": SINE}, state)
    found = {"first": first["a"].sum(), "second": second["a"].sum(), "left": state[ERROR + "a"].abs().sum()}
    for name, value in found.items():
        assert float(value) == pytest.approx(golden["value"][name], abs=golden["tolerance"])


@given(ARRAYS, st.integers(0, 40), st.integers(0, 59))
def test_kept_entries_are_between_those_left_out(values: np.ndarray[Any, np.dtype[np.float32]], top: int, bottom: int) -> None:
    value = torch.from_numpy(values.copy())
    mask = middle_mask(value, top / 100, bottom / 100)
    count, size = int(mask.sum()), value.numel()
    high, low = -(-top * size // 100), bottom * size // 100
    assert count == max(0, size - high - low)
    if count and high:
        dropped = np.sort(np.abs(values))[::-1][:high]
        assert float((value.abs() * mask).max()) <= dropped.min()


def test_large_tensors_keep_a_fifth() -> None:
    value = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    assert float(middle_mask(value, 0.05, 0.75).mean()) == pytest.approx(0.2, abs=0.01)


def test_short_tensors_hide_their_largest_entry_and_the_shortest_send_nothing() -> None:
    bias = torch.tensor([0.1, 0.12, -0.9, 0.08, 0.1, 0.1, 0.11, 0.09, 0.1, 0.2])
    sent, state = step(DGP(), {"bias": bias, "scalar": torch.tensor(3.0), "pair": torch.tensor([1.0, 2.0])}, {})
    assert sent["bias"].nonzero().reshape(-1).tolist() == [1, 9], "the class is not named; two of ten are left"
    assert not sent["scalar"].any() and not sent["pair"].any()
    assert state.keys() == {ERROR + "bias"}, "an error that can never be sent must not grow"


def test_what_is_sent_and_kept_adds_up_over_steps_and_rounds() -> None:
    defense = DGP()
    generator = torch.Generator().manual_seed(0)
    state: Named = {}
    total, sent_total = torch.zeros(200, dtype=torch.float64), torch.zeros(200, dtype=torch.float64)
    for _ in range(30):
        gradient = torch.randn(200, generator=generator).double()
        sent, state = step(defense, {"a": gradient}, state)
        total, sent_total = total + gradient, sent_total + sent["a"]
    assert torch.allclose(total, sent_total + state[ERROR + "a"])
    none, state = step(DGP(error_feedback=False), {"a": total}, {})
    assert state == {} and torch.equal(none["a"], total * middle_mask(total, 0.05, 0.75))


def test_the_error_goes_from_round_to_round_through_the_client() -> None:
    defense = DGP()
    scene = Scene.of(defense)
    first = run_client(scene.learner, scene.batch, defense, Seed(1))
    second = run_client(scene.learner, scene.batch, defense, Seed(1), state=first.state, round_index=1)
    name = "conv.weight"
    raw = scene.gradient()[name]
    sent = [scene.deliver(defense, result.payload).weights[name] for result in (first, second)]
    assert torch.allclose(sent[0] + sent[1] + second.state[ERROR + name], 2 * raw, atol=1e-6)
    assert not torch.equal(sent[0], sent[1])


def test_the_update_is_small_on_the_wire_after_one_step() -> None:
    scene = Scene.of(DGP())
    dense = 4 * sum(value.numel() for value in scene.gradient().values())
    assert tensor_bytes(run_client(scene.learner, scene.batch, DGP(), Seed(1)).payload) < 0.6 * dense


def observe(defense: DGP, batch: Batch, rounds: int, settings: TrainingSettings | None = None) -> Observation:
    scene = Scene.of(defense, settings=settings)
    state, updates, payloads = None, [], []
    for index in range(rounds):
        result = run_client(scene.learner, batch, defense, Seed(1), state=state, round_index=index)
        state = result.state
        payloads.append(result.payload)
        updates.append(scene.deliver(defense, result.payload))
    return Observation(
        (scene.learner,) * rounds,
        tuple(updates),
        tuple(payloads),
        SHAPE,
        CLASSES,
        len(batch),
        ThreatModel(rounds=rounds),
        defense.adversary(),
    )


def residual(observation: Observation, batch: Batch, index: int) -> float:
    adversary, learner = observation.adversary, observation.learners[index]
    return float(relative_residual(adversary, learner, adversary.evidence(observation, index), batch.inputs, batch.targets, {}))


def test_the_attacker_knows_how_many_gradients_are_in_an_entry() -> None:
    """The model stands still here, so k + 1 gradients are k + 1 times one, and every round fits exactly."""
    batch = draw_batch(0)
    observation = observe(DGP(), batch, 4)
    for index in range(4):
        assert residual(observation, batch, index) < 1e-10
        assert residual(observation, draw_batch(1), index) > 1e-3
    # Who does not count fits nothing after the first round: what was withheld comes doubled.
    naive = observation.replace(adversary=DGP(error_feedback=False).adversary())
    assert residual(naive, batch, 1) > 0.1
    first = observation.replace(updates=observation.updates[:1], learners=observation.learners[:1])
    assert observation.adversary.arrives(observation).incomplete and not first.adversary.arrives(first).incomplete


def test_rounds_that_were_not_seen_are_not_counted() -> None:
    observation = observe(DGP(), draw_batch(0), 3)
    gap = observation.replace(updates=(observation.updates[0], observation.updates[2]), learners=observation.learners[:2])
    evidence = gap.adversary.evidence(gap, 1)
    assert torch.equal(evidence[OBSERVED + "conv.weight"], gap.updates[1].weights["conv.weight"])


@pytest.mark.parametrize("feedback", [True, False])
def test_local_steps_are_replayed_with_the_pruning_inside(feedback: bool) -> None:
    batch = draw_batch(0)
    settings = TrainingSettings(shares="weights", local_steps=3, learning_rate=0.05)
    observation = observe(DGP(error_feedback=feedback), batch, 1, settings)
    assert residual(observation, batch, 0) < 1e-10
    assert residual(observation, draw_batch(1), 0) > 1e-3


def test_masks_are_safe_under_vmap() -> None:
    values = torch.randn((4, 3, 7), generator=torch.Generator().manual_seed(0))
    together = vmap(lambda value: middle_mask(value, 0.1, 0.5))(values)
    assert torch.equal(together, torch.stack([middle_mask(value, 0.1, 0.5) for value in values]))


def test_a_bias_that_does_not_name_the_class_is_passed_over_for_the_rows() -> None:
    """The entry of the true class is the largest and withheld; the rows of the last weight still tell."""
    defense = DGP()
    scene = Scene.of(defense)
    right = 0
    for seed in range(10):
        batch = draw_batch(seed)
        one = Batch(batch.inputs[:1], batch.targets[:1])
        observation = scene.observe(defense, seed, one)
        assert not (observation.update.weights["head.bias"] < 0).any()
        right += recover_labels(observation).tolist() == one.targets.tolist()
    assert right == 10


@pytest.mark.parametrize("wrong", [{"largest": 0.5, "smallest": 0.5}, {"largest": -0.1}, {"smallest": 1.0}], ids=str)
def test_settings_without_a_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="dgp"):
        DGP(**wrong)

"""Pruning, top-k and entry dropout: which entries survive, and that the zeros give the mask away."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradveil.defenses import Defense
from gradveil.defenses.entry_dropout import EntryDropout
from gradveil.defenses.pruning import Pruning, prune
from gradveil.defenses.top_k import TopK, keep_largest
from gradveil.errors import UsageError
from gradveil.records import Update
from gradveil.tensors import Named
from gradveil.testing.defenses_scene import Scene
from gradveil.wire import tensor_bytes

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses.json").read_text())
SINE = torch.sin(torch.arange(101.0, dtype=torch.float64))
ARRAYS = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-100, 100, width=32))


def protect(defense: Defense, weights: Named, seed: int = 1) -> Named:
    return defense.protect_update(Update(weights, examples=1), Scene.of(defense).view(seed), {})[0].weights


@pytest.mark.parametrize("row", GOLDEN["pruning_of_sine"]["value"], ids=str)
def test_pruning_agrees_with_numpy_percentiles(row: dict[str, float]) -> None:
    left = prune(SINE, row["rate"])
    assert int((left != 0).sum()) == row["kept"]
    assert float(left.sum()) == pytest.approx(row["sum"], abs=GOLDEN["pruning_of_sine"]["tolerance"])


@pytest.mark.parametrize("row", GOLDEN["top_k_of_sine"]["value"], ids=str)
def test_top_k_agrees_with_a_sort(row: dict[str, float]) -> None:
    left = keep_largest({"a": SINE[:40], "b": SINE[40:].reshape(1, -1)}, row["keep"])
    both = torch.cat([value.reshape(-1) for value in left.values()])
    assert int((both != 0).sum()) == row["kept"]
    assert float(both.sum()) == pytest.approx(row["sum"], abs=GOLDEN["top_k_of_sine"]["tolerance"])


@given(ARRAYS, st.integers(0, 999))
def test_pruning_is_the_linear_percentile_of_numpy(values: np.ndarray[Any, np.dtype[np.float32]], thousandths: int) -> None:
    rate = thousandths / 1000
    position = rate * (values.size - 1)
    # Where rounding alone decides on which side of an order statistic numpy lands, neither answer is wrong.
    assume(abs(position - round(position)) > 1e-6 or position in (0.0, values.size - 1.0))
    threshold = np.percentile(np.abs(values).astype(np.float64), 100 * rate)
    expected = np.where(np.abs(values) < threshold, np.float32(0), values)
    assert np.array_equal(prune(torch.from_numpy(values.copy()), rate).numpy(), expected)


@given(ARRAYS, st.floats(0.001, 1.0))
def test_top_k_sends_at_least_its_share_and_nothing_smaller_than_what_it_drops(
    values: np.ndarray[Any, np.dtype[np.float32]], keep: float
) -> None:
    weights = {"a": torch.from_numpy(values[: len(values) // 2].copy()), "b": torch.from_numpy(values[len(values) // 2 :].copy())}
    left = torch.cat(list(keep_largest(weights, keep).values())).numpy()
    assert np.array_equal(left[left != 0], values[left != 0])
    assert (left == values).sum() >= min(values.size, math.ceil(round(keep * values.size, 6)))
    dropped = (left == 0) & (values != 0)
    if dropped.any():
        assert np.abs(values[dropped]).max() < np.abs(values[left != 0]).min()


def test_ties_survive_and_the_largest_entry_always_does() -> None:
    assert prune(torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.9).tolist() == [1.0, -1.0, 1.0, -1.0]
    assert prune(torch.tensor([1.0, 2.0, -3.0]), 0.999).tolist() == [0.0, 0.0, -3.0]
    assert keep_largest({"w": torch.tensor([2.0, -2.0, 1.0])}, 0.001)["w"].tolist() == [2.0, -2.0, 0.0]


def test_pruning_survives_more_entries_than_torch_quantile_does() -> None:
    big = torch.linspace(-1, 1, 2**24 + 3)
    with pytest.raises(RuntimeError):
        torch.quantile(big, 0.5)
    assert int((prune(big, 0.75) != 0).sum()) == pytest.approx(big.numel() / 4, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_are_kept(dtype: torch.dtype) -> None:
    weights = {"w": SINE.to(dtype), "s": torch.tensor(3.0, dtype=dtype), "e": torch.empty(0, 4, dtype=dtype)}
    for defense in (Pruning(rate=0.8), TopK(keep=0.2), EntryDropout(rate=0.8, rescale=True)):
        sent = protect(defense, weights)
        assert {name: (value.dtype, value.shape) for name, value in sent.items()} == {
            name: (value.dtype, value.shape) for name, value in weights.items()
        }


def test_dropout_zeroes_its_share_and_rescaling_keeps_the_mean() -> None:
    ones = {"w": torch.ones(300, 300)}
    left = protect(EntryDropout(rate=0.8), ones)["w"]
    assert set(left.unique().tolist()) == {0.0, 1.0}
    assert float(left.mean()) == pytest.approx(0.2, abs=0.01)
    scaled = protect(EntryDropout(rate=0.8, rescale=True), ones)["w"]
    assert torch.allclose(scaled, left * 5)


def test_dropout_draws_another_mask_for_another_tensor_seed_and_round() -> None:
    weights = {"a": torch.ones(200), "b": torch.ones(200)}
    sent = protect(EntryDropout(rate=0.5), weights)
    assert not torch.equal(sent["a"], sent["b"])
    assert not torch.equal(sent["a"], protect(EntryDropout(rate=0.5), weights, seed=2)["a"])
    later = Scene.of(EntryDropout()).view().replace(round=1)
    again = EntryDropout(rate=0.5).protect_update(Update(weights, examples=1), later, {})[0].weights
    assert not torch.equal(sent["a"], again["a"])


def test_sparse_updates_take_fewer_bytes_on_the_wire() -> None:
    case = GOLDEN["sparse_bytes"]["value"]
    values = torch.arange(1.0, case["entries"] + 1)
    defense = Pruning(rate=case["zeros"] / case["entries"])
    view = Scene.of(defense).view()
    update, _ = defense.protect_update(Update({"w": values}, examples=1), view, {})
    assert tensor_bytes(defense.encode(update, view)) == case["sparse"]
    assert tensor_bytes(defense.encode(Update({"w": values}, examples=1), view)) == case["dense"]


@pytest.mark.parametrize(
    "defense", [Pruning(rate=0.9), TopK(keep=0.05), EntryDropout(rate=0.5), EntryDropout(rate=0.5, rescale=True)]
)
def test_at_the_truth_the_attacker_sees_no_difference(defense: Defense) -> None:
    scene = Scene.of(defense)
    seen = scene.observe(defense, 1, scene.batch)
    evidence = seen.adversary.evidence(seen, 0)
    simulated = seen.adversary.replay(scene.learner, scene.batch.inputs, scene.batch.targets, {})
    for name, residual in seen.adversary.compare(evidence, simulated, {}).residuals().items():
        assert torch.allclose(residual, torch.zeros_like(residual), atol=1e-6), name
    whole = {name for name, value in seen.update.weights.items() if bool((value != 0).all())}
    assert seen.adversary.arrives(seen).exact() == whole


@pytest.mark.parametrize(
    ("kind", "setting", "wrong"),
    [
        (Pruning, "rate", 1.0),
        (Pruning, "rate", -0.1),
        (Pruning, "rate", "0.5"),
        (EntryDropout, "rate", 1),
        (EntryDropout, "rescale", 1),
        (TopK, "keep", 0),
        (TopK, "keep", 1.5),
        (TopK, "keep", math.nan),
    ],
)
def test_shares_outside_their_range_are_refused(kind: type[Defense], setting: str, wrong: Any) -> None:
    with pytest.raises(UsageError, match=rf"{setting} is .*must be"):
        kind(**{setting: wrong})

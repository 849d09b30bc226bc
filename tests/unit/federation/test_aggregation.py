"""Aggregation by role: hand-computed means, the defense's own weights, and every way weights can be wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradveil.errors import BadUpdate
from gradveil.federation.aggregation import aggregate, shares_by_tensor, subtract
from gradveil.records import ModelSpec, Role, TensorSpec, Update

SPEC = ModelSpec(
    {
        "a": TensorSpec((2,), torch.float32, Role.WEIGHT),
        "b": TensorSpec((), torch.float32, Role.WEIGHT),
        "bn.running_mean": TensorSpec((1,), torch.float32, Role.BUFFER),
        "bn.num_batches_tracked": TensorSpec((), torch.int64, Role.COUNTER),
    }
)


def update(a: tuple[float, float], b: float, examples: int, mean: float | None = None, count: int | None = None) -> Update:
    buffers: dict[str, Tensor] = {}
    if mean is not None:
        buffers["bn.running_mean"] = torch.tensor([mean])
    if count is not None:
        buffers["bn.num_batches_tracked"] = torch.tensor(count)
    return Update({"a": torch.tensor(a), "b": torch.tensor(b)}, examples, 4, buffers)


ONE, THREE = update((1.0, 2.0), 4.0, 1, mean=1.0, count=-3), update((5.0, -2.0), 0.0, 3, mean=-1.0, count=-7)


def test_weights_and_buffers_are_averaged_by_examples() -> None:
    total = aggregate([ONE, THREE], SPEC)
    assert total.weights["a"].tolist() == [4.0, -1.0]  # (1·1 + 3·5) / 4, (1·2 - 3·2) / 4
    assert float(total.weights["b"]) == 1.0
    assert total.buffers["bn.running_mean"].tolist() == [-0.5]
    assert (total.examples, total.round) == (4, 4)


def test_a_counter_goes_as_far_as_the_furthest_client() -> None:
    total = aggregate([ONE, THREE], SPEC)
    after = subtract({"bn.num_batches_tracked": torch.tensor(10)}, total.buffers)
    assert int(after["bn.num_batches_tracked"]) == 17
    assert after["bn.num_batches_tracked"].dtype == torch.int64


def test_one_update_comes_out_as_it_was() -> None:
    total = aggregate([ONE], SPEC)
    assert all(torch.equal(total.weights[name], value) for name, value in ONE.weights.items())
    assert all(torch.equal(total.buffers[name], value) for name, value in ONE.buffers.items())


def test_the_defense_weighs_tensor_by_tensor_and_the_rest_is_by_examples() -> None:
    total = aggregate([ONE, THREE], SPEC, [{"a": 6.0}, {"a": 2.0}])
    assert total.weights["a"].tolist() == [2.0, 1.0]  # shares 3/4 and 1/4
    assert float(total.weights["b"]) == 1.0
    assert total.buffers["bn.running_mean"].tolist() == [-0.5]


def test_a_buffer_is_averaged_over_those_who_sent_it() -> None:
    silent = update((0.0, 0.0), 0.0, 100)
    total = aggregate([ONE, THREE, silent], SPEC)
    assert total.buffers["bn.running_mean"].tolist() == [-0.5]
    assert aggregate([silent], SPEC).buffers == {}


def test_shares_sum_to_one_even_for_counts_at_the_end_of_the_range() -> None:
    huge = [update((0.0, 0.0), 0.0, 2**53), update((0.0, 0.0), 0.0, 2**53), update((0.0, 0.0), 0.0, 1)]
    shares = shares_by_tensor(huge, SPEC, [{"a": 1.7e308}, {"a": 1.7e308}, {"a": 0.0}])
    assert shares["a"] == [0.5, 0.5, 0.0]
    assert all(math.isclose(math.fsum(each), 1.0) for each in shares.values())


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([{"a": 0.0}, {"a": 0.0}], "the aggregation weights of 'a' sum to zero"),
        ([{"a": -1.0}, {"a": 2.0}], "an aggregation weight of 'a' is -1.0"),
        ([{"a": math.nan}, {"a": 2.0}], "an aggregation weight of 'a' is nan"),
        ([{"a": math.inf}, {"a": 2.0}], "an aggregation weight of 'a' is inf"),
        ([{"a": 1.0}, {}], "only some clients have an aggregation weight for 'a'"),
        ([{"a": 1.0}], "aggregation weights for 1 updates, but 2 updates"),
    ],
)
def test_impossible_weights_are_named(weights: list[dict[str, float]], says: str) -> None:
    with pytest.raises(BadUpdate, match=says):
        aggregate([ONE, THREE], SPEC, weights)


def test_nothing_cannot_be_aggregated() -> None:
    with pytest.raises(BadUpdate, match="every client was refused or sent nothing"):
        aggregate([], SPEC)

"""Candidates are evaluated in equal chunks, in halves of them where memory ends, and every one once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradveil.attacks.engine.execution import Chunks, _equal_chunks
from gradveil.tensors import Named


@pytest.mark.parametrize(
    ("candidates", "most", "size"), [(10, 10, 10), (10, 9, 5), (10, 4, 4), (9, 4, 3), (7, 3, 3), (1, 1, 1), (8, 100, 8)]
)
def test_chunks_are_equal_and_no_larger_than_they_may_be(candidates: int, most: int, size: int) -> None:
    assert _equal_chunks(candidates, most) == size


@pytest.mark.parametrize(("candidates", "fits"), [(10, 10), (10, 5), (10, 3), (9, 1), (7, 2)])
def test_where_memory_ends_half_as_many_are_tried(candidates: int, fits: int) -> None:
    sizes: list[int] = []

    def together(rows: Tensor, constants: Named) -> tuple[Tensor, Tensor]:
        sizes.append(len(rows))
        if len(rows) > fits:
            raise torch.OutOfMemoryError
        return 2 * rows, constants["a"] + rows[:, 0]

    chunks = Chunks(together, candidates)
    rows, constants = torch.arange(2.0 * candidates).reshape(candidates, 2), {"a": torch.arange(float(candidates))}
    gradients, values = chunks(rows, constants)
    assert torch.equal(gradients, 2 * rows) and torch.equal(values, constants["a"] + rows[:, 0])
    done = [size for size in sizes if size <= fits]
    assert sum(done) == candidates and 2 * max(done) > min(fits, candidates / 2)
    before = list(sizes)
    chunks(rows, constants)
    assert sizes[len(before) :] == done, "it is remembered"


def test_of_one_candidate_there_is_no_half() -> None:
    chunks = Chunks(None, 8)
    assert [chunks.halve(5) for _ in range(4)] == [True, True, True, False]

"""What products with a Jacobian take."""

from __future__ import annotations

import torch

from gradveil.spectra.jacobians import jacobian_of


def test_products_at_one_row_of_a_large_batch_do_not_take_memory_for_the_batch() -> None:
    batch = torch.rand(4000, 64)
    jacobian = jacobian_of(lambda point: point.square(), batch[7], dtype=torch.float32)
    jacobian.push(torch.eye(64))
    with torch.profiler.profile(profile_memory=True) as told:
        pushed = jacobian.push(torch.eye(64))
    assert torch.equal(pushed, torch.diag(2 * batch[7]))
    taken = sum(max(0, event.self_cpu_memory_usage) for event in told.events() or [])
    assert taken < batch.numel() * batch.element_size(), "forward mode would take the storage of the batch 64 times"

"""All candidates of a batch are fitted together: what adds up to the update is found, beside others who are not on the list."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradveil.attacks.listing import joint as joints
from gradveil.attacks.listing.client import joined
from gradveil.attacks.listing.joint import Joint
from gradveil.audit.lists import Pool, list_seed
from gradveil.randomness import Seed
from tests.unit.audit.small import make_subject


def test_the_records_of_an_undefended_batch_are_found_and_nobody_else() -> None:
    subject = make_subject(records=16, batch_size=8)
    pool = Pool.of(subject, 40)
    seen = [target.observation for target in subject.targets]
    joint = Joint.of(seen, [joined(seen[1])], pool.hypotheses(list_seed(subject), 8))
    assert joint is not None
    everyone = torch.ones(2, 40, dtype=torch.bool)
    assert torch.allclose(joint.own[0], joint.seen[1])
    shares = joint.shares(joint.seen, everyone)
    for row, batch in zip(shares, pool.batches, strict=True):
        assert set(row.topk(8).indices.tolist()) == set(batch)
        assert float(row.sum() - row[list(batch)].sum()) < 1e-6 * float(row.sum())
    hidden = everyone.clone()
    hidden[:, pool.batches[0][0]] = False
    assert float(joint.shares(joint.seen, hidden)[0, pool.batches[0][0]]) == 0, "who is not on the list gets nothing"


def test_a_fit_that_does_not_settle_is_made_without_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any, **__: Any) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(joints, "nnls", endless)
    columns = torch.eye(4, dtype=torch.float64).triu()
    fitted = Joint(columns, torch.tensor([[0.0, 2.0, 0.0, -1.0]]).double(), columns).shares(
        torch.tensor([[0.0, 2.0, 0.0, -1.0]]).double(), torch.ones(1, 4, dtype=torch.bool)
    )
    assert torch.equal(fitted, torch.tensor([[0.0, 2.0, 0.0, 0.0]]).double())


def test_embeddings_are_no_sums_over_records() -> None:
    subject = make_subject(records=8, batch_size=4, cut="cut1", ensemble="quick")
    pool = Pool.of(subject, 12)
    assert Joint.of([target.observation for target in subject.targets], [], pool.hypotheses(list_seed(subject), 4)) is None


def test_a_sketch_keeps_lengths_and_angles_and_is_linear() -> None:
    generator = torch.Generator().manual_seed(2)
    # All entries have one sign, as sums of squares would: without random signs their mean drowns everything.
    left, right = (1 + torch.rand(9000, generator=generator).double() for _ in range(2))
    sketch = joints.Sketch()
    one, other = (sketch.of([{"a": each[:4000], "b": each[4000:]}], Seed(1)) for each in (left, right))
    assert one.shape == (joints.SKETCH,)
    assert float(one @ one) == pytest.approx(float(left @ left), rel=0.1)
    assert float(one @ other) == pytest.approx(float(left @ right), rel=0.1)
    assert abs(float(one.sum())) < 0.1 * float(left.sum())
    both = sketch.of([{"a": (left + 2 * right)[:4000]}, {"b": (left + 2 * right)[4000:]}], Seed(1))
    assert torch.allclose(both, one + 2 * other)
    assert not torch.allclose(joints.Sketch().of([{"a": left}], Seed(2)), one)


@pytest.mark.parametrize("count", [3, joints.SKETCH])
def test_what_has_few_entries_is_kept(count: int) -> None:
    values = torch.arange(float(count))
    assert torch.equal(joints.Sketch().of([{"a": values}], Seed(1)), values.double())

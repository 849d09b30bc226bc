"""BatchNorm statistics as an axis of the threat model: sent, used, said, and never claimed where there are none."""

from __future__ import annotations

import pytest

from gradveil.audit.cell import run_cell
from gradveil.audit.certified import certificate_of_cell, guarantee_of
from gradveil.audit.scene import Subject, build_subject
from gradveil.errors import UsageError
from gradveil.records import Knowledge
from gradveil.run.grid import cells_of, check_plan
from gradveil.study.cell import Cell
from gradveil.study.codec import encode
from gradveil.study.plan import Plan
from tests.unit.audit.small import digits

NETWORK = "tests/unit/attacks/test_batch_statistics.py:network"
CELL = Cell(
    data="digits",
    model=NETWORK,
    batch_norm="train",
    bn_statistics=True,
    records=2,
    ensemble="inverting_gradients(steps=15, signed=False, schedule='cosine')",
    execution="batched",
    risk="off",
)


def subject(**changes: object) -> Subject:
    return build_subject(CELL.replace(**changes), digits(), 0)


def test_granted_statistics_are_sent_used_and_said() -> None:
    record = encode(run_cell(CELL, digits()).result)
    assert {row["recipe"] for row in record["attackers"]} == {"inverting_gradients", "inverting_gradients_statistics"}
    assert "bn_statistics" in record["threat"]["knows"] and record["cell"]["bn_statistics"] is True
    assert any("carry the running statistics of BatchNorm" in sentence for sentence in record["threat"]["sentences"])
    target = subject().targets[0]
    assert set(target.sent[0].streams) == {"weights", "buffers"}
    assert set(target.observation.update.buffers) == {
        f"{layer}.{kind}" for layer in (1, 4) for kind in ("running_mean", "running_var", "num_batches_tracked")
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bn_statistics": False}, "taken to carry no BatchNorm statistics; most federations send them"),
        ({"bn_statistics": False, "batch_norm": "eval"}, "fixed BatchNorm statistics"),
        ({"model": "mlp(hidden=8)"}, "has no BatchNorm"),
        ({"model": "mlp(hidden=8)", "batch_norm": "eval", "bn_statistics": False}, "has no BatchNorm"),
    ],
)
def test_where_there_are_none_the_threat_model_says_why(changes: dict[str, object], words: str) -> None:
    seen = subject(**changes).targets[0].observation
    assert Knowledge.BN_STATISTICS not in seen.threat.knows and not seen.update.buffers
    assert any(words in sentence for sentence in seen.threat.describe())


def test_clients_of_an_aggregate_and_several_rounds() -> None:
    seen = subject(clients=2, rounds=2, records=2).targets[0].observation
    assert len(seen.updates) == 2 and all(update.buffers for update in seen.updates) and not seen.payloads


def test_no_proof_covers_what_is_sent_beside_the_noise() -> None:
    """Noise on the update protects the update; the statistics travel in the clear, so no bound may be claimed."""
    noisy = "clipping(bound=1.0) + gaussian_noise(std=1.0)"
    assert guarantee_of(subject(defense=noisy, bn_statistics=False)).epsilon is not None
    bare = subject(defense=noisy)
    assert guarantee_of(bare).epsilon is None and "BatchNorm" in guarantee_of(bare).reason
    assert certificate_of_cell(bare).identified is None


def test_a_plan_refuses_statistics_that_do_not_move() -> None:
    plan = Plan.default(data="digits", model="mlp(hidden=8)", records=2, bn_statistics=True)
    with pytest.raises(UsageError, match="set batch_norm = 'train'"):
        check_plan(plan)
    (cell, *_) = cells_of(plan.override(batch_norm="train"))
    assert cell.bn_statistics and Plan.from_dict(plan.as_dict()) == plan

"""The target region of a cell: where the model looks, measured apart, and absent where there is none."""

from __future__ import annotations

import json

from torch import nn

from gradveil.audit.judge import Scored, originals
from gradveil.audit.regions import region_of_cell
from gradveil.audit.scene import build_subject
from gradveil.randomness import Seed
from gradveil.study.codec import encode
from gradveil.study.results import Region
from tests.unit.audit.small import CELL, digits, make_subject


def flat(classes: int) -> nn.Module:
    """A model that looks at rows of numbers and not at pictures."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


def guess(subject: object, images: object) -> Scored:
    return Scored(images, {}, None, None)  # type: ignore[arg-type]


def test_errors_outside_the_region_do_not_count() -> None:
    subject = build_subject(CELL.replace(model="convnet(width=2)", records=6), digits(), 0)
    truth = originals(subject)
    rows = {"selected": guess(subject, truth), "plain": guess(subject, 1 - truth), "informed": None}
    region = region_of_cell(subject, rows, Seed(0))
    assert isinstance(region, Region)
    found = encode(region)
    assert 0.3 <= found["area"] < 1 and set(found) == {"share", "area", "selected", "plain"}
    assert found["selected"]["psnr"]["median"] == 60.0 > found["plain"]["psnr"]["median"]
    assert found["selected"]["n"] == 6 and "unavailable" in found["selected"]["lpips"], "eight pixels are too few for LPIPS"
    json.dumps(found, allow_nan=False)


def test_a_model_without_maps_has_no_region() -> None:
    subject = make_subject(model="tests/unit/audit/test_regions.py:flat")
    found = region_of_cell(subject, {"selected": guess(subject, originals(subject))}, Seed(0))
    assert isinstance(found, str)

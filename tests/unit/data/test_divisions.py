"""Who owns which features."""

import pytest
import torch

from gradveil.data import DIVISIONS, Columns, Dataset, Division, LeftRight, TopBottom, Whole, part_of
from gradveil.errors import UsageError


def numbered(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) / count).reshape(shape)


@pytest.mark.parametrize(
    ("division", "shape"),
    [
        (Whole(), (3, 8, 8)),
        (LeftRight(), (3, 8, 8)),
        (LeftRight(parties=3), (2, 7)),
        (TopBottom(), (1, 5, 4)),
        (TopBottom(parties=5), (1, 5, 4)),
        (Columns(), (5,)),
        (Columns(groups=((4, 0), (1, 3, 2))), (5,)),
    ],
)
def test_parts_put_together_are_the_input_and_every_value_has_one_owner(division: Division, shape: tuple[int, ...]) -> None:
    inputs = numbered(2, *shape)
    parts = division.split(inputs)
    assert torch.equal(division.join(parts, shape), inputs)
    assert [tuple(part.shape[1:]) for part in parts] == division.shapes(shape)
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == sorted(inputs.flatten().tolist())


def test_halves_are_the_halves_one_sees() -> None:
    picture = numbered(1, 3, 4, 6)
    left, right = LeftRight().split(picture)
    assert torch.equal(left, picture[..., :3]) and torch.equal(right, picture[..., 3:])
    top, bottom = TopBottom().split(picture)
    assert torch.equal(top, picture[..., :2, :]) and torch.equal(bottom, picture[..., 2:, :])


def test_listed_columns_arrive_in_the_order_listed() -> None:
    row = torch.tensor([[0.0, 0.1, 0.2, 0.3]])
    first, second = Columns(groups=((3, 0), (1, 2))).split(row)
    assert torch.equal(first, row[:, [3, 0]]) and torch.equal(second, row[:, [1, 2]])


def test_gradients_flow_back_to_the_party_that_owns_the_value() -> None:
    inputs = numbered(1, 4).requires_grad_()
    Columns(groups=((2,), (0, 1, 3))).split(inputs)[0].sum().backward()
    assert inputs.grad is not None and inputs.grad.tolist() == [[0.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("division", "shape", "sentence"),
    [
        (LeftRight(), (5,), "use columns"),
        (TopBottom(), (2, 7), "use left_right"),
        (Columns(), (3, 4, 4), "divides tables"),
        (LeftRight(parties=9), (3, 8, 8), "at most 8"),
        (LeftRight(parties=0), (3, 8, 8), "at least 1"),
        (Columns(groups=((0, 1), (1, 2))), (3,), "exactly once"),
        (Columns(groups=((0, 1, 2), ())), (3,), "every party"),
    ],
)
def test_what_cannot_be_divided_gets_one_sentence(division: Division, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        division.places(shape)


def test_join_wants_all_parts() -> None:
    with pytest.raises(UsageError, match="one part per party"):
        LeftRight().join([numbered(1, 3, 4, 2)], (3, 4, 4))


def test_a_party_has_its_part_of_every_record() -> None:
    data = Dataset(
        name="small",
        inputs=numbered(4, 1, 4, 4),
        targets=torch.tensor([0, 1, 0, 1]),
        classes=2,
        class_names=("a", "b"),
        records=("r0", "r1", "r2", "r3"),
    )
    own = part_of(data, LeftRight(), 1)
    assert torch.equal(own.inputs, data.inputs[..., 2:])
    assert own.records == data.records
    with pytest.raises(UsageError, match="no party 2"):
        part_of(data, LeftRight(), 2)


def test_a_division_is_found_by_its_spelling() -> None:
    assert DIVISIONS.build("left_right(parties=3)") == LeftRight(parties=3)
    assert DIVISIONS.build("columns(groups=((0,),(1,2)))") == Columns(groups=((0,), (1, 2)))

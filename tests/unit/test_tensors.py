"""Arithmetic on named tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from gradveil import tensors
from gradveil.errors import BadUpdate
from gradveil.tensors import Named

SHAPES = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=4)


@st.composite
def named(draw: st.DrawFn) -> Named:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return {f"t{i}": torch.randn(shape, generator=generator, dtype=torch.float64) for i, shape in enumerate(draw(SHAPES))}


def same(left: Named, right: Named) -> bool:
    return list(left) == list(right) and all(torch.equal(value, right[name]) for name, value in left.items())


@given(named())
def test_flatten_and_unflatten_are_inverse(one: Named) -> None:
    vector = tensors.flatten(one)
    assert vector.shape == (sum(value.numel() for value in one.values()),)
    assert same(tensors.unflatten(vector, one), one)


@given(named(), st.integers(1, 4))
def test_a_stack_holds_each_set_in_its_row(one: Named, count: int) -> None:
    many = [tensors.scale(one, float(index)) for index in range(count)]
    stacked = tensors.stack(many)
    assert all(len(value) == count for value in stacked.values())
    assert all(same({name: value[row] for name, value in stacked.items()}, many[row]) for row in range(count))


@given(named(), st.floats(-10, 10))
def test_arithmetic_is_that_of_the_flat_vector(one: Named, factor: float) -> None:
    other = tensors.map_tensors(torch.cos, one)
    flat, cosine = tensors.flatten(one), tensors.flatten(other)
    assert torch.equal(tensors.flatten(tensors.add(one, other)), flat + cosine)
    assert torch.equal(tensors.flatten(tensors.sub(one, other)), flat - cosine)
    assert torch.equal(tensors.flatten(tensors.scale(one, factor)), flat * factor)
    assert float(tensors.norm(one)) == pytest.approx(float(flat.norm()), abs=1e-12)


def test_operands_with_other_names_are_refused_with_a_hint() -> None:
    left, right = {"layer.weight": torch.ones(1)}, {"layer.weigth": torch.ones(1)}
    for operation in (tensors.add, tensors.sub):
        with pytest.raises(BadUpdate, match=r"did you mean 'layer\.weight'"):
            operation(left, right)
    with pytest.raises(BadUpdate, match="missing none, unexpected"):
        tensors.check_same_names({}, right)
    with pytest.raises(BadUpdate, match="tensor names differ"):
        tensors.stack([left, right])
    with pytest.raises(BadUpdate, match="nothing to stack"):
        tensors.stack([])


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(BadUpdate, match="3 entries cannot fill 4"):
        tensors.unflatten(torch.ones(3), {"w": torch.ones(2, 2)})


def test_copies_are_cut_from_graph_and_memory() -> None:
    source = torch.ones(2, requires_grad=True)
    copy = tensors.detach({"w": source})["w"]
    assert not copy.requires_grad
    copy.add_(1)
    assert source.tolist() == [1.0, 1.0]


def test_precision_changes_floating_tensors_only() -> None:
    moved = tensors.to({"w": torch.ones(1), "n": torch.ones(1, dtype=torch.long)}, torch.float64)
    assert (moved["w"].dtype, moved["n"].dtype) == (torch.float64, torch.int64)
    assert tensors.to(moved, torch.device("cpu"))["w"].device.type == "cpu"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_tensor_that_is_not_finite_is_named(bad: float) -> None:
    tensors.check_finite({"a": torch.ones(2), "n": torch.ones(2, dtype=torch.long), "e": torch.empty(0)})
    with pytest.raises(BadUpdate, match=r"the thing has 1 entries that are not finite in 'b'"):
        tensors.check_finite({"a": torch.ones(2), "b": torch.tensor([1.0, bad])}, "the thing")


def test_everything_but_checks_works_under_vmap() -> None:
    def together(a: Named, b: Named) -> torch.Tensor:
        mixed = tensors.unflatten(tensors.flatten(tensors.add(a, tensors.scale(b, 2.0))), a)
        return tensors.norm(mixed) + tensors.norm(tensors.sub(b, mixed))

    many = {"w": torch.arange(12.0).reshape(3, 2, 2), "b": torch.arange(3.0)}
    rows = [{name: value[row] for name, value in many.items()} for row in range(3)]
    alone = torch.stack([together(row, row) for row in rows])
    assert torch.allclose(vmap(together)(many, many), alone)


def test_the_precision_of_products_is_restored_whoever_set_it() -> None:
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = matmul.fp32_precision, convolution.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(KeyError), tensors.matrix_products(torch.device("cuda"), coarse=False):
            assert (matmul.fp32_precision, convolution.fp32_precision) == ("ieee", "ieee")
            raise KeyError
        assert matmul.fp32_precision == "tf32"
        with tensors.matrix_products(torch.device("cpu"), coarse=False):
            assert matmul.fp32_precision == "tf32", "a CPU is left alone"
    finally:
        matmul.fp32_precision, convolution.fp32_precision = before

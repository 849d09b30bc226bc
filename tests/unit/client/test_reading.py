"""What is said to arrive without the wire is what the server reads off it, defense by defense and in chains."""

from __future__ import annotations

import pytest
import torch

from gradveil.client.send import arrives, send
from gradveil.client.update import horizontal_fault
from gradveil.defenses import DEFENSES, build_defense
from gradveil.randomness import Seed
from gradveil.testing.defenses_scene import Scene

DEAR = {"refiner", "shadow"}
"""They search for what they send, or want a trained generator; neither touches the wire."""
ALONE = [name for name in DEFENSES.names() if name not in DEAR and horizontal_fault(DEFENSES.build(name)) is None]
CHAINS = (
    "clipping + svdefense",
    "clipping + svdefense(hardened=True)",
    "svdefense(weights='none', adaptive=False, threshold=0.3)",
    "gaussian_noise(std=0.1) + quantisation",
    "pruning + gaussian_noise(std=0.1)",
    "quantisation(mode='sign')",
    "quantisation(mode='qsgd')",
)


@pytest.mark.parametrize("spelling", [*ALONE, *CHAINS])
def test_what_arrives_is_what_is_read_off_the_wire(spelling: str) -> None:
    defense = build_defense(spelling)
    scene = Scene.of(defense)
    given = (scene.learner, scene.batch, defense, Seed(3))
    sent, (read, state) = send(*given, round_index=1), arrives(*given, round_index=1)
    assert sent.update.weights.keys() == read.keys() and sent.state.keys() == state.keys()
    for name, value in sent.update.weights.items():
        assert torch.allclose(read[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("spelling", ["svdefense", "clipping + svdefense", "svdefense(hardened=True)"])
def test_what_is_lost_on_the_wire_is_lost(spelling: str) -> None:
    defense = build_defense(spelling)
    scene = Scene.of(defense)
    view, update = scene.view(), scene.update()
    read = defense.as_read(update, view).weights
    assert any(not torch.allclose(read[name], value, rtol=1e-3) for name, value in update.weights.items())
    wire = scene.deliver(defense, defense.encode(update, view)).weights
    assert all(torch.allclose(read[name], value, rtol=1e-5, atol=1e-6) for name, value in wire.items())

"""What the shadow defense hands on: the record's own label, so that noise is spared where that class looks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradveil.defenses import ClientView, State
from gradveil.defenses.shadow.adversary import ShadowAdversary
from gradveil.defenses.shadow.defense import Shadow
from gradveil.records import Batch
from gradveil.testing.shadow_scene import generator, learner, shadow, view

RED, BLUE = slice(0, 6), slice(10, 16)


def two_squares() -> Tensor:
    """A red square in one corner and a blue one in the other."""
    images = torch.full((1, 3, 16, 16), 0.02)
    images[:, 0, RED, RED] = images[:, 2, BLUE, BLUE] = 0.9
    return images


def shares_of_noise(label: int) -> tuple[float, float]:
    """Return how much of the noise lies on the red and on the blue square, where class 0 looks for red and class 3 for blue."""
    own = learner()
    weights = {name: torch.zeros_like(value) for name, value in own.weights.items()}
    weights["conv.weight"][0, 0, 1, 1] = weights["conv.weight"][1, 2, 1, 1] = 1.0
    weights["head.weight"][0, 0] = weights["head.weight"][3, 1] = 1.0
    own = own.replace(weights=weights)
    still = {"latent_steps": 0, "fit_steps": 0, "generator": generator(3, grey=True), "temperature": 2.0}
    defense = Shadow(**still, foreground=0.2, foreground_least=0.5)  # type: ignore[arg-type]
    found = defense.noise(Batch(two_squares(), torch.tensor([label]), ("one",)), view(own), {})[0].abs().squeeze()
    return float(found[RED, RED].sum() / found.sum()), float(found[BLUE, BLUE].sum() / found.sum())


def test_what_the_class_of_the_record_looks_at_is_spared() -> None:
    red_of_red, blue_of_red = shares_of_noise(0)
    red_of_blue, blue_of_blue = shares_of_noise(3)
    assert red_of_red < red_of_blue - 0.03
    assert blue_of_blue < blue_of_red - 0.03


def test_the_attacker_makes_noise_from_several_starts_and_fits_codes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its shadows starts elsewhere; records keep their names while the guess moves, so that codes are kept."""
    given = Batch(two_squares().expand(2, -1, -1, -1).clone(), torch.tensor([0, 3]))
    calls: list[tuple[tuple[str, ...], object, int]] = []
    inner = Shadow.noise

    def noting(self: Shadow, batch: Batch, client: ClientView, state: State) -> tuple[Tensor, State]:
        calls.append((batch.records, client.seed, client.round))
        return inner(self, batch, client, state)

    monkeypatch.setattr(Shadow, "noise", noting)
    defense = shadow(foreground=0.0)
    own, round_index = learner(), 4
    attacker = ShadowAdversary(defense, iterations=2, starts=3)
    attacker.subtracted(own, given.inputs, given.targets, round_index)
    assert len(calls) == 9 and {at for *_, at in calls} == {round_index}
    assert {names for names, *_ in calls} == {("0", "1")}
    assert len({seed for _, seed, _ in calls}) == 3

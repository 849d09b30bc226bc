"""The attacker who filters the shadow's noise off: better than doing nothing on pictures it never saw, and aware of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.data import load_data, public_images
from gradveil.defenses.shadow import adversary as shadow_adversary
from gradveil.defenses.shadow.adversary import ShadowAdversary, public_pairs
from gradveil.defenses.shadow.defense import Shadow
from gradveil.defenses.shadow.restorer import TOO_MUCH, fit_restorer
from gradveil.learning.losses import binary_cross_entropy
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, Reconstruction, ThreatModel, Update
from gradveil.testing.shadow_scene import learner, shadow, view

SIZE = 32
LATE = 60


def photographs(count: int = 6) -> Tensor:
    """Pictures of photographs other than the one that is public, averaged down."""
    data = load_data("photos")
    chosen = data.inputs[:: len(data) // count][:count]
    return F.interpolate(chosen, size=(SIZE, SIZE), mode="area")


def public(count: int = 24) -> Tensor:
    return public_images((3, SIZE, SIZE), count, Seed(0).child("public"))


def trained_on(defense: Shadow, images: Tensor, round_index: int) -> Tensor:
    """What a client with these images trains on, with its own start, labels and model."""
    given = Batch(images, torch.arange(len(images)) % 4, tuple(str(row) for row in range(len(images))))
    noise, _ = defense.noise(given, view(learner(SIZE), round_index, seed=11), {})
    return (images + noise).clamp(0, 1)


def observation_of(defense: Shadow, round_index: int = 0, pictures: Tensor | None = None) -> Observation:
    own = learner(SIZE)
    update = Update({name: torch.zeros_like(value) for name, value in own.weights.items()}, 1, round=round_index)
    return Observation(
        learners=(own,),
        updates=(update,),
        payloads=(),
        input_shape=(3, SIZE, SIZE),
        classes=4,
        examples=1,
        threat=ThreatModel(),
        adversary=defense.adversary(),
        public=pictures,
    )


def error(found: Tensor, truth: Tensor) -> Tensor:
    return (found - truth).square().mean((1, 2, 3))


def finished(observation: Observation, noisy: Tensor) -> Tensor:
    rebuilt = Reconstruction(noisy, torch.arange(len(noisy)) % 4, "perfect")
    return observation.adversary.finish(rebuilt, observation).inputs


@pytest.mark.parametrize("round_index", [0, LATE])
def test_an_attacker_with_public_pictures_beats_doing_nothing_on_pictures_it_never_saw(round_index: int) -> None:
    defense, images = shadow(until=100), photographs()
    noisy = trained_on(defense, images, round_index)
    found = finished(observation_of(defense, round_index, public()), noisy)
    # Doing nothing is 1; so is a filter of noise, and one that learned pairs the wrong way around is far above.
    share = float((error(found, images) / error(noisy, images)).log().mean().exp())
    assert share < 0.8, share


def test_it_is_not_the_smoothing_that_helps() -> None:
    # A filter that learned from pairs of white noise of the same strength, on the same pictures, does worse.
    defense, images, pictures = shadow(until=100), photographs(), public()
    noisy, pairs = trained_on(defense, images, LATE), public_pairs(defense, pictures, learner(SIZE), LATE)
    white = (pictures - pairs).std() * torch.randn((len(pictures), 1, SIZE, SIZE), generator=Seed(0).generator("white"))
    height = 0.19 * torch.e**0.6
    errors = [
        float(error(fit_restorer(pictures, taught, height, Seed(0).generator("units")).clean(noisy, height)[0], images).mean())
        for taught in (pairs, (pictures + white).clamp(0, 1))
    ]
    assert errors[0] < 0.8 * errors[1], errors


def test_pictures_of_another_kind_are_noticed_and_left_alone() -> None:
    defense, pictures = shadow(latent_steps=1, fit_steps=0, foreground=0.0), public()
    noise = torch.rand((2, 3, SIZE, SIZE), generator=Seed(1).generator("unlike"))
    unlike = (noise > 0.5).float()
    restorer = fit_restorer(pictures, public_pairs(defense, pictures, learner(SIZE), 0), 0.19, Seed(0).generator("units"))
    assert not bool(restorer.clean(unlike, 0.19)[1].any())
    assert bool(restorer.clean(pictures, 0.19)[1].all()) and TOO_MUCH > 1
    assert torch.equal(finished(observation_of(defense, 0, pictures), unlike), unlike)


@pytest.mark.parametrize(
    "pictures",
    [None, public(7), torch.zeros(20, 1, SIZE, SIZE), torch.zeros(20, 3, SIZE, SIZE + 1), torch.zeros(20, 3, SIZE, SIZE)],
    ids=["none", "few", "grey", "other size", "black"],
)
def test_without_pictures_to_learn_from_it_is_no_worse_than_the_plain_attacker(pictures: Tensor | None) -> None:
    defense = shadow(latent_steps=1, fit_steps=0, foreground=0.0)
    noisy = trained_on(defense, photographs(2), 0)
    found = finished(observation_of(defense, 0, pictures), noisy)
    if pictures is not None and not bool(pictures.any()):
        assert bool(torch.isfinite(found).all())  # there were some, and they taught next to nothing
    else:
        assert torch.equal(found, noisy)


def test_one_filter_serves_a_round_and_is_made_again_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(defense: Shadow, images: Tensor, own: object, when: int) -> Tensor:
        made.append((defense.strength, when))
        return (images + 0.05).clamp(0, 1)

    monkeypatch.setattr(shadow_adversary, "public_pairs", counted)
    pictures, images = public(8), photographs(1)
    for defense, when in ((shadow(), 0), (shadow(), 0), (shadow(), 1), (shadow(strength=0.3), 1), (shadow(), 0)):
        finished(observation_of(defense, when, pictures), images)
    # What the pictures are counts, not which tensor holds them.
    finished(observation_of(shadow(), 0, pictures.clone()), images)
    assert made == [(0.19, 0), (0.19, 1), (0.3, 1)]
    finished(observation_of(shadow(), 0, pictures.flip(-1)), images)
    assert made[3:] == [(0.19, 0)]


def test_the_pairs_have_the_height_and_the_sign_of_the_defense() -> None:
    pictures = 0.1 + 0.4 * public(8)
    for when, height in ((0, 0.19), (50, 0.19 * torch.e**0.5)):
        noise = public_pairs(shadow(until=100), pictures, learner(SIZE), when) - pictures
        top = height * pictures.flatten(1).amax(1)
        assert torch.allclose(noise.flatten(1).amax(1), top, rtol=1e-4)
        # The foreground takes a little off everywhere.
        assert float((noise.flatten(1).amin(1) / top).min()) > -0.1 and float(noise.min()) < 0
    plain = public_pairs(shadow(foreground=0.0), pictures, learner(SIZE), 0) - pictures
    assert float(plain.min()) >= 0


def test_masks_as_labels_need_no_labels_for_the_pairs() -> None:
    own = learner(SIZE, 3, binary_cross_entropy, maps=True)
    made = public_pairs(shadow(), public(8), own, 0)
    assert bool(torch.isfinite(made).all()) and not torch.equal(made, public(8))


def watched_noise(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Seed, int, tuple[str, ...], tuple[str, ...]]]:
    """Note under which seed, in which round and with which state noise is drawn, and what is kept."""
    calls = []
    noise = Shadow.noise

    def noting(self: Shadow, batch: Any, view: Any, state: Any) -> Any:
        drawn, after = noise(self, batch, view, state)
        marked = {**after, f"mark {view.seed.value}": torch.zeros(1)}
        calls.append((view.seed, view.round, tuple(n for n in state if n.startswith("mark")), batch.records))
        assert view.weights is view.learner.weights
        assert self.noise_momentum == 0 and self.until > view.round, "maps are made anew, in a round that has noise"
        return drawn, marked

    monkeypatch.setattr(Shadow, "noise", noting)
    return calls


@pytest.mark.parametrize("when", [0, 3])
def test_pairs_are_made_in_the_round_that_was_seen(when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watched_noise(monkeypatch)
    public_pairs(shadow(until=2), public(4), learner(SIZE), when)
    assert [(seed, round_index) for seed, round_index, *_ in calls] == [(Seed(0).child("shadow's restorer"), when)]


def test_each_of_several_shadows_has_its_own_draws_and_keeps_its_own_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watched_noise(monkeypatch)
    defense = shadow(latent_steps=1, fit_steps=0, foreground=0.0)
    adversary = ShadowAdversary(defense, iterations=2, starts=3)
    adversary.subtracted(learner(SIZE), photographs(2), torch.zeros(2, dtype=torch.long), 1)
    root = [Seed(start).child("shadow's attacker") for start in range(3)]
    assert [seed for seed, *_ in calls] == root * 3 and {when for _, when, *_ in calls} == {1}
    assert [kept for _, _, kept, _ in calls] == [()] * 3 + [(f"mark {start}",) for start in range(3)] * 2
    assert {records for *_, records in calls} == {("0", "1")}

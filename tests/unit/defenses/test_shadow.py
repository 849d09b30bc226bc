"""The shadow defense as a whole: what it keeps, what it renews and when, and that noise lies where the image lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.client.update import run_client
from gradveil.defenses import adapt, build_defense, chain
from gradveil.defenses.shadow.adversary import ShadowAdversary, common_share
from gradveil.defenses.shadow.defense import Shadow
from gradveil.defenses.shadow.fit import choose_generator, generator_on
from gradveil.defenses.shadow.memory import record_keys
from gradveil.errors import BadUpdate, UsageError
from gradveil.learning.losses import binary_cross_entropy
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Observation, Reconstruction, ThreatModel
from gradveil.testing.released_shadow import ComplementShadow, ReversedShadow, ScatteredShadow
from gradveil.testing.shadow_scene import LATENT, batch, generator, learner, shadow, view

STILL: dict[str, Any] = {"latent_steps": 0, "fit_steps": 0, "foreground": 0.0}
"""Without anything that moves: the imagined picture is the generator's first."""


def noise_of(defense: Shadow, given: Batch, round_index: int = 0, state: Any = None) -> tuple[Tensor, Any]:
    own = learner(given.inputs.shape[-1], given.inputs.shape[1])
    return defense.noise(given, view(own, round_index), state or {})


def grey(**settings: Any) -> dict[str, Any]:
    return {"generator": generator(3, grey=True), **STILL, **settings}


def lies_where_the_image_lies(kind: type[Shadow]) -> bool:
    """Shift the image: a shadow that imagines plain grey must shift its noise likewise."""
    given = batch()
    before, _ = noise_of(kind(**grey()), given)
    after, _ = noise_of(kind(**grey()), given.replace(inputs=given.inputs.roll((3, 5), (2, 3))))
    return torch.allclose(after, before.roll((3, 5), (2, 3)), atol=1e-6)


def test_noise_lies_where_the_image_lies() -> None:
    assert lies_where_the_image_lies(Shadow)
    assert not lies_where_the_image_lies(ScatteredShadow)


def momentum_keeps_the_old(kind: type[Shadow]) -> bool:
    """Change the pixels of a record: its map must stay nearer to the old one."""
    defense, first, second = kind(**grey()), batch(seed=0), batch(seed=1)
    _, state = noise_of(defense, first)
    _, fresh = noise_of(defense, second)
    _, mixed = noise_of(defense, second, 1, state)
    expected = 0.9 * state["maps"] + 0.1 * fresh["maps"]
    return torch.allclose(mixed["maps"], expected, atol=1e-7)


def test_a_tenth_of_the_noise_map_is_new_each_round() -> None:
    assert momentum_keeps_the_old(Shadow)
    assert not momentum_keeps_the_old(ReversedShadow)


def foreground_is_spared(kind: type[Shadow]) -> bool:
    """A bright square in the corner is all the model sees: noise there must shrink against no foreground at all."""
    images = torch.full((1, 3, 16, 16), 0.02)
    images[:, :, :6, :6] = 0.9
    given = Batch(images, torch.tensor([1]), ("one",))
    own = learner()
    weights = dict(own.weights)
    weights["conv.weight"], weights["conv.bias"] = torch.full_like(weights["conv.weight"], 0.3), torch.zeros(6)
    weights["head.weight"], weights["head.bias"] = torch.ones_like(weights["head.weight"]), torch.zeros(4)
    own = own.replace(weights=weights)
    settings = {**grey(), "temperature": 2.0}
    found, bare = (kind(**{**settings, "foreground": share}).noise(given, view(own), {})[0].squeeze() for share in (0.25, 0.0))
    inside = (found / found.abs().max() - bare / bare.abs().max())[:5, :5].mean()
    outside = (found / found.abs().max() - bare / bare.abs().max())[8:, 8:].mean()
    return bool(inside < outside)


def test_the_foreground_is_spared() -> None:
    assert foreground_is_spared(Shadow)
    assert not foreground_is_spared(ComplementShadow)


@pytest.mark.parametrize(
    ("round_index", "schedule", "factor"), [(0, "increase", 1.0), (50, "increase", 1.6487), (50, "fix", 1.0)]
)
def test_the_largest_noise_is_as_promised(round_index: int, schedule: str, factor: float) -> None:
    found, _ = noise_of(shadow(schedule=schedule), batch(), round_index)
    brightest = batch().inputs.amax((1, 2, 3))
    assert torch.allclose(found.abs().amax((1, 2, 3)), 0.19 * factor * brightest, rtol=1e-4)


def test_images_do_not_see_each_other_in_the_noise_map() -> None:
    given = batch(3)
    together, _ = noise_of(Shadow(**grey()), given)
    for row in range(3):
        alone, _ = noise_of(Shadow(**grey()), Batch(given.inputs[row : row + 1], given.targets[row : row + 1], ("x",)))
        assert torch.allclose(together[row], alone[0], atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_constant_images_stay_finite(value: float) -> None:
    given = Batch(torch.full((2, 3, 16, 16), value), torch.tensor([0, 1]))
    trained, state = shadow().protect_batch(given, view(learner()), {})
    assert bool(torch.isfinite(trained.inputs).all())
    assert all(bool(torch.isfinite(v).all()) for v in state.values())
    if value == 0.0:
        assert torch.equal(trained.inputs, given.inputs)


def test_single_images_smaller_than_the_generator_and_models_without_maps() -> None:
    given = batch(1, 8, 1)
    own = learner(8, 1)
    trained, state = shadow(1).protect_batch(given, view(own), {})
    assert trained.inputs.shape == (1, 1, 8, 8) and state["maps"].shape == (1, 8, 8)
    # Blocks of 16 and 32 pixels have nothing to add to 8, and are not kept.
    assert not any(".2." in name or ".3." in name for name in state if name.startswith("shadow/"))


def test_larger_and_oblong_images() -> None:
    given = Batch(torch.rand((2, 3, 40, 24), generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1]))
    found, _ = shadow().noise(given, view(learner()), {})
    assert found.shape == (2, 1, 40, 24)


def test_grey_generators_serve_colour_and_colour_generators_grey() -> None:
    for channels, other in ((3, 1), (1, 3)):
        found, _ = shadow(other).noise(batch(2, 16, channels), view(learner(16, channels)), {})
        assert bool(torch.isfinite(found).all())


def test_what_is_kept_and_when_it_goes() -> None:
    defense, given = shadow(until=2), batch()
    _, first = noise_of(defense, given)
    assert {"keys", "maps", "codes"} < set(first) and any(name.startswith("shadow/") for name in first)
    assert first["codes"].shape == (3, LATENT) and first["maps"].shape == (3, 16, 16)
    _, second = noise_of(defense, given, 1, first)
    assert torch.equal(second["codes"], first["codes"]), "codes are fitted once"
    changed = [name for name in first if name.startswith("shadow/") and not torch.equal(first[name], second[name])]
    assert changed, "the shadow goes on learning"
    assert not torch.equal(first["maps"], second["maps"])
    _, third = noise_of(defense, given, 2, second)
    assert set(third) == {"keys", "maps"}
    assert torch.equal(third["maps"], second["maps"]), "after the termination round maps are reused"


def test_the_shadow_follows_by_half() -> None:
    given, own = batch(), learner()
    states = [shadow(shadow_momentum=share).noise(given, view(own), {})[1] for share in (0.0, 0.5)]
    network = generator_on(generator(3), torch.device("cpu"), 16)
    for name, start in dict(network.synthesis.named_parameters()).items():  # type: ignore[union-attr]
        moved, half = (state[f"shadow/{name}"] for state in states)
        assert torch.allclose(half, 0.5 * (start + moved), atol=1e-6)


def test_records_are_known_in_any_order_and_new_ones_are_fitted() -> None:
    defense, given = shadow(), batch()
    _, state = noise_of(defense, given)
    turned = Batch(given.inputs.flip(0), given.targets.flip(0), given.records[::-1])
    _, again = noise_of(defense, turned, 1, state)
    assert sorted(again["keys"].tolist()) == sorted(state["keys"].tolist())
    more = batch(4)
    _, grown = noise_of(defense, more, 1, state)
    assert len(grown["keys"]) == 4 and torch.equal(grown["codes"][:3], state["codes"])


@pytest.mark.parametrize("round_index", [0, 20])
def test_a_record_first_seen_late_gets_a_map(round_index: int) -> None:
    defense = shadow()
    _, state = noise_of(defense, batch(2), round_index)
    found, state = noise_of(defense, batch(3), 20, state)
    assert found.shape[0] == 3 and len(state["keys"]) == 3
    assert float(found[2].abs().max()) > 0


def test_records_without_ids_are_known_by_their_pixels() -> None:
    given = batch(3, ids=False)
    assert record_keys(given) == record_keys(batch(3, ids=False))
    doubled = Batch(given.inputs[[0, 0, 1]], given.targets[[0, 0, 1]])
    assert len(set(record_keys(doubled))) == 2
    found, state = noise_of(shadow(), doubled)
    assert len(state["keys"]) == 2 and torch.equal(state["maps"][0], state["maps"][0]) and found.shape[0] == 3


def test_off_keeps_nothing() -> None:
    given = batch()
    trained, state = Shadow(strength=0.0).protect_batch(given, view(learner()), {})
    assert trained is given and state == {}
    assert type(Shadow(strength=0.0).adversary()) is OpenAdversary


def test_minibatches_are_those_of_local_training_and_none_is_alone() -> None:
    own = learner(shares="weights", epochs=1, minibatch=2)
    assert shadow()._minibatches(5, own) == [[0, 1], [2, 3, 4]]
    assert shadow()._minibatches(4, own) == [[0, 1], [2, 3]]
    assert shadow()._minibatches(1, own) == [[0]]
    assert [len(part) for part in shadow()._minibatches(150, learner())] == [64, 64, 22]


class Counter:
    """Counts the passes through a learner's model."""

    def __init__(self, own: Any) -> None:
        self.forward = self.backward = 0
        own.model.conv.register_forward_hook(self._count)

    def _count(self, module: Any, given: Any, output: Tensor) -> None:
        self.forward += 1
        if output.requires_grad:
            output.register_hook(self._back)

    def _back(self, slope: Tensor) -> None:
        self.backward += 1


def test_after_termination_a_step_is_three_passes() -> None:
    own = learner(shares="weights", local_steps=1)
    plain, defended = Counter(own), None
    run_client(own, batch(), build_defense("none"), Seed(0))
    assert plain.forward == 1
    state = run_client(own, batch(), shadow(), Seed(0)).state
    before = plain.forward
    defended = run_client(own, batch(), shadow(), Seed(0), state=state, round_index=20)
    # Pseudo step, Grad-CAM++, true step; the backward pass of Grad-CAM++ ends at the last feature map.
    assert plain.forward - before == 3
    assert set(defended.state) == {"keys", "maps"}


def test_batch_norm_statistics_count_where_batches_have_any() -> None:
    given = batch(4)
    for mode, expected in (("train", True), ("eval", False)):
        from gradveil.defenses.shadow.fit import observe

        own = learner(norm=True, batch_norm=mode)
        seen = observe(own, given.inputs, given.targets, {})
        assert bool(seen.statistics) is expected
        trained, _ = shadow().protect_batch(given, view(own), {})
        assert bool(torch.isfinite(trained.inputs).all())
        assert all(not module._forward_pre_hooks for module in own.model.modules())


def test_segmentation_with_masks() -> None:
    own = learner(16, 1, binary_cross_entropy, maps=True)
    given = batch(2, 16, 1)
    masks = (given.inputs > 0.5).float()
    result = run_client(own, Batch(given.inputs, masks), shadow(1), Seed(0))
    assert not torch.equal(result.trained_batch.inputs, given.inputs)


def test_soft_labels_as_attackers_simulate_them() -> None:
    given = batch(2)
    soft = torch.softmax(torch.randn((2, 4), generator=torch.Generator().manual_seed(0)), 1)
    trained, _ = shadow().protect_batch(Batch(given.inputs, soft), view(learner()), {})
    assert bool(torch.isfinite(trained.inputs).all())


def test_works_behind_a_variational_bottleneck() -> None:
    from gradveil.defenses.precode import PRECODE

    both = chain(PRECODE(latent=4), shadow())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = adapt(both, learner().model)
    own = learner()
    from gradveil.learning.learner import Learner

    assert adapted.adapt_loss is not None
    made = Learner.of(adapted.model, adapted.adapt_loss(own.loss), own.settings)
    made = made.replace(noise={"epsilon": torch.zeros(1, 3, 4)})
    result = run_client(made, batch(), both, Seed(0))
    assert not torch.equal(result.trained_batch.inputs, batch().inputs)


def test_quick_twins_spare_effort_alone_and_in_chains() -> None:
    asked = Shadow(strength=0.3, latent_steps=400)
    quick = asked.quick()
    assert (quick.strength, quick.schedule, quick.until) == (0.3, asked.schedule, asked.until)
    assert quick.latent_steps < 400 and quick.fit_steps < asked.fit_steps
    assert Shadow(latent_steps=1, fit_steps=0).quick() == Shadow(latent_steps=1, fit_steps=0)
    pruned = build_defense("pruning(rate=0.5)")
    assert pruned.quick() is pruned
    assert chain(asked, pruned).quick() == chain(quick, pruned)


def test_generators_by_channels_and_size() -> None:
    for shape, expected in (
        ((1, 3, 32, 32), "style-32"),
        ((1, 1, 28, 28), "style-32-grey"),
        ((1, 3, 64, 64), "style-64"),
        ((1, 1, 224, 224), "style-64-grey"),
    ):
        assert choose_generator("auto", torch.zeros(shape)) == expected
    assert choose_generator("mine.safetensors", torch.zeros(1, 3, 8, 8)) == "mine.safetensors"


def test_bad_input_is_answered_in_one_sentence(tmp_path: Path) -> None:
    for shape in ((2, 6, 128), (2, 4, 8, 8)):
        with pytest.raises(UsageError, match="one or three channels"):
            shadow().noise(Batch(torch.zeros(shape), torch.tensor([0, 1])), view(learner()), {})
    with pytest.raises(UsageError, match="pretrain"):
        shadow(generator=str(tmp_path / "missing.safetensors")).noise(batch(), view(learner()), {})
    with pytest.raises(BadUpdate):
        shadow().protect_batch(batch().replace(inputs=torch.full((3, 3, 16, 16), torch.nan)), view(learner()), {})
    for wrong in (
        {"strength": -1},
        {"until": -1},
        {"rounds": 0},
        {"temperature": 0},
        {"noise_momentum": 1.0},
        {"schedule": "rising"},
        {"foreground": 1.5},
        {"foreground_least": 0.6},
        {"patience": 0},
    ):
        with pytest.raises(UsageError, match="shadow"):
            Shadow(**wrong)


def test_corrupt_weights_are_refused() -> None:
    path = Path(generator(1))
    broken = path.with_name("broken.safetensors")
    broken.write_bytes(path.read_bytes()[:-1] + b"x")
    broken.with_suffix(".json").write_bytes(path.with_suffix(".json").read_bytes())
    with pytest.raises(UsageError, match="SHA-256"):
        shadow(1, generator=str(broken)).noise(batch(1, 8, 1), view(learner(8, 1)), {})


def observed(defense: Shadow, given: Batch) -> tuple[Observation, Tensor]:
    own = learner()
    result = run_client(own, given, defense, Seed(5))
    update = defense.decode(result.payload, ModelSpec.of(own.model))
    observation = Observation(
        learners=(own,),
        updates=(update,),
        payloads=(result.payload,),
        input_shape=(3, 16, 16),
        classes=4,
        examples=len(given),
        threat=ThreatModel(),
        adversary=defense.adversary(),
    )
    return observation, result.trained_batch.inputs


def test_subtracting_by_the_recipe_takes_noise_off_where_the_shadow_can_be_followed() -> None:
    # Dark enough that nothing is clamped, and a shadow that the attacker can follow.
    given = batch()
    given = given.replace(inputs=0.2 + 0.5 * given.inputs)
    defense = Shadow(**{**grey(), "foreground": 0.3})
    observation, noisy = observed(defense, given)
    adversary = observation.adversary
    assert isinstance(adversary, ShadowAdversary) and not adversary.arrives(observation).incomplete
    assert adversary.arrives(observation).plain_search
    cleaned = adversary.subtracted(observation.learner, noisy, given.targets, 0)
    before, after = ((each - given.inputs).square().mean() for each in (noisy, cleaned))
    assert float(after) < 0.9 * float(before)
    late = observation.replace(updates=tuple(update.__class__(update.weights, 3, round=7) for update in observation.updates))
    assert adversary.arrives(late).incomplete


def test_the_attacker_subtracts_what_starts_have_in_common() -> None:
    drawn = torch.randn((4, 2, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    same = drawn[:1].expand(4, -1, -1, -1, -1)
    assert torch.allclose(common_share(same), torch.ones(2))
    assert float(common_share(drawn).max()) < 0.5
    assert torch.equal(common_share(torch.zeros(3, 2, 1, 4, 4)), torch.zeros(2))
    # Least squares by hand: N = m + e with |m|² = 4 |e|², predicted by the mean of four.
    common = 2 * torch.randn((1, 1, 1, 64, 64), generator=torch.Generator().manual_seed(1))
    own = torch.randn((4, 1, 1, 64, 64), generator=torch.Generator().manual_seed(2))
    assert float(common_share(common + own)) == pytest.approx(4 / (4 + 1 / 4), abs=0.01)


def test_the_attacker_leaves_what_is_no_image() -> None:
    observation, _ = observed(shadow(), batch())
    signals = Reconstruction(torch.rand((1, 6, 20), generator=torch.Generator().manual_seed(0)), torch.tensor([0]), "signals")
    assert observation.adversary.finish(signals, observation) is signals

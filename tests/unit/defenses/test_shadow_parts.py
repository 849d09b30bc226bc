"""What the parts of the shadow defense and of its attacker hand on, and of the truncating defense's attacker."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradveil.defenses.shadow import adversary as attacker
from gradveil.defenses.shadow import defense as client
from gradveil.defenses.shadow import fit, restorer
from gradveil.defenses.shadow.adversary import ShadowAdversary
from gradveil.defenses.shadow.defense import Shadow
from gradveil.defenses.shadow.memory import Memory
from gradveil.defenses.svdefense import adversary as truncating
from gradveil.defenses.svdefense.adversary import TruncationAdversary
from gradveil.defenses.svdefense.tilt import LEFT_SHARE
from gradveil.randomness import Seed
from gradveil.records import Batch
from tests.unit.stand_ins import fake, noted


def test_codes_are_fitted_in_small_groups_with_the_defense_s_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fitting(network: Any, weights: Any, images: Tensor, start: Tensor, **more: Any) -> Tensor:
        asked.append((network, weights, len(images), more))
        return start + len(asked)

    monkeypatch.setattr(client, "fit_codes", fitting)
    monkeypatch.setattr(client, "_synthesis", lambda network: ("weights of", network))
    monkeypatch.setattr(client, "TOGETHER", 2)
    defense = Shadow(latent_steps=7, latent_rate=0.25, patience=9)
    view: Any = fake(generator=Seed(4).generator)
    network: Any = fake(latent=3)
    codes = defense._fitted(network, Memory.read({}), torch.zeros(5, 1, 4, 4), view)
    more = {"steps": 7, "rate": 0.25, "patience": 9}
    assert asked == [(network, ("weights of", network), size, more) for size in (2, 2, 1)]
    start = torch.randn((5, 3), generator=Seed(4).generator("shadow codes"))
    assert torch.equal(codes, start + torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0])[:, None])


@pytest.mark.parametrize(
    ("count", "minibatch", "parts"),
    [
        (5, 0, [[0, 1, 2], [3, 4]]),
        (4, 0, [[0, 1, 2, 3]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (6, 2, [[0, 1], [2, 3], [4, 5]]),
        (1, 0, [[0]]),
        (1, 2, [[0]]),
    ],
)
def test_a_last_record_joins_those_before_it(
    count: int, minibatch: int, parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TOGETHER", 3)
    assert Shadow()._minibatches(count, fake(settings=fake(minibatch=minibatch))) == parts


class Maps:
    """Everything a step calls, noted; the network does nothing."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, list[Any]] = {}
        for name, answer in (
            ("observe", lambda *given: fake(gradient=f"gradient of {len(given[1])}")),
            ("fine_tune", lambda *given, **more: {"w": torch.full((1,), 8.0)}),
            ("foreground_weight", lambda *given: 0.5),
            ("reduce_foreground", lambda maps, own, weight: maps * weight),
            ("scaled_noise", lambda maps, images, size: maps * size),
            ("amplitude", lambda *given: 3.0),
        ):
            self._on(patch, name, answer)
        patch.setattr(Shadow, "_renewed", self._renewed)
        patch.setattr(Shadow, "_foreground", lambda self, *given: given)

    def _on(self, patch: pytest.MonkeyPatch, name: str, answer: Any) -> None:
        def noting(*given: Any, **more: Any) -> Any:
            self.asked.setdefault(name, []).append((*given, more))
            return answer(*given, **more)

        patch.setattr(client, name, noting)

    def _renewed(self, *given: Any) -> Tensor:
        self.asked.setdefault("renewed", []).append(given)
        images: Tensor = given[-3]
        return images * 0 + 2.0 + torch.arange(len(images)).reshape(-1, 1, 1, 1)


def step(defense: Shadow, at: int, known: list[int]) -> tuple[Tensor, Memory, Any]:
    memory = Memory.read({}).with_codes([7, 8, 9], torch.arange(3.0)[:, None])
    if known:
        memory = memory.with_maps(known, torch.full((len(known), 1, 2, 2), 1.0))
    learner = fake(noise_at=lambda number, rows: {"n": torch.tensor([number, *rows])[1:]})
    batch = Batch(torch.rand(3, 1, 2, 2), torch.tensor([5, 6, 7]))
    found, memory = defense._step("network", batch, [7, 8, 9], [0, 1, 2], fake(learner=learner, round=at), memory)  # type: ignore[arg-type]
    return found, memory, (learner, batch)


def test_a_step_fine_tunes_a_copy_on_what_an_attacker_would_see(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Maps(monkeypatch)
    monkeypatch.setattr(client, "_synthesis", lambda network: {"w": torch.full((1,), 4.0)})
    defense = Shadow(
        rounds=10, until=4, fit_steps=5, fit_rate=0.125, shadow_momentum=0.75, strength=0.5, schedule="decrease", foreground=0.2
    )
    found, memory, (learner, batch) = step(defense, 2, [])
    (tuned,) = noted.asked["fine_tune"]
    network, shadow, codes, images, targets, own, part, seen, more = tuned
    assert (network, own, seen.gradient) == ("network", learner, "gradient of 3") and float(shadow["w"]) == 4.0
    assert torch.equal(codes, torch.arange(3.0)[:, None]) and torch.equal(images, batch.inputs)
    assert torch.equal(targets, batch.targets) and part["n"].tolist() == [0, 1, 2]
    assert more == {"terms": client.TERMS, "steps": 5, "rate": 0.125}
    assert noted.asked["renewed"][0][1] == {"w": torch.full((1,), 8.0)} and noted.asked["renewed"][0][4] == [7, 8, 9]
    assert float(memory.shadow["w"]) == 0.75 * 4 + 0.25 * 8
    assert noted.asked["foreground_weight"] == [(0.2, defense.foreground_least, defense.foreground_most, {})]
    assert noted.asked["amplitude"] == [(0.5, 0.2, "decrease", {})]
    assert found.flatten(1)[:, 0].tolist() == [3.0, 4.5, 6.0]
    (_, foreground, weight, _) = noted.asked["reduce_foreground"][0]
    assert foreground[0] is learner and foreground[1] == "gradient of 3" and foreground[2] is batch and weight == 0.5


def test_after_the_last_renewal_only_strangers_get_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Maps(monkeypatch)
    monkeypatch.setattr(client, "_synthesis", lambda network: {"w": torch.full((1,), 4.0)})
    found, memory, (_, batch) = step(Shadow(rounds=2, until=4, fit_steps=1, foreground=0.0), 4, [7, 9])
    (tuned,) = noted.asked["fine_tune"]
    assert tuned[2].tolist() == [[1.0]] and torch.equal(tuned[3], batch.inputs[1:2]) and tuned[4].tolist() == [6]
    assert tuned[6]["n"].tolist() == [1] and tuned[7].gradient == "gradient of 1"
    assert found.flatten(1)[:, 0].tolist() == [3.0, 6.0, 3.0] and memory.shadow == {}
    assert noted.asked["amplitude"][0][1] == 1.0, "no more than the whole training"
    noted.asked.clear()
    step(Shadow(until=4, fit_steps=0, foreground=0.0), 4, [7, 8, 9])
    assert set(noted.asked) == {"scaled_noise", "amplitude"}


@pytest.mark.parametrize(("temperature", "equalised", "momentum"), [(7.0, True, 0.75), (2.0, False, 0.0)])
def test_a_map_is_renewed_with_momentum_and_a_stranger_s_is_its_first(
    temperature: float, equalised: bool, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(client, "styles_of", lambda *given: ("styles", *given))
    monkeypatch.setattr(client, "imagine", lambda *given: noted(asked, given) or "imagined")
    monkeypatch.setattr(client, "error_map", lambda *given: ("errors", *given))
    monkeypatch.setattr(
        client,
        "relative_noise",
        lambda *given, **more: noted(asked, (given, more)) or torch.tensor([4.0, 8.0])[:, None, None].double(),
    )
    defense = Shadow(temperature=temperature, equalised=equalised, noise_momentum=momentum)
    memory: Any = fake(maps={5: torch.full((1, 1), 2.0)})
    codes, images, weights = torch.zeros(2, 1), torch.zeros(2, 1, 1, 1), {"w": torch.zeros(1)}
    found = defense._renewed("network", weights, codes, images, [5, 6], memory)  # type: ignore[arg-type]
    assert asked[0] == (("network"), ("styles", "network", codes), weights, images)
    assert asked[1] == ((("errors", images, "imagined"), temperature), {"equalised": equalised})
    assert found.flatten().tolist() == [momentum * 2.0 + (1 - momentum) * 4.0, 8.0] and found.dtype == torch.float32


@pytest.mark.parametrize(("side", "kept"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (16, 3), (17, 4), (99, 4)])
def test_a_generator_is_cut_behind_the_first_block_that_holds_the_image(side: int, kept: int) -> None:
    synthesis = fake(blocks=nn.ModuleList(nn.Identity() for _ in range(4)), depth=8)
    fit._cut(synthesis, side)
    assert (len(synthesis.blocks), synthesis.depth) == (kept, 2 * kept)
    odd = fake(blocks=[1, 2], depth=4)
    fit._cut(odd, side)
    assert odd.blocks == [1, 2]


@pytest.mark.usefixtures("untouched_global_rng")
def test_a_filter_draws_from_its_generator_alone_and_knows_how_much_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restorer, "UNITS", 16)
    clean = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    noisy = clean + 0.2 * (torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(2)) > 0.8)
    made, again, other = (restorer.fit_restorer(clean, noisy, 0.3, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    for name in ("units", "offsets", "coefficients"):
        assert torch.equal(getattr(made, name), getattr(again, name)) and not torch.equal(
            getattr(made, name), getattr(other, name)
        )
    drawn = torch.Generator().manual_seed(5)
    numbers = 1 * 9 + 9 + 2
    units = 2 * torch.randn((numbers, 16), generator=drawn) / math.sqrt(numbers)
    offsets = 0.5 * torch.randn(16, generator=drawn)
    rough = noisy + restorer.ROUGHNESS * torch.randn(noisy.shape, generator=drawn)
    assert torch.allclose(made.units, units) and torch.allclose(made.offsets, offsets)
    seen, wanted = [], []
    for x, y in zip(clean.split(1), rough.split(1), strict=True):
        top = 0.3 * y.max()
        seen.append(restorer._described(y / top, units, offsets).double())
        wanted.append(((y - x) / top).mean(1).reshape(-1, 1).double())
    features = torch.cat(seen)
    gram = features.T @ features
    ridge = restorer.RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    solved = torch.linalg.solve(gram + ridge, features.T @ torch.cat(wanted))
    assert torch.allclose(made.coefficients.double(), solved, rtol=1e-2, atol=1e-4)
    cleaned, believed = made.clean(noisy, 0.3)
    tops = 0.3 * noisy.amax((1, 2, 3), keepdim=True)
    taken = ((noisy - cleaned) / tops).square().mean((1, 2, 3)).sqrt()
    assert made.usual == pytest.approx(float(taken.mean())) and made.usual > 0
    assert believed.tolist() == [each <= restorer.TOO_MUCH * made.usual for each in taken.tolist()]
    assert not torch.allclose(cleaned, noisy)


@pytest.mark.parametrize("at", [0, 3])
def test_a_filter_is_learned_for_the_round_with_units_of_one_seed(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    defense = Shadow(rounds=6, strength=0.25, schedule="increase")
    monkeypatch.setattr(attacker, "MOST", 2)
    monkeypatch.setattr(attacker, "public_pairs", lambda *given: ("noisy", *given))
    monkeypatch.setattr(
        attacker,
        "fit_restorer",
        lambda clean, noisy, height, units: noted(asked, (clean, noisy, height, units.initial_seed())) or "made",
    )
    monkeypatch.setattr(attacker, "content_of", lambda images: len(images))
    monkeypatch.setattr(attacker, "_FILTERS", fake(get=lambda key, make: (key, make())))
    learner: Any = fake(weights={"w": torch.zeros(1)})
    public = torch.tensor([[-1.0], [2.0], [0.5]])
    found: Any = attacker._restorer(defense, public, learner, at)
    assert found == ((2, defense, at), "made")
    clean, noisy, height, units = asked[0]
    assert clean.flatten().tolist() == [0.0, 1.0] and noisy[0] == "noisy" and noisy[1] is defense and noisy[2] is clean
    assert noisy[3] is learner and noisy[4] == at and height == pytest.approx(0.25 * math.exp(at / 6))
    assert units == Seed(0).child("shadow's restorer").generator("units").initial_seed()


@pytest.mark.parametrize(("seen", "later"), [([0], False), ([1], True), ([0, 0], True)])
def test_later_rounds_are_said_to_be_known_in_part(seen: list[int], later: bool) -> None:
    observation: Any = fake(updates=[fake(round=each, weights={}) for each in seen], update=fake(weights={}))
    assert ShadowAdversary(Shadow()).arrives(observation).incomplete is later


@pytest.mark.parametrize(
    ("entropy", "bias", "rows", "known"),
    [(0.0, True, 3, True), (0.0, False, 3, False), (9.0, True, 3, False), (9.0, False, 1, True)],
)
def test_how_far_factors_were_tilted_is_read_off_their_lengths(
    entropy: float, bias: bool, rows: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.tensor([[1.5, 0.0, 0.0]])
    factors = fake(right=right, left=torch.ones(rows, 1), sigma=torch.tensor([2.0]), scale=torch.arange(1.0, rows + 1))
    monkeypatch.setattr(truncating, "factors_of", lambda payload, name: factors if name == "a.weight" else None)
    monkeypatch.setattr(truncating, "entropies_of", lambda payload: {"a.weight": entropy, "other": 5.0 - entropy})
    others = {"a.bias", "a.weight"} if bias else {"a.weight"}
    matrix = torch.zeros(rows, 3)
    adversary = TruncationAdversary("squared", 0.25)
    kept = adversary._read("payload", "a.weight", matrix, others)  # type: ignore[arg-type]
    tilt = math.sqrt(1.5**2 - 1)
    assert kept.right_tilt == pytest.approx(tilt)
    assert kept.left_tilt == pytest.approx(0.0 if known else math.sqrt(LEFT_SHARE) * tilt)
    assert kept.rank == 1 and kept.left[:, 0].tolist() == [2.0] * rows and kept.right[0].tolist() == [1.5, 0.0, 0.0]
    assert kept.norms.tolist() == factors.scale.tolist()
    plain = TruncationAdversary("absolute", 0.0)._read("payload", "a.weight", torch.ones(rows, 3), others)  # type: ignore[arg-type]
    assert plain.norms.tolist() == pytest.approx([(place + 1) ** 2 / math.sqrt(3) for place in range(rows)])
    assert plain.left[:, 0].tolist() == [1.5] * rows and (plain.right_tilt, plain.left_tilt) == (0.0, 0.0)
    whole = adversary._read("payload", "b.weight", torch.diag(torch.tensor([3.0, 2.0, 0.0])), others)  # type: ignore[arg-type]
    assert whole.rank == 2 and [whole.right_tilt, whole.left_tilt] == pytest.approx([0.5, math.sqrt(LEFT_SHARE) / 2])
    assert torch.allclose(whole.left @ whole.right, torch.diag(torch.tensor([3.0, 2.0, 0.0])), atol=1e-6)


def test_fine_tuning_takes_its_steps_on_the_imagined_attacker_s_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(fit, "styles_of", lambda network, codes: ("styles", network, codes))
    monkeypatch.setattr(
        fit, "imagine", lambda network, styles, weights, like: noted(asked, (network, styles, like)) or weights["w"]
    )
    monkeypatch.setattr(fit, "shadow_loss", lambda pictures, *given: noted(asked, given) or (3 * pictures).sum())
    steps: list[Any] = []

    def step(slope: Tensor, mean: Tensor, square: Tensor, number: int, *, rate: float) -> Any:
        steps.append((slope.tolist(), mean.tolist(), square.tolist(), number, rate))
        return 0.5 * slope, mean + 1, square + 2

    monkeypatch.setattr(fit, "adam_step", step)
    codes, images = torch.zeros(1, 2), torch.zeros(1, 1, 2, 2)
    weights = {"w": torch.tensor([9.0]), "unused": torch.tensor([4.0])}
    given: Any = ("network", weights, codes, images, "targets", "learner", "noise", "real")
    found = fit.fine_tune(*given, terms="terms", steps=3, rate=0.125)  # type: ignore[arg-type]
    assert found["w"].tolist() == [9.0 - 3 * 1.5] and found["unused"].tolist() == [4.0] and weights["w"].tolist() == [9.0]
    assert [(each[2][0], each[3], each[4]) for each in steps[::2]] == [(2.0 * n, n, 0.125) for n in range(3)]
    assert [each[:2] for each in steps[::2]] == [([3.0], [float(n)]) for n in range(3)]
    assert (
        asked == [("network", ("styles", "network", codes), images), (images, "targets", "learner", "noise", "real", "terms")] * 3
    )
    assert fit.fine_tune(*given, terms="terms", steps=0, rate=0.125)["w"].tolist() == [9.0]  # type: ignore[arg-type]
    assert not found["w"].requires_grad

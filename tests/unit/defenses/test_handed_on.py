"""What single defenses hand on within themselves: how many directions are looked for, and what a vanished matrix says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gradveil.defenses import DEFENSES, build_defense
from gradveil.defenses.censor import Censor, _Draw
from gradveil.defenses.invl.singular_noise import NoiseRange, noise_range
from gradveil.defenses.svdefense.truncation import ChannelWeights, truncate
from gradveil.errors import DefenseOrder
from gradveil.learning import Learner
from gradveil.randomness import Seed
from gradveil.spectra.jacobians import Jacobian
from gradveil.tensors import Named
from gradveil.testing.defenses_scene import SHAPE, Scene

NUMBERS = [field.name for field in dataclasses.fields(NoiseRange) if field.type == "int"]


class Asked(Exception):
    pass


@pytest.mark.parametrize(("most", "seed"), [(7, None), (100, Seed(3))])
def test_as_many_directions_are_looked_for_as_are_allowed(most: int, seed: Seed | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(jacobian: Jacobian, **given: object) -> None:
        raise Asked(given)

    monkeypatch.setattr("gradveil.spectra.spectrum.spectrum", asked)
    jacobian = Jacobian(lambda point: point, torch.zeros(120))
    with pytest.raises(Asked) as found:
        noise_range(jacobian, low=0.0, high=0.9, rule="sum", mode="leading", most=most, seed=seed)
    assert found.value.args == ({"mode": "leading", "leading": most, "right": True, "seed": seed or Seed(0)},)


def test_a_matrix_of_zeros_has_no_entropy_no_rank_and_nothing_cut_off() -> None:
    found = truncate(torch.zeros(3, 5), weights="squared", beta=0.3, threshold=None)
    assert (found.entropy, found.rank, found.residual) == (0.0, 0, 0.0)
    assert found.whole.shape == (3, 5) and not bool(found.whole.any())
    assert found.right.shape == (1, 5) and float(found.right.norm()) == 1.0


@pytest.mark.parametrize("weights", ["none", "squared"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_the_rank_of_a_matrix_is_that_before_anything_is_cut_off(shape: tuple[int, int], weights: ChannelWeights) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.rand((shape[0], 3), generator=generator) @ torch.rand((3, shape[1]), generator=generator)
    found = truncate(matrix.double(), weights="none", beta=0.3, threshold=0.01)
    assert len(found.sigma) == 1 and found.rank >= 3 > len(found.sigma)
    whole = truncate(torch.diag(torch.tensor([3.0, 2.0, 1.0])), weights=weights, beta=0.3, threshold=0.999)
    assert (whole.rank, len(whole.sigma)) == (3, 3)
    assert truncate(torch.tensor([[1.0, 2.0]]), weights=weights, beta=0.3, threshold=None).rank == 1


EMBEDDING = [name for name in DEFENSES.names() if "protect_embedding" in DEFENSES.build(name).stations()]


@pytest.mark.parametrize("name", [*EMBEDDING, "invl_enp(basis='public')"])
def test_every_record_s_embedding_is_protected(name: str) -> None:
    defense = build_defense(name)
    scene = Scene.of(defense)
    view = scene.view().replace(public=torch.rand((4, *SHAPE), generator=torch.Generator().manual_seed(1)))
    raw = scene.gradient()["embedding"] if "embedding" in scene.gradient() else next(iter(scene.gradient().values()))
    sent, _ = defense.protect_embedding(raw, view, defense.prepare(scene.batch, view))
    moved = (sent - raw).flatten(1).norm(dim=1)
    assert bool((moved > 0).all()), moved
    apart = torch.cdist((sent - raw).flatten(1), (sent - raw).flatten(1)) + torch.eye(len(raw))
    assert float(apart.min()) > 0, "each in its own way"


DATA = [
    name for name in DEFENSES.names() if "protect_batch" in DEFENSES.build(name).stations() and name not in ("refiner", "shadow")
]


@pytest.mark.parametrize("name", DATA)
def test_every_record_of_a_batch_is_protected(name: str) -> None:
    defense = build_defense(name)
    scene = Scene.of(defense)
    trained = scene.trained(defense, 1, scene.batch).inputs
    moved = (trained - scene.batch.inputs).flatten(1).norm(dim=1)
    assert bool((moved > 0).all()), moved


VARIABLES = [name for name in DEFENSES.names() if name not in ("refiner", "shadow", *EMBEDDING)]


@pytest.mark.parametrize("name", VARIABLES)
def test_what_an_attacker_fits_is_drawn_from_the_generator_it_is_given(name: str, untouched_global_rng: None) -> None:
    defense = build_defense(name)
    scene = Scene.of(defense)
    observation = scene.observe(defense, 1, scene.batch)
    one, again, other = (observation.adversary.variables(observation, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert one.keys() == again.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, again[name])
        assert value.isfinite().all() and (value.numel() < 5 or float(value.std()) == 0 or not torch.equal(value, other[name]))


@pytest.mark.parametrize(
    ("spelling", "better"),
    [
        ("svdefense + gaussian_noise", "gaussian_noise + svdefense"),
        ("clipping + svdefense + gaussian_noise + laplace_noise", "clipping + gaussian_noise + laplace_noise + svdefense"),
        ("svdefense + data_noise + gaussian_noise", "gaussian_noise + svdefense + data_noise"),
        ("gaussian_noise + svdefense + data_noise + clipping", "gaussian_noise + clipping + svdefense + data_noise"),
    ],
)
def test_a_chain_in_the_wrong_order_is_told_the_right_one(spelling: str, better: str) -> None:
    with pytest.raises(DefenseOrder) as caught:
        build_defense(spelling)
    told = str(caught.value).rpartition(": ")[2]
    assert [part.partition("(")[0] for part in told.split(" + ")] == better.split(" + ")
    build_defense(told)


def test_public_gradients_are_drawn_for_a_batch_of_the_client_s_size(monkeypatch: pytest.MonkeyPatch) -> None:
    defense = Censor(sampling="public", trials=3)
    scene = Scene.of(defense)
    view = scene.view().replace(public=torch.rand((9, *SHAPE), generator=torch.Generator().manual_seed(1)))
    sizes: list[tuple[int, int]] = []
    inner = Learner.gradient

    def noting(self: Learner, weights: Named, inputs: torch.Tensor, targets: torch.Tensor, *more: Any) -> Named:
        sizes.append((len(inputs), len(targets)))
        return inner(self, weights, inputs, targets, *more)

    draw = _Draw.of("public", scene.gradient(), view)
    monkeypatch.setattr(Learner, "gradient", noting)
    found = draw.some(2)
    assert sizes == [(len(scene.batch), len(scene.batch))] and all(len(value) == 2 for value in found.values())


@pytest.mark.parametrize(
    ("spelling", "function"),
    [
        ("invl_dnp(share=0.8, rule='count', mode='leading', most=7)", "dnp.right_bases"),
        ("invl_enp(share=0.8, spared=0.1, rule='count', mode='leading', most=7)", "enp.noise_range"),
        ("invl_gnp(share=0.8, spared=0.1, rule='count', mode='leading', most=7)", "gnp.noise_range"),
    ],
)
def test_a_range_of_noise_is_asked_for_with_the_defense_s_own_settings(
    spelling: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*given: object, **settings: object) -> None:
        raise Asked(settings)

    monkeypatch.setattr(f"gradveil.defenses.invl.{function}", asked)
    defense = build_defense(spelling)
    scene = Scene.of(defense)
    with pytest.raises(Asked) as found:
        scene.payload(defense)
    settings = found.value.args[0]
    ends = {"share": 0.8} if "dnp" in spelling else {"low": 0.1, "high": 0.8}
    assert {**ends, "rule": "count", "mode": "leading", "most": 7}.items() <= settings.items()


def test_a_chain_asks_each_part_for_the_client_s_own_unknowns() -> None:
    adversary = build_defense("clipping + precode").adversary()
    drawn = {f"1/{name}": torch.arange(3.0)[:, None] + place for place, name in enumerate(("fitted", "read", "known"))}
    for client in range(3):
        own = adversary.of_client(drawn, client)
        assert own.keys() == drawn.keys() and all(torch.equal(own[name], drawn[name][client]) for name in drawn)


@pytest.mark.parametrize("mode", ["gram", "leading"])
def test_where_nothing_depends_on_the_input_the_range_is_empty(mode: str) -> None:
    jacobian = Jacobian(lambda point: 0 * point[:5], torch.zeros(8, dtype=torch.float64))
    found = noise_range(jacobian, low=0.0, high=0.9, rule="sum", mode=mode, most=4)
    assert found.scaled.shape == (0, 8) and [getattr(found, name) for name in NUMBERS] == [0] * len(NUMBERS) == [0, 0, 0]

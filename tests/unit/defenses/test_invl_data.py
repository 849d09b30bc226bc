"""InvL-DNP: where its noise lies, how much there is, what is kept between rounds, and what its attacker makes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradveil.data.public import public_images
from gradveil.defenses import ClientView, Defense, build_defense
from gradveil.defenses.invl.dnp import MADE, InvLDNP
from gradveil.defenses.invl.gnp import InvLGNP
from gradveil.defenses.invl.singular_noise import QUICK, _tie_end, leading_count, noise_range, right_bases
from gradveil.defenses.parts.denoising import denoise_images, denoise_in_subspace
from gradveil.errors import ReplaceLayer, UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, Reconstruction, ThreatModel, Update
from gradveil.spectra import lanczos
from gradveil.spectra.jacobians import Jacobian, jacobian_of
from gradveil.study.local_training import TrainingSettings

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "defenses_invl.json").read_text())
SHAPE, M = (1, 6, 6), 36


class Net(nn.Module):
    """A convolution and a linear layer, whose Jacobian has no tied singular values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3 * M, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.sigmoid(self.conv(inputs)).flatten(1))
        return outputs


def learner(seed: int = 0) -> Learner:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Net()
    return Learner.of(made, loss_by_name("cross_entropy")).to(torch.float64)


def batch(count: int = 4) -> Batch:
    inputs = 0.3 + 0.4 * torch.rand((count, *SHAPE), generator=Seed(1).generator("x"), dtype=torch.float64)
    return Batch(inputs, torch.arange(count) % 3)


def view(own: Learner, data: Batch, round_index: int = 0, seed: int = 1) -> ClientView:
    return ClientView(learner=own, seed=Seed(seed), round=round_index, weights=own.weights, raw_batch=data, batch=data)


def reference(own: Learner, record: Tensor, target: Tensor, share: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Return the leading right singular vectors and all singular values, by reverse mode and numpy."""

    def gradient(x: Tensor) -> Tensor:
        named = own.gradient(own.weights, x.reshape(1, *SHAPE), target.reshape(1))
        return torch.cat([value.reshape(-1) for value in named.values()])

    matrix = torch.func.jacrev(gradient)(record.reshape(-1)).numpy()
    _, sigma, right = np.linalg.svd(matrix, full_matrices=False)
    k = int((sigma.cumsum() < share * sigma.sum()).sum()) + 1
    return right[:k], sigma


@pytest.mark.parametrize("row", GOLDEN["leading_counts"]["value"], ids=str)
def test_shares_are_counted_as_the_rules_say(row: dict[str, Any]) -> None:
    values = torch.tensor(row["values"], dtype=torch.float64)
    assert {rule: leading_count(values, row["share"], rule) for rule in ("sum", "energy", "count")} == {
        rule: row[rule] for rule in ("sum", "energy", "count")
    }


def test_the_readings_of_a_share_differ_widely_on_a_power_law() -> None:
    golden = GOLDEN["power_law_counts"]["value"]
    values = torch.arange(1, golden["d"] + 1, dtype=torch.float64) ** golden["exponent"]
    assert [leading_count(values, share, "sum") for share in (0.6, 0.95)] == golden["sum"]
    assert leading_count(values, 0.95, "energy") == golden["energy_95"]
    assert leading_count(values, 0.6, "count") == golden["count_60"]


@pytest.mark.parametrize("mode", ["auto", "dense", "gram"])
def test_noise_lies_in_each_records_own_leading_subspace(mode: Any) -> None:
    own, data = learner(), batch()
    defense = InvLDNP(delta=1e-6, mode=mode)
    noisy, _ = defense.protect_batch(data, view(own, data), {})
    for index in range(len(data)):
        noise = (noisy.inputs - data.inputs)[index].reshape(-1).numpy()
        right, sigma = reference(own, data.inputs[index], data.targets[index])
        assert 0 < len(right) < min(M, int((sigma > 1e-9 * sigma[0]).sum()))
        assert np.linalg.norm(noise - right.T @ (right @ noise)) < 1e-6 * np.linalg.norm(noise)


def test_noise_has_the_told_variance_along_each_direction() -> None:
    own = learner()
    one = batch(1)
    many = Batch(one.inputs.expand(600, *SHAPE), one.targets.expand(600))
    right, _ = reference(own, one.inputs[0], one.targets[0])
    for defense, variance in ((InvLDNP(delta=1e-4), 1e-4), (InvLDNP(delta=0.02, variance=False), 4e-4)):
        noisy, _ = defense.protect_batch(many, view(own, many), {})
        along = (noisy.inputs - many.inputs).reshape(600, -1).numpy() @ right.T
        assert float(along.var()) == pytest.approx(variance, rel=0.05)


def test_the_draw_does_not_depend_on_the_way_the_basis_was_found() -> None:
    own, data = learner(), batch()
    first, second = (InvLDNP(mode=mode).protect_batch(data, view(own, data), {})[0].inputs for mode in ("auto", "gram"))
    assert torch.allclose(first, second, atol=1e-6)


def test_tied_singular_values_are_kept_or_left_together() -> None:
    # The first layer's gradient is δ xᵀ: it moves alike in all directions the hidden units do not see.
    made = build_model("mlp(hidden=5)", input_shape=SHAPE, classes=3, seed=Seed(0))
    own, data = Learner.of(made, loss_by_name("cross_entropy")).to(torch.float64), batch(1)
    _, sigma = reference(own, data.inputs[0], data.targets[0])
    tied = int((np.abs(sigma - np.median(sigma)) < 1e-6 * sigma[0]).sum())
    assert tied > 20
    first = int((sigma > np.median(sigma) + 1e-6 * sigma[0]).sum())
    for mode in ("dense", "gram"):
        (basis,) = right_bases(own, data.inputs, data.targets, share=0.5, rule="sum", mode=mode, most=M)
        assert len(basis) == first + tied


def test_lanczos_finds_the_same_leading_directions() -> None:
    own, data = learner(), batch(1)
    (basis,) = right_bases(own, data.inputs, data.targets, share=1.0, rule="count", mode="leading", most=4)
    (whole,) = right_bases(own, data.inputs, data.targets, share=1.0, rule="count", mode="dense", most=4)
    assert basis.shape == whole.shape == (4, M)
    assert torch.allclose(basis.T @ basis, whole.T @ whole, atol=1e-4)


def test_a_class_basis_is_that_of_the_class_mean_and_is_kept_until_it_is_old() -> None:
    own, data = learner(), batch(5)
    defense = InvLDNP(delta=1e-6, basis="class", refresh=2)
    noisy, state = defense.protect_batch(data, view(own, data), {})
    members = data.targets == 1
    right, _ = reference(own, data.inputs[members].mean(0), torch.tensor(1))
    noise = (noisy.inputs - data.inputs)[members].reshape(int(members.sum()), -1).numpy()
    assert np.linalg.norm(noise - (noise @ right.T) @ right) < 1e-6 * np.linalg.norm(noise)

    moved = learner(seed=7)
    _, kept = defense.protect_batch(data, view(moved, data, 1), state)
    assert all(torch.equal(kept[name], value) for name, value in state.items())
    _, renewed = defense.protect_batch(data, view(moved, data, 2), state)
    assert int(renewed[MADE]) == 2
    assert renewed["class/1"].shape != state["class/1"].shape or not torch.allclose(renewed["class/1"], state["class/1"])


def test_a_class_that_appears_later_gets_its_basis_then() -> None:
    own, data = learner(), batch(5)
    defense = InvLDNP(basis="class", refresh=9)
    _, state = defense.protect_batch(Batch(data.inputs[:1], data.targets[:1]), view(own, data), {})
    assert set(state) == {MADE, "class/0"}
    _, more = defense.protect_batch(data, view(own, data, 1), state)
    assert set(more) == {MADE, "class/0", "class/1", "class/2"}
    assert torch.equal(more["class/0"], state["class/0"])


class Deaf(nn.Module):
    """Its output does not depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(M, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(0 * inputs.flatten(1))
        return outputs


@pytest.mark.parametrize("mode", ["auto", "gram", "leading"])
def test_where_nothing_depends_on_the_input_no_noise_is_added(mode: Any) -> None:
    own = Learner.of(Deaf(), loss_by_name("cross_entropy")).to(torch.float64)
    data = batch()
    noisy, _ = InvLDNP(mode=mode).protect_batch(data, view(own, data), {})
    assert torch.equal(noisy.inputs, data.inputs)


@pytest.mark.parametrize("grey", [0.0, 0.5, 1.0])
def test_constant_images_get_finite_noise(grey: float) -> None:
    own = learner()
    data = Batch(torch.full((2, *SHAPE), grey, dtype=torch.float64), torch.tensor([0, 2]))
    noisy, _ = InvLDNP(basis="class").protect_batch(data, view(own, data), {})
    assert bool(torch.isfinite(noisy.inputs).all()) and bool(((noisy.inputs >= 0) & (noisy.inputs <= 1)).all())


@pytest.mark.parametrize("spelling", ["invl_dnp", "invl_gnp"])
def test_batch_norm_on_the_batch_is_refused_in_one_sentence(spelling: str) -> None:
    model = build_model('convnet(width=2, norm="batch")', input_shape=(1, 8, 8), classes=3, seed=Seed(0))
    own = Learner.of(model, loss_by_name("cross_entropy"), TrainingSettings(batch_norm="train"))
    data = Batch(torch.rand((3, 1, 8, 8), generator=Seed(0).generator("x")), torch.tensor([0, 1, 2]))
    defense: Defense = build_defense(spelling)
    with pytest.raises(ReplaceLayer, match="batch_norm = 'eval'"):
        defense.protect_batch(data, view(own, data), {})
        defense.protect_update(Update(dict(own.weights), 3), view(own, data), {})


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("invl_dnp(delta=-1)", "delta is -1"),
        ("invl_dnp(share=1.5)", "share is 1.5"),
        ("invl_dnp(rule='sums')", "did you mean 'sum'"),
        ("invl_dnp(refresh=3)", "set basis='class'"),
        ("invl_dnp(variance=1)", "variance is 1"),
        ("invl_gnp(spared=0.95)", "noise needs room"),
        ("invl_gnp(most=0)", "most is 0"),
        ("invl_gnp(centres='server')", "centres is 'server'"),
        ("invl_enp(mode='lead')", "did you mean 'leading'"),
        ("invl_enp(refresh=2)", "set basis='public'"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(spelling: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_defense(spelling)


def test_soft_targets_have_no_class_centres() -> None:
    own = learner()
    data = Batch(batch(2).inputs, torch.full((2, 3), 1 / 3, dtype=torch.float64))
    with pytest.raises(UsageError, match="class numbers"):
        InvLDNP(basis="class").protect_batch(data, view(own, data), {})


def _psnr(left: Tensor, right: Tensor) -> float:
    return 10 * math.log10(1 / float((left - right).square().mean()))


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_knowing_the_subspace_beats_denoising_without(share: float) -> None:
    images = public_images((3, 16, 16), 4, Seed(3))
    m, generator = 3 * 16 * 16, Seed(0).generator("noise")
    basis = torch.linalg.qr(torch.randn((m, int(share * m)), generator=generator))[0].T
    drawn = 0.25 * torch.randn((4, len(basis)), generator=generator)
    noisy = (images + (drawn @ basis).reshape(images.shape)).clamp(0, 1)
    blind = _psnr(denoise_images(noisy, 0.25 * math.sqrt(share)), images)
    known = _psnr(denoise_in_subspace(noisy, [basis] * 4, 0.25), images)
    assert _psnr(noisy, images) < blind < known - (3.0 if share < 0.5 else 0.5)


def test_the_attacker_finishes_in_the_subspace_of_what_it_rebuilt() -> None:
    shape = (3, 12, 12)
    model = build_model("lenet", input_shape=shape, classes=3, seed=Seed(0))
    own = Learner.of(model, loss_by_name("cross_entropy"))
    data = Batch(public_images(shape, 3, Seed(5)), torch.arange(3))
    for basis in ("record", "class"):
        defense = InvLDNP(delta=0.04, basis=basis)
        noisy, _ = defense.protect_batch(data, view(own, data), {})
        seen = Observation((own,), (Update({}, 3),), (), shape, 3, 3, ThreatModel(), defense.adversary())
        rebuilt = Reconstruction(noisy.inputs, data.targets, "truth of the noisy inputs")
        finished = defense.adversary().finish(rebuilt, seen).inputs
        assert _psnr(finished, data.inputs) > _psnr(noisy.inputs, data.inputs) + 2


def test_ties_are_looked_for_on_the_device_of_the_values() -> None:
    """A default device elsewhere stands for a GPU: every tensor must be made where the singular values are."""
    values = torch.tensor([3.0, 2.0, 2.0, 1.0])
    with torch.device("meta"):
        assert [_tie_end(values, count) for count in range(5)] == [0, 1, 3, 3, 4]
    assert _tie_end(values[:0], 0) == 0


def test_the_attacker_takes_several_labels_as_they_are_and_soft_ones_as_classes() -> None:
    """An argmax over known labels that are no classes would give another record's Jacobian."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        many = Learner.of(Net(), loss_by_name("binary_cross_entropy")).to(torch.float64)
    inputs, several = batch(2).inputs, torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
    defense = InvLDNP(delta=0.01)
    seen = observation_of(many, several)
    found = defense.adversary().finish(Reconstruction(inputs, several, recipe="test"), seen)
    wanted = denoise_in_subspace(inputs, defense.bases(many, inputs, several), defense.std)
    assert torch.equal(found.inputs, wanted)
    soft = torch.tensor([[0.1, 0.8, 0.1], [0.6, 0.2, 0.2]], dtype=torch.float64)
    found = defense.adversary().finish(Reconstruction(inputs, soft, recipe="test"), observation_of(learner(), None))
    wanted = denoise_in_subspace(inputs, defense.bases(learner(), inputs, torch.tensor([1, 0])), defense.std)
    assert torch.equal(found.inputs, wanted)


def observation_of(own: Learner, labels: Tensor | None) -> Observation:
    update = Update({name: torch.zeros_like(value) for name, value in own.weights.items()}, examples=2)
    return Observation(
        learners=(own,),
        updates=(update,),
        payloads=(),
        input_shape=SHAPE,
        classes=3,
        examples=2,
        threat=ThreatModel(),
        adversary=InvLDNP(delta=0.01).adversary(),
        labels=labels,
    )


def flat_spectrum() -> Jacobian:
    values = torch.arange(1, 101, dtype=torch.float64) ** -0.2
    return jacobian_of(lambda point: values * point, torch.ones(100, dtype=torch.float64))


def test_noise_whose_directions_were_not_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a flat spectrum the spared share ends beyond what Lanczos found: noise on one leftover direction would be a sham."""
    monkeypatch.setattr(lanczos, "MOST", 32)
    jacobian = flat_spectrum()
    with pytest.raises(UsageError, match="that could be found end before a tenth"):
        noise_range(jacobian, low=0.6, high=0.95, rule="sum", mode="leading", most=4096)
    found = noise_range(jacobian, low=0.6, high=0.95, rule="sum", mode="gram", most=4096)
    assert found.last - found.first > 20 and found.wanted == found.last


@pytest.mark.parametrize("mode", ["gram", "leading"])
def test_a_cap_that_leaves_next_to_nothing_of_the_range_is_refused(mode: str) -> None:
    """Both shares end after 54 and 94 of 100 values; a cap once moved the noise to one spared direction without a word."""
    jacobian, wanted = flat_spectrum(), noise_range(flat_spectrum(), low=0.6, high=0.95, rule="sum", mode="gram", most=100)
    j, k = wanted.first, wanted.last
    assert (j, k) == (54, 94)
    for most in (10, j, j + 3):
        with pytest.raises(UsageError, match=f"vectors 5[3-6] to about 9[2-6], and most = {most} ends before a tenth"):
            noise_range(jacobian, low=0.6, high=0.95, rule="sum", mode=mode, most=most)
    partly = noise_range(jacobian, low=0.6, high=0.95, rule="sum", mode="gram", most=j + 10)
    assert (partly.first, partly.last, partly.wanted) == (j, j + 10, k)
    leading = noise_range(jacobian, low=0.0, high=0.95, rule="sum", mode=mode, most=5)
    assert (leading.first, leading.last) == (0, 5)


def test_attackers_who_simulate_see_noise_in_more_than_one_direction() -> None:
    model = build_model("lenet", input_shape=(3, 12, 12), classes=3, seed=Seed(0))
    own = Learner.of(model, loss_by_name("cross_entropy"))
    data = Batch(public_images((3, 12, 12), 3, Seed(5)), torch.arange(3))
    _, whole = InvLGNP().protect_update(Update(dict(own.weights), 3), view(own, data), {})
    twin = InvLGNP().quick()
    _, state = twin.protect_update(Update(dict(own.weights), 3), view(own, data), {})
    assert len(whole["scaled"]) > QUICK == len(state["scaled"])

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradveil.data import load_data
from gradveil.errors import ReplaceLayer, UnsupportedModel, UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.models import build_model
from gradveil.models.resnet import ResNet
from gradveil.models.split import split_model
from gradveil.randomness import Seed
from gradveil.risk.invre import risk_score
from gradveil.spectra import lanczos
from gradveil.spectra import spectrum as spectra
from gradveil.spectra.jacobians import Jacobian, gradient_jacobian, jacobian_of
from gradveil.spectra.joint import JointJacobian
from gradveil.spectra.layered import joint_push, layered_grams
from gradveil.spectra.spectrum import Spectrum, choose_mode, spectrum
from gradveil.study.local_training import TrainingSettings

ALPHA = 0.95  # near the scores of untrained networks, where InvRE is most sensitive


def make(spelling: str, shape: tuple[int, ...], **settings: object) -> Jacobian:
    model = small_resnet(shape) if spelling == "resnet" else build_model(spelling, input_shape=shape, classes=5, seed=Seed(3))
    return of_model(model, shape, TrainingSettings(**settings))  # type: ignore[arg-type]


def small_resnet(shape: tuple[int, ...]) -> nn.Module:
    """The layers of a ResNet-20, fewer and narrower: all its singular values take seconds."""
    channels, height, width = shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        widths = (8, 16, 32)
        kinds = {"norm": "batch", "activation": "relu", "shortcut": "zero_pad", "normalize": None}
        return ResNet((channels, height, width), 5, widths, 1, **kinds)  # type: ignore[arg-type]


def of_model(model: nn.Module, shape: tuple[int, ...], settings: TrainingSettings | None = None) -> Jacobian:
    learner = Learner.of(model, loss_by_name("cross_entropy"), settings)
    smooth = torch.linspace(0, 3, shape[-1]).sin().expand(shape) * 0.4 + 0.5
    noise = 0.1 * torch.rand(shape, generator=Seed(5).generator("noise"))
    return gradient_jacobian(learner, (smooth + noise).clamp(0, 1), torch.tensor(2))


def full(jacobian: Jacobian) -> Tensor:
    return jacobian.push(torch.eye(jacobian.inputs, dtype=torch.float64)).T


MODELS = [("lenet", (3, 12, 12)), ("convnet(width=4)", (3, 12, 12)), ("resnet", (3, 8, 8)), ("mlp", (1, 6, 6))]


@pytest.mark.parametrize(("spelling", "shape"), MODELS)
def test_gram_equals_dense_and_leading_is_near(spelling: str, shape: tuple[int, ...]) -> None:
    jacobian = make(spelling, shape)
    found = {mode: spectrum(jacobian, mode=mode) for mode in ("dense", "gram", "leading")}
    score = {mode: risk_score(each, alpha=ALPHA).invre for mode, each in found.items()}
    assert score["gram"] == pytest.approx(score["dense"], abs=1e-5)
    assert score["leading"] == pytest.approx(score["dense"], abs=0.02)
    assert found["gram"].disagreement < 1e-10
    top = found["dense"].values[0]
    assert float((found["gram"].values - found["dense"].values).abs().max()) < 1e-6 * top
    count = len(found["leading"].values)
    assert float((found["leading"].values - found["dense"].values[:count]).abs().max()) < 1e-5 * top
    assert found["leading"].frobenius == pytest.approx(found["dense"].frobenius, rel=0.1)
    assert found["gram"].frobenius == pytest.approx(found["dense"].frobenius, rel=1e-9)


class Odd(nn.Module):
    """A layer called twice, a wide step, a tied pair, a grouped convolution, a signal, and a weight used outside its layer."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1, stride=1)
        self.sparse = nn.Conv1d(2, 4, 2, padding=3, stride=3, dilation=2, bias=False)
        self.grouped = nn.Conv1d(2, 2, 3, padding=1, groups=2)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.wide = nn.Linear(8, 40)
        self.last = nn.Linear(80, 5)
        self.outside = outside

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.conv(torch.tanh(self.conv(inputs))))
        hidden = torch.tanh(self.sparse(hidden)).reshape(-1, 2, 8)
        hidden = self.second(torch.tanh(self.first(torch.tanh(self.grouped(hidden)))))
        if self.outside:
            hidden = hidden @ self.wide.weight[:8]
        logits: Tensor = self.last(torch.tanh(self.wide(hidden)).flatten(1))
        return logits


def odd(outside: bool) -> Jacobian:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return of_model(Odd(outside), (2, 8))


@pytest.mark.parametrize("store_bytes", [2**30, 1], ids=["one sweep", "a sweep per layer"])
def test_layers_sum_to_the_gram_matrix_however_they_are_used(store_bytes: int) -> None:
    jacobian = odd(outside=False)
    J = full(jacobian)
    assert torch.allclose(
        layered_grams(JointJacobian((jacobian,)), store_bytes=store_bytes)[0], J.T @ J, atol=1e-12 * float(J.square().sum())
    )


def test_weights_used_outside_their_layer_are_noticed() -> None:
    jacobian = odd(outside=True)
    J = full(jacobian)
    assert not torch.allclose(layered_grams(JointJacobian((jacobian,)))[0], J.T @ J, rtol=1e-6)
    found = spectrum(jacobian, mode="gram")
    assert "outside" in found.notes[0]
    assert torch.allclose(found.values, torch.linalg.svdvals(J), atol=1e-7 * float(found.values[0]))


@pytest.mark.parametrize("mode", ["dense", "gram", "leading"])
def test_vectors_are_singular_vectors(mode: str) -> None:
    jacobian = make("mlp", (1, 6, 6))
    found = spectrum(jacobian, mode=mode, right=True, left=True, leading=8)
    J = full(jacobian)
    assert found.right is not None and found.left is not None
    k = 8
    assert torch.allclose(J @ found.right[:, :k], found.left[:, :k] * found.values[:k], atol=1e-9 * float(found.values[0]))
    assert torch.allclose(found.left[:, :k].T @ found.left[:, :k], torch.eye(k, dtype=torch.float64), atol=1e-3)
    assert torch.allclose(found.projections, found.right.T @ jacobian.at.reshape(-1), atol=1e-8)


def test_several_steps_hooks_and_embeddings_have_spectra_too() -> None:
    steps = make("mlp", (1, 4, 4), shares="weights", local_steps=3, learning_rate=0.5)
    assert steps.learner is None
    J = full(steps)
    for mode in ("dense", "gram"):
        assert torch.allclose(spectrum(steps, mode=mode).values, torch.linalg.svdvals(J), atol=1e-7 * float(J.norm()))
    wide = torch.randn((3, 16), generator=Seed(1).generator("w"), dtype=torch.float64)
    embedding = jacobian_of(lambda x: wide @ x.reshape(-1), torch.rand((1, 4, 4), generator=Seed(2).generator("x")))
    found = spectrum(embedding, mode="gram", right=True)
    assert found.outputs == 3 and len(found.values) == 3 and found.whole
    assert torch.allclose(found.values, torch.linalg.svdvals(wide))
    learner = Learner.of(build_model("mlp", input_shape=(1, 4, 4), classes=5, seed=Seed(3)), loss_by_name("cross_entropy"))
    x = torch.rand((1, 4, 4), generator=Seed(2).generator("x"))
    plain = gradient_jacobian(learner, x, torch.tensor(1))
    halved = gradient_jacobian(learner, x, torch.tensor(1), hook=lambda s, w, g, i, t: {n: v / 2 for n, v in g.items()})
    assert torch.allclose(spectrum(halved).values * 2, spectrum(plain).values, rtol=1e-9)


def linear_release(values: Tensor, x: Tensor) -> Spectrum:
    return spectrum(jacobian_of(lambda point: values * point, x), mode="leading")


def test_repeated_singular_values_are_all_found_by_lanczos() -> None:
    values = torch.tensor([2.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    x = torch.arange(1.0, 9.0) / 8
    found = linear_release(values, x)
    assert torch.allclose(found.values[:6], values[:6], atol=1e-9)
    assert float(found.projections.square()[:3].sum()) == pytest.approx(float(x[:3].square().sum()), rel=1e-6)


def test_values_repeated_more_often_than_a_block_is_wide_are_found() -> None:
    values = torch.cat([torch.full((40,), 2.0), torch.full((4,), 1.0)]).double()
    found = linear_release(values, torch.rand(44, generator=Seed(1).generator("x")))
    assert torch.allclose(found.values, values, atol=1e-9)


def test_a_dead_network_has_a_zero_spectrum_in_every_mode() -> None:
    model = build_model("mlp", input_shape=(1, 4, 4), classes=3, seed=Seed(0))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    jacobian = of_model(model, (1, 4, 4))
    # With all weights zero the last layer's input is zero too; only biases learn, and they do not look at the input.
    for mode in ("dense", "gram", "leading"):
        found = spectrum(jacobian, mode=mode)
        assert found.dead, mode
        assert "zero" in found.notes[-1]
        score = risk_score(found, alpha=0.5)
        assert score.score == 1.0 and score.rank == 0 and 0 < score.invre < 0.15


def test_batch_norm_on_the_batch_is_refused_in_one_sentence() -> None:
    with pytest.raises(ReplaceLayer, match="GroupNorm"):
        make("resnet20", (3, 8, 8), batch_norm="train")


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.linear(inputs.mul(4).round())
        return logits


class InPlace(Rounded):
    def forward(self, inputs: Tensor) -> Tensor:
        numbers = torch.from_numpy(inputs.detach().numpy())
        logits: Tensor = self.linear(numbers)
        return logits


def test_layers_without_derivative_give_zero_or_one_sentence() -> None:
    assert spectrum(of_model(Rounded(), (4,)), mode="gram").dead
    with pytest.raises(UnsupportedModel, match="cannot be differentiated"):
        spectrum(of_model(InPlace(), (4,)))


def test_wrong_requests_are_answered() -> None:
    jacobian = make("mlp", (1, 4, 4))
    with pytest.raises(UsageError, match="did you mean 'gram'"):
        spectrum(jacobian, mode="grm")
    with pytest.raises(UsageError, match="at least 1"):
        spectrum(jacobian, mode="leading", leading=0)
    assert choose_mode(jacobian) == "dense"
    assert choose_mode(make("lenet", (3, 32, 32))) == "gram"
    assert choose_mode(make("resnet18", (3, 32, 32))) == "leading", "on a CPU"


def test_products_by_layers_are_the_ordinary_ones_and_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for jacobian in (odd(outside=False), make("resnet20", (3, 8, 8))):
        directions = torch.randn((3, jacobian.inputs), generator=Seed(4).generator("v"), dtype=torch.float64)
        plain = jacobian.push(directions)
        pushed = joint_push(JointJacobian((jacobian,)))(directions.unsqueeze(0))[0]
        assert torch.allclose(pushed, plain, atol=1e-12 * float(plain.norm()))
    monkeypatch.setattr(lanczos, "BY_LAYERS", 0)
    for outside in (False, True):  # the second is missed by layers, so that the ordinary products must be taken
        jacobian = odd(outside=outside)
        found = spectrum(jacobian, mode="leading", leading=4)
        exact = torch.linalg.svdvals(full(jacobian))
        assert torch.allclose(found.values, exact[: len(found.values)], atol=1e-6 * float(exact[0]))


def test_single_precision_gram_is_summed_in_double() -> None:
    exact, single = make("lenet", (3, 12, 12)), single_precision("lenet", (3, 12, 12))
    found, rough = spectrum(exact, mode="gram"), spectrum(single, mode="gram")
    top = float(found.values[0])
    # Summed in single precision, values below about 3e-4 of the largest would drown: their squares are below its rounding.
    assert float((found.values - rough.values).abs().max()) < 1e-5 * top
    assert risk_score(rough, alpha=ALPHA).invre == pytest.approx(risk_score(found, alpha=ALPHA).invre, abs=1e-5)


def test_rounding_does_not_enter_a_basis_in_single_precision() -> None:
    """Where a run spans all there is, what is left of a block is rounding; taken for new, it once doubled singular values."""
    data = load_data("digits")
    learner = Learner.of(
        build_model("mlp(hidden=[32])", input_shape=(1, 8, 8), classes=10, seed=Seed(0)), loss_by_name("cross_entropy")
    )
    for row in (13, 15):
        single, exact = (
            gradient_jacobian(learner, data.inputs[row], data.targets[row], dtype=dtype)
            for dtype in (torch.float32, torch.float64)
        )
        found, dense = spectrum(single, mode="leading"), spectrum(exact, mode="dense")
        assert float((found.values - dense.values[: len(found.values)]).abs().max()) < 1e-5 * float(dense.values[0])


def single_precision(spelling: str, shape: tuple[int, ...]) -> Jacobian:
    model = build_model(spelling, input_shape=shape, classes=5, seed=Seed(3))
    learner = Learner.of(model, loss_by_name("cross_entropy"))
    point = make(spelling, shape).at.float()
    return gradient_jacobian(learner, point, torch.tensor(2), dtype=torch.float32)


def test_an_embedding_that_is_wider_than_the_input_has_its_gram_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    bottom, _ = split_model(build_model("resnet20", input_shape=(3, 6, 6), classes=5, seed=Seed(3)), "cut1")
    learner = EmbeddingLearner.of_bottom(bottom, loss_by_name("cross_entropy"))
    record = torch.rand((3, 6, 6), generator=Seed(5).generator("x"))
    jacobian = replace(gradient_jacobian(learner, record, torch.tensor(2)), working_bytes=2**17)
    assert jacobian.learner is None and jacobian.outputs > jacobian.inputs
    exact = torch.linalg.svdvals(full(jacobian))
    by_columns = spectrum(jacobian, mode="gram")
    assert torch.allclose(by_columns.values, exact, atol=1e-7 * float(exact[0]))
    monkeypatch.setattr(spectra, "COLUMN_BYTES", 0)
    assert torch.allclose(spectrum(jacobian, mode="gram").values, exact, atol=1e-7 * float(exact[0]))
    assert risk_score(spectrum(jacobian, mode="leading"), alpha=ALPHA).invre == pytest.approx(
        risk_score(by_columns, alpha=ALPHA).invre, abs=0.02
    )


def test_products_one_by_one_equal_mapped_ones() -> None:
    jacobian = make("mlp", (1, 4, 4))
    directions = torch.randn((3, jacobian.inputs), generator=Seed(4).generator("v"), dtype=torch.float64)
    alone = replace(jacobian, working_bytes=1)
    assert torch.allclose(alone.push(directions), jacobian.push(directions), rtol=1e-12)
    pushed = jacobian.push(directions)
    assert torch.allclose(alone.pull(pushed), jacobian.pull(pushed), rtol=1e-12)


def test_more_leading_values_may_be_wanted_than_one_run_can_give() -> None:
    """The InvL defenses ask for as many as there are inputs; the run then stops before it has looked at what it found."""
    size = lanczos.MOST + 60
    values = torch.arange(1, size + 1, dtype=torch.float64) ** -0.7
    x = torch.ones(size, dtype=torch.float64)
    found = spectrum(jacobian_of(lambda point: values * point, x), mode="leading", leading=size, right=True)
    assert 20 < len(found.values) < size and any("converged" in note for note in found.notes)
    assert float((found.values - values[: len(found.values)]).abs().max()) < 1e-3  # σ_1 is one, and small ones lie close

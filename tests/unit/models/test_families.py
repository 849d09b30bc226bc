from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil.data import load_data
from gradveil.errors import UsageError
from gradveil.models import MODELS, build_model, parameter_count
from gradveil.models.layers import ACTIVATIONS, NORMALISATIONS, Normalize, make_norm
from gradveil.randomness import Seed

SHARED = Path(__file__).parents[4] / "shared" / "data"


def build(spelling: str, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, seed: int = 0) -> nn.Module:
    dense = spelling.partition("(")[0] == "unet"
    return build_model(spelling, input_shape=shape, classes=classes, seed=Seed(seed), dense=dense)


@pytest.mark.parametrize(
    ("spelling", "shape", "count"),
    [
        ("lenet", (3, 32, 32), 15_826),
        ('lenet(activation="relu")', (3, 32, 32), 15_826),
        ("lenet", (1, 28, 28), 13_426),
        ("mlp(hidden=())", (1, 8, 8), 650),
        ("mlp(hidden=100)", (1, 8, 8), 64 * 100 + 100 + 1010),
        ("mlp(hidden=[20, 30])", (6, 128), 768 * 20 + 20 + 20 * 30 + 30 + 310),
        ('convnet(width=64, norm="batch")', (3, 32, 32), 2_904_970),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("resnet20", (3, 32, 32), 269_722),
        ('resnet20(shortcut="projection")', (3, 32, 32), 272_474),
    ],
)
def test_parameter_counts(spelling: str, shape: tuple[int, ...], count: int) -> None:
    assert parameter_count(build(spelling, shape)) == count


@pytest.mark.parametrize(
    ("spelling", "shape"),
    [
        ("lenet", (1, 8, 8)),
        ("lenet", (3, 17, 30)),
        ("convnet", (1, 8, 8)),
        ("convnet", (3, 20, 40)),
        ("convnet(width=4)", (6, 128)),
        ('convnet(width=4, norm="batch", pool="average")', (6, 5)),
        ('convnet(width=4, pool="average", norm="none")', (1, 3, 3)),
        ("resnet20", (1, 28, 28)),
        ('resnet20(norm="group")', (3, 15, 33)),
        ("mlp", (7,)),
        ("mlp", (2, 3, 4, 5)),
    ],
)
def test_any_input_size(spelling: str, shape: tuple[int, ...]) -> None:
    assert build(spelling, shape, 4)(torch.rand(3, *shape)).shape == (3, 4)


def test_lenet_is_the_network_of_the_papers() -> None:
    model = build("lenet")
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear, nn.Sigmoid))]
    assert [type(layer).__name__ for layer in layers] == ["Conv2d", "Sigmoid"] * 3 + ["Linear"]
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    assert [(c.out_channels, c.kernel_size, c.stride, c.padding) for c in convolutions] == [
        (12, (5, 5), (2, 2), (2, 2)),
        (12, (5, 5), (2, 2), (2, 2)),
        (12, (5, 5), (1, 1), (2, 2)),
    ]


def test_uniform_init_covers_the_interval() -> None:
    values = torch.cat([p.detach().flatten() for p in build('lenet(init="uniform")').parameters()])
    assert -0.5 <= float(values.min()) < -0.49
    assert 0.49 < float(values.max()) <= 0.5
    assert abs(float(values.mean())) < 0.01


@pytest.mark.parametrize("name", MODELS.names())
def test_activations_are_modules_of_their_own_and_nothing_is_in_place(name: str) -> None:
    model = build(f'{name}(activation="relu")')
    activations = [layer for layer in model.modules() if isinstance(layer, nn.ReLU)]
    assert activations
    assert len({id(layer) for layer in activations}) == len(activations)
    assert not any(layer.inplace for layer in activations)
    inputs = torch.rand(2, 3, 32, 32)
    before = inputs.clone()
    model(inputs)
    assert torch.equal(inputs, before)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_every_activation_can_be_asked_for(name: str) -> None:
    model = build(f'mlp(hidden=4, activation="{name}")', (1, 4, 4))
    assert any(isinstance(layer, type(ACTIVATIONS[name]())) for layer in model.modules())


@pytest.mark.parametrize("name", MODELS.names())
def test_cards_are_complete(name: str) -> None:
    card = MODELS.card(name)
    assert card.summary.endswith(".")
    assert card.inputs
    assert bool(card.paper) == bool(card.url)


def matching(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The shape of every attack: the gradient of a function of the weights' gradient with respect to the input."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())

    def loss(current: dict[str, Tensor], x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(model, (current, buffers), (x[None],))
        return F.cross_entropy(outputs, torch.zeros(1, dtype=torch.long))

    def objective(x: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in grad(loss)(weights, x).values()]).sum()

    return grad(objective)


@pytest.mark.parametrize(
    "spelling",
    [
        "mlp(hidden=16)",
        'lenet(normalize="half")',
        'lenet(activation="relu")',
        "convnet(width=4)",
        'convnet(width=4, norm="batch", pool="average")',
        "resnet20",
        'resnet20(norm="group", shortcut="projection", normalize="cifar10")',
    ],
)
def test_double_backward_under_vmap_equals_the_loop(spelling: str) -> None:
    model = build(spelling, (3, 8, 8)).double()
    inputs = torch.rand(2, 3, 8, 8, dtype=torch.float64, generator=Seed(1).generator("inputs"))
    one = matching(model)
    batched = vmap(one)(inputs)
    looped = torch.stack([one(x) for x in inputs])
    assert bool((batched != 0).any())
    assert torch.allclose(batched, looped, rtol=1e-9, atol=1e-14)


def test_normalisation_is_inside_and_not_in_the_state_dict() -> None:
    plain, normalised = build("lenet"), build('lenet(normalize="imagenet")')
    assert plain.state_dict().keys() == normalised.state_dict().keys()
    mean, std = (torch.tensor(v)[:, None, None] for v in NORMALISATIONS["imagenet"])
    inputs = torch.rand(2, 3, 32, 32)
    assert torch.allclose(normalised(inputs), plain((inputs - mean) / std), atol=1e-6)
    layer = Normalize((0.5,), (0.25,), 1)
    assert torch.equal(layer(torch.full((1, 6, 9), 0.75)), torch.ones(1, 6, 9))


def test_group_norm_divides_any_number_of_channels() -> None:
    for channels in (1, 3, 7, 12, 20):
        norm = make_norm("group", channels)
        assert isinstance(norm, nn.GroupNorm)
        assert channels % norm.num_groups == 0


@pytest.mark.parametrize(
    ("spelling", "shape", "words"),
    [
        ("lenet", (6, 128), "use convnet or mlp"),
        ("resnet18", (30,), "use convnet or mlp"),
        ("convnet", (30,), "use mlp"),
        ("convnet(width=0)", (3, 8, 8), "at least one channel"),
        ('convnet(pool="avg")', (3, 8, 8), "no pool called 'avg'"),
        ('convnet(norm="grup")', (3, 8, 8), "did you mean 'group'"),
        ('lenet(activation="rleu")', (3, 8, 8), "did you mean 'relu'"),
        ('lenet(init="unifrom")', (3, 8, 8), "did you mean 'uniform'"),
        ('lenet(activaton="relu")', (3, 8, 8), "did you mean 'activation'"),
        ('lenet(normalize="imagnet")', (3, 8, 8), "did you mean 'imagenet'"),
        ('lenet(normalize="imagenet")', (1, 8, 8), "use normalize='half'"),
        ("lenet(activation=3)", (3, 8, 8), "cannot make the model"),
        ('resnet20(shortcut="zeropad")', (3, 8, 8), "did you mean 'zero_pad'"),
        ("mlp(hidden=0)", (3, 8, 8), "at least one unit"),
        ("lenett", (3, 8, 8), "did you mean 'lenet'"),
        ("lenet(classes=3)", (3, 8, 8), "has no setting 'classes'"),
        ("lenet(", (3, 8, 8), "write it as name"),
    ],
)
def test_bad_spellings_are_refused_in_one_sentence(spelling: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(spelling, shape)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")
def test_a_public_resnet20_reaches_its_accuracy() -> None:
    model = build_model(
        'resnet20(normalize="imagenet")',
        input_shape=(3, 32, 32),
        classes=10,
        seed=Seed(0),
        weights=str(SHARED / "cifar10_resnet20.pt"),
    )
    data = load_data(str(SHARED / "cifar10_12k.npz"), split="test", limit=500)
    with torch.no_grad():
        hits = model(data.inputs).argmax(1) == data.targets
    # Published: 91.7 % of 10,000. Of 500, four standard errors are 4.9 points.
    assert float(hits.float().mean()) == pytest.approx(0.917, abs=0.049)

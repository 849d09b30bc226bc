"""Peeling: pools that pass on more than one direction, and a network cut behind its first one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradveil.attacks import launch, line_up, resolve
from gradveil.attacks.engine.smooth_relu import SHARPNESS, with_sharpness
from gradveil.attacks.engine.soft_pool import plain_pool, with_soft_pools
from gradveil.attacks.peeling import Peeling, _peel, _Peeled, _plan
from gradveil.learning.learner import Learner
from gradveil.learning.losses import cross_entropy
from gradveil.records import ORDINARY, Knowledge, ThreatModel
from gradveil.study.local_training import TrainingSettings
from gradveil.testing.attacks_scene import Scene
from tests.unit.attacks.scenes import CLASSES, make_batch, make_context, make_learner, observe

SMALL = 'convnet(width=4, norm="none")'


def pooled(model: nn.Module, z: torch.Tensor, sharpness: float, *, spread: bool) -> torch.Tensor:
    soft = with_soft_pools(nn.Sequential(model), spread=spread)
    soft.get_submodule("0").get_buffer(SHARPNESS).fill_(sharpness)
    found: torch.Tensor = soft(z)
    return found


@pytest.mark.parametrize(("pool", "shape"), [(nn.MaxPool2d((3, 2)), (2, 3, 7, 8)), (nn.MaxPool1d(3), (2, 3, 11))])
def test_a_sharp_pool_is_the_maximum_and_a_dull_one_the_mean(pool: nn.Module, shape: tuple[int, ...]) -> None:
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(pooled(pool, z, 1e6, spread=False), pool(z), atol=1e-4)
    mean = nn.AvgPool2d((3, 2)) if z.ndim == 4 else nn.AvgPool1d(3)
    assert torch.allclose(pooled(pool, z, 0.0, spread=False), mean(z), atol=1e-6)


def test_a_spread_pool_has_the_value_of_the_maximum_and_a_slope_for_every_entry() -> None:
    z = torch.randn((1, 1, 4, 4), generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    found = pooled(nn.MaxPool2d(2), z, 0.5, spread=True)
    assert torch.allclose(found, nn.MaxPool2d(2)(z), atol=1e-6)
    (slope,) = torch.autograd.grad(found.sum(), z)
    (hard,) = torch.autograd.grad(nn.MaxPool2d(2)(z).sum(), z)
    assert bool((slope > 0).all()) and int((hard > 0).sum()) == 4
    assert torch.allclose(nn.AvgPool2d(2)(slope), torch.full((1, 1, 2, 2), 0.25)), "the slopes of a window sum to one"
    assert torch.equal(slope.flatten().argmax(), (slope * hard).flatten().argmax()), "the largest entry has the largest slope"


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(3, stride=2), nn.MaxPool2d(2, padding=1), nn.MaxPool2d(2, ceil_mode=True), nn.AvgPool2d(2)]
)
def test_pools_that_overlap_or_pad_are_left_alone(pool: nn.Module) -> None:
    assert not plain_pool(pool)
    assert type(with_soft_pools(nn.Sequential(pool), spread=True)[0]) is type(pool)  # type: ignore[index]


def test_a_network_that_begins_with_its_pool_is_peeled() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, CLASSES)).double()
    seen = observe(Learner.of(model, cross_entropy), make_batch())
    assert Peeling().applies(seen) is None
    (found,) = launch(Peeling(steps=20), [seen], make_context())
    assert found.status == "finished" and found.best_loss < found.first_loss


def test_the_parts_of_a_network_are_the_network_and_match_at_the_truth() -> None:
    learner = make_learner(SMALL)
    batch = make_batch()
    seen = observe(learner, batch)
    parts = _peel(learner, seen.input_shape)
    assert isinstance(parts, _Peeled) and parts.rectified
    features = parts.bottom.forward(parts.bottom.weights, batch.inputs)
    hard = parts.top.replace(
        model=nn.Sequential(*list(learner.model.children())[20:]),
        weights={f"{int(name.split('.')[0]) - 20}.{name.split('.')[1]}": value for name, value in parts.top.weights.items()},
        buffers={},
    )
    gradient = hard.gradient(hard.weights, features, batch.targets)
    assert list(parts.top.weights) == ["20.weight", "20.bias", "23.weight", "23.bias", "28.weight", "28.bias"]
    for value, name in zip(gradient.values(), parts.top.weights, strict=True):
        assert torch.allclose(value, seen.update.weights[name], rtol=1e-3, atol=1e-6)


class _Halved(nn.Module):
    """Does something besides its row of layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.model(inputs / 2)
        return answer


class _Doubled(_Halved):
    """Gives its layers something of another shape than its input."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.model(torch.cat([inputs, inputs], 1))
        return answer


def layers(activation: nn.Module, pool: nn.Module, channels: int = 2, second: nn.Module | None = None) -> nn.Sequential:
    first, second = nn.Conv2d(channels, 4, 3, padding=1), second or nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(first, activation, pool, second, activation, pool, nn.Flatten(), nn.Linear(16, CLASSES)).double()


def learner_of(model: nn.Module) -> Learner:
    return Learner.of(model, cross_entropy, TrainingSettings())


def test_one_module_may_stand_in_several_places() -> None:
    """Users write one ReLU and one pool and name them again and again; no place may be left out or left hard."""
    torch.manual_seed(0)
    learner, batch = learner_of(layers(nn.ReLU(), nn.MaxPool2d(2))), make_batch()
    seen = observe(learner, batch)
    parts = _peel(learner, seen.input_shape)
    assert isinstance(parts, _Peeled) and parts.rectified
    assert [len(part.model) for part in (parts.bottom, parts.top)] == [3, 5]  # type: ignore[arg-type]
    assert not any(isinstance(module, (nn.ReLU, nn.MaxPool2d)) for module in parts.top.model.modules())
    sharp = with_sharpness(parts.top, torch.tensor(1e6, dtype=torch.float64))
    features = parts.bottom.forward(parts.bottom.weights, batch.inputs)
    gradient = sharp.gradient(sharp.weights, features, batch.targets)
    for name, value in gradient.items():
        assert torch.allclose(value, seen.update.weights[name], rtol=1e-3, atol=1e-6)


def test_labels_that_were_given_are_used_and_told() -> None:
    seen = observe(make_learner(SMALL), make_batch())
    given = (make_batch().targets + 1) % CLASSES
    threat = ThreatModel(knows=ORDINARY | {Knowledge.LABELS})
    (found,) = launch(Peeling(steps=3), [seen.replace(threat=threat, labels=given)], make_context())
    assert torch.equal(found.targets, given) and found.oracle_labels
    (blind,) = launch(Peeling(steps=3), [seen.replace(labels=given)], make_context())
    assert torch.equal(blind.targets, make_batch().targets) and not blind.oracle_labels
    assert "no classes" in str(Peeling().applies(seen.replace(classes=0)))
    assert Peeling().applies(seen.replace(classes=0, threat=threat, labels=given)) is None


def test_it_says_where_it_does_not_apply() -> None:
    reasons = {
        "lenet": "not one row of layers",
        "resnet20": "not one row of layers",
        'convnet(width=4, pool="average")': "no max pooling",
    }
    for model, words in reasons.items():
        assert words in str(Peeling().applies(observe(make_learner(model), make_batch())))
    learner = make_learner(SMALL)
    assert Peeling().applies(observe(learner, make_batch())) is None
    assert "more than one example" in str(Peeling().applies(observe(learner, make_batch(2))))
    other = Learner.of(_Halved(learner.model), cross_entropy, TrainingSettings())
    assert "more than its row" in str(Peeling().applies(observe(other, make_batch())))
    doubled = learner_of(_Doubled(layers(nn.ReLU(), nn.MaxPool2d(2), 4)))
    assert "more than its row" in str(Peeling().applies(observe(doubled, make_batch())))
    shared = nn.Conv2d(2, 2, 3, padding=1)
    tied = learner_of(nn.Sequential(shared, nn.MaxPool2d(2), shared, nn.Flatten(), nn.Linear(32, CLASSES)).double())
    assert "share their weights" in str(Peeling().applies(observe(tied, make_batch())))


def test_steps_are_shared_out_within_the_budget() -> None:
    assert _plan(1) == [(0, 1)] and _plan(200) == [(110, 90)]
    for steps in (1, 2, 7, 299, 600, 1200, 1800, 2401):
        plan = _plan(steps)
        assert sum(map(sum, plan)) <= steps and all(images >= 1 for _, images in plan)


def test_without_max_pooling_the_new_versions_are_the_old_ones() -> None:
    seen = observe(make_learner(), make_batch())
    for name in ("quick", "standard"):
        old, new = (line_up(resolve(f"{name}-{version}"), seen, make_context()) for version in (1, 2))
        assert old == new
    pool = observe(make_learner(SMALL), make_batch())
    more = [
        a for a in line_up(resolve("quick-2"), pool, make_context()) if a not in line_up(resolve("quick-1"), pool, make_context())
    ]
    assert [type(attack) for attack in more] == [Peeling]


def test_a_silent_update_gives_an_answer_all_the_same() -> None:
    scene = Scene.of(Peeling())
    seen = scene.observe(0)
    silent = {name: torch.zeros_like(value) for name, value in seen.update.weights.items()}
    (found,) = launch(Peeling(), [seen.replace(updates=(seen.update.replace(weights=silent),))], scene.context(6))
    assert bool(torch.isfinite(found.inputs).all())

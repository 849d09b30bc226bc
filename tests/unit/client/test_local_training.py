"""Local training in a federation is what plain PyTorch does, running statistics included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradveil.client.local_training import ClientLearner, LocalTraining, RunningStatistics, StepRecorder, tracked_buffers
from gradveil.client.update import run_client
from gradveil.defenses.example_clipping import ExampleClipping
from gradveil.defenses.none import NoDefense
from gradveil.learning import Learner
from gradveil.learning.losses import cross_entropy
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.recording import Recorded
from gradveil.records import Batch, ModelSpec
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from tests.unit.federation.small import CLASSES, shapes

SETTINGS = TrainingSettings(shares="weights", epochs=2, minibatch=4, learning_rate=0.1, momentum=0.5, batch_norm="train")


def batch(count: int = 11) -> Batch:
    data = shapes(count)
    return Batch(data.inputs.double(), data.targets)


def network(momentum: float | None = 0.1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        norms = (nn.BatchNorm2d(3, momentum=momentum), nn.BatchNorm1d(CLASSES, momentum=momentum))
        return nn.Sequential(nn.Conv2d(1, 3, 3), norms[0], nn.ReLU(), nn.Flatten(), nn.Linear(108, CLASSES), norms[1]).double()


def sent(learner: Learner, model: nn.Module) -> tuple[Named, Named]:
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    result = run_client(learner, batch(), NoDefense(), Seed(0), local=LocalTraining(buffers=buffers))
    update = NoDefense().decode(result.payload, ModelSpec.of(model))
    after = {name: buffers[name] - value for name, value in update.buffers.items()}
    return {name: learner.weights[name] - value for name, value in update.weights.items()}, after


@pytest.mark.parametrize("momentum", [0.1, None])
def test_weights_and_running_statistics_are_those_of_torch(momentum: float | None) -> None:
    model, data = network(momentum), batch()
    weights, buffers = sent(Learner.of(model, cross_entropy, SETTINGS), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model.train()
    for start in (0, 4, 8, 0, 4, 8):
        optimizer.zero_grad()
        part = slice(start, start + 4)
        cross_entropy(model(data.inputs[part]), data.targets[part]).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(weights[name], parameter.detach(), atol=1e-12), name
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, value in model.named_buffers():
        assert torch.allclose(buffers[name].double(), value.double(), atol=1e-12), name
        assert buffers[name].dtype == value.dtype
    assert int(buffers["1.num_batches_tracked"]) == 6


def test_a_federation_without_room_for_recordings_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def full(self: Recorded, given: Named) -> Named:
        asked.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Recorded, "__call__", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model = network()
    recorder = StepRecorder(model)
    learner, data = Learner.of(model, cross_entropy, SETTINGS), batch()
    for _ in range(3):
        trainer = ClientLearner.from_learner(learner, RunningStatistics(dict(model.named_buffers())), recorder)
        found = trainer.gradient(learner.weights, data.inputs, data.targets)
        expected = learner.gradient(learner.weights, data.inputs, data.targets)
        assert all(torch.allclose(found[name], expected[name]) for name in expected)
    assert len(asked) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="recordings need a CUDA device")
def test_recorded_steps_train_like_plain_ones() -> None:
    learner = Learner.of(network().cuda(), cross_entropy, SETTINGS)
    data, buffers = Batch(batch().inputs.cuda(), batch().targets.cuda()), {n: v.cuda() for n, v in network().named_buffers()}
    recorder = StepRecorder(learner.model)
    plain, *recorded = (
        run_client(learner, data, NoDefense(), Seed(0), local=LocalTraining(buffers=buffers, recorder=kept))
        for kept in (None, *[recorder] * 4)
    )
    spec = ModelSpec.of(network())
    expected = NoDefense().decode(plain.payload, spec)
    for result in recorded:
        update = NoDefense().decode(result.payload, spec)
        for name, value in {**expected.weights, **expected.buffers}.items():
            assert torch.allclose({**update.weights, **update.buffers}[name].double(), value.double(), atol=1e-9), name
    assert recorder.steps is not None and recorder.steps.recordings == 2  # minibatches of four and of three


def test_statistics_of_the_server_are_not_changed_and_hooks_are_gone() -> None:
    model = network()
    learner, before = Learner.of(model, cross_entropy, SETTINGS), {n: v.clone() for n, v in model.named_buffers()}
    running = RunningStatistics(before)
    with running.watching(learner.model):
        learner.forward(learner.weights, batch().inputs)
    learner.forward(learner.weights, batch().inputs)
    assert int(running.buffers["1.num_batches_tracked"]) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_only_batch_norm_is_tracked() -> None:
    model = network()
    model.register_buffer("constant", torch.ones(2))
    assert tracked_buffers(model) == [name for name, _ in model.named_buffers() if name != "constant"]
    assert tracked_buffers(build_model("convnet", input_shape=(1, 8, 8), classes=3, seed=Seed(0))) == []


@pytest.mark.parametrize("model", ["lenet", "convnet(width=2)", 'convnet(width=2, norm="batch")'])
def test_plain_autograd_gives_the_gradient_an_attacker_replays(model: str) -> None:
    made = build_model(model, input_shape=(1, 8, 8), classes=CLASSES, seed=Seed(0)).double()
    learner = Learner.of(made, cross_entropy, SETTINGS)
    data = batch()
    expected = learner.gradient(learner.weights, data.inputs, data.targets)
    found = ClientLearner.from_learner(learner, None).gradient(learner.weights, data.inputs, data.targets)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-12), name
        assert not found[name].requires_grad


def test_weights_that_play_no_part_have_a_gradient_of_zero() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)).double()
    model.register_parameter("idle", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    learner = ClientLearner.from_learner(Learner.of(model, cross_entropy), None)
    assert learner.gradient(learner.weights, batch().inputs, batch().targets)["idle"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("defense", [NoDefense(), ExampleClipping(bound=0.1)])
def test_the_correction_is_added_to_every_step_after_the_defense(defense: NoDefense | ExampleClipping) -> None:
    model = build_model("mlp(hidden=4)", input_shape=(1, 8, 8), classes=CLASSES, seed=Seed(0)).double()
    settings = TrainingSettings(shares="weights", local_steps=1, learning_rate=0.1)
    learner = Learner.of(model, cross_entropy, settings)
    correction = {name: torch.full_like(value, 7.0) for name, value in learner.weights.items()}
    plain, corrected = (
        run_client(learner, batch(), defense, Seed(0), local=LocalTraining(correction=each)).payload.streams["weights"]
        for each in (None, correction)
    )
    for name, value in plain.items():
        assert torch.allclose(corrected[name] - value, torch.full_like(value, 0.7), atol=1e-12)

"""BatchNorm statistics: what an upload gives away, how an attacker recovers it, and that it helps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from gradveil.adversary import OpenAdversary
from gradveil.attacks import AttackContext, launch, line_up, resolve
from gradveil.attacks.batch_statistics import BatchStatistics
from gradveil.attacks.engine.matching import Recipe
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.client.send import send
from gradveil.data import load_data
from gradveil.defenses import build_defense
from gradveil.errors import MissingKnowledge, UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.learning.statistics import recover_statistics, statistics_distance
from gradveil.metrics import assign, peak_signal_to_noise
from gradveil.randomness import Seed
from gradveil.records import ORDINARY, Batch, Knowledge, Observation, ThreatModel
from gradveil.study.local_training import TrainingSettings

KNOWS = ORDINARY | {Knowledge.BN_STATISTICS, Knowledge.LABELS}
SMOOTH = {"signed": False, "schedule": "cosine", "tv": 1e-3}


def network(momentum: float | None = 0.1) -> nn.Module:
    """Two convolutions with BatchNorm, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=2, padding=1),
            nn.BatchNorm2d(6, momentum=momentum),
            nn.Tanh(),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.BatchNorm2d(6, momentum=momentum),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(96, 10),
        )


def make_learner(momentum: float | None = 0.1, **changes: object) -> Learner:
    settings = TrainingSettings(batch_norm="train", **changes)  # type: ignore[arg-type]
    return Learner.of(network(momentum), loss_by_name("cross_entropy"), settings)


def make_batch(count: int = 2, first: int = 0) -> Batch:
    return load_data("digits").batch(range(first, first + count))


def observe(learner: Learner, batch: Batch, defense: str = "none", **changes: object) -> Observation:
    made = build_defense(defense)
    sent = send(learner, batch, made, Seed(5))
    seen = Observation(
        learners=(learner,),
        updates=(sent.update,),
        payloads=(sent.payload,),
        input_shape=(1, 8, 8),
        classes=10,
        examples=len(batch),
        threat=ThreatModel(knows=KNOWS),
        adversary=OpenAdversary(),
        labels=batch.targets,
    )
    return seen.replace(**changes)


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"shares": "weights", "local_steps": 3, "learning_rate": 0.1},
        {"shares": "weights", "epochs": 2, "minibatch": 2, "optimizer": "adam"},
    ],
)
@pytest.mark.parametrize("momentum", [0.1, 0.4, None])
def test_the_statistics_of_the_batch_are_recovered_exactly(training: dict[str, object], momentum: float | None) -> None:
    """After one step and after several, with torch's moving and its cumulative average: both sides coincide at the truth."""
    learner, batch = make_learner(momentum, **training).to(torch.float64), make_batch(4)
    inputs = batch.inputs.double()
    sent = send(learner, Batch(inputs, batch.targets), build_defense("none"), Seed(0))
    recovered = recover_statistics(learner, sent.update.buffers, 4)
    replayed = learner.statistics(inputs, batch.targets)
    assert set(recovered) == set(replayed) and len(recovered) == 4
    assert all(torch.allclose(recovered[name], value, rtol=1e-9, atol=1e-12) for name, value in replayed.items())
    assert float(statistics_distance(replayed, recovered)) < 1e-18
    other = learner.statistics(inputs.flip(3), batch.targets)
    assert float(statistics_distance(other, recovered)) > 1e-6


def test_one_step_by_hand() -> None:
    """The first layer's statistics are those of its convolution's outputs, whatever else the model does."""
    learner, batch = make_learner(), make_batch(3)
    with torch.no_grad():
        features = network()[0](batch.inputs)  # type: ignore[index]
    found = learner.statistics(batch.inputs, batch.targets)
    assert torch.allclose(found["1.running_mean"], features.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(found["1.running_var"], features.transpose(0, 1).flatten(1).var(1), atol=1e-6)


def test_they_are_functional_under_vmap_and_grad() -> None:
    learner, batch = make_learner(), make_batch(2)
    target = learner.statistics(batch.inputs, batch.targets)

    def distance(x: Tensor) -> Tensor:
        return statistics_distance(learner.statistics(x, batch.targets), target)

    many = torch.stack([batch.inputs, batch.inputs.flip(3), torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))])
    alone = torch.stack([distance(x) for x in many])
    assert torch.allclose(vmap(distance)(many), alone, atol=1e-6)
    slopes = vmap(grad(distance))(many)
    assert slopes[0].abs().max() < 1e-4 < slopes[1].abs().max()
    assert not any(layer._forward_pre_hooks for layer in learner.model.modules()), "no hook is left behind"


def test_an_aggregate_gives_the_mean_over_clients() -> None:
    learner, batch = make_learner(), make_batch(4)
    parts = [learner.statistics(batch.inputs[i : i + 2], batch.targets[i : i + 2]) for i in (0, 2)]
    both = learner.replace(settings=learner.settings.replace(clients=2)).statistics(batch.inputs, batch.targets)
    assert all(torch.allclose(both[name], (parts[0][name] + parts[1][name]) / 2) for name in both)


def psnr(attack: InvertingGradients, observations: list[Observation], batches: list[Batch]) -> float:
    found = launch(attack, observations, AttackContext(seed=Seed(0), execution="batched"))
    values = []
    for candidate in found:
        truth = batches[candidate.target].inputs
        values.append(peak_signal_to_noise(candidate.inputs[assign(candidate.inputs, truth)], truth))
    return float(torch.cat(values).mean())


def test_the_attack_is_better_with_statistics() -> None:
    """Noise that ends plain matching does not touch the statistics beside the update. Measured: 10.5 and 16.0 dB."""
    batches = [make_batch(1, first) for first in range(4)]
    observations = [observe(make_learner(), batch, "gaussian_noise(std=0.5)") for batch in batches]
    plain = psnr(InvertingGradients(steps=80, **SMOOTH), observations, batches)  # type: ignore[arg-type]
    helped = psnr(BatchStatistics(steps=80, **SMOOTH), observations, batches)  # type: ignore[arg-type]
    assert helped > plain + 2, (helped, plain)


def test_without_statistics_nothing_is_used() -> None:
    batch = make_batch(1)
    fixed = Learner.of(network(), loss_by_name("cross_entropy"), TrainingSettings(batch_norm="eval"))
    assert not fixed.running
    withheld = observe(make_learner(), batch, threat=ThreatModel(knows=ORDINARY))
    with pytest.raises(MissingKnowledge, match="BatchNorm statistics"):
        launch(BatchStatistics(steps=1), [withheld], AttackContext(seed=Seed(0)))
    with pytest.raises(UsageError, match="no BatchNorm whose statistics move"):
        launch(BatchStatistics(steps=1), [observe(fixed, batch)], AttackContext(seed=Seed(0)))
    seen = observe(make_learner(), batch)
    bare = seen.replace(updates=(seen.update.replace(buffers={}),))
    with pytest.raises(UsageError, match="carries no BatchNorm statistics"):
        launch(BatchStatistics(steps=1), [bare], AttackContext(seed=Seed(0)))
    with pytest.raises(UsageError, match="above 0"):
        BatchStatistics(statistics=0.0)
    assert Recipe(name="plain").statistics == 0


def test_ensembles_use_statistics_where_they_are_granted() -> None:
    """The frozen members stay; beside each matching recipe stands its twin with statistics, and only where there are any."""
    seen, context = observe(make_learner(), make_batch(1)), AttackContext(seed=Seed(0))
    quick = resolve("quick-1")
    names = [getattr(attack, "title", "") for attack in line_up(quick, seen, context)]
    assert "smooth_to_sharp" in names and "smooth_to_sharp_statistics" in names and "stay_smooth_statistics" in names
    without = line_up(quick, seen.replace(threat=ThreatModel()), context)
    assert not [attack for attack in without if isinstance(attack, BatchStatistics)]
    assert [type(attack) for attack in without] == [
        type(attack) for attack in line_up(quick, seen, context) if not isinstance(attack, BatchStatistics)
    ]

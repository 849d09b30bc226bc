"""The loop: the same bits after a kill, budgets, and checkpoints that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gradveil.errors import Unreliable, UsageError
from gradveil.networks.evaluation import EvaluationNetwork
from gradveil.networks.style import StyleGenerator
from gradveil.randomness import Seed
from scripts.pretraining.adversarial import AdversarialRecipe, AdversarialTrainer
from scripts.pretraining.regression import EvaluationTrainer, PaperTrainer
from scripts.pretraining.training import Progress, Trainer, TrainingSettings, run

KEY = {"what": "a test"}
WIDTHS = {4: 8, 8: 8, 16: 4}


def pictures(count: int = 24, side: int = 8) -> Tensor:
    return torch.randint(256, (count, 1, side, side), generator=Seed(1).generator("pictures"), dtype=torch.uint8)


def evaluation(settings: TrainingSettings) -> Trainer:
    data = pictures(side=16)
    return EvaluationTrainer(EvaluationNetwork(8, 3, (4, 4, 4)), data, torch.ones(len(data)), settings)


def style(settings: TrainingSettings) -> Trainer:
    network = StyleGenerator(8, 1, 8, 2, WIDTHS)
    data = pictures()
    return AdversarialTrainer(network, data, torch.ones(len(data)), settings, AdversarialRecipe(widths=WIDTHS))


def paper(settings: TrainingSettings) -> Trainer:
    data = pictures(side=16)
    return PaperTrainer(EvaluationNetwork(8, 3, (4, 4, 4)), data, torch.ones(len(data)), settings)


MAKERS = (evaluation, paper, style)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.result().state_dict().items()}


class Killed(Exception):
    """Stands in for the end of the process."""


class KilledTrainer:
    """Steps like another trainer and dies at one step."""

    def __init__(self, trainer: Trainer, at: int) -> None:
        self._trainer, self._at = trainer, at
        self.tensors, self.restore, self.result = trainer.tensors, trainer.restore, trainer.result

    def step(self, index: int, done: float) -> dict[str, Tensor]:
        if index == self._at:
            raise Killed
        return self._trainer.step(index, done)


@pytest.mark.parametrize("make", MAKERS)
def test_a_killed_training_ends_with_the_same_bits(
    make: Callable[[TrainingSettings], Trainer], tmp_path: Path, untouched_global_rng: None
) -> None:
    settings = TrainingSettings(steps=20, batch=8, checkpoint_seconds=0.0)
    whole = make(settings)
    run(whole, settings, tmp_path / "whole.safetensors", KEY)
    file = tmp_path / "killed.safetensors"
    with pytest.raises(Killed):
        run(KilledTrainer(make(settings), 18), settings, file, KEY)
    again = make(settings)
    told: list[Progress] = []
    ended = run(again, settings, file, KEY, told.append)
    assert ended.step == 20
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(again)[name]), name


@pytest.mark.parametrize("make", MAKERS)
def test_training_changes_every_weight(make: Callable[[TrainingSettings], Trainer], tmp_path: Path) -> None:
    settings = TrainingSettings(steps=3, batch=8)
    trainer = make(settings)
    before = {name: value.clone() for name, value in trainer.tensors().items() if name.startswith("network.")}
    run(trainer, settings, tmp_path / "c.safetensors", KEY)
    after = trainer.tensors()
    assert [n for n, v in before.items() if v.is_floating_point() and torch.equal(v, after[n].cpu())] == []


def test_the_papers_training_walks_the_grid_with_one_batch_at_a_constant_rate() -> None:
    trainer = paper(TrainingSettings(steps=50, batch=4))
    assert isinstance(trainer, PaperTrainer)
    batches = [trainer._batch(index) for index in range(12)]
    assert [round(float(ratios[0]), 1) for _, ratios in batches] == [*(step / 10 for step in range(11)), 0.0]
    assert torch.equal(batches[0][0], trainer._batch(0)[0])
    assert not torch.equal(batches[0][0], batches[11][0]), "the twelfth step sees the first batch again"
    clean, half, noise = (batches[index][0] for index in (0, 5, 10))
    assert float((half - 0.5 * clean).min()) >= -1e-6, "the sixth step is no mixture of the same batch"
    assert float((half - 0.5 * clean).max()) <= 0.5 + 1e-6
    assert float(noise.mean()) == pytest.approx(0.5, abs=0.05)
    assert {trainer._schedule(index, index / 50) for index in range(50)} == {1.0}


def test_minutes_end_a_training_and_the_schedule_follows_them(tmp_path: Path) -> None:
    clock = iter(range(10_000))  # every look at the clock takes a second
    shares: list[float] = []

    class Counting(KilledTrainer):
        def step(self, index: int, done: float) -> dict[str, Tensor]:
            shares.append(done)
            return super().step(index, done)

    settings = TrainingSettings(steps=10**6, minutes=1.0, batch=4)
    ended = run(Counting(evaluation(settings), -1), settings, tmp_path / "c.safetensors", KEY, now=lambda: float(next(clock)))
    assert 5 < ended.step < 60
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] > 0.8


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    settings = TrainingSettings(steps=2, batch=4)
    file = tmp_path / "c.safetensors"
    run(evaluation(settings), settings, file, KEY)
    with pytest.raises(UsageError, match="other settings or data"):
        run(evaluation(settings), settings, file, {"what": "another"})
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UsageError, match="damaged"):
        run(evaluation(settings), settings, file, KEY)


def test_a_training_that_diverges_says_so(tmp_path: Path) -> None:
    class Diverging:
        def step(self, index: int, done: float) -> dict[str, Tensor]:
            return {"loss": torch.tensor(float("nan"))}

        def tensors(self) -> dict[str, Tensor]:
            return {}

        def restore(self, tensors: object) -> None:
            """Nothing."""

        def result(self) -> nn.Module:
            return nn.Identity()

    with pytest.raises(Unreliable, match="diverged"):
        run(Diverging(), TrainingSettings(steps=2), tmp_path / "c.safetensors", KEY)
    assert list(tmp_path.iterdir()) == [], "a diverged state was kept"


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"steps": 1, "minutes": 0.0}, {"steps": 1, "learning_rate": -1.0}, {"steps": 1, "seed": -1}]
)
def test_budgets_that_train_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        TrainingSettings(**wrong)  # type: ignore[arg-type]


def test_a_generator_learns_the_colour_of_its_data(tmp_path: Path) -> None:
    dark = torch.full((16, 1, 8, 8), 26, dtype=torch.uint8)
    settings = TrainingSettings(steps=80, batch=16, learning_rate=5e-3)
    recipe = AdversarialRecipe(widths=WIDTHS)
    network = StyleGenerator(8, 1, 8, 2, WIDTHS)
    z = torch.randn((64, 8), generator=Seed(0).generator("z"))
    before = float(network(z).detach().mean())
    trainer = AdversarialTrainer(network, dark, torch.ones(16), settings, recipe)
    run(trainer, settings, tmp_path / "c.safetensors", KEY)
    after = float(trainer.result()(z).mean())
    assert abs(before - 0.1) > 0.25
    assert abs(after - 0.1) < 0.15

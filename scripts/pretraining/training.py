"""The loop that trains every network: steps or minutes, progress, checkpoints that survive a kill.

Everything random in step n is drawn from a generator made from the seed and n alone, so a run that was stopped continues as if
nothing had happened: with a budget in steps, on the same machine, to the same bits. With a budget in minutes the number of steps,
and so the result, depends on the machine; the card says how many there were.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from gradveil.errors import Unreliable, UsageError
from gradveil.storage.files import write_whole

__all__ = ["Progress", "Trainer", "TrainingSettings", "adam_tensors", "restore_adam", "run"]

REPORT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How long and how a network is trained.

    Attributes:
        steps: Steps at most.
        minutes: Minutes at most, or None for no limit; the schedule follows whichever budget is used up first.
        batch: Pictures per step.
        learning_rate: Of Adam.
        seed: Root of all randomness.
        device: cpu or cuda.
        checkpoint_seconds: Time between two checkpoints.
    """

    steps: int
    minutes: float | None = None
    batch: int = 64
    learning_rate: float = 1e-3
    seed: int = 0
    device: str = "cpu"
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Refuse budgets that train nothing."""
        if self.steps < 1 or self.batch < 1:
            raise UsageError(f"steps and batch must be at least 1, not {self.steps} and {self.batch}")
        if self.minutes is not None and not (self.minutes > 0 and math.isfinite(self.minutes)):
            raise UsageError(f"minutes is {self.minutes}; give a number above 0")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise UsageError(f"learning_rate is {self.learning_rate}; give a number above 0")
        if self.seed < 0:
            raise UsageError(f"seed is {self.seed}; give a whole number from 0")

    def key(self) -> dict[str, Any]:
        """Return what must be equal for a checkpoint to be continued."""
        return {"batch": self.batch, "learning_rate": self.learning_rate, "seed": self.seed}


@dataclass(frozen=True)
class Progress:
    """How far a training is.

    Attributes:
        step: Steps done.
        done: Share of the budget that is used up, from 0 to 1.
        seconds: Time spent, that of earlier runs included.
        losses: The latest of each.
    """

    step: int
    done: float
    seconds: float
    losses: Mapping[str, float]


class Trainer(Protocol):
    """One way to train a network; `run` decides how often it steps."""

    def step(self, index: int, done: float) -> dict[str, Tensor]:
        """Take step ``index`` at a share of the budget and return losses, still on the device."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a later run needs to continue."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` returned."""
        ...

    def result(self) -> nn.Module:
        """Return the trained network, on the CPU, in eval mode."""
        ...


def run(
    trainer: Trainer,
    settings: TrainingSettings,
    checkpoint: Path,
    key: Mapping[str, Any],
    on_progress: Callable[[Progress], None] = lambda progress: None,
    now: Callable[[], float] = time.monotonic,
) -> Progress:
    """Train until the budget is used up, continuing from ``checkpoint`` where that file is there.

    Args:
        trainer: What takes the steps.
        settings: The budget.
        checkpoint: File to continue from and to write to.
        key: What the run is (network, data, settings); a checkpoint of another run is refused.
        on_progress: Told about once per second and at the end.
        now: The clock.

    Raises:
        Unreliable: The losses are no longer finite.
    """
    step, before = _continue(trainer, checkpoint, key)
    begun = reported = saved = now()
    seconds, losses = before, {}
    with _fast_convolutions(settings.device):
        while (done := _share(step, seconds, settings)) < 1:
            losses = trainer.step(step, done)
            step += 1
            seconds = before + now() - begun
            if now() - saved >= settings.checkpoint_seconds:
                _finite(losses, step)
                _save(trainer, checkpoint, key, step, seconds)
                saved = now()
            if now() - reported >= REPORT_SECONDS:
                on_progress(Progress(step, _share(step, seconds, settings), seconds, _finite(losses, step)))
                reported = now()
        ended = Progress(step, 1.0, before + now() - begun, _finite(losses, step))
    _save(trainer, checkpoint, key, step, ended.seconds)
    on_progress(ended)
    return ended


def _share(step: int, seconds: float, settings: TrainingSettings) -> float:
    by_time = 0.0 if settings.minutes is None else seconds / (60 * settings.minutes)
    return min(1.0, max(step / settings.steps, by_time))


def _finite(losses: Mapping[str, Tensor], step: int) -> dict[str, float]:
    found = {name: float(value.detach()) for name, value in losses.items()}
    if not all(math.isfinite(value) for value in found.values()):
        raise Unreliable(f"the training diverged before step {step}; use a smaller learning rate or another seed")
    return found


def _save(trainer: Trainer, path: Path, key: Mapping[str, Any], step: int, seconds: float) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in trainer.tensors().items()}
    told = {"key": json.dumps(key, sort_keys=True), "step": str(step), "seconds": repr(seconds)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(tensors, metadata=told))


def _continue(trainer: Trainer, path: Path, key: Mapping[str, Any]) -> tuple[int, float]:
    if not path.is_file():
        return 0, 0.0
    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        step, seconds = int(told["step"]), float(told["seconds"])
        if told["key"] != json.dumps(key, sort_keys=True):
            raise UsageError(
                f"{str(path)!r} is a training with other settings or data; remove it, or name another folder with --out"
            )
        trainer.restore(tensors)
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise UsageError(f"the checkpoint {str(path)!r} is damaged ({error}); remove it to start again") from error
    return step, seconds


def adam_tensors(optimiser: torch.optim.Optimizer, prefix: str) -> dict[str, Tensor]:
    """Return Adam's memory of each parameter, by position."""
    parameters = [each for group in optimiser.param_groups for each in group["params"]]
    return {
        f"{prefix}.{index}.{name}": value
        for index, parameter in enumerate(parameters)
        for name, value in optimiser.state.get(parameter, {}).items()
    }


def restore_adam(optimiser: torch.optim.Optimizer, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `adam_tensors` returned."""
    parameters = [each for group in optimiser.param_groups for each in group["params"]]
    for index, parameter in enumerate(parameters):
        # Only the fused form keeps its step counter beside the parameter.
        counts = parameter.device if optimiser.defaults.get("fused") else torch.device("cpu")
        start = f"{prefix}.{index}."
        memory = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        if memory:
            optimiser.state[parameter] = {
                name: value.to(counts, copy=True) if name == "step" else torch.empty_like(parameter).copy_(value)
                for name, value in memory.items()
            }


@contextmanager
def _fast_convolutions(device: str) -> Iterator[None]:
    """Let cuDNN measure its kernels once: every step has the same shapes."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = device == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before

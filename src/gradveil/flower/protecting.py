"""A client mod that protects what an app's own train function made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, Context, Message, MetricRecord
from torch import Tensor, nn

from gradveil.client.finished import check_finished, protect_finished
from gradveil.client.update import ClientResult
from gradveil.defenses.base import Defense, State
from gradveil.defenses.chain import build_defense
from gradveil.errors import BadUpdate, UsageError
from gradveil.flower.layout import Layout
from gradveil.flower.node import Asked, node_of
from gradveil.flower.replies import EXAMPLES
from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.records import Update
from gradveil.study.checks import is_whole
from gradveil.tensors import Named, sub

__all__ = ["CallNext", "Mod", "check_buffers", "protect"]

CallNext = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, CallNext], Message]

INSTEAD = "take `gradveil.flower.train(model, defense, data)` as the app's train function, which carries out every defense"


def protect(
    model: nn.Module,
    defense: str | Defense,
    *,
    folder: Path | str | None = None,
    most: int = 0,
    buffers: bool | None = None,
    seed: int | None = None,
) -> Mod:
    """Return a mod for ``@app.train(mods=[...])``, the first one there: it lets the app train and protects what comes out.

    Args:
        model: The app's model; its weights do not matter.
        defense: What protects the update, as in ``"clipping(norm=1) + gaussian_noise(std=0.01)"``.
        folder: Where this node keeps what it has sent and what its defense remembers, on its own disk. None is
            ``$GRADVEIL_HOME/diaries``, or ``~/.gradveil/diaries``.
        most: Releases after which it answers no new request of this run; 0 is no limit.
        buffers: Whether running statistics of BatchNorm are sent, which no defense protects; to be said for a model that has any.
        seed: For tests: makes noise foreseeable; refused where ``GRADVEIL_UNSAFE_SEEDS=1`` is not set.

    Raises:
        UsageError: The defense needs more than the finished update, or something else cannot be carried out.
    """
    built = build_defense(defense) if isinstance(defense, str) else defense
    check_finished(built, INSTEAD)
    layout = Layout.of(model)
    check_buffers(layout, buffers)
    learner = Learner.of(model, _no_loss)
    node = node_of(layout, folder, most, seed)

    def mod(message: Message, context: Context, call_next: CallNext) -> Message:
        def work(asked: Asked, state: State | None, seed: Seed) -> ClientResult:
            reply = call_next(message, context)
            local, examples = _trained(reply, layout)
            weights, others = layout.split(local)
            moved = sub(asked.buffers, others) if buffers else {}
            update = Update(sub(asked.weights, weights), examples, asked.round_index, moved)
            here = learner.replace(weights=asked.weights, buffers={**learner.buffers, **asked.buffers})
            return protect_finished(update, here, built, seed, state=state)

        return node.answer(message, context, work)

    return mod


def check_buffers(layout: Layout, buffers: bool | None) -> None:
    """Ask for a decision where a model has buffers: sent, they leave unprotected, and kept, the global ones never change."""
    there = [name for name, told in layout.spec.tensors.items() if told.role != "weight"]
    if there and buffers is None:
        raise UsageError(
            f"the model has buffers ({there[0]!r} is the first): with buffers=True they leave unprotected, with buffers=False "
            "they stay on the node and the global ones as they began; say which"
        )


def _trained(reply: Message, layout: Layout) -> tuple[Named, int]:
    """Return what the app trained, and on how many examples."""
    if reply.has_error():
        raise BadUpdate("the app's train function answered with an error")
    arrays: list[ArrayRecord] = list(reply.content.array_records.values())
    metrics: list[MetricRecord] = list(reply.content.metric_records.values())
    told: Any = metrics[0].get(EXAMPLES) if len(metrics) == 1 else None
    if len(arrays) != 1 or not is_whole(told) or told < 1:
        raise BadUpdate(f"the app's train function must answer with one record of arrays and one of metrics with {EXAMPLES!r}")
    return layout.read(arrays[0], "the trained arrays"), told


def _no_loss(outputs: Tensor, targets: Tensor) -> NoReturn:
    raise UsageError("a mod has no loss: the app has trained already")

"""The honest client: data in, payload out, every hook of its defense called at its station."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.client.local_training import ClientLearner, LocalTraining, RunningStatistics
from gradveil.client.needs import unmet_need
from gradveil.defenses.base import NEEDS, ClientView, Defense, State
from gradveil.defenses.chain import Chain, granularity_of, is_adapted, parts_of, spell_defense
from gradveil.errors import ReplaceLayer, UsageError
from gradveil.learning.dropout import draw_masks
from gradveil.learning.learner import Learner
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.randomness import Seed
from gradveil.records import Batch, Payload, Update
from gradveil.registry import spell
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, add, check_finite, sub

__all__ = ["ClientResult", "Defended", "defend", "horizontal_fault", "run_client", "trains_alone"]

AFTER_TRAINING = {"protect_update", "encode", "layer_weights", "correct_aggregate"}


@dataclass(frozen=True)
class ClientResult:
    """What one client did in one round: what it sent, what it trained on, and the state it keeps."""

    payload: Payload
    state: State
    trained_batch: Batch


@dataclass(frozen=True)
class Defended:
    """The same before it is encoded: the defended update, and the view that encoding takes."""

    update: Update
    view: ClientView
    state: State
    trained_batch: Batch


def run_client(
    learner: Learner,
    batch: Batch,
    defense: Defense,
    seed: Seed,
    *,
    state: State | None = None,
    round_index: int = 0,
    public: Tensor | None = None,
    local: LocalTraining | None = None,
) -> ClientResult:
    """Train locally on ``batch`` under ``defense`` and encode the update.

    Args:
        learner: The global model (already adapted by the defense, where it adapts models), loss and settings.
        batch: The client's data of this round.
        defense: What protects it.
        seed: Root of this client's randomness; the same seed gives the same bits.
        state: What the defense kept from the last round; None lets it prepare.
        round_index: Federated round.
        public: Public inputs the defense may use.
        local: What a federation adds: running statistics to keep, a correction of every step. None is a single update, made with
            the very arithmetic an attacker replays.
    """
    made = defend(learner, batch, defense, seed, state=state, round_index=round_index, public=public, local=local)
    return ClientResult(defense.encode(made.update, made.view), made.state, made.trained_batch)


def defend(
    learner: Learner,
    batch: Batch,
    defense: Defense,
    seed: Seed,
    *,
    state: State | None = None,
    round_index: int = 0,
    public: Tensor | None = None,
    local: LocalTraining | None = None,
    raw: Named | None = None,
) -> Defended:
    """Do all that `run_client` does but encode, nor train where ``raw`` says what training gives (see `trains_alone`)."""
    if learner.settings.clients > 1:
        raise UsageError(
            "run_client runs one client; for an aggregate run each with settings.clients = 1 and average what they send"
        )
    given = NEEDS.keys() - ({"public"} if public is None else set()) - ({"records"} if not batch.records else set())
    fault = horizontal_fault(defense) or _not_adapted(defense, learner) or unmet_need(defense, given, "and there are none")
    if fault:
        raise UsageError(fault)
    view = ClientView(
        learner=learner, seed=seed, round=round_index, weights=learner.weights, raw_batch=batch, batch=batch, public=public
    )
    settings = defense.configure_training(learner.settings, view)
    learner = learner.replace(
        settings=settings, noise=_draw_noise(learner, view), orders=_draw_orders(settings, len(batch), view)
    )
    view = view.replace(learner=learner)
    state = defense.prepare(batch, view) if state is None else state
    trained, state = defense.protect_batch(batch, view, state)
    view = view.replace(batch=trained)

    keeper = _GradientKeeper(defense, view, state, local.correction if local else None)
    running = RunningStatistics(local.buffers) if local and local.buffers else None
    example = granularity_of(defense) == "example"
    if example:
        _check_examples_are_separate(learner)
    trainer = learner if local is None else ClientLearner.from_learner(learner, running, local.recorder)
    trainer = trainer.replace(per_example=example)
    weights = trainer.update(trained.inputs, trained.targets, keeper.protect) if raw is None else raw
    check_finite(weights, "the client's update")

    buffers = sub(local.buffers, running.buffers) if local and running else {}
    update = Update(weights=weights, examples=len(batch), round=round_index, buffers=buffers)
    update, state = defense.protect_update(update, view, keeper.state)
    check_finite(update.weights, "the defended update")
    return Defended(update, view, state, trained)


def trains_alone(learner: Learner, defense: Defense) -> bool:
    """Whether a client's training depends on its data alone: neither on what its defense does nor on anything that is drawn."""
    return set(defense.stations()) <= AFTER_TRAINING and not learner.noise and not learner.settings.shuffle


def horizontal_fault(defense: Defense) -> str | None:
    """Return None where every part of a defense has something to do when updates are sent, else one sentence why not."""
    for part in parts_of(defense):
        if set(part.stations()) - {"prepare"} == {"protect_embedding"}:
            return (
                f"{spell(part)} acts on embeddings, which only vertical learning sends, so an update would go out unprotected; "
                "audit a cut model with --cut, or choose a defense of updates"
            )
    return None


def _not_adapted(defense: Defense, learner: Learner) -> str | None:
    """Return None unless the model lacks what its defense puts into it: then the update would go out unprotected."""
    if is_adapted(defense, learner.model):
        return None
    return f"{spell_defense(defense)} protects only models of its own making; train `gradveil.client.adapt(defense, model).model`"


def _check_examples_are_separate(learner: Learner) -> None:
    """Refuse models in which one example's output depends on the others."""
    mixing = [name for name, layer in batch_norm_layers(learner.model).items() if getattr(layer, "running_mean", None) is None]
    if mixing:
        raise ReplaceLayer(
            f"{mixing[0]!r} is BatchNorm on the statistics of the batch, so single examples have no gradient of their own; "
            "set batch_norm = 'eval', or replace it by GroupNorm"
        )


def _draw_noise(learner: Learner, view: ClientView) -> Named:
    """Draw masks of dropout layers and an adapted model's N(0, 1) noise, fresh; the learner as it came has only shapes."""
    masks, generator = draw_masks(learner, view.generator("dropout")), view.generator("model noise")
    return masks | {
        name: torch.randn(value.shape, generator=generator, device=value.device, dtype=value.dtype)
        for name, value in learner.noise.items()
        if name not in masks
    }


def _draw_orders(settings: TrainingSettings, examples: int, view: ClientView) -> tuple[tuple[int, ...], ...]:
    """Draw an order for every epoch but the first, which takes the records as they come."""
    if not settings.shuffle:
        return ()
    generator = view.seed.generator("orders of epochs", round=view.round)
    later = [torch.randperm(examples, generator=generator).tolist() for _ in range(settings.epochs - 1)]
    return (tuple(range(examples)), *map(tuple, later))


class _GradientKeeper:
    """Calls the gradient hook at every step and carries the defense's state from one to the next."""

    def __init__(self, defense: Defense, view: ClientView, state: State, correction: Named | None = None) -> None:
        self.state = state
        self._correction = correction
        self._defense, self._view = defense, view

    def protect(self, step: int, weights: Named, gradient: Named, inputs: Tensor, targets: Tensor) -> Named:
        view = self._view.replace(step=step, weights=weights, batch=Batch(inputs, targets), raw_gradient=gradient)
        gradient, self.state = self._defense.protect_gradient(gradient, view, self.state)
        if not isinstance(self._defense, Chain) and self._defense.granularity == "example":
            gradient = {name: value.mean(0) for name, value in gradient.items()}
        # After the defense: the server knows the correction, so there is nothing in it to protect.
        return gradient if self._correction is None else add(gradient, self._correction)

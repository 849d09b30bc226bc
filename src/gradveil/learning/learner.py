"""The client's local training as one differentiable function, shared with the attacker who replays it.

Everything here is functional: weights go in, an update in gradient sign comes out, the module's own tensors are never used or
changed. So the same code runs for one client, under ``torch.func.vmap`` for hundreds of attacks at once, and can be
differentiated with respect to inputs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradveil import tensors
from gradveil.learning.adam import AdamRule, adam_step
from gradveil.learning.attention import plain_attention
from gradveil.learning.dropout import rewind
from gradveil.learning.losses import Loss
from gradveil.learning.statistics import batch_statistics, blend, running_statistics
from gradveil.models.batch_norm import set_batch_norm_mode
from gradveil.models.shared_layers import separate_layers
from gradveil.models.structure import structure_of
from gradveil.randomness import Seed
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

__all__ = ["GradientHook", "Learner", "optimizer_memory", "optimizer_step"]

GradientHook = Callable[[int, Named, Named, Tensor, Tensor], Named]
"""``(step, weights, gradient, inputs, targets) -> gradient``: what a defense does to each step's gradient."""

GUESSES = 4
"""Orders that are guessed where a client shuffles; each costs a whole replay."""
DIFFERENTIABLE = AdamRule(inside=1e-24)
"""An attacker who replays a client's Adam differentiates through its root."""


@dataclass(frozen=True, eq=False)
class Learner:
    """A model at fixed weights, with the loss and the settings of local training.

    Attributes:
        model: Structure only; calls go through ``functional_call``.
        weights: Trainable tensors, by name.
        buffers: Other tensors of the model.
        loss: ``(outputs, targets) -> scalar``.
        settings: Local training.
        noise: Random tensors the model draws, leading axes step and example: masks of dropout layers, by names of buffers, and
            what an adapted model is handed as keyword arguments.
        per_example: Whether gradient hooks see one gradient per example (leading axis) and return one gradient.
        rate_factor: What the learning rate is multiplied with; a tensor where an attacker fits it.
        running: Running statistics of BatchNorm that training moves but does not use; empty unless it uses the batch's.
        orders: For every epoch the order of the examples, where the client shuffles; empty where nobody but the client knows it.
    """

    model: nn.Module
    weights: Named
    buffers: Named
    loss: Loss
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    noise: Named = field(default_factory=dict)
    per_example: bool = False
    rate_factor: float | Tensor = 1.0
    running: Named = field(default_factory=dict)
    orders: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, settings: TrainingSettings | None = None) -> Learner:
        """Copy a model's tensors and structure into a learner."""
        settings = settings or TrainingSettings()
        structure = set_batch_norm_mode(separate_layers(copy.deepcopy(model)), settings.batch_norm)
        weights = tensors.detach(dict(structure.named_parameters()))
        buffers = {name: value.detach().clone() for name, value in structure.named_buffers()}
        running = running_statistics(model) if settings.batch_norm == "train" else {}
        return cls(structure.requires_grad_(False), weights, buffers, loss, settings, running=running)

    @cached_property
    def content(self) -> tuple[str, Loss]:
        """What decides this learner's gradients, as a key by content: structure, tensors and loss; not the settings."""
        places = sorted({str(value.device) for value in (*self.weights.values(), *self.buffers.values())})
        told = tensors.digest(self.weights, self.buffers, self.noise)
        return f"{structure_of(self.model)}|{places}|{told}", self.loss

    def replace(self, **changes: Any) -> Learner:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to(self, target: torch.device | torch.dtype) -> Learner:
        """Return the learner on a device or in a precision."""
        return self.replace(
            model=copy.deepcopy(self.model).to(target),
            weights=tensors.to(self.weights, target),
            buffers=tensors.to(self.buffers, target),
            noise=tensors.to(self.noise, target),
            running=tensors.to(self.running, target),
        )

    @property
    def parameters(self) -> int:
        """Number of trainable entries."""
        return sum(value.numel() for value in self.weights.values())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.weights.values())).device

    def rows_at(self, step: int, examples: int) -> list[int] | None:
        """Return the examples of one local step, or None for all of them."""
        places = self.settings.minibatch_indices(step, examples)
        if places is None or not self.orders:
            return places
        order = self.orders[step // self.settings.steps_of_an_epoch(examples)]
        return [order[place] for place in places]

    def guesses(self, examples: int) -> tuple[Learner, ...]:
        """Return this learner with each of several guesses at orders that only the client knows; alone where there is no secret.

        The first epoch needs no guess: which dummy stands for which of its records is free. The mean over guessed orders is what
        later epochs do in the mean; in docs/training.md it stands beside other ways to replay them.
        """
        settings = self.settings
        if self.orders or not settings.shuffle or settings.epochs < 2 or settings.steps_of_an_epoch(examples) < 2:
            return (self,)
        random = [Seed(guess).numpy("guessed orders") for guess in range(GUESSES)]
        first = tuple(range(examples))
        return tuple(
            self.replace(orders=(first, *(tuple(each.permutation(examples).tolist()) for _ in range(settings.epochs - 1))))
            for each in random
        )

    def noise_at(self, step: int, rows: list[int] | None = None) -> Named:
        """Return the noise the model gets at one step, for all examples or for some rows of the batch."""
        return {name: value[step] if rows is None else value[step][rows] for name, value in self.noise.items()}

    def zero_noise(self, rows: int) -> Named:
        """Return noise of zero for any number of examples: the model at the mean of what it draws."""
        return {name: value.new_zeros((rows, *value.shape[2:])) for name, value in self.noise.items()}

    def forward(self, weights: Named, inputs: Tensor, noise: Named | None = None) -> Any:
        """Return the model's outputs at ``weights``; without ``noise``, with that of the first step."""
        handed = self.noise_at(0) if noise is None else noise
        masks = {name: value for name, value in handed.items() if name in self.buffers}
        if masks:
            rewind(self.model)
        others = {name: value for name, value in handed.items() if name not in masks}
        with plain_attention():
            return functional_call(self.model, (weights, {**self.buffers, **masks}), (inputs,), others)

    def logits(self, weights: Named, inputs: Tensor, noise: Named | None = None) -> Tensor:
        """Return the model's answers alone: an adapted model may return them first, and behind them what its loss needs."""
        outputs = self.forward(weights, inputs, noise)
        answers: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return answers

    @torch.no_grad()
    def classes(self, inputs: Tensor) -> int:
        """Return how many classes the model tells apart, seen on some inputs; 0 where it answers with something else."""
        reference = next(iter(self.weights.values()))
        logits = self.logits(self.weights, inputs.to(reference), self.zero_noise(len(inputs)))
        return int(logits.shape[1]) if logits.ndim == 2 else 0

    def objective(self, weights: Named, inputs: Tensor, targets: Tensor, noise: Named | None = None) -> Tensor:
        """Return the training loss at ``weights``."""
        return self.loss(self.forward(weights, inputs, noise), targets)

    def gradient(self, weights: Named, inputs: Tensor, targets: Tensor, noise: Named | None = None) -> Named:
        """Return the gradient of the batch loss with respect to the weights."""
        return dict(grad(self.objective)(weights, inputs, targets, noise))

    def per_example_gradients(self, weights: Named, inputs: Tensor, targets: Tensor, noise: Named | None = None) -> Named:
        """Return one gradient per example, along a leading axis; their mean is the batch gradient."""

        def one(x: Tensor, y: Tensor, own: Named) -> Named:
            return self.gradient(weights, x.unsqueeze(0), y.unsqueeze(0), {n: v.unsqueeze(0) for n, v in own.items()})

        handed = self.noise_at(0) if noise is None else noise
        return vmap(one, in_dims=(0, 0, 0 if handed else None))(inputs, targets, handed)

    def update(self, inputs: Tensor, targets: Tensor, hook: GradientHook | None = None) -> Named:
        """Return what the client would send: a gradient, or global minus local weights after its local steps.

        Args:
            inputs: (B, ...) examples; with ``clients`` above one, the batches of all clients in a row.
            targets: (B, ...) targets.
            hook: What a defense does to the gradient of each step; differentiable where an attacker replays it.
        """
        clients = self.settings.clients
        if clients == 1:
            return self._one_update(inputs, targets, hook)
        size = inputs.shape[0] // clients
        parts = [slice(index * size, (index + 1) * size) for index in range(clients)]
        return tensors.mean([self._one_update(inputs[part], targets[part], hook) for part in parts])

    def _one_update(self, inputs: Tensor, targets: Tensor, hook: GradientHook | None) -> Named:
        if self.settings.shares == "gradient":
            return self._hooked_gradient(0, self.weights, inputs, targets, self.noise_at(0), hook)
        guesses = self.guesses(inputs.shape[0])
        if len(guesses) > 1:
            return tensors.mean([each._one_update(inputs, targets, hook) for each in guesses])
        weights, memory = dict(self.weights), optimizer_memory(self.settings, self.weights)
        for step in range(self.settings.steps(inputs.shape[0])):
            chosen = self.rows_at(step, inputs.shape[0])
            x, y = (inputs, targets) if chosen is None else (inputs[chosen], targets[chosen])
            gradient = self._hooked_gradient(step, weights, x, y, self.noise_at(step, chosen), hook)
            weights, memory = optimizer_step(self.settings, step, weights, gradient, memory, self.rate_factor)
        return tensors.sub(self.weights, weights)

    def statistics(self, inputs: Tensor, targets: Tensor) -> Named:
        """Return the BatchNorm statistics that an upload from these examples reveals, as `recover_statistics` recovers them.

        Of several clients their mean; after several local steps the weighted mean over the undefended steps.
        """
        size = inputs.shape[0] // self.settings.clients
        starts = range(0, self.settings.clients * size, size)
        many = [self._one_statistics(inputs[at : at + size], targets[at : at + size]) for at in starts]
        return many[0] if len(many) == 1 else tensors.mean(many)

    def _one_statistics(self, inputs: Tensor, targets: Tensor) -> Named:
        guesses = self.guesses(inputs.shape[0])
        if len(guesses) > 1:
            return tensors.mean([each._one_statistics(inputs, targets) for each in guesses])
        steps = 1 if self.settings.shares == "gradient" else self.settings.steps(inputs.shape[0])
        weights, memory = dict(self.weights), optimizer_memory(self.settings, self.weights)
        found = []
        for step in range(steps):
            chosen = self.rows_at(step, inputs.shape[0])
            x, y = (inputs, targets) if chosen is None else (inputs[chosen], targets[chosen])
            found.append(batch_statistics(self, weights, x, self.noise_at(step, chosen)))
            if step + 1 < steps:
                gradient = self.gradient(weights, x, y, self.noise_at(step, chosen))
                weights, memory = optimizer_step(self.settings, step, weights, gradient, memory, self.rate_factor)
        return blend(self, found)

    def _hooked_gradient(
        self, step: int, weights: Named, inputs: Tensor, targets: Tensor, noise: Named, hook: GradientHook | None
    ) -> Named:
        if hook is None:
            return self.gradient(weights, inputs, targets, noise)
        compute = self.per_example_gradients if self.per_example else self.gradient
        return hook(step, weights, compute(weights, inputs, targets, noise), inputs, targets)


def optimizer_memory(settings: TrainingSettings, weights: Named) -> dict[str, Named]:
    """Return what the optimiser remembers before its first step: zeros, or nothing."""
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    if settings.optimizer == "adam":
        return {"mean": zeros, "square": zeros}
    return {"momentum": zeros} if settings.momentum else {}


def optimizer_step(
    settings: TrainingSettings,
    step: int,
    weights: Named,
    gradient: Named,
    memory: dict[str, Named],
    rate_factor: float | Tensor = 1.0,
) -> tuple[Named, dict[str, Named]]:
    """One step of torch's SGD or Adam with their default settings, without in-place changes."""
    rate = settings.learning_rate * rate_factor
    if settings.optimizer == "sgd":
        if settings.momentum:
            velocity = {n: settings.momentum * memory["momentum"][n] + g for n, g in gradient.items()}
            return {n: w - rate * velocity[n] for n, w in weights.items()}, {"momentum": velocity}
        return {n: w - rate * gradient[n] for n, w in weights.items()}, memory
    mean, square = memory["mean"], memory["square"]
    taken = {n: adam_step(g, mean[n], square[n], step, rate=rate, rule=DIFFERENTIABLE) for n, g in gradient.items()}
    kept = {"mean": {n: each.mean for n, each in taken.items()}, "square": {n: each.square for n, each in taken.items()}}
    return {n: w - taken[n].move for n, w in weights.items()}, kept

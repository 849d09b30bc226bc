"""PRECODE: a variational bottleneck before the classifier."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, AdaptedModel, Defense, DefenseCard
from gradveil.errors import UsageError
from gradveil.learning.learner import Learner
from gradveil.learning.losses import Loss
from gradveil.records import Observation, WhatArrives
from gradveil.study.checks import check_number, check_whole
from gradveil.tensors import Named

__all__ = ["PRECODE", "BottleneckAdversary", "BottleneckModel", "VariationalBottleneck"]

EPSILON = "epsilon"
FITTED, READ, KNOWN = "fitted", "read", "known"
SMALLEST = -15.0
ONE_INPUT = 1e-3
"""Largest relative error of rank one up to which a linear layer's gradient counts as that of a single input."""


class VariationalBottleneck(nn.Module):
    """Stands in for the last linear layer: encode, sample, decode, classify.

    The noise comes from outside, because the layer's caller passes features only: `handed` holds it for one call, and collects
    the divergence that the call leaves. Without noise the mean of the code is used.
    """

    def __init__(self, classifier: nn.Linear, latent: int, generator: torch.Generator) -> None:
        """Put a bottleneck of ``latent`` units before ``classifier``."""
        super().__init__()
        # The classifier is the last to be registered: who looks for the layer with one row per class takes the last.
        self.encoder = _linear(classifier.in_features, 2 * latent, classifier, generator)
        self.decoder = _linear(latent, classifier.in_features, classifier, generator)
        self.classifier = classifier
        self._epsilon: Tensor | None = None
        self._divergence: Tensor | None = None

    @contextmanager
    def handed(self, epsilon: Tensor | None) -> Iterator[list[Tensor]]:
        """Use ``epsilon`` in the next call; the list that is returned holds the divergence once it is over."""
        left: list[Tensor] = []
        self._epsilon, self._divergence = epsilon, None
        try:
            yield left
            if self._divergence is None:
                raise UsageError("precode: the model never calls its last linear layer, so nothing is behind the bottleneck")
            left.append(self._divergence)
        finally:
            # Nothing of a call may outlive it: under vmap its tensors are dead afterwards.
            self._epsilon = self._divergence = None

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B, classes) of features (B, F)."""
        if features.ndim != 2:
            shape = tuple(features.shape)
            raise UsageError(f"precode needs one feature vector per example before the last linear layer, not {shape}")
        mean, raw = self.encoder(features).chunk(2, dim=1)  # (B, K) each
        std, log_std = F.softplus(raw), log_softplus(raw)
        self._divergence = -0.5 * (1 + 2 * log_std - mean.square() - std.square()).sum(1) / math.log(2)
        code = mean if self._epsilon is None else mean + self._epsilon * std
        logits: Tensor = self.classifier(self.decoder(code))
        return logits


def log_softplus(raw: Tensor) -> Tensor:
    """Return log(softplus(raw)), which is raw itself far below zero, where softplus underflows and its logarithm is lost."""
    return torch.where(raw < SMALLEST, raw, F.softplus(raw.clamp_min(SMALLEST)).log())


class BottleneckModel(nn.Module):
    """A model with a `VariationalBottleneck` inside: ``(inputs, epsilon) -> (logits, divergence in bits per example)``."""

    def __init__(self, model: nn.Module, path: str) -> None:
        """Wrap ``model``, whose submodule ``path`` is the bottleneck."""
        super().__init__()
        self.model = model
        self.path = path

    def forward(self, inputs: Tensor, epsilon: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the model with the noise at the bottleneck; in train and in eval mode alike."""
        bottleneck = self.model.get_submodule(self.path)
        assert isinstance(bottleneck, VariationalBottleneck)
        with bottleneck.handed(epsilon) as left:
            logits: Tensor = self.model(inputs)
        return logits, left[0]


def _linear(inputs: int, outputs: int, like: nn.Linear, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with PyTorch's default law of weights, drawn from ``generator`` instead of the global one."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    bound = 1 / math.sqrt(inputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    made: nn.Linear = layer.to(like.weight)
    return made


def _last_linear(model: nn.Module) -> str:
    if any(isinstance(module, VariationalBottleneck) for module in model.modules()):
        raise UsageError("precode: the model has a bottleneck already; use it once in a chain")
    names: list[str] = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise UsageError("precode needs a model whose classifier is an nn.Linear; this one has no linear layer")
    return names[-1]


@dataclass(frozen=True)
class BottleneckAdversary(OpenAdversary):
    """Reads the noise off the update where it can, and fits it together with the inputs where it cannot.

    For one example a linear layer with a bias gives its input away, ``a = dW^T db / |db|^2``. The encoder's are the features f,
    the decoder's is the code m + e s, and m and s follow from f; so ``e = (code - m) / s`` is known exactly, and what is left is
    an undefended model. For several examples, or several steps, e is optimised under its Gaussian prior. The divergence is part
    of the loss that is replayed either way. All tensors arrive exactly: the noise is in the function, not on the update.
    Every round draws its own noise, but one is fitted for all rounds seen; over several the attacker is incomplete.

    Attributes:
        prior: Weight of the prior on fitted noise.
    """

    prior: float = 1e-4

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that it is incomplete over several rounds: what is fitted is shared by them, what the client drew is not."""
        return super().arrives(observation).replace(incomplete=len(observation.updates) > 1)

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        """Return the noise of all clients, (clients, steps, B, K): drawn as they draw it, and as read off the update.

        Targets attacked together need the same names, so both are always there, with a one where what was read is right.
        """
        like, clients = observation.learner.noise[EPSILON], observation.learner.settings.clients
        drawn = torch.randn((clients, *like.shape), generator=generator).to(like)
        read = _read_noise(observation)
        known = torch.full((clients,), float(read is not None), dtype=like.dtype, device=like.device)
        return {FITTED: drawn, READ: torch.zeros_like(drawn) if read is None else read.reshape(drawn.shape), KNOWN: known}

    def of_client(self, variables: Named, client: int) -> Named:
        """Return the noise of one client."""
        return {name: value[client] for name, value in variables.items()}

    def prepare_learner(self, learner: Learner, variables: Named) -> Learner:
        """Hand the noise to the model; what was read off is known and does not move."""
        known = variables[KNOWN].detach()
        epsilon = known * variables[READ].detach() + (1 - known) * variables[FITTED]
        return learner.replace(noise={**learner.noise, EPSILON: epsilon})

    def penalty(self, variables: Named) -> Tensor:
        """Return the Gaussian negative log-prior per number, by its weight."""
        return self.prior * 0.5 * variables[FITTED].square().mean()


def _read_noise(observation: Observation) -> Tensor | None:
    """Return the noise (K,) behind the update of one example after one step, or None where the update does not tell."""
    learner, update = observation.learner, observation.update.weights
    if observation.examples != 1 or len(observation.updates) != 1 or learner.settings.steps(1) != 1:
        return None
    path = next(name for name, module in learner.model.named_modules() if isinstance(module, VariationalBottleneck))
    features, code = (_layer_input(update, f"{path}.{layer}") for layer in ("encoder", "decoder"))
    if features is None or code is None:
        return None
    weight, bias = (learner.weights[f"{path}.encoder.{kind}"].double() for kind in ("weight", "bias"))
    mean, raw = (weight @ features + bias).chunk(2)
    return ((code - mean) / log_softplus(raw).exp()).to(learner.noise[EPSILON])


def _layer_input(update: Named, layer: str) -> Tensor | None:
    """Return the one input behind a linear layer's gradient, or None where the gradient is not that of one input."""
    weight, bias = update[f"{layer}.weight"].double(), update[f"{layer}.bias"].double()
    if not bool(bias.any()):
        return None
    found = weight.T @ bias / bias.square().sum()
    gap = (weight - torch.outer(bias, found)).norm() / weight.norm().clamp_min(1e-300)
    return found if bool(gap < ONE_INPUT) else None


@DEFENSES.register(
    DefenseCard(
        name="precode",
        summary="Puts a variational bottleneck before the classifier, so that the gradients behind it depend on fresh noise.",
        paper="Scheliga, Mäder and Seeland, PRECODE: A Generic Model Extension to Prevent Deep Gradient Leakage, WACV 2022",
        url="https://arxiv.org/abs/2108.04725",
        cost="two more linear layers, 3 F K weights for F features: most of a small model; training on sampled codes is noisier",
        weakness="for one example the bottleneck's own layers give features and noise away exactly; for several the noise can be "
        "fitted with the inputs, and layers before it say most",
        acts_on=("model",),
        ladder=({"latent": 32}, {"latent": 128}, {"latent": 256}, {"latent": 512}),
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class PRECODE(Defense):
    """Variational bottleneck between features f and classifier: ``classify(D(m + e s))``, ``(m, r) = E f``, ``s = softplus(r)``.

    e is N(0, 1), fresh for every example and step; E maps F features to 2 K numbers, D maps K back to F. The loss is that of the
    task plus ``divergence`` times the mean over examples of KL(N(m, s²) ‖ N(0, 1)) in bits. The size K is not a strength of
    noise: more units only give the attacker more to guess.

    Any model whose last ``nn.Linear`` is its classifier can be extended. The adapted model takes the noise as ``epsilon`` and
    returns logits and divergences; without noise it uses the mean code. Noise is used in eval mode too, wherever it is handed in.

    Departs from the paper: none in the mathematics; log(s) is continued where s underflows. Released code samples in evaluation
    too; our trainings are evaluated at the mean code, which has no luck in it. The new layers start from PyTorch's
    default law with a generator of their own, so the global one is not moved and all parties start alike.

    Cost: 3 F K weights, trained and sent. Known weakness: the noise comes after the layers that see most of the input, whose
    gradients stay exact (Scheliga et al. 2022, https://arxiv.org/abs/2208.04767, drop the layers behind it from the match), and
    `BottleneckAdversary` reads it off the update of one example, exactly.

    Attributes:
        latent: K, the units of the bottleneck.
        divergence: Weight of the divergence in the loss.
        seed: Of the new layers' initial weights.
    """

    latent: int = 256
    divergence: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse empty bottlenecks, negative weights and seeds that are no whole numbers."""
        check_whole("precode", "latent", self.latent, 1)
        check_whole("precode", "seed", self.seed, 0)
        check_number("precode", "divergence", self.divergence)

    def adapt_model(self, model: nn.Module) -> AdaptedModel:
        """Replace the last linear layer by the bottleneck and itself."""
        path = _last_linear(model)
        inner = copy.deepcopy(model)
        classifier = inner.get_submodule(path)
        assert isinstance(classifier, nn.Linear)
        bottleneck = VariationalBottleneck(classifier, self.latent, torch.Generator().manual_seed(self.seed))
        if path:
            inner.set_submodule(path, bottleneck)
        else:
            inner = bottleneck
        return AdaptedModel(BottleneckModel(inner, path), self._adapt_loss, {EPSILON: (self.latent,)})

    def _adapt_loss(self, loss: Loss) -> Loss:
        def with_divergence(outputs: Any, targets: Tensor) -> Tensor:
            logits, divergence = outputs
            total: Tensor = loss(logits, targets) + self.divergence * divergence.mean()
            return total

        return with_divergence

    def adversary(self) -> OpenAdversary:
        """Return the attacker who fits the noise."""
        return BottleneckAdversary()

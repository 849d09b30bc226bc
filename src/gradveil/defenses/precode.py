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
from gradveil.defenses.settings import check_number
from gradveil.errors import UsageError
from gradveil.learning.learner import Learner
from gradveil.learning.losses import Loss
from gradveil.records import Observation
from gradveil.tensors import Named

__all__ = ["PRECODE", "BottleneckAdversary", "BottleneckModel", "VariationalBottleneck"]

EPSILON = "epsilon"
SMALLEST = -15.0


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
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise UsageError("precode needs a model whose classifier is an nn.Linear; this one has no linear layer")
    return names[-1]


@dataclass(frozen=True)
class BottleneckAdversary(OpenAdversary):
    """Optimises the noise of every example and step together with the inputs, under its Gaussian prior.

    The divergence is part of the loss that is replayed. For one example the layer before the noise, the encoder, gives its input
    away exactly, whatever was drawn: that is what feature inversion reads, and why all tensors count as exact.
    """

    prior: float = 1e-4

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        """Draw the noise as the clients do: (clients, steps, B, K)."""
        shapes = {name: value for name, value in observation.learner.noise.items() if name == EPSILON}
        clients = observation.learner.settings.clients
        return {name: torch.randn((clients, *value.shape), generator=generator).to(value) for name, value in shapes.items()}

    def of_client(self, variables: Named, client: int) -> Named:
        """Return the noise of one client."""
        return {name: value[client] for name, value in variables.items()}

    def prepare_learner(self, learner: Learner, variables: Named) -> Learner:
        """Hand the noise to the model."""
        return learner.replace(noise={**learner.noise, **variables})

    def penalty(self, variables: Named) -> Tensor:
        """Return the Gaussian negative log-prior per number, by its weight."""
        return self.prior * 0.5 * torch.stack([value.square().mean() for value in variables.values()]).sum()


@DEFENSES.register(
    DefenseCard(
        name="precode",
        summary="Puts a variational bottleneck before the classifier, so that the gradients behind it depend on fresh noise.",
        paper="Scheliga, Mäder and Seeland, PRECODE: A Generic Model Extension to Prevent Deep Gradient Leakage, WACV 2022",
        url="https://arxiv.org/abs/2108.04725",
        cost="two more linear layers, 3 F K weights for F features: most of a small model; training on sampled codes is noisier",
        weakness="layers before the noise keep their exact gradients, and the bottleneck's own first layer gives its input away; "
        "the noise can be fitted with the inputs",
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

    Departs from the paper: none in the mathematics; log(s) is continued where s underflows. The new layers start from PyTorch's
    default law with a generator of their own, so the global one is not moved and all parties start alike.

    Cost: 3 F K weights, trained and sent. Known weakness: the noise comes after the layers that see most of the input, whose
    gradients stay exact (Scheliga et al. 2022, https://arxiv.org/abs/2208.04767, drop the layers behind it from the match), and
    `BottleneckAdversary` fits it.

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
        for name, value, least in (("latent", self.latent, 1), ("seed", self.seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"precode: {name} is {value!r}; it must be a whole number of at least {least}")
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
            return loss(logits, targets) + self.divergence * divergence.mean()

        return with_divergence

    def adversary(self) -> OpenAdversary:
        """Return the attacker who fits the noise."""
        return BottleneckAdversary()

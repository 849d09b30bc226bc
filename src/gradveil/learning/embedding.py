"""What a party of vertical learning sends, as a learner: its "update" is the embedding of its own features.

Everything that works on a `Learner` (matching attacks, the referee, null baselines, trust checks, risk spectra) asks it for one
thing only: what would be sent for these inputs. So a bottom model that answers with an embedding needs no machinery of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad

from gradveil.errors import UsageError
from gradveil.learning.learner import GradientHook, Learner
from gradveil.learning.losses import Loss
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

__all__ = ["EMBEDDING", "EMBEDDING_GRADIENT", "EmbeddingLearner"]

EMBEDDING = "embedding"
"""Name under which the embedding (B, ...) travels: in `EmbeddingLearner.update`, in updates seen, in adversary models."""
EMBEDDING_GRADIENT = "embedding_gradient"
"""Name of the gradient of the training loss with respect to the embedding, where the threat model shows it."""


@dataclass(frozen=True, eq=False)
class EmbeddingLearner(Learner):
    """A bottom model at fixed weights; what it sends about inputs is their embedding.

    * ``model``, ``weights``, ``buffers``: the bottom model, as in `Learner`; ``settings`` and ``noise`` are there for code that
      asks and decide nothing.
    * ``embed(inputs)``: (B, ...) inputs to their (B, ...) embedding; differentiable, safe under vmap.
    * ``update(inputs, targets)``: ``{"embedding": embed(inputs)}``. Where `top` is set, also ``"embedding_gradient"``, the
      gradient of the training loss with respect to the embedding: what goes back to the party in training. No gradient of
      weights leaves the party, so a gradient hook has nothing to act on and is not called.
    * d(embedding)/d(input): `gradveil.spectra.jacobians.gradient_jacobian` takes this learner like any other.

    Attributes:
        top: The label owner's model on the embedding, with its loss; set only where gradients are seen.
    """

    top: Learner | None = None

    @classmethod
    def of_bottom(
        cls, bottom: nn.Module, loss: Loss, settings: TrainingSettings | None = None, *, top: nn.Module | None = None
    ) -> EmbeddingLearner:
        """Copy a bottom model into a learner, and a top model where the gradient of the embedding is seen too."""
        made = cls.of(bottom, loss, settings)
        assert isinstance(made, cls)
        return made if top is None else made.with_top(Learner.of(top, loss, settings))

    def with_top(self, top: Learner | None) -> EmbeddingLearner:
        """Return a copy whose updates carry the gradient of the embedding under ``top``; None shows the embedding alone."""
        changed = self.replace(top=top)
        assert isinstance(changed, EmbeddingLearner)
        return changed

    def to(self, target: torch.device | torch.dtype) -> EmbeddingLearner:
        """Return the learner on a device or in a precision."""
        moved = super().to(target).replace(top=None if self.top is None else self.top.to(target))
        assert isinstance(moved, EmbeddingLearner)
        return moved

    def embed(self, inputs: Tensor, noise: Named | None = None) -> Tensor:
        """Return the embedding (B, ...) of inputs (B, ...)."""
        embedding: Tensor = self.forward(self.weights, inputs, noise)
        return embedding

    def objective(self, weights: Named, inputs: Tensor, targets: Tensor, noise: Named | None = None) -> Tensor:
        """Return the training loss at bottom weights, or raise where no top model is there to compute it."""
        if self.top is None:
            raise UsageError("a bottom model alone has no training loss; give the learner its top model, or train the parties")
        return self.top.objective(self.top.weights, self.forward(weights, inputs, noise), targets)

    def update(self, inputs: Tensor, targets: Tensor, hook: GradientHook | None = None) -> Named:
        """Return what is seen of the party: the embedding, and its gradient where there is a top model.

        Args:
            inputs: (B, ...) the party's own features.
            targets: (B, ...) labels; they matter for the gradient only.
            hook: Not called: no gradient of weights leaves the party.
        """
        embedding = self.embed(inputs)
        if self.top is None:
            return {EMBEDDING: embedding}
        top = self.top

        def loss(value: Tensor) -> Any:
            return top.objective(top.weights, value, targets)

        return {EMBEDDING: embedding, EMBEDDING_GRADIENT: grad(loss)(embedding)}

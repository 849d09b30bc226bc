"""Products with d(shared)/d(input) of one record, without forming it: J v by forward mode, Jᵀ u by reverse mode.

``shared`` is any differentiable function of one input without batch axis: a gradient, what a defense makes of it, an update of
several steps, an embedding. Inputs are raw, in [0, 1]; normalisation is inside the model.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from gradveil import tensors
from gradveil.errors import GradveilError, NeverSupported, ReplaceLayer, UnsupportedModel
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.learning.learner import GradientHook, Learner
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.tensors import Named

__all__ = [
    "Jacobian",
    "Law",
    "Own",
    "Share",
    "as_vector",
    "check_records_are_separate",
    "checked",
    "gradient_jacobian",
    "gradient_jacobians",
    "gradient_law",
    "guarded",
    "jacobian_of",
    "load_forward_mode",
]

T = TypeVar("T")
Share = Callable[[Tensor], "Tensor | Named"]
"""From one input, in its own shape, to what is shared about it."""
Own = tuple[Named, ...]
"""What else of one record goes into what is shared about it: its label, what was observed of it, the defense's unknowns."""

WORKING_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
"""How much a batch of products may take while it runs, by kind of device; a rough bound that decides how many run at once."""


@dataclass(frozen=True, eq=False)
class Jacobian:
    """J = d(shared)/d(input) at one input, as a pair of products.

    Attributes:
        share: The function.
        at: The input, in its own shape and in the precision to compute in.
        learner: Set where what is shared is the plain gradient of this learner: then J has layers (`gradveil.spectra.layered`).
        target: The label behind that gradient, of shape (1, ...).
        working_bytes: Rough bound for a batch of products; 0 takes what suits the device.
        law: Set where other records are shared by the same function: then products of several go together
            (`gradveil.spectra.joint`).
        own: What this record puts into it.
    """

    share: Share
    at: Tensor
    learner: Learner | None = None
    target: Tensor | None = None
    working_bytes: int = 0
    law: Law | None = None
    own: Own = ()

    @property
    def inputs(self) -> int:
        """Number m of input values, the columns of J."""
        return self.at.numel()

    @cached_property
    def outputs(self) -> int:
        """Number p of shared values, the rows of J."""
        return int(self.shared.numel())

    @property
    def shared(self) -> Tensor:
        """What is shared about the record, as one vector."""
        return self._pullback[0]

    def forget(self) -> None:
        """Free what was kept for reverse mode; it is made again when asked for."""
        self.__dict__.pop("_pullback", None)

    @cached_property
    def _pullback(self) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
        made: Any = guarded(lambda: vjp(self._flat, self.at.reshape(-1)))
        value, pull = made
        if not bool(torch.isfinite(value).all()):
            raise NeverSupported(
                "what is shared about a record is not finite, so it has no derivative; look at the model's weights"
            )
        return value.detach(), pull

    def _flat(self, point: Tensor) -> Tensor:
        return as_vector(self.share(point.reshape(self.at.shape)))

    @property
    def room(self) -> int:
        """Bytes a batch of products may take."""
        return self.working_bytes or WORKING_BYTES.get(self.at.device.type, WORKING_BYTES["cpu"])

    @property
    def _at_once(self) -> int:
        # A product keeps several copies of the shared vector and of the input alive; eight of each is a cautious guess.
        each = 8 * (self.outputs + self.inputs) * self.at.element_size()
        return max(1, min(512, self.room // each))

    def _over(self, one: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Apply a product to every row: mapped in chunks, or one by one where only one fits.

        A chunk of one is no loop: under vmap torch turns convolutions into grouped ones, which take half as long again on a CPU.
        """
        at_once = self._at_once
        work = (lambda: torch.stack([one(row) for row in rows])) if at_once == 1 else lambda: vmap(one, chunk_size=at_once)(rows)
        return checked(guarded(work)).detach()

    def push(self, directions: Tensor) -> Tensor:
        """Return J v for every row v of ``directions`` (n, m), as (n, p)."""
        load_forward_mode()
        # A tangent gets the whole storage of its point: of one row of a large batch, that would be the batch, once per product.
        point = self.at.reshape(-1).clone()

        def one(direction: Tensor) -> Tensor:
            pair: Any = jvp(self._flat, (point,), (direction,))
            tangent: Tensor = pair[1]
            return tangent

        return self._over(one, directions)

    def pull(self, weights: Tensor) -> Tensor:
        """Return Jᵀ u for every row u of ``weights`` (n, p), as (n, m)."""
        pull = self._pullback[1]
        return self._over(lambda row: pull(row)[0], weights)

    def rows(self, indices: Tensor) -> Tensor:
        """Return some rows of J."""
        wanted = torch.zeros((len(indices), self.outputs), dtype=self.at.dtype, device=self.at.device)
        wanted[torch.arange(len(indices), device=self.at.device), indices] = 1
        return self.pull(wanted)


@dataclass(frozen=True, eq=False)
class Law:
    """What is shared about any record of one client, as one function.

    Attributes:
        share: From one input, in its own shape, and what else is the record's own.
        learner: As in `Jacobian`.
    """

    share: Callable[[Tensor, Own], Tensor | Named]
    learner: Learner | None = None

    def jacobian(self, point: Tensor, own: Own, target: Tensor | None = None) -> Jacobian:
        """Return the Jacobian at one record."""
        return Jacobian(lambda x: self.share(x, own), point, self.learner, target, law=self, own=own)


def gradient_law(learner: Learner, hook: GradientHook | None = None) -> Law:
    """Return what a client sends about one record, whose label is the record's own; the precision is the learner's.

    Raises:
        ReplaceLayer: BatchNorm on the statistics of the batch couples the record with others.
    """
    check_records_are_separate(learner)
    # Only the gradient of weights has the layers that `gradveil.spectra.layered` sums over; an embedding is taken by rows.
    plain = not isinstance(learner, EmbeddingLearner) and hook is None and learner.settings.shares == "gradient"
    plain = plain and not learner.noise
    return Law(lambda x, own: learner.update(x.unsqueeze(0), own[0]["target"], hook), learner if plain else None)


def gradient_jacobians(
    learner: Learner,
    records: Tensor,
    targets: Tensor,
    *,
    hook: GradientHook | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[Jacobian]:
    """Return the Jacobian of what a client sends about each record: its gradient, the update of its local steps, its embedding.

    Args:
        learner: The client's training; ``learner.settings`` decide whether a gradient or an update is shared. Of an
            `EmbeddingLearner`, the embedding is.
        records: (n, ...) inputs.
        targets: (n, ...) their labels.
        hook: What a defense does to the gradient of each step, where that is differentiable.
        dtype: Precision of all products.

    Raises:
        ReplaceLayer: BatchNorm on the statistics of the batch couples the record with others.
    """
    check_records_are_separate(learner)
    law = gradient_law(learner.to(dtype), hook)
    device = learner.device
    points, labels = records.to(device=device, dtype=dtype), targets.to(device).unsqueeze(1)
    # Copies: a tangent takes the whole storage of its point, which for a view is that of all records.
    return [law.jacobian(point.clone(), ({"target": label},), label) for point, label in zip(points, labels, strict=True)]


def gradient_jacobian(
    learner: Learner,
    record: Tensor,
    target: Tensor,
    *,
    hook: GradientHook | None = None,
    dtype: torch.dtype = torch.float64,
) -> Jacobian:
    """Return the Jacobian of what a client sends about one record, without batch axis; see `gradient_jacobians`."""
    return gradient_jacobians(learner, record.unsqueeze(0), target.unsqueeze(0), hook=hook, dtype=dtype)[0]


def jacobian_of(share: Share, record: Tensor, *, dtype: torch.dtype = torch.float64) -> Jacobian:
    """Return the Jacobian of any function of one record, as of an embedding; its weights must be of precision ``dtype``."""
    return Jacobian(share, record.to(dtype))


def as_vector(shared: Tensor | Named) -> Tensor:
    """Return what is shared as one vector."""
    return shared.reshape(-1) if isinstance(shared, Tensor) else tensors.flatten(shared)


@cache
def load_forward_mode() -> None:
    """Load torch's rules for forward mode now: on their first use they warn about torch's own use of what it has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def check_records_are_separate(learner: Learner) -> None:
    """Refuse models in which what is shared about one record depends on the others of its batch.

    Raises:
        ReplaceLayer: Naming the first such layer.
    """
    mixing = [name for name, layer in batch_norm_layers(learner.model).items() if getattr(layer, "running_mean", None) is None]
    if mixing:
        raise ReplaceLayer(
            f"{mixing[0]!r} is BatchNorm on the statistics of the batch, so a single record has no risk of its own; "
            "set batch_norm = 'eval', or replace it by GroupNorm"
        )


def guarded(work: Callable[[], T]) -> T:
    """Run differentiation of code that is not ours, and turn what goes wrong into one sentence."""
    try:
        return work()
    except (GradveilError, MemoryError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedModel(
            f"the model or defense cannot be differentiated with respect to its input ({first[:160]}); replace the layer that "
            "has no second derivative, changes tensors in place, or branches on values"
        ) from error


def checked(product: Tensor) -> Tensor:
    """Refuse derivatives that are not finite, as of a root at zero."""
    if not bool(torch.isfinite(product).all()):
        raise NeverSupported(
            "the derivative of what is shared with respect to the input is not finite; a layer has no derivative at this record"
        )
    return product

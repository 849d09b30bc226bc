"""Label recovery from the gradient of the last layer: what the update itself says, and what the defense's attacker reads off it.

For cross-entropy averaged over B examples the bias gradient of the classifier is, exactly, db_c = mean_i p_ic - n_c / B, with
n_c the number of examples of class c and p the predicted probabilities. So db_c is negative where a class is present and the
network is not yet sure (iDLG, Zhao et al. 2020, for B = 1), and n_c = B (p_c - db_c) for batches once the mean prediction p_c
is estimated (Geng et al. 2021). The update must have gradient sign.

An embedding of vertical learning tells nothing about labels beside the features; its gradient does. Under the label owner's own
model there is one gradient per class and record, and the right one is equal to what was seen.

Nothing here asks the defense's attacker unless ``informed`` says so. How sure such a reading is, and which other labels are
plausible, is said by `gradveil.attacks.engine.label_belief`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad

from gradveil.errors import MissingKnowledge
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT, EmbeddingLearner
from gradveil.records import Knowledge, Observation
from gradveil.tensors import Named

__all__ = [
    "as_labels",
    "classifier_layer",
    "label_scores",
    "largest_remainders",
    "last_bias",
    "mean_prediction",
    "own_scores",
    "plainest",
    "plainly_certain",
    "recover_labels",
    "wanted_counts",
]

BALANCED = 1e-3
"""Entries of an untouched bias gradient sum to zero, up to this share of their magnitudes."""
CLEAR = 12.0
"""Standard deviations of all other entries between the lowest entry and the next, beyond which no noise explains it."""
FEW = 5
"""Fewer other entries than this have no standard deviation to speak of."""


def classifier_layer(weights: Named, classes: int) -> str | None:
    """Return the name of the last weight matrix with one row per class, else of a last convolution with one filter each, or None.

    Logits that are means over the places of a convolution have the same bias gradient as those of a linear layer.
    """
    names = [name for name, value in weights.items() if value.ndim == 2 and value.shape[0] == classes]
    last = [name for name, value in weights.items() if value.ndim >= 2][-1:]
    filters = [name for name in last if weights[name].ndim > 2 and weights[name].shape[0] == classes]
    found = names or filters
    return found[-1] if found else None


def label_scores(observation: Observation, *, informed: bool = False) -> Tensor | None:
    """Return the (C,) gradient evidence per class, the lower the likelier; None where the model has no classifier layer.

    The bias gradient where there is one with a negative entry; else the row sums of the weight gradient, which need non-negative
    features. Some class is always too improbable, so where nothing is negative the telling entry was withheld by a defense.

    Args:
        observation: What was seen.
        informed: Whether the defense's own attacker is asked first, and which of several rounds to read; else the round is read
            whose bias looks most like an untouched one.
    """
    if isinstance(observation.learner, EmbeddingLearner):
        return None  # an embedding (B, features) is no classifier layer, even where B is the number of classes
    plain = _plain_scores(observation.clearest if informed else plainest(observation))
    own = own_scores(observation) if informed else None
    if own is None or plain is None:
        return plain
    tied = own == own.min()
    # Where its attacker cannot tell several classes apart, the plain reading decides among them.
    return own if int(tied.sum()) == 1 else torch.where(tied, plain - plain.max() - 1, own - own.min())


def own_scores(observation: Observation) -> Tensor | None:
    """Return what the defense's own attacker reads off the last bias, or None where it has nothing to say or is not known."""
    if Knowledge.DEFENSE not in observation.threat.knows or observation.examples != 1:
        return None
    observation = observation.clearest
    bias = last_bias(observation)
    read = None if bias is None else observation.adversary.arrives(observation).label_evidence
    return None if read is None or bias is None else read(bias, lambda: mean_prediction(observation))


def last_bias(observation: Observation) -> Tensor | None:
    """Return the bias of the classifier layer in the first update, or None."""
    update = observation.update.weights
    layer = None if isinstance(observation.learner, EmbeddingLearner) else classifier_layer(update, observation.classes)
    return None if layer is None else update.get(layer.removesuffix("weight") + "bias")


def plainest(observation: Observation) -> Observation:
    """Return one round: the first whose last bias sums to zero, as an untouched one does, else the nearest to it."""
    if len(observation.updates) == 1:
        return observation
    rounds = [
        observation.replace(learners=(learner,), updates=(update,), payloads=observation.payloads[index : index + 1])
        for index, (learner, update) in enumerate(zip(observation.learners, observation.updates, strict=True))
    ]
    apart = [1.0 if (bias := last_bias(alone)) is None else _imbalance(bias) for alone in rounds]
    return rounds[next((index for index, value in enumerate(apart) if value < BALANCED), apart.index(min(apart)))]


def _imbalance(bias: Tensor) -> float:
    size = float(bias.abs().sum())
    return float(bias.sum().abs()) / size if size > 0 else 1.0


def plainly_certain(observation: Observation) -> bool:
    """Whether the last bias alone leaves no doubt about the label of one example, whatever was done to the rest.

    Either it is as an untouched one: one negative entry, and a sum of zero. Or its lowest entry lies so far below the next that
    nothing which touched all entries alike could have put it there.
    """
    bias = last_bias(plainest(observation))
    if bias is None or observation.examples != 1:
        return False
    ordered = bias.double().sort().values
    if int((ordered < 0).sum()) == 1 and _imbalance(ordered) < BALANCED:
        return True
    others = ordered[1:]
    return len(others) >= FEW and float(ordered[0]) < 0 and bool(others[0] - ordered[0] > CLEAR * others.std())


def _plain_scores(observation: Observation) -> Tensor | None:
    update = observation.update.weights
    layer = classifier_layer(update, observation.classes)
    if layer is None:
        return None
    bias = layer.removesuffix("weight") + "bias"
    told = bias in update and bool((update[bias] < 0).any())
    scores = update[bias] if told else update[layer].flatten(1).sum(1)
    settings = observation.learner.settings
    if settings.shares == "weights":
        per_client = observation.examples // settings.clients
        scores = scores / (settings.learning_rate * settings.reach(per_client))
    return scores


def recover_labels(observation: Observation, *, informed: bool = False) -> Tensor:
    """Return the most likely labels of all examples behind the update: sorted, or dealt in turn to a client's minibatches.

    One example: the class with the lowest evidence (iDLG). Several: counts n_c = B (p_c - db_c), with p_c the global model's
    mean prediction on grey noise, rounded by largest remainders so that they sum to B. Without a classifier layer: zeros.
    Of an embedding, record by record from its gradient where that is seen, in the order of the records.

    Args:
        observation: What was seen.
        informed: Whether the defense's own attacker is asked.
    """
    if observation.classes == 0:
        raise MissingKnowledge(f"these targets are no classes and cannot be recovered; grant {Knowledge.LABELS}")
    count = observation.examples
    if isinstance(observation.learner, EmbeddingLearner) and EMBEDDING_GRADIENT in observation.update.weights:
        return _from_embedding_gradient(observation.learner, observation)
    scores = label_scores(observation, informed=informed)
    if scores is None:
        device = next(iter(observation.update.weights.values())).device
        return torch.zeros(count, dtype=torch.int64, device=device)
    if count == 1:
        return scores.argmin().reshape(1)
    counts = largest_remainders(wanted_counts(scores, observation, informed=informed), count)
    return as_labels(counts, observation)


def wanted_counts(scores: Tensor, observation: Observation, *, informed: bool = False) -> Tensor:
    """Return n_c = B (p_c - db_c), not rounded, at least zero."""
    learned = observation.clearest if informed else plainest(observation)
    return (observation.examples * (mean_prediction(learned) - scores)).clamp_min(0)


def largest_remainders(wanted: Tensor, count: int) -> Tensor:
    """Return whole counts that sum to ``count``, in the proportions of ``wanted``."""
    # Noise can hide every class; then all are as likely, and the labels are still as many as the examples.
    wanted = wanted * (count / wanted.sum()) if bool(wanted.sum() > 0) else torch.full_like(wanted, count / len(wanted))
    whole = wanted.floor()
    for index in (wanted - whole).argsort(descending=True)[: int(count - whole.sum())]:
        whole[index] += 1
    excess = whole.cumsum(0) - count  # rounding of the division above could leave one too many
    return (whole - excess.clamp_min(0).clamp_max(whole)).to(torch.int64)


def as_labels(counts: Tensor, observation: Observation) -> Tensor:
    """Return counts per class as labels, in the order of the examples that a search has."""
    labels = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return labels[_dealt(observation)]


def _dealt(observation: Observation) -> list[int]:
    """Return the places of sorted labels, dealt in turn to the minibatches of all clients; as they are where there are none.

    Which label was in which minibatch is not known. Sorted ones would make minibatches of one class each, which train like no
    real ones do.
    """
    settings, count = observation.learner.settings, observation.examples
    sizes = settings.sizes(count // settings.clients)[: settings.steps_of_an_epoch(count // settings.clients)]
    if len(sizes) < 2 or not settings.epochs:
        return list(range(count))
    hands: list[list[int]] = [[] for _ in range(settings.clients * len(sizes))]
    open_hands = [(hand, size) for hand, size in zip(hands, sizes * settings.clients, strict=True)]
    for place in range(count):
        hand, size = open_hands.pop(0)
        hand.append(place)
        if len(hand) < size:
            open_hands.append((hand, size))
    return [place for hand in hands for place in hand]


def _from_embedding_gradient(learner: EmbeddingLearner, observation: Observation) -> Tensor:
    """Return, per record, the class whose gradient at the embedding seen is nearest to the gradient seen."""
    seen, top = observation.update.weights, learner.top
    assert top is not None  # without it no gradient is seen
    embedding = seen[EMBEDDING]
    distances = []
    for label in range(observation.classes):
        targets = torch.full((len(embedding),), label, dtype=torch.int64, device=embedding.device)
        expected = grad(lambda value, own=targets: top.objective(top.weights, value, own))(embedding)
        distances.append((expected - seen[EMBEDDING_GRADIENT]).flatten(1).square().sum(1))
    return torch.stack(distances).argmin(0)


def mean_prediction(observation: Observation) -> Tensor:
    """Return the mean prediction, on grey noise, of the model in the first round seen."""
    learner = observation.learner
    generator = torch.Generator().manual_seed(0)
    noise = 0.5 + 0.2 * torch.randn((16, *observation.input_shape), generator=generator)
    reference = next(iter(learner.weights.values()))
    logits = learner.logits(learner.weights, noise.clamp(0, 1).to(reference), learner.zero_noise(len(noise)))
    return logits.softmax(1).mean(0).detach()

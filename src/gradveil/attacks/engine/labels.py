"""Label recovery from the gradient of the last layer.

For cross-entropy averaged over B examples the bias gradient of the classifier is, exactly, db_c = mean_i p_ic - n_c / B, with
n_c the number of examples of class c and p the predicted probabilities. So db_c is negative where a class is present and the
network is not yet sure (iDLG, Zhao et al. 2020, for B = 1), and n_c = B (p_c - db_c) for batches once the mean prediction p_c
is estimated (Geng et al. 2021). The update must have gradient sign.

An embedding of vertical learning tells nothing about labels beside the features; its gradient does. Under the label owner's own
model there is one gradient per class and record, and the right one is equal to what was seen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad

from gradveil.errors import MissingKnowledge
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT, EmbeddingLearner
from gradveil.records import Knowledge, Observation
from gradveil.tensors import Named

__all__ = ["classifier_layer", "label_scores", "recover_labels"]


def classifier_layer(weights: Named, classes: int) -> str | None:
    """Return the name of the last weight matrix with one row per class, or None."""
    names = [name for name, value in weights.items() if value.ndim == 2 and value.shape[0] == classes]
    return names[-1] if names else None


def label_scores(observation: Observation) -> Tensor | None:
    """Return the (C,) gradient evidence per class, the lower the likelier; None where the model has no classifier layer.

    The bias gradient where there is one with a negative entry; else the row sums of the weight gradient, which need non-negative
    features. Some class is always too improbable, so where nothing is negative the telling entry was withheld by a defense.
    """
    observation = observation.clearest
    update = observation.update.weights
    if isinstance(observation.learner, EmbeddingLearner):
        return None  # an embedding (B, features) is no classifier layer, even where B is the number of classes
    layer = classifier_layer(update, observation.classes)
    if layer is None:
        return None
    bias = layer.removesuffix("weight") + "bias"
    if bias in update and observation.examples == 1 and Knowledge.DEFENSE in observation.threat.knows:
        read = observation.adversary.arrives(observation).label_evidence
        known = None if read is None else read(update[bias], lambda: _mean_prediction(observation))
        if known is not None:
            return known
    told = bias in update and bool((update[bias] < 0).any())
    scores = update[bias] if told else update[layer].sum(1)
    settings = observation.learner.settings
    if settings.shares == "weights":
        per_client = observation.examples // settings.clients
        scores = scores / (settings.learning_rate * settings.reach(per_client))
    return scores


def recover_labels(observation: Observation) -> Tensor:
    """Return the most likely labels of all examples behind the update: sorted, or dealt in turn to a client's minibatches.

    One example: the class with the lowest evidence (iDLG). Several: counts n_c = B (p_c - db_c), with p_c the global model's
    mean prediction on grey noise, rounded by largest remainders so that they sum to B. Without a classifier layer: zeros.
    Of an embedding, record by record from its gradient where that is seen, in the order of the records.
    """
    if observation.classes == 0:
        raise MissingKnowledge(f"these targets are no classes and cannot be recovered; grant {Knowledge.LABELS}")
    count = observation.examples
    if isinstance(observation.learner, EmbeddingLearner) and EMBEDDING_GRADIENT in observation.update.weights:
        return _from_embedding_gradient(observation.learner, observation)
    device = next(iter(observation.update.weights.values())).device
    scores = label_scores(observation)
    if scores is None:
        return torch.zeros(count, dtype=torch.int64, device=device)
    if count == 1:
        return scores.argmin().reshape(1)
    wanted = (count * (_mean_prediction(observation) - scores)).clamp_min(0)
    # Noise can hide every class; then all are as likely, and the labels are still as many as the examples.
    wanted = wanted * (count / wanted.sum()) if bool(wanted.sum() > 0) else torch.full_like(wanted, count / len(wanted))
    whole = wanted.floor()
    for index in (wanted - whole).argsort(descending=True)[: int(count - whole.sum())]:
        whole[index] += 1
    labels = torch.arange(len(scores), device=device).repeat_interleave(whole.to(torch.int64))[:count]
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


def _mean_prediction(observation: Observation) -> Tensor:
    learner = observation.clearest.learner
    generator = torch.Generator().manual_seed(0)
    noise = 0.5 + 0.2 * torch.randn((16, *observation.input_shape), generator=generator)
    reference = next(iter(learner.weights.values()))
    logits = learner.logits(learner.weights, noise.clamp(0, 1).to(reference), learner.zero_noise(len(noise)))
    return logits.softmax(1).mean(0).detach()

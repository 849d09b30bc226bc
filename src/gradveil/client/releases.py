"""How often a run releases one record or one client, and which differential privacy is left after all of it."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence

from gradveil.client.guarantees import privacy_of
from gradveil.defenses.base import Defense
from gradveil.study.local_training import TrainingSettings
from gradveil.study.proved import Guarantee

__all__ = ["RANGE_OF_DATA", "privacy_of_training", "privacy_of_updates", "steps_with_one_record"]

RANGE_OF_DATA = "scale = 'minmax' lets one record change the values of all others; bring values to [0, 1] by fixed numbers"
SECRET_SEED = "the seed stays secret: whoever knows it, and training.json names it, can draw the same noise again"


@functools.cache
def steps_with_one_record(training: TrainingSettings, examples: int) -> int:
    """Return the most local steps of one round that any single record takes part in.

    >>> steps_with_one_record(TrainingSettings(shares="weights", epochs=2, minibatch=8), 20)
    2
    >>> steps_with_one_record(TrainingSettings(shares="weights", local_steps=5, minibatch=8), 20)
    2
    """
    whole, seen = 0, Counter[int]()
    for step in range(training.steps(examples)):
        rows = training.minibatch_indices(step, examples)
        if rows is None:
            whole += 1
        else:
            seen.update(rows)
    return whole + max(seen.values(), default=0)


def privacy_of_updates(
    defense: Defense,
    training: TrainingSettings,
    *,
    examples: int,
    rounds: int,
    weights: Iterable[str],
    fault: str = "",
    summed: int = 1,
) -> Guarantee:
    """Return the guarantee of what an audit attacks: one client's updates on the same records.

    Args:
        defense: What the client runs.
        training: Its local training.
        examples: Records behind one update.
        rounds: Updates seen on the same records.
        weights: Names of the model's trainable tensors; layers are counted from them.
        fault: Why the run broke an assumption; then there is no guarantee, whatever the defense.
        summed: Clients of whom nothing but the sum is seen.
    """
    layers = _layers(weights)
    once = privacy_of(defense, layers=layers, summed=summed)
    if once.epsilon is None or fault:
        return once if once.epsilon is None else Guarantee(reason=fault)
    per_round = steps_with_one_record(training, examples) if once.unit == "record" else 1
    return privacy_of(defense, steps=rounds * per_round, layers=layers, summed=summed)


def privacy_of_training(
    defense: Defense,
    training: TrainingSettings,
    *,
    sizes: Sequence[int],
    rounds: Iterable[Sequence[int]],
    weights: Iterable[str],
    fault: str = "",
    first_weights: bool = False,
    sums_only: bool = False,
) -> Guarantee:
    """Return the guarantee of a federated training as it ran: against a server that sees every payload and who sent it, or sums.

    What counts is the record (or client) that took part most often. No sampling is counted: records are dealt to minibatches in
    turn, not by independent coins, and the server knows whom it asked.

    Args:
        defense: What every client ran.
        training: Their local training.
        sizes: Records per client.
        rounds: Who took part, round by round.
        weights: Names of the model's trainable tensors.
        fault: Why the run broke an assumption; then there is no guarantee, whatever the defense.
        first_weights: Whether training began from weights that were given.
        sums_only: Against who sees nothing but the sum of each round, in which every client has noise of its own.
    """
    layers = _layers(weights)
    # δ is the chance of failure per record: it must stay well below one in all of them.
    delta = min(1e-5, 0.1 / max(1, sum(sizes)))
    rounds = [list(chosen) for chosen in rounds]
    summed = min((_as_many([sizes[client] for client in chosen]) for chosen in rounds), default=1) if sums_only else 1
    once = privacy_of(defense, layers=layers, delta=delta, summed=summed)
    if once.epsilon is None or fault:
        return once if once.epsilon is None else Guarantee(reason=fault)
    took_part = Counter(client for chosen in rounds for client in chosen)
    per_round = {client: steps_with_one_record(training, sizes[client]) for client in took_part} if once.unit == "record" else {}
    steps = max((times * per_round.get(client, 1) for client, times in took_part.items()), default=0)
    found = privacy_of(defense, steps=steps, layers=layers, delta=delta, summed=summed)
    more = [SECRET_SEED] + ["the weights that training began from were not made from these records"] * first_weights
    return dataclasses.replace(found, assumptions=(*found.assumptions, *more)) if found.epsilon is not None else found


def _as_many(sizes: Sequence[int]) -> int:
    """Return how many equal clients share noise as much as these: the largest weighs most, and its noise is all that is sure.

    >>> _as_many([5, 5, 5]), _as_many([10, 1, 1]), _as_many([])
    (3, 1, 1)
    """
    most = max(sizes, default=0)
    return max(1, int(sum(size**2 for size in sizes) / most**2 + 1e-9)) if most else 1


def _layers(weights: Iterable[str]) -> int:
    return len({name.rpartition(".")[0] for name in weights})

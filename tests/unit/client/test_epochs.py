"""What a client does in its epochs, and that an attacker who knows it replays the very same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from gradveil.adversary import OpenAdversary
from gradveil.client.send import send
from gradveil.client.update import ClientResult, run_client
from gradveil.defenses import build_defense
from gradveil.defenses.base import ClientView, State
from gradveil.defenses.none import NoDefense
from gradveil.errors import UsageError
from gradveil.learning import Learner
from gradveil.learning.dropout import dropout_layers, with_dropout
from gradveil.learning.losses import cross_entropy
from gradveil.learning.statistics import check_statistics, recover_statistics
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

EXAMPLES = 11
SHAPE = (1, 6, 6)


def network(*layers: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        norm = nn.BatchNorm2d(3)
        parts = [nn.Conv2d(1, 3, 3), norm, nn.Sigmoid(), *layers, nn.Flatten(), nn.Linear(48, 4)]
        return nn.Sequential(*parts).double()


def batch(examples: int = EXAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.rand((examples, *SHAPE), generator=generator, dtype=torch.float64)
    return Batch(inputs, torch.randint(4, (examples,), generator=generator))


def trainer(model: nn.Module | None = None, /, **settings: Any) -> Learner:
    asked = TrainingSettings(**{"shares": "weights", "learning_rate": 0.1, **settings})
    return Learner.of(model or network(), cross_entropy, asked)


def shaped(learner: Learner, examples: int = EXAMPLES) -> Learner:
    steps = learner.settings.steps(examples)
    noise = {name: value.new_zeros((steps, examples, *value.shape[2:])) for name, value in learner.noise.items()}
    return learner.replace(noise=noise)


def heard(learner: Learner) -> tuple[ClientResult, list[ClientView]]:
    """Let a client train on the batch; return what it sent, and what a defense saw at every step."""
    seen: list[ClientView] = []

    class Listening(NoDefense):
        def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
            seen.append(view)
            return gradient, state

    return run_client(learner, batch(), Listening(), Seed(1)), seen


def distance(left: Named, right: Named) -> float:
    """Return the largest difference, in units of the largest entry."""
    return max(float((value - right[name]).abs().max() / value.abs().max().clamp_min(1e-30)) for name, value in left.items())


COMBINATIONS = list(itertools.product((1, 2, 3), (0, 1, 3, 4, 11), (0.0, 0.9), ("eval", "train")))


@pytest.mark.parametrize(("epochs", "minibatch", "momentum", "batch_norm"), COMBINATIONS)
def test_the_replay_at_the_truth_is_the_update_of_the_client(
    epochs: int, minibatch: int, momentum: float, batch_norm: str
) -> None:
    learner = trainer(epochs=epochs, minibatch=minibatch, momentum=momentum, batch_norm=batch_norm)
    own = batch()
    sent = send(learner, own, NoDefense(), Seed(1)).update
    replayed = OpenAdversary().replay(learner, own.inputs, own.targets, {})
    assert distance(sent.weights, replayed) < 1e-9
    if batch_norm == "train":
        found = recover_statistics(learner, sent.buffers, EXAMPLES)
        assert found and distance(found, learner.statistics(own.inputs, own.targets)) < 1e-9


def test_epochs_and_minibatches_are_those_of_torch() -> None:
    model = network()
    sent = send(trainer(model, epochs=2, minibatch=4, momentum=0.9), batch(), NoDefense(), Seed(1)).update.weights
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.eval().parameters(), lr=0.1, momentum=0.9)
    own = batch()
    for start in (0, 4, 8, 0, 4, 8):
        optimizer.zero_grad()
        cross_entropy(model(own.inputs[start : start + 4]), own.targets[start : start + 4]).backward()
        optimizer.step()
    after = dict(model.named_parameters())
    assert distance(sent, {name: (value - after[name]).detach() for name, value in before.items()}) < 1e-9


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_reach_is_how_far_equal_gradients_carry(momentum: float) -> None:
    settings = TrainingSettings(shares="weights", epochs=2, minibatch=4, momentum=momentum, learning_rate=1e-6)
    sent = trainer(epochs=2, minibatch=4, momentum=momentum, learning_rate=1e-6).update(*_alike())
    once = trainer(shares="gradient").update(*_alike())
    assert distance({name: value * settings.reach(EXAMPLES) * 1e-6 for name, value in once.items()}, sent) < 1e-3
    assert settings.sizes(EXAMPLES) == [4, 4, 3, 4, 4, 3]


def _alike() -> tuple[Tensor, Tensor]:
    own = batch(1)
    return own.inputs.expand(EXAMPLES, *SHAPE), own.targets.expand(EXAMPLES)


SHUFFLED: dict[str, Any] = {"epochs": 3, "minibatch": 4, "shuffle": True, "learning_rate": 0.02}


def test_a_client_that_shuffles_has_an_order_of_its_own_for_every_later_epoch() -> None:
    own, (_, views) = batch(), heard(trainer(**SHUFFLED))
    seen = [view.batch.inputs[:, 0, 0, 0] for view in views if view.batch is not None]
    first, second, third = (torch.cat(seen[at : at + 3]) for at in (0, 3, 6))
    told = own.inputs[:, 0, 0, 0]
    assert torch.equal(first, told), "the first epoch takes records as they come"
    for later in (second, third):
        assert not torch.equal(later, told) and torch.equal(later.sort().values, told.sort().values), "each record once an epoch"
    assert not torch.equal(second, third)


def test_orders_are_the_clients_secret_and_follow_from_its_seed() -> None:
    learner, own = trainer(**SHUFFLED), batch()
    one, again, other = (send(learner, own, NoDefense(), Seed(seed)).update.weights for seed in (1, 1, 2))
    assert distance(one, again) == 0 < distance(one, other)
    assert learner.orders == (), "what the attacker holds does not know them"


def test_the_mean_over_guessed_orders_is_nearer_than_the_given_order() -> None:
    """At a learning rate at which order matters; for other ways to replay see docs/training.md."""
    learner, own = trainer(**{**SHUFFLED, "learning_rate": 0.3}), batch()
    fixed = learner.replace(settings=learner.settings.replace(shuffle=False))
    plain, guessed = OpenAdversary().replay(fixed, own.inputs, own.targets, {}), learner.update(own.inputs, own.targets)
    assert distance(OpenAdversary().replay(learner, own.inputs, own.targets, {}), guessed) < 1e-12

    def error(named: Named) -> float:
        sent = [send(learner, own, NoDefense(), Seed(seed)).update.weights for seed in range(12)]
        return sum(float((each[name] - named[name]).square().sum()) for each in sent for name in named)

    assert error(guessed) < error(plain)


def test_with_one_order_for_all_nothing_is_guessed() -> None:
    for settings in ({"epochs": 1, "minibatch": 4}, {"epochs": 3, "minibatch": 0}, {"epochs": 3, "minibatch": EXAMPLES}):
        learner = trainer(shuffle=True, **settings)
        assert learner.guesses(EXAMPLES) == (learner,)
    assert len({each.orders for each in trainer(**SHUFFLED).guesses(EXAMPLES)}) > 1


@pytest.mark.parametrize("spelling", ["refiner(epsilon=0.5, balance=0.0, steps=2)", "soteria(rate=0.5)", "dp_sgd"])
def test_defenses_of_single_steps_follow_a_shuffled_client(spelling: str) -> None:
    defense, learner, own = build_defense(spelling), trainer(**SHUFFLED), batch()
    sent = send(learner, own, defense, Seed(1))
    assert all(bool(torch.isfinite(value).all()) for value in sent.update.weights.values())


DROPPING = (nn.Dropout(0.4), nn.Dropout2d(0.5))


def dropping(model: nn.Module | None = None, /, examples: int = EXAMPLES, **settings: Any) -> Learner:
    learner = trainer(model or network(*DROPPING), dropout=True, **{"epochs": 2, "minibatch": 4, **settings})
    return shaped(with_dropout(learner, SHAPE), examples)


def handed(learner: Learner) -> Named:
    """Return some noise for one step."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(value.shape[1:], generator=generator).double() for name, value in learner.noise.items()}


def test_masks_scale_what_they_keep_and_are_drawn_for_every_step_and_record() -> None:
    entries, channels = heard(dropping())[1][0].learner.noise.values()
    assert entries.shape == (6, EXAMPLES, 3, 4, 4) and channels.shape == (6, EXAMPLES, 3, 1, 1)
    assert sorted({round(float(value), 9) for value in (1 + entries).unique()}) == [0.0, round(1 / 0.6, 9)]
    assert float((entries == -1).double().mean()) == pytest.approx(0.4, abs=0.03)
    assert not torch.equal(entries[0], entries[1]) and not torch.equal(entries[0, 0], entries[0, 1])


def test_one_step_with_masks_is_a_step_of_torch_with_the_same_masks() -> None:
    learner, own = dropping(shares="gradient", epochs=0, minibatch=0), batch()
    noise = handed(learner)
    entries, channels = noise.values()
    found = learner.gradient(learner.weights, own.inputs, own.targets, noise)
    model = network(*DROPPING).eval()
    hidden = model[2](model[1](model[0](own.inputs))) * (1 + entries) * (1 + channels)
    loss = cross_entropy(model[6](hidden.flatten(1)), own.targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    assert distance(dict(zip(found, expected, strict=True)), found) < 1e-9


def test_who_knows_no_masks_replays_the_network_with_dropout_off() -> None:
    learner, own = dropping(), batch()
    off = trainer(network(*DROPPING), epochs=2, minibatch=4)
    assert distance(learner.update(own.inputs, own.targets), off.update(own.inputs, own.targets)) < 1e-12
    assert distance(send(learner, own, NoDefense(), Seed(1)).update.weights, off.update(own.inputs, own.targets)) > 0.01
    assert learner.weights.keys() == off.weights.keys()


def test_a_client_with_known_masks_is_replayed_exactly_and_under_vmap() -> None:
    learner, own = dropping(), batch()
    result, views = heard(learner)
    known = learner.replace(noise=views[0].learner.noise)
    sent = NoDefense().decode(result.payload, ModelSpec.of(learner.model)).weights
    assert distance(sent, known.update(own.inputs, own.targets)) < 1e-9

    def energy(inputs: Tensor) -> Tensor:
        return torch.stack([value.square().sum() for value in known.update(inputs, own.targets).values()]).sum()

    many = torch.stack([own.inputs, own.inputs * 0.5])
    slopes = vmap(grad(energy))(many)
    assert torch.allclose(slopes[1], grad(energy)(many[1]))


def test_per_example_gradients_see_each_record_under_its_own_mask() -> None:
    learner, own = dropping(shares="gradient", epochs=0, minibatch=0), batch()
    noise = handed(learner)
    each = learner.per_example_gradients(learner.weights, own.inputs, own.targets, noise)
    whole = learner.gradient(learner.weights, own.inputs, own.targets, noise)
    assert distance(whole, {name: value.mean(0) for name, value in each.items()}) < 1e-9


class Twice(nn.Module):
    """One dropout layer at two places, and one where records are the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(36, 8), nn.Linear(8, 4)
        self.drop, self.turned = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(self.first(self.drop(inputs.flatten(1))))
        tokens: Tensor = self.turned(hidden.unflatten(1, (2, 4)).transpose(0, 1)).transpose(0, 1)
        logits: Tensor = self.last(tokens.flatten(1))
        return logits


def test_a_layer_that_is_called_twice_and_one_with_records_elsewhere_get_masks_of_their_own() -> None:
    learner = dropping(Twice().double())
    shapes = sorted(tuple(value.shape[2:]) for value in learner.noise.values())
    assert shapes == [(2, 4), (8,), (36,)]
    own = batch()
    noise = handed(learner)
    whole = learner.forward(learner.weights, own.inputs, noise)
    for row in (0, 7):
        alone = learner.forward(learner.weights, own.inputs[row : row + 1], {n: v[row : row + 1] for n, v in noise.items()})
        assert torch.allclose(whole[row], alone[0])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (network(), "the model has no dropout layer"),
        (network(nn.Dropout(0.0)), "the model has no dropout layer"),
        (network(nn.AlphaDropout(0.5)), "is AlphaDropout"),
    ],
)
def test_dropout_that_cannot_be_is_refused_in_one_sentence(model: nn.Module, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        with_dropout(trainer(model, dropout=True), SHAPE)
    assert not dropout_layers(network(nn.Dropout(0.0)))


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()


def test_one_value_per_channel_is_refused_and_nothing_else() -> None:
    for model, minibatch, mode, fine in (
        (flat(), 5, "train", False),
        (flat(), 4, "train", True),
        (flat(), 5, "eval", True),
        (network(), 5, "train", True),
    ):
        learner = trainer(model, epochs=1, minibatch=minibatch, batch_norm=mode)
        if fine:
            check_statistics(learner, SHAPE, learner.settings.sizes(EXAMPLES))
            learner.update(*_pair())
            continue
        with pytest.raises(UsageError, match="the last minibatch holds one record, and BatchNorm layer '2'"):
            check_statistics(learner, SHAPE, learner.settings.sizes(EXAMPLES))


def _pair() -> tuple[Tensor, Tensor]:
    own = batch()
    return own.inputs, own.targets


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="momentum is for optimizer = 'sgd'"):
        TrainingSettings(optimizer="adam", momentum=0.5)
    with pytest.raises(UsageError, match="shuffle draws an order for every epoch"):
        TrainingSettings(shares="weights", local_steps=4, minibatch=2, shuffle=True)

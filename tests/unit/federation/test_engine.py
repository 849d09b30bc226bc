"""Training as a whole: it is centralised SGD for one client, pairs by seed, survives bad clients, and learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gradveil.client.update import ClientResult, horizontal_fault, run_client
from gradveil.defenses import DEFENSES
from gradveil.errors import ReplaceLayer, UsageError
from gradveil.federation import engine
from gradveil.federation.engine import run_training
from gradveil.federation.scaffold import Scaffold
from gradveil.federation.setup import build_federation
from gradveil.learning.losses import cross_entropy
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.study.federation import FederationSettings
from gradveil.study.proved import Guarantee
from gradveil.study.training_result import RoundRecord, TrainingResult
from gradveil.tensors import Named
from tests.unit.federation.small import CLASSES, settings, shapes

TRAIN, TEST = shapes(46), shapes(30, seed=1)
FIRST = "2.weight"


def proved(result: TrainingResult) -> Guarantee:
    assert result.guarantee is not None
    return result.guarantee


def run(asked: FederationSettings, **more: Any) -> TrainingResult:
    return run_training(asked, dataset=TRAIN, test=TEST, **more)


def test_one_client_is_centralised_sgd() -> None:
    asked = settings(clients=1, clients_per_round=1, rounds=3, local_epochs=2, minibatch=8)
    federation = build_federation(asked, TRAIN, TEST)
    model = build_model(asked.model, input_shape=(1, 8, 8), classes=CLASSES, seed=Seed(0).child("model"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for index in range(3):
        order = federation.batch(0, index)
        assert sorted(order.records) == sorted(TRAIN.records)
        for start in (*range(0, 46, 8), *range(0, 46, 8)):
            optimizer.zero_grad()
            part = slice(start, start + 8)
            cross_entropy(model(order.inputs[part]), order.targets[part]).backward()
            optimizer.step()
    result = run(asked)
    for name, value in model.named_parameters():
        assert torch.allclose(result.weights[name], value.detach(), atol=1e-5), name
        assert not torch.allclose(result.weights[name], federation.learner.weights[name], atol=1e-3)


def test_fedavg_is_the_mean_by_examples() -> None:
    asked = settings(clients=3, clients_per_round=3, rounds=1, partition="dirichlet(alpha=0.5, min_size=2)")
    federation = build_federation(asked, TRAIN, TEST)
    sizes = [len(part) for part in federation.parts]
    assert len(set(sizes)) > 1
    start, expected = federation.learner.weights, {n: torch.zeros_like(v) for n, v in federation.learner.weights.items()}
    for client, size in enumerate(sizes):
        learner = federation.learner.replace(weights=start)
        order = federation.batch(client, 0)
        update = learner.update(order.inputs, order.targets)
        expected = {n: v + size / sum(sizes) * (start[n] - update[n]) for n, v in expected.items()}
    result = run(asked)
    assert all(torch.allclose(result.weights[name], value, atol=1e-6) for name, value in expected.items())


def test_runs_that_differ_in_the_defense_share_everything_else(untouched_global_rng: None) -> None:
    plain, noisy = (build_federation(settings(defense=name), TRAIN, TEST) for name in ("none", "gaussian_noise(std=0.1)"))
    other = build_federation(settings(seed=1), TRAIN, TEST)
    assert plain.parts == noisy.parts != other.parts
    assert [plain.sample(r) for r in range(9)] == [noisy.sample(r) for r in range(9)] != [other.sample(r) for r in range(9)]
    assert plain.batch(1, 2).records == noisy.batch(1, 2).records
    assert plain.batch(1, 2).records != plain.batch(1, 3).records
    assert all(torch.equal(value, noisy.learner.weights[name]) for name, value in plain.learner.weights.items())
    results = [run(settings(defense=name)) for name in ("none", "gaussian_noise(std=0.1)", "gaussian_noise(std=0.1)")]
    assert [r.clients for r in results[0].rounds] == [r.clients for r in results[1].rounds]
    assert not torch.equal(results[0].weights[FIRST], results[1].weights[FIRST])
    assert all(torch.equal(value, results[2].weights[name]) for name, value in results[1].weights.items())


def test_the_held_out_share_is_the_same_for_every_defense_and_never_trained_on() -> None:
    one, two = (train_records(settings(defense=name)) for name in ("none", "pruning"))
    assert one == two
    trained, tested = one
    assert not trained & tested
    assert len(tested) == 9 and len(trained) == 37


def train_records(asked: FederationSettings) -> tuple[set[str], set[str]]:
    federation = build_federation(asked, TRAIN)
    assert federation.test_from == "held out"
    return set(federation.train.records), set(federation.test.records)


class Sabotage:
    """Runs the real client, but for some of them changes what is sent."""

    def __init__(self, bad: set[int], *, weights: float = float("nan")) -> None:
        self.bad, self.value = bad, weights

    def __call__(self, learner: Any, batch: Any, defense: Any, seed: Seed, **more: Any) -> ClientResult:
        result = run_client(learner, batch, defense, seed, **more)
        if int(seed.path[1]) not in self.bad:
            return result
        weights: Named = {n: torch.full_like(v, self.value) for n, v in result.payload.streams["weights"].items()}
        return dataclasses.replace(result, payload=dataclasses.replace(result.payload, streams={"weights": weights}))


def test_a_malformed_client_is_refused_counted_and_the_round_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(clients=3, clients_per_round=3)
    honest = run(asked)
    monkeypatch.setattr(engine, "run_client", Sabotage({1}))
    result = run(asked)
    assert [(r.refused, list(r.reasons), r.note) for r in result.rounds] == [(1, ["1"], "")] * 3
    assert "not finite" in result.rounds[0].reasons["1"]
    assert result.refused == 3
    assert all(torch.isfinite(value).all() for value in result.weights.values())
    assert not torch.equal(result.weights[FIRST], honest.weights[FIRST])
    assert [r.bytes_up for r in result.rounds] == [r.bytes_up for r in honest.rounds]  # it did send


def test_when_all_are_refused_the_weights_stay_and_the_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(clients=2, clients_per_round=2, aggregation="scaffold", server_momentum=0.9)
    monkeypatch.setattr(engine, "run_client", Sabotage({0, 1}))
    result = run(asked)
    start = build_federation(asked, TRAIN, TEST).learner.weights
    assert all(torch.equal(value, start[name]) for name, value in result.weights.items())
    assert [r.refused for r in result.rounds] == [2, 2, 2]
    assert all(r.note.startswith("the weights stay as they were: there are no updates to aggregate") for r in result.rounds)


def test_a_client_that_diverges_sends_nothing() -> None:
    result = run(settings(learning_rate=1e30, rounds=1, minibatch=1))
    record = result.rounds[0]
    assert record.refused == 2
    assert all(reason.startswith("sent nothing: the client's update has ") for reason in record.reasons.values())
    assert record.bytes_up == 0
    assert record.accuracy is not None


def test_bytes_and_evaluations_are_counted() -> None:
    seen: list[RoundRecord] = []
    result = run(settings(rounds=5, evaluate_every=2, defense="pruning(rate=0.9)"), on_round=seen.append)
    assert tuple(seen) == result.rounds
    assert [r.accuracy is not None for r in result.rounds] == [False, True, False, True, True]
    size = sum(value.numel() for value in result.weights.values()) * 4
    assert [r.bytes_down for r in result.rounds] == [2 * size] * 5
    assert all(0 < r.bytes_up < 0.5 * 2 * size for r in result.rounds)
    assert result.bytes.up == sum(r.bytes_up for r in result.rounds)
    assert result.final_accuracy == result.rounds[-1].accuracy
    assert result.best_accuracy == max(r.accuracy for r in result.rounds if r.accuracy is not None)
    assert result.finished
    scaffold = run(settings(rounds=1, aggregation="scaffold"))
    assert scaffold.rounds[0].bytes_down == 2 * 2 * size  # the control variate goes down too
    assert scaffold.rounds[0].bytes_up == 2 * size  # and nothing more comes up


def test_scaffold_is_fedavg_in_its_first_round_and_another_after() -> None:
    first, plain = (run(settings(rounds=1, clients_per_round=4, aggregation=name)) for name in ("scaffold", "fedavg"))
    assert all(torch.equal(value, plain.weights[name]) for name, value in first.weights.items())
    later, other = (run(settings(rounds=2, clients_per_round=4, aggregation=name)) for name in ("scaffold", "fedavg"))
    assert not torch.allclose(later.weights[FIRST], other.weights[FIRST], atol=1e-6)


def test_scaffold_begins_with_zeros_and_counts_every_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's control variate is the mean over all four clients, of whom a round sees two."""
    seen: list[tuple[Scaffold, Scaffold]] = []
    step = Scaffold.after

    def after(self: Scaffold, *more: Any) -> Scaffold:
        seen.append((self, step(self, *more)))
        return seen[-1][1]

    monkeypatch.setattr(Scaffold, "after", after)
    run(settings(rounds=3, aggregation="scaffold"))
    assert all(float(value.abs().max()) == 0.0 for value in seen[0][0].server.values()) and seen[0][0].own == {}
    last = seen[-1][1]
    for name, value in last.server.items():
        mean = torch.stack([last.control(client)[name] for client in range(4)]).mean(0)
        assert torch.allclose(value, mean, atol=1e-6), name
    assert float(last.server[FIRST].abs().max()) > 1e-3


def test_local_steps_and_server_optimisers_are_used() -> None:
    plain = run(settings())
    for changes in (
        {"local_steps": 1},
        {"server_momentum": 0.5},
        {"server_learning_rate": 0.5},
        {"server_optimizer": "adam", "server_learning_rate": 0.01},
        {"optimizer": "adam", "learning_rate": 0.01},
        {"momentum": 0.5},
    ):
        result = run(settings(**changes))
        assert not torch.equal(result.weights[FIRST], plain.weights[FIRST]), changes
        assert result.refused == 0


LEARNERS = [("mlp(hidden=16)", 6, 0.9), ("convnet(width=4)", 5, 0.6), ('convnet(width=4, norm="batch")', 6, 0.9)]


@pytest.mark.parametrize(("model", "rounds", "reaches"), LEARNERS)
def test_it_learns(model: str, rounds: int, reaches: float) -> None:
    asked = settings(model=model, rounds=rounds, local_epochs=3, clients_per_round=4, learning_rate=0.1, minibatch=6)
    result = run(asked)
    assert result.best_accuracy is not None and result.best_accuracy >= reaches
    assert result.refused == 0


def test_running_statistics_are_learned_and_make_the_difference() -> None:
    asked = settings(model='convnet(width=4, norm="batch")', rounds=6, local_epochs=3, clients_per_round=4, learning_rate=0.1)
    tracked = run(asked)
    frozen = build_federation(asked, TRAIN, TEST)
    moved = {name for name, value in tracked.buffers.items() if not torch.equal(value, frozen.evaluator.buffers[name])}
    assert moved == set(frozen.tracked)
    with_first_statistics, _ = frozen.evaluate(tracked.weights, frozen.evaluator.buffers)
    assert tracked.final_accuracy is not None
    assert tracked.final_accuracy > with_first_statistics + 0.2
    steps = max(-(-len(part) // 4) for part in frozen.parts) * 3 * 6
    assert {int(v) for n, v in tracked.buffers.items() if n.endswith("num_batches_tracked")} == {steps}


def test_eval_mode_leaves_the_running_statistics() -> None:
    asked = settings(model='convnet(width=2, norm="batch")', rounds=1, batch_norm="eval")
    result = run(asked)
    start = build_federation(asked, TRAIN, TEST).evaluator.buffers
    assert start and all(torch.equal(value, start[name]) for name, value in result.buffers.items())


@pytest.mark.slow
def test_resnet18_learns_with_batch_norm() -> None:
    asked = settings(model="resnet18", clients=2, clients_per_round=2, rounds=8, local_steps=8, minibatch=8, learning_rate=0.02)
    result = run(asked)
    assert result.best_accuracy is not None and result.best_accuracy >= 0.9


def test_the_last_record_alone_is_left_out_for_batch_norm() -> None:
    asked = settings(model='convnet(width=2, norm="batch")', clients=1, clients_per_round=1, minibatch=9)
    federation = build_federation(asked, TRAIN, TEST)
    assert [len(federation.batch(0, index)) for index in range(3)] == [45, 45, 45]  # 46 = 5 · 9 + 1
    left = {next(iter(set(TRAIN.records) - set(federation.batch(0, index).records))) for index in range(8)}
    assert len(left) > 1
    assert len(build_federation(settings(clients=1, clients_per_round=1, minibatch=9), TRAIN, TEST).batch(0, 0)) == 46
    assert len(build_federation(asked.replace(batch_norm="eval"), TRAIN, TEST).batch(0, 0)) == 46


HORIZONTAL = [name for name in DEFENSES.names() if not horizontal_fault(DEFENSES.build(name))]
SPARED = {"shadow": "shadow(latent_steps=5, fit_steps=1)"}
"""Defenses that take half a minute with all the steps of their defaults, with fewer."""


# Every registered defense, at its defaults: two rounds with a sampled client more, so that states come back.
@pytest.mark.parametrize(
    "name", [SPARED.get(name, name) for name in HORIZONTAL] + [pytest.param(name, marks=pytest.mark.slow) for name in SPARED]
)
def test_every_defense_trains(name: str, untouched_global_rng: None) -> None:
    data, test = shapes(18, size=12), shapes(12, seed=1, size=12)
    asked = settings(model="lenet", defense=name, clients=2, clients_per_round=2, rounds=2, minibatch=3, learning_rate=0.05)
    result = run_training(asked, dataset=data, test=test)
    assert [r.refused for r in result.rounds] == [0, 0], result.rounds[0].reasons
    assert all(r.accuracy is not None and r.bytes_up > 0 and not r.note for r in result.rounds)
    start = build_federation(asked, data, test).learner.weights
    assert result.weights.keys() == start.keys()
    assert any(not torch.equal(value, start[key]) for key, value in result.weights.items())
    assert all(bool(torch.isfinite(value).all()) for value in result.weights.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clients_per_round": 5}, "clients_per_round is 5, but there are 4 clients"),
        ({"rounds": 0}, "rounds is 0"),
        ({"rounds": True}, "rounds is True"),
        ({"local_epochs": 0}, "local_epochs and local_steps are both 0"),
        ({"aggregation": "fedavgg"}, "did you mean 'fedavg'"),
        ({"server_optimizer": "adm"}, "did you mean 'adam'"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"test_share": 1.0}, "test_share is 1.0"),
        ({"aggregation": "scaffold", "momentum": 0.5}, "scaffold's control variates"),
        ({"optimizer": "adam", "momentum": 0.5}, "momentum is for optimizer = 'sgd'"),
        ({"server_optimizer": "adam", "server_momentum": 0.5}, "server_momentum is for"),
        ({"defense": "prunning"}, "did you mean 'pruning'"),
        ({"partition": "dirichle"}, "did you mean 'dirichlet'"),
        ({"partition": "by_owner"}, "does not say who owns which record"),
        ({"clients": 99, "clients_per_round": 2}, "99 clients cannot share 46 records"),
        ({"model": "mlpp"}, "did you mean 'mlp'"),
        ({"device": "gpu"}, "device is 'gpu'; did you mean 'cpu'"),
        ({"loss": "cross_entrop"}, "did you mean 'cross_entropy'"),
        ({"model": 'convnet(norm="batch")', "minibatch": 1}, "minibatch is 1, and BatchNorm"),
        ({"model": 'convnet(norm="batch")', "clients": 46}, "has one record, and BatchNorm"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run(settings(**changes))


def test_per_example_defenses_refuse_batch_norm_by_name() -> None:
    with pytest.raises(ReplaceLayer, match="replace it by GroupNorm"):
        run(settings(model='convnet(width=2, norm="batch")', defense="example_clipping"))


def test_latency_is_measured_beside_the_undefended_client() -> None:
    plain = run(settings(rounds=1), latency=True).latency
    clipped = run(settings(rounds=1, model="lenet", defense="example_clipping"), latency=True).latency
    assert plain is not None and plain.ratio == 1.0
    assert clipped is not None and clipped.ratio > 1.0
    assert run(settings(rounds=1)).latency is None


def test_a_guarantee_counts_who_really_took_part() -> None:
    result = run(settings(defense="dp_sgd(noise_multiplier=2.0)", rounds=4, local_epochs=2))
    often = max(sum(client in record.clients for record in result.rounds) for client in range(4))
    assert often < 4  # two of four clients a round
    assert proved(result).unit == "record" and proved(result).steps == 2 * often


def test_running_statistics_take_the_guarantee_away() -> None:
    asked = settings(model="resnet20", defense="clipping + gaussian_noise(std=1.0)", rounds=1, clients_per_round=1)
    assert "BatchNorm" in proved(run(asked)).reason
    assert proved(run(asked.replace(batch_norm="eval"))).unit == "client"


def test_a_client_that_diverges_takes_the_guarantee_away() -> None:
    silent = run(settings(defense="clipping + gaussian_noise(std=1.0)", rounds=1, learning_rate=1e30, local_epochs=3))
    assert silent.refused and "diverged" in proved(silent).reason

"""What an audit attacks: real clients running real defenses on chosen records, and what crosses the wire from them.

This is the only place where truth and observation meet; attacks receive the observations alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.attacks.base import AttackContext, PublicRecords, SimulateMany
from gradveil.audit.many_clients import together
from gradveil.audit.materials import Materials
from gradveil.audit.party import build_party, own_data, own_part
from gradveil.audit.prior import prior_sentence, public_records
from gradveil.audit.state import CANDIDATES, Seen, bring_to_state, order_of_records, seen_by_model
from gradveil.audit.threat import threat_of, training_sentences
from gradveil.client.send import send
from gradveil.data import Dataset, foreground, load_source, public_images
from gradveil.defenses import Defense, adapt, parts_of
from gradveil.defenses.base import MEASURED
from gradveil.errors import UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.learning.dropout import with_dropout
from gradveil.learning.statistics import check_statistics
from gradveil.metrics import duplicate_groups
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.randomness import Seed
from gradveil.records import Batch, Knowledge, Observation, Payload, ThreatModel, Update
from gradveil.study.cell import Cell
from gradveil.study.training import Training
from gradveil.tensors import Named

__all__ = ["Subject", "Target", "build_learner", "build_subject", "check_masks", "load_cell_data"]

PUBLIC = 32
"""Public inputs that the clients of an audit may use, as many as those of a training have."""

PROBED = 8
"""Updates of its own that an attacker sends through the defended client before it attacks."""


@dataclass(frozen=True)
class Target:
    """One update under attack, with the truth behind it, what really crossed the wire, and what the defense told its client."""

    observation: Observation
    batch: Batch
    trained_inputs: Tensor
    sent: tuple[Payload, ...]
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def replayed_inputs(self) -> Tensor:
        """The inputs that an attacker who knows the defense replays: those trained on, or the raw ones, on the same device."""
        raw = self.observation.adversary.arrives(self.observation).raw_inputs
        return self.batch.inputs.to(self.trained_inputs) if raw else self.trained_inputs


@dataclass(frozen=True)
class Subject:
    """Everything a cell needs: targets, the attacker's own rehearsals, and the candidates for identification.

    Attributes:
        cell: The settings.
        dataset: The audited data.
        own: What the sender has of it: all, or the features of the attacked party of vertical learning.
        defense: The defense under test.
        learner: The client's local training at the global weights of the first round.
        targets: Updates of audited records.
        rehearsals: Updates of public inputs, made by the attacker with the same client code.
        candidates: (M, ...) inputs among which an original must be the nearest to count as identified.
        candidate_labels: (M,) their labels.
        positions: For every attacked record, its row in ``candidates``.
        indices: For every attacked record, its row in the dataset.
        public: (P, ...) public inputs every client has, and the attacker too; others than those it rehearses on.
        materials: What the run has read and built so far.
        pool: For every candidate, its row in the dataset.
        seen: What the model was trained on before.
    """

    cell: Cell
    dataset: Dataset
    own: Dataset
    defense: Defense
    learner: Learner
    targets: tuple[Target, ...]
    rehearsals: tuple[Target, ...]
    candidates: Tensor
    candidate_labels: Tensor
    positions: tuple[int, ...]
    indices: tuple[int, ...]
    public: Tensor
    materials: Materials = field(default_factory=Materials)
    pool: tuple[int, ...] = ()
    seen: Seen = field(default_factory=Seen)

    @functools.cached_property
    def copies(self) -> Tensor:
        """For every candidate the row of the first one it is a copy of."""
        return duplicate_groups(self.candidates)

    @property
    def distinct(self) -> int:
        """How many candidates there are, copies counted as one."""
        return len(self.copies.unique())

    def context(self, budget: int, progress: Callable[[int], None] | None = None) -> AttackContext:
        """Return the attacker's context, with the defended client's code on the attacker's own data."""
        parts = parts_of(self.defense)
        idle = all(not part.stations() for part in parts)
        return AttackContext(
            seed=Seed(self.cell.seed).child("attacker"),
            budget=self.cell.steps or budget,
            execution=self.cell.execution,
            simulate=None if idle else self._simulate,
            simulate_many=None if idle else self._simulate_many,
            progress=progress,
            random_defense=any(part.random for part in parts),
            own=None if idle else self._own(),
            observe=self.observe,
            public=self.prior if Knowledge.PUBLIC_DATA in self.targets[0].observation.threat.knows else None,
        )

    @functools.cached_property
    def prior(self) -> PublicRecords:
        """What the attacker learns from: none of it under attack, see `gradveil.audit.prior`."""
        return public_records(self.cell, self.dataset, self.own, self.pool or self.indices)

    def _own(self) -> tuple[Tensor, Tensor]:
        """Return public inputs and labels as the attacker's own clients would have them, others than those it rehearses on."""
        cell, size = self.cell, self.cell.batch_size * self.cell.clients
        images = public_images(self.dataset.input_shape, PROBED * size, Seed(cell.seed).child("probe"))
        labels = foreground(images) if self.dataset.dense else torch.arange(len(images)) % max(1, self.dataset.classes)
        parts = (own_part(cell, images), labels)
        inputs, targets = (part.to(cell.device).reshape(PROBED, size, *part.shape[1:]) for part in parts)
        return inputs, targets

    def observe(self, inputs: Tensor, targets: Tensor, draw: int) -> Observation:
        """Return what the attacker would have seen had the clients held its own data: no short cut, unlike ``simulate``."""
        seed = Seed(self.cell.seed).child("observed", draw)
        seen = self.targets[0].observation
        updates, payloads, *_ = _send(seen.learners, Batch(inputs, targets), self.defense, seed, self.public)
        labels = targets if self.cell.known_labels else None
        return seen.replace(updates=updates, payloads=payloads if self.cell.clients == 1 else (), labels=labels)

    def _simulate(self, inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        return self.replay(Batch(inputs, targets), self.defense.quick(), Seed(self.cell.seed).child("simulated", draw))

    @functools.cached_property
    def _simulate_many(self) -> SimulateMany:
        learners = self.targets[0].observation.learners
        return together(learners, self.defense.quick(), Seed(self.cell.seed).child("simulated"), self.public)

    def replay(self, batch: Batch, defense: Defense, seed: Seed) -> tuple[Named, ...]:
        """Return what the server would read, round by round, if the clients had these records and this defense."""
        learners = self.targets[0].observation.learners
        updates, *_ = _send(learners, batch, defense, seed, self.public)
        return tuple(update.weights for update in updates)


def load_cell_data(cell: Cell | Training) -> Dataset:
    """Load the audited data."""
    return load_source(cell)


def check_masks(dataset: Dataset, known: bool) -> None:
    """Refuse to attack updates from masks that the attacker is not given: nothing here recovers them."""
    if dataset.dense and not known:
        raise UsageError(
            f"{dataset.name!r} has masks, and no attack here recovers masks from an update; let the attacker know them with "
            "--known-labels, or known_labels = true in [training]"
        )


def build_learner(cell: Cell, dataset: Dataset, defense: Defense, materials: Materials | None = None) -> Learner:
    """Build the global model in its training state, as the defense adapts it, with the cell's local training.

    Of a model that is cut, the bottom model of the attacked party.
    """
    if cell.cut:
        return build_party(cell, dataset, defense, lambda joined: bring_to_state(joined, dataset, cell))
    seed = Seed(cell.seed).child("model")
    model = (materials or Materials()).model(
        cell.model,
        input_shape=dataset.input_shape,
        classes=dataset.classes,
        seed=seed,
        weights=cell.weights or None,
        dense=dataset.dense,
    )
    adapted = adapt(defense, model)
    loss = loss_by_name(cell.loss)
    loss = adapted.adapt_loss(loss) if adapted.adapt_loss else loss
    learner = Learner.of(adapted.model, loss, cell.training().replace(clients=1)).to(torch.device(cell.device))
    if not cell.bn_statistics:
        learner = learner.replace(running={})
    training, per_client = cell.training(), cell.batch_size
    check_statistics(learner, dataset.input_shape, training.sizes(per_client))
    shapes = {name: torch.zeros((1, 1, *shape), device=cell.device) for name, shape in adapted.noise_shapes.items()}
    learner = learner.replace(noise=shapes)
    learner = with_dropout(learner, dataset.input_shape) if training.dropout else learner
    size = (training.steps(per_client), per_client)
    # Only the shape is read, so nothing of that size is kept.
    noise = {name: value.new_zeros(()).expand(*size, *value.shape[2:]) for name, value in learner.noise.items()}
    return bring_to_state(learner.replace(noise=noise), dataset, cell)


def build_subject(cell: Cell, dataset: Dataset, rehearsals: int, materials: Materials | None = None) -> Subject:
    """Let the clients of a cell send their updates, and the attacker rehearse on public inputs."""
    check_masks(dataset, cell.known_labels)
    materials = materials or Materials()
    defense = materials.defense(cell.defense)
    learner, own = build_learner(cell, dataset, defense, materials), own_data(cell, dataset)
    size = cell.batch_size * cell.clients
    wanted = cell.targets * size
    if wanted > len(dataset):
        raise UsageError(
            f"the audit needs {wanted} records and {dataset.name!r} has {len(dataset)}; lower records, batch_size or clients"
        )
    order = order_of_records(cell, dataset)
    chosen, others = order[:wanted], order[wanted:]
    batches = [own.batch(chosen[i : i + size]) for i in range(0, wanted, size)]
    public = own_part(cell, public_images(dataset.input_shape, PUBLIC, Seed(cell.seed).child("public"))).to(cell.device)
    seen = seen_by_model(cell, dataset)
    stage = _Stage(cell, dataset, _rounds(cell, learner, defense, batches, public), defense, public, seen)
    targets = tuple(stage.target(batch, "client", i) for i, batch in enumerate(batches))
    pool = chosen + others[: max(0, CANDIDATES - wanted)]
    return Subject(
        cell=cell,
        dataset=dataset,
        own=own,
        defense=defense,
        learner=learner,
        targets=targets,
        rehearsals=stage.rehearse(rehearsals),
        candidates=own.inputs[pool],
        candidate_labels=dataset.targets[pool],
        positions=tuple(range(wanted)),
        indices=tuple(chosen),
        public=public,
        materials=materials,
        pool=tuple(pool),
        seen=seen,
    )


@dataclass(frozen=True)
class _Stage:
    """On which all clients of a cell send their updates, those under attack and those that the attacker makes up."""

    cell: Cell
    dataset: Dataset
    learners: tuple[Learner, ...]
    defense: Defense
    public: Tensor
    seen: Seen

    def rehearse(self, count: int) -> tuple[Target, ...]:
        """Let the attacker send updates of public inputs."""
        if count == 0:
            return ()
        cell, dataset = self.cell, self.dataset
        size = cell.batch_size * cell.clients
        seed = Seed(cell.seed).child("rehearsal")
        images = own_part(cell, public_images(dataset.input_shape, count * size, seed))
        labels = torch.randint(max(dataset.classes, 2), (count * size,), generator=seed.generator("labels"))
        if dataset.dense:
            labels = foreground(images)
        batches = [Batch(images[i : i + size], labels[i : i + size]) for i in range(0, count * size, size)]
        return tuple(self.target(batch, "rehearsal", i) for i, batch in enumerate(batches))

    def _told(self) -> tuple[str, ...]:
        prior = prior_sentence(self.cell, self.dataset, self.seen)
        return self.seen.sentence, *training_sentences(self.cell), prior

    def target(self, batch: Batch, *path: object) -> Target:
        """Let the clients of one target send; ``path`` leads to their seed."""
        cell, learners = self.cell, self.learners
        seed = Seed(cell.seed).child(*path)
        device = torch.device(cell.device)
        moved = batch.replace(inputs=batch.inputs.to(device), targets=batch.targets.to(device))
        updates, payloads, trained, measured = _send(learners, moved, self.defense, seed, self.public)
        threat = _threat(cell, learners[0])
        observation = Observation(
            learners=learners,
            updates=updates,
            # Under secure aggregation the server never sees what one client sent.
            payloads=payloads if cell.clients == 1 else (),
            input_shape=tuple(batch.inputs.shape[1:]),
            classes=self.dataset.classes if cell.cut else learners[0].classes(batch.inputs[:1]),
            examples=len(batch),
            threat=dataclasses.replace(threat, told=tuple(filter(None, self._told()))),
            adversary=self.defense.adversary(),
            labels=moved.targets if cell.known_labels else None,
            public=self.public if Knowledge.PUBLIC_DATA in threat.knows else None,
        )
        return Target(observation, batch, trained, payloads, measured)


def _send(
    learners: tuple[Learner, ...], batch: Batch, defense: Defense, seed: Seed, public: Tensor
) -> tuple[tuple[Update, ...], tuple[Payload, ...], Tensor, dict[str, float]]:
    """Run all clients of one target through all rounds; return what the server reads per round (the mean over clients).

    Last comes what the defense measured, in the mean over clients after the last round.
    """
    clients = learners[0].settings.clients
    size = len(batch) // clients
    states: list[Named | None] = [None] * clients
    updates, payloads, trained = [], [], []
    for round_index, learner in enumerate(learners):
        own = learner.replace(settings=learner.settings.replace(clients=1))
        decoded = []
        for client in range(clients):
            part = slice(client * size, (client + 1) * size)
            share = Batch(batch.inputs[part], batch.targets[part], batch.records[part])
            result = send(own, share, defense, seed.child(client), state=states[client], round_index=round_index, public=public)
            states[client] = result.state
            payloads.append(result.payload)
            decoded.append(result.update)
            if round_index == 0:
                trained.append(result.trained_batch.inputs)
        mean = {n: torch.stack([d.weights[n] for d in decoded]).mean(0).detach() for n in decoded[0].weights}
        statistics = {n: torch.stack([d.buffers[n] for d in decoded]).double().mean(0) for n in decoded[0].buffers}
        buffers = {n: value.to(decoded[0].buffers[n].dtype) for n, value in statistics.items()}
        updates.append(Update(mean, examples=len(batch), round=round_index, buffers=buffers))
    return tuple(updates), tuple(payloads), torch.cat(trained), _measured([state for state in states if state is not None])


def _threat(cell: Cell, learner: Learner) -> ThreatModel:
    """Return who attacks, with what BatchNorm of this model gives away: statistics are known only where there are any."""
    threat, layers = threat_of(cell), batch_norm_layers(learner.model)
    if cell.cut:
        return threat  # an embedding is seen, and no upload of a model
    if learner.running:
        told = "Uploads carry the running statistics of BatchNorm, and the attacker uses them."
        return dataclasses.replace(threat, knows=threat.knows | {Knowledge.BN_STATISTICS}, batch_norm=told)
    if not layers:
        told = "The model has no BatchNorm, so there are no statistics that uploads could carry."
    elif cell.batch_norm == "eval":
        told = "Clients train with fixed BatchNorm statistics, so uploads carry none."
    else:
        told = "Uploads are taken to carry no BatchNorm statistics; most federations send them, and they help the attacker."
    return dataclasses.replace(threat, batch_norm=told)


def _measured(states: list[Named]) -> dict[str, float]:
    told: dict[str, list[float]] = {}
    for state in states:
        for name, value in state.items():
            if name.rpartition("/")[2].startswith(MEASURED):
                told.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in told.items()}


def _rounds(cell: Cell, learner: Learner, defense: Defense, batches: list[Batch], public: Tensor) -> tuple[Learner, ...]:
    """Return one learner per round seen; between rounds the server steps along the mean of all targets' defended updates."""
    settings = learner.settings.replace(clients=cell.clients)
    learners = [learner.replace(settings=settings)]
    for round_index in range(1, cell.rounds):
        totals: list[Named] = []
        for index, batch in enumerate(batches):
            moved = batch.replace(inputs=batch.inputs.to(cell.device), targets=batch.targets.to(cell.device))
            seed = Seed(cell.seed).child("client", index)
            updates, *_ = _send(tuple(learners), moved, defense, seed, public)
            totals.append(updates[round_index - 1].weights)
        rate = cell.learning_rate if cell.shares == "gradient" else 1.0
        last = learners[-1]
        moved_on = {n: w - rate * torch.stack([t[n] for t in totals]).mean(0) for n, w in last.weights.items()}
        learners.append(last.replace(weights=moved_on))
    return tuple(learners)

"""A whole vertical training: rounds, accuracy, bytes and time, kept in a folder so that it can be killed and continued.

    result = train_vertical(settings, cut="cut2", parts="left_right")

A round is as many passes over the training records as a client of horizontal learning takes over its own (``local_epochs``), in
minibatches that all parties and the label owner step through together. The order of records depends on the seed and the round
alone, so runs that differ only in the defense see the same batches from the same first weights, and the records that are held
out are those of a horizontal training of the same seed. The defense is on in training and when accuracy is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from gradveil import tensors
from gradveil.client.timing import SECONDS, measure_latency_of
from gradveil.data import DIVISIONS, Dataset, public_images
from gradveil.data.divisions import Division
from gradveil.defenses import build_defense
from gradveil.defenses.none import NoDefense
from gradveil.errors import BadUpdate, UsageError
from gradveil.federation.identity import identity_of, same_threads
from gradveil.federation.parties import build_parties
from gradveil.federation.setup import PUBLIC, load_both
from gradveil.federation.vertical import VerticalFederation, VerticalState
from gradveil.learning import loss_by_name
from gradveil.randomness import Seed
from gradveil.storage.training_folder import Checkpoint, TrainingFolder
from gradveil.study.codec import decode
from gradveil.study.federation import FederationSettings
from gradveil.study.kept import KeptTraining
from gradveil.study.local_training import TrainingSettings
from gradveil.study.proved import Guarantee
from gradveil.study.training_result import Latency, RoundRecord, TrainingResult
from gradveil.tensors import Named

__all__ = ["VerticalTraining", "build_vertical", "measure_party", "train_vertical"]

NO_PROOF = "what parties of vertical learning send has no accounted noise here"
EVALUATED_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class VerticalTraining:
    """All that stays the same from round to round.

    Attributes:
        settings: Data, model, defense, rounds, minibatch, learning rate, seed; what is about clients plays no part.
        cut: Where the model is cut.
        parts: Who owns which features, as it was spelled.
        federation: The parties and the label owner at their first weights.
        train: Whole training records.
        test: Records that this training does not use.
    """

    settings: FederationSettings
    cut: str
    parts: str
    federation: VerticalFederation
    train: Dataset
    test: Dataset

    @property
    def batches(self) -> int:
        """Steps of one pass over the training records."""
        return -(-len(self.train) // self._minibatch)

    @property
    def steps(self) -> int:
        """Steps of one round."""
        return max(1, self.settings.local_epochs) * self.batches

    @property
    def _minibatch(self) -> int:
        return min(self.settings.minibatch or len(self.train), len(self.train))

    def round(self, state: VerticalState, index: int) -> tuple[VerticalState, int]:
        """Take the steps of one round; return also how many were refused."""
        refused = 0
        for number in range(max(1, self.settings.local_epochs)):
            random = Seed(self.settings.seed).child("order", "pass", number).numpy("records", round=index)
            order = torch.from_numpy(random.permutation(len(self.train)))
            for rows in order.split(self._minibatch):
                device = self.federation.top.device
                inputs, targets = self.train.inputs[rows].to(device), self.train.targets[rows].to(device)
                state, fine = self._step(state, inputs, targets)
                refused += not fine
        return state, refused

    def _step(self, state: VerticalState, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[VerticalState, bool]:
        """Take a step, or none where it would leave something that is not finite: later steps could only go on from there."""
        try:
            after = self.federation.step(state, inputs, targets)
            for own in (*after.bottoms, after.top):
                tensors.check_finite(own, "a party's weights")
        except BadUpdate:
            return dataclasses.replace(state, step=state.step + 1), False
        return after, True

    def scores(self, state: VerticalState) -> tuple[float, float | None]:
        """Return accuracy and mean loss over the test records, with the defense on; no loss where it is endless."""
        device, hits, loss = self.federation.top.device, 0, 0.0
        for start in range(0, len(self.test), EVALUATED_AT_ONCE):
            part = slice(start, start + EVALUATED_AT_ONCE)
            inputs, targets = self.test.inputs[part].to(device), self.test.targets[part].to(device)
            try:
                logits = self.federation.predict(state, inputs, occasion=start // EVALUATED_AT_ONCE)
            except BadUpdate:
                loss = math.inf  # embeddings that are not finite say nothing, so all of these are wrong
                continue
            hits += int((logits.argmax(1) == targets).sum())
            loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        return hits / len(self.test), loss / len(self.test) if math.isfinite(loss) else None


def build_vertical(
    settings: FederationSettings, cut: str, parts: str, *, data: tuple[Dataset, Dataset] | None = None
) -> VerticalTraining:
    """Load data, cut the model and give every party its defense.

    Args:
        settings: As of a horizontal training; every pass has an order of its own, with ``shuffle`` and without.
        cut: As in `gradveil.models.split_model`.
        parts: Spelling of a division; see `gradveil.data.divisions`.
        data: Training and test records, where they are loaded.

    Raises:
        UsageError: The data has masks, steps are counted, or model, cut, parts and defense do not fit together.
    """
    if settings.local_steps:
        raise UsageError("parties of vertical learning step together over all records; set local_epochs instead of local_steps")
    if settings.dropout:
        raise UsageError("parties of vertical learning train with dropout off; leave dropout out")
    train, test = data or load_both(settings, None, None)[:2]
    if train.dense:
        raise UsageError(f"{train.name!r} has masks, and vertical learning here is for classes; leave cut out")
    # Parties exchange no statistics of BatchNorm: they keep those the model came with, and what is told must say so.
    settings = dataclasses.replace(settings, batch_norm="eval")
    division: Division = DIVISIONS.build(parts)
    model = build_parties(
        settings.model,
        cut,
        division,
        input_shape=train.input_shape,
        classes=train.classes,
        seed=Seed(settings.seed).child("model"),
        weights=settings.weights or None,
    )
    federation = VerticalFederation.of(
        model,
        loss_by_name(settings.loss),
        TrainingSettings(
            optimizer=settings.optimizer,
            learning_rate=settings.learning_rate,
            momentum=settings.momentum,
            batch_norm=settings.batch_norm,
        ),
        defense=build_defense(settings.defense),
        seed=Seed(settings.seed).child("vertical"),
        public=public_images(train.input_shape, PUBLIC, Seed(settings.seed).child("public")),
    )
    return VerticalTraining(settings, cut, parts, federation.to(torch.device(settings.device)), train, test)


def train_vertical(
    settings: FederationSettings,
    *,
    cut: str,
    parts: str = "whole",
    out: Path | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    stop_after: int | None = None,
    latency: bool = False,
    checkpoint_every: int = 1,
    data: tuple[Dataset, Dataset] | None = None,
) -> TrainingResult:
    """Train the parties together and return what happened.

    Args:
        settings: As of a horizontal training; what is about clients plays no part.
        cut: Where the model is cut.
        parts: Who owns which features.
        out: Folder for checkpoints and rounds, and to continue from; None keeps nothing on disk.
        on_round: Told after every round.
        stop_after: Stop after this many rounds in all; the same folder continues.
        latency: Whether to time a party with and without the defense at the end.
        checkpoint_every: Rounds between two checkpoints.
        data: Training and test records, where they are loaded.
    """
    training = build_vertical(settings, cut, parts, data=data)
    settings = training.settings
    state, records = training.federation.start(), list[RoundRecord]()
    with contextlib.ExitStack() as stack:
        folder = None if out is None else TrainingFolder(out)
        identity = identity_of(settings, training.train, training.test, cut=cut, parts=parts)
        if folder is not None:
            stack.enter_context(folder.lock())
            found = folder.read(identity)
            if found is not None:
                checkpoint, records = found
                state = _restored(checkpoint, state, training)
                stack.enter_context(same_threads(checkpoint.threads))
            folder.begin(records)
        last = settings.rounds if stop_after is None else min(stop_after, settings.rounds)
        while len(records) < last:
            state, record = _round(training, state, len(records))
            records.append(record)
            if folder is not None:
                folder.append(record)
                if len(records) % checkpoint_every == 0 or len(records) == settings.rounds:
                    folder.save(_checkpoint(state, len(records)), range(len(state.bottoms)), identity)
            if on_round is not None:
                on_round(record)
    weights = {f"bottoms.{p}.{name}": value for p, own in enumerate(state.bottoms) for name, value in own.items()}
    timed = measure_party(training) if latency and len(records) >= settings.rounds else None
    return TrainingResult.of(
        records,
        {**weights, **{f"top.{name}": value for name, value in state.top.items()}},
        settings=decode(KeptTraining, settings.as_dict()),
        latency=timed,
        guarantee=Guarantee(reason=NO_PROOF),
    )


def _round(training: VerticalTraining, state: VerticalState, index: int) -> tuple[VerticalState, RoundRecord]:
    started, settings = time.perf_counter(), training.settings
    before = state.bytes_up, state.bytes_down
    state, refused = training.round(state, index)
    took = time.perf_counter() - started
    look = (index + 1) % settings.evaluate_every == 0 or index + 1 == settings.rounds
    accuracy, loss = training.scores(state) if look else (None, None)
    record = RoundRecord(
        round=index + 1,
        accuracy=accuracy,
        loss=loss,
        bytes_up=state.bytes_up - before[0],
        bytes_down=state.bytes_down - before[1],
        client_seconds=round(took, 4),
        seconds=round(time.perf_counter() - started, 4),
        clients=tuple(range(len(state.bottoms))),
        refused=refused,
    )
    return state, record


def _checkpoint(state: VerticalState, rounds: int) -> Checkpoint:
    # A defense that has kept nothing yet, because every step was refused, must still prepare when the training goes on.
    prepared = torch.tensor([kept is not None for kept in state.defenses])
    server: Named = {"step": torch.tensor(state.step), "prepared": prepared}
    for party, (own, memory) in enumerate(zip((*state.bottoms, state.top), state.memories, strict=True)):
        server |= {f"{party}/weights/{name}": value for name, value in own.items()}
        for kind, values in memory.items():
            server |= {f"{party}/{kind}/{name}": value for name, value in values.items()}
    states = {party: dict(kept or {}) for party, kept in enumerate(state.defenses)}
    return Checkpoint(rounds, server, states, threads=torch.get_num_threads())


def _restored(checkpoint: Checkpoint, fresh: VerticalState, training: VerticalTraining) -> VerticalState:
    device = training.federation.top.device

    def part(prefix: str) -> Named:
        return tensors.to({n.removeprefix(prefix): v for n, v in checkpoint.server.items() if n.startswith(prefix)}, device)

    own = [part(f"{party}/weights/") for party in range(len(fresh.memories))]
    memories = tuple({kind: part(f"{party}/{kind}/") for kind in memory} for party, memory in enumerate(fresh.memories))
    kept = tuple(
        tensors.to(checkpoint.states[party], device) if prepared else None
        for party, prepared in enumerate(checkpoint.server["prepared"].tolist())
    )
    # The count of bytes starts again: every record holds those of its own round.
    return VerticalState(tuple(own[:-1]), own[-1], memories, kept, step=int(checkpoint.server["step"]))


def measure_party(training: VerticalTraining, *, seconds: float = SECONDS) -> Latency:
    """Time the first party's step at the first weights, with the defense and without, in turns: embed, protect, send, step back.

    What a defense prepares once is not counted; what it makes anew in every step is.
    """
    federation = training.federation
    plain = federation.replace(defense=NoDefense())
    rows = slice(0, min(training.settings.minibatch or len(training.train), len(training.train)))
    device = federation.top.device
    inputs, targets = training.train.inputs[rows].to(device), training.train.targets[rows].to(device)

    def step(side: VerticalFederation) -> Callable[[], VerticalState]:
        warm = side.party_work(side.start(), 0, inputs, targets)
        return lambda: side.party_work(warm, 0, inputs, targets)

    other = None if federation.defense == plain.defense else step(plain)
    return measure_latency_of(step(federation), other, device, seconds=seconds)

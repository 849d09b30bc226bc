"""Federated training in one process: plain PyTorch, nothing to start.

>>> settings = FederationSettings(data="digits", model="mlp(hidden=16)", clients=4, clients_per_round=2, rounds=1)
>>> len(run_training(settings).rounds)
1

With a folder, the run can be killed at any moment; the same call continues it and ends with equal weights, to the bit on a CPU.
All randomness comes from the seed by role, client and round, so nothing depends on where a run was interrupted, and runs that
differ only in the defense share partition, client sampling, order of records and first weights.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradveil import __version__, tensors
from gradveil.client.local_training import LocalTraining, StepRecorder
from gradveil.client.releases import RANGE_OF_DATA, privacy_of_training
from gradveil.client.update import ClientResult, run_client
from gradveil.data import Dataset
from gradveil.defenses.base import MEASURED
from gradveil.errors import BadUpdate, UsageError
from gradveil.federation.identity import identity_of, same_threads
from gradveil.federation.latency import measure_latency
from gradveil.federation.scaffold import Scaffold
from gradveil.federation.server import Server, receive
from gradveil.federation.setup import Federation, Scores, build_federation
from gradveil.storage.training_folder import Checkpoint, TrainingFolder
from gradveil.study.checks import check_whole
from gradveil.study.codec import decode
from gradveil.study.federation import FederationSettings
from gradveil.study.kept import KeptTraining
from gradveil.study.proved import Guarantee
from gradveil.study.training_result import Latency, RoundRecord, TrainingResult
from gradveil.tensors import Named
from gradveil.wire import tensor_bytes

__all__ = ["run_training"]

SILENT = "sent nothing"


def run_training(
    settings: FederationSettings,
    *,
    dataset: Dataset | None = None,
    test: Dataset | None = None,
    out: Path | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    on_start: Callable[[int], None] | None = None,
    stop_after: int | None = None,
    latency: bool = False,
    checkpoint_every: int = 1,
    command: str = "",
) -> TrainingResult:
    """Train a model federatedly and return what happened.

    Args:
        settings: What to train, and how.
        dataset: Training records, where they are already loaded.
        test: Test records, where they are already loaded; without them the data's own test split, or a share of it, is held out.
        out: Folder to keep results in and to continue from; None keeps nothing on disk.
        on_round: Told after every round.
        on_start: Told the rounds already done, once everything is loaded and checked.
        stop_after: Stop after this many rounds in all; the same folder continues.
        latency: Whether to time one client with and without the defense at the end.
        checkpoint_every: Rounds between two checkpoints; a killed run repeats the rounds since the last.
        command: How to run it again, for training.json.

    Raises:
        UsageError: Something cannot be carried out as asked, or ``out`` holds a run with other settings.
    """
    check_whole("", "checkpoint_every", checkpoint_every, 1)
    federation = build_federation(settings, dataset, test)
    with contextlib.ExitStack() as stack:
        run = _Run.start(federation)
        if out is not None:
            folder = TrainingFolder(out)
            stack.enter_context(folder.lock())
            run.open(folder, checkpoint_every, command, stack)
        if on_start is not None:
            on_start(len(run.records))
        last = settings.rounds if stop_after is None else min(stop_after, settings.rounds)
        while len(run.records) < last:
            record = run.round()
            run.keep(record)
            if on_round is not None:
                on_round(record)
        return run.finish(measure_latency(federation) if latency and len(run.records) >= settings.rounds else None)


@dataclass
class _Run:
    """The moving parts: server, control variates, what clients keep, and where it is written."""

    federation: Federation
    server: Server
    scaffold: Scaffold | None
    recorder: StepRecorder
    states: dict[int, Named] = field(default_factory=dict)
    records: list[RoundRecord] = field(default_factory=list)
    folder: TrainingFolder | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    every: int = 1
    command: str = ""
    changed: set[int] = field(default_factory=set)

    @classmethod
    def start(cls, federation: Federation) -> _Run:
        weights = tensors.detach(federation.learner.weights)
        server = Server.start(federation.settings, weights, tensors.detach(federation.evaluator.buffers))
        scaffolded = federation.settings.aggregation == "scaffold"
        scaffold = Scaffold.start(weights, federation.settings.clients) if scaffolded else None
        return cls(federation, server, scaffold, StepRecorder(federation.learner.model))

    def open(self, folder: TrainingFolder, every: int, command: str, stack: contextlib.ExitStack) -> None:
        """Continue from a folder, or begin it."""
        self.folder, self.every, self.command = folder, every, command
        self.identity = identity_of(self.federation.settings, self.federation.train, self.federation.test)
        found = folder.read(self.identity)
        if found is not None:
            checkpoint, self.records = found
            if checkpoint.round > self.federation.settings.rounds:
                raise UsageError(
                    f"the run in {str(folder.out)!r} already has {checkpoint.round} rounds; ask for at least as many, or choose "
                    "another folder with --out"
                )
            self._restore(checkpoint)
            stack.enter_context(same_threads(checkpoint.threads))
        folder.begin(self.records)

    def round(self) -> RoundRecord:
        """Run one round: sample, train, receive, aggregate, evaluate."""
        started = time.perf_counter()
        index, federation = len(self.records), self.federation
        chosen = federation.sample(index)
        sent, failed = self._collect(chosen, index)
        client_seconds = time.perf_counter() - started
        payloads = {client: result.payload for client, result in sent.items()}
        reception = receive(
            payloads,
            federation.defense,
            federation.spec,
            round_index=index,
            sizes={client: len(federation.parts[client]) for client in chosen},
            buffers=self.server.buffers,
        )
        step = self.server.step(reception, federation.defense, federation.spec)
        if self.scaffold is not None and step.accepted:
            accepted = {client: reception.updates[client] for client in step.accepted}
            self.scaffold = self.scaffold.after(accepted, federation.learner.settings)
        self.server = step.server
        self.changed |= {client for client in chosen if client in self.states}
        reasons = {**failed, **step.refused}
        scores = self._evaluate(index)
        return RoundRecord(
            round=index + 1,
            accuracy=scores.accuracy if scores else None,
            loss=scores.loss if scores else None,
            bytes_up=sum(tensor_bytes(payload) for payload in payloads.values()),
            bytes_down=len(chosen) * self._bytes_down(),
            client_seconds=round(client_seconds, 4),
            seconds=round(time.perf_counter() - started, 4),
            clients=tuple(chosen),
            refused=len(reasons),
            reasons={str(client): reasons[client] for client in sorted(reasons)},
            counters=_counters([result.state for result in sent.values()]),
            note=step.note,
            f1=scores.f1 if scores else None,
            score=federation.score,
        )

    def _collect(self, chosen: list[int], index: int) -> tuple[dict[int, ClientResult], dict[int, str]]:
        sent: dict[int, ClientResult] = {}
        failed: dict[int, str] = {}
        for client in chosen:
            try:
                sent[client] = self._client(client, index)
                self.states[client] = sent[client].state
            except BadUpdate as error:
                failed[client] = f"{SILENT}: {error}"
        return sent, failed

    def _client(self, client: int, index: int) -> ClientResult:
        federation = self.federation
        batch = federation.batch(client, index)
        return run_client(
            federation.local_learner(self.server.weights, len(batch)),
            batch,
            federation.defense,
            federation.seed.child("client", client),
            state=self.states.get(client),
            round_index=index,
            public=federation.public,
            local=LocalTraining(
                correction=self.scaffold.correction(client) if self.scaffold else None,
                buffers={name: self.server.buffers[name] for name in federation.tracked},
                recorder=self.recorder,
            ),
        )

    def _evaluate(self, index: int) -> Scores | None:
        settings = self.federation.settings
        if (index + 1) % settings.evaluate_every and index + 1 != settings.rounds:
            return None
        return self.federation.scores(self.server.weights, self.server.buffers)

    def _bytes_down(self) -> int:
        """Weights and running statistics, and for SCAFFOLD the server's control variate."""
        control = sum(v.numel() * v.element_size() for v in self.scaffold.server.values()) if self.scaffold else 0
        return self.federation.dense_bytes + control

    def keep(self, record: RoundRecord) -> None:
        """Note a round, and write it down where there is a folder."""
        self.records.append(record)
        if self.folder is None:
            return
        self.folder.append(record)
        if len(self.records) % self.every == 0 or len(self.records) == self.federation.settings.rounds:
            self._save()
        self.folder.write_summary(self._result(None))

    def finish(self, latency: Latency | None) -> TrainingResult:
        result = self._result(latency)
        if self.folder is not None:
            if self.changed:
                self._save()
            self.folder.write_model({**result.weights, **result.buffers})
            self.folder.write_summary(result)
        return result

    def _result(self, latency: Latency | None) -> TrainingResult:
        return TrainingResult.of(
            self.records,
            self.server.weights,
            dense_bytes=self.federation.dense_bytes,
            settings=decode(KeptTraining, self.federation.settings.as_dict()),
            data=self.federation.describe_data(),
            latency=latency,
            guarantee=self._guarantee(),
            guarantee_of_sums=self._guarantee_of_sums(),
            buffers=self.server.buffers,
            version=__version__,
            command=self.command,
            provenance=_provenance(self.federation.settings) if self.folder is not None else {},
        )

    def _guarantee_of_sums(self) -> Guarantee | None:
        found = self._guarantee(sums_only=True)
        return found if found.summed > 1 else None

    def _guarantee(self, *, sums_only: bool = False) -> Guarantee:
        federation, settings = self.federation, self.federation.settings
        return privacy_of_training(
            federation.defense,
            settings.training(),
            sizes=[len(part) for part in federation.parts],
            rounds=[record.clients for record in self.records],
            weights=federation.learner.weights,
            fault=self._fault(),
            first_weights=bool(settings.weights),
            sums_only=sums_only,
        )

    def _fault(self) -> str:
        """Return what happened outside the defense that depends on the data, so that no proof covers the run."""
        if self.federation.tracked:
            return "running statistics of BatchNorm are sent as they are; use batch_norm = 'eval', or a model with GroupNorm"
        if self.federation.settings.scale == "minmax":
            return RANGE_OF_DATA
        if any(reason.startswith(SILENT) for record in self.records for reason in record.reasons.values()):
            return "a client sent nothing because its training diverged, which tells about its data; lower the learning rate"
        return ""

    def _save(self) -> None:
        assert self.folder is not None
        server = {f"weights/{name}": value for name, value in self.server.weights.items()}
        server |= {f"buffers/{name}": value for name, value in self.server.buffers.items()}
        for kind, values in self.server.memory.items():
            server |= {f"memory/{kind}/{name}": value for name, value in values.items()}
        if self.scaffold is not None:
            server |= {f"control/{name}": value for name, value in self.scaffold.server.items()}
        controls = self.scaffold.own if self.scaffold is not None else {}
        checkpoint = Checkpoint(len(self.records), server, self.states, controls, torch.get_num_threads())
        self.folder.save(checkpoint, sorted(self.changed), self.identity)
        self.changed = set()

    def _restore(self, checkpoint: Checkpoint) -> None:
        device = self.federation.inputs.device

        def part(prefix: str) -> Named:
            own = {n.removeprefix(prefix): v for n, v in checkpoint.server.items() if n.startswith(prefix)}
            return tensors.to(own, device)

        memory = {kind: part(f"memory/{kind}/") for kind in ("momentum", "mean", "square")}
        self.server = Server.start(self.federation.settings, part("weights/"), part("buffers/")).remembering(memory)
        self.states = {client: tensors.to(state, device) for client, state in checkpoint.states.items()}
        if self.scaffold is not None:
            own = {client: tensors.to(control, device) for client, control in checkpoint.controls.items()}
            self.scaffold = Scaffold(self.scaffold.clients, part("control/"), own)


def _counters(states: list[Named]) -> dict[str, float]:
    """Return the mean over clients of what their defenses tell: whole numbers without axes in their state, and measurements."""
    sums: dict[str, list[float]] = {}
    for state in states:
        for name, value in state.items():
            counted = value.ndim == 0 and not value.is_floating_point() and not value.is_complex()
            if counted or name.rpartition("/")[2].startswith(MEASURED):
                sums.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(states) for name, values in sorted(sums.items())}


def _provenance(settings: FederationSettings) -> Mapping[str, Any]:
    from gradveil import provenance

    return {**provenance.provenance(settings.seed, settings.device), "threads": torch.get_num_threads()}

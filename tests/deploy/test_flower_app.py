"""The example app as Flower runs it, in a simulation and as a deployment on loopback, beside the embedded arithmetic, to the bit.

Run by `make test-deploy`, which brings Flower; without it, or without openssl, these tests fail there and do not skip.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gradveil.client.finished import protect_finished
from gradveil.defenses import build_defense
from gradveil.federation import Server, receive
from gradveil.learning import Learner
from gradveil.learning.losses import cross_entropy
from gradveil.randomness import Seed
from gradveil.records import ModelSpec, Update
from gradveil.tensors import Named, detach, sub
from gradveil.wire import payload_to_bytes

ROOT = Path(__file__).resolve().parents[2]
APP = ROOT / "examples" / "flower-app"
MARK = "GRADVEIL_TEST_RUN"
NODES, ROUNDS, RATE = 3, 3, 0.2
MOST_CHANGED_LINES = 10


def embedded() -> tuple[Named, list[set[bytes]]]:
    """Return the weights after the app's rounds, and every round's payloads, without Flower."""
    task: Any = __import__("digits_app.task", fromlist=["task"])
    defense = build_defense("svdefense")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = task.Net()
    learner, spec = Learner.of(model, cross_entropy), ModelSpec.of(model)
    server, sent = Server(learner.weights), list[set[bytes]]()
    for index in range(ROUNDS):
        payloads = {}
        for place in range(NODES):
            model.load_state_dict(server.weights)
            records, _ = task.load_data(place, NODES)
            task.train(model, records, RATE)
            local = detach(dict(model.named_parameters()))
            update = Update(sub(server.weights, local), len(records.dataset), index)
            payloads[place] = protect_finished(update, learner.replace(weights=server.weights), defense, Seed(0)).payload
        sent.append({payload_to_bytes(payload) for payload in payloads.values()})
        server = server.step(receive(payloads, defense, spec, round_index=index), defense, spec).server
    return dict(server.weights), sent


@pytest.fixture(scope="module")
def expected() -> Iterator[tuple[Named, list[set[bytes]]]]:
    sys.path.insert(0, str(APP))
    try:
        yield embedded()
    finally:
        sys.path.remove(str(APP))


def run(folder: Path, mark: str, *words: str, **more: str) -> str:
    paths = os.pathsep.join([str(ROOT / "src"), str(APP)])
    own = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", MARK: mark}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **own, **more},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def left_behind(mark: str) -> list[str]:
    """Return the command lines of processes that still carry a run's mark; Ray's need a moment to notice that it is over."""
    until = time.monotonic() + 30
    while (found := marked(mark)) and time.monotonic() < until:
        time.sleep(0.5)
    return found


def marked(mark: str) -> list[str]:
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (each / "environ").read_bytes():
                found.append((each / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def kept_payloads(folder: Path) -> set[bytes]:
    """Return what nodes have sent in the last two rounds, from their diaries."""
    return {path.read_bytes() for path in folder.rglob("payload-*")}


@pytest.mark.deploy
def test_a_deployment_with_tls_and_node_keys_gives_the_embedded_bytes_and_weights(
    tmp_path: Path, expected: tuple[Named, list[set[bytes]]]
) -> None:
    weights, sent = expected
    mark = uuid.uuid4().hex
    run(tmp_path, mark, str(APP / "deploy.py"), str(tmp_path), str(NODES))
    assert left_behind(mark) == []
    assert kept_payloads(tmp_path) == sent[-1] | sent[-2] and len(sent[-1] | sent[-2]) == 2 * NODES
    got = load_file(tmp_path / "model.safetensors")
    assert got.keys() == weights.keys() and all(torch.equal(got[name], value) for name, value in weights.items())


@pytest.mark.deploy
def test_a_simulation_sends_the_same_bytes(tmp_path: Path, expected: tuple[Named, list[set[bytes]]]) -> None:
    mark = uuid.uuid4().hex
    said = run(tmp_path, mark, str(APP / "simulate.py"), str(NODES), GRADVEIL_HOME=str(tmp_path))
    assert "Strategy execution finished" in said and "'clients': '3'" in said
    # The last round's payloads depend on the model after the round before, so that was equal too.
    assert kept_payloads(tmp_path) == expected[1][-1] | expected[1][-2]
    assert left_behind(mark) == []


def test_the_app_is_protected_in_ten_lines_at_most() -> None:
    changed = 0
    for name in ("client_app.py", "server_app.py"):
        before, after = ((APP / folder / name).read_text(encoding="utf-8").splitlines() for folder in ("plain", "digits_app"))
        lines = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        assert lines
        changed += len(lines)
    assert changed <= MOST_CHANGED_LINES

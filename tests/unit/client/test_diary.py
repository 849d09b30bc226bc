"""The diary of a node: the same request gets the same bytes, another one fresh noise and a charge, and no kill undoes either."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.client.diary import Diary, digest_of
from gradveil.client.update import ClientResult
from gradveil.defenses.base import State
from gradveil.errors import UsageError
from gradveil.records import Batch, Payload
from gradveil.storage.files import write_whole
from gradveil.wire.files import payload_to_bytes

NOBODY = Batch(torch.zeros(1, 1), torch.zeros(1))


class Client:
    """Counts its releases in the state, and draws each anew."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def __call__(self, state: State | None) -> ClientResult:
        self.seen.append(None if state is None else float(state["count"]))
        count = torch.tensor(1.0 + (0.0 if state is None else float(state["count"])))
        return ClientResult(Payload("dense-1", {"weights": {"w": torch.randn(3)}}, 2, 0), {"count": count}, NOBODY)


def of(folder: Path, **changes: Any) -> Diary:
    return Diary(folder, **{"run": "7", "node": "a", **changes})


def test_the_same_request_is_answered_with_the_same_bytes_and_costs_nothing(tmp_path: Path) -> None:
    client, diary = Client(), of(tmp_path)
    first = diary.answer(0, "x", client)
    again = of(tmp_path).answer(0, "x", client)  # another process
    assert payload_to_bytes(first) == payload_to_bytes(again) and client.seen == [None] and diary.released == 1


def test_another_request_under_the_same_round_starts_before_it_is_fresh_and_charged(tmp_path: Path) -> None:
    client, diary = Client(), of(tmp_path)
    for round_index in range(3):
        diary.answer(round_index, "x", client)
    other = diary.answer(2, "y", client)
    assert client.seen == [None, 1.0, 2.0, 2.0] and diary.released == 4
    assert payload_to_bytes(other) != payload_to_bytes(diary.answer(2, "x", client)), "both answers are kept"
    assert len(client.seen) == 4
    diary.answer(3, "z", client)
    assert client.seen[-1] == 3.0


def test_runs_and_nodes_know_nothing_of_each_other_whatever_they_are_called(tmp_path: Path) -> None:
    client = Client()
    for changes in ({}, {"run": "8"}, {"node": "../../b"}, {"run": "7a", "node": ""}, {"run": "", "node": "7a"}):
        of(tmp_path, **changes).answer(0, "x", client)
    assert client.seen == [None] * 5 and len(list(tmp_path.iterdir())) == 5


def test_a_round_long_past_and_a_spent_budget_are_refused_in_one_sentence(tmp_path: Path) -> None:
    client, diary = Client(), of(tmp_path, most=4)
    for round_index in (0, 4, 5, 6):
        diary.answer(round_index, "x", client)
    with pytest.raises(UsageError, match=r"asks for round 0, and this client has answered round 6; .*needs a new run"):
        of(tmp_path).answer(0, "x", client)
    assert diary.answer(5, "x", client).examples == 2, "the round before the last is kept"
    with pytest.raises(UsageError, match="released 4 updates, all that its budget allows"):
        diary.answer(7, "x", client)
    assert diary.released == 4 and len(client.seen) == 4


def test_a_client_that_fails_has_released_nothing(tmp_path: Path) -> None:
    def fails(state: State | None) -> ClientResult:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        of(tmp_path).answer(0, "x", fails)
    assert of(tmp_path).released == 0


def test_only_the_owner_can_read_and_only_what_is_needed_stays(tmp_path: Path) -> None:
    diary, client = of(tmp_path), Client()
    for round_index in range(6):
        diary.answer(round_index, "x", client)
    assert diary.path.stat().st_mode & 0o777 == 0o700
    files = {path.name: path.stat().st_mode & 0o777 for path in diary.path.iterdir()}
    assert set(files.values()) == {0o600}
    # Two answers, the states before and after each.
    assert set(files) == {"diary.json", "lock", "payload-5", "payload-6", "state-4", "state-5", "state-6"}


class Killed(BaseException):
    pass


def killing(after: int, keep: Callable[..., None]) -> Callable[..., None]:
    left = [after]

    def write(*given: Any, **named: Any) -> None:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        keep(*given, **named)

    return write


@pytest.mark.parametrize("after", range(5))
def test_a_kill_at_any_point_either_answered_or_missed_the_round(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was written, the next round goes on from a state that belongs to an answer, and no release is forgotten."""
    client, diary = Client(), of(tmp_path)
    diary.answer(0, "x", client)
    sent: list[Payload] = []
    with monkeypatch.context() as during, contextlib.suppress(Killed):
        during.setattr("gradveil.client.diary.write_whole", killing(after, write_whole))
        sent.append(diary.answer(1, "x", client))
    assert diary.released >= 1 + len(sent) and len(sent) == (after == 4)
    assert diary.released == 1 + (after > 0), "counted as soon as anything could be there to be sent"
    diary.answer(2, "x", client)
    assert client.seen == [None, 1.0, 2.0 if sent else 1.0]
    kept = {path.name for path in diary.path.iterdir()} - {"lock", "diary.json"}
    assert len([name for name in kept if name.startswith("payload")]) == 2


def test_a_damaged_diary_sends_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    diary, client = of(tmp_path), Client()
    diary.answer(0, "x", client)
    (diary.path / "state-1").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="'state-1' of this client's diary cannot be read; nothing is sent"):
        diary.answer(1, "x", client)
    (diary.path / "payload-1").unlink()
    with pytest.raises(UsageError, match="'payload-1'"):
        diary.answer(0, "x", client)
    for content in (b"{", b'{"format": "another", "released": 0, "entries": []}', b"[]"):
        (diary.path / "diary.json").write_bytes(content)
        with pytest.raises(UsageError, match=r"'diary\.json'.*backup"):
            diary.answer(1, "x", client)
    assert len(client.seen) == 1


def test_two_processes_of_a_node_answer_one_after_the_other(tmp_path: Path) -> None:
    client, order = Client(), []

    def slow(state: State | None) -> ClientResult:
        order.append("begins")
        time.sleep(0.2)
        order.append("ends")
        return client(state)

    threads = [threading.Thread(target=of(tmp_path).answer, args=(index, "x", slow)) for index in (1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["begins", "ends"] and of(tmp_path).released == 1, "the second was the same request"


def test_who_waits_in_vain_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.client.diary.PATIENCE", 0.1)

    def asks_itself(state: State | None) -> ClientResult:
        of(tmp_path).answer(0, "x", Client())
        raise AssertionError

    with pytest.raises(UsageError, match="another process of this node"):
        of(tmp_path).answer(0, "x", asks_itself)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot keep a diary"):
        of(tmp_path).answer(0, "x", Client())


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot keep a diary in .*file"):
        of(tmp_path / "file").answer(0, "x", Client())


def test_a_digest_knows_values_shapes_kinds_and_what_was_told() -> None:
    value = torch.arange(4.0)
    asked = [
        digest_of({"weights": {"w": value}}, round=1),
        digest_of({"weights": {"w": value}}, round=2),
        digest_of({"weights": {"v": value}}, round=1),
        digest_of({"buffers": {"w": value}}, round=1),
        digest_of({"weights": {"w": value.reshape(2, 2)}}, round=1),
        digest_of({"weights": {"w": value.double()}}, round=1),
        digest_of({"weights": {"w": value.bfloat16()}}, round=1),
        digest_of({"weights": {"w": value + 1e-7}}, round=1),
        digest_of({"weights": {"w": value[:0]}}, round=1),
    ]
    assert len(set(asked)) == len(asked)
    assert asked[0] == digest_of({"weights": {"w": value.clone().reshape(2, 2).T.contiguous().T.reshape(4)}}, round=1)

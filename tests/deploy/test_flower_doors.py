"""Who may not take part in a deployment is turned away: no key, another authority, no encryption."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

APP = Path(__file__).resolve().parents[2] / "examples" / "flower-app"
PATIENCE = 45.0


def script() -> Any:
    found = importlib.util.spec_from_file_location("deploy_of_example", APP / "deploy.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Door:
    """A SuperLink that listens, and what a node may bring."""

    deploy: Any
    folder: Path
    port: int
    environment: dict[str, str]

    def knock(self, name: str, key: Path, *words: str) -> tuple[int | None, str]:
        """Start a SuperNode; return how it ended, None where it did not, and what it said."""
        (own,) = self.deploy.free_ports(1)
        where = ["--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1", "--port", str(own), "--max-retries", "2"]
        command = [str(self.deploy.BIN / "flower-supernode"), *where, "--auth-supernode-private-key", str(key), *words]
        log, until = self.folder / f"{name}.log", time.monotonic() + PATIENCE
        with self.deploy.running(command, log, self.environment) as process:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
                if "Activated node_id" in self.said():
                    break
            ended = process.poll()
        return ended, log.read_text(errors="replace")

    def said(self) -> str:
        return (self.folder / "superlink.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    deploy, folder = script(), tmp_path_factory.mktemp("door")
    deploy.make_secrets(folder, 2)
    (folder / "flwr").mkdir()
    (port,) = deploy.free_ports(1)
    environment = {**os.environ, **deploy.SWITCHES, "HOME": str(folder), "FLWR_HOME": str(folder / "flwr")}
    environment["PATH"] = f"{deploy.BIN}:{os.environ['PATH']}"
    config = f'[superlink.loopback]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{folder / "ca.crt"}"\n'
    (folder / "flwr" / "config.toml").write_text(config, encoding="utf-8")
    tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
    server = [str(deploy.BIN / "flower-superlink"), *tls, "--enable-supernode-auth", "--host", "127.0.0.1", "--port", str(port)]
    with deploy.running(server, folder / "superlink.log", environment) as process:
        deploy.wait_for(port, process, folder / "superlink.log")
        register = [str(deploy.BIN / "flwr"), "supernode", "register", str(folder / "node0.pub"), "loopback"]
        subprocess.run(register, cwd=folder, env=environment, check=True, capture_output=True, timeout=60)
        yield Door(deploy, folder, port, environment)


@pytest.mark.deploy
def test_nobody_comes_in_without_key_authority_and_encryption(door: Door, tmp_path: Path) -> None:
    door.deploy.make_secrets(tmp_path, 1)
    ours, foreign = str(door.folder / "ca.crt"), str(tmp_path / "ca.crt")
    for name, key, words in (
        ("unregistered", door.folder / "node1", ["--root-certificates", ours]),
        ("foreign-authority", door.folder / "node0", ["--root-certificates", foreign]),
        ("plain-text", door.folder / "node0", ["--insecure"]),
    ):
        ended, said = door.knock(name, key, *words)
        assert ended not in (None, 0), f"{name}: {said[-1500:]}"
        assert "Activated node_id" not in door.said(), name
    door.knock("registered", door.folder / "node0", "--root-certificates", ours)
    assert "Activated node_id" in door.said(), "the right key, authority and encryption come in"

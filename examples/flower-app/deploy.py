"""Run the app as a deployment on this machine: ``python deploy.py [FOLDER] [NODES]``.

Makes certificates and node keys, starts a SuperLink and the SuperNodes on loopback with TLS and node keys on, runs the app, and
ends every process it started. What came out lies in FOLDER: ``model.safetensors``, logs, and what each node keeps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

APP = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}
CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes"]
SERVER = "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
PATIENCE = 300.0
"""Seconds that a run may take."""


def make_secrets(folder: Path, nodes: int) -> None:
    """Make a certificate authority, the server's certificate, and a key for every node; Flower takes NIST curves only."""
    (folder / "san.ext").write_text(SERVER, encoding="utf-8")
    by_ca = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30"]
    for command in (
        ["openssl", "req", "-x509", *CURVE, "-days", "30", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test CA"],
        ["openssl", "req", *CURVE, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost"],
        ["openssl", "x509", "-req", "-in", "server.csr", *by_ca, "-out", "server.crt", "-extfile", "san.ext"],
        *(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"node{node}"] for node in range(nodes)),
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, stdin=subprocess.DEVNULL)


def free_ports(count: int) -> list[int]:
    """Return ports nobody listens on just now."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in taken]


@contextlib.contextmanager
def running(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and all that it starts, for as long as the block lasts."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        # Everything it started is in its session's group; who does not listen to the first signal hears the second.
        for sent, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sent)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server listens."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    sys.exit(f"the SuperLink does not listen; the end of {log.name} says why:\n{log.read_text(errors='replace')[-2000:]}")


def deploy(folder: Path, nodes: int) -> None:
    """Run the app on as many nodes, and leave its results in the folder."""
    make_secrets(folder, nodes)
    port, *runtimes = free_ports(nodes + 1)
    link = f"127.0.0.1:{port}"
    environment = {
        **os.environ,
        **SWITCHES,
        "HOME": str(folder),
        "FLWR_HOME": str(folder / "flwr"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    (folder / "flwr").mkdir(exist_ok=True)
    (folder / "flwr" / "config.toml").write_text(
        f'[superlink.loopback]\naddress = "{link}"\nroot-certificates = "{folder / "ca.crt"}"\n', encoding="utf-8"
    )
    tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
    server = [str(BIN / "flower-superlink"), *tls, "--enable-supernode-auth", "--host", "127.0.0.1", "--port", str(port)]
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(
            running([*server, "--disable-runtime-dependency-installation"], folder / "superlink.log", environment)
        )
        wait_for(port, started, folder / "superlink.log")
        for node in range(nodes):
            register = [str(BIN / "flwr"), "supernode", "register", str(folder / f"node{node}.pub"), "loopback"]
            subprocess.run(register, cwd=folder, env=environment, check=True, capture_output=True, timeout=60)
            key = ["--auth-supernode-private-key", f"node{node}", "--root-certificates", "ca.crt", "--superlink", link]
            own = ["--host", "127.0.0.1", "--port", str(runtimes[node])]
            config = ["--node-config", f"partition-id={node} num-partitions={nodes}"]
            home = {**environment, "GRADVEIL_HOME": str(folder / f"home{node}")}
            client = [str(BIN / "flower-supernode"), *key, *own, *config]
            stack.enter_context(running(client, folder / f"supernode{node}.log", home))
        run = [str(BIN / "flwr"), "run", str(APP), "loopback", "--stream", "--run-config", f'nodes={nodes} out="{folder}"']
        with (folder / "run.log").open("wb") as log:
            subprocess.run(run, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=PATIENCE, check=False)
    # Flower's exit code does not tell whether a run failed.
    if not (folder / "model.safetensors").is_file():
        sys.exit(f"the run left no model; the end of its log:\n{(folder / 'run.log').read_text(errors='replace')[-2000:]}")
    print(f"the model is in {folder / 'model.safetensors'}")


def main(words: list[str]) -> None:
    """Read the command line."""
    for tool in ("openssl", "ssh-keygen"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is not installed, and makes the certificates and keys")
    folder = Path(words[0] if words else tempfile.mkdtemp()).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    deploy(folder, int(words[1]) if len(words) > 1 else 2)


if __name__ == "__main__":
    main(sys.argv[1:])

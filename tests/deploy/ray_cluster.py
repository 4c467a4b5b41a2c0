"""Holds a local Ray cluster with a dashboard until its standard input ends. It shares nothing with others here.

All ports are free ones (`ray.init` cannot be told that of the dashboard's agent, without which no job is taken); its
files are its own: jobs are sent to the cluster that was started last in a directory, which may be another.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

LIMIT_S = 120.0


def free_ports(count: int) -> list[int]:
    """All at once, so that they differ."""
    with ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def answers(url: str) -> bool:
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def main() -> None:
    gcs, dashboard, agent, agent_grpc, client, metrics, autoscaler = free_ports(7)
    command = ["start", "--head", "--block", "--num-cpus=4", "--include-dashboard=true", f"--port={gcs}"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    command += [f"--dashboard-agent-grpc-port={agent_grpc}", f"--ray-client-server-port={client}"]
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, as the paths of sockets must be
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("ray")), *command],
        env=os.environ
        | {
            "RAY_TMPDIR": directory,
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "DASHBOARD_METRIC_PORT": str(metrics),
            "AUTOSCALER_METRIC_PORT": str(autoscaler),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not answers(f"http://127.0.0.1:{dashboard}/api/version"):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit("the cluster did not come up")
            time.sleep(0.2)
        print(json.dumps({"dashboard": f"127.0.0.1:{dashboard}", "address": f"127.0.0.1:{gcs}"}), flush=True)
        sys.stdin.read()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()

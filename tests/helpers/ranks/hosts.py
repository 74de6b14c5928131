"""Two hosts, as network namespaces of this machine, and torchrun across them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PORT = 29400  # of the rendezvous; each namespace has its own ports


@dataclass(frozen=True, slots=True)
class Host:
    """One end of a cable.

    Attributes:
        name: Name of the network namespace.
        interface: Name of the network interface at this end.
        address: IP address of the interface.
    """

    name: str
    interface: str
    address: str

    def connect(self, is_connected: bool) -> None:
        """Set the link up or down; a link that is down loses packets silently."""
        _ip("-n", self.name, "link", "set", self.interface, "up" if is_connected else "down")

    def torchrun(
        self, folder: Path, log: Path, leader: Host, conf: str, environment: Mapping[str, str], *command: object
    ) -> subprocess.Popen[str]:
        """Start this host's part of a job on two hosts with one rank each.

        Args:
            folder: Working directory.
            log: File to which the output of torchrun and of the rank is appended.
            leader: Host whose torchrun serves the rendezvous.
            conf: Rendezvous configuration, as `key=value,...`.
            environment: Variables added to this process's environment.
            command: A Python file and its arguments.
        """
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{leader.address}:{PORT}", "--rdzv-id", "job"]
        is_host = f"is_host={str(self is leader).lower()}"  # both hosts have one host name
        place = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", self.address]
        launcher = [sys.executable, "-m", "torch.distributed.run", *place, *rendezvous]
        with log.open("a") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *launcher, "--rdzv-conf", f"{is_host},{conf}", *map(str, command)],
                cwd=folder,
                env={**os.environ, "GLOO_SOCKET_IFNAME": self.interface, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )


def missing_for_hosts() -> str | None:
    """Reason why this machine cannot run two hosts, or None."""
    if shutil.which("ip") is None:
        return "network namespaces are made with ip, of the package iproute2, which is not installed"
    name = f"probe-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"making network namespaces takes root's rights here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two connected hosts; delete them at exit."""
    key = uuid.uuid4().hex[:6]
    hosts = Host(f"host-a-{key}", f"a{key}", "10.77.0.1"), Host(f"host-b-{key}", f"b{key}", "10.77.0.2")
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        first, second = hosts
        ends = [first.interface, "netns", first.name, "type", "veth", "peer", "name", second.interface]
        _ip("link", "add", *ends, "netns", second.name)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            host.connect(True)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

"""Hosts with an sshd of their own, each in a network namespace. They share the files of this machine, so each has a
state directory of its own. Needs root.

    with ssh_hosts(tmp_path, 3) as hosts:
        hosts[0].name, hosts[0].folder
        hosts.options          # of the launcher
        hosts[0].die()         # as when its power fails

With `joined` they also reach each other, by `inside`, over a bridge in a namespace of its own: no firewall of this
machine is in between.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_letters

SSHD = "/usr/sbin/sshd"
_SERVER = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/pid
StrictModes no
UsePAM no
KexAlgorithms curve25519-sha256
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 100
SetEnv XDG_STATE_HOME={folder}/state GPUKEEPER_STATE={folder}/keeper GLOO_SOCKET_IFNAME=eth1 OMP_NUM_THREADS=1
"""
_CLIENT = """
Host {name}
    HostName {address}
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
    User root
"""


@dataclass
class SshHost:
    name: str
    address: str
    network: str
    folder: Path
    inside: str = ""  # its address for the other hosts
    server: subprocess.Popen[bytes] | None = None
    prepare: str = ":"  # shell commands before the server starts, in a mount namespace of its own

    @property
    def runs(self) -> Path:
        return self.folder / "state/gpukeeper-runs"

    def left(self) -> list[str]:
        """Runs and processes; what was started in this namespace is in it, whatever it calls itself."""
        found = [str(one.relative_to(self.runs)) for one in self.runs.glob("*/*")] if self.runs.exists() else []
        return found + [f"process {pid}: {title}" for pid, title in self.processes()]

    def processes(self) -> list[tuple[int, str]]:
        """Without the server and its connections."""
        listed = subprocess.run(["ip", "netns", "pids", self.network], capture_output=True, text=True, check=False)
        found = []
        for pid in map(int, listed.stdout.split()):
            with suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if title and not title.startswith(("sshd", SSHD)):
                    found.append((pid, title))
        return found

    def start(self) -> None:
        with (self.folder / "sshd.log").open("wb") as log:
            self.server = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.network, "sh", "-ec", f'{self.prepare}\nexec "$@"', "sh"),
                    *(SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        late = time.monotonic() + 90
        while "Server listening" not in (self.folder / "sshd.log").read_text():
            assert time.monotonic() < late, (self.folder / "sshd.log").read_text()
            assert self.server.poll() is None, (self.folder / "sshd.log").read_text()
            time.sleep(0.02)

    def die(self) -> None:
        """Everything in it, at once."""
        listed = subprocess.run(["ip", "netns", "pids", self.network], capture_output=True, text=True, check=True)
        for pid in map(int, listed.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.server is not None:
            self.server.wait(10)


@dataclass
class SshHosts:
    folder: Path
    hosts: list[SshHost] = field(default_factory=list)

    @property
    def options(self) -> dict[str, str]:
        return {"config": str(self.folder / "ssh_config"), "hosts": str(self.folder / "hosts"), "connect": "3s"}

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.hosts]

    def left(self) -> list[str]:
        return [f"{host.name}: {one}" for host in self.hosts for one in host.left()]

    def clients(self) -> list[str]:
        """ssh programs that use these hosts."""
        listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        return [line for line in listed.splitlines() if f"-F {self.folder}/ssh_config" in line]


@contextmanager
def ssh_hosts(
    folder: Path, count: int, *, joined: bool = False, prepare: Callable[[int, Path], str] = lambda number, own: ":"
) -> Iterator[SshHosts]:
    made = SshHosts(folder)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd drops its rights
    with ExitStack() as stack:
        switch = stack.enter_context(_switch()) if joined else ""
        for number in range(count):
            made.hosts.append(stack.enter_context(_host(folder, number, prepare)))
            if joined:
                _join(made.hosts[-1], number, switch)
        (folder / "ssh_config").write_text(
            "".join(_CLIENT.format(name=one.name, address=one.address, folder=one.folder) for one in made.hosts)
        )
        (folder / "hosts").write_text("# rack 1\n" + "".join(f"{one.name}\n" for one in made.hosts))
        yield made


@contextmanager
def _switch() -> Iterator[str]:
    network = f"gks{os.getpid()}s"
    _run("ip", "netns", "add", network)
    try:
        _run("ip", "-n", network, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", network, "link", "set", "bridge0", "up")
        yield network
    finally:
        _run("ip", "netns", "delete", network)


def _join(host: SshHost, number: int, switch: str) -> None:
    host.inside = f"{host.address.rpartition('.')[0]}.{129 + number}"
    port = f"port{number}"
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth1", "netns", host.network)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
    _run("ip", "-n", host.network, "address", "add", f"{host.inside}/25", "dev", "eth1")
    _run("ip", "-n", host.network, "link", "set", "eth1", "up")


@contextmanager
def _host(parent: Path, number: int, prepare: Callable[[int, Path], str]) -> Iterator[SshHost]:
    network, block = f"gks{os.getpid()}{ascii_letters[number]}", f"198.18.{os.getpid() % 250}.{4 * number}"
    ours, theirs = (f"{block.rpartition('.')[0]}.{4 * number + one}" for one in (1, 2))
    folder = parent / f"gpu{number}"
    (folder / "keeper").mkdir(mode=0o700, parents=True)
    (folder / "state").mkdir(mode=0o700)
    host = SshHost(f"gpu{number}", theirs, network, folder, prepare=prepare(number, folder))
    for name in ("host_key", "key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
    (folder / "known_hosts").write_text(f"{theirs} {(folder / 'host_key.pub').read_text()}")
    (folder / "sshd_config").write_text(_SERVER.format(address=theirs, folder=folder))
    try:
        _run("ip", "netns", "add", network)
        _run("ip", "link", "add", network, "type", "veth", "peer", "name", "eth0", "netns", network)
        _run("ip", "address", "add", f"{ours}/30", "dev", network)
        _run("ip", "link", "set", network, "up")
        for link in ("lo", "eth0"):
            _run("ip", "-n", network, "link", "set", link, "up")
        _run("ip", "-n", network, "address", "add", f"{theirs}/30", "dev", "eth0")
        host.start()
        yield host
    finally:
        with suppress(subprocess.CalledProcessError):
            host.die()
        for words in (("link", "delete", network), ("netns", "delete", network)):
            with suppress(subprocess.CalledProcessError):
                _run("ip", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

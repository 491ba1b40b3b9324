"""A private container engine for tests: its own folder, socket, bridge and GPUs. The host's own Docker stays out of it.

    with docker_engine() as engine:
        engine.run("train", gpus=[0], labels={"owner": "ann"})
        engine.exec("train", programs.shell(engine.gpus[0].path))
        engine.until(lambda: engine.holders(0))
        code, out, err = engine.gpukeeper("plan", policy="scope: {docker: {}}")

Set-up and assertions go through the engine's API and /proc, never through gpukeeper's code.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from gpukeeper.devices.driver.client import CHILD
from gpukeeper.devices.driver.facts import DriverReply as DriverAnswer
from gpukeeper.devices.driver.facts import DriverRequest, GpuFacts
from tests import forked
from tests.real.docker import fake_driver, images, kernel
from tests.real.docker.api import Answer, Api, Refused, json_lines, unframed
from tests.real.docker.fake_gpus import Block, a_block

FOREVER = ("sleep", "1000000")
LONGEST_SOCKET_PATH = 107
SHORT = "/tmp"  # where TMPDIR is too long for the sockets that engines make below their folder
ROOM_FOR_SOCKETS = 60
PREFIX = "gkbed-"
FAKE_DRIVER = Path(__file__).with_name("fake_driver.py")
T = TypeVar("T")


@dataclass(frozen=True)
class Ran:
    """How a command of gpukeeper ended. Unpacks as code, out, err."""

    code: int
    out: str
    err: str

    def __iter__(self) -> Iterator[Any]:
        return iter((self.code, self.out, self.err))


class PrivateEngine:
    """What Docker's and Podman's have in common. `name` of a container may be its id everywhere."""

    kind = ""
    container_cgroup = ""  # the folder of containers' cgroups

    def __init__(self, folder: Path, block: Block) -> None:
        self.folder, self.gpus = folder, block.gpus
        self.socket = folder / "s"
        assert len(bytes(self.socket)) <= LONGEST_SOCKET_PATH
        self.api = Api(str(self.socket))
        self.network = "host"
        self.start_seconds = 0.0
        self._engine: subprocess.Popen[bytes] | None = None
        self._beside: list[subprocess.Popen[Any]] = []
        self._cgroups: list[Path] = []
        self._images: set[str] = set()
        self._driver: dict[str, Any] = {}
        self._reset_driver()

    # The engine itself.

    @property
    def host(self) -> str:
        """For DOCKER_HOST."""
        return f"unix://{self.socket}"

    @property
    def log(self) -> str:
        with suppress(FileNotFoundError):
            return (self.folder / "log").read_text(errors="replace")
        return ""

    def start(self, deadline: float = 60) -> None:
        """Start the engine on its folder, and wait until it answers."""
        assert self._engine is None, "it runs already"
        began = time.monotonic()
        with (self.folder / "log").open("ab") as log:
            self._engine = subprocess.Popen(
                [*_ENDS_WITH_US, *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._environment(),
                start_new_session=True,
            )
        while not self.api.answers():
            late = time.monotonic() - began > deadline
            if late or self._engine.poll() is not None:
                what = f"did not answer within {deadline:.0f} s" if late else f"ended with {self._engine.returncode}"
                self.kill9()
                raise RuntimeError(f"{self.kind} {what}. The end of its log:\n{self.log[-2000:]}")
            time.sleep(0.05)
        self.start_seconds = time.monotonic() - began

    def shut_down(self, deadline: float = 40) -> None:
        """As an administrator does: SIGTERM. Docker stops its containers first, unless it has live-restore."""
        if self._engine is None:
            return
        self._engine.terminate()
        try:
            self._engine.wait(timeout=deadline)
        except subprocess.TimeoutExpired:
            self._engine.kill()
            self._engine.wait(timeout=10)
        self._engine = None

    def kill9(self) -> None:
        """As a crash does: the engine is gone in the middle of whatever it does; containers run on without it."""
        if self._engine is None:
            return
        self._engine.kill()
        self._engine.wait(timeout=10)
        self._engine = None

    def restart(self) -> None:
        self.shut_down()
        self.start()

    @property
    def engine_pid(self) -> int:
        assert self._engine is not None, "it does not run"
        return self._engine.pid

    @property
    def runs(self) -> bool:
        return self._engine is not None and self._engine.poll() is None

    def clear(self) -> None:
        """Between tests: an engine that runs, no containers, volumes, processes beside it or ledger, a sane driver."""
        self._end_beside()
        shutil.rmtree(self.folder / "state", ignore_errors=True)
        self._reset_driver()
        if not self.runs:
            self._engine = None
            self.start()
        self._remove_containers()
        for volume in (self.api.must("GET", "/volumes") or {}).get("Volumes") or []:
            self.api.call("DELETE", f"/volumes/{volume['Name']}", query={"force": 1})

    def close(self) -> None:
        """Containers are removed and the engine ends; what a killed one left goes with the folder."""
        self._end_beside()
        if self.runs:
            with suppress(OSError, Refused):
                self._remove_containers()
        self.shut_down()

    # Containers, set up.

    def run(self, name: str, **how: Any) -> str:
        """Create and start; the full id. See `create` for how."""
        made = self.create(name, **how)
        self.api.must("POST", f"/containers/{made}/start")
        return made

    def create(
        self,
        name: str,
        *,
        image: str = "box:1",
        cmd: Sequence[str] = FOREVER,
        labels: Mapping[str, str] | None = None,
        gpus: Sequence[int] = (),
        asks: Literal["all"] | int | Sequence[int] | None = None,
        restart: str = "no",
        rm: bool = False,
        user: str = "",
        binds: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        init: bool = False,
        stop_signal: str | None = None,
        stop_timeout: int | None = None,
        network: str | None = None,
        ports: Mapping[int, int] | None = None,
        config: Mapping[str, object] | None = None,
        host_config: Mapping[str, object] | None = None,
    ) -> str:
        """`gpus`: indexes of `engine.gpus`, given as devices: these run. `asks`: device requests (`--gpus`), which the
        engine accepts and cannot start without NVIDIA's runtime. `ports`: in the container to on the host (0: any).
        `config` and `host_config` add raw fields of the API."""
        self.load(image)
        body: dict[str, object] = {
            "Image": image,
            "Cmd": list(cmd),
            "Labels": dict(labels or {}),
            "User": user,
            "Env": [f"{key}={value}" for key, value in (env or {}).items()],
            "Tty": tty,
            "OpenStdin": tty,
            "ExposedPorts": {f"{port}/tcp": {} for port in ports or {}},
            "HostConfig": {
                "Devices": [_device(self.gpus[index].path) for index in gpus],
                "DeviceRequests": [] if asks is None else [self._request(asks)],
                "RestartPolicy": {"Name": restart},
                "AutoRemove": rm,
                "Binds": list(binds),
                "Init": init,
                "NetworkMode": network or self.network,
                "PortBindings": {f"{port}/tcp": [{"HostPort": str(to)}] for port, to in (ports or {}).items()},
                **(host_config or {}),
            },
            **({"StopSignal": stop_signal} if stop_signal else {}),
            **({"StopTimeout": stop_timeout} if stop_timeout is not None else {}),
            **(config or {}),
        }
        return str(self.api.must("POST", "/containers/create", body, query={"name": name})["Id"])

    def start_container(self, name: str) -> Answer:
        """The engine's answer: starting what `asks` for GPUs fails, on purpose."""
        return self.api.call("POST", f"/containers/{name}/start")

    def stop_container(self, name: str, timeout: int = 10) -> Answer:
        return self.api.call("POST", f"/containers/{name}/stop", query={"t": timeout}, deadline=timeout + 30)

    def signal_container(self, name: str, signal_name: str = "KILL") -> Answer:
        return self.api.call("POST", f"/containers/{name}/kill", query={"signal": signal_name})

    def pause_container(self, name: str) -> None:
        self.api.must("POST", f"/containers/{name}/pause")

    def remove_container(self, name: str, *, force: bool = True) -> Answer:
        return self.api.call("DELETE", f"/containers/{name}", query={"force": int(force)}, deadline=60)

    def exec(
        self, name: str, cmd: Sequence[str], *, user: str = "", tty: bool = False, env: Mapping[str, str] | None = None
    ) -> int:
        """Start a program beside the container's own, as `docker exec -d` does; its pid on the host."""
        body = {"Cmd": list(cmd), "User": user, "Tty": tty, "Env": [f"{k}={v}" for k, v in (env or {}).items()]}
        made = self.api.must("POST", f"/containers/{name}/exec", body)["Id"]
        self.api.must("POST", f"/exec/{made}/start", {"Detach": True, "Tty": tty})
        return self.until(
            lambda: int(self.api.must("GET", f"/exec/{made}/json")["Pid"]), "the exec'd program has a pid"
        )

    def output(self, name: str, cmd: Sequence[str], *, user: str = "") -> tuple[int, str]:
        """Run a program in the container to its end: exit code and what it printed."""
        body = {"Cmd": list(cmd), "User": user, "AttachStdout": True, "AttachStderr": True}
        made = self.api.must("POST", f"/containers/{name}/exec", body)["Id"]
        raw = self.api.call("POST", f"/exec/{made}/start", {"Detach": False, "Tty": False}).raw
        self.until(lambda: not self.api.must("GET", f"/exec/{made}/json")["Running"], "the program ended")
        code = self.api.must("GET", f"/exec/{made}/json")["ExitCode"]
        return int(code), unframed(raw).decode("utf-8", "replace")

    def beside(self, cmd: Sequence[str], *, cgroup_of: str | None = None) -> int:
        """A process of the bare host, ended with the test; its pid. `cgroup_of`: put into the cgroup of this container
        id, which need not exist any more: what a removed container leaves behind."""
        child = subprocess.Popen(cmd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._beside.append(child)
        if cgroup_of is not None:
            # Of version 1 two controllers: most others ask for settings before they take a process.
            for root in (r for r in kernel.cgroup_roots() if r.name in ("cgroup", "devices", "pids")):
                folder = root / self.container_cgroup.format(id=cgroup_of)
                if not folder.exists():
                    folder.mkdir(parents=True)
                    self._cgroups.append(folder)
                (folder / "cgroup.procs").write_text(str(child.pid))
        return child.pid

    def load(self, image: str) -> None:
        """Import the image unless this engine has it."""
        if image in self._images or image not in images.CHANGES:
            return
        if not self.api.call("GET", f"/images/{image}/json").ok:
            repo, _, tag = image.partition(":")
            query = {"fromSrc": "-", "repo": repo, "tag": tag, "changes": images.CHANGES[image]}
            with images.tar_of(image) as tar:
                self.api.must("POST", "/images/create", iter(lambda: tar.read(2**20), b""), query=query, deadline=120)
            if not self.api.call("GET", f"/images/{image}/json").ok:  # Podman 4.3 forgets the tag
                self.api.must("POST", f"/images/{repo}:latest/tag", query={"repo": repo, "tag": tag})
        self._images.add(image)

    # What the engine and the kernel say.

    def inspect(self, name: str) -> dict[str, Any] | None:
        """None: there is no such container."""
        answer = self.api.call("GET", f"/containers/{name}/json")
        for _ in range(3):
            if answer.status < 500:
                break
            time.sleep(0.5)  # Podman was seen to fail once while a container ended
            answer = self.api.call("GET", f"/containers/{name}/json")
        if answer.status == 404:
            return None
        assert answer.ok, answer
        found: dict[str, Any] = answer.json
        return found

    def state(self, name: str) -> str | None:
        """created, running, paused, restarting, exited, dead; None when it is gone."""
        found = self.inspect(name)
        return None if found is None else str(found["State"]["Status"])

    def id(self, name: str) -> str:
        found = self.inspect(name)
        assert found is not None, f"{name} is gone"
        return str(found["Id"])

    def containers(self) -> dict[str, str]:
        """State by name, of all."""
        listed = self.api.must("GET", "/containers/json", query={"all": 1})
        return {one["Names"][0].lstrip("/"): one["State"] for one in listed}

    def logs(self, name: str) -> str:
        """Of a container without a terminal."""
        raw = self.api.must("GET", f"/containers/{name}/logs", query={"stdout": 1, "stderr": 1})
        return unframed(raw or b"").decode("utf-8", "replace")

    def port(self, name: str, inside: int) -> int:
        """Where a port of it is reached on the host."""
        found = self.inspect(name)
        assert found is not None, f"{name} is gone"
        return int(found["NetworkSettings"]["Ports"][f"{inside}/tcp"][0]["HostPort"])

    def pid(self, name: str) -> int:
        """Of its first process, on the host; 0 when it does not run."""
        found = self.inspect(name)
        return int(found["State"]["Pid"]) if found else 0

    def pids(self, name: str) -> list[int]:
        """All its processes, on the host, by their cgroup."""
        wanted = name if len(name) == 64 else self.id(name)
        return [pid for pid in kernel.all_pids() if wanted in kernel.read(pid, "cgroup")]

    def holders(self, gpu: int) -> list[int]:
        """The pids that have this one of `engine.gpus` open."""
        return [pid for pid in kernel.all_pids() if self.gpus[gpu].path in kernel.open_files(pid)]

    def events(self, since: float, *, container: str | None = None) -> list[dict[str, Any]]:
        """Of containers, from then (time.time()) until now."""
        filters: dict[str, list[str]] = {"type": ["container"]}
        if container:
            filters["container"] = [container]
        query = {"since": f"{since:.6f}", "filters": filters, **self._until_now()}
        return json_lines(self.api.call("GET", "/events", query=query).raw)

    def actions(self, since: float, *, container: str | None = None) -> list[str]:
        """The events' names alone: create, start, kill, die, stop, destroy …"""
        return [str(event["Action"]) for event in self.events(since, container=container)]

    @staticmethod
    def until(read: Callable[[], T], what: str = "it came true", deadline: float = 90) -> T:
        """Look until the answer is true, and return it."""
        ends = time.monotonic() + deadline
        while not (seen := read()):
            assert time.monotonic() < ends, f"not within {deadline:.0f} s: {what} (last seen: {seen!r})"
            time.sleep(0.05)
        return seen

    # GPUs and gpukeeper.

    def inventory(self) -> tuple[GpuFacts, ...]:
        """What the driver says of these GPUs, for adapters that take it as a value."""
        return msgspec.convert([fake_driver.inventory(gpu) for gpu in self._driver["gpus"]], tuple[GpuFacts, ...])

    def set_gpu(self, gpu: int, **facts: object) -> None:
        """What `engine.gpukeeper` hears of it from now on: busy (percent), memory_used_mib, pids, advice."""
        known = self._driver["gpus"][gpu]
        assert facts.keys() <= known.keys(), f"not facts of a pretended GPU: {facts.keys() - known.keys()}"
        known.update(facts)
        self._tell_driver()

    def child_says(self, about: str, answer: Mapping[str, object] | Sequence[str]) -> None:
        """The record that answers a question to the driver, or the command that runs in the place of its program."""
        self._driver["instead"][about] = answer if isinstance(answer, Mapping) else list(answer)
        self._tell_driver()

    def ask_child(self, about: str) -> DriverAnswer:
        """One answer of the program that asks the driver, as gpukeeper reads it."""
        command = [str(_interpreter()), *CHILD[1:]]
        question = msgspec.json.encode(DriverRequest(1, about)) + b"\n"
        asked = subprocess.run(
            command, input=question, env=self.environ(), stdout=subprocess.PIPE, timeout=30, check=True
        )
        return msgspec.json.decode(asked.stdout, type=DriverAnswer)

    def gpukeeper(
        self,
        *arguments: str,
        policy: str | None = None,
        env: Mapping[str, str] | None = None,
        deadline: float = 120,
        halt: tuple[str, str] | None = None,
    ) -> Ran:
        """Run the real command against this engine, with its own ledger: `engine.folder / "state"`. `halt`: a point and
        a name, where it kills itself (`tests/halt.py`)."""
        program, *words = ("gpukeeper", *arguments) if halt is None else ("tests.halt", *halt, *arguments)
        environ, python = self._with_policy(policy, env), str(_interpreter())
        return Ran(*forked.run(program, words, environ, "", deadline, folder=self.folder, executable=python))

    def popen(
        self,
        *arguments: str,
        policy: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """The same, running: for `serve`, and to be killed in the middle. It ends with the test at the latest."""
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _WRAPPER, str(_interpreter()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._with_policy(policy, env),
            cwd=self.folder,
        )
        self._beside.append(child)
        return child

    def _with_policy(self, policy: str | None, env: Mapping[str, str] | None) -> dict[str, str]:
        environ = self.environ() | dict(env or {})
        if policy is not None:
            file = self.folder / "policy.yaml"
            file.write_text(policy)
            environ["GPUKEEPER_POLICY"] = str(file)
        return environ

    def environ(self) -> dict[str, str]:
        """Of a gpukeeper that sees this engine and nothing else of this machine's platforms."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(_OF_THIS_MACHINE) and not forked.is_of_the_interpreter(key)
        }
        return kept | {
            "HOME": str(self.folder),  # with the driver.json that fake_driver reads
            "DOCKER_HOST": self.host,
            "GPUKEEPER_STATE": str(self.folder / "state"),
            "COLUMNS": "200",
            "TERM": "dumb",
            "NO_COLOR": "1",
        }

    # Below here: how.

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        return {}

    def _until_now(self) -> dict[str, str]:
        """How an answer with events is made to end."""
        return {"until": f"{time.time():.6f}"}

    def _request(self, asks: Literal["all"] | int | Sequence[int]) -> dict[str, object]:
        request: dict[str, object] = {"Driver": "", "Capabilities": [["gpu"]], "Options": {}}
        if asks == "all":
            return request | {"Count": -1}
        if isinstance(asks, int):
            return request | {"Count": asks}
        return request | {"DeviceIDs": [self.gpus[int(index)].uuid for index in asks]}

    def _reset_driver(self) -> None:
        self._driver = {"gpus": [gpu.at_rest() for gpu in self.gpus], "instead": {}}
        self._tell_driver()

    def _tell_driver(self) -> None:
        """At once: a child may read at any time."""
        new = self.folder / "driver.new"
        new.write_text(json.dumps(self._driver))
        new.replace(self.folder / "driver.json")

    def _end_beside(self) -> None:
        for child in self._beside:
            child.kill()
            child.wait(timeout=10)
            for pipe in (child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()
        self._beside.clear()
        for folder in self._cgroups:
            kernel.remove_cgroup(folder)
        self._cgroups.clear()

    def _remove_containers(self) -> None:
        for one in self.api.must("GET", "/containers/json", query={"all": 1}):
            self.api.call("DELETE", f"/containers/{one['Id']}", query={"force": 1, "v": 1}, deadline=60)


class DockerEngine(PrivateEngine):
    kind = "dockerd"
    container_cgroup = "docker/{id}"

    def __init__(self, folder: Path, block: Block, *, live_restore: bool = False) -> None:
        super().__init__(folder, block)
        self.live_restore = live_restore
        self.bridge = f"gkbed{block.number}"
        # Not docker0, which is the host's own Docker's. Without the right to make one: no network in containers.
        self.network = "bridge" if _make_bridge(self.bridge, f"198.18.{block.number}.1/24") else "none"
        (folder / "daemon.json").write_text("{}")

    def close(self) -> None:
        super().close()
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)

    def kill9(self) -> None:
        """Its containerd dies with it. Where nobody reaps that, the next dockerd would take it for a living one."""
        file = self.folder / "exec/containerd/containerd.pid"
        pid = int(file.read_text()) if file.exists() else 0
        super().kill9()
        if pid:
            self.until(lambda: kernel.state(pid) in ("", "Z"), "its containerd ended")
            file.unlink(missing_ok=True)
        # dockerd refuses to start while any process has the pid in this file; on a busy machine a new one soon has it.
        (self.folder / "pid").unlink(missing_ok=True)

    def restart(self, *, live_restore: bool | None = None) -> None:
        self.shut_down()
        self.live_restore = self.live_restore if live_restore is None else live_restore
        self.start()

    def _command(self) -> list[str]:
        return [
            "dockerd",
            *("--config-file", f"{self.folder}/daemon.json"),  # not the host's
            *("--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec"),
            *("--pidfile", f"{self.folder}/pid", "--host", self.host),
            # Where the host runs a containerd, dockerd uses that one: keep apart from its containers.
            *("--containerd-namespace", self.bridge, "--containerd-plugins-namespace", f"{self.bridge}-plugins"),
            # The same paths below /sys/fs/cgroup on every host.
            *("--exec-opt", "native.cgroupdriver=cgroupfs"),
            # The host's firewall and routes are not ours.
            *("--iptables=false", "--ip-masq=false", "--ip-forward=false"),
            *("--bridge", self.bridge if self.network == "bridge" else "none"),
            *(["--live-restore"] if self.live_restore else []),
        ]


class PodmanEngine(PrivateEngine):
    kind = "podman"
    container_cgroup = "libpod_parent/libpod-{id}"

    def _command(self) -> list[str]:
        return [
            *("podman", "--root", f"{self.folder}/root", "--runroot", f"{self.folder}/runroot"),
            *("--tmpdir", f"{self.folder}/tmp", "--cgroup-manager", "cgroupfs", "--events-backend", "file"),
            *("system", "service", "--time", "0", self.host),
        ]

    def _environment(self) -> dict[str, str]:
        config = self.folder / "containers.conf"
        config.write_text(_PODMAN_CONFIG.format(folder=self.folder))
        return {"CONTAINERS_CONF": str(config)}

    def _until_now(self) -> dict[str, str]:
        """Podman 4.3 loses events at random when `until` is in the past; it has its own word, unknown to Docker."""
        return {"stream": "false"}

    def shut_down(self, deadline: float = 40) -> None:
        super().shut_down(deadline)
        self.socket.unlink(missing_ok=True)

    def kill9(self) -> None:
        super().kill9()
        self.socket.unlink(missing_ok=True)  # it is left behind, and the next service would not start on it


@contextmanager
def docker_engine(*, live_restore: bool = False, in_memory: str = "") -> Iterator[DockerEngine]:
    """dockerd, started. At most one for each process: they are not light. `in_memory`: at most so much for its images,
    for those with many files."""
    with _place() as (folder, block):
        if in_memory:
            (folder / "data").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={in_memory}", "tmpfs", folder / "data"], check=True)
        engine = DockerEngine(folder, block, live_restore=live_restore)
        try:
            engine.start()
            yield engine
        finally:
            engine.close()


@contextmanager
def podman_engine() -> Iterator[PodmanEngine]:
    with _place() as (folder, block):
        engine = PodmanEngine(folder, block)
        try:
            engine.start()
            yield engine
        finally:
            engine.close()


@contextmanager
def _place() -> Iterator[tuple[Path, Block]]:
    """A short folder, removed afterwards; what a killed run with the same number left is removed before."""
    usual = tempfile.gettempdir()
    short = usual if len(usual) + ROOM_FOR_SOCKETS <= LONGEST_SOCKET_PATH else SHORT
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=short))
    try:
        with a_block(folder) as block:
            if block.last_folder is not None and block.last_folder.name.startswith(PREFIX):
                kernel.remove_all_of(block.last_folder)
            yield folder, block
    finally:
        kernel.remove_all_of(folder)


@functools.cache
def _interpreter() -> Path:
    """What gpukeeper starts to query the driver."""
    folder = Path(tempfile.mkdtemp(prefix="gkpython-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{FAKE_DRIVER}" "$@"\n')
    script.chmod(0o755)
    return script


# A test run that is killed takes its engine with it; the engine ends its containers.
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM")
_OF_THIS_MACHINE = ("GPUKEEPER_", "DOCKER_", "XDG_", "KUBE", "RAY_")
# gpukeeper starts the program that asks the driver by sys.executable: it gets another one before its first import. The
# file that GPUKEEPER_BED_AHEAD names has how many seconds its clock is ahead.
_WRAPPER = """
import datetime, os, pathlib, sys
sys.executable = sys.argv.pop(1)
sys.argv[0] = "gpukeeper"
from gpukeeper.__main__ import run
from gpukeeper.blocking import SystemClock
ahead, right = os.environ.get("GPUKEEPER_BED_AHEAD"), SystemClock.now
if ahead:
    SystemClock.now = lambda self: right(self) + datetime.timedelta(seconds=int(pathlib.Path(ahead).read_text()))
run()
"""
_PODMAN_CONFIG = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
netns = "host"
log_driver = "k8s-file"

[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
static_dir = "{folder}/static"
tmp_dir = "{folder}/tmp"
volume_path = "{folder}/volumes"
"""


def _device(path: str) -> dict[str, str]:
    return {"PathOnHost": path, "PathInContainer": path, "CgroupPermissions": "rwm"}


def _make_bridge(name: str, address: str) -> bool:
    subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)  # of a run that was killed
    steps = (
        ["link", "add", name, "type", "bridge"],
        ["addr", "add", address, "dev", name],
        ["link", "set", name, "up"],
    )
    with suppress(FileNotFoundError):
        return all(subprocess.run(["ip", *step], capture_output=True, check=False).returncode == 0 for step in steps)
    return False

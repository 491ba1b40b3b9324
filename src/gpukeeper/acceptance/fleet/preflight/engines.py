"""What hosts over ssh, a Docker engine and a Ray cluster report of themselves, and what would prevent a run. Pure."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from gpukeeper.acceptance.fleet.preflight.facts import (
    Finding,
    counted,
    failed,
    gibibytes,
    named,
    passed,
    quantity,
    unchecked,
    warning,
)
from gpukeeper.model.unknown import Unknown

K = TypeVar("K", str, int)
COMMANDS_MAX = 12  # of one finding; the others are alike
CLOCK_S = 2.0
FREE_MIN, FREE_LOW = 128 * 1024**2, 1024**3  # bytes: a log and a report; with some space for other users


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`destination`: the words of ssh behind its name. `silent`: why the host did not reply; then nothing is known."""

    node: str
    destination: str
    code: str = ""  # of `silent`: unreachable, python, refused
    silent: str = ""
    python: str = ""
    gpus: int = 0
    driver: str = ""  # empty: none is loaded
    program: str | None = None
    version: str = ""
    broken: str = ""  # why the program does not run
    shm: int | None = None  # bytes
    free: int | None = None
    folder: str = ""
    refused: str = ""  # why a run cannot be created there
    clock_s: float = 0.0  # at least so much ahead of this machine, or behind it


class HostsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`unmet`: by host, why it does not reach the first one; None: it was not asked for."""

    program: str = "gpukeeper"
    version: str = ""  # of this machine
    gpus_per_node: int | None = None
    shm: str = "16Gi"
    together: bool = False
    master: str = ""
    port: int = 29500
    unmet: dict[str, str] | None = None


def judge_hosts(hosts: Sequence[HostFacts], request: HostsRequest) -> tuple[Finding, ...]:
    there = [one for one in hosts if not one.silent]
    rules = (_program, _folder, _host_gpus, _drivers, _host_memory, _clocks)
    return (
        *_reached(hosts),
        *(finding for rule in rules if there for finding in rule(there, request)),
        *_master(hosts, request),
    )


# Logins. The words are those of OpenSSH.

_CAUSES: tuple[tuple[str, str, str], ...] = (
    ("has changed", "the host key is another one than before", "ssh-keygen -R {address}"),
    ("host key", "the host key is not known", "ssh {destination} true"),
    ("permission denied", "the login was refused", "ssh-copy-id {destination}"),
    ("too many authentication failures", "the login was refused", "ssh-copy-id {destination}"),
    ("could not resolve", "the name does not resolve", "getent hosts {address}"),
    ("connection refused", "no ssh server listens there", "nc -vz {address} {port}"),
    ("timed out", "there was no reply in time", "nc -vz {address} {port}"),
    ("did not reply", "there was no reply in time", "ssh -v {destination} true"),
    ("no route to host", "there is no route to it", "ip route get {address}"),
)
_OTHER = ("it cannot be reached", "ssh -v {destination} true")
_EXPLAINED = {
    "the host key is not known": "Compare the fingerprint that ssh shows with that of the host, then answer yes",
    "the host key is another one than before": "If the host was not installed again, somebody may be in between",
}


def _reached(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[HostFacts]] = defaultdict(list)
    for one in hosts:
        if one.code == "unreachable":
            groups[_cause(one.silent)].append(one)
    for (cause, command), some in groups.items():
        more = f". {_EXPLAINED[cause]}" if cause in _EXPLAINED else ""
        words = f"{_names(some)}: {cause}{more}. The first: {some[0].silent}"
        yield failed("host-login", words, _listed_hosts(some), _each(some, partial(_filled, command)))
    if some := [one for one in hosts if one.code == "python"]:
        words = f"{_names(some)}: no usable Python. The first: {some[0].silent}"
        yield failed("host-python", words, _listed_hosts(some), ["repeat with --option python=PATH"])
    if some := [one for one in hosts if one.silent and one.code not in ("unreachable", "python")]:
        yield unchecked("host-login", f"{_names(some)}: {some[0].silent}", _listed_hosts(some), _each(some, _verbose))
    there = [one for one in hosts if not one.silent]
    if there:
        yield passed(
            "host-login", f"{counted(len(there), 'host')} of {len(hosts)} can be reached", _listed_hosts(there)
        )
        versions = sorted({one.python for one in there})
        yield passed("host-python", f"Python {named(versions)} on {counted(len(there), 'host')}")


def _cause(words: str) -> tuple[str, str]:
    return next(((cause, how) for sign, cause, how in _CAUSES if sign in words.lower()), _OTHER)


def _filled(how: str, one: HostFacts) -> str:
    address, port = _address(one.destination)
    for name, value in (("{destination}", one.destination), ("{address}", address), ("{port}", port)):
        how = how.replace(name, value)
    return how


def _address(destination: str) -> tuple[str, str]:
    words = shlex.split(destination)
    port = words[words.index("-p") + 1] if "-p" in words else "22"
    return words[-1].rpartition("@")[2], port


# What a run needs


def _program(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    if some := [one for one in hosts if one.program is None]:
        fix = _each(some, lambda one: _on(one, "python3 -m pip install --user gpukeeper"))
        words = f"{_names(some)}: {request.program} is not on the PATH of a login over ssh"
        yield failed("host-program", words, _listed_hosts(some), [*fix, "repeat with --option program=PATH"])
    if some := [one for one in hosts if one.broken]:
        words = f"{_names(some)}: {some[0].program} does not run: {some[0].broken}"
        yield failed(
            "host-program", words, _listed_hosts(some), _each(some, lambda one: _on(one, f"{one.program} --version"))
        )
    runs = [one for one in hosts if one.program is not None and not one.broken]
    by_version = _by(runs, lambda one: one.version)
    others = [one for one in runs if one.version != request.version]
    if others:
        words = "; ".join(f"{version} on {_names(some)}" for version, some in sorted(by_version.items()))
        fix = _each(others, lambda one: _on(one, "python3 -m pip install --user --upgrade gpukeeper"))
        yield warning("host-program", f"{words}; here it is {request.version}", _listed_hosts(others), fix)
    elif runs:
        yield passed("host-program", f"{request.version} runs on {counted(len(runs), 'host')}")


def _folder(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    for one in hosts:
        if one.refused:
            words, _, command = one.refused.partition("; change it: ")
            yield failed("host-folder", f"{one.node}: {words}", [one.node], [_on(one, command)])
    unknown = [one for one in hosts if one.free is None]
    if unknown:
        fix = _each(unknown, lambda one: _on(one, "df -h ."))
        yield unchecked("host-folder", f"{_names(unknown)}: the free space is not known", _listed_hosts(unknown), fix)
    known = [(one, one.free) for one in hosts if one.free is not None]
    for least, found in ((FREE_MIN, failed), (FREE_LOW, warning)):
        above = FREE_MIN if found is warning else 0
        if some := [(one, free) for one, free in known if above <= free < least]:
            words = "; ".join(f"{one.node} has {_size(free)} free for {one.folder}" for one, free in some[:3])
            nodes = [one for one, _ in some]
            fix = _each(nodes, lambda one: _on(one, "du -xh --max-depth=2 . | sort -h | tail"))
            yield found("host-folder", f"{_names(nodes)}: {words}. Less than {_size(least)}", _listed_hosts(nodes), fix)
    good = [free for one, free in known if free >= FREE_LOW and not one.refused]
    if good:
        yield passed("host-folder", f"{_size(min(good))} or more are free on {counted(len(good), 'host')}")


def _host_gpus(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    wanted, by_count = request.gpus_per_node, _by(hosts, lambda one: one.gpus)
    bad = [one for one in hosts if (one.gpus != wanted if wanted is not None else one.gpus == 0)]
    if bad:
        words = "; ".join(f"{_names(some)}: {counted(count, 'GPU')}" for count, some in _by(bad, _count).items())
        end = f", {wanted} are requested" if wanted is not None else ""
        yield failed("host-gpus", f"{words}{end}", _listed_hosts(bad), _each(bad, _listed))
    elif len(by_count) > 1:
        words = "; ".join(f"{count} on {_names(some)}" for count, some in sorted(by_count.items()))
        yield warning("host-gpus", f"the number of GPUs differs: {words}", _listed_hosts(hosts), _each(hosts, _listed))
    else:
        yield passed("host-gpus", f"{counted(hosts[0].gpus, 'GPU')} on each of {counted(len(hosts), 'host')}")


def _drivers(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    by_version = _by(hosts, lambda one: one.driver)
    without = by_version.pop("", [])
    if without:
        words = f"{_names(without)}: no NVIDIA driver is loaded"
        yield failed(
            "host-drivers", words, _listed_hosts(without), _each(without, lambda one: _on(one, "sudo modprobe nvidia"))
        )
    if len(by_version) > 1:
        words = "; ".join(f"{version} on {_names(some)}" for version, some in sorted(by_version.items()))
        with_one = [one for one in hosts if one.driver]
        show = _each(with_one, lambda one: _on(one, "cat /proc/driver/nvidia/version"))
        yield warning("host-drivers", f"driver versions differ: {words}", _listed_hosts(with_one), show)
    elif by_version:
        ((version, some),) = by_version.items()
        yield passed("host-drivers", f"driver {version} on {counted(len(some), 'host')}")


def _host_memory(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    size = quantity(request.shm)
    if size is None:
        yield unchecked("host-shm", f"{request.shm} is not a size such as 16Gi", (), ["repeat with --shm 16Gi"])
        return
    if unknown := [one for one in hosts if one.shm is None]:
        fix = _each(unknown, lambda one: _on(one, "df -h /dev/shm"))
        yield unchecked(
            "host-shm", f"{_names(unknown)}: the size of /dev/shm is not known", _listed_hosts(unknown), fix
        )
    known = [(one, one.shm) for one in hosts if one.shm is not None]
    small = [(one, shm) for one, shm in known if shm < size]
    if small:
        nodes = [one for one, _ in small]
        words = f"{_names(nodes)}: /dev/shm has {_size(min(shm for _, shm in small))}, less than {gibibytes(size)}"
        how = f"sudo mount -o remount,size={int(size)} /dev/shm"
        yield warning("host-shm", words, _listed_hosts(nodes), _each(nodes, lambda one: _on(one, how)))
    elif known:
        yield passed("host-shm", f"{gibibytes(size)} or more in /dev/shm of {counted(len(known), 'host')}")


def _clocks(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    late = [one for one in hosts if abs(one.clock_s) > CLOCK_S]
    if late:
        words = ", ".join(
            f"{one.node} is {abs(one.clock_s):.0f} s {'ahead' if one.clock_s > 0 else 'behind'}" for one in late[:5]
        )
        fix = _each(late, lambda one: _on(one, "sudo timedatectl set-ntp true"))
        yield warning("host-clock", f"clocks differ from this machine: {words}", _listed_hosts(late), fix)
    else:
        yield passed("host-clock", f"no clock is known to differ by more than {CLOCK_S:g} s")


# Together


def _master(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    if not request.together:
        return
    where = f"{request.master} port {request.port}"
    if request.unmet is None:
        why = "all hosts must reply first" if len(hosts) > 1 else "a run over all hosts together needs two or more"
        yield unchecked("host-master", f"who reaches {where}: {why}", (), ["repeat when the findings above are fixed"])
        return
    by_node = {one.node: one for one in hosts}
    for node, problem in request.unmet.items():
        fix = [
            _on(by_node[node], f"nc -vz {shlex.quote(request.master)} {request.port}"),
            "repeat with --option master=ADDRESS, an address of the first host that all others reach",
        ]
        if node == hosts[0].node:
            fix = [_on(by_node[node], f"ss -ltnp 'sport = :{request.port}'")]
        yield failed("host-master", f"{node}: {problem}", [node], fix)
    met = len(hosts) - 1 - len(request.unmet)
    if not request.unmet:
        words = f"{counted(met, 'host')} reach {hosts[0].node} at {where} and at another port"
        yield passed("host-master", f"{words}. Paths between the others were not tried")


# Words


def _by(hosts: Iterable[HostFacts], key: Callable[[HostFacts], K]) -> dict[K, list[HostFacts]]:
    found: dict[K, list[HostFacts]] = defaultdict(list)
    for one in hosts:
        found[key(one)].append(one)
    return found


def _count(one: HostFacts) -> int:
    return one.gpus


def _listed_hosts(hosts: Iterable[HostFacts]) -> list[str]:
    return [one.node for one in hosts]


def _names(hosts: Iterable[HostFacts]) -> str:
    return named(_listed_hosts(hosts))


def _on(one: HostFacts, command: str) -> str:
    return f"ssh {one.destination} {shlex.quote(command)}"


def _listed(one: HostFacts) -> str:
    return _on(one, "nvidia-smi -L")


def _verbose(one: HostFacts) -> str:
    return f"ssh -v {one.destination} true"


def _each(hosts: Sequence[HostFacts], command: Callable[[HostFacts], str]) -> list[str]:
    made = [command(one) for one in hosts[:COMMANDS_MAX]]
    more = len(hosts) - COMMANDS_MAX
    return [*made, f"# the same on {more} more: {named(_listed_hosts(hosts[COMMANDS_MAX:]), 20)}"] if more > 0 else made


def _size(amount: int) -> str:
    found = quantity(str(amount))
    assert found is not None
    return gibibytes(found)


CONFIGURE = "sudo nvidia-ctk runtime configure --runtime=docker"
RESTART = "sudo systemctl restart docker"
CDI = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`devices`: of CDI, as the engine lists them; older engines list none. `gpus`: of this machine, by its driver."""

    address: str
    version: str = ""
    runtimes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    memory: int = 0  # bytes
    rootless: bool = False
    image: bool | Unknown = False  # whether it is there
    gpus: int | Unknown = 0


def judge_engine(facts: EngineFacts, image: str, shm: str) -> tuple[Finding, ...]:
    return (
        passed("engine", f"{facts.address} is reachable: version {facts.version}"),
        *_docker_gpus(facts),
        *_docker_image(facts, image),
        *_docker_memory(facts, shm),
    )


def _docker_gpus(facts: EngineFacts) -> Iterator[Finding]:
    if isinstance(facts.gpus, Unknown):
        yield unchecked("engine-gpus", facts.gpus, (), ["nvidia-smi -L"])
    elif facts.gpus == 0:
        yield failed("engine-gpus", "this machine has no GPU that the driver shows", (), ["nvidia-smi -L"])
    else:
        yield passed("engine-gpus", f"{facts.gpus} GPUs by the driver of this machine")
    listed = [one for one in facts.devices if one.startswith("nvidia.com/gpu")]
    if "nvidia" in facts.runtimes:
        yield passed("engine-runtime", "the nvidia runtime is registered")
    elif listed:
        yield passed("engine-runtime", f"CDI devices: {named(listed)}", listed)
    else:
        words = f"neither the nvidia runtime nor a CDI device of NVIDIA; runtimes: {named(facts.runtimes) or 'none'}"
        yield failed("engine-runtime", f"{words}. --gpus all fails", facts.runtimes, [CONFIGURE, RESTART, CDI])


def _docker_image(facts: EngineFacts, image: str) -> Iterator[Finding]:
    if not image:
        yield unchecked("engine-image", "no image was given", (), ["repeat with --image IMAGE"])
    elif isinstance(facts.image, Unknown):
        yield unchecked("engine-image", facts.image, [image], [f"docker image inspect {image}"])
    elif facts.image:
        yield passed("engine-image", f"{image} is there", [image])
    else:
        yield failed("engine-image", f"{image} is not there", [image], [f"docker pull {image}"])


def _docker_memory(facts: EngineFacts, shm: str) -> Iterator[Finding]:
    size = quantity(shm)
    have = quantity(str(facts.memory))
    if size is None or not have:
        why = f"{shm} is not a size such as 16Gi" if size is None else "the engine does not report its memory"
        yield unchecked("engine-shm", why, (), ["repeat with --shm 16Gi"])
    elif size * 2 > have:
        words = f"--shm-size of {gibibytes(size)} is more than half of {gibibytes(have)}"
        yield warning("engine-shm", words, (), ["repeat with --shm 8Gi"])
    else:
        yield passed("engine-shm", f"--shm-size of {gibibytes(size)} fits into {gibibytes(have)}")
    if facts.rootless:
        words = "the engine is rootless: it cannot raise the limit of locked memory, which RDMA needs"
        line = "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf"
        yield warning("engine-memlock", words, (), [line])
    else:
        yield passed("engine-memlock", "the engine runs as root: --ulimit memlock=-1 is possible")


OLDEST_RAY = (2, 40)  # which was tried


class RayNodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`excluded`: why the launcher would leave it out; a sentence. `held`: GPUs that work holds now."""

    node: str
    node_id: str
    alive: bool = True
    message: str = ""  # of a dead one
    gpus: float = 0.0
    held: float = 0.0
    excluded: str = ""


class RayFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`own`: the version of Ray on this machine; empty: it has none. `chosen`: the nodes that the run would use."""

    address: str
    version: str
    own: str = ""
    dead: tuple[RayNodeFacts, ...] | Unknown = ()
    chosen: tuple[RayNodeFacts, ...] | Unknown = ()
    held: Unknown | None = None  # why it is not known what holds GPUs
    jobs: int | Unknown = 0


def judge_ray(facts: RayFacts, gpus_per_node: int | None) -> tuple[Finding, ...]:
    return (
        passed("ray-cluster", f"{facts.address} is reachable: Ray {facts.version}"),
        *_ray_versions(facts),
        *_ray_jobs(facts),
        *_ray_dead(facts),
        *_ray_nodes(facts, gpus_per_node),
    )


def _ray_versions(facts: RayFacts) -> Iterator[Finding]:
    found = re.match(r"(\d{1,4})\.(\d{1,4})", facts.version)
    if found is None:
        yield unchecked("ray-version", f'"{facts.version}" is not a version of Ray', (), ["ray --version"])
    elif (int(found[1]), int(found[2])) < OLDEST_RAY:
        words = f"Ray {facts.version} is older than {OLDEST_RAY[0]}.{OLDEST_RAY[1]}, the oldest release that was tried"
        yield warning("ray-version", words, (), ['pip install -U "ray[default]"'])
    elif facts.own not in ("", facts.version):
        words = f"Ray {facts.version} there, {facts.own} here. A run does not use it here; the ray commands below do"
        yield warning("ray-version", words, (), [f'pip install "ray[default]=={facts.version}"'])
    else:
        here = "the same here" if facts.own else "a run needs no Ray here"
        yield passed("ray-version", f"Ray {facts.version}; {here}")


def _ray_jobs(facts: RayFacts) -> Iterator[Finding]:
    if isinstance(facts.jobs, Unknown):
        yield unchecked("ray-jobs", f"the Jobs API: {facts.jobs.why}", (), [f"ray job list --address {facts.address}"])
    else:
        words = f"the Jobs API lists {counted(facts.jobs, 'job')}. Only a run proves that it accepts one"
        yield passed("ray-jobs", words)


def _ray_dead(facts: RayFacts) -> Iterator[Finding]:
    listing = f"ray list nodes --address {facts.address}"
    if isinstance(facts.dead, Unknown):
        yield unchecked("ray-dead", facts.dead, (), [listing])
    elif facts.dead:
        names = [one.node for one in facts.dead]
        why = f". The first: {facts.dead[0].message}" if facts.dead[0].message else ""
        start = "ray start --address HEAD:6379"
        yield warning("ray-dead", f"{named(names)}: dead, so not tested{why}", names, [listing, start])


def _ray_nodes(facts: RayFacts, gpus_per_node: int | None) -> Iterator[Finding]:
    if isinstance(facts.chosen, Unknown):
        yield unchecked("ray-nodes", facts.chosen, (), [f"ray list nodes --address {facts.address}"])
        return
    if not facts.chosen:
        yield failed("ray-nodes", "no node that is alive announces a GPU", (), ["ray start --num-gpus N on each node"])
        return
    good = [one for one in facts.chosen if not one.excluded]
    for one in facts.chosen:
        if one.excluded:
            again = f"ray stop && ray start --address HEAD:6379 --num-gpus {gpus_per_node or 'N'}"
            yield failed("ray-gpus", f"{one.node}: {one.excluded}", [one.node], [again])
    if not good:
        return
    yield passed("ray-nodes", f"{counted(len(good), 'node')} alive", [one.node for one in good])
    yield from _ray_gpus(good, gpus_per_node)
    yield from _ray_held(facts, good, gpus_per_node)


def _ray_gpus(good: Sequence[RayNodeFacts], gpus_per_node: int | None) -> Iterator[Finding]:
    names = [one.node for one in good]
    counts = sorted({one.gpus for one in good})
    if gpus_per_node is not None and (more := [one for one in good if one.gpus > gpus_per_node]):
        words = f"{named(one.node for one in more)}: more than {gpus_per_node} GPUs are announced; Ray chooses which"
        fix = f"repeat with --gpus-per-node {max(one.gpus for one in more):g}"
        yield warning("ray-gpus", words, [one.node for one in more], [fix])
    elif len(counts) > 1:
        words = "; ".join(f"{count:g} on {named(one.node for one in good if one.gpus == count)}" for count in counts)
        yield warning("ray-gpus", f"the number of GPUs differs: {words}", names, ["repeat with --gpus-per-node N"])
    else:
        yield passed("ray-gpus", f"{counts[0]:g} GPUs on each of {counted(len(good), 'node')}", names)


def _ray_held(facts: RayFacts, good: Sequence[RayNodeFacts], gpus_per_node: int | None) -> Iterator[Finding]:
    show = [f"ray list actors --address {facts.address} --filter state=ALIVE", f"ray status --address {facts.address}"]
    if facts.held is not None:
        yield unchecked("ray-free", f"what holds GPUs: {facts.held.why}", (), show)
        return
    busy = [one for one in good if one.gpus - one.held < (one.gpus if gpus_per_node is None else gpus_per_node)]
    if busy:
        words = ", ".join(f"{one.held:g} of {one.gpus:g} on {one.node}" for one in busy[:5])
        text = f"GPUs are taken now: {words}. The run would wait for them (option wait, 5m)"
        yield warning("ray-free", text, [one.node for one in busy], show)
    else:
        yield passed("ray-free", f"the GPUs of {counted(len(good), 'node')} are free")

"""What hosts report of themselves over ssh, and what would prevent a run on them. Pure."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from gpukeeper.acceptance.fleet.preflight.finding import Finding, counted, failed, named, passed, unchecked, warning
from gpukeeper.acceptance.fleet.preflight.quantity import gibibytes, quantity

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
    rules = (_program, _folder, _gpus, _drivers, _memory, _clocks)
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
        yield failed("host-login", words, _nodes(some), _each(some, partial(_filled, command)))
    if some := [one for one in hosts if one.code == "python"]:
        words = f"{_names(some)}: no usable Python. The first: {some[0].silent}"
        yield failed("host-python", words, _nodes(some), ["repeat with --option python=PATH"])
    if some := [one for one in hosts if one.silent and one.code not in ("unreachable", "python")]:
        yield unchecked("host-login", f"{_names(some)}: {some[0].silent}", _nodes(some), _each(some, _verbose))
    there = [one for one in hosts if not one.silent]
    if there:
        yield passed("host-login", f"{counted(len(there), 'host')} of {len(hosts)} can be reached", _nodes(there))
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
        yield failed("host-program", words, _nodes(some), [*fix, "repeat with --option program=PATH"])
    if some := [one for one in hosts if one.broken]:
        words = f"{_names(some)}: {some[0].program} does not run: {some[0].broken}"
        yield failed("host-program", words, _nodes(some), _each(some, lambda one: _on(one, f"{one.program} --version")))
    runs = [one for one in hosts if one.program is not None and not one.broken]
    by_version = _by(runs, lambda one: one.version)
    others = [one for one in runs if one.version != request.version]
    if others:
        words = "; ".join(f"{version} on {_names(some)}" for version, some in sorted(by_version.items()))
        fix = _each(others, lambda one: _on(one, "python3 -m pip install --user --upgrade gpukeeper"))
        yield warning("host-program", f"{words}; here it is {request.version}", _nodes(others), fix)
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
        yield unchecked("host-folder", f"{_names(unknown)}: the free space is not known", _nodes(unknown), fix)
    known = [(one, one.free) for one in hosts if one.free is not None]
    for least, found in ((FREE_MIN, failed), (FREE_LOW, warning)):
        above = FREE_MIN if found is warning else 0
        if some := [(one, free) for one, free in known if above <= free < least]:
            words = "; ".join(f"{one.node} has {_size(free)} free for {one.folder}" for one, free in some[:3])
            nodes = [one for one, _ in some]
            fix = _each(nodes, lambda one: _on(one, "du -xh --max-depth=2 . | sort -h | tail"))
            yield found("host-folder", f"{_names(nodes)}: {words}. Less than {_size(least)}", _nodes(nodes), fix)
    good = [free for one, free in known if free >= FREE_LOW and not one.refused]
    if good:
        yield passed("host-folder", f"{_size(min(good))} or more are free on {counted(len(good), 'host')}")


def _gpus(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    wanted, by_count = request.gpus_per_node, _by(hosts, lambda one: one.gpus)
    bad = [one for one in hosts if (one.gpus != wanted if wanted is not None else one.gpus == 0)]
    if bad:
        words = "; ".join(f"{_names(some)}: {counted(count, 'GPU')}" for count, some in _by(bad, _count).items())
        end = f", {wanted} are requested" if wanted is not None else ""
        yield failed("host-gpus", f"{words}{end}", _nodes(bad), _each(bad, _listed))
    elif len(by_count) > 1:
        words = "; ".join(f"{count} on {_names(some)}" for count, some in sorted(by_count.items()))
        yield warning("host-gpus", f"the number of GPUs differs: {words}", _nodes(hosts), _each(hosts, _listed))
    else:
        yield passed("host-gpus", f"{counted(hosts[0].gpus, 'GPU')} on each of {counted(len(hosts), 'host')}")


def _drivers(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    by_version = _by(hosts, lambda one: one.driver)
    without = by_version.pop("", [])
    if without:
        words = f"{_names(without)}: no NVIDIA driver is loaded"
        yield failed(
            "host-drivers", words, _nodes(without), _each(without, lambda one: _on(one, "sudo modprobe nvidia"))
        )
    if len(by_version) > 1:
        words = "; ".join(f"{version} on {_names(some)}" for version, some in sorted(by_version.items()))
        with_one = [one for one in hosts if one.driver]
        show = _each(with_one, lambda one: _on(one, "cat /proc/driver/nvidia/version"))
        yield warning("host-drivers", f"driver versions differ: {words}", _nodes(with_one), show)
    elif by_version:
        ((version, some),) = by_version.items()
        yield passed("host-drivers", f"driver {version} on {counted(len(some), 'host')}")


def _memory(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    size = quantity(request.shm)
    if size is None:
        yield unchecked("host-shm", f"{request.shm} is not a size such as 16Gi", (), ["repeat with --shm 16Gi"])
        return
    if unknown := [one for one in hosts if one.shm is None]:
        fix = _each(unknown, lambda one: _on(one, "df -h /dev/shm"))
        yield unchecked("host-shm", f"{_names(unknown)}: the size of /dev/shm is not known", _nodes(unknown), fix)
    known = [(one, one.shm) for one in hosts if one.shm is not None]
    small = [(one, shm) for one, shm in known if shm < size]
    if small:
        nodes = [one for one, _ in small]
        words = f"{_names(nodes)}: /dev/shm has {_size(min(shm for _, shm in small))}, less than {gibibytes(size)}"
        how = f"sudo mount -o remount,size={int(size)} /dev/shm"
        yield warning("host-shm", words, _nodes(nodes), _each(nodes, lambda one: _on(one, how)))
    elif known:
        yield passed("host-shm", f"{gibibytes(size)} or more in /dev/shm of {counted(len(known), 'host')}")


def _clocks(hosts: Sequence[HostFacts], request: HostsRequest) -> Iterator[Finding]:
    late = [one for one in hosts if abs(one.clock_s) > CLOCK_S]
    if late:
        words = ", ".join(
            f"{one.node} is {abs(one.clock_s):.0f} s {'ahead' if one.clock_s > 0 else 'behind'}" for one in late[:5]
        )
        fix = _each(late, lambda one: _on(one, "sudo timedatectl set-ntp true"))
        yield warning("host-clock", f"clocks differ from this machine: {words}", _nodes(late), fix)
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


def _nodes(hosts: Iterable[HostFacts]) -> list[str]:
    return [one.node for one in hosts]


def _names(hosts: Iterable[HostFacts]) -> str:
    return named(_nodes(hosts))


def _on(one: HostFacts, command: str) -> str:
    return f"ssh {one.destination} {shlex.quote(command)}"


def _listed(one: HostFacts) -> str:
    return _on(one, "nvidia-smi -L")


def _verbose(one: HostFacts) -> str:
    return f"ssh -v {one.destination} true"


def _each(hosts: Sequence[HostFacts], command: Callable[[HostFacts], str]) -> list[str]:
    made = [command(one) for one in hosts[:COMMANDS_MAX]]
    more = len(hosts) - COMMANDS_MAX
    return [*made, f"# the same on {more} more: {named(_nodes(hosts[COMMANDS_MAX:]), 20)}"] if more > 0 else made


def _size(amount: int) -> str:
    found = quantity(str(amount))
    assert found is not None
    return gibibytes(found)

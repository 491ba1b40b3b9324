"""hosts.yaml: the servers of `gpukeeper fleet`, and what is wanted on each. Strict; all problems at once, with lines.

A setting of a host wins over that of its group, and that over `defaults`. Names of hosts are those of OpenSSH's own
configuration, which also has jump hosts, keys and everything else about connections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gpukeeper.clients.ssh import Host, host
from gpukeeper.config import document, problems
from gpukeeper.config.fields import TEXT, Form
from gpukeeper.config.load import load_file
from gpukeeper.config.problems import Problem, did_you_mean
from gpukeeper.config.units import shown
from gpukeeper.config.validation import read_section
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, PolicyError, UsageError
from gpukeeper.rollout.plan import DIRECTORY, EVERY, PYTHON, Bundle, PolicyText, Unit, Wanted


def _matching(pattern: str) -> Form:
    def read(value: Any) -> str:
        if not re.fullmatch(pattern, TEXT.read(value)):
            raise _refused(value, f"String should match pattern '^{pattern}$'")
        return str(value)

    return Form(read, str, {})


def _read_unit(value: Any) -> str:
    if value not in tuple(Unit):
        raise _refused(value, "Input should be 'systemd', 'timer' or 'cron'")
    return str(value)


def _read_port(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refused(value, "Input should be a valid integer")
    return value


def _refused(value: Any, rule: str) -> ValueError:
    return ValueError(f"{shown(value)} cannot be used: {rule}.")


# In unit files and in a remote command.
Directory = Annotated[str, _matching(r"/[A-Za-z0-9_./+-]{1,200}")]
Python = Annotated[str, _matching(r"[A-Za-z0-9_/][A-Za-z0-9_/.+-]{0,200}")]
UnitName = Annotated[str, Form(_read_unit, str, {})]
Port = Annotated[int, Form(_read_port, int, {})]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """May be given in defaults, in a group and for a host."""

    bundle: Annotated[str | None, "The file of make bundle that is installed; relative to this file."] = None
    policy: Annotated[str | None, "The policy of the server; relative to this file."] = None
    unit: Annotated[UnitName | None, "How passes are started: systemd, timer or cron."] = None
    every: Annotated[str | None, "With timer and cron: how often, such as 1h."] = None
    directory: Annotated[Directory | None, "Where gpukeeper is installed on the server."] = None
    python: Annotated[Python | None, "The interpreter on the server."] = None
    timeout: Annotated[str | None, "The most time for one request to the server, such as 10m."] = None
    metrics: Annotated[str | None, "The address at which the daemon serves metrics, such as 127.0.0.1:9101."] = None


class HostSection(ServerSettings, frozen=True, kw_only=True):
    address: Annotated[str | None, "Another name or address for ssh than the name of the host."] = None
    user: Annotated[str | None, "The user to log in as."] = None
    port: Annotated[Port | None, "The port of the ssh server."] = None
    group: Annotated[str | None, "The name of a group below groups."] = None


class HostsFile(msgspec.Struct, frozen=True, kw_only=True):
    defaults: Annotated[ServerSettings, "Settings of all hosts."] = ServerSettings()
    groups: Annotated[Mapping[str, ServerSettings], "Settings of some hosts, by the name of the group."] = {}
    hosts: Annotated[Mapping[str, HostSection], "The servers, by their names."]


class Servers(msgspec.Struct, frozen=True):
    source: str
    wanted: tuple[Wanted, ...]


ReadBundle = Callable[[Path], Bundle]


def load_hosts(path: Path, read_bundle: ReadBundle) -> Servers:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}. Nothing was done.") from error
    return Servers(str(path), _Reader(path, read_bundle).read(text))


class _Reader:
    def __init__(self, path: Path, read_bundle: ReadBundle) -> None:
        self._path, self._read_bundle = path, read_bundle
        self._found: list[Problem] = []
        self._bundles: dict[str, Bundle | None] = {}
        self._policies: dict[str, PolicyText | None] = {}

    def read(self, text: str) -> tuple[Wanted, ...]:
        read = document.read(text, foreign=True)
        self._found += read.problems
        tree = self._with_names(read) if isinstance(read.tree, dict) else None
        if tree is None and not self._found:
            self._found.append(Problem(((),), "there are no settings. Write hosts: and below it the servers.", line=1))
        wanted: tuple[Wanted, ...] = ()
        if not self._found:
            file, self._found = read_section(HostsFile, tree, of_policy=False)
            wanted = () if file is None else tuple(self._wanted(file))
        if self._found:
            lines = problems.messages_in_order(self._found, str(self._path), read.lines)
            raise UsageError("\n".join((*lines, "Nothing was done. All settings: docs/reference/hosts-file.md")))
        return wanted

    def _with_names(self, read: document.Document) -> dict[str, Any]:
        """A host without settings may be written as `gpu01:`, and hosts may be a list of names."""
        tree = dict(read.tree)
        hosts = tree.get("hosts")
        if isinstance(hosts, list) and all(isinstance(one, str) for one in hosts):
            for number, name in enumerate(hosts):
                line = read.lines["hosts", number]
                if ("hosts", name) in read.lines:
                    self._complain(("hosts", number), f"{name} is in the list twice. Remove one of them.")
                read.lines["hosts", name] = line
            tree["hosts"] = {name: {} for name in hosts}
        elif isinstance(hosts, dict):
            tree["hosts"] = {name: {} if given is None else given for name, given in hosts.items()}
        return tree

    def _wanted(self, file: HostsFile) -> Iterator[Wanted]:
        if not file.hosts:
            self._complain(("hosts",), "has no server. Write at least one name below it.")
        for name, section in file.hosts.items():
            where = ("hosts", name)
            if section.group is not None and section.group not in file.groups:
                hint = did_you_mean(section.group, list(file.groups), "groups")
                self._complain((*where, "group"), f'"{section.group}" is not in groups. {hint}')
            place = self._host(name, section)
            if place is not None:
                yield self._one(place, [section, file.groups.get(section.group or ""), file.defaults], where)

    def _host(self, name: str, section: HostSection) -> Host | None:
        user = f"{section.user}@" if section.user else ""
        port = f":{section.port}" if section.port is not None else ""
        try:
            found = host(f"{user}{section.address or name}{port}")
            host(name)
        except ValueError as error:
            self._complain(("hosts", name), f"{error}.")
            return None
        return msgspec.structs.replace(found, node=name)

    def _one(self, place: Host, layers: list[ServerSettings | None], where: problems.Path) -> Wanted:
        def value(name: str) -> Any:
            given = (getattr(layer, name) for layer in layers if layer is not None)
            return next((one for one in given if one is not None), None)

        wanted = Wanted(
            host=place,
            unit=Unit(value("unit") or Unit.SYSTEMD),
            every=value("every") or EVERY,
            directory=(value("directory") or DIRECTORY).rstrip("/"),
            python=value("python") or PYTHON,
            metrics=value("metrics") or "",
            policy=self._policy(value("policy"), where),
            bundle=self._bundle(value("bundle"), where),
        )
        wanted = self._with_timeout(wanted, value("timeout"), where)
        self._check(wanted, where)
        return wanted

    def _check(self, wanted: Wanted, where: problems.Path) -> None:
        """What `setup host` would refuse on the server."""
        if wanted.unit is Unit.SYSTEMD:
            return
        if wanted.metrics:
            self._complain((*where, "metrics"), f"unit {wanted.unit} serves no metrics. Remove one of them.")
        if not self._found and (wanted.policy is None or wanted.policy.mode != "enforce"):
            words = (
                f"unit {wanted.unit} acts only by a policy in mode enforce. Name such a policy, or use unit: systemd."
            )
            self._complain((*where, "unit"), words)
        try:
            reading.span(wanted.every)
        except ValueError as error:
            self._complain((*where, "every"), f'"{wanted.every}" {error}. Write it like 30m or 1h.')

    def _with_timeout(self, wanted: Wanted, given: str | None, where: problems.Path) -> Wanted:
        if given is None:
            return wanted
        try:
            return msgspec.structs.replace(wanted, timeout=reading.span(given))
        except ValueError as error:
            self._complain((*where, "timeout"), f'"{given}" {error}. Write it like 10m.')
            return wanted

    def _policy(self, name: str | None, where: problems.Path) -> PolicyText | None:
        if name is not None and name not in self._policies:
            self._policies[name] = None
            path = self._path.parent / name
            if not path.exists():
                words = f"{path} does not exist. Write it, or leave it out: a server without a policy gets a first one"
                self._complain((*where, "policy"), f"{words} in mode plan.")
                return None
            try:
                loaded = load_file(path)
            except PolicyError as error:
                self._complain((*where, "policy"), f"the policy has problems: {' '.join(error.problems)}")
            else:
                if loaded.file.exemptions_from is not None:
                    words = "is not copied to servers. Write the exemptions in the policy itself."
                    self._complain((*where, "policy"), f"{name}: exemptions_from {words}")
                text, mode = path.read_text(encoding="utf-8"), loaded.policy.mode.value
                self._policies[name] = PolicyText(source=name, text=text, mode=mode)
        return None if name is None else self._policies[name]

    def _bundle(self, name: str | None, where: problems.Path) -> Bundle | None:
        if name is not None and name not in self._bundles:
            self._bundles[name] = None
            try:
                self._bundles[name] = self._read_bundle(self._path.parent / name)
            except KeeperError as error:
                self._complain((*where, "bundle"), f"{error}.")
        return None if name is None else self._bundles[name]

    def _complain(self, path: problems.Path, sentence: str) -> None:
        self._found.append(Problem((path,), sentence))

"""Which nodes exist now, and what to search for on each, according to the policy and to raylets. Reads only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpukeeper.blocking import in_thread
from gpukeeper.model.decision import Unseen
from gpukeeper.model.policy import Policy, Temporary
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray import nodes, reach, sessions, translate
from gpukeeper.platforms.ray.connect import (
    DEFAULT_TMP,
    RAY,
    Containers,
    NodeContainer,
    Timeouts,
    no_containers,
    temporary_folders,
)
from gpukeeper.platforms.ray.nodes import Node, NodeListing, RayRoot
from gpukeeper.platforms.ray.processes import Everyone, Process, read_all
from gpukeeper.platforms.ray.reach import NodeAccess
from gpukeeper.platforms.ray.settings import settings_of
from gpukeeper.platforms.ray.survey import SurveyOptions
from gpukeeper.platforms.ray.visit import ProtectedPaths

HOST = "host"  # the platform that may own this machine's own roots
CONTAINERS = "containers that are nodes"


class DiscoveredNodes(msgspec.Struct, frozen=True):
    """What exists at one moment."""

    everyone: tuple[Process, ...]
    found: NodeListing
    listed: bool  # whether every container that the policy lists as a node is known

    def node(self, name: str) -> Node | None:
        return next((one for one in self.found.nodes if one.name == name), None)


class Discovery:
    def __init__(
        self,
        place: str,
        policy: Policy,
        containers: Containers,
        environ: Mapping[str, str],
        *,
        proc: str = "/proc",
        everyone: Everyone = read_all,
        timeouts: Timeouts | None = None,
        directories: Sequence[str] = (),
    ) -> None:
        """`directories`: of gpukeeper itself."""
        self._place, self.policy, self._containers = place, policy, containers
        self._environ, self._proc, self._everyone = environ, proc, everyone
        self._timeouts = timeouts or Timeouts()
        self._folders = tuple(directories)
        self._reported: dict[str, dict[str, frozenset[int]]] = {}  # by node: every Ray root ever reported there

    async def discover(self) -> DiscoveredNodes:
        """OSError or TimeoutError if not even the processes can be listed."""
        listed = await self._containers(settings_of(self.policy).workers)
        inside: tuple[NodeContainer, ...] = () if isinstance(listed, Unknown) else tuple(listed)
        here = await in_thread(lambda: self.find(inside), self._timeouts.processes)
        if isinstance(listed, Unknown):
            unseen = (*here.found.unseen, Unseen(CONTAINERS, listed.why))
            return DiscoveredNodes(here.everyone, msgspec.structs.replace(here.found, unseen=unseen), False)
        return here

    def wants(self, node: Node, running_sessions: Mapping[str, str] | None = None) -> SurveyOptions:
        settings = settings_of(self.policy)
        return SurveyOptions(
            ray_roots=self._ray_roots(node),
            temporary=self._temporary(),
            logs=settings.logs,
            too_full=self.policy.disk.high,
            running_sessions=running_sessions or {},
            needed=self._needed(),
        )

    def find(self, inside: tuple[NodeContainer, ...]) -> DiscoveredNodes:
        """Blocks."""
        everyone = self._everyone()
        paths = tuple(dict.fromkeys((DEFAULT_TMP, *settings_of(self.policy).roots)))
        found = nodes.find(everyone, inside, self._place, nodes.sees_our_files(self._proc, paths))
        ours = tuple(one for one in found.nodes if not one.is_machine or self._counts(one))
        queried = self._containers is not no_containers
        return DiscoveredNodes(everyone, msgspec.structs.replace(found, nodes=ours), queried)

    def again(self, name: str, uid: str, door: NodeAccess) -> Node | None:
        """With its current processes. Blocks. None: the process through which its files were reached has ended."""
        inside = () if door.pid is None else (NodeContainer(name, door.pid, uid),)
        now = self.find(inside).node(name)
        return now if now is not None and now.door == door else None

    def _counts(self, machine: Node) -> bool:
        """This machine is a node if a raylet runs here, or one left a root behind."""
        if machine.raylets:
            return True
        with reach.opened(machine.door, self._proc) as root:
            return any(_is_there(root, one) for one in self._ray_roots(machine))

    def _ray_roots(self, node: Node) -> tuple[RayRoot, ...]:
        directories = temporary_folders(self._environ) if node.is_machine else (DEFAULT_TMP,)
        usual = [
            str(Path(directory, RAY)) for directory in dict.fromkeys((*directories, *settings_of(self.policy).roots))
        ]
        reported = self._reported.setdefault(node.uid, {})
        for path, uids in nodes.reported_roots(node).items():
            reported[path] = reported.get(path, frozenset()) | uids
        by_word = tuple(RayRoot(path, uids) for path, uids in reported.items() if path not in usual)
        known = {*usual, *reported}
        named = (os.path.normpath(path) for path in settings_of(self.policy).roots)
        itself = tuple(RayRoot(path, maybe=True) for path in dict.fromkeys(named) if path not in known)
        return (*(RayRoot(path) for path in usual), *by_word, *itself)

    def _temporary(self) -> tuple[Temporary, ...]:
        return tuple(one for one in self.policy.temporary if one.platform == translate.PLATFORM)

    def _needed(self) -> ProtectedPaths:
        policy = self.policy
        nodes = (*settings_of(policy).roots, *(one.root for one in self._temporary()))
        trees = tuple(one.root for one in policy.temporary if one.platform == HOST)
        reports = policy.reports.roots
        captured = () if policy.capture.to is None else (policy.capture.to,)
        hosts = (*reports, *(trees if HOST in policy.scope else ()))
        machine = (*trees, *reports, *captured, *self._folders)
        return ProtectedPaths(machine, nodes, hosts)


def names_here(place: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes that can be found without a container engine. OSError if processes cannot be listed."""
    here = Discovery(place, Policy(), no_containers, environ)
    return tuple(node.name for node in here.find(()).found.nodes)


def _is_there(root: int, one: RayRoot) -> bool:
    try:
        if not one.maybe:
            reach.identity(root, one.path)
            return True
        with reach.folder(root, one.path) as (fd, _, _):
            return sessions.is_temp_dir(fd)
    except OSError:
        return False

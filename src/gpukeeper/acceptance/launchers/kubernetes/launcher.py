"""Acceptance runs on a cluster: start, find again by run id, state of every node, logs, removal by uid."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec
from ruamel.yaml import YAML

from gpukeeper.acceptance.fleet.launcher import Removal, RunSpec, RunSummary, Target, flags
from gpukeeper.acceptance.launchers.kubernetes import forms, objects, status
from gpukeeper.acceptance.launchers.kubernetes.objects import Item, KubernetesOptions, Plan, is_label_value, options_of
from gpukeeper.acceptance.launchers.kubernetes.status import (
    ENDED,
    NO_MEMBERS,
    Facts,
    Found,
    Members,
    is_described,
    members_by_run,
    needs_events,
    needs_nodes,
    node_of,
    reason_of_node,
    statuses,
    without_controller,
)
from gpukeeper.clients.kubernetes.api import EVENTS, NODES, PODS, TRAINING_RUNTIMES, Api, Resource
from gpukeeper.clients.kubernetes.exchange import ApiError
from gpukeeper.clients.kubernetes.wire import DetailedPod, Event, Meta, Node, PartialObject, Pod
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown

LOG_PART = 8 * 1024 * 1024  # bytes of one request
LOG_PARTS_MAX = 64  # requests for one log


async def read_log(
    api: Api, name: str, namespace: str, container: str, *, previous: bool = False, part: int = LOG_PART
) -> bytes:
    """Asks again from the time of the last whole line on, and drops the lines that it has already."""
    lines: list[bytes] = []
    since = ""
    for _ in range(LOG_PARTS_MAX):
        found = await api.log(
            name, namespace=namespace, container=container, previous=previous, since=since, timestamps=True, limit=part
        )
        new = found.splitlines(keepends=True)
        cut = len(found) >= part
        if cut and len(new) > 1:
            new.pop()  # a part of a line; it comes again
        overlap = _overlap(lines, new)
        lines += new[overlap:]
        if not cut or overlap == len(new):
            break
        since = lines[-1].partition(b" ")[0].decode("ascii", "replace")
    return b"".join(line.partition(b" ")[2] for line in lines)


def _overlap(have: list[bytes], new: list[bytes]) -> int:
    """How many lines at the beginning of `new` are those at the end of `have`. `since` has a precision of seconds."""
    if not have or not new:
        return 0
    most = min(len(have), len(new))
    for count in range(most, 0, -1):
        if have[-count] == new[0] and have[-count:] == new[:count]:
            return count
    return 0


T = TypeVar("T")
PATIENCE = 90  # seconds until a removal counts as not done: the grace period of the pods, and the garbage collector
PAUSE = 1.0
NODES_EVERY = 12  # statuses; every minute while a run is polled
KINDS = (*forms.ROOTS, *forms.BESIDE)
FIRST = (TRAINING_RUNTIMES,)  # a TrainJob is refused without it


class KubernetesLauncher:
    """A run is the objects of one namespace: that of the option, or of the login. Others are not read."""

    engine = "kubernetes"

    def __init__(
        self,
        api: Api,
        options: Mapping[str, str],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        patience: float = PATIENCE,
    ) -> None:
        self._api, self._options = api, options_of(options)
        self._sleep, self._patience = sleep, patience
        self._members: dict[str, Members] = {}  # of the last status, by run
        self._pods: dict[str, list[DetailedPod]] = {}  # those that count, of the last status
        self._absent: set[Resource] = set()  # kinds that the cluster does not have
        self._statuses = 0  # read so far
        self._listed_nodes: dict[str, Node] | None = None

    @property
    def requests(self) -> int:
        """Sent so far."""
        return self._api.requests

    @property
    def _namespace(self) -> str:
        return self._options.namespace or self._api.namespace

    @property
    def _placed(self) -> KubernetesOptions:
        return msgspec.structs.replace(self._options, namespace=self._namespace)

    async def targets(self, spec: RunSpec) -> tuple[Target, ...]:
        nodes = (await self._api.list(NODES, Node, labels=spec.selector)).items
        if spec.selector and not nodes:
            raise UsageError(
                f'No node has the labels "{spec.selector}". Nothing was created. '
                "`kubectl get nodes --show-labels` lists them."
            )
        living = "status.phase!=Succeeded,status.phase!=Failed"
        try:
            pods = (await self._api.list(PODS, Pod, fields=living)).items
        except ApiError as refused:
            if refused.status != 403:
                raise
            pods = None
        return status.choose_targets(spec, self._placed, nodes, pods)

    def render(self, spec: RunSpec, targets: Sequence[Target]) -> str:
        """For kubectl. A DaemonSet for a label then names no nodes; one that is started does, so that a node which is
        cordoned or in use is left out."""
        return as_yaml([one.manifest for one in self.items(spec, targets, by_label=forms.can_name_a_label(spec))])

    def items(self, spec: RunSpec, targets: Sequence[Target], *, by_label: bool = False) -> list[Item]:
        """Exactly what is created. What others need comes first."""
        form = spec.form or forms.DEFAULT
        if form not in forms.FORMS:
            raise UsageError(f'--as "{form}": unknown form. Forms: {", ".join(forms.FORMS)}. Nothing was created.')
        if not is_label_value(spec.run) or not spec.run:
            raise UsageError(f'The run id "{spec.run}" cannot be a label. Use letters, digits, dashes and dots.')
        whole = msgspec.structs.replace(spec, form=form)
        made = forms.items(Plan(whole, self._placed, () if by_label else tuple(targets), by_label=by_label))
        return sorted(made, key=lambda one: not one.owned)

    async def start(self, spec: RunSpec, targets: Sequence[Target]) -> None:
        """The first root is created before its Service, which so has an owner from its first moment: killed at any
        point, nothing is left that no root takes along. Only a runtime must exist before its root."""
        items = self.items(spec, targets)
        await self._require({one.resource for one in items})
        have = await self._existing(spec.run, {one.resource for one in items})
        root = next(one for one in items if not one.owned)
        missing = sum(_key(one) not in have for one in items)
        for one in (*(one for one in items if one.resource in FIRST), root):
            if _key(one) not in have:
                have[_key(one)] = await self._create_one(spec, one)
        reference = _reference(root, have[_key(root)])
        await self._create(spec, [_owned(one, reference) for one in items if _key(one) not in have], have, missing)
        await self._own(items, have, reference)

    async def runs(self) -> tuple[RunSummary, ...] | Unknown:
        try:
            return await self._summaries(objects.OF_RUNS)
        except PlatformError as error:
            return Unknown(str(error))

    async def run(self, run: str) -> RunSummary | None:
        if not run or not is_label_value(run):
            return None
        return next(iter(await self._summaries(objects.run_selector(run))), None)

    async def output(self, spec: RunSpec, node: str) -> bytes | Unknown:
        pods = [one for one in self._pods.get(spec.run, ()) if node_of(one) == node]
        try:
            if not pods or any(one.status.phase not in ENDED for one in pods):
                mine = self._members.get(spec.run) or await self._of_run(spec.run)
                listed = await self._list(PODS, DetailedPod, objects.run_selector(spec.run), f"spec.nodeName={node}")
                pods = [one for one in listed if node_of(one) == node and mine.has(one)] or pods
            parts = [
                await self._log(one) for one in sorted(pods, key=lambda one: one.metadata.creation_timestamp or "")
            ]
        except PlatformError as error:
            return Unknown(f"the log of node {node} cannot be read: {error}")
        if not pods:
            return Unknown(f"node {node} has no pod of run {spec.run} any more, and its log is gone with it")
        return b"".join(parts)

    async def remove(self, run: str) -> Removal:
        """By uid: what carries the description of the run; what that controls goes with it. The rest is named."""
        if not run or not is_label_value(run):
            return Removal()
        mine = await self._of_run(run)
        limit = asyncio.Semaphore(self._options.at_once)
        refused: dict[str, str] = {}

        async def end(one: Found) -> None:
            async with limit:
                try:
                    await self._api.delete(one.resource, one.meta.name, one.meta.uid, namespace=self._namespace)
                except PlatformError as error:
                    refused[one.meta.uid] = str(error)

        await asyncio.gather(*(end(one) for one in mine.own))
        still = await self._until_gone(run, mine, set(refused))
        words = refused | {uid: why for uid, (_, why) in still.items()}
        gone = [one for one in mine.own if one.meta.uid not in words]
        left = await self._foreign(run, mine)
        left += [(one.words, words[one.meta.uid]) for one in mine.own if one.meta.uid in words]
        known = {one.meta.uid for one in mine.own}
        left += [named for uid, named in still.items() if uid not in known]
        self._forget(run)
        return Removal(removed=tuple(sorted(one.words for one in gone)), left=tuple(left))

    async def close(self) -> None:
        await self._api.close()

    # Creating

    async def _require(self, resources: set[Resource]) -> None:
        for one in sorted(resources, key=lambda one: one.words):
            served = await self._api.serves(one) if forms.is_optional(one) else True
            if isinstance(served, Unknown):
                raise PlatformError(f"{served.why}. Nothing was created.")
            if not served:
                raise UsageError(
                    f"The cluster has no {one.kind} ({one.api_version}). Nothing was created. "
                    f"Install {forms.OPTIONAL[one.words]}, or use --as job."
                )

    async def _existing(self, run: str, resources: set[Resource]) -> dict[tuple[str, str], Meta]:
        found = {}
        for one in sorted(resources, key=lambda one: one.words):
            listed = await self._api.list(
                one, PartialObject, namespace=self._namespace, labels=objects.run_selector(run)
            )
            mine = [root.metadata for root in listed.items if is_described(root.metadata, run)]
            found.update({(one.words, meta.name): meta for meta in mine})
        return found

    async def _create(
        self, spec: RunSpec, items: Sequence[Item], have: dict[tuple[str, str], Meta], missing: int
    ) -> None:
        """`missing`: with those that were created alone before, so that a missing right is not reported 512 times."""
        limit = asyncio.Semaphore(self._options.at_once)
        failures: list[PlatformError] = []

        async def create(item: Item) -> None:
            async with limit:
                try:
                    have[_key(item)] = await self._create_one(spec, item)
                except PlatformError as error:
                    failures.append(error)

        await asyncio.gather(*(create(one) for one in items))
        if failures:
            raise PlatformError(
                f"{len(failures)} of {missing} objects of run {spec.run} could not be created: {failures[0]}. "
                "The others run. The same command creates what is missing; "
                f"`gpukeeper accept remove {spec.run} {flags(spec)}` removes all."
            )

    async def _create_one(self, spec: RunSpec, item: Item) -> Meta:
        try:
            made = await self._api.create(item.resource, item.manifest, PartialObject, namespace=self._namespace)
            return made.metadata
        except ApiError as refused:
            if not refused.is_name_taken:
                raise
        found = await self._api.get(item.resource, _name(item), PartialObject, namespace=self._namespace)
        if found is None or not is_described(found.metadata, spec.run):
            raise PlatformError(f"{item.resource.kind} {_name(item)} exists and is not one of run {spec.run}")
        return found.metadata

    async def _own(
        self, items: Sequence[Item], have: Mapping[tuple[str, str], Meta], reference: Mapping[str, str]
    ) -> None:
        """What existed before its root: the runtime, and a Service that was applied with kubectl."""
        for one in items:
            meta = have[_key(one)]
            if one.owned and reference["uid"] not in {known.uid for known in meta.owner_references or ()}:
                patch = {"metadata": {"uid": meta.uid, "ownerReferences": [reference]}}
                await self._api.patch(one.resource, meta.name, patch, PartialObject, namespace=self._namespace)

    # Reading

    async def _summaries(self, selector: str) -> tuple[RunSummary, ...]:
        members = {run: mine for run, mine in (await self._read(selector)).items() if mine.own}
        if not members:
            return ()
        pods: dict[str, list[DetailedPod]] = {run: [] for run in members}
        for pod in await self._list(PODS, DetailedPod, selector):
            run = objects.run_of(pod.metadata.labels)
            if members.get(run, NO_MEMBERS).has(pod):
                pods[run].append(pod)
        self._pods.update(pods)
        self._members.update(members)
        living = [one for of_run in pods.values() for one in of_run]
        roots = [one for mine in members.values() for one in mine.roots]
        events = await self._events() if needs_events(living, roots) else ()
        nodes = await self._nodes_under(living)
        return tuple(_summary(mine, pods[run], events, nodes) for run, mine in members.items())

    async def _of_run(self, run: str) -> Members:
        return (await self._read(objects.run_selector(run))).get(run, NO_MEMBERS)

    async def _read(self, selector: str) -> dict[str, Members]:
        """A kind that may not be listed is left out: a run of another form needs no right on it."""
        found: list[Found] = []
        refused: dict[Resource, ApiError] = {}
        for resource in KINDS:
            try:
                found += [Found(resource, root) for root in await self._roots(resource, selector)]
            except ApiError as problem:
                if problem.status != 403:
                    raise
                refused[resource] = problem
        if all(one in refused for one in forms.ROOTS if one not in self._absent):
            raise next(iter(refused.values()))
        members = members_by_run(found)
        for mine in members.values():
            form = mine.description()[0].form if mine.own else ""
            for one in forms.BETWEEN.get(form, ()):
                if one in refused:
                    raise refused[one]
        return members

    def _forget(self, run: str) -> None:
        self._pods.pop(run, None)
        self._members.pop(run, None)

    async def _roots(self, resource: Resource, selector: str) -> Sequence[PartialObject]:
        if forms.is_optional(resource):
            served = await self._api.serves(resource)
            if isinstance(served, Unknown):
                raise PlatformError(served.why)
            if not served:
                self._absent.add(resource)
                return ()
        return await self._list(resource, PartialObject, selector)

    async def _list(self, resource: Resource, type_: type[T], selector: str, fields: str = "") -> Sequence[T]:
        """Of our namespace alone: labels of other namespaces prove nothing."""
        found = await self._api.list(resource, type_, namespace=self._namespace, labels=selector, fields=fields)
        if found.problems:
            raise PlatformError(f"{len(found.problems)} {resource.words} cannot be read: {found.problems[0]}")
        return found.items

    async def _events(self) -> Sequence[Event]:
        try:
            return (await self._api.list(EVENTS, Event, namespace=self._namespace, fields="type=Warning")).items
        except PlatformError:
            return ()  # the reason is then less exact

    async def _nodes_under(self, pods: Sequence[DetailedPod]) -> dict[str, Node] | None:
        """A node that reports that it is not ready leaves its pods as they are, so it is read itself: at the first
        status, then at some, since nodes are large objects; and while one is lost, which ends the wait for it."""
        names = {node_of(one) for one in pods} - {""}
        lost = any(reason_of_node(name, self._listed_nodes) is not None for name in names)
        running = any(one.status.phase == "Running" for one in pods)
        if lost or needs_nodes(pods) or (running and self._statuses % NODES_EVERY == 0):
            self._listed_nodes = await self._nodes()
        self._statuses += 1
        return self._listed_nodes

    async def _nodes(self) -> dict[str, Node] | None:
        try:
            return {one.metadata.name: one for one in (await self._api.list(NODES, Node)).items}
        except PlatformError:
            return None

    async def _log(self, pod: DetailedPod) -> bytes:
        meta, name = pod.metadata, next((one.name for one in pod.spec.containers), "")
        status = next(iter(pod.status.container_statuses or ()), None)
        before = b""
        if status is not None and status.restart_count:
            with suppress(ApiError):  # only the last one but one is kept, and not for ever
                before = await read_log(self._api, meta.name, meta.namespace, name, previous=True)
        try:
            return before + await read_log(self._api, meta.name, meta.namespace, name)
        except ApiError as refused:
            if refused.status == 404 or (refused.status == 400 and "waiting to start" in str(refused)):
                return before
            raise

    # Removing

    async def _foreign(self, run: str, mine: Members) -> list[tuple[str, str]]:
        """What has the label of the run, and is not known to be of it."""
        why = f"it has the label of run {run}, but no description of it; it was kept"
        words = [one.words for one in mine.foreign]
        alone = without_controller(await self._list(PODS, DetailedPod, objects.run_selector(run)))
        return [(one, why) for one in [*words, *(pod.words for pod in alone)]]

    async def _until_gone(self, run: str, mine: Members, refused: set[str]) -> dict[str, tuple[str, str]]:
        """What still exists, by uid, with the reason. Also the pods, which the garbage collector ends."""
        expected = {one.meta.uid for one in mine.own} - refused
        waited = 0.0
        while expected:
            still: dict[str, tuple[str, str]] = {}
            for one in await self._there(run, mine):
                if one.meta.uid not in refused:
                    still[one.meta.uid] = (one.words, _why_left(one.meta))
            for pod in await self._list(PODS, DetailedPod, objects.run_selector(run)):
                if mine.has(pod):
                    still[pod.metadata.uid] = (f"pod/{pod.metadata.name}", _why_left(pod.metadata))
            if not still or waited >= self._patience:
                return still
            await self._sleep(PAUSE)
            waited += PAUSE
        return {}

    async def _there(self, run: str, mine: Members) -> list[Found]:
        """Of the kinds of its objects, and of those between them and the pods."""
        form = mine.description()[0].form
        kinds = {one.resource for one in mine.own} | set(forms.BETWEEN.get(form, ()))
        found = [
            Found(resource, root)
            for resource in KINDS
            if resource in kinds
            for root in await self._roots(resource, objects.run_selector(run))
        ]
        return [one for one in found if one.meta.uid in mine.uids]


def as_yaml(manifests: Sequence[Mapping[str, object]]) -> str:
    """As kubectl reads it: several documents."""
    writer = YAML()
    writer.default_flow_style = False
    writer.width = 4096
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.representer.ignore_aliases = lambda data: True
    text = io.StringIO()
    for one in manifests:
        text.write("---\n")
        writer.dump(msgspec.to_builtins(one), text)
    return text.getvalue()


def _summary(
    mine: Members, pods: Sequence[DetailedPod], events: Sequence[Event], nodes: Mapping[str, Node] | None
) -> RunSummary:
    spec, known = mine.description()
    facts = Facts(spec=spec, targets=known, roots=mine.roots, pods=pods, events=events, nodes=nodes)
    return RunSummary(spec=spec, nodes=statuses(facts), objects=tuple(sorted(one.words for one in mine.own)))


def _name(item: Item) -> str:
    return str(item.manifest["metadata"]["name"])


def _key(item: Item) -> tuple[str, str]:
    return item.resource.words, _name(item)


def _reference(root: Item, meta: Meta) -> dict[str, str]:
    kind = {"apiVersion": root.resource.api_version, "kind": root.resource.kind}
    return {**kind, "name": meta.name, "uid": meta.uid}


def _owned(item: Item, reference: Mapping[str, str]) -> Item:
    if not item.owned:
        return item
    metadata = {**item.manifest["metadata"], "ownerReferences": [reference]}
    return msgspec.structs.replace(item, manifest={**item.manifest, "metadata": metadata})


def _why_left(meta: Meta) -> str:
    if not meta.deletion_timestamp:
        return "it still exists, and its removal was not begun"
    held = f", held by {', '.join(meta.finalizers)}" if meta.finalizers else ""
    return f"it is still being removed{held}"

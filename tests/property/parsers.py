"""Every parser of foreign data: what it reads, samples of that, and the exceptions it declares. One row, one parser.

A row goes as far as the data goes before it is a value of the model: what an adapter decodes is translated, decided
about and written as a journal line, too. Of files that the kernel writes only the part that a user chooses is foreign:
a name, a path, a command. Any exception that is not declared is a bug.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gpukeeper import http_client
from gpukeeper.acceptance.bench import probing
from gpukeeper.acceptance.fleet.collect import FrameReader, encode_frames, read_message, termination_message
from gpukeeper.acceptance.fleet.group_jobs import Job, Member, RankDevice
from gpukeeper.acceptance.group.members import (
    Challenge,
    Order,
    Present,
    Proof,
    ProtocolError,
    Stop,
    decode_message,
    encode_message,
)
from gpukeeper.acceptance.reports import compare, legacy, merge
from gpukeeper.acceptance.reports.formats import read_report, read_samples, report_json, samples_json
from gpukeeper.acceptance.reports.html import page_of_report
from gpukeeper.clients import docker as docker_api
from gpukeeper.clients.kubernetes import auth
from gpukeeper.clients.kubernetes import wire as kube_wire
from gpukeeper.clients.kubernetes.auth import ExecCredential
from gpukeeper.clients.kubernetes.exchange import Decoders, lines_of_stream, refusal, watch_event
from gpukeeper.clients.prometheus import _data, _lines, _Scalar, read_dcgm
from gpukeeper.clients.ray import Version, _StateResponse
from gpukeeper.config import document, load, units
from gpukeeper.config.importing import ds01, janitor
from gpukeeper.config.importing.result import Imported
from gpukeeper.config.load import read_exemptions
from gpukeeper.devices import counters, holders
from gpukeeper.devices.busy import UsageJudge
from gpukeeper.devices.driver import client
from gpukeeper.devices.driver.client import gpus_of, health_of
from gpukeeper.devices.driver.facts import DriverReply, resolve_names
from gpukeeper.devices.gpus import find_gpu, parse_parent, parse_xids, shares_of
from gpukeeper.disk import mounts, open_files, process_files
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.terminal.show import decision_row
from gpukeeper.ledger import archive, evidence, lines
from gpukeeper.ledger.copy import inbox
from gpukeeper.ledger.copy.ship import recorded_hours
from gpukeeper.lifecycle.decide import answers, decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model import reading
from gpukeeper.model.decision import Evidence, View
from gpukeeper.model.errors import KeeperError, PlatformError, PolicyError, UsageError
from gpukeeper.model.event import Decided, Noticed
from gpukeeper.model.subject import EMPTY, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import plain
from gpukeeper.platforms.docker import translate as docker
from gpukeeper.platforms.docker.capture import BEFORE_STOP, MANIFEST, demultiplexed, recipe_of
from gpukeeper.platforms.docker.owners import KnownUsers, folders_of, owned
from gpukeeper.platforms.docker.records import Records
from gpukeeper.platforms.docker.translate import devices_of, requested_gpus
from gpukeeper.platforms.kubernetes import gpus, marks
from gpukeeper.platforms.kubernetes import translate as kube
from gpukeeper.platforms.kubernetes.gpus import PodTotals
from gpukeeper.platforms.kubernetes.kinds.builtin import JOB
from gpukeeper.platforms.kubernetes.kinds.jobset import JOBSET
from gpukeeper.platforms.kubernetes.kinds.kind import TTL
from gpukeeper.platforms.kubernetes.kinds.kubeflow import TRAINJOB, V1_KINDS, merged_manifest
from gpukeeper.platforms.kubernetes.kinds.ray import RAYJOB
from gpukeeper.platforms.kubernetes.marks import TranslationSettings, namespace_facts
from gpukeeper.platforms.ray import busy
from gpukeeper.platforms.ray.state import addresses
from gpukeeper.traces.parquet import open_parquet
from gpukeeper.traces.sacct import read_sacct
from gpukeeper.traces.spool import Spool
from gpukeeper.traces.table import open_table, parse_mapping, read_mapping
from gpukeeper.views.live import aged, read_view
from gpukeeper.views.usage import UsageSums
from tests.unit.acceptance.reports import examples as report_examples
from tests.unit.ledger import examples as ledger_examples
from tests.unit.platforms.docker import examples as docker_examples
from tests.unit.platforms.kubernetes import examples as kube_examples
from tests.unit.traces.parquet_examples import PARQUET_MAPPING, parquet_files

NOW = docker_examples.NOW


class Parser(NamedTuple):
    name: str
    read: Callable[[bytes], object]
    samples: tuple[bytes, ...]
    declared: tuple[type[Exception], ...] = ()
    weight: int = 10  # its part of a long run; what takes milliseconds gets less


def _json(*values: object) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


def _text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode("utf-8", "surrogateescape"))


# What becomes of a subject


_BOOK = Rulebook(load.load_builtin(("docker", "kubernetes", "host", "ray")).policy)


def _told(subject: Subject) -> None:
    """Decided about, explained, and written down."""
    view = View(subject, (), EMPTY)
    decision = decide(view, _BOOK, NOW)
    answers(view, _BOOK, NOW)
    known = {
        name: at if isinstance(at := getattr(subject, name), datetime) else None
        for name in ("started", "ended", "previous_end")
    }
    noticed = Noticed(at=NOW, ref=subject.ref, incarnation=subject.seen.incarnation, state=subject.state, **known)
    decided = Decided(
        at=NOW,
        ref=subject.ref,
        action=decision.action,
        rule=decision.rule,
        verdict=decision.verdict,
        reason=decision.reason,
        due=decision.due,
    )
    for line in (noticed, decided):
        lines.row(*lines.fit(line))
    table_row = decision_row(decision)
    [plain(cell) for cell in table_row]


# Docker


def _container(data: bytes) -> None:
    found = docker_api._decode(data, docker_api.Inspected, "/containers/x/json")
    asked = requested_gpus(found)
    inventory = (docker_examples.WHOLE, docker_examples.CUT)
    people = KnownUsers({1000: "ann"}, frozenset({"ann"}), {})
    facts = docker_examples.facts(
        asks=asked,
        devices=devices_of(found, asked, (), inventory),
        owned=owned(found, people),
    )
    docker.anonymous_volumes(found)
    folders_of(found)
    _told(docker.container_subject(found, facts, docker_examples.AT))


def _containers(data: bytes) -> None:
    found, _unseen = docker_api.read_list(data, docker_api.ContainerSummary, "container", "/containers/json")
    for one in found:
        docker.is_called(one, ("eval*", "a=*"))


def _images(data: bytes) -> None:
    for one in docker_api.read_list(data, docker_api.ImageSummary, "image", "/images/json")[0]:
        _told(docker.image_subject(one, 0, None, None, docker_examples.AT))


def _disk_usage(data: bytes) -> None:
    found = docker_api._decode(data, docker_api.DiskUsage, "/system/df")
    for entry in found.build_cache or ():
        _told(docker.cache_subject(entry, docker_examples.AT))


def _volumes(data: bytes) -> None:
    for one in docker_api._decode(data, docker_api.VolumeList, "/volumes").volumes or ():
        _told(docker.volume_subject(one, False, None, docker_examples.AT))


def _networks(data: bytes) -> None:
    for one in docker_api._decode(data, list[docker_api.Network], "/networks"):
        _told(docker.network_subject(one, False, None, docker_examples.AT))


def _image(data: bytes) -> None:
    found = docker_api._decode(data, docker_api.ImageInspected, "/images/x/json")
    docker_api.when(found.metadata.last_tag_time)


def _engine_event(data: bytes) -> None:
    records = Records(docker_api.Engine("unix:///nowhere"))
    records.record_event(reading.decode(data, type=docker_api.EngineEvent))


def _recipe(data: bytes) -> None:
    before = BEFORE_STOP + MANIFEST
    recipe_of(Evidence({MANIFEST: data, before: data}))


_MADE = {"Labels": {"com.docker.compose.project": "lab"}, "Options": None, "Scope": "local"}
_VOLUME = {**_MADE, "Name": "ab" * 32, "Driver": "local", "CreatedAt": "2026-11-15T10:00:00Z", "Mountpoint": "/data"}
_NETWORK = {
    **_MADE,
    "Name": "lab_default",
    "Id": "cd" * 32,
    "Created": "2026-11-15T10:00:00.5Z",
    "Driver": "bridge",
    "Ingress": False,
    "ConfigOnly": False,
    "Containers": {},
    "IPAM": {"Driver": "default", "Config": []},
}
_ANSWERS = [docker_examples.recorded(name) for name in ("docker_20_10_answers", "podman_4_3_answers")]
_CONTAINERS = [
    *docker_examples.DOCKER.values(),
    *docker_examples.PODMAN.values(),
    docker_examples.told(
        labels={"gpukeeper.io/ttl": "2h", "gpukeeper.io/hold-until": "2026-12-01T18:00:00Z", "ds01.user": "ann"},
        state=docker_examples.ended(),
        mounts=[{"Type": "bind", "Source": "/home/ann/x", "Destination": "/x"}],
        host={"DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]]}], "Runtime": "nvidia"},
        config={"Env": ["NVIDIA_VISIBLE_DEVICES=0,1"], "User": "1000:1000"},
    ),
]

# Kubernetes

_NAMESPACE = namespace_facts(kube_wire.Meta(name="team-a"), {}, kube_examples.NOW)
_READING = TranslationSettings(
    ("owner",), (marks.JANITOR_TTL, marks.JANITOR_EXPIRES, marks.TWIN_TTL, marks.KYVERNO_TTL)
)
_MARKED = {
    "annotations": {
        TTL: "30m",
        marks.HOLD_UNTIL: "2026-12-01T18:00:00Z",
        marks.JANITOR_TTL: "3d",
        marks.JANITOR_EXPIRES: "2026-12-01",
        marks.TWIN_TTL: "1h30m",
        marks.TWIN_REFRESHED: "2026-11-15T10:00:00Z",
        marks.EXCLUDE: "true",
        marks.EXCLUDE_UNTIL: "2026-12-01",
        kube.STOPPED: '{"incarnation":"1","generation":1}',
    },
    "labels": {marks.KYVERNO_TTL: "2026-12-01T180000Z", "owner": "ann"},
}


def _pods(data: bytes) -> None:
    page, _problems = _DECODERS.page(bytearray(data), kube_wire.Pod, "/api/v1/pods")
    for pod in page.items or ():
        PodTotals().add_pod(pod, gpus.requested(pod.spec))
        _told(kube.pod_subject(pod, _NAMESPACE, kube_examples.AT, _READING))


def _roots(data: bytes) -> None:
    page, _problems = _DECODERS.page(bytearray(data), kube_wire.Root, "/apis/batch/v1/jobs")
    for root in page.items or ():
        for kind in (JOB, JOBSET, TRAINJOB, RAYJOB, V1_KINDS[0]):
            _told(kube.root_subject(kind, root, PodTotals(), _NAMESPACE, kube_examples.AT, _READING))


_DECODERS = Decoders()


def _watch(data: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield data[: len(data) // 2]
        yield data[len(data) // 2 :]

    async def read() -> None:
        decoder = reading.Decoder(kube_wire.ChangedObject)
        async for line in lines_of_stream(chunks(), 5):
            watch_event(line, decoder)

    asyncio.run(read())


def _namespace(data: bytes) -> None:
    found = reading.decode(data, type=kube_wire.Meta)
    namespace_facts(found, {"team-*": "research"}, kube_examples.NOW)


def _kubeconfig(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        auth.from_files([Path(file.name)], None, {}, auth.utc_now)


_LIST = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
_PODS = [
    kube_examples.pod_json(**_MARKED),
    kube_examples.pod_json(
        "Succeeded", status={"containerStatuses": [kube_examples.terminated(kube_examples.ago(hours=2))]}
    ),
    kube_examples.pod_json(spec={"resourceClaims": [{"name": "gpu"}]}, deletionTimestamp=kube_examples.ago(hours=1)),
]
_ROOTS = [
    {
        "metadata": kube_examples.meta(**_MARKED),
        "spec": {
            "ttlSecondsAfterFinished": 60,
            "template": {"spec": _PODS[0]["spec"]},
            "runPolicy": {"ttlSecondsAfterFinished": 5, "suspend": True},
            "deletionStrategy": {"deletionRules": [{"policy": "DeleteCluster", "condition": {"ttlSeconds": 60}}]},
            "shutdownAfterJobFinishes": True,
        },
        "status": {
            "startTime": kube_examples.ago(hours=3),
            "completionTime": kube_examples.ago(hours=2),
            "endTime": kube_examples.ago(hours=2),
            "jobDeploymentStatus": "Complete",
            "jobStatus": "SUCCEEDED",
            "conditions": [kube_examples.condition("Complete", kube_examples.ago(hours=2))],
        },
    },
]

# Ray


def _ray(kind: type[Any], name: str) -> Callable[[bytes], object]:
    def read(data: bytes) -> None:
        answer = reading.decode(data, type=_StateResponse[kind], strict=False)  # type: ignore[valid-type]
        rows = answer.data.result.result if answer.data.result is not None else ()
        nodes = (busy.RayNode("n", "10.0.0.1", "ALIVE", True),)
        said: dict[str, Any] = {"nodes": nodes, "workers": (), "actors": (), "tasks": (), "groups": (), "jobs": ()}
        words = busy.busy("n", busy.ClusterState(**{**said, name: rows}))
        msgspec.json.encode(words)

    return read


def _page(row: object) -> object:
    page = {"result": [row, row], "total": 2, "num_after_truncation": 2, "num_filtered": 2, "warnings": None}
    return {"result": True, "msg": "", "data": {"result": page}}


_RAY = {
    "nodes": (busy.RayNode, {"node_id": "n", "node_ip": "10.0.0.1", "state": "ALIVE", "is_head_node": True}),
    "workers": (busy.Worker, {"worker_id": "01000000ff", "worker_type": "DRIVER", "is_alive": True, "node_id": "n"}),
    "actors": (busy.RayActor, {"actor_id": "a", "class_name": "Model", "state": "ALIVE", "node_id": "n"}),
    "tasks": (busy.Task, {"task_id": "t", "name": "train", "state": "RUNNING", "node_id": "n"}),
    "groups": (busy.PlacementGroup, {"state": "CREATED", "name": "pg", "bundles": [{"node_id": "n"}]}),
    "jobs": (busy.Job, {"status": "RUNNING", "job_id": "01000000", "driver_info": {"node_ip_address": "10.0.0.1"}}),
}

# Files of the kernel: `foreign` is what a user wrote into them


def _kernel(read: Callable[[Any], object], before: bytes, after: bytes, escape: bytes) -> Callable[[bytes], object]:
    """The file with the foreign part in its place; `escape`: bytes that the kernel writes as octal numbers."""
    takes_text = "bytes" not in str(next(iter(read.__annotations__.values())))

    def with_foreign(data: bytes) -> object:
        written = b"".join(b"\\%03o" % byte if byte in escape else bytes([byte]) for byte in data if byte)
        whole = before + written + after
        found = read(whole.decode("utf-8", "surrogateescape") if takes_text else whole)
        return list(found) if hasattr(found, "__iter__") else found

    return with_foreign


_NAMES = (b"python", b"a b) R 1 2 (c", "x\u2028y".encode(), b"/home/ann/\xff\xfe", b"x\x85y\x0b\x0c\x1c\x1d\x1e z")
_STAT = b" R 1 " + b" ".join(str(number).encode() for number in range(2, 52)) + b"\n"
_MOUNT = b"36 35 98:0 / ", b" rw,noatime shared:1 - ext4 /dev/root rw,errors=continue\n"
_KERNEL = (
    Parser("mountinfo", _kernel(mounts.parse_mounts, *_MOUNT, b" \t\n\\#"), _NAMES),
    Parser(
        "mountinfo of an overlay",
        _kernel(
            mounts.parse_mounts,
            b"36 35 98:0 / /merged rw - overlay overlay rw,lowerdir=",
            b":/lower,upperdir=/up\n",
            b" \t\n\\#",
        ),
        _NAMES,
    ),
    Parser(
        "maps",
        _kernel(
            process_files.parse_maps, b"7f00-7f01 r-xp 00000000 08:01 1234 /", b"\n7f02-7f03 rw-p 0 0:0 0\n", b"\n"
        ),
        _NAMES,
    ),
    Parser(
        "swaps",
        _kernel(open_files.parse_backing_files, b"Filename Type\n/", b" file 1 2 -2\n", b" \t\n\\"),
        _NAMES,
    ),
    Parser("stat", _kernel(holders.parse_stat, b"7 (", b")" + _STAT, b""), _NAMES),
    Parser("stat of a parent", _kernel(parse_parent, b"7 (", b")" + _STAT, b""), _NAMES),
    Parser("processor time", _kernel(counters.parse_cpu_time, b"7 (", b")" + _STAT, b""), _NAMES),
    Parser("status", _kernel(holders.parse_uid, b"Name:\t", b"\nUid:\t0\t0\t0\t0\n", b"\n\\"), _NAMES),
    Parser("cgroup", _kernel(holders.parse_containers, b"0::/", b"\n", b"\n\\"), _NAMES),
    Parser("cgroup trees", _kernel(counters.parse_groups, b"0::/", b"\n", b"\n\\"), _NAMES),
    Parser(
        "net/dev",
        _kernel(counters.parse_net_dev, b"a\nb\n ", b": 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n", b" \n:/"),
        _NAMES,
    ),
)

# Programs of ours, and what they print

_GPU_RECORD = {"uuid": "GPU-a", "index": 0, "minor": 0, "slices": [], "name": "H200", "memory_used_mib": 5}
_SLICED_RECORD = {
    "uuid": "GPU-b",
    "index": 1,
    "sliced": True,
    "advice": "reset",
    "listed": [7],
    "energy_mj": 5,
    "slices": [{"uuid": "MIG-1", "index": 0, "gpu_instance": 7, "compute_instance": 0, "activity": {"gpm": 5.0}}],
    "activity": {"window_s": 1.0, "gpm": {"why": "x", "by_design": True}, "utilisation": 3.0},
    "facts": {"vbios": "1"},
    "counters": {"pcie_replays": 1},
    "states": {"power_w": 70.5},
}
_DRIVER_RECORD = {
    "id": 1,
    "state": "answered",
    "gpus": [_GPU_RECORD, _SLICED_RECORD],
    "driver": "580",
    "cuda_driver": "13.0",
    "topology": {"GPU-a": {"GPU-b": "nvlink"}},
    "readings": [{"uuid": "GPU-a", "at": 1.5, "power_w": 70.0}],
}


def _xids(data: bytes) -> None:
    parse_xids([data.decode("utf-8", "replace")], "00000000:1B:00.0", timedelta())


def _resolve(text: str) -> None:
    resolve_names(text, (docker_examples.WHOLE, docker_examples.SECOND, docker_examples.CUT))


def _driver(data: bytes) -> None:
    """What inventory, condition, usage and health make of an answer."""
    found = client.gpus_in(reading.decode(data, type=DriverReply), driver_loaded=True)
    if isinstance(found, Unknown):
        return
    UsageJudge().judge(found, NOW, None)
    shares_of(found)
    gpus_of(found)
    health_of(found, NOW, lambda *_: (), {})
    for uuid in ("GPU-a", "MIG-1"):
        find_gpu(found, uuid)


def _exited(data: bytes) -> None:
    words = data.decode("utf-8", "replace")
    record = probing._record(data) if data[:1] == b"{" else None
    left = probing.RanksOutput(
        records={} if record is None else {0: record},
        words={0: words},
        stages={0: words},
        torchrun=words,
        exit_code=1,
        deadline_s=1.0,
        seconds=1.0,
    )
    for rank in (0, 1):
        probing.answer_of(rank, left)


# The ledger's files


def _archive(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal-20260310.jsonl.gz")
        path.write_bytes(data)
        archive.headers(Path(folder))
        for _seq, line in archive.read_archive(path):
            lines.micros(line.at)
        archive.verify(path)


def _unpacked_archive(*stored: bytes) -> bytes:
    body = b"".join(line + b"\n" for line in stored)
    header = archive.Header(
        first=1, last=len(stored), lines=len(stored), since=NOW, until=NOW, sha256=hashlib.sha256(body).hexdigest()
    )
    return msgspec.json.encode(header) + b"\n" + body


def _unpacked(data: bytes) -> None:
    """The same, damaged before it was packed: what somebody who can write archives could write."""
    _archive(gzip.compress(data, mtime=0))


def _journal(data: bytes) -> None:
    line = lines.decode(data, "line 1")
    lines.row(*lines.fit(line))


def _index(data: bytes) -> None:
    evidence._INDEX.decode(data)


_LINES = tuple(
    msgspec.json.encode(line)
    for line in (
        ledger_examples.noticed(),
        ledger_examples.intended(),
        ledger_examples.closed(),
        ledger_examples.passed(),
        ledger_examples.warned(),
        ledger_examples.held(),
        ledger_examples.gpu_checked(),
    )
)
_STORED = tuple(b'{"seq":%d,"line":%s}' % (number, line) for number, line in enumerate(_LINES, start=1))


# Acceptance reports


def _frames(data: bytes) -> None:
    """The log of a node, in two parts that overlap, and what it sent."""
    reader = FrameReader("r-1", "gpu-1")
    reader.feed(data[: len(data) // 2 + 100])
    reader.feed(data[len(data) // 2 :])
    for report in reader.result().reports:
        read_report(report, "log")


_GROUP_MESSAGES = tuple(
    encode_message(one)[4:]
    for one in (
        Challenge(nonce="0f"),
        Proof(run="r-1", index=1, size=2, nonce="1e", proof="2d"),
        Present(member=Member(index=1, node="gpu-1", devices=(RankDevice(uuid="GPU-1", index=0, name="H100"),))),
        Order(job=Job(number=1, probe="ddp", members=(0, 1), why="x"), first=0, world=2, address="a", port=9),
        Stop(job=1, why="x", hang=True),
    )
)


def _report(data: bytes) -> None:
    report = read_report(data, "report.json")
    compare.text(compare.compare(report, report))
    merge.fleet_csv(merge.merge([report, report_examples.one_good_gpu()]))
    page_of_report(report)
    legacy.files(report)


# Settings


def _policy(text: str) -> None:
    load.load_text(text)


def _janitor_rules(text: str) -> None:
    _valid(janitor.import_rules(text, "rules.yaml"))


def _ds01_limits(text: str) -> None:
    _valid(ds01.import_limits(text, "limits.yaml"))


def _valid(found: Imported) -> None:
    """Whatever the file contains, the result is a valid policy."""
    try:
        load.load_text(found.policy)
    except PolicyError as error:
        raise AssertionError(found.policy) from error


def _manifests(text: str) -> None:
    trees = [document.read(part).tree for part in text.split("\n---\n")]
    found = merged_manifest([one for one in trees if isinstance(one, dict)], "run-7")
    [plain(line) for line in found.lines()]


def _exemptions(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        read_exemptions(Path(file.name), ("managed",))


_TRACES = Path(__file__).parents[2] / "examples" / "traces"


def _trace(name: str) -> Parser:
    """As far as the runs: a damaged row must not become a run that cannot be built."""
    mapping = read_mapping((_TRACES / name).with_suffix(".yaml"))

    def read(data: bytes) -> object:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            trace = open_table(Path(file.name), mapping)
            try:
                return [run.name for run in trace.runs()]
            finally:
                trace.close()

    return Parser(f"trace {name}", read, ((_TRACES / name).read_bytes(),), (UsageError,), SLOW)


def _parquet() -> Parser:
    mapping = parse_mapping(PARQUET_MAPPING, "mapping.yaml")

    def read(data: bytes) -> object:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            spool = Spool()
            try:
                return [run.name for run in open_parquet(Path(file.name), mapping, spool).runs()]
            finally:
                spool.close()

    return Parser("trace in Parquet", read, tuple(parquet_files()), (UsageError,), SLOW)


def _sacct(text: str) -> object:
    spool = Spool()
    try:
        return read_sacct(text.splitlines(keepends=True), UTC, spool, "jobs")
    finally:
        spool.close()


def _mapping(text: str) -> object:
    return parse_mapping(text, "mapping.yaml")


_MANIFESTS = Path(kube_examples.__file__).with_name("trainjob.yaml").read_bytes()
_JANITOR_RULES = b"""rules:
  - id: a-rule
    resources: [jobs, "*"]
    jmespath: "starts_with(metadata.name, 'pr-') && metadata.labels.team == 'nlp'"
    ttl: 3d
"""
_DS01_LIMITS = b"""defaults: {idle_timeout: 0.5h, max_runtime_h: 24, container_hold_after_stop: 90d, memory: 32g}
groups: {a: {max_runtime: null, gpu_hold_after_stop: 1h}}
policies: {high_demand_threshold: 0.8, high_demand_idle_reduction: 0.5, sigterm_grace_seconds: 60}
container_types: {docker: {idle_timeout: 30m}, unknown: {max_runtime: 24h}, other: {}}
monitoring: {infrastructure_containers: [ds01-grafana]}
"""
_POLICY = b"""preset: shared-host
scope: {docker: {}}
mode: plan
retention: {succeeded: 1d, failed: 7d, max: 30d}
classes:
  managed: {idle: 30m, max_runtime: 24h, grace: 60s}
budget: {per_pass: 20, per_hour: 100}
breaker: {running: 20%, vanished: 50%}
temporary:
  - {root: /tmp, names: ["tmp*"], above: 5GB, older_than: 1h}
exemptions:
  - {owner: ann, until: 2026-09-01, reason: paper}
"""
_KUBECONFIG = b"""current-context: a
clusters:
- {name: c, cluster: {server: "http://127.0.0.1:1"}}
contexts:
- {name: a, context: {cluster: c, user: u}}
users:
- {name: u, user: {token: t}}
"""
_TORCHRUN = b"""rank : 0 (local_rank: 0)
  exitcode : -9
Root Cause (first observed failure):
  rank : 1 (local_rank: 1)
"""
_DURATIONS = (b"30m", b"1h30m", b"1.5h", b"7d", b"0", b"250ms", b"2w")
_TIMES = (b"2026-12-01T18:00:00Z", b"2026-12-01T18:00:00.123456789+02:00")
_SIZES = (b"5GB", b"20 GiB", b"1.5KiB", b"7B")
_DCGM = b"""# HELP DCGM_FI_DEV_GPU_UTIL GPU use
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="node-1"} 12
DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="0",UUID="GPU-1",GPU_I_ID="7",GPU_I_PROFILE="1g.10gb"} 0.09 1794726490000
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-1"} 156214896021
"""
_MATRIX = {
    "status": "success",
    "data": {
        "resultType": "matrix",
        "result": [{"metric": {"pod": "a"}, "values": [[1794726490, "0.5"], [1794726550.5, "NaN"]]}],
    },
}

UNREADABLE = (msgspec.DecodeError,)
SLOW = 1

PARSERS: tuple[Parser, ...] = (
    Parser(
        "report in a log",
        _frames,
        ("\n".join(encode_frames(report_json(report_examples.eight_gpus()), "r-1", "gpu-1")).encode(),),
        (KeeperError,),
        SLOW,
    ),
    Parser("message of a group", decode_message, _GROUP_MESSAGES, (ProtocolError,)),
    Parser(
        "termination message",
        _text(read_message),
        (termination_message(report_examples.one_good_gpu(), b"text"),),
    ),
    Parser("duration", _text(reading.span), _DURATIONS, (ValueError,)),
    Parser("time", _text(reading.moment), _TIMES, (ValueError,)),
    Parser("number", _text(reading.number), (b"1", b"-1.5e3", b"0.25"), (ValueError,)),
    Parser("whole number", _text(reading.whole), (b"1", b"123456"), (ValueError,)),
    Parser("duration of a policy", _text(units.read_span), _DURATIONS, (ValueError,)),
    Parser("size", _text(units.read_size), _SIZES, (ValueError,)),
    Parser("share", _text(units.read_share), (b"80%", b"0.5 %"), (ValueError,)),
    Parser("annotation with a duration", _text(lambda text: marks.span(TTL, text)), _DURATIONS),
    Parser("annotation with a time", _text(lambda text: marks.moment(marks.HOLD_UNTIL, text)), _TIMES),
    Parser("time of an engine", _text(docker_api.when), _TIMES),
    Parser("time of a cluster", _text(kube_wire.when), _TIMES),
    Parser("container list", _containers, _json(*(one["list"] for one in _ANSWERS)), (PlatformError,)),
    Parser("container", _container, _json(*_CONTAINERS), (PlatformError,)),
    Parser("image list", _images, _json(*(one["images"] for one in _ANSWERS)), (PlatformError,)),
    Parser("image", _image, _json(_ANSWERS[0]["image"]), (PlatformError,)),
    Parser("disk use of an engine", _disk_usage, _json(*(one["df"] for one in _ANSWERS)), (PlatformError,)),
    Parser("volume list", _volumes, _json({"Volumes": [_VOLUME], "Warnings": None}), (PlatformError,)),
    Parser("network list", _networks, _json([_NETWORK]), (PlatformError,)),
    Parser("engine event", _engine_event, _json(*(event for one in _ANSWERS for event in one["events"])), UNREADABLE),
    Parser("captured container", _recipe, _json(*_CONTAINERS)),
    Parser("container log", demultiplexed, (bytes.fromhex(_ANSWERS[0]["log_hex"]),)),
    Parser("pod list", _pods, _json({**_LIST, "items": _PODS}), (PlatformError,)),
    Parser("object list", _roots, _json({**_LIST, "kind": "JobList", "items": _ROOTS}), (PlatformError,)),
    Parser(
        "watch",
        _watch,
        (b"".join(one + b"\n" for one in _json(*({"type": "MODIFIED", "object": pod} for pod in _PODS))),),
        (PlatformError, msgspec.DecodeError),
    ),
    Parser("namespace", _namespace, _json(kube_examples.meta(**_MARKED)), UNREADABLE),
    Parser(
        "refusal of a cluster",
        lambda data: str(refusal(429, data)),
        _json(
            {
                "kind": "Status",
                "reason": "TooManyRequests",
                "message": "slow",
                "details": {"retryAfterSeconds": 1, "causes": [{"reason": "x"}]},
            }
        ),
    ),
    Parser(
        "login plugin",
        lambda data: reading.decode(data, type=ExecCredential),
        _json(
            {
                "kind": "ExecCredential",
                "apiVersion": "v1",
                "status": {"token": "x", "expirationTimestamp": "2026-12-01T18:00:00Z"},
            }
        ),
        UNREADABLE,
    ),
    Parser("kubeconfig", _kubeconfig, (_KUBECONFIG,), (KeeperError,), SLOW),
    *(Parser(f"Ray {name}", _ray(kind, name), _json(_page(row)), UNREADABLE) for name, (kind, row) in _RAY.items()),
    Parser(
        "Ray version",
        lambda data: reading.decode(data, type=Version, strict=False),
        _json({"ray_version": "2.53.0", "session_name": "session_x"}),
        UNREADABLE,
    ),
    Parser(
        "titles of processes",
        _text(lambda text: (busy.quiet([text]), busy.foreign([text]))),
        (b"ray::IDLE", b"/x/raylet --a", b"python train.py", b"ray::Model.run"),
    ),
    Parser(
        "arguments of a raylet",
        _text(lambda text: addresses([text, f"--gcs-address={text}"])),
        (b"--webui=127.0.0.1:8265", b"10.0.0.1:6379"),
    ),
    Parser(
        "head of an HTTP answer",
        http_client.read_head,
        (
            b"HTTP/1.1 200 OK\r\nApi-Version: 1.48\r\nContent-Length: 12, 12\r\nConnection: keep-alive\r\n\r\n",
            b"HTTP/1.0 404 Not Found\r\ntransfer-encoding: chunked\r\nX: a\tb \r\n\r\n",
        ),
        (http_client.NotHttp,),
    ),
    Parser(
        "size of an HTTP chunk",
        http_client.read_chunk_size,
        (b"1f\r\n", b"0;name=value\r\n"),
        (http_client.NotHttp,),
    ),
    Parser("Prometheus matrix", _lines, _json(_MATRIX), (ValueError,)),
    Parser(
        "Prometheus clock",
        lambda data: reading.instant(_data(data, _Scalar).result[0]),
        _json({"status": "success", "data": {"resultType": "scalar", "result": [1794726490.5, "1"]}}),
        (ValueError,),
    ),
    Parser("DCGM exporter", _text(read_dcgm), (_DCGM,)),
    Parser(
        "kernel log",
        _xids,
        (b"4,1234,5678901,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1, name=x, GPU has fallen off the bus.",),
    ),
    Parser(
        "names of GPUs",
        _text(_resolve),
        (b"all", b"0,1", b"GPU-a", b"MIG-1", b"2:0", b"nvidia.com/gpu=0", b"/dev/nvidia2/gi7", b"2.7"),
    ),
    Parser("driver", _driver, _json(_DRIVER_RECORD, {"id": 1, "state": "failed", "why": "x"}), UNREADABLE),
    Parser(
        "ranks",
        _exited,
        (
            _TORCHRUN,
            *_json({"done": {"x": 1}, "seconds": 1.0}, {"broken": {"words": "x"}}),
        ),
        (ValueError,),
    ),
    Parser("archive", _archive, (gzip.compress(_unpacked_archive(*_STORED), mtime=0),), (KeeperError,)),
    Parser("archived lines", _unpacked, (_unpacked_archive(*_STORED),), (KeeperError,)),
    Parser("journal line", _journal, _LINES, (KeeperError,)),
    Parser(
        "index of evidence",
        _index,
        _json(
            {
                "ref": {"platform": "docker", "place": "n", "kind": "container", "name": "a", "uid": "b"},
                "step": "s",
                "at": "2026-03-10T12:00:00Z",
                "files": {"a": {"file": "a", "size": 1, "sha256": "0"}},
            }
        ),
        UNREADABLE,
    ),
    Parser(
        "report",
        _report,
        (report_json(report_examples.one_good_gpu()), report_json(report_examples.eight_gpus())),
        (KeeperError,),
        SLOW,
    ),
    Parser(
        "samples of a report",
        lambda data: read_samples(data, "samples.json"),
        (samples_json(report_examples.one_good_gpu()),),
        (KeeperError,),
    ),
    Parser(
        "result of an older kit",
        lambda data: legacy.is_ours("results.json", data),
        tuple(one.encode() for one in legacy.files(report_examples.one_good_gpu()).values()),
    ),
    Parser(
        "request",
        lambda data: reading.decode(data, type=Request),
        _json({"verb": "hold", "workload": "a", "seconds": 3600, "reason": "x", "suspends": ["idle"]}),
        UNREADABLE,
    ),
    Parser(
        "view in the fleet database",
        _text(lambda body: aged(read_view("node-1", body), NOW)),
        _json(
            {
                "machine": "node-1",
                "at": "2026-03-10T12:00:00Z",
                "version": "1.0",
                "policy": {"source": "policy.yaml", "digest": "d", "preset": "shared", "mode": "plan"},
                "paused": None,
                "places": [],
                "gpus": [
                    {
                        "key": "k",
                        "name": "node-1/0",
                        "place": "node-1",
                        "how": "free",
                        "id": "i",
                        "platform": "docker",
                        "state": "held",
                        "since": "2026-03-10T12:00:00Z",
                    }
                ],
                "workloads": [],
            }
        ),
        (ValueError,),
    ),
    Parser(
        "hour of a GPU in the fleet database",
        _text(lambda body: UsageSums(NOW, NOW + timedelta(hours=1), UTC).add(next(recorded_hours([(NOW, "", body)])))),
        _json(
            {
                "device": {"place": "node-1", "device": "GPU-1", "since": 29552400, "until": 29552460},
                "use": {"hour": 492540, "place": "node-1", "device": "GPU-1", "active": 7},
            }
        ),
        (StopIteration,),
    ),
    Parser(
        "request through the fleet database",
        _text(lambda document: inbox.verify(document, inbox.signature_of(document, "key"), "key", "node-1", NOW)),
        _json(
            {
                "machine": "node-1",
                "nonce": "n" * 32,
                "issued": "2026-03-10T12:00:00Z",
                "expires": "2026-03-10T12:02:00Z",
                "person": "ann",
                "realm": "web-1",
                "request": {"verb": "hold", "workload": "a"},
            }
        ),
    ),
    Parser("policy", _text(_policy), (_POLICY,), (KeeperError,), SLOW),
    Parser("limits of DS01", _text(_ds01_limits), (_DS01_LIMITS,), (UsageError,), SLOW),
    Parser("rules of kube-janitor", _text(_janitor_rules), (_JANITOR_RULES,), (UsageError,), SLOW),
    Parser("manifests", _text(_manifests), (_MANIFESTS,), (KeeperError,), SLOW),
    Parser("YAML", _text(document.read), (_POLICY,), weight=SLOW),
    Parser(
        "exemptions",
        _exemptions,
        (b"- {owner: ann, until: 2026-09-01, reason: paper}\n- {workload: x, rules: [idle]}\n",),
        weight=SLOW,
    ),
    Parser("mapping of a trace", _text(_mapping), ((_TRACES / "duty-cycle.yaml").read_bytes(),), (UsageError,), SLOW),
    _trace("job-minutes.csv"),
    _trace("dcgmi-dmon.txt"),
    _parquet(),
    Parser("jobs of sacct", _text(_sacct), ((_TRACES / "slurm-sacct.txt").read_bytes(),), (UsageError,), SLOW),
    *_KERNEL,
)

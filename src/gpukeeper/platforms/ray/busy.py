"""How Ray's responses and the titles of its processes are interpreted: what keeps a node busy. Pure.

Ray's list of tasks may be incomplete (their events are dropped under load): what it lists runs, what it does not list
may run all the same. So a node is idle only if Ray lists nothing there *and* the titles of its processes are idle.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import msgspec

from gpukeeper.clients.ray import OVER_ACTOR, OVER_GROUP, OVER_JOB, OVER_TASK, Rows
from gpukeeper.model.unknown import Unknown, is_known

ALIVE: Final = "ALIVE"
_NAME_MAX = 60

T = TypeVar("T")


class RayNode(msgspec.Struct, frozen=True):
    node_id: str
    ip: str = msgspec.field(name="node_ip")
    state: str
    is_head: bool | None = msgspec.field(name="is_head_node", default=None)


class Worker(msgspec.Struct, frozen=True):
    """A process that Ray knows. A driver's id begins with the id of its job (checked in 2.40, 2.53 and 2.60)."""

    worker_id: str
    worker_type: str | None = None
    is_alive: bool | None = None
    node_id: str | None = None
    pid: int | None = None

    @property
    def drives(self) -> bool:
        return self.worker_type == "DRIVER" and self.is_alive is not False

    @property
    def job_id(self) -> str:
        return self.worker_id[:8]


class RayActor(msgspec.Struct, frozen=True):
    """On a node from its start there, also while it restarts; before that, on none."""

    actor_id: str
    class_name: str
    state: str
    node_id: str | None = None
    job_id: str | None = None
    name: str | None = None


class Task(msgspec.Struct, frozen=True):
    task_id: str
    name: str
    state: str
    node_id: str | None = None
    job_id: str | None = None


class Bundle(msgspec.Struct, frozen=True):
    node_id: str | None = None


class PlacementGroup(msgspec.Struct, frozen=True):
    """A placement group; `node_id` of a bundle is empty until it is placed."""

    state: str
    name: str | None = None
    bundles: tuple[Bundle, ...] | None = None


class Driver(msgspec.Struct, frozen=True):
    ip: str | None = msgspec.field(name="node_ip_address", default=None)


class Job(msgspec.Struct, frozen=True):
    """A submitted job has an id of its own, and no driver until it starts."""

    status: str
    job_id: str | None = None
    submission_id: str | None = None
    driver: Driver | None = msgspec.field(name="driver_info", default=None)
    driver_node_id: str | None = None


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """Ray's responses, requested one after the other, each complete or Unknown. Jobs: those that have not ended, or
    have a driver.
    """

    nodes: Rows[RayNode]
    workers: Rows[Worker]
    actors: Rows[RayActor]
    tasks: Rows[Task]
    groups: Rows[PlacementGroup]
    jobs: Rows[Job]


def busy(node_id: str, answers: ClusterState) -> str | Unknown | None:
    """What runs on that node, in a few words; None: Ray lists nothing.

    What is known to run counts although other responses are missing. A node that Ray reports as dead, or does not know,
    is never idle: the caller has seen something of it.
    """
    node = _find(node_id, answers.nodes)
    if isinstance(node, Unknown):
        return node
    found = (
        _drivers(node, answers.workers, answers.jobs)
        or _actors(node, answers.actors)
        or _tasks(node, answers.tasks)
        or _groups(node, answers.groups)
        or _jobs(node, answers.jobs, answers.workers)
    )
    if found or node.state != ALIVE:
        return found or Unknown(f"Ray reports node {_short(node_id)} as {_printable(node.state.lower())}")
    listings: tuple[Rows[object], ...] = (
        answers.workers,
        answers.actors,
        answers.tasks,
        answers.groups,
        answers.jobs,
    )
    return next((part for part in listings if isinstance(part, Unknown)), None)


def without(own: str, answers: ClusterState) -> ClusterState:
    """The same without one job: our own, which is no work. `own`: its id; behind a comma the name it was submitted by,
    which the actor that supervises its driver has in its name; behind another one the pid of that driver."""
    job, submitted, *_ = [*own.split(","), ""]
    supervisor = supervisor_of(submitted) if submitted else ""
    return msgspec.structs.replace(
        answers,
        workers=_but(answers.workers, lambda one: one.drives and one.job_id == job),
        actors=_but(answers.actors, lambda one: one.job_id == job or bool(supervisor and one.name == supervisor)),
        tasks=_but(answers.tasks, lambda one: one.job_id == job),
        jobs=_but(answers.jobs, lambda one: one.job_id == job),
    )


def supervisor_of(submitted: str) -> str:
    return f"_ray_internal_job_actor_{submitted}"


def _but(listing: Rows[T], is_ours: Callable[[T], bool]) -> Rows[T]:
    return listing if isinstance(listing, Unknown) else tuple(one for one in listing if not is_ours(one))


def _find(node_id: str, nodes: Rows[RayNode]) -> RayNode | Unknown:
    if isinstance(nodes, Unknown):
        return nodes
    missing = Unknown(f"Ray does not know node {_short(node_id)}")
    return next((node for node in nodes if node.node_id == node_id), missing)


def _drivers(node: RayNode, workers: Rows[Worker], jobs: Rows[Job]) -> str | None:
    """Not the agent that starts submitted jobs: it stays registered as the driver of a job that Ray does not list."""
    here = [one.job_id for one in _known(workers) if one.drives and one.node_id == node.node_id]
    listed = here if isinstance(jobs, Unknown) else [job.job_id for job in jobs]
    names = [job_id for job_id in here if job_id in listed]
    return _sentence(names, "driver of job ", " is alive", "drivers are alive, that of job ", " for one")


def _actors(node: RayNode, actors: Rows[RayActor]) -> str | None:
    here = [one for one in _known(actors) if one.node_id == node.node_id and one.state not in OVER_ACTOR]
    alive = [one.class_name for one in here if one.state == ALIVE]
    if alive:
        return _sentence(alive, "actor ", " is alive", "actors are alive, ", " for one")
    names = [one.class_name for one in here]
    return _sentence(names, "actor ", " starts", "actors start, ", " for one")


def _tasks(node: RayNode, tasks: Rows[Task]) -> str | None:
    names = [one.name for one in _known(tasks) if one.node_id == node.node_id and one.state not in OVER_TASK]
    return _sentence(names, "task ", " runs", "tasks run, ", " for one")


def _groups(node: RayNode, groups: Rows[PlacementGroup]) -> str | None:
    there = [one for one in _known(groups) if one.state not in OVER_GROUP and _holds(one, node)]
    if not there:
        return None
    names = [one.name for one in there if one.name]
    if not names:
        return "a placement group holds a bundle"
    return _sentence(names, "placement group ", " holds a bundle", "placement groups hold bundles, ", " for one")


def _jobs(node: RayNode, jobs: Rows[Job], workers: Rows[Worker]) -> str | None:
    """By the address of its driver, unless that driver is known to be on one node: nodes may share an address."""
    placed = {one.job_id for one in _known(workers) if one.drives and one.node_id}
    here = [one for one in _known(jobs) if one.status not in OVER_JOB and one.job_id not in placed and _at(one, node)]
    names = [one.submission_id or one.job_id or "without a name" for one in here]
    is_ = f" is {_printable(here[0].status.lower())}" if here else ""
    return _sentence(names, "job ", is_, "jobs, ", f" for one, which{is_}")


def _at(job: Job, node: RayNode) -> bool:
    if job.driver_node_id:
        return job.driver_node_id == node.node_id
    if job.driver is not None and job.driver.ip:
        return job.driver.ip == node.ip
    return node.is_head is not False  # not placed yet: the head starts it unless configured otherwise


def _holds(group: PlacementGroup, node: RayNode) -> bool:
    return any(bundle.node_id == node.node_id for bundle in group.bundles or ())


def _known(listing: Rows[T]) -> tuple[T, ...]:
    return listing if is_known(listing) else ()


def _sentence(names: Sequence[str], before: str, after: str, many_before: str, many_after: str) -> str | None:
    """Concatenated, never formatted: a name, and even a state, may contain anything, braces included."""
    if not names:
        return None
    first = _printable(min(names))  # the same sentence in each pass
    return f"{before}{first}{after}" if len(names) == 1 else f"{len(names)} {many_before}{first}{many_after}"


def _printable(name: str) -> str:
    """Users choose names: one line, no control characters, limited length."""
    clean = "".join(letter if letter.isprintable() else "?" for letter in name)
    return clean if len(clean) <= _NAME_MAX else clean[: _NAME_MAX - 1] + "…"


def _short(node_id: str) -> str:
    return _printable(node_id)[:8]


# -- titles -----------------------------------------------------------------------------------------------------------

_IDLE = frozenset({"ray::IDLE", "ray::IDLE_SpillWorker", "ray::IDLE_RestoreWorker"})
# Ray's own programs by their command line. 2.60 gives its agents titles like those of actors: the first of each is
# a node's agent, a second one is a user's actor with that name.
_AGENTS = frozenset({"ray::DashboardAgent", "ray::RuntimeEnvAgent"})
_OWN = re.compile(
    r"""^(?:\S*/)?(?:
        ray-dashboard-\w+                                  # parts of the dashboard, since 2.5x
        | (?:gcs_server|raylet)\ --                        # beside the path of the wheel
        | python[\d.]*\ (?:-\w\ )*\S*/ray/(?:
            dashboard/(?:dashboard|agent)\.py
            | _private/log_monitor\.py
            | _private/runtime_env/agent/main\.py
            | autoscaler/_private/monitor\.py
          )(?:\ |$)
        | python[\d.]*\ -m\ ray\.util\.client\.server\ (?!.*--mode[=\ ]specific-server)
        | (?:python[\d.]*\ )?(?:\S*/)?ray\ start(?:\ |$)
    )""",
    re.VERBOSE,
)
_PARTS = re.compile(r"\ -c from multiprocessing\.(?:forkserver|resource_tracker|spawn) import ")
_RAYLET = re.compile(r"^(?:\S*/)?raylet --")
# A worker that has no title yet, or never gets one (Java, C++).
_UNTITLED = re.compile(
    r"/ray/_private/workers/(?:setup_worker|default_worker)\.py|io\.ray\.runtime\.runner\.worker\.DefaultWorker"
    r"|/ray/cpp/default_worker\b"
)


def quiet(titles: Iterable[str]) -> str | None:
    """What Ray's workers among these processes do, in a few words; None: there is none, or all are idle.

    A title is the whole command line, joined by blanks; one for each process of the node. Other processes are not
    considered here: see `foreign`.
    """
    counted = Counter(title.strip() for title in titles)
    raylets = sum(number for title, number in counted.items() if _RAYLET.match(title))
    loud = [title for title in counted if title.startswith("ray::") and title not in _IDLE | _AGENTS]
    loud += [title for title in _AGENTS if counted[title] > max(1, raylets)]
    if loud:
        return f"worker {_printable(min(loud).removeprefix('ray::'))} runs"
    return "a worker is starting" if any(_UNTITLED.search(title) for title in counted if not _is_own(title)) else None


def foreign(titles: Iterable[str]) -> str | None:
    """One of these processes that is neither Ray's own program nor an idle worker; None: there is none.

    For processes that certainly belong to a session (they have its files open, or a raylet started them): a driver, a
    worker that changed its name, a program that a task started.
    """
    titles = list(titles)
    strange = sorted(title for title in titles if not _is_own(title.strip()))
    return quiet(titles) or (f"process {_printable(_program(strange[0]))} is not one of Ray's own" if strange else None)


def _program(title: str) -> str:
    """`python train.py`: without directories and without arguments."""
    return " ".join(word.rpartition("/")[2] for word in title.split()[:2])


def _is_own(title: str) -> bool:
    known = not title or title in _IDLE | _AGENTS
    return known or _OWN.match(title) is not None or _PARTS.search(title) is not None

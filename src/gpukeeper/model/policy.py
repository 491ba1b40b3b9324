"""The policy as a value: what `config` makes of the file, and all that the rules know of it.

Spans are timedelta; None means "never" (idle, runtime) or "until a person removes it" (retention), see each field.
Every default here is the built-in one; presets and the file change them, and config keeps where each value came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec

from gpukeeper.model.direct import direct
from gpukeeper.model.unknown import Unknown

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
WITHOUT_GPU = "without-gpu"  # the class of what neither holds nor requests a GPU


@direct
class Mode(StrEnum):
    PLAN = "plan"  # read and show; a user at a terminal may still confirm `apply`
    ENFORCE = "enforce"  # act unattended


@direct
class AtFinish(StrEnum):
    """What becomes of children when the root finishes. Upstream's words: Running takes only what still runs."""

    ALL = "All"
    RUNNING = "Running"
    NONE = "None"


@direct
class OnLimit(StrEnum):
    """What becomes of running work at a limit of its class."""

    STOP = "stop"
    REPORT = "report"


@direct
class AfterIdle(StrEnum):
    REMOVE = "remove"
    KEEP = "keep"


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen policy value."""


class PlaceScope(Value, frozen=True, kw_only=True):
    """Which places and namespaces of one platform the policy covers. Patterns as in a shell: team-*."""

    places: tuple[str, ...] = ("*",)
    namespaces: tuple[str, ...] = ("*",)  # only meaningful where a platform has namespaces


class Retention(Value, frozen=True, kw_only=True):
    """How long what ended is kept, by how it ended. None: until a person removes it."""

    succeeded: timedelta | None = DAY
    failed: timedelta | None = 7 * DAY
    stopped: timedelta | None = DAY  # the platform-wide TTL: for what ended as neither
    max: timedelta = 30 * DAY  # a workload's own TTL cannot request more


class ClassSettings(Value, frozen=True, kw_only=True):
    idle: timedelta | None = None  # None: no idle rule
    idle_when_large: timedelta | None = None  # without idle time, holding more than a slice. None: only reported
    tell_when_large: bool = False  # without an idle time: its owner is notified once a day while it is idle
    on_idle: OnLimit = OnLimit.STOP
    after_idle: AfterIdle = AfterIdle.REMOVE
    max_runtime: timedelta | None = None  # None: no limit
    on_max_runtime: OnLimit = OnLimit.STOP
    start_grace: timedelta = 30 * MINUTE  # once per workload, not once per restart
    never_started: timedelta | None = 30 * MINUTE
    stop_grace: timedelta = MINUTE
    hold: timedelta = DAY  # longest hold a user may take
    hold_after_stop: timedelta = 15 * MINUTE  # the GPU stays the owner's after a manual stop
    untouchable: bool = False  # infrastructure: no rule acts on it

    @property
    def longest(self) -> timedelta | None:
        """The maximum runtime at which it is stopped, not only reported. None: there is none."""
        return self.max_runtime if self.on_max_runtime is OnLimit.STOP else None


class Group(Value, frozen=True, kw_only=True):
    """People who have other limits. None: as in the class. A number is a factor of the class's value."""

    members: tuple[str, ...] = ()
    unix_group: str | None = None  # its members were added to `members` when the policy was read
    idle: timedelta | float | None = None
    max_runtime: timedelta | float | None = None
    hold_after_stop: timedelta | float | None = None


class Match(Value, frozen=True, kw_only=True):
    """Assigns a class. Every given pattern must fit."""

    class_: str
    platform: str | None = None
    namespace: str | None = None
    kind: str | None = None
    name: str | None = None
    owner: str | None = None
    image: str | None = None
    label: str | None = None  # key=value or key


class Exemption(Value, frozen=True, kw_only=True):
    """Suspends rules for an owner, class or workload. A broken one (Unknown until) keeps, and complains."""

    reason: str
    owner: str | None = None
    workload: str | None = None  # a path or its ending; patterns allowed
    class_: str | None = None
    rules: tuple[str, ...] = ()  # empty: every rule
    until: datetime | Unknown | None = None  # None: until it is taken out of the policy
    refused: bool = False  # an admin refuses the exemption that a label of the workload requests


class Warnings(Value, frozen=True, kw_only=True):
    idle: tuple[float, ...] = (0.20, 0.95)  # of the idle time
    runtime: tuple[float, ...] = (0.75, 0.90)  # of the maximum runtime
    lead: timedelta = 10 * MINUTE  # least time between the first warning and the stop
    undelivered: timedelta = 10 * MINUTE  # in addition, if the warning was not delivered
    require_delivery: bool = True  # idle work is not stopped before one warning was delivered


class Activity(Value, frozen=True, kw_only=True):
    """When a minute counts as quiet."""

    gpu: float = 5.0  # percent
    gpu_slice: float = 0.5  # percent, for a part of a GPU
    cpu: float = 2.0  # percent of one core
    network: int = 1024 * 1024  # bytes per idle window
    disk: float = 100_000.0  # bytes per second
    signals: tuple[str, ...] = ("cpu", "network", "disk", "terminal")  # each of these can veto
    settle: timedelta = 5 * MINUTE  # quiet this long before it counts as quiet at all
    tick: timedelta = timedelta(seconds=30)


class Demand(Value, frozen=True, kw_only=True):
    """High demand: when GPUs are scarce, idle time may shrink. Warnings keep their lead."""

    above: float = 0.80
    below: float = 0.70
    settle: timedelta = 5 * MINUTE
    idle_factor: float = 1.0  # 1: high demand changes no idle time


class Amount(Value, frozen=True, kw_only=True):
    """A count or a share of what is there; a share is never less than one."""

    count: int | None = None
    share: float | None = None

    def of(self, total: int) -> int:
        limits = [] if self.count is None else [self.count]
        if self.share is not None:
            limits.append(max(1, int(total * self.share)))
        return min(limits) if limits else total


class Budget(Value, frozen=True, kw_only=True):
    per_pass: Amount = Amount(count=50)
    per_hour: Amount = Amount(count=600)
    trees: int = 1000  # trees of files in one hour; they end no work, and are not counted above


class Breaker(Value, frozen=True, kw_only=True):
    """Opens when a place looks broken. `floor`: this many are always accepted."""

    running: float = 0.20  # share of running work that is due at once
    vanished: float = 0.50  # share of what was there in the last pass and is missing now
    floor: int = 1


class Temporary(Value, frozen=True, kw_only=True):
    """A root below which trees of these names may be deleted."""

    root: str
    names: tuple[str, ...]
    above: int = 5_000_000_000  # bytes; smaller trees are left
    older_than: timedelta = HOUR
    under_pressure: timedelta = 10 * MINUTE  # the same while the disk is too full
    keep: tuple[str, ...] = ()  # patterns of names that never go
    platform: str = "host"  # where that root is


class Kept(Value, frozen=True, kw_only=True):
    """How long trees of one category are kept. None: until a person removes them."""

    older_than: timedelta | None
    under_pressure: timedelta | None = None  # the same while the disk is too full; None: no sooner


class DiskMarks(Value, frozen=True, kw_only=True):
    """Of bytes or inodes, whichever is scarcer: above `high` ages shrink, until it is below `low`."""

    high: float = 0.80
    low: float = 0.70
    unreadable: tuple[str, ...] = ()  # root's programs that even root cannot inspect, and that use no such trees


class Reports(Value, frozen=True, kw_only=True):
    """Directories of results. Each entry directly below a root is one report."""

    roots: tuple[str, ...] = ()
    older_than: timedelta | None = 7 * DAY  # by the newest file inside
    keep: tuple[str, ...] = ()  # patterns of names that never go
    keep_last: int = 3  # the newest ones of each root
    archive: bool = True  # saved as evidence first


class Images(Value, frozen=True, kw_only=True):
    unused: timedelta | None = None  # None: unused images are only reported
    under_pressure: timedelta | None = None  # the same while the engine's disk is too full; None: no sooner
    above: int | None = None  # bytes of unused images; beyond that the least recently used are due sooner
    keep: tuple[str, ...] = ()  # patterns of names that are never removed


class BuildCache(Value, frozen=True, kw_only=True):
    unused: timedelta | None = None  # None: only reported


class Volumes(Value, frozen=True, kw_only=True):
    anonymous_unused: timedelta | None = None  # None: only reported; those with a name always are


class Networks(Value, frozen=True, kw_only=True):
    unused: timedelta | None = None  # None: only reported


class Capture(Value, frozen=True, kw_only=True):
    to: str | None = None  # None: below the ledger's directory
    what: tuple[str, ...] = ("manifest", "logs", "events", "reports")
    keep: timedelta = 90 * DAY
    quota: int = 20 * 1024**3


class MetricsSettings(Value, frozen=True, kw_only=True):
    sizes: timedelta | None = 30 * MINUTE  # how often the bytes of images, workloads and logs are measured


class GpuSettings(Value, frozen=True, kw_only=True):
    """The GPUs of the machine gpukeeper runs on."""

    reset: bool = False  # a dirty GPU without holders may be reset
    settle: timedelta = 2 * MINUTE  # dirty this long after the end: quarantined
    dcgm: str | None = None  # address of an exporter
    stop_on_taken: bool = False  # what is started again onto a GPU that has a new tenant is stopped


class ChannelSettings(Value, frozen=True, kw_only=True):
    """One way to reach people. What the words mean depends on the kind; they may be secret."""

    kind: str
    words: tuple[str, ...]


class Notify(Value, frozen=True, kw_only=True):
    admins: tuple[ChannelSettings, ...] = ()  # beside the log
    owners: tuple[ChannelSettings, ...] = ()  # beside terminals
    addresses: Mapping[str, str] = {}  # of owners, by name
    address: str | None = None  # a template, for owners without an entry
    address_command: ChannelSettings | None = None  # a program that prints the address, if there is no template
    digest: timedelta | None = None  # None: notices are sent at once
    quiet: str | None = None  # hours in which owners get no mail or chat message


class WebProxy(Value, frozen=True, kw_only=True):
    """A reverse proxy that logs people in. Without a header there is none."""

    header: str | None = None  # with the name of the person
    from_: tuple[str, ...] = ()  # addresses and networks
    user: str | None = None  # whose processes may be that proxy on this machine


class WebTls(Value, frozen=True, kw_only=True):
    """Paths of PEM files; both or none."""

    certificate: str | None = None
    key: str | None = None


class Web(Value, frozen=True, kw_only=True):
    url: str | None = None  # of the dashboard, as browsers reach it
    user: str = "nobody"  # of the web process
    proxy: WebProxy = WebProxy()
    tls: WebTls = WebTls()
    sessions: timedelta = 12 * HOUR
    read_on_loopback: bool = True  # without a login
    plain_http: bool = False  # on other addresses than loopback, without TLS


class Schedule(Value, frozen=True, kw_only=True):
    every: timedelta = 5 * MINUTE
    at: str | None = None  # cron expression; acts only then, observes in every pass


class LedgerKeep(Value, frozen=True, kw_only=True):
    keep: timedelta = 365 * DAY
    archive_after: timedelta = 30 * DAY
    signals: timedelta = 7 * DAY


class Prices(Value, frozen=True, kw_only=True):
    """For reports only."""

    currency: str = ""
    per_gpu_hour: Mapping[str, float] = {}  # by pattern of the GPU model; the first that fits


class BacktestSettings(Value, frozen=True, kw_only=True):
    """For a warning only."""

    regret_max: float = 0.05  # share of stops


class Fleet(Value, frozen=True, kw_only=True):
    """The copy in a database that many machines share. Without an address there is none."""

    copy_to: str | None = None
    password_file: str | None = None
    machine: str | None = None  # None: the name of the host
    signals: bool = True
    keep_unsent: timedelta = 30 * DAY  # beyond `ledger.archive_after`, for lines that were not copied
    request_key_file: str | None = None  # None: no requests are taken from the database
    same_users: bool = False  # a name means the same person on all machines

    @property
    def kept_unsent(self) -> timedelta | None:
        """None: nothing is copied, so that nothing waits for it."""
        return None if self.copy_to is None else self.keep_unsent


class MarkSettings(Value, frozen=True, kw_only=True):
    """What results of acceptance runs and quarantines may change on the nodes of a cluster."""

    taint: bool = False  # failed nodes; a quarantine always does
    max_out: Amount = Amount(share=0.1)  # GPU nodes that may be out at the same time, for any reason
    breaker: float = 0.5  # of the tested nodes failed, or of the GPU nodes are out: none is taken out
    ignored_taints: tuple[str, ...] = ("nvidia.com/gpu",)  # there for good: a node that has one is not out
    repeats: int = 3  # a GPU or machine that was taken out so often ...
    repeats_within: timedelta = 90 * DAY  # ... in this time is reported


class Policy(Value, frozen=True, kw_only=True):
    """All settings for a fleet."""

    preset: str = "development"
    mode: Mode = Mode.PLAN
    scope: Mapping[str, PlaceScope] = {}  # by platform; a platform that is not named is out of scope
    retention: Retention = Retention()
    environments: Mapping[str, Retention] = {}
    at_finish: AtFinish = AtFinish.NONE
    own_ttl: bool = True  # the workload's own TTL counts
    foreign_ttl: tuple[str, ...] = ()  # markers of other tools that count too
    classes: Mapping[str, ClassSettings] = {}
    groups: Mapping[str, Group] = {}
    admins: tuple[str, ...] = ("root",)
    owner_labels: tuple[str, ...] = ()  # labels that only a site's own wrapper can set: trusted without more evidence
    match: tuple[Match, ...] = ()
    exemptions: tuple[Exemption, ...] | Unknown = ()
    warnings: Warnings = Warnings()
    activity: Activity = Activity()
    demand: Demand = Demand()
    budget: Budget = Budget()
    breaker: Breaker = Breaker()
    temporary: tuple[Temporary, ...] = ()
    kept: Mapping[str, Kept] = {}  # by category of trees; what is not named here is kept
    disk: DiskMarks = DiskMarks()
    reports: Reports = Reports()
    images: Images = Images()
    build_cache: BuildCache = BuildCache()
    volumes: Volumes = Volumes()
    networks: Networks = Networks()
    orphans: bool = True  # proven remainders of ended workloads are ended
    loops: int = 2  # ends seen under one uid, while it runs again, that make it a loop
    hold_total: timedelta = DAY  # a user's holds on one workload, or of one GPU, add up to no more ...
    hold_within: timedelta = 3 * DAY  # ... than this within this time
    keep_alive: str = "/workspace/.keep-alive"  # a file inside that requests a hold while it would be idle
    capture: Capture = Capture()
    gpu: GpuSettings = GpuSettings()
    release: tuple[str, ...] = ()  # what may be taken off a removal that is proven to be stuck, by name
    platforms: Mapping[str, Value] = {}  # by platform: settings that only it reads, of a type of its own
    marks: MarkSettings = MarkSettings()  # on nodes of a cluster
    notify: Notify = Notify()
    web: Web = Web()
    schedule: Schedule = Schedule()
    ledger: LedgerKeep = LedgerKeep()
    prices: Prices = Prices()
    backtest: BacktestSettings = BacktestSettings()
    metrics: MetricsSettings = MetricsSettings()
    fleet: Fleet = Fleet()
    digest: str = ""  # of the effective values; identifies the policy that decided

"""The policy as a value: what `config` makes of the file, and all that the rules know of it.

A field with a text is a setting of the file (see `model.setting`); schema, reader and reference page follow from it.
Spans are timedelta; None means "never" (idle, runtime) or "until a person removes it" (retention), see each field.
Every default here is the built-in one; presets and the file change them, and config keeps where each value came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import msgspec

from gpukeeper.model import setting as s
from gpukeeper.model.unknown import Unknown, direct

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
EVERYONE = "*"  # as a member of a group
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

    succeeded: Annotated[s.Retained, "Time to keep work that succeeded. 0: until its evidence is captured."] = DAY
    failed: Annotated[s.Retained, "Time to keep work that failed; not shorter than `succeeded`."] = 7 * DAY
    stopped: Annotated[s.Retained, "Time to keep work that neither succeeded nor failed."] = DAY
    max: Annotated[s.Span, "Maximum for a workload's own TTL and for the settings above."] = 30 * DAY


class ClassSettings(Value, frozen=True, kw_only=True):
    idle: Annotated[s.Limit, "Stop after this idle time. `none`: no idle rule."] = None
    idle_when_large: Annotated[
        s.Limit, "Idle time for work without one that holds more than a slice. `none`: only report."
    ] = None
    tell_when_large: Annotated[
        bool, "Notify the owner once a day if work without an idle time holds more than a slice and is idle."
    ] = False
    on_idle: Annotated[OnLimit, "Action for idle work. `report`: only report."] = OnLimit.STOP
    after_idle: Annotated[
        AfterIdle,
        "Action after an idle stop. `keep`: kept like other stopped work; on a cluster, until a person acts.",
    ] = AfterIdle.REMOVE
    max_runtime: Annotated[s.Limit, "Stop after this total runtime, restarts included."] = None
    on_max_runtime: Annotated[OnLimit, "Action for work above its maximum runtime. `report`: only report."] = (
        OnLimit.STOP
    )
    start_grace: Annotated[s.Span, "Time after the first start without idle rule; once per workload."] = 30 * MINUTE
    never_started: Annotated[s.Limit, "Remove work that was created and not started within this time."] = 30 * MINUTE
    stop_grace: Annotated[
        s.Span, "Grace period between SIGTERM and the forced end, to save work.", s.InFile("grace")
    ] = MINUTE
    hold: Annotated[s.Span, "Maximum duration of a user's hold."] = DAY
    hold_after_stop: Annotated[
        s.Span, "Time that the GPU is reserved for the owner after they stopped their own work."
    ] = 15 * MINUTE
    untouchable: Annotated[bool, "No rule acts on this class."] = False

    @property
    def longest(self) -> timedelta | None:
        """The maximum runtime at which it is stopped, not only reported. None: there is none."""
        return self.max_runtime if self.on_max_runtime is OnLimit.STOP else None


class Group(Value, frozen=True, kw_only=True):
    """People who have other limits. None: as in the class. A number is a factor of the class's value."""

    members: Annotated[tuple[str, ...], 'User names. "*" stands for every verified owner.'] = ()
    unix_group: Annotated[str | None, "Unix group of this machine; its members are added."] = None
    idle: Annotated[s.AsClass, "Replaces the class's idle time, if the class has one. `2x`: twice that."] = None
    max_runtime: Annotated[s.AsClass, "The same for the maximum runtime, if the class has one."] = None
    hold_after_stop: Annotated[s.AsClass, "The same for `hold_after_stop`."] = None
    classes: Annotated[tuple[str, ...], "Classes that these limits apply to. Default: all."] = ()

    def has(self, owner: object) -> bool:
        return owner in self.members or (isinstance(owner, str) and EVERYONE in self.members)

    def limits(self, class_name: str) -> bool:
        """Whether its limits apply to work of this class."""
        return not self.classes or class_name in self.classes


class Match(Value, frozen=True, kw_only=True):
    """Assigns a class. Every given pattern must fit."""

    class_: Annotated[str, "The class to assign.", s.InFile("class")]
    platform: Annotated[str | None, "Pattern for the platform."] = None
    namespace: Annotated[str | None, "Pattern for the namespace."] = None
    kind: Annotated[str | None, "Pattern for the kind."] = None
    name: Annotated[str | None, "Pattern for the name."] = None
    owner: Annotated[str | None, "Pattern for the owner."] = None
    image: Annotated[str | None, "Pattern for the image."] = None
    label: Annotated[str | None, "Label: `key=value`, or `key` alone."] = None


class Exemption(Value, frozen=True, kw_only=True):
    """Suspends rules for an owner, class or workload. A broken one (Unknown until) keeps, and complains."""

    reason: Annotated[str, "Reason, for other admins."]
    owner: Annotated[str | None, "Name of the owner."] = None
    workload: Annotated[str | None, "Path of the workload, or an ending of it. Shell patterns."] = None
    class_: Annotated[str | None, "Name of a class.", s.InFile("class")] = None
    rules: Annotated[tuple[str, ...], "Rules to suspend. Empty: all rules."] = ()
    until: Annotated[s.Until, "Last day, or a time. Default: no end."] = None
    refused: Annotated[bool, "Refuse a workload's own request for an exemption."] = False


class Warnings(Value, frozen=True, kw_only=True):
    idle: Annotated[tuple[s.Share, ...], "Warn at these shares of the idle time."] = (0.20, 0.95)
    runtime: Annotated[tuple[s.Share, ...], "Warn at these shares of the maximum runtime."] = (0.75, 0.90)
    lead: Annotated[s.Span, "Minimum time between the first warning and the stop."] = 10 * MINUTE
    undelivered: Annotated[
        s.Span, "Additional time if a warning could not be delivered; included in the announced time."
    ] = 10 * MINUTE
    require_delivery: Annotated[
        bool,
        "Stop idle work only after a warning was delivered to its owner. `false`: after `undelivered`, too. Other "
        "rules, such as the maximum runtime, always act after `undelivered`.",
    ] = True


class Activity(Value, frozen=True, kw_only=True):
    """When a minute counts as quiet."""

    gpu: Annotated[s.Percent, "GPU utilization below this is idle."] = 5.0
    gpu_slice: Annotated[s.Percent, "The same for a slice of a GPU."] = 0.5
    cpu: Annotated[s.Percent, "CPU usage below this is idle, in percent of one core."] = 2.0
    network: Annotated[s.Size, "Network traffic below this, over the idle time, is idle."] = 1024 * 1024
    disk: Annotated[s.Size, "Disk traffic below this, per second, is idle."] = 100_000
    signals: Annotated[
        tuple[s.SignalName, ...], "Further signals besides the GPU: activity in any of them means not idle."
    ] = ("cpu", "network", "disk", "terminal")
    settle: Annotated[s.Span, "Minimum time below the thresholds before it counts as idle."] = 5 * MINUTE
    tick: Annotated[s.Interval, "Interval of measurements."] = timedelta(seconds=30)


class Demand(Value, frozen=True, kw_only=True):
    """High demand: when GPUs are scarce, idle time may shrink. Warnings keep their lead."""

    above: Annotated[s.Share, "Demand is high if more than this share of the GPUs is in use ..."] = 0.80
    below: Annotated[s.Share, "... and stays high until less than this share is in use."] = 0.70
    settle: Annotated[s.Span, "Time above the threshold before demand counts as high."] = 5 * MINUTE
    idle_factor: Annotated[s.Share, "Factor for idle times while demand is high. 100%: demand changes nothing."] = 1.0


class Amount(Value, frozen=True, kw_only=True):
    """A count or a share of what is there; a share is never less than one."""

    count: int | None = None
    share: float | None = None

    def of(self, total: int) -> int:
        limits = [] if self.count is None else [self.count]
        if self.share is not None:
            limits.append(max(1, int(total * self.share)))
        return min(limits) if limits else total


AmountOrBoth = Annotated[Amount, s.Kind("amount")]


class Budget(Value, frozen=True, kw_only=True):
    per_pass: Annotated[
        AmountOrBoth,
        "Maximum steps per pass; the rest is deferred, oldest first. `{count: 20, share: 10%}`: the smaller applies.",
    ] = Amount(count=50)
    per_hour: Annotated[AmountOrBoth, "Maximum steps per hour."] = Amount(count=600)
    trees: Annotated[s.Count, "Maximum directory trees per hour. They end no work and are not counted above."] = 1000


class Breaker(Value, frozen=True, kw_only=True):
    """Opens when a place looks broken. `floor`: this many are always accepted."""

    running: Annotated[s.Share, "Opens if more than this share of running work is due at once."] = 0.20
    vanished: Annotated[s.Share, "Opens if more than this share is missing since the last pass."] = 0.50
    floor: Annotated[s.Count, "Up to this number the breaker never opens."] = 1


class Temporary(Value, frozen=True, kw_only=True):
    """A root below which trees of these names may be deleted."""

    root: Annotated[s.Root, "Directory. Nothing outside it is deleted, and links are not followed."]
    names: Annotated[tuple[s.NamePattern, ...], "Names of trees directly below the root. Shell patterns."]
    above: Annotated[s.Size, "Delete only if all matching trees below the root together are larger than this."] = (
        5_000_000_000
    )
    older_than: Annotated[s.Span, "Minimum time without use."] = HOUR
    under_pressure: Annotated[s.Span, "The same while the disk is too full; see `disk`."] = 10 * MINUTE
    keep: Annotated[tuple[s.NamePattern, ...], "Names that are never deleted. Shell patterns."] = ()
    platform: str = "host"  # where that root is


class Kept(Value, frozen=True, kw_only=True):
    """How long trees of one category are kept. None: until a person removes them."""

    older_than: timedelta | None
    under_pressure: timedelta | None = None  # the same while the disk is too full; None: no sooner


class DiskMarks(Value, frozen=True, kw_only=True):
    """Of bytes or inodes, whichever is scarcer: above `high` ages shrink, until it is below `low`."""

    high: Annotated[s.Share, "A disk above this share of bytes or inodes is too full: `under_pressure` applies ..."] = (
        0.80
    )
    low: Annotated[s.Share, "... until it is below this share."] = 0.70
    unreadable: Annotated[
        tuple[str, ...],
        "Programs of root whose open files even root cannot read, by their name in /proc/PID/comm, and that use no "
        "trees that may be deleted. Any other unreadable process keeps every tree.",
    ] = ()


class Reports(Value, frozen=True, kw_only=True):
    """Directories of results. Each entry directly below a root is one report."""

    roots: Annotated[tuple[s.Root, ...], "Directories; each entry directly below one is a report."] = ()
    older_than: Annotated[s.Limit, "Delete a report if its newest file is older than this. `none`: only report."] = (
        7 * DAY
    )
    keep: Annotated[tuple[s.NamePattern, ...], "Names that are never deleted. Shell patterns."] = ()
    keep_last: Annotated[s.CountOrZero, "Number of newest reports per root that are never deleted."] = 3
    archive: Annotated[bool, "Save a report as evidence before deleting it, so that `restore` can restore it."] = True


class Images(Value, frozen=True, kw_only=True):
    unused: Annotated[s.Limit, "Remove after this time without observed use. `none`: only report."] = None
    under_pressure: Annotated[
        s.Limit, "The same while the disk of the engine's data root is too full; see `disk`. `none`: no sooner."
    ] = None
    above: Annotated[
        s.Size | None,
        "If unused images together are larger than this, remove the least recently used of them after `under_pressure` "
        "(default: 1d), until they are not.",
    ] = None
    keep: Annotated[tuple[str, ...], "Names of images that are never removed. Shell patterns."] = ()


class BuildCache(Value, frozen=True, kw_only=True):
    unused: Annotated[s.Limit, "Remove if no build used it for this time. `none`: only report."] = None


class Volumes(Value, frozen=True, kw_only=True):
    anonymous_unused: Annotated[
        s.Limit,
        "Remove a volume without a name after this time without a container. Its files are lost. `none`: only report. "
        "Volumes with a name are only reported.",
    ] = None


class Networks(Value, frozen=True, kw_only=True):
    unused: Annotated[s.Limit, "Remove after this time without a container. `none`: only report."] = None


class Capture(Value, frozen=True, kw_only=True):
    to: Annotated[s.Folder | None, "Directory of the evidence. Default: below the ledger's directory."] = None
    what: Annotated[tuple[s.EvidenceName, ...], "What to capture before a removal."] = (
        "manifest",
        "logs",
        "events",
        "reports",
    )
    keep: Annotated[s.Span, "Time to keep evidence."] = 90 * DAY
    quota: Annotated[s.Size, "Maximum size of the evidence. If it is used up, nothing more is removed."] = 20 * 1024**3


class MetricsSettings(Value, frozen=True, kw_only=True):
    sizes: Annotated[
        s.Limit,
        "How often the bytes of images, containers and logs are measured; less often if that is slow. `none`: never.",
    ] = 30 * MINUTE


class GpuSettings(Value, frozen=True, kw_only=True):
    """The GPUs of the machine gpukeeper runs on."""

    reset: Annotated[bool, "Reset a GPU that stays dirty while no process holds it, at most once a day."] = False
    settle: Annotated[s.Interval, "Quarantine a GPU that is not clean this long after its work ended."] = 2 * MINUTE
    dcgm: Annotated[s.Address, "URL of a DCGM exporter: http://localhost:9400/metrics."] = None
    stop_on_taken: Annotated[
        bool,
        "Stop work that was restarted on a GPU that another workload uses meanwhile, one pass after the warning. "
        "If false, only warn the owner.",
    ] = False


class ChannelSettings(Value, frozen=True, kw_only=True):
    """One way to reach people. What the words mean depends on the kind; they may be secret."""

    kind: str
    words: tuple[str, ...]


AdminChannel = Annotated[ChannelSettings, s.Kind("admin channel")]
OwnerChannel = Annotated[ChannelSettings, s.Kind("owner channel")]
AddressCommand = Annotated[ChannelSettings | None, s.Kind("address command")]


class Notify(Value, frozen=True, kw_only=True):
    admins: Annotated[
        tuple[AdminChannel, ...],
        "Channels for problems, besides the log of `serve`. Each is one of: {examples}.",
    ] = ()
    owners: Annotated[
        tuple[OwnerChannel, ...],
        "Channels for warnings and other messages to owners, besides their terminals. Each is one of: {examples}.",
    ] = ()
    addresses: Annotated[
        Mapping[str, s.OwnerAddress], "Addresses of owners, by name: `{ann: ann.smith@uni.example}`."
    ] = {}
    address: Annotated[
        s.AddressTemplate, 'Address of owners without an entry in `addresses`: "{owner}@uni.example".'
    ] = None
    address_command: Annotated[
        AddressCommand,
        "Program that prints the address of an owner, whose name is its last argument. Used if there is no `address`.",
    ] = None
    digest: Annotated[
        s.Limit, "Collect notices to an owner, from which nothing follows, into one message per interval."
    ] = None
    quiet: Annotated[
        s.Quiet,
        'Hours without mail and chat messages to owners: "{examples}". A warning in these hours counts as not '
        "delivered.",
    ] = None


class WebProxy(Value, frozen=True, kw_only=True):
    """A reverse proxy that logs people in. Without a header there is none."""

    header: Annotated[s.HeaderName, "Header with the name of the logged-in person: X-Forwarded-User. Needs `from`."] = (
        None
    )
    from_: Annotated[
        tuple[s.Network, ...],
        "Addresses and networks of the proxy: [10.0.0.2]. From other addresses the header is ignored.",
        s.InFile("from"),
    ] = ()
    user: Annotated[
        s.AccountOrNone,
        "User that the proxy runs as, if it runs on this machine: www-data. From processes of other users on this "
        "machine the header is ignored.",
    ] = None


class WebTls(Value, frozen=True, kw_only=True):
    """Paths of PEM files; both or none."""

    certificate: Annotated[s.FileOrNone, "PEM file with the certificate and its chain."] = None
    key: Annotated[s.FileOrNone, "PEM file with the private key, without a passphrase, mode 0600."] = None


class Web(Value, frozen=True, kw_only=True):
    url: Annotated[
        s.WebAddress,
        "URL of the dashboard as browsers reach it, for links and checks of requests: https://gpu.example.",
    ] = None
    user: Annotated[s.Account, "User that the web process runs as, if the daemon runs as root."] = "nobody"
    proxy: Annotated[WebProxy, "Reverse proxy that logs people in."] = WebProxy()
    tls: Annotated[WebTls, "Certificate for HTTPS. Renewed files are loaded within a minute."] = WebTls()
    sessions: Annotated[s.Interval, "How long a login in a browser lasts; at most 31d."] = 12 * HOUR
    read_on_loopback: Annotated[bool, "On loopback, users of this machine may read without a login."] = True
    plain_http: Annotated[
        bool,
        "Serve other machines without TLS and without a proxy. Cookies and tokens can then be read on the network.",
    ] = False


class Schedule(Value, frozen=True, kw_only=True):
    every: Annotated[s.Interval, "Interval of passes."] = 5 * MINUTE
    at: Annotated[s.Cron, "Act only in passes at these times (cron expression, local time). Every pass observes."] = (
        None
    )


class LedgerKeep(Value, frozen=True, kw_only=True):
    keep: Annotated[s.Span, "Time to keep entries."] = 365 * DAY
    archive_after: Annotated[s.Span, "Entries older than this are archived; at least 1d."] = 30 * DAY
    signals: Annotated[s.Span, "Time to keep measurements."] = 7 * DAY


class Prices(Value, frozen=True, kw_only=True):
    """For reports only."""

    currency: Annotated[s.Currency, "Shown beside amounts: EUR, USD, …"] = ""
    per_gpu_hour: Annotated[
        Mapping[str, s.Price],
        'Price of one hour of one GPU, by model: `{"NVIDIA H100*": 2.5}`. Shell patterns; the first that matches '
        "applies. A slice costs its share.",
    ] = {}


class BacktestSettings(Value, frozen=True, kw_only=True):
    """For a warning only."""

    regret_max: Annotated[
        s.Share,
        "`policy check` and `doctor` warn if more stops by this policy would have been regretted on recorded work "
        "(`gpukeeper backtest --record`).",
    ] = 0.05


class Fleet(Value, frozen=True, kw_only=True):
    """The copy in a database that many machines share. Without an address there is none."""

    copy_to: Annotated[
        s.DatabaseAddress,
        "URL of the fleet database, without a password: postgresql://gpukeeper_machine_node-1@db.example/gpukeeper. "
        "Needs the extra `postgres`. Default: no copy.",
    ] = None
    password_file: Annotated[s.FileOrNone, "File with the password of the machine's role, mode 0600."] = None
    machine: Annotated[s.MachineName, "Name of this machine in the fleet. Default: the host name."] = None
    signals: Annotated[bool, "Also copy measurements, in buckets of one minute."] = True
    keep_unsent: Annotated[
        s.Span, "Keep entries that were not copied this much longer in the ledger before they are archived."
    ] = 30 * DAY
    request_key_file: Annotated[
        s.FileOrNone,
        "File with the key that the web server signs requests with, mode 0600. Default: no requests are accepted.",
    ] = None
    same_users: Annotated[
        bool,
        "A user name means the same person on all machines. If false, ann who logged in at web-1 is `ann@web-1` here.",
    ] = False

    @property
    def kept_unsent(self) -> timedelta | None:
        """None: nothing is copied, so that nothing waits for it."""
        return None if self.copy_to is None else self.keep_unsent


class MarkSettings(Value, frozen=True, kw_only=True):
    """What results of acceptance runs and quarantines may change on the nodes of a cluster."""

    taint: Annotated[bool, "Taint nodes that failed, as `accept mark --taint` does. `false`: only label them."] = False
    max_out: Annotated[
        AmountOrBoth,
        "GPU nodes of a cluster that may be out at the same time. `{count: 5, share: 10%}`: the smaller applies.",
    ] = Amount(share=0.1)
    breaker: Annotated[
        s.Share, "If more than this share of the tested nodes failed, or of the GPU nodes is out, no node is taken out."
    ] = 0.5
    ignored_taints: Annotated[
        tuple[str, ...], "Keys of taints that are there for good: a node that has one is not out."
    ] = ("nvidia.com/gpu",)
    repeats: Annotated[s.Count, "Report a GPU or a machine that was taken out this often ..."] = 3
    repeats_within: Annotated[s.Interval, "... within this time."] = 90 * DAY


class Settings(Value, frozen=True, kw_only=True):
    """What a policy and its file share."""

    preset: Annotated[str, "Source of values that the file does not set."] = "development"
    mode: Annotated[
        Mode, "`plan`: dry run, unless a person confirms `apply` on a terminal. `enforce`: acts unattended."
    ] = Mode.PLAN
    retention: Annotated[Retention, "How long finished work is kept. `manual`: until a person removes it."] = (
        Retention()
    )
    environments: Annotated[Mapping[str, Retention], "Retention by environment. Defaults: as in `retention`."] = {}
    at_finish: Annotated[
        AtFinish, "Which children to end when their root finishes: `All`, those still `Running`, or `None`."
    ] = AtFinish.NONE
    classes: Annotated[Mapping[str, ClassSettings], "Limits by class of workload. A new name defines a new class."] = {}
    groups: Annotated[
        Mapping[str, Group],
        "Limits for groups of users. A group's value replaces the class's, shorter or longer; of several groups of one "
        "owner the most generous value applies. `2x` or `0.5x` is a factor of the class's value. Applies to verified "
        "owners only; for others the class's values apply.",
    ] = {}
    admins: Annotated[tuple[str, ...], "Users who may hold, release, stop and remove the work of all users."] = (
        "root",
    )
    owner_labels: Annotated[
        tuple[str, ...], "Labels that only the site's own wrapper can set, and that therefore prove the owner."
    ] = ()
    match: Annotated[
        tuple[Match, ...], "Assigns classes. All patterns of an entry must match; the first matching entry applies."
    ] = ()
    warnings: Annotated[Warnings, "When owners are warned."] = Warnings()
    activity: Annotated[Activity, "What counts as idle."] = Activity()
    demand: Annotated[Demand, "Shorter idle times while GPUs are scarce."] = Demand()
    budget: Annotated[Budget, "Maximum number of steps."] = Budget()
    breaker: Annotated[Breaker, "If too much is due or missing at once, nothing is changed."] = Breaker()
    temporary: Annotated[tuple[Temporary, ...], "Directories below which temporary trees may be deleted."] = ()
    disk: Annotated[DiskMarks, "When a disk is too full."] = DiskMarks()
    reports: Annotated[Reports, "Directories of results and reports."] = Reports()
    images: Annotated[Images, "Unused images."] = Images()
    build_cache: Annotated[BuildCache, "Build cache of image builds."] = BuildCache()
    volumes: Annotated[Volumes, "Unused volumes of a container engine."] = Volumes()
    networks: Annotated[Networks, "Unused networks of a container engine."] = Networks()
    orphans: Annotated[bool, "End processes that are proven to be left over from ended workloads."] = True
    loops: Annotated[s.Count, "Number of ends after which a workload that runs again counts as a restart loop."] = 2
    capture: Annotated[Capture, "Evidence, saved before anything is removed."] = Capture()
    gpu: Annotated[GpuSettings, "The GPUs of this machine: measurements, and checks after work ended."] = GpuSettings()
    notify: Annotated[Notify, "How owners and admins are notified."] = Notify()
    web: Annotated[Web, "The web dashboard."] = Web()
    schedule: Annotated[Schedule, "When passes run."] = Schedule()
    ledger: Annotated[LedgerKeep, "How long records are kept."] = LedgerKeep()
    prices: Annotated[Prices, "What GPUs cost, for `gpukeeper report`. Nothing is decided by it."] = Prices()
    backtest: Annotated[BacktestSettings, "When a backtest is a warning. Nothing is decided by it."] = (
        BacktestSettings()
    )
    metrics: Annotated[MetricsSettings, "What is measured for metrics only. Nothing is decided by it."] = (
        MetricsSettings()
    )
    fleet: Annotated[Fleet, "Copy of this machine's records in a PostgreSQL database that many machines share."] = (
        Fleet()
    )


class Policy(Settings, frozen=True, kw_only=True):
    """All settings for a fleet."""

    scope: Mapping[str, PlaceScope] = {}  # by platform; a platform that is not named is out of scope
    own_ttl: bool = True  # the workload's own TTL counts
    foreign_ttl: tuple[str, ...] = ()  # markers of other tools that count too
    exemptions: tuple[Exemption, ...] | Unknown = ()
    kept: Mapping[str, Kept] = {}  # by category of trees; what is not named here is kept
    hold_total: timedelta = DAY  # a user's holds on one workload, or of one GPU, add up to no more ...
    hold_within: timedelta = 3 * DAY  # ... than this within this time
    keep_alive: str = "/workspace/.keep-alive"  # a file inside that requests a hold while it would be idle
    release: tuple[str, ...] = ()  # what may be taken off a removal that is proven to be stuck, by name
    platforms: Mapping[str, Value] = {}  # by platform: settings that only it reads, of a type of its own
    marks: MarkSettings = MarkSettings()  # on nodes of a cluster
    digest: str = ""  # of the effective values; identifies the policy that decided

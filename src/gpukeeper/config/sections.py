"""The sections of a policy file. Each default is the model's own, so that there is one place to change it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gpukeeper.config import fields as f
from gpukeeper.model import policy as model
from gpukeeper.model.series import Signal
from gpukeeper.notify.catalog import ADMIN_KINDS
from gpukeeper.platforms.kubernetes.settings import KubernetesSettings
from gpukeeper.platforms.ray.settings import RaySettings

PLATFORMS = ("host", "docker", "kubernetes", "ray")


class Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)


def about(default: Any, text: str, **more: Any) -> Any:
    return Field(default=default, description=text, **more)


class Places(Section):
    places: list[str] = about(["*"], "Which hosts or clusters, by name. Patterns as in a shell.")


class KubernetesPlaces(Section):
    """All namespaces are covered only when the file says so."""

    namespaces: list[str] = Field(description='Which namespaces: [research, "team-*"], or ["*"] for every one.')
    places: list[str] = about(["*"], "Which clusters, by name. Patterns as in a shell.")


class Scope(Section):
    host: Places | None = about(None, "This machine itself: temporary trees, what holds GPUs. {} covers it.")
    docker: Places | None = about(None, "Docker hosts. {} covers this host.")
    kubernetes: KubernetesPlaces | None = about(None, "Kubernetes clusters, and which of their namespaces.")
    ray: Places | None = about(None, "Ray clusters. {} covers every one that is found.")
    simulated: Places | None = about(None, "The simulated fleet of `gpukeeper demo`.")


_R = model.Retention()


class Retention(Section):
    succeeded: f.Kept = about(_R.succeeded, "Kept this long after it succeeded. 0: until its evidence is captured.")
    failed: f.Kept = about(_R.failed, "Kept this long after it failed; never shorter than `succeeded`.")
    stopped: f.Kept = about(_R.stopped, "Kept this long when it ended as neither: the platform-wide TTL.")
    max: f.Span = about(_R.max, "The most that a workload's own TTL or a setting above may ask for.")


_C = model.ClassSettings()


class Class(Section):
    idle: f.Limit = about(_C.idle, "Stopped after being idle this long. `none`: no idle rule.")
    idle_when_large: f.Limit = about(
        _C.idle_when_large, "The idle time of what has none and holds more than a slice. `none`: it is only reported."
    )
    tell_when_large: bool = about(
        _C.tell_when_large, "Its owner is told once a day when it has no idle time, holds more than a slice and idles."
    )
    on_idle: f.OnIdleWord = about(_C.on_idle, "`report` tells and does nothing.")
    after_idle: f.AfterIdleWord = about(_C.after_idle, "Whether an idle stop is followed by removal.")
    max_runtime: f.Limit = about(_C.max_runtime, "Stopped after running this long in all, restarts included.")
    start_grace: f.Span = about(_C.start_grace, "No idle rule this long after the first start; once per workload.")
    never_started: f.Limit = about(_C.never_started, "Created and never started: removed after this.")
    grace: f.Span = about(_C.stop_grace, "Time between the signal and the stop, to save work.")
    hold: f.Span = about(_C.hold, "The longest hold that a user may take.")
    hold_after_stop: f.Span = about(
        _C.hold_after_stop, "The GPU stays the owner's this long after a stop of their own."
    )
    untouchable: bool = about(_C.untouchable, "No rule ever acts on it.")


_G = model.Group()


class Group(Section):
    members: list[str] = about(list(_G.members), "User names.")
    unix_group: str | None = about(_G.unix_group, "A Unix group of this machine; its members are added.")
    idle: f.AsClass = about(_G.idle, "In place of the class's idle time, where the class has one. `2x`: twice that.")
    max_runtime: f.AsClass = about(_G.max_runtime, "The same for the maximum runtime, where the class has one.")
    hold_after_stop: f.AsClass = about(_G.hold_after_stop, "The same for `hold_after_stop`.")


class Match(Section):
    class_: str = Field(alias="class", description="The class to assign.")
    platform: str | None = about(None, "Pattern for the platform.")
    namespace: str | None = about(None, "Pattern for the namespace.")
    kind: str | None = about(None, "Pattern for the kind.")
    name: str | None = about(None, "Pattern for the name.")
    owner: str | None = about(None, "Pattern for the owner.")
    image: str | None = about(None, "Pattern for the image.")
    label: str | None = about(None, "`key=value`, or `key` alone.")


class Exemption(Section):
    reason: str = Field(description="Why, in words for the next admin.")
    owner: str | None = about(None, "The owner's name.")
    workload: str | None = about(None, "Its path or the end of it. Patterns allowed.")
    class_: str | None = about(None, "A class.", alias="class")
    rules: list[str] = about([], "The rules it suspends; none named: every rule.")
    until: f.Until = about(None, "Its last day, or a time. Without it: until it is taken out.")
    refused: bool = about(False, "Says no to a workload whose label asks to be left alone.")


_W = model.Warnings()


class Warnings(Section):
    idle: list[f.Share] = about(list(_W.idle), "Warn at these shares of the idle time.")
    runtime: list[f.Share] = about(list(_W.runtime), "Warn at these shares of the maximum runtime.")
    lead: f.Span = about(_W.lead, "The least time between the first warning and the stop.")
    undelivered: f.Span = about(
        _W.undelivered, "Waits this much more when nobody could be told; the announced time includes it."
    )


_A = model.Activity()
_SIGNALS = tuple(signal.value for signal in Signal if signal is not Signal.GPU)


class Activity(Section):
    gpu: f.Percent = about(_A.gpu, "GPU use below this is quiet.")
    gpu_slice: f.Percent = about(_A.gpu_slice, "The same for a part of a GPU.")
    cpu: f.Percent = about(_A.cpu, "CPU use below this is quiet, in percent of one core.")
    network: f.Size = about(_A.network, "Network traffic below this, over the idle time, is quiet.")
    disk: f.Size = about(int(_A.disk), "Disk traffic below this, per second, is quiet.")
    signals: list[Annotated[str, *f.word(*_SIGNALS)]] = about(
        list(_A.signals), "Besides the GPU: activity in any of these keeps."
    )
    settle: f.Span = about(_A.settle, "Quiet this long before it counts as quiet at all.")
    tick: f.Interval = about(_A.tick, "Measured this often.")


_D = model.Demand()


class Demand(Section):
    above: f.Share = about(_D.above, "Demand is high when more than this share of the GPUs is taken ...")
    below: f.Share = about(_D.below, "... and stays high until less than this is.")
    settle: f.Span = about(_D.settle, "For this long, before it counts.")
    idle_factor: f.Share = about(_D.idle_factor, "Under high demand the idle time is this share of itself.")


_B = model.Budget()


class Budget(Section):
    per_pass: f.AmountValue = about(
        _B.per_pass,
        "Steps in one pass; the rest is deferred, oldest first. With `{count: 20, share: 10%}` the smaller holds.",
    )
    per_hour: f.AmountValue = about(_B.per_hour, "Steps in one hour.")
    trees: f.Count = about(_B.trees, "Trees of files in one hour. They end no work and are not counted above.")


_K = model.Breaker()


class Breaker(Section):
    running: f.Share = about(_K.running, "Opens when more than this share of running work is due at once.")
    vanished: f.Share = about(_K.vanished, "Opens when more than this share has vanished since the last pass.")
    floor: f.Count = about(_K.floor, "This many are always believed.")


_T = model.Temporary(root="/tmp", names=())  # noqa: S108  (only its defaults are used)


class Temporary(Section):
    root: f.Root = Field(description="The folder. Nothing outside it is deleted, and links are not followed.")
    names: list[f.NamePattern] = Field(description="Only trees of these names, directly below the root.")
    above: f.Size = about(_T.above, "Looked at only when such trees below the root hold more than this together.")
    older_than: f.Span = about(_T.older_than, "Only what nobody used for this long.")
    under_pressure: f.Span = about(_T.under_pressure, "The same while the disk is too full, see `disk`.")
    keep: list[f.NamePattern] = about(list(_T.keep), "Names that never go. Patterns as in a shell.")


_DM = model.DiskMarks()


class Disk(Section):
    high: f.Share = about(_DM.high, "From here on a disk is too full, by bytes or by inodes: ages shrink ...")
    low: f.Share = about(_DM.low, "... until it is below this.")
    unreadable: list[str] = about(
        list(_DM.unreadable),
        "Programs of root whose open files even root may not see, by the name in /proc/PID/comm, and that you know to "
        "use no trees that may go. Any other process that cannot be looked into keeps every tree.",
    )


_O = model.Reports()


class Reports(Section):
    roots: list[f.Root] = about(list(_O.roots), "Folders; each entry directly below one is a report.")
    older_than: f.Limit = about(
        _O.older_than, "A report goes when its newest file is older than this. `none`: only reported."
    )
    keep: list[f.NamePattern] = about(list(_O.keep), "Names that never go. Patterns as in a shell.")
    keep_last: f.CountOrZero = about(_O.keep_last, "The newest ones of each root that never go, however old.")
    archive: bool = about(_O.archive, "Saved as evidence first, so that `restore` brings it back.")


_Y = RaySettings()


class Ray(Section):
    workers: list[str] = about(
        list(_Y.workers), "Containers that are Ray nodes: names, or labels as `key=value`. Patterns as in a shell."
    )
    dashboard: f.Address = about(_Y.dashboard, "Where Ray's dashboard is. Without it: where the cluster says it is.")
    roots: list[f.Root] = about(list(_Y.roots), "Folders of temporary files, as each node sees them.")
    names: list[f.NamePattern] = about(list(_Y.names), "Only trees of these names, directly below a root.")
    keep: list[f.NamePattern] = about(list(_Y.keep), "Names that never go. Patterns as in a shell.")
    above: f.Size = about(_Y.above, "Looked at only when such trees of a node, in all its roots, hold more than this.")
    above_counts: f.CountedWord = about(
        _Y.above_counts, "`all`: what is compared with `above` is everything in its roots, not only trees that may go."
    )
    older_than: f.Span = about(_Y.older_than, "Only what nobody used for this long, on a node that Ray calls idle.")
    under_pressure: f.Span = about(_Y.under_pressure, "The same while the disk is too full, see `disk`.")
    cpu: f.Percent = about(
        _Y.cpu, "A node that uses more is busy, whatever Ray says: percent of one core, without Ray's own programs."
    )
    window: f.Interval = about(_Y.window, "CPU use is measured at least this long.")
    sessions: f.Limit = about(
        _Y.sessions, "Dead sessions go when unused for this long; never under an hour. `none`: only reported."
    )
    logs: f.Limit = about(_Y.logs, "The same of logs of ended processes of a live session, told by the full hour.")


_I = model.Images()


class Images(Section):
    unused: f.Limit = about(_I.unused, "Removed when unused for this long, as far as was seen. `none`: only reported.")
    keep: list[str] = about(list(_I.keep), "Never removed: names of images. Patterns as in a shell.")


_BC = model.BuildCache()


class BuildCache(Section):
    unused: f.Limit = about(_BC.unused, "Removed when no build used it for this long. `none`: only reported.")


_E = model.Capture()
_EVIDENCE = tuple(_E.what)


class Capture(Section):
    to: f.Folder | None = about(_E.to, "Where evidence is kept. Without it: below the ledger's folder.")
    what: list[Annotated[str, *f.word(*_EVIDENCE)]] = about(list(_E.what), "What is captured before a removal.")
    keep: f.Span = about(_E.keep, "Kept this long.")
    quota: f.Size = about(_E.quota, "At most this much; when it is full, nothing more is removed.")


_N = model.Notify()


class Notify(Section):
    admins: list[f.AdminChannelValue] = about(
        list(_N.admins),
        "Channels for problems, besides the log of `serve`. Each is one of: "
        + "; ".join(f"`{name}: {kind.example}`" for name, kind in ADMIN_KINDS.items())
        + ".",
    )


_S = model.Schedule()


class Schedule(Section):
    every: f.Interval = about(_S.every, "The interval between passes.")
    at: f.Cron = about(
        _S.at, "Acts only in passes at these times (cron expression, local time); observes in every pass."
    )


_L = model.LedgerKeep()


class Ledger(Section):
    keep: f.Span = about(_L.keep, "Entries are kept this long.")
    archive_after: f.Span = about(_L.archive_after, "Older entries go to the archive.")
    signals: f.Span = about(_L.signals, "Measurements are kept this long.")


_U = model.GpuSettings()


class Gpu(Section):
    reset: bool = about(_U.reset, "A GPU that stays dirty and that nobody holds is reset, at most once a day.")
    settle: f.Interval = about(_U.settle, "A GPU that is not clean this long after its work ended is quarantined.")
    dcgm: f.Address = about(_U.dcgm, "Where a DCGM exporter tells its metrics: http://localhost:9400/metrics.")
    stop_on_taken: bool = about(
        _U.stop_on_taken,
        "Work that is started again onto a GPU that somebody else has by then is stopped one pass after the warning. "
        "Without it its owner is warned only.",
    )


_Q = KubernetesSettings()


class Kubernetes(Section):
    context: str | None = about(_Q.context, "Which context of the kubeconfig. Without it: the current one.")
    requests: f.Rate = about(_Q.requests, "Requests per second to one cluster, whoever asks.")
    burst: f.Count = about(_Q.burst, "That many at once.")
    page: f.Count = about(_Q.page, "Objects in one page of a list; memory follows it.")
    environments: dict[str, str] = about(
        dict(_Q.environments), "Pattern of namespaces: their environment. The label gpukeeper.io/environment wins."
    )
    gitops: bool = about(_Q.gitops, "Also act on what a GitOps tool manages. It returns.")
    release: list[str] = about(
        list(model.Policy().release),
        "Finalizers that may be taken off when a removal is stuck and proven never to end by itself.",
    )
    prometheus: f.Address = about(_Q.prometheus, "A Prometheus with DCGM metrics: http://prometheus:9090.")
    prometheus_labels: dict[str, str] = about(
        dict(_Q.prometheus_labels), "Labels of this cluster's series, where a Prometheus knows several clusters."
    )
    exporters: list[str] = about(list(_Q.exporters), "Without a Prometheus: addresses of DCGM exporters.")


_P = model.Policy()


class Holds(Section):
    total: f.Span = about(
        _P.hold_total, "A user's holds on one workload, or of one GPU, add up to no more than this ..."
    )
    within: f.Span = about(_P.hold_within, "... within this time.")
    keep_alive: str = about(_P.keep_alive, "A file inside a workload that asks for a hold when it would be idle.")


class Ttl(Section):
    own: bool = about(_P.own_ttl, "A workload's own TTL counts, both ways, up to `retention.max`.")
    foreign: list[str] = about(list(_P.foreign_ttl), "Markers of other tools that count too, such as janitor/ttl.")


class PolicyFile(Section):
    """A whole policy file after merging."""

    preset: str = about(_P.preset, "Where values come from that the file does not give.")
    mode: f.ModeWord = about(
        _P.mode, "`plan` looks only, until a person confirms `apply` on a terminal; `enforce` acts unattended."
    )
    scope: Scope = about(Scope(), "What the policy covers. A platform that is not named is never touched.")
    retention: Retention = about(Retention(), "How long what ended is kept. `manual`: until somebody removes it.")
    environments: dict[str, Retention] = about(
        {}, "Other retention by environment; what is not given is as in `retention`."
    )
    at_finish: f.AtFinishWord = about(
        _P.at_finish, "Which parts are ended when the whole finishes: `All`, those still `Running`, or `None`."
    )
    ttl: Ttl = about(Ttl(), "Times to live that workloads carry themselves.")
    classes: dict[str, Class] = about({}, "Limits by class of workload. New names make new classes.")
    groups: dict[str, Group] = about(
        {},
        "People with other limits. A group's value replaces the class's, shorter or longer; of several groups of one "
        "owner the most generous holds. `2x` or `0.5x` is a factor of the class's value. Only for verified owners; "
        "for others the class's values hold.",
    )
    admins: list[str] = about(list(_P.admins), "May hold, release and stop anybody's work.")
    owner_labels: list[str] = about(
        list(_P.owner_labels), "Labels only the site's own wrapper can set, so that they alone prove the owner."
    )
    match: list[Match] = about([], "Assigns classes. Every pattern given must fit; the first that fits wins.")
    exemptions: list[Exemption] = about([], "Suspends rules for an owner, a workload or a class.")
    exemptions_from: str | None = about(None, "A file with more exemptions that other tools write.")
    warnings: Warnings = about(Warnings(), "When people are warned.")
    activity: Activity = about(Activity(), "What counts as idle.")
    demand: Demand = about(Demand(), "When GPUs are scarce, idle time shrinks.")
    budget: Budget = about(Budget(), "How much may happen.")
    breaker: Breaker = about(Breaker(), "When the world looks broken, nothing is touched.")
    temporary: list[Temporary] = about([], "Folders below which temporary trees may be deleted.")
    disk: Disk = about(Disk(), "When a disk is too full.")
    reports: Reports = about(Reports(), "Folders of results and reports.")
    ray: Ray = about(Ray(), "Ray nodes on this machine: which they are, and what of their temporary files goes.")
    images: Images = about(Images(), "Images that nothing refers to.")
    build_cache: BuildCache = about(BuildCache(), "What image builds left for the next build.")
    orphans: bool = about(_P.orphans, "Proven remainders of ended workloads are ended.")
    loops: f.Count = about(_P.loops, "Ends of one workload, while it runs again, that make it a loop.")
    holds: Holds = about(Holds(), "How much a user may hold.")
    capture: Capture = about(Capture(), "Evidence, saved before anything is removed.")
    gpu: Gpu = about(Gpu(), "The GPUs of this machine: measuring them, and proving them clean after work ended.")
    kubernetes: Kubernetes = about(Kubernetes(), "How clusters are looked at.")
    notify: Notify = about(Notify(), "How admins are notified.")
    schedule: Schedule = about(Schedule(), "When passes happen.")
    ledger: Ledger = about(Ledger(), "How long records are kept.")

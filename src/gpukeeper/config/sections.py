"""The sections of a policy file. Each default is the model's own, so that there is one place to change it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpukeeper.config import fields as f
from gpukeeper.config.acceptance_section import Acceptance
from gpukeeper.config.disk_sections import BuildCache, Disk, Images, Networks, Ray, Reports, Temporary, Volumes
from gpukeeper.config.section import Section, about
from gpukeeper.config.web_section import Web
from gpukeeper.model import policy as model
from gpukeeper.model.series import Signal
from gpukeeper.notify.catalog import ADMIN_KINDS, OWNER_KINDS
from gpukeeper.notify.quiet import EXAMPLE as QUIET_EXAMPLE
from gpukeeper.platforms.kubernetes.settings import KubernetesSettings

PLATFORMS = ("host", "docker", "kubernetes", "ray")


class Places(Section):
    places: list[str] = about(["*"], "Hosts or clusters, by name. Shell patterns.")


class KubernetesPlaces(Section):
    """All namespaces are covered only if the file requests it."""

    namespaces: list[str] = Field(description='Namespaces: [research, "team-*"], or ["*"] for all.')
    places: list[str] = about(["*"], "Clusters, by name. Shell patterns.")


class Scope(Section):
    host: Places | None = about(None, "This machine itself: temporary trees, processes that hold GPUs. {} covers it.")
    docker: Places | None = about(None, "Docker hosts. {} covers this host.")
    kubernetes: KubernetesPlaces | None = about(None, "Kubernetes clusters and their namespaces.")
    ray: Places | None = about(None, "Ray clusters. {} covers all that are found.")
    simulated: Places | None = about(None, "The simulated fleet of `gpukeeper demo`.")


_R = model.Retention()


class Retention(Section):
    succeeded: f.Kept = about(_R.succeeded, "Time to keep work that succeeded. 0: until its evidence is captured.")
    failed: f.Kept = about(_R.failed, "Time to keep work that failed; not shorter than `succeeded`.")
    stopped: f.Kept = about(_R.stopped, "Time to keep work that neither succeeded nor failed.")
    max: f.Span = about(_R.max, "Maximum for a workload's own TTL and for the settings above.")


_C = model.ClassSettings()


class Class(Section):
    idle: f.Limit = about(_C.idle, "Stop after this idle time. `none`: no idle rule.")
    idle_when_large: f.Limit = about(
        _C.idle_when_large, "Idle time for work without one that holds more than a slice. `none`: only report."
    )
    tell_when_large: bool = about(
        _C.tell_when_large,
        "Notify the owner once a day if work without an idle time holds more than a slice and is idle.",
    )
    on_idle: f.OnLimitWord = about(_C.on_idle, "Action for idle work. `report`: only report.")
    after_idle: f.AfterIdleWord = about(
        _C.after_idle,
        "Action after an idle stop. `keep`: kept like other stopped work; on a cluster, until a person acts.",
    )
    max_runtime: f.Limit = about(_C.max_runtime, "Stop after this total runtime, restarts included.")
    on_max_runtime: f.OnLimitWord = about(
        _C.on_max_runtime, "Action for work above its maximum runtime. `report`: only report."
    )
    start_grace: f.Span = about(_C.start_grace, "Time after the first start without idle rule; once per workload.")
    never_started: f.Limit = about(_C.never_started, "Remove work that was created and not started within this time.")
    grace: f.Span = about(_C.stop_grace, "Grace period between SIGTERM and the forced end, to save work.")
    hold: f.Span = about(_C.hold, "Maximum duration of a user's hold.")
    hold_after_stop: f.Span = about(
        _C.hold_after_stop, "Time that the GPU is reserved for the owner after they stopped their own work."
    )
    untouchable: bool = about(_C.untouchable, "No rule acts on this class.")


_G = model.Group()


class Group(Section):
    members: list[str] = about(list(_G.members), "User names.")
    unix_group: str | None = about(_G.unix_group, "Unix group of this machine; its members are added.")
    idle: f.AsClass = about(_G.idle, "Replaces the class's idle time, if the class has one. `2x`: twice that.")
    max_runtime: f.AsClass = about(_G.max_runtime, "The same for the maximum runtime, if the class has one.")
    hold_after_stop: f.AsClass = about(_G.hold_after_stop, "The same for `hold_after_stop`.")


class Match(Section):
    class_: str = Field(alias="class", description="The class to assign.")
    platform: str | None = about(None, "Pattern for the platform.")
    namespace: str | None = about(None, "Pattern for the namespace.")
    kind: str | None = about(None, "Pattern for the kind.")
    name: str | None = about(None, "Pattern for the name.")
    owner: str | None = about(None, "Pattern for the owner.")
    image: str | None = about(None, "Pattern for the image.")
    label: str | None = about(None, "Label: `key=value`, or `key` alone.")


class Exemption(Section):
    reason: str = Field(description="Reason, for other admins.")
    owner: str | None = about(None, "Name of the owner.")
    workload: str | None = about(None, "Path of the workload, or an ending of it. Shell patterns.")
    class_: str | None = about(None, "Name of a class.", alias="class")
    rules: list[str] = about([], "Rules to suspend. Empty: all rules.")
    until: f.Until = about(None, "Last day, or a time. Default: no end.")
    refused: bool = about(False, "Refuse a workload's own request for an exemption.")


_W = model.Warnings()


class Warnings(Section):
    idle: list[f.Share] = about(list(_W.idle), "Warn at these shares of the idle time.")
    runtime: list[f.Share] = about(list(_W.runtime), "Warn at these shares of the maximum runtime.")
    lead: f.Span = about(_W.lead, "Minimum time between the first warning and the stop.")
    undelivered: f.Span = about(
        _W.undelivered, "Additional time if a warning could not be delivered; included in the announced time."
    )
    require_delivery: bool = about(
        _W.require_delivery,
        "Stop idle work only after a warning was delivered to its owner. `false`: after `undelivered`, too. Other "
        "rules, such as the maximum runtime, always act after `undelivered`.",
    )


_A = model.Activity()
_SIGNALS = tuple(signal.value for signal in Signal if signal is not Signal.GPU)


class Activity(Section):
    gpu: f.Percent = about(_A.gpu, "GPU utilization below this is idle.")
    gpu_slice: f.Percent = about(_A.gpu_slice, "The same for a slice of a GPU.")
    cpu: f.Percent = about(_A.cpu, "CPU usage below this is idle, in percent of one core.")
    network: f.Size = about(_A.network, "Network traffic below this, over the idle time, is idle.")
    disk: f.Size = about(int(_A.disk), "Disk traffic below this, per second, is idle.")
    signals: list[Annotated[str, *f.word(*_SIGNALS)]] = about(
        list(_A.signals), "Further signals besides the GPU: activity in any of them means not idle."
    )
    settle: f.Span = about(_A.settle, "Minimum time below the thresholds before it counts as idle.")
    tick: f.Interval = about(_A.tick, "Interval of measurements.")


_D = model.Demand()


class Demand(Section):
    above: f.Share = about(_D.above, "Demand is high if more than this share of the GPUs is in use ...")
    below: f.Share = about(_D.below, "... and stays high until less than this share is in use.")
    settle: f.Span = about(_D.settle, "Time above the threshold before demand counts as high.")
    idle_factor: f.Share = about(
        _D.idle_factor, "Factor for idle times while demand is high. 100%: demand changes nothing."
    )


_B = model.Budget()


class Budget(Section):
    per_pass: f.AmountValue = about(
        _B.per_pass,
        "Maximum steps per pass; the rest is deferred, oldest first. `{count: 20, share: 10%}`: the smaller applies.",
    )
    per_hour: f.AmountValue = about(_B.per_hour, "Maximum steps per hour.")
    trees: f.Count = about(_B.trees, "Maximum directory trees per hour. They end no work and are not counted above.")


_K = model.Breaker()


class Breaker(Section):
    running: f.Share = about(_K.running, "Opens if more than this share of running work is due at once.")
    vanished: f.Share = about(_K.vanished, "Opens if more than this share is missing since the last pass.")
    floor: f.Count = about(_K.floor, "Up to this number the breaker never opens.")


_M = model.MetricsSettings()


class Metrics(Section):
    sizes: f.Limit = about(
        _M.sizes,
        "How often the bytes of images, containers and logs are measured; less often if that is slow. `none`: never.",
    )


_E = model.Capture()
_EVIDENCE = tuple(_E.what)


class Capture(Section):
    to: f.Folder | None = about(_E.to, "Directory of the evidence. Default: below the ledger's directory.")
    what: list[Annotated[str, *f.word(*_EVIDENCE)]] = about(list(_E.what), "What to capture before a removal.")
    keep: f.Span = about(_E.keep, "Time to keep evidence.")
    quota: f.Size = about(_E.quota, "Maximum size of the evidence. If it is used up, nothing more is removed.")


_N = model.Notify()


class Notify(Section):
    admins: list[f.AdminChannelValue] = about(
        list(_N.admins),
        "Channels for problems, besides the log of `serve`. Each is one of: "
        + "; ".join(f"`{name}: {kind.example}`" for name, kind in ADMIN_KINDS.items())
        + ".",
    )
    owners: list[f.OwnerChannelValue] = about(
        list(_N.owners),
        "Channels for warnings and other messages to owners, besides their terminals. Each is one of: "
        + "; ".join(f"`{name}: {kind.example}`" for name, kind in OWNER_KINDS.items())
        + ".",
    )
    addresses: dict[str, f.OwnerAddress] = about(
        dict(_N.addresses), "Addresses of owners, by name: `{ann: ann.smith@uni.example}`."
    )
    address: f.AddressTemplate = about(
        _N.address, 'Address of owners without an entry in `addresses`: "{owner}@uni.example".'
    )
    address_command: f.AddressCommand = about(
        _N.address_command,
        "Program that prints the address of an owner, whose name is its last argument. Used if there is no `address`.",
    )
    digest: f.Limit = about(
        _N.digest, "Collect notices to an owner, from which nothing follows, into one message per interval."
    )
    quiet: f.Quiet = about(
        _N.quiet,
        f'Hours without mail and chat messages to owners: "{QUIET_EXAMPLE}". A warning in these hours counts as not '
        "delivered.",
    )


_S = model.Schedule()


class Schedule(Section):
    every: f.Interval = about(_S.every, "Interval of passes.")
    at: f.Cron = about(_S.at, "Act only in passes at these times (cron expression, local time). Every pass observes.")


_L = model.LedgerKeep()


class Ledger(Section):
    keep: f.Span = about(_L.keep, "Time to keep entries.")
    archive_after: f.Span = about(_L.archive_after, "Entries older than this are archived; at least 1d.")
    signals: f.Span = about(_L.signals, "Time to keep measurements.")


_PR = model.Prices()


class Prices(Section):
    currency: f.Currency = about(_PR.currency, "Shown beside amounts: EUR, USD, …")
    per_gpu_hour: dict[str, f.Price] = about(
        dict(_PR.per_gpu_hour),
        'Price of one hour of one GPU, by model: `{"NVIDIA H100*": 2.5}`. Shell patterns; the first that matches '
        "applies. A slice costs its share.",
    )


_BT = model.BacktestSettings()


class Backtest(Section):
    regret_max: f.Share = about(
        _BT.regret_max,
        "`policy check` and `doctor` warn if more stops by this policy would have been regretted on recorded work "
        "(`gpukeeper backtest --record`).",
    )


_F = model.Fleet()


class Fleet(Section):
    copy_to: f.DatabaseAddress = about(
        _F.copy_to,
        "URL of the fleet database, without a password: postgresql://gpukeeper_machine_node-1@db.example/gpukeeper. "
        "Needs the extra `postgres`. Default: no copy.",
    )
    password_file: f.SecretFile = about(_F.password_file, "File with the password of the machine's role, mode 0600.")
    machine: f.MachineName = about(_F.machine, "Name of this machine in the fleet. Default: the host name.")
    signals: bool = about(_F.signals, "Also copy measurements, in buckets of one minute.")
    keep_unsent: f.Span = about(
        _F.keep_unsent, "Keep entries that were not copied this much longer in the ledger before they are archived."
    )
    request_key_file: f.SecretFile = about(
        _F.request_key_file,
        "File with the key that the web server signs requests with, mode 0600. Default: no requests are accepted.",
    )
    same_users: bool = about(
        _F.same_users,
        "A user name means the same person on all machines. If false, ann who logged in at web-1 is `ann@web-1` here.",
    )


_U = model.GpuSettings()


class Gpu(Section):
    reset: bool = about(_U.reset, "Reset a GPU that stays dirty while no process holds it, at most once a day.")
    settle: f.Interval = about(_U.settle, "Quarantine a GPU that is not clean this long after its work ended.")
    dcgm: f.Address = about(_U.dcgm, "URL of a DCGM exporter: http://localhost:9400/metrics.")
    stop_on_taken: bool = about(
        _U.stop_on_taken,
        "Stop work that was restarted on a GPU that another workload uses meanwhile, one pass after the warning. "
        "If false, only warn the owner.",
    )


_Q = KubernetesSettings()


class Kubernetes(Section):
    context: str | None = about(_Q.context, "Context of the kubeconfig. Default: the current one.")
    requests: f.Rate = about(_Q.requests, "Maximum requests per second to one cluster, in total.")
    burst: f.Count = about(_Q.burst, "Number of requests in a burst.")
    page: f.Count = about(_Q.page, "Objects per page of a list; memory usage grows with it.")
    environments: dict[str, str] = about(
        dict(_Q.environments), "Environment by namespace pattern. The label gpukeeper.io/environment takes precedence."
    )
    gitops: bool = about(_Q.gitops, "Also act on objects that a GitOps tool manages. The tool recreates them.")
    release: list[str] = about(
        list(model.Policy().release),
        "Finalizers that may be removed from an object whose deletion is proven to be stuck.",
    )
    prometheus: f.Address = about(_Q.prometheus, "URL of a Prometheus with DCGM metrics: http://prometheus:9090.")
    prometheus_labels: dict[str, str] = about(
        dict(_Q.prometheus_labels), "Labels of this cluster's series, if the Prometheus has several clusters."
    )
    exporters: list[str] = about(list(_Q.exporters), "URLs of DCGM exporters, if there is no Prometheus.")


_P = model.Policy()


class Holds(Section):
    total: f.Span = about(_P.hold_total, "Maximum total of a user's holds on one workload or one GPU ...")
    within: f.Span = about(_P.hold_within, "... within this time.")
    keep_alive: str = about(_P.keep_alive, "Path of a file inside a workload that requests a hold.")


class Ttl(Section):
    own: bool = about(_P.own_ttl, "Use a workload's own TTL, shorter or longer, up to `retention.max`.")
    foreign: list[str] = about(
        list(_P.foreign_ttl), "TTL annotations of other tools to use as well, such as janitor/ttl."
    )


class PolicyFile(Section):
    """A whole policy file after merging."""

    preset: str = about(_P.preset, "Source of values that the file does not set.")
    mode: f.ModeWord = about(
        _P.mode, "`plan`: dry run, unless a person confirms `apply` on a terminal. `enforce`: acts unattended."
    )
    scope: Scope = about(Scope(), "What the policy covers. Other platforms are never changed.")
    retention: Retention = about(Retention(), "How long finished work is kept. `manual`: until a person removes it.")
    environments: dict[str, Retention] = about({}, "Retention by environment. Defaults: as in `retention`.")
    at_finish: f.AtFinishWord = about(
        _P.at_finish, "Which children to end when their root finishes: `All`, those still `Running`, or `None`."
    )
    ttl: Ttl = about(Ttl(), "TTLs that workloads set for themselves.")
    classes: dict[str, Class] = about({}, "Limits by class of workload. A new name defines a new class.")
    groups: dict[str, Group] = about(
        {},
        "Limits for groups of users. A group's value replaces the class's, shorter or longer; of several groups of one "
        "owner the most generous value applies. `2x` or `0.5x` is a factor of the class's value. Applies to verified "
        "owners only; for others the class's values apply.",
    )
    admins: list[str] = about(list(_P.admins), "Users who may hold, release, stop and remove the work of all users.")
    owner_labels: list[str] = about(
        list(_P.owner_labels), "Labels that only the site's own wrapper can set, and that therefore prove the owner."
    )
    match: list[Match] = about(
        [], "Assigns classes. All patterns of an entry must match; the first matching entry applies."
    )
    exemptions: list[Exemption] = about([], "Suspends rules for an owner, a workload or a class.")
    exemptions_from: str | None = about(None, "File with further exemptions, written by other tools.")
    warnings: Warnings = about(Warnings(), "When owners are warned.")
    activity: Activity = about(Activity(), "What counts as idle.")
    demand: Demand = about(Demand(), "Shorter idle times while GPUs are scarce.")
    budget: Budget = about(Budget(), "Maximum number of steps.")
    breaker: Breaker = about(Breaker(), "If too much is due or missing at once, nothing is changed.")
    temporary: list[Temporary] = about([], "Directories below which temporary trees may be deleted.")
    disk: Disk = about(Disk(), "When a disk is too full.")
    reports: Reports = about(Reports(), "Directories of results and reports.")
    ray: Ray = about(Ray(), "Ray nodes on this machine, and which of their temporary files may be deleted.")
    images: Images = about(Images(), "Unused images.")
    build_cache: BuildCache = about(BuildCache(), "Build cache of image builds.")
    volumes: Volumes = about(Volumes(), "Unused volumes of a container engine.")
    networks: Networks = about(Networks(), "Unused networks of a container engine.")
    orphans: bool = about(_P.orphans, "End processes that are proven to be left over from ended workloads.")
    loops: f.Count = about(_P.loops, "Number of ends after which a workload that runs again counts as a restart loop.")
    holds: Holds = about(Holds(), "Limits of holds.")
    capture: Capture = about(Capture(), "Evidence, saved before anything is removed.")
    gpu: Gpu = about(Gpu(), "The GPUs of this machine: measurements, and checks after work ended.")
    kubernetes: Kubernetes = about(Kubernetes(), "Access to Kubernetes clusters.")
    acceptance: Acceptance = about(Acceptance(), "What acceptance runs and quarantines may change on nodes.")
    notify: Notify = about(Notify(), "How owners and admins are notified.")
    web: Web = about(Web(), "The web dashboard.")
    schedule: Schedule = about(Schedule(), "When passes run.")
    ledger: Ledger = about(Ledger(), "How long records are kept.")
    prices: Prices = about(Prices(), "What GPUs cost, for `gpukeeper report`. Nothing is decided by it.")
    backtest: Backtest = about(Backtest(), "When a backtest is a warning. Nothing is decided by it.")
    metrics: Metrics = about(Metrics(), "What is measured for metrics only. Nothing is decided by it.")
    fleet: Fleet = about(Fleet(), "Copy of this machine's records in a PostgreSQL database that many machines share.")

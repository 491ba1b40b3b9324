"""What the schema cannot check: values that are valid alone and contradict each other, would delete too much, or
would let the wrong people in. One sentence for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from ipaddress import ip_network
from itertools import pairwise
from pathlib import PurePosixPath

from gpukeeper.config.layers import PRESETS
from gpukeeper.config.machine import members_of
from gpukeeper.config.problems import Path, Problem, did_you_mean, in_words
from gpukeeper.config.sections import PLATFORMS, PolicyFile, Scope
from gpukeeper.config.units import share_in_words, span_in_words
from gpukeeper.config.units import span_in_words as words
from gpukeeper.engine.schedule import acts_in_a_row
from gpukeeper.lifecycle.decide import RULES
from gpukeeper.lifecycle.warnings import valid_for
from gpukeeper.model.policy import HOUR, Exemption, Match, Mode, OnLimit, Policy, Retention, Schedule, Temporary, Web
from gpukeeper.platforms.ray.settings import RaySettings

NO_SCOPE = (
    "scope is not set, so the policy would cover nothing."
    " Write for example scope: {docker: {}} or scope: {kubernetes: {namespaces: [research]}}."
)
ANY_YEAR = datetime(2026, 1, 1, tzinfo=UTC)  # cron words repeat
# An exemption suspends rules that act. Suspending one that protects would expose the work it is meant to protect.
RULE_NAMES = [rule.name for rule in RULES if rule.acts]


def check(file: PolicyFile, *, needs_scope: bool = True) -> Iterator[Problem]:
    if needs_scope or file.scope != Scope():
        yield from _scope(file)
    yield from _preset(file)
    yield from _retention(file)
    yield from _idle_times(file)
    yield from _runtimes(file)
    yield from _warnings(file)
    yield from _thresholds(file)
    yield from _holds(file)
    yield from _groups(file)
    yield from _matches(file)
    yield from _exemptions(file)
    yield from check_trees(file)
    yield from check_web(file.web)


def _scope(file: PolicyFile) -> Iterator[Problem]:
    covered = {name: getattr(file.scope, name) for name in PLATFORMS if getattr(file.scope, name) is not None}
    if not covered:
        yield Problem((("scope",),), NO_SCOPE, name_setting=False)
    for name, places in covered.items():
        for key in ("places", "namespaces"):
            if getattr(places, key, None) == ():
                yield Problem(
                    (("scope", name, key),), 'an empty list covers nothing. List names, or write ["*"] for all.'
                )


def _preset(file: PolicyFile) -> Iterator[Problem]:
    if file.preset not in PRESETS:
        yield Problem((("preset",),), f'unknown preset "{file.preset}". {did_you_mean(file.preset, list(PRESETS))}')


def _retention(file: PolicyFile) -> Iterator[Problem]:
    yield from _kept(file.retention, ("retention",))
    for name, retention in file.environments.items():
        yield from _kept(retention, ("environments", name))


def _kept(retention: Retention, at: Path) -> Iterator[Problem]:
    ok, failed = retention.succeeded, retention.failed
    if failed is not None and (ok is None or ok > failed):
        yield Problem(
            ((*at, "succeeded"), (*at, "failed")),
            f"succeeded work would be kept {'forever' if ok is None else words(ok)}"
            f" and failed work only {words(failed)}."
            " Failed work must be kept at least as long: increase failed or decrease succeeded.",
        )
    for name in ("succeeded", "failed", "stopped"):
        kept = getattr(retention, name)
        if kept is not None and kept > retention.max:
            yield Problem(
                ((*at, name), (*at, "max")),
                f"{name} is {words(kept)}, more than the maximum ({words(retention.max)})."
                f" Write at most {words(retention.max)}, or increase {in_words((*at, 'max'))}.",
            )


def _idle_limits(file: PolicyFile) -> list[tuple[Path, timedelta]]:
    """Every idle time that leads to a stop or report, shortest first."""
    live = [(name, one) for name, one in file.classes.items() if not one.untouchable]
    classes = [(("classes", name, key), getattr(one, key)) for name, one in live for key in ("idle", "idle_when_large")]
    found = [*classes, *_of_groups(file, "idle", [one.idle for _, one in live])]
    return sorted(((path, idle) for path, idle in found if idle is not None), key=lambda pair: pair[1])


def _of_groups(
    file: PolicyFile, setting: str, of_classes: list[timedelta | None]
) -> Iterator[tuple[Path, timedelta | None]]:
    """A group's value; a factor, of each class that has a limit."""
    for name, group in file.groups.items():
        given: timedelta | float | None = getattr(group, setting)
        path: Path = ("groups", name, setting)
        if isinstance(given, float):
            yield from ((path, own * given) for own in of_classes if own is not None)
        else:
            yield path, given


def _idle_times(file: PolicyFile) -> Iterator[Problem]:
    tick, settle = file.activity.tick, file.activity.settle
    for path, idle in _idle_limits(file):
        if idle < 2 * tick:
            yield Problem(
                (path, ("activity", "tick")),
                f"an idle time of {words(idle)} is shorter than two measurements (activity.tick is {words(tick)})."
                f" Write at least {words(2 * tick)}, or none for no idle rule.",
                once="tick",
            )
        elif idle < settle:
            yield Problem(
                (path, ("activity", "settle")),
                f"an idle time of {words(idle)} is shorter than activity.settle ({words(settle)}),"
                f" so it would never be reached. Write at least {words(settle)}.",
                once="settle",
            )


def _runtimes(file: PolicyFile) -> Iterator[Problem]:
    limits: list[tuple[Path, timedelta | None]] = []
    limits += [(("classes", name, "max_runtime"), one.max_runtime) for name, one in file.classes.items()]
    limits += _of_groups(file, "max_runtime", [])
    for path, limit in limits:
        if limit is not None and not limit:
            none = "none for no limit" if path[0] == "classes" else "as class for the class's own"
            yield Problem((path,), f"0 would stop everything as soon as it starts. Write it like 24h, or {none}.")


def _warnings(file: PolicyFile) -> Iterator[Problem]:
    for name in ("idle", "runtime"):
        yield from _stages(getattr(file.warnings, name), ("warnings", name))
    for path, limit in _stops(file):
        if file.warnings.lead >= limit > timedelta():
            yield Problem(
                (path, ("warnings", "lead")),
                f"{in_words(path)} is {words(limit)} and warnings.lead is {words(file.warnings.lead)},"
                " so the first warning would come after the stop. Write a longer limit or a shorter lead.",
                once="lead",
            )


def never_stopped(file: PolicyFile, policy: Policy) -> Iterator[str]:
    """A warning: passes act so rarely that each warning has expired at the next one, and the owner is warned again."""
    for path, limit in _in_scope(file, policy):
        stages = policy.warnings.runtime if "max_runtime" in path else policy.warnings.idle
        valid = valid_for(policy.warnings, limit)
        if not acts_in_a_row(policy.schedule, ANY_YEAR, len(stages) + 1, valid):
            yield _expiring(policy.schedule, f"{in_words(path)} ({words(limit)})", len(stages), words(valid))
            return  # the shortest applies to all


def _in_scope(file: PolicyFile, policy: Policy) -> list[tuple[Path, timedelta]]:
    """Outside Docker only a class of the match list has limits that end in a stop, unless `cluster` was changed."""
    matched = {"cluster", "ray", *(entry.class_ for entry in file.match)}
    return [one for one in _stops(file) if "docker" in policy.scope or one[0][1] in matched]


def never_reached(file: PolicyFile, policy: Policy) -> Iterator[str]:
    """A warning: idle work is stopped only after a delivered warning, and owners have nothing but terminals."""
    if policy.mode is not Mode.ENFORCE or not policy.warnings.require_delivery or policy.notify.owners:
        return
    if any("max_runtime" not in path for path, _ in _in_scope(file, policy)):
        yield (
            "notify.owners: owners have no mail or chat, so a warning reaches only those with an open terminal. Idle "
            "work of all others is kept, however long it is idle. Set notify.owners, or warnings.require_delivery: "
            "false to stop it without a delivered warning."
        )


def _expiring(schedule: Schedule, limit: str, stages: int, valid: str) -> str:
    rare = f'schedule.at: passes act only at "{schedule.at}".'
    passes = rare if schedule.at else "schedule.every: passes are too far apart."
    return (
        f"{passes} A stop after {limit} needs {stages} warnings, each valid for {valid}."
        " They expire before the next pass, so such work is warned at every pass and never stopped."
        f" Use a schedule with {stages + 1} passes in a row that are at most {valid} apart."
    )


def _stages(stages: tuple[float, ...], at: Path) -> Iterator[Problem]:
    if not stages:
        yield Problem((at,), "an empty list means no warnings. Write at least one share, like [80%].")
    if any(stage >= 1 for stage in stages):
        yield Problem((at,), "a warning at 100% would be sent at the stop. Write shares below 100%, like [80%, 95%].")
    elif any(b <= a for a, b in pairwise(stages)):
        given = ", ".join(share_in_words(stage) for stage in stages)
        ordered = ", ".join(share_in_words(stage) for stage in sorted(set(stages)))
        yield Problem((at,), f"[{given}] is not in ascending order. Write [{ordered}].")


def _stops(file: PolicyFile) -> list[tuple[Path, timedelta]]:
    """Every limit that ends in a stop, shortest first."""
    found: list[tuple[Path, timedelta | None]] = []
    for name, one in file.classes.items():
        if not one.untouchable:
            found.append((("classes", name, "idle"), one.idle if one.on_idle is OnLimit.STOP else None))
            large = one.idle_when_large if one.idle is None and one.on_idle is OnLimit.STOP else None
            found.append((("classes", name, "idle_when_large"), large))
            longest = one.max_runtime if one.on_max_runtime is OnLimit.STOP else None
            found.append((("classes", name, "max_runtime"), longest))
    for setting in ("idle", "max_runtime"):
        limits = [limit for path, limit in found if path[::2] == ("classes", setting) and limit is not None]
        found += _of_groups(file, setting, [*limits]) if limits else ()
    return sorted(((path, limit) for path, limit in found if limit is not None), key=lambda pair: pair[1])


def _thresholds(file: PolicyFile) -> Iterator[Problem]:
    demand = file.demand
    if demand.below >= demand.above:
        yield Problem(
            (("demand", "below"), ("demand", "above")),
            f"below is {share_in_words(demand.below)} and above is {share_in_words(demand.above)},"
            " but below must be smaller than above. Write them like 70% and 80%.",
        )
    for name in ("gpu", "gpu_slice"):
        if not 0 < getattr(file.activity, name) <= 100:
            yield Problem((("activity", name),), "GPU utilization must be above 0% and at most 100%. Write it like 5%.")
    if not file.capture.quota:
        yield Problem(
            (("capture", "quota"),),
            "with a quota of 0 nothing could be removed, because evidence is saved first. Write it like 20GiB.",
        )


def _holds(file: PolicyFile) -> Iterator[Problem]:
    total, within = file.holds.total, file.holds.within
    if total > within:
        yield Problem(
            (("holds", "total"), ("holds", "within")),
            f"a total of {words(total)} within {words(within)} is not possible. total must not be longer than within.",
        )
    for name, one in file.classes.items():
        if one.hold > total:
            yield Problem(
                (("classes", name, "hold"), ("holds", "total")),
                f"a hold of {words(one.hold)} is longer than holds.total ({words(total)})."
                f" Write at most {words(total)}, or increase holds.total.",
            )


def _groups(file: PolicyFile) -> Iterator[Problem]:
    for name, group in file.groups.items():
        if group.unix_group is not None and members_of(group.unix_group) is None:
            yield Problem(
                (("groups", name, "unix_group"),),
                f'this machine has no Unix group "{group.unix_group}". Write one that `getent group` lists,'
                " or the names under members.",
            )
        for i, class_ in enumerate(group.classes):
            yield from _class_exists(class_, ("groups", name, "classes", i), file)


def _matches(file: PolicyFile) -> Iterator[Problem]:
    for i, match in enumerate(file.match):
        yield from _class_exists(match.class_, ("match", i, "class"), file)
        yield from _match_fits(match, ("match", i))


def _match_fits(match: Match, at: Path) -> Iterator[Problem]:
    if match == Match(class_=match.class_):
        yield Problem(
            (at,), 'no pattern is given, so the entry would match everything. Write one, like name: "triton-*".'
        )
    platform = match.platform
    if platform is not None and platform not in PLATFORMS and not set(platform) & set("*?["):
        yield Problem(((*at, "platform"),), f'unknown platform "{platform}". {did_you_mean(platform, PLATFORMS)}')
    if match.label is not None and not match.label.partition("=")[0].strip():
        yield Problem(((*at, "label"),), f'"{match.label}" has no key. Write it like app=triton, or app alone.')


def _class_exists(name: str | None, at: Path, file: PolicyFile) -> Iterator[Problem]:
    if name is not None and name not in file.classes:
        yield Problem((at,), f'unknown class "{name}". {did_you_mean(name, list(file.classes))}')


def _exemptions(file: PolicyFile) -> Iterator[Problem]:
    for i, exemption in enumerate(file.exemptions):
        yield from check_exemption(exemption, ("exemptions", i), file.classes)


def check_exemption(one: Exemption, at: Path, classes: Iterable[str]) -> Iterator[Problem]:
    """Of one exemption, wherever it is written."""
    if one.owner is one.workload is one.class_ is None:
        yield Problem((at,), "owner, workload and class are missing. Write at least one of them.")
    known = list(classes)
    if one.class_ is not None and one.class_ not in known:
        yield Problem(((*at, "class"),), f'unknown class "{one.class_}". {did_you_mean(one.class_, known)}')
    for rule in one.rules:
        if rule not in RULE_NAMES:
            yield Problem(
                ((*at, "rules"),),
                f'unknown rule "{rule}", or one that cannot be suspended. {did_you_mean(rule, RULE_NAMES)}',
            )


_PRESSED = RaySettings().under_pressure


def check_trees(file: PolicyFile) -> Iterator[Problem]:
    for i, entry in enumerate(file.temporary):
        yield from _names(entry, ("temporary", i))
    yield from _names(file.ray, ("ray",))
    yield from _images(file)
    yield from _sessions(file)
    yield from _logs(file)
    yield from _marks(file)
    for i, root in enumerate(file.reports.roots):
        yield from _apart(file, root, ("reports", "roots", i))


def _names(entry: Temporary | RaySettings, at: Path) -> Iterator[Problem]:
    if not entry.names:
        yield Problem(((*at, "names"),), 'no name is given, so nothing would be deleted. Write names, like ["tmp*"].')
    elif set(entry.names) <= set(entry.keep) or "*" in entry.keep:
        yield Problem(
            ((*at, "keep"), (*at, "names")),
            "every name is also listed under keep, so nothing would be deleted. Remove names from keep.",
        )
    # The built-in value may well be more than a short age; the shorter of the two holds.
    if entry.under_pressure != _PRESSED:
        yield from _sooner(entry.under_pressure, entry.older_than, at, "older_than")


def _images(file: PolicyFile) -> Iterator[Problem]:
    if file.images.unused is not None and file.images.under_pressure is not None:
        yield from _sooner(file.images.under_pressure, file.images.unused, ("images",), "unused")


def _sooner(pressed: timedelta, usual: timedelta, at: Path, name: str) -> Iterator[Problem]:
    if pressed > usual:
        yield Problem(
            ((*at, "under_pressure"), (*at, name)),
            f"under_pressure ({words(pressed)}) must not be longer than {name}"
            f" ({words(usual)}). Write at most {words(usual)}.",
        )


def _sessions(file: PolicyFile) -> Iterator[Problem]:
    if file.ray.sessions is not None and file.ray.sessions < HOUR:
        yield Problem(
            (("ray", "sessions"),),
            f"{words(file.ray.sessions)} is too short: a session that is just starting has directories but no"
            " processes yet. Write at least 1h, or none to only report dead sessions.",
        )


def _logs(file: PolicyFile) -> Iterator[Problem]:
    if file.ray.logs is not None and file.ray.logs < HOUR:
        yield Problem(
            (("ray", "logs"),),
            f"{words(file.ray.logs)} is too short: the age of logs has a resolution of one hour."
            " Write at least 1h, or none to only report them.",
        )


def _marks(file: PolicyFile) -> Iterator[Problem]:
    low, high = file.disk.low, file.disk.high
    if low >= high:
        yield Problem(
            (("disk", "low"), ("disk", "high")),
            f"low is {share_in_words(low)} and high is {share_in_words(high)}, but low must be smaller"
            " than high. Write them like 70% and 80%.",
        )


def _apart(file: PolicyFile, root: str, at: Path) -> Iterator[Problem]:
    """Reports have ages and archives of their own, which a temporary root around or inside them would undo."""
    for path, called, other, names in _temporary_roots(file):
        reports, temporary = PurePosixPath(root), PurePosixPath(other)
        taken = _is_named(reports, temporary, names) or temporary.is_relative_to(reports)
        if taken:
            yield Problem(
                (at, path),
                f"{root} and {called} {other} overlap, so reports would be deleted as temporary trees, or"
                " the reverse. Use a separate directory for reports.",
            )


def _temporary_roots(file: PolicyFile) -> Iterator[tuple[Path, str, str, tuple[str, ...]]]:
    """Its position, its name, the root, and the names of trees there. Of nodes only if any are covered."""
    for i, entry in enumerate(file.temporary):
        yield ("temporary", i, "root"), f"temporary[{i}].root", entry.root, entry.names
    for i, root in enumerate(file.ray.roots if file.scope.ray is not None else ()):
        yield ("ray", "roots", i), f"ray.roots[{i}]", root, file.ray.names


def _is_named(reports: PurePosixPath, temporary: PurePosixPath, names: tuple[str, ...]) -> bool:
    """It lies in a tree that may be deleted as a whole."""
    if reports == temporary or not reports.is_relative_to(temporary):
        return False
    return any(fnmatchcase(reports.relative_to(temporary).parts[0], pattern) for pattern in names)


LONGEST_SESSION = timedelta(days=31)


def check_web(web: Web) -> Iterator[Problem]:
    yield from _proxy(web)
    yield from _tls(web)
    if web.user == "root":
        yield Problem((("web", "user"),), "the web process must not run as root. Write it like nobody.")
    if web.sessions > LONGEST_SESSION:
        yield Problem(
            (("web", "sessions"),),
            f"a session of {span_in_words(web.sessions)} is too long. Write at most {span_in_words(LONGEST_SESSION)};"
            " for programs, use a token: gpukeeper login --token NAME.",
        )


def _proxy(web: Web) -> Iterator[Problem]:
    header, allowed, user = web.proxy.header, web.proxy.from_, web.proxy.user
    if header is not None and not allowed:
        yield Problem(
            (("web", "proxy"),),
            "from is missing, so any client could send the header and act as any person."
            " Write the addresses of the proxy, like from: [10.0.0.2].",
        )
    if header is None and (allowed or user is not None):
        yield Problem((("web", "proxy"),), "header is missing. Write it like header: X-Forwarded-User.")
    if user is None and any(_is_loopback(one) for one in allowed):
        yield Problem(
            (("web", "proxy", "from"),),
            "every user of this machine can connect from loopback, and could send the header."
            " Write the user that the proxy runs as, like user: www-data.",
        )


def _is_loopback(network: str) -> bool:
    """Or includes it. IPv4 addresses may be written as IPv6 (::ffff:127.0.0.1)."""
    found = ip_network(network)
    loopback = (ip_network("127.0.0.0/8"), ip_network("::1/128"), ip_network("::ffff:127.0.0.0/104"))
    return any(found.version == one.version and found.overlaps(one) for one in loopback)


def _tls(web: Web) -> Iterator[Problem]:
    certificate, key = web.tls.certificate, web.tls.key
    if (certificate is None) != (key is None):
        missing, example = (
            ("key", "/etc/gpukeeper/tls.key") if key is None else ("certificate", "/etc/gpukeeper/tls.crt")
        )
        yield Problem((("web", "tls"),), f"{missing} is missing. Write it like {missing}: {example}.")
    if certificate is not None and web.url is not None and web.url.startswith("http:"):
        yield Problem((("web", "url"), ("web", "tls")), "with TLS the URL begins with https://.")

"""Finds and loads a policy: which file, its content, where each value came from, and what an admin should know.

Exemptions may come from files that other tools write. An invalid entry there keeps the work and is reported; it never
ends a protection.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from gpukeeper.config import document, problems
from gpukeeper.config.checks import NO_SCOPE, RULE_NAMES, check, check_exemption, never_reached, never_stopped
from gpukeeper.config.layers import BUILT_IN_ORIGIN, Layered, without_a_file
from gpukeeper.config.problems import Problem
from gpukeeper.config.sections import PLATFORMS, PolicyFile, build
from gpukeeper.config.validation import read_section, validated
from gpukeeper.ledger.files import why_untrusted
from gpukeeper.model.errors import PolicyError
from gpukeeper.model.policy import Exemption, Mode, Policy
from gpukeeper.model.unknown import Unknown


@dataclass(frozen=True)
class FromFile:
    """`origins` has one entry for each exemption; `complaints` are for an admin."""

    exemptions: tuple[Exemption, ...] | Unknown
    origins: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()


def read_exemptions(path: Path, classes: Iterable[str]) -> FromFile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        return _everything_kept(f"{path} could not be read: {why}")
    read = document.read(text)
    broken = next((problem for problem in read.problems if not problem.paths[0]), None)
    if broken:
        return _everything_kept(broken.message(str(path), read.lines))
    if not isinstance(read.tree, list):
        return _everything_kept(f"{path}: not a list of exemptions (an empty list is written [])")
    return _entries(read, str(path), list(classes))


def _everything_kept(why: str) -> FromFile:
    return FromFile(Unknown(why), complaints=(f"{why}. Everything is kept until it is fixed.",))


def _entries(read: document.Document, name: str, classes: list[str]) -> FromFile:
    exemptions, origins, complaints = [], [], []
    for i, entry in enumerate(read.tree):
        given, mistakes = _checked(entry, classes)
        problems = [problem for problem in read.problems if problem.paths[0][0] == i] or mistakes
        line = read.lines.get((i,), 1)
        if problems or given is None:
            why = f"{name}:{problems[0].line or line}: {problems[0].sentence}"
            understood = _as_far_as_understood(entry, why, classes)
            if understood is None:
                return _everything_kept(f"{why} The exempted owner, workload or class is unknown")
            complaints.append(f"{why} Kept until it is fixed.")
            exemptions.append(understood)
        else:
            exemptions.append(given)
        origins.append(f"{name}:{line}")
    return FromFile(tuple(exemptions), tuple(origins), tuple(complaints))


def _checked(entry: Any, classes: list[str]) -> tuple[Exemption | None, list[Problem]]:
    given, problems = read_section(Exemption, entry)
    return given, problems if given is None else list(check_exemption(given, (), classes))


def _as_far_as_understood(entry: Any, why: str, classes: list[str]) -> Exemption | None:
    """None: it is unknown what it would protect. If not all rules are valid, all rules are suspended."""
    fields = entry if isinstance(entry, dict) else {}
    owner, workload, class_ = (_text(fields.get(key)) for key in ("owner", "workload", "class"))
    class_ = class_ if class_ in classes else None
    if owner is workload is class_ is None:
        return None
    rules = fields.get("rules")
    understood = isinstance(rules, list) and all(rule in RULE_NAMES for rule in rules)
    return Exemption(
        reason=_text(fields.get("reason")) or "",
        owner=owner,
        workload=workload,
        class_=class_,
        rules=tuple(rules) if understood and isinstance(rules, list) else (),
        until=Unknown(why),
    )


def _text(value: Any) -> str | None:
    """A number is a name without quotes."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


SITE_FILE = Path("/etc/gpukeeper/policy.yaml")
SETTLED = 2.0  # seconds: a file that was not touched for this long gets another time when it is


@dataclass(frozen=True)
class Loaded:
    policy: Policy
    file: PolicyFile  # the effective values in the words of a policy file
    source: str  # the file's name, or "built-in"
    origins: Mapping[problems.Path, str] = field(default_factory=dict)  # a path not in it is built-in
    exemption_origins: tuple[str, ...] = ()  # one for each of policy.exemptions
    warnings: tuple[str, ...] = ()
    untrusted: tuple[str, ...] = ()  # other users who could change it; then no command acts by it

    def origin(self, path: problems.Path) -> str:
        """Of a value; of one that is written as a mapping, that of its first part."""
        inside = (origin for known, origin in self.origins.items() if known[: len(path)] == path)
        return self.origins.get(path) or next(inside, BUILT_IN_ORIGIN)

    def expired(self, now: datetime) -> tuple[str, ...]:
        """A sentence for each expired exemption: it has no effect, and its author may not know."""
        exemptions = self.policy.exemptions
        if isinstance(exemptions, Unknown):
            return ()
        return tuple(
            f"{origin}: the exemption of {one.owner or one.workload or one.class_} ({one.reason}) ended "
            f"{one.until:%Y-%m-%d %H:%M} UTC and has no effect any more. Remove it, or set a later date."
            for one, origin in zip(exemptions, self.exemption_origins, strict=True)
            if isinstance(one.until, datetime) and one.until <= now
        )


def load_policy(
    path: Path | None = None,
    platforms: Iterable[str] = PLATFORMS,
    environ: Mapping[str, str] = os.environ,
    site_file: Path = SITE_FILE,
    *,
    needs_scope: bool = True,
) -> Loaded:
    """`--policy`, $GPUKEEPER_POLICY, the user's own file (not root), the site's; without any, the built-in policy.
    `needs_scope`: False for programs that make no passes.

    Never a file of the current directory: gpukeeper run by root must not depend on where it was started.
    """
    found = policy_file(path, environ, site_file)
    return load_file(found, needs_scope=needs_scope) if found is not None else load_builtin(platforms)


def policy_file(
    path: Path | None = None, environ: Mapping[str, str] = os.environ, site_file: Path = SITE_FILE
) -> Path | None:
    """The one that is used; None: the built-in policy."""
    named = path or (Path(environ["GPUKEEPER_POLICY"]) if environ.get("GPUKEEPER_POLICY") else None)
    if named is not None:
        return named
    usual = [site_file] if os.geteuid() == 0 else [*_user_file(environ), site_file]
    return next((file for file in usual if os.path.lexists(file)), None)


Stamp: TypeAlias = tuple[object, ...]


def stamp(loaded: Loaded, file: Path | None, read_at: float) -> Stamp | None:
    """Equal as long as reading that file again gives the same as at `read_at` (Unix time). None: it was changed since
    or just before, and two writes within a tick of the filesystem's clock look the same."""
    if file is None:
        return (loaded.source,)
    # The directory, too: a link may be changed to another file, as Kubernetes does with a ConfigMap.
    marks = [_mark(one) for one in (*_files(loaded, file), file.parent)]
    newest = max((max(mark.st_mtime, mark.st_ctime) for mark in marks if mark is not None), default=0.0)
    if newest > read_at - SETTLED:
        return None
    seen = [mark and (mark.st_dev, mark.st_ino, mark.st_size, mark.st_mtime_ns, mark.st_ctime_ns) for mark in marks]
    return (str(file), *seen, *_untrusted(loaded, file))


def _mark(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


def _files(loaded: Loaded, path: Path) -> list[Path]:
    return [path] + ([path.parent / loaded.file.exemptions_from] if loaded.file.exemptions_from else [])


def _untrusted(loaded: Loaded, path: Path) -> tuple[str, ...]:
    return tuple(f"{file}: {why}" for file in _files(loaded, path) if (why := why_untrusted(file)) is not None)


def _user_file(environ: Mapping[str, str]) -> Iterator[Path]:
    """None for a uid that has no home directory."""
    with suppress(RuntimeError):
        directory = environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
        yield Path(directory) / "gpukeeper" / "policy.yaml"


def load_file(path: Path, *, needs_scope: bool = True) -> Loaded:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError([f"{path}: could not be read: {error.strerror}. Use another file with --policy."]) from error
    except UnicodeDecodeError as error:
        raise PolicyError([f"{path}: is not UTF-8 text. Save it as UTF-8."]) from error
    loaded = load_text(text, str(path), path.parent, needs_scope=needs_scope)
    untrusted = _untrusted(loaded, path)
    warnings = tuple(f"{one}. Until then apply, serve and requests refuse to use it." for one in untrusted)
    return replace(loaded, warnings=(*loaded.warnings, *warnings), untrusted=untrusted)


def load_text(text: str, name: str = "policy.yaml", directory: Path = Path(), *, needs_scope: bool = True) -> Loaded:
    """`directory`: where `exemptions_from` is searched. Raises PolicyError with every problem."""
    read = document.read(text)
    if not isinstance(read.tree, dict):
        raise PolicyError(problems.messages_in_order(read.problems or [_no_settings(read)], name, read.lines))
    file, layers, found = validated(read.tree, read.lines, name)
    found = read.problems + found
    found += _apart_from(found, check(file, needs_scope=needs_scope))
    if found:
        raise PolicyError(problems.messages_in_order(found, name, read.lines))
    return _loaded(file, layers, name, directory)


def _no_settings(read: document.Document) -> Problem:
    if read.tree is None:
        return Problem(((),), f"the file is empty: {NO_SCOPE}", line=1)
    return Problem(((),), "this is not a mapping of settings. Write one setting per line, like mode: plan.", line=1)


def _apart_from(found: list[Problem], more: Iterable[Problem]) -> list[Problem]:
    """Without those that an already reported mistake may have caused: its value was removed before checking."""
    bad = [path for problem in found for path in problem.paths if path]
    return [one for one in more if not any(_touches(a, b) for a in one.paths for b in bad)]


def _touches(one: problems.Path, other: problems.Path) -> bool:
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _loaded(file: PolicyFile, layers: Layered, name: str, directory: Path) -> Loaded:
    more = FromFile(())
    if file.exemptions_from is not None:
        more = read_exemptions(directory / file.exemptions_from, file.classes)
    inline_origins = tuple(layers.origins.get(("exemptions", i), name) for i in range(len(file.exemptions)))
    exemptions = more.exemptions if isinstance(more.exemptions, Unknown) else (*file.exemptions, *more.exemptions)
    policy = build(file, exemptions)
    return Loaded(
        policy,
        file,
        name,
        layers.origins,
        (*inline_origins, *more.origins),
        (*more.complaints, *_warnings(policy), *never_stopped(file, policy), *never_reached(file, policy)),
    )


def _warnings(policy: Policy) -> Iterator[str]:
    """What is allowed, but should be reviewed."""
    scope = policy.scope.get("kubernetes")
    if policy.mode is Mode.ENFORCE and scope is not None and "*" in scope.namespaces:
        yield "scope.kubernetes covers all namespaces and the mode is enforce: it acts in all of them, unattended."
    for entry in policy.temporary:
        if any(not pattern.strip("*") for pattern in entry.names):
            yield f"temporary: every tree below {entry.root} may be deleted, regardless of its name."
    for name, group in policy.groups.items():
        if group.unix_group is not None and not group.members:
            yield f"groups.{name}: the Unix group {group.unix_group} has no members on this machine."


def load_builtin(platforms: Iterable[str]) -> Loaded:
    """Observes everything that was found, changes nothing."""
    file, layers, found = validated(without_a_file(list(platforms)), {}, BUILT_IN_ORIGIN)
    assert not found, [problem.sentence for problem in found]
    return _loaded(file, layers, BUILT_IN_ORIGIN, Path())

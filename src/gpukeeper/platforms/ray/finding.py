"""Finding one object of a node again by its identity, whatever its name is now: for a re-check, and for acting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from gpukeeper.disk.measure import printable
from gpukeeper.disk.trash import TrashedTree
from gpukeeper.model.identity import Ref
from gpukeeper.model.policy import Temporary
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.ray import logs, sessions, translate, trees
from gpukeeper.platforms.ray.nodes import RayRoot
from gpukeeper.platforms.ray.sessions import RaySession
from gpukeeper.platforms.ray.survey import SurveyOptions, by_root, opened_logs
from gpukeeper.platforms.ray.visit import NodeDirectory, Visit, names_in, taken_in


class Location(msgspec.Struct, frozen=True):
    """Where it is now: the open directory that contains it. `name` of a session is that of the session, also for its
    logs.
    """

    folder: NodeDirectory
    name: str
    kind: str
    taken: TrashedTree | None = None  # it is in our trash
    session: RaySession | None = None
    logs: int = -1  # the open directory of its logs


@contextmanager
def found(visit: Visit, ref: Ref, wants: SurveyOptions) -> Iterator[Location | Unknown | None]:
    """None: every directory where it can be was read, and it is in none."""
    wanted = translate.identity_in(ref.uid)
    if wanted is None:
        yield Unknown(f"{ref.uid!r} does not identify a tree")
        return
    with ExitStack() as held:
        yield _search(visit, ref, wanted, wants, held)


def _search(
    visit: Visit, ref: Ref, wanted: tuple[int, int], wants: SurveyOptions, held: ExitStack
) -> Location | Unknown | None:
    roots = {root.path: root for root in wants.ray_roots}
    on_this_disk = False
    for path in dict.fromkeys((*by_root(wants.temporary), *roots)):
        try:
            directory = held.enter_context(visit.folder(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return Unknown(f"{path} could not be read: {error.strerror}")
        hosts = visit.is_hosts(directory)
        if hosts and path not in roots:
            continue
        on_this_disk = on_this_disk or os.fstat(directory.fd).st_dev == wanted[0]
        temporary = () if hosts else wants.temporary
        spot = _in_folder(directory, roots.get(path), ref, wanted, temporary, held)
        if spot is not None:
            return spot
    return None if on_this_disk else Unknown("none of the directories that are read is on its filesystem now")


def _in_folder(
    directory: NodeDirectory,
    root: RayRoot | None,
    ref: Ref,
    wanted: tuple[int, int],
    temporary: Sequence[Temporary],
    held: ExitStack,
) -> Location | Unknown | None:
    """`root`: it is a directory of sessions."""
    known = [] if root is None else list(sessions.listed(directory, root))
    if (spot := _in_logs(directory, known, ref, wanted, held)) is not None or ref.kind == translate.LOGS:
        return spot
    session = next((one for one in known if one.identity == wanted), None)
    if session is not None:
        return Location(directory, session.name, translate.SESSION, session=session)
    for name in names_in(directory, wanted):
        if trees.named_by(name, directory.path, temporary):
            return Location(directory, name, translate.TREE)
        return Unknown(f"its name is {printable(str(Path(directory.path, name)))} now, which the policy does not match")
    taken = taken_in(directory, wanted)
    return None if taken is None else Location(directory, taken.name, translate.TREE, taken)


def _in_logs(
    directory: NodeDirectory, known: Sequence[RaySession], ref: Ref, wanted: tuple[int, int], held: ExitStack
) -> Location | None:
    """The directory of logs itself, or something that an interrupted removal left in it."""
    for session in known:
        # Closed at once unless it is in there: what we have open ourselves looks used.
        with ExitStack() as open_:
            fd = open_.enter_context(opened_logs(directory, session.name))
            spot = None if fd is None else _in_logs_of(session, fd, directory, ref, wanted, open_)
            if spot is not None:
                held.push(open_.pop_all())
                return spot
    return None


def _in_logs_of(
    session: RaySession, fd: int, directory: NodeDirectory, ref: Ref, wanted: tuple[int, int], open_: ExitStack
) -> Location | None:
    top = os.fstat(fd)
    if ref.kind == translate.LOGS:
        same = (top.st_dev, top.st_ino) == wanted
        return Location(directory, session.name, translate.LOGS, session=session, logs=fd) if same else None
    for place in logs.FOLDERS:
        inner = open_.enter_context(logs.opened(fd, place))
        if inner is None:
            continue
        path = os.path.normpath(Path(session.path, logs.LOGS, place))
        here = msgspec.structs.replace(directory, fd=inner, path=path)
        if (taken := taken_in(here, wanted)) is not None:
            return Location(here, taken.name, translate.TREE, taken)
    return None

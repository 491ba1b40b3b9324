"""Finds the one object that a user names.

A daemon with many users does not list every place for each of them: a name is looked up in the list of its last
pass, and then only that one object is read. What is not in that list, and what is to be acted on by its name, is
listed again, once for all requests at that moment and with pauses, so that passes continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from gpukeeper.engine.failures import bug_words
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.engine.request_state import Listing
from gpukeeper.engine.view import build_views
from gpukeeper.lifecycle.rules.target import in_scope
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import View
from gpukeeper.model.errors import KeeperError, PlatformError, UsageError
from gpukeeper.model.identity import Ref
from gpukeeper.model.subject import Subject

SHOWN_PROBLEMS = 2  # of what could not be read
FRESH = 5.0  # seconds; a list that is not older answers for the world as it is now
PAUSE = 1.0  # seconds between two lists made for requests, at least; else twice as long as the last one took
MOST_PATHS = 20  # in a sentence


class FoundSubject(msgspec.Struct, frozen=True):
    platform: Platform
    view: View


async def find(keeper: Keeper, book: Rulebook, words: str, *, acting: bool = False) -> FoundSubject:
    """The one object whose path ends with these words, as it is now. `acting`: it will be stopped or removed."""
    if not keeper.request_state.enabled:
        matches, silent = await _observed(keeper, book, words)
        return await _only_one(keeper, book, words, matches, silent)
    refs = _listed(keeper, book, words)
    by_uid = len(refs) == 1 and refs[0].uid == words
    if len(refs) == 1 and (by_uid or not acting):
        found = await _read_subjects(keeper, book, refs)
        if found:
            return found[0]
    return await _listed_anew(keeper, book, words)


async def read_subject(keeper: Keeper, book: Rulebook, ref: Ref) -> FoundSubject | None:
    """The same object as it is now. None: it does not exist, or cannot be read."""
    found = await _read_subjects(keeper, book, [ref])
    return found[0] if found else None


async def _listed_anew(keeper: Keeper, book: Rulebook, words: str) -> FoundSubject:
    steady = asyncio.get_running_loop().time
    began = steady()
    async with keeper.request_state.listing:
        if all(one.begun >= began - FRESH for one in _listings(keeper, book)):
            silent = [why for one in _listings(keeper, book) for why in one.unseen]
            matches = await _read_subjects(keeper, book, _listed(keeper, book, words))
        else:
            await asyncio.sleep(max(keeper.request_state.next_list - steady(), 0.0))
            begun = steady()
            matches, silent = await _observed(keeper, book, words)
            keeper.request_state.next_list = steady() + max(PAUSE, 2 * (steady() - begun))
    return await _only_one(keeper, book, words, matches, silent)


async def _only_one(
    keeper: Keeper, book: Rulebook, words: str, matches: list[FoundSubject], silent: list[str]
) -> FoundSubject:
    # An object whose name is the uid of another one must not prevent that one from being named.
    matches = [one for one in matches if one.view.subject.ref.uid == words] or matches
    if not matches:
        matches = [one for platform in keeper.platforms for one in await _parts(keeper, platform, book, words)]
    if not matches:
        more = f"; and {len(silent) - SHOWN_PROBLEMS} more" if len(silent) > SHOWN_PROBLEMS else ""
        unseen = f" Not everything could be read: {'; '.join(silent[:SHOWN_PROBLEMS])}{more}." if silent else ""
        raise UsageError(f'nothing in the policy\'s scope is named "{words}".{unseen} See: gpukeeper workload list')
    if len(matches) > 1:
        paths = sorted(f"{m.view.subject.ref.path} ({m.view.subject.ref.uid})" for m in matches)
        more = f"\n  and {len(paths) - MOST_PATHS} more" if len(paths) > MOST_PATHS else ""
        listed = "\n  ".join(paths[:MOST_PATHS]) + more
        raise UsageError(f'"{words}" matches {len(matches)} objects; use more of the path, or the uid:\n  {listed}')
    return matches[0]


async def _observed(keeper: Keeper, book: Rulebook, words: str) -> tuple[list[FoundSubject], list[str]]:
    """What fits among everything there is now; and what could not be listed. A bug in one adapter hides its place only,
    as in a pass."""
    matches: list[FoundSubject] = []
    silent: list[str] = []
    for platform in keeper.platforms:
        try:
            matches += await _observed_at(keeper, platform, book, words, silent)
        except Exception as problem:
            silent.append(_why_unseen(platform, problem))
    return matches, silent


def _why_unseen(platform: Platform, problem: Exception) -> str:
    """Raises what does not concern this place alone: a ledger that cannot be read."""
    if isinstance(problem, PlatformError):
        return str(problem)
    if isinstance(problem, KeeperError):
        raise problem
    return f"{platform.name}/{platform.place}: {bug_words(problem)}"


async def _observed_at(
    keeper: Keeper, platform: Platform, book: Rulebook, words: str, silent: list[str]
) -> list[FoundSubject]:
    scope = book.policy.scope.get(platform.name)
    if scope is None:
        return []
    begun = asyncio.get_running_loop().time()
    fitting: list[Subject] = []
    refs: list[Ref] = []
    unseen: list[str] = []
    async for page in platform.observe(scope):
        fitting += [one for one in page.subjects if one.ref.ends_with(words)]
        refs += [one.ref for one in page.subjects] if keeper.request_state.enabled else []
        unseen += [f"{one.what}: {one.why}" for one in page.unseen]
    keeper.request_state.keep_list(key_of(platform), Listing(begun, tuple(refs), tuple(unseen)))
    silent += unseen
    joined = await build_views(keeper, platform, fitting, book, [], keeper.clock.now())
    return [FoundSubject(platform, view) for view in joined]


async def _parts(keeper: Keeper, platform: Platform, book: Rulebook, words: str) -> list[FoundSubject]:
    """What is part of a workload: to be explained, never acted on by itself."""
    try:
        found = [await platform.read(ref) for ref in await platform.parts(words)]
    except Exception as problem:
        _why_unseen(platform, problem)
        return []
    parts = [one for one in found if isinstance(one, Subject)]
    views = await build_views(keeper, platform, parts, book, [], keeper.clock.now())
    return [FoundSubject(platform, view) for view in views]


def _listings(keeper: Keeper, book: Rulebook) -> list[Listing]:
    """Of every place that the policy covers; one that was never listed is as old as can be."""
    never = Listing(float("-inf"))
    return [
        keeper.request_state.listings.get(key_of(p), never) for p in keeper.platforms if p.name in book.policy.scope
    ]


def _listed(keeper: Keeper, book: Rulebook, words: str) -> list[Ref]:
    refs = [ref for one in _listings(keeper, book) for ref in one.refs if ref.ends_with(words)]
    refs = [ref for ref in refs if in_scope(book.policy, ref)]
    return [ref for ref in refs if ref.uid == words] or refs


async def _read_subjects(keeper: Keeper, book: Rulebook, refs: Sequence[Ref]) -> list[FoundSubject]:
    found = []
    for ref in refs[:MOST_PATHS]:
        platform = keeper.platform_at(ref)
        one_found = None if platform is None else await platform.read(ref)
        if platform is not None and isinstance(one_found, Subject):
            (view,) = await build_views(keeper, platform, [one_found], book, [], keeper.clock.now())
            found.append(FoundSubject(platform, view))
    return found

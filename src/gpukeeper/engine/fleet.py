"""One snapshot of every place, joined with what the ledger had before it. Reads only; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpukeeper.engine.failures import bug_words
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.ports import Platform, key_of
from gpukeeper.engine.view import build_views
from gpukeeper.lifecycle.rules.target import in_scope
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Action, Unseen, View
from gpukeeper.model.errors import KeeperError, PlatformError
from gpukeeper.model.identity import Ref
from gpukeeper.model.memory import Memory


class UnseenAt(Unseen, frozen=True):
    """With its place."""

    platform: str
    place: str


@dataclass
class FleetSnapshot:
    """`recorded` and `absent`: the ledger's memory from before, and what it has that a complete list lacks."""

    views: list[View] = field(default_factory=list)
    unseen: list[UnseenAt] = field(default_factory=list)
    recorded: dict[str, Memory] = field(default_factory=dict)
    absent: list[Ref] = field(default_factory=list)
    offers: dict[tuple[str, str], frozenset[Action]] = field(default_factory=dict)

    @property
    def doubtful(self) -> frozenset[str]:
        """Places of which not everything was listed."""
        return frozenset(one.place for one in self.unseen)


async def observe_fleet(keeper: Keeper, book: Rulebook) -> FleetSnapshot:
    found = FleetSnapshot()
    for platform in keeper.platforms:
        found.offers[platform.name, platform.place] = frozenset(platform.guards)
        try:
            await _observe_place(keeper, book, platform, found)
        except PlatformError as problem:
            found.unseen.append(UnseenAt("everything", str(problem), *key_of(platform)))
        except KeeperError:
            raise
        except Exception as bug:  # of one adapter: the other places are shown
            found.unseen.append(UnseenAt("everything", bug_words(bug), *key_of(platform)))
    return found


async def _observe_place(keeper: Keeper, book: Rulebook, platform: Platform, found: FleetSnapshot) -> None:
    scope = book.policy.scope.get(platform.name)
    if scope is None:
        return
    before = await keeper.ledger.present(platform.name, platform.place)
    listed: set[str] = set()
    complete = True
    async for page in platform.observe(scope):
        keys = [subject.ref.key for subject in page.subjects]
        listed.update(keys)
        complete = complete and not page.unseen
        found.unseen += (UnseenAt(one.what, one.why, *key_of(platform)) for one in page.unseen)
        found.recorded.update(await keeper.ledger.memories(keys))
        found.views += await build_views(keeper, platform, page.subjects, book, [], keeper.clock.now())
    if complete:  # only a complete list shows what is missing
        found.absent += [r for key, r in before.items() if key not in listed and in_scope(book.policy, r)]

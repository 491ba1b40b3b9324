"""The identity of an object: a name for people, a uid for acting. Nothing is ever acted on by its name alone."""

from __future__ import annotations

from datetime import datetime
from typing import TypeAlias

import msgspec

PlaceKey: TypeAlias = tuple[str, str]  # platform and place


class Ref(msgspec.Struct, frozen=True, gc=False):
    """One object at one place. `uid`: an id of its platform that is never reused, dev:inode or pid@start."""

    platform: str
    place: str
    kind: str
    name: str
    uid: str
    namespace: str = ""

    @property
    def path(self) -> str:
        """How people write it: platform/place/name, or platform/place/namespace/kind/name."""
        if self.namespace:
            return f"{self.platform}/{self.place}/{self.namespace}/{self.kind}/{self.name.lstrip('/')}"
        return f"{self.platform}/{self.place}/{self.name.lstrip('/')}"

    @property
    def key(self) -> str:
        """What the ledger remembers it by. Names are reused, uids are not."""
        return f"{self.platform}/{self.place}/{self.uid}"

    def ends_with(self, words: str) -> bool:
        """Any ending of the path on a word boundary names it: `eval`, `node-3/eval`, `job/run-7`."""
        path, wanted = self.path.lower(), words.strip("/").lower()
        return path == wanted or path.endswith("/" + wanted) or self.uid == words


class Seen(msgspec.Struct, frozen=True, gc=False):
    """An object as it was at one read. `incarnation` changes when it starts again under the same uid
    (its start, resource generation, inode and newest ctime); `version` at any change at all."""

    ref: Ref
    incarnation: str
    version: str
    at: datetime

"""How many connections each client may have: a user of this machine, or an address of another one.

Every user of the machine can connect to a dashboard on loopback. Each has a share, so that the requests of one user do
not queue before those of all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpukeeper.interfaces.link import UNKNOWN_UID
from gpukeeper.interfaces.web.addresses import is_here, plain
from gpukeeper.interfaces.web.socket_owner import is_quick, socket_owner

USER = 64  # connections of one user of this machine; all whose user is not known have one share
SERVICE = 256  # of a service, perhaps a proxy that no policy names
RESERVE = 64  # for root and the trusted proxy, where all others have used up theirs
FIRST_USER = 1_000
SUBUIDS = Path("/etc/subuid")


class Shares:
    """`trusted`: uids without a limit of their own. With user namespaces a user can have thousands of uids: those that
    /etc/subuid gives them are one share."""

    def __init__(self, proxy: int | None = None) -> None:
        self._trusted = {0} if proxy is None else {0, proxy}
        self._subuids = list(_subuids())
        is_quick()  # tried now, while there are free descriptors

    def of(self, transport: asyncio.BaseTransport) -> tuple[str, int | None]:
        """Whose share a new connection counts on, and how many connections that has; None: as many as there are."""
        peer, own = (transport.get_extra_info(name) for name in ("peername", "sockname"))
        if not peer or not own:
            return self.of_uid(UNKNOWN_UID)
        if not is_here(peer[0]):
            return plain(peer[0]), None
        found = socket_owner(peer[:2], own[:2]) if is_quick() else None  # reading whole tables would be the attack
        return self.of_uid(UNKNOWN_UID if found is None else found)

    def of_uid(self, uid: int) -> tuple[str, int | None]:
        for first, count, user in self._subuids:
            if first <= uid < first + count:
                return f"subuids of {user}", USER
        if uid in self._trusted:
            return f"uid {uid}", None
        return f"uid {uid}", SERVICE if 0 < uid < FIRST_USER else USER

    def is_trusted(self, share: str) -> bool:
        return share in {f"uid {uid}" for uid in self._trusted}


def _subuids() -> Iterator[tuple[int, int, str]]:
    """First uid, number of uids, and whose they are."""
    with suppress(OSError):
        for line in SUBUIDS.read_text(errors="replace").splitlines():
            user, _, rest = line.partition(":")
            first, _, count = rest.partition(":")
            if first.isdecimal() and count.strip().isdecimal() and len(rest) < 24:
                yield int(first), int(count), user

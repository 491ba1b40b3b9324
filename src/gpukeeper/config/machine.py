"""What is taken from this machine: the members of a Unix group, when a policy is read; variables of the environment
that more than one layer reads.
"""

from __future__ import annotations

import grp
import pwd
import threading
import time
from dataclasses import dataclass, field

from gpukeeper.model.errors import PolicyError

FLEET = "GPUKEEPER_FLEET"  # folder:PATH[:PATH…] plays with places of files instead of this machine


WITHIN = 30.0  # seconds for the list of users
FRESH = 60.0  # seconds for which it is used again


class UsersNotListed(PolicyError):
    """The policy may be right, but its members are unknown."""


@dataclass
class _Users:
    """Name and own group of every user, as last listed.

    All of them are listed, which a directory service may take long for: that is done once for all groups, remembered
    for a moment, and given up after a while.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = float("-inf")  # steady time
    found: tuple[tuple[str, int], ...] = ()
    listing: threading.Thread | None = None  # one at a time, however often it is requested

    def list(self) -> tuple[tuple[str, int], ...]:
        with self.lock:
            if time.monotonic() - self.at < FRESH:
                return self.found
            if self.listing is None or not self.listing.is_alive():
                self.listing = threading.Thread(target=self._list, name="gpukeeper-users", daemon=True)
                self.listing.start()
            listing = self.listing
        listing.join(WITHIN)
        if listing.is_alive():
            raise UsersNotListed(
                [
                    f"The users of this machine could not be listed within {WITHIN:g} s, and a group of the policy "
                    "names a Unix group. Check the directory service (getent passwd), or list the users "
                    "under members."
                ]
            )
        return self.found

    def _list(self) -> None:
        self.found = tuple((user.pw_name, user.pw_gid) for user in pwd.getpwall())
        self.at = time.monotonic()


_USERS = _Users()


def members_of(group: str) -> tuple[str, ...] | None:
    """Listed members and those whose own group it is; None: there is no such group.

    A directory service that does not list its users hides the second kind; those are named under `members`.
    """
    try:
        found = grp.getgrnam(group)
    except KeyError:
        return None
    own = [name for name, gid in _USERS.list() if gid == found.gr_gid]
    return tuple(sorted({*found.gr_mem, *own}))

"""Who is in a Unix group of this machine. Read once, when the policy is read."""

from __future__ import annotations

import grp
import pwd


def members_of(group: str) -> tuple[str, ...] | None:
    """Listed members and those whose own group it is; None: there is no such group.

    A directory service that does not list its users hides the second kind; those are named under `members`.
    """
    try:
        found = grp.getgrnam(group)
    except KeyError:
        return None
    own = [user.pw_name for user in pwd.getpwall() if user.pw_gid == found.gr_gid]
    return tuple(sorted({*found.gr_mem, *own}))

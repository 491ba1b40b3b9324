"""Addresses of clients, in one spelling."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - bind and connect load it, perhaps when this process may read no files any more
import errno
import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_here(host: str) -> bool:
    """An address of this machine: we could use it ourselves."""
    found = address_of(host)
    if found is None or found.is_loopback:
        return True
    with socket.socket(socket.AF_INET if found.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((str(found), 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def plain(host: str) -> str:
    """::ffff:10.0.0.2 is 10.0.0.2. What is no address stays."""
    found = address_of(host)
    return host if found is None else str(found)


def address_of(host: str) -> Address | None:
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found

"""Which user of this machine has the other end of a connection: only the kernel can tell.

One question about one connection (sock_diag) costs the same however many there are. Where the kernel does not answer
it, the table of all connections is read.
"""

from __future__ import annotations

import functools
import socket
import struct
import sys
from pathlib import Path

from gpukeeper.interfaces.web.addresses import Address, address_of

Ends = tuple[str, int]  # address and port
_ESTABLISHED = 1
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_HEAD = struct.Struct("=IHHII")  # length, type, flags, number, port
_STATE_AT, _UID_AT = _HEAD.size + 1, _HEAD.size + 64  # struct inet_diag_msg
_ANY_COOKIE = b"\xff" * 8


def socket_owner(peer: Ends, own: Ends) -> int | None:
    """The uid of the process on this machine that has the other end of a connection. None: it is not known, as of a
    connection that is not open any more (the kernel then reports no owner, or root), or of a user whom our user
    namespace does not know."""
    uid = _asked(peer, own) if is_quick() else _looked_up(peer, own)
    return None if uid == _hidden() else uid


@functools.cache
def is_quick() -> bool:
    """Whether the kernel answers about a single connection: tried with one of our own."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), 1.0) as trial,
        ):
            return _asked(trial.getsockname(), listener.getsockname()) is not None
    except OSError:
        return False


@functools.cache
def _hidden() -> int | None:
    """What stands for every user that a user namespace does not know; None: it knows all."""
    try:
        if Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]:
            return None
    except FileNotFoundError:
        return None  # a kernel without user namespaces
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


def _asked(peer: Ends, own: Ends) -> int | None:
    addresses = [address_of(host) for host, _ in (peer, own)]
    if None in addresses:
        return None
    family = socket.AF_INET if all(one and one.version == 4 for one in addresses) else socket.AF_INET6
    packed = b"".join(one.packed.ljust(16, b"\0") for one in addresses if one is not None)
    asked = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 2**32 - 1)
    asked += struct.pack("!HH", peer[1], own[1]) + packed + bytes(4) + _ANY_COOKIE
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.sendto(_HEAD.pack(_HEAD.size + len(asked), _BY_FAMILY, _REQUEST, 1, 0) + asked, (0, 0))
            answer, sender = kernel.recvfrom(4096)
    except OSError:
        return None
    if sender[0] != 0 or len(answer) < _UID_AT + 4 or _HEAD.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    uid: int = struct.unpack_from("=I", answer, _UID_AT)[0]
    return uid if answer[_STATE_AT] == _ESTABLISHED else None


def _looked_up(peer: Ends, own: Ends) -> int | None:
    ends = [(address_of(host), port) for host, port in (peer, own)]
    for table in _TABLES:
        words = " ".join(_kernel_words(address, port, wide=table.name == "tcp6") for address, port in ends)
        try:
            _, found, rest = table.read_text().partition(f" {words} ")
        except FileNotFoundError:
            continue  # no IPv6
        if found:
            state, _, _, _, uid, _ = rest.split(maxsplit=5)
            return int(uid) if int(state, 16) == _ESTABLISHED else None
    return None


def _kernel_words(address: Address | None, port: int, *, wide: bool) -> str:
    """0100007F:1F90: an address as words of the machine's byte order."""
    if address is None or (address.version == 6 and not wide):
        return "-"
    packed = address.packed if address.version == 6 or not wide else b"\0" * 10 + b"\xff\xff" + address.packed
    parts = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{part:08X}' for part in parts)}:{port:04X}"

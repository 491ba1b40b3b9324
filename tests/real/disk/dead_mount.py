"""A filesystem that never answers: mounted as FUSE by mount(2), with nobody who reads the requests."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_DETACH = 2
_INIT_ANSWER = struct.Struct("<IIIIHHIIHHI7I")  # of fuse.h, version 7.31
_HEADER_OUT = struct.Struct("<IiQ")


@contextmanager
def dead_mount(point: Path, *, greets: bool = True) -> Iterator[None]:
    """`greets`: it says hello as filesystems do, and is silent from then on. Ended by closing its device: then
    everybody who waits gets an error."""
    point.mkdir(exist_ok=True)
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if _libc.mount(b"dead", os.fsencode(point), b"fuse.dead", 0, options) != 0:
            raise OSError(ctypes.get_errno(), "a FUSE filesystem could not be mounted")
        if greets:
            os.read(fd, 1 << 17)
            answer = _INIT_ANSWER.pack(7, 31, 0, 0, 0, 0, 4096, 0, 0, 0, 0, *[0] * 7)
            os.write(fd, _HEADER_OUT.pack(_HEADER_OUT.size + len(answer), 0, 2) + answer)
        yield
    finally:
        os.close(fd)
        _libc.umount2(os.fsencode(point), _DETACH)

"""One node of a group, as a process of its own: takes part in the run and prints what it has of it as one JSON line.

python group_member.py RUN INDEX SIZE PORT PYTHON '{"params": {...}, "inject": {...}}'
"""

from __future__ import annotations

import asyncio
import json
import sys

import msgspec

from gpukeeper.acceptance.bench.probing import ProbeLauncher
from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet.group_jobs import Member, RankDevice
from gpukeeper.acceptance.group.members import Membership
from gpukeeper.acceptance.group.session import take_part
from gpukeeper.acceptance.judging import reference


async def main(run: str, index: int, size: int, port: int, python: str, told: str) -> None:
    wish = msgspec.convert({"device": "cpu", **json.loads(told)}, RunRequest)
    who = Membership(index=index, size=size, address="127.0.0.1", port=port, own_address="127.0.0.1")
    member = Member(index=index, node=f"node-{index}", devices=(RankDevice(uuid="cpu-0", index=0, name="CPU"),))
    bench = ProbeLauncher(python, "cpu")
    found = await take_part(run, who, member, bench, wish, reference.limits, asyncio.Event(), silent_s=10.0)
    document = {"report": found.report, "failure": found.failure, "records": len(found.records)}
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")


if __name__ == "__main__":
    given = sys.argv[1:]
    asyncio.run(main(given[0], int(given[1]), int(given[2]), int(given[3]), given[4], given[5]))

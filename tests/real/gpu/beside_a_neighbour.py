"""`gpukeeper accept` beside another program on the GPU, then alone. Needs a GPU, PyTorch and a minute or two.

Also without pytest: python -m tests.real.gpu.beside_a_neighbour. It changes no setting of the GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NOBODY = 65534
TO_START_S, LONGEST_S = 90, 150
LOOP = """
import torch
a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
(a @ b).sum().item()
print("ready", flush=True)
while True:
    for _ in range(200):
        a @ b
    torch.cuda.synchronize()
"""


@contextmanager
def neighbour(python: str) -> Iterator[tuple[int, int]]:
    """A loop of 4096³ products in bf16; its pid and uid. As another user, where that user can read PyTorch."""
    for uid in (NOBODY, os.geteuid()) if os.geteuid() == 0 else (os.geteuid(),):
        started = _start(python, uid)
        if started is not None:
            break
    else:
        raise AssertionError("the other program could not use the GPU")
    try:
        yield started.pid, uid
    finally:
        _end(started)


def _end(program: subprocess.Popen[str]) -> None:
    program.kill()
    program.communicate()  # closes its pipe, too


def _start(python: str, uid: int) -> subprocess.Popen[str] | None:
    more: dict[str, Any] = {} if uid == os.geteuid() else {"user": uid, "group": uid, "extra_groups": []}
    env = {**os.environ, "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    with suppress(OSError):
        one = subprocess.Popen([python, "-c", LOOP], stdout=subprocess.PIPE, text=True, env=env, cwd="/", **more)
        assert one.stdout is not None
        if one.stdout.readline() == "ready\n":
            return one
        _end(one)
    return None


def accept(folder: Path, name: str, python: str) -> dict[str, Any]:
    """A quick run: its report, with the exit code."""
    env = {**os.environ, "GPUKEEPER_STATE": str(folder / name)}
    ran = subprocess.run(
        [sys.executable, "-m", "gpukeeper", "accept", "--quick", "--python", python, "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert ran.stdout, ran.stderr
    return {**json.loads(ran.stdout), "code": ran.returncode}


def judged_by_speed(report: dict[str, Any]) -> list[str]:
    speeds = ("TFLOP/s", "GB/s", "samples/s", "us", "ms")
    return [
        f"{one['verdict']} {one['code']}: {one['message']}"
        for one in report["findings"]
        if one["verdict"] in ("FAIL", "WARN") and one["unit"] in speeds
    ]


def check_beside(folder: Path, python: str) -> dict[str, Any]:
    with neighbour(python) as (pid, uid):
        report = accept(folder, "beside", python)
        assert judged_by_speed(report) == []
        assert (report["verdict"], report["code"]) == ("INCONCLUSIVE", 5), report["reason"]
        assert f"pid {pid} (" in report["reason"], report["reason"]
        assert python.rpartition("/")[2] in report["reason"], report["reason"]
        owner = "nobody" if uid == NOBODY else "root" if uid == 0 else ""
        assert f"({owner}" in report["reason"], report["reason"]
        assert "test again" in report["reason"]
        assert any(one["code"].endswith("-disturbed") for one in report["findings"]), "it was not slow enough to matter"
    return report


def check_alone(folder: Path, python: str) -> dict[str, Any]:
    """The GPU is a good one; what may warn on a lent machine is no matter of speed."""
    report = accept(folder, "alone", python)
    assert judged_by_speed(report) == []
    assert report["code"] == 0, report["reason"]
    assert report["verdict"] in ("PASS", "WARN")
    return report


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for check in (check_beside, check_alone):
            report = check(Path(folder), sys.executable)
            print(f"{check.__name__}: {report['verdict']} (exit code {report['code']}): {report['reason']}")
            for one in report["findings"]:
                if one["verdict"] not in ("PASS", "SKIPPED"):
                    print(f"  {one['verdict']} {one['code']}: {one['message']}")


if __name__ == "__main__":
    main()

"""The table that nccl-tests print, of two releases; and a program that is not there."""

from __future__ import annotations

import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.acceptance.probes import nccl_tests

NEW = """\
# nccl-tests version 2.19.6 nccl-headers=22903 nccl-library=22903
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 8 minBytes 8192 maxBytes 8589934592 step: 2(factor) warmup iters: 1 iters: 20 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid   4242 on     node-1 device  0 [0000:19:00] NVIDIA H200
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
        8192          2048     float     sum      -1    35.15    0.23    0.41       0    30.33    0.27    0.47       0
  1073741824     268435456     float     sum      -1   3921.7  273.80  479.15       0   3920.5  273.88  479.29       0
  8589934592    2147483648     float     sum      -1  3.1e+04  276.35  483.61       0    31081  276.37  483.65       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 320.771
"""
OLD = """\
# nThread 1 nGpus 2 minBytes 8192 maxBytes 16384 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
        8192          2048     float     sum      -1    21.50   0.38    0.38      0    20.90    0.39    0.39     12
       16384          4096     float     sum      -1    21.50   0.76    0.76    N/A    20.90    0.78    0.78    N/A
# Out of bounds values : 12 FAILED
"""


def test_every_size_of_the_table_is_read() -> None:
    """C1.6: 8 KB to 8 GB."""
    said = nccl_tests.read(NEW)
    assert [(row["bytes"], row["busbw"]) for row in said["rows"]] == [(8192, 0.41), (2**30, 479.15), (2**33, 483.61)]
    assert said["rows"][2]["time_us"] == 31000.0
    assert {row["wrong"] for row in said["rows"]} == {0}
    assert (said["version"], said["nccl"], said["out_of_bounds"]) == ("2.19.6", 22903, 0)


def test_wrong_results_are_counted_and_unchecked_ones_are_not_right() -> None:
    said = nccl_tests.read(OLD)
    assert [row["wrong"] for row in said["rows"]] == [12, None]
    assert (said["out_of_bounds"], said["version"]) == (12, None)


@pytest.mark.parametrize("program", [None, "", "no/such/all_reduce_perf"])
def test_a_missing_program_was_not_run(program: str | None) -> None:
    assert "not_run" in nccl_tests.run(_Device(), {"program": program, "gpus": 2})


def test_a_program_is_run_over_all_gpus_with_checking_on(tmp_path: Path) -> None:
    program = _program(tmp_path, f'[ "$*" = "-b 8K -e 8G -f 2 -g 2 -c 1" ] || exit 9\ncat <<END\n{NEW}END')
    said = nccl_tests.run(_Device(), {"program": program, "gpus": 2})
    assert (len(said["rows"]), said["exit"], said["gpus"]) == (3, 0, 2)


def test_a_program_without_a_table_is_an_error_with_its_words(tmp_path: Path) -> None:
    program = _program(tmp_path, "echo 'Test NCCL failure common.cu:1844 unhandled system error' >&2; exit 3")
    with pytest.raises(RuntimeError, match=r"exited with code 3 and printed no table: Test NCCL failure"):
        nccl_tests.run(_Device(), {"program": program, "gpus": 2})


def _program(folder: Path, script: str) -> str:
    path = folder / "all_reduce_perf"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class _Device:
    def working(self) -> Any:
        return nullcontext()

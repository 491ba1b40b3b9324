"""The files of older kits: the documented fields are the written ones, and no old bug is written again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.acceptance.record import Finding, NotTested, Report
from gpukeeper.acceptance.reports import formats, legacy
from gpukeeper.acceptance.reports.legacy import log_line
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.reports import examples

PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "acceptance-files.md"


def files(report: Report) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in legacy.files(report).items()}


def documented() -> dict[str, dict[str, str]]:
    """Of every heading that is a file: its table."""
    parts = re.split(r"^### `(.+)`$", PAGE.read_text(), flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return {
        name: dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", body.split("\n### ")[0], re.MULTILINE))
        for name, body in pairs
    }


def fields(written: Mapping[str, Any]) -> set[str]:
    """Names with dots for what is inside; lists are told by their own line."""
    found = set()
    for name, value in written.items():
        found.add(name)
        if isinstance(value, dict):
            found |= {f"{name}.{inner}" for inner in value}
    return found


def test_the_page_documents_what_the_table_says() -> None:
    assert documented() == {name: dict(told) for name, told in legacy.LEGACY_FIELDS.items()}


@pytest.mark.parametrize("make", [examples.one_good_gpu, examples.eight_gpus, examples.on_the_cpu, examples.empty])
def test_every_written_field_is_documented(make: Callable[[], Report]) -> None:
    """C4.4, C4.5, C4.6"""
    report = make()
    for name, written in files(report).items():
        known = legacy.LEGACY_FIELDS[legacy.HOST if name == legacy.host_file(report.node) else name]
        assert fields(written) <= set(known), name


def test_every_documented_field_is_written_by_some_run() -> None:
    """C4.5: three promised fields never existed."""
    seen: dict[str, set[str]] = {}
    for make in (examples.one_good_gpu, examples.eight_gpus, examples.empty):
        report = make()
        for name, written in files(report).items():
            key = legacy.HOST if name == legacy.host_file(report.node) else name
            seen.setdefault(key, set()).update(fields(written))
    assert seen == {name: set(known) for name, known in legacy.LEGACY_FIELDS.items()}


def test_the_summary_has_a_return_code_for_every_part() -> None:
    """C4.1, C4.4"""
    summary = files(examples.eight_gpus())["summary.json"]
    assert summary["env"] == {"cuda_available": True, "cuda_device_count": 8, "torch": "2.11.0"}
    assert summary["gpu_tests"]["returncode"] == 2
    assert summary["ddp_tests"]["returncode"] == 0
    assert summary["ddp_train"]["returncode"] == 0
    assert files(examples.one_good_gpu())["summary.json"]["ddp_train"] is None, "it did not run"
    assert "[COMPUTE] FAIL GPU 5 exact.bf16" in summary["gpu_tests"]["stdout"]


def test_figures_are_kept_with_unit_and_method() -> None:
    """C4.4: `compute: true` hid the number."""
    compute = files(examples.one_good_gpu())["gpu_tests_result.json"]["compute"]
    bf16 = next(one for one in compute if one["metric"] == "gemm.bf16")
    assert bf16["value"] == pytest.approx(783.8, abs=0.1)
    assert (bf16["unit"], bf16["method"], bf16["verdict"]) == ("TFLOP/s", "gemm/mm/n8192/normal/burst", "PASS")


def test_training_is_told_when_all_is_well_and_failures_when_not() -> None:
    good = files(examples.one_good_gpu())["gpu_tests_result.json"]
    assert good["training"] == [{"gpu": "GPU 0", "loss_start": 1.44, "loss_end": 0.41, "improved": True}]
    assert "failures" not in good
    bad = files(examples.eight_gpus())["gpu_tests_result.json"]
    assert "training" not in bad
    assert any("computes wrong" in words for words in bad["failures"])


def test_the_collective_and_the_training_over_all_are_reported() -> None:
    """C4.4"""
    written = files(examples.eight_gpus())
    assert written["ddp_tests_result.json"] == {
        "world": 8, "iters": 16, "numel": 2**33 // 4, "time": pytest.approx(0.03), "ok": True,
    }  # fmt: skip
    assert written["ddp_training_result.json"]["world"] == 8
    assert written["ddp_training_result.json"]["improved"] is True
    silent = examples.replace(examples.eight_gpus(), findings=())
    assert files(silent)["ddp_training_result.json"]["improved"] is False, "no finding says that it did"


def test_one_wrong_element_on_one_rank_is_not_ok() -> None:
    report = examples.eight_gpus()
    records = json.loads(json.dumps(report.records))
    rank = next(one for one in records if one["check"] == "collectives" and one["who"] == "7")
    rank["answer"]["result"]["results"][0]["wrong"] = 1
    assert files(examples.replace(report, records=tuple(records)))["ddp_tests_result.json"]["ok"] is False


def test_a_rank_that_said_nothing_is_not_ok() -> None:
    report = examples.eight_gpus()
    records = tuple(one for one in report.records if one["who"] != "7")
    assert files(examples.replace(report, records=records))["ddp_tests_result.json"]["ok"] is False


def test_throughput_is_counted_once() -> None:
    """C4.5"""
    written = files(examples.eight_gpus())["results.json"]
    assert written["throughput_samples_per_second"] == pytest.approx(1333.3 * 8)
    assert written["global_batch_size"] == 256
    assert written["nccl_overhead_ms"] is None, "not measured is null, not 0"


def test_what_did_not_run_gives_the_reason() -> None:
    """C4.4"""
    written = files(examples.one_good_gpu())
    assert written["ddp_tests_skipped.json"] == {"skipped": True, "reason": "it needs 2 GPUs, 1 is here"}
    assert files(examples.empty())["gpu_tests_skipped.json"] == {"skipped": True, "reason": "no_gpu"}


def test_what_went_wrong_while_measuring_is_kept() -> None:
    only = examples.gpu(0)
    found = [examples.finding("gemm", only.uuid, Grade.INCONCLUSIVE)]
    record = examples.broken_record("gemm", only.uuid, "CUDA error: out of memory")
    summary = files(examples.report([only], found, records=(record,)))["summary.json"]
    assert summary["gpu_tests"]["stderr"] == "CUDA error: out of memory"


def test_the_file_of_the_host_is_named_after_it() -> None:
    """C4.6"""
    host = files(examples.eight_gpus())["gpu_accept_node-07.json"]
    assert host["verdict"] == "FAIL"
    assert [gpu["verdict"] for gpu in host["gpus"]][3] == "FAIL"
    assert {"[COMPUTE/SGEMM]", "[BW/H2D]", "[NCCL/AR]"} <= {one["tag"] for one in host["results"]}
    assert legacy.host_file("../../etc/x y") == "gpu_accept_.._.._etc_x_y.json"


def test_a_cpu_run_has_no_gpu() -> None:
    assert files(examples.on_the_cpu())["summary.json"]["env"]["cuda_available"] is False


def test_the_page_lists_every_series_and_tag() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| `gpukeeper_acceptance_(\w+)`", text, re.MULTILINE)
    assert rows == list(formats.SERIES)
    tags = {tag for finding in _every_kind() for tag in re.findall(r"^\[.+?\]", log_line(*finding))}
    assert not [tag for tag in tags if f"`{tag}`" not in text]


def _every_kind() -> list[tuple[str, str]]:
    from gpukeeper.acceptance.reports.legacy import (
        BATCHED_TAG,
        DATASET_TAG,
        DDP_TRAIN_TAG,
        MODEL_TAG,
        MUL_TAG,
        RESULT_TAG,
        RUN_TAG,
        SHELL_TAG,
        SUMMARY_TAG,
        tag_of,
    )

    found: list[Finding] = [*examples.eight_gpus().findings, *examples.one_good_gpu().findings]
    named = [tag_of(one.check, one.metric) for one in found]
    others = [RUN_TAG, RESULT_TAG, SUMMARY_TAG, DATASET_TAG, MODEL_TAG, MUL_TAG, SHELL_TAG]
    return [(tag, "") for tag in [*named, *others, BATCHED_TAG, DDP_TRAIN_TAG]]


def test_what_was_left_out_is_a_reason_too() -> None:
    only = examples.gpu(0)
    report = examples.report([only], [], coverage=(NotTested(check="ddp", why="no time was left"),))
    assert files(report)["ddp_training_skipped.json"]["reason"] == "no time was left"


@pytest.mark.parametrize(
    ("first_rank", "verdict", "written"), [(0, Grade.PASS, True), (0, Grade.FAIL, False), (1, Grade.PASS, None)]
)
def test_collectives_over_several_nodes_are_written_on_the_node_with_rank_0(
    first_rank: int, verdict: Grade, written: bool | None
) -> None:
    """The largest job counts. On the other nodes the file is about their own GPUs."""

    def record(members: int) -> dict[str, Any]:
        entry = {"op": "all_reduce", "bytes": 4096, "rounds": 5, "seconds": [0.5, 0.25], "wrong": 0}
        result = {"world": members, "dtype": "fp32", "results": [entry]}
        who = {"check": "group_collectives", "who": str(first_rank), "again": False, "members": list(range(members))}
        return who | {"answer": {"result": result}}

    group = Finding(check="group", metric="collectives on 3 nodes", verdict=verdict, code="x", message="Said.")
    report = msgspec.structs.replace(
        examples.one_good_gpu(), records=(record(2), record(3)), findings=(*examples.one_good_gpu().findings, group)
    )
    found = files(report)
    if written is None:
        assert legacy.DDP_TESTS not in found
        return
    assert found[legacy.DDP_TESTS] == {"world": 3, "iters": 5, "numel": 1024, "time": 0.75, "ok": written}
    assert found[legacy.SUMMARY]["ddp_tests"]["returncode"] == (0 if written else 3)

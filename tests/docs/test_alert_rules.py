"""Every alert rule in deploy/prometheus and of the operator fires after its `for`, not at the border, and resolves.
Each alert rule of the repository has an impact and a runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpukeeper.interfaces.telemetry.series import COUNTERS, GAUGES
from tests import engines
from tests.docs import markdown
from tests.docs.markdown import ROOT
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

DEPLOY = ROOT / "deploy" / "prometheus"
RUNBOOKS = ROOT / "docs" / "runbooks"
OF_OPERATORS = ROOT / "examples" / "kubernetes" / "alerts.yaml"
FILES = [*sorted(DEPLOY.glob("*.yaml")), OF_OPERATORS]
GROUPS = [group for file in FILES for group in YAML(typ="safe").load(file)["groups"]]
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
UNITS = {"m": 1, "h": 60, "d": 24 * 60}
LONG = 400  # minutes: longer than any story
FS = '{instance="n1",mountpoint="/",fstype="ext4"}'
GPU = '{instance="n1",place="n1",gpu="gpu-0",uuid="GPU-0"'
SLICE = '{instance="n1",place="n1",gpu="gpu-0-slice-1",uuid="MIG-1",state="free"}'
ENGINE = '{instance="n1",platform="docker",place="n1"'
LEADER, FINISHED = 'gpukeeper_leader{instance="op-1"}', '{instance="op-1"'
# Series by alert: the value that fires, and the value at the border, which does not.
LEVELS: dict[str, dict[str, tuple[float, float]]] = {
    "HostDown": {'up{job="node",instance="n1"}': (0, 1)},
    "HostDownLong": {'up{job="node",instance="n1"}': (0, 1)},
    "HostMemoryHigh": {"node_memory_MemAvailable_bytes": (14, 16), "node_memory_MemTotal_bytes": (100, 100)},
    "HostMemoryCritical": {"node_memory_MemAvailable_bytes": (4, 6), "node_memory_MemTotal_bytes": (100, 100)},
    "HostSwapHigh": {"node_memory_SwapFree_bytes": (19, 21), "node_memory_SwapTotal_bytes": (100, 100)},
    "HostDiskSpaceLow": {f"node_filesystem_avail_bytes{FS}": (19, 20), f"node_filesystem_size_bytes{FS}": (100, 100)},
    "HostDiskSpaceCritical": {
        f"node_filesystem_avail_bytes{FS}": (9, 10),
        f"node_filesystem_size_bytes{FS}": (100, 100),
    },
    "HostInodesLow": {f"node_filesystem_files_free{FS}": (19, 20), f"node_filesystem_files{FS}": (100, 100)},
    "HostLoadHigh": {
        'node_load15{instance="n1"}': (4.1, 4),
        'node_cpu_seconds_total{instance="n1",cpu="0",mode="idle"}': (1, 1),
        'node_cpu_seconds_total{instance="n1",cpu="1",mode="idle"}': (1, 1),
    },
    "HostFileDescriptorsHigh": {"node_filefd_allocated": (81, 80), "node_filefd_maximum": (100, 100)},
    "HostClockSkew": {"node_timex_offset_seconds": (-0.051, 0.05)},
    "MonitoringDown": {'up{job="alertmanager"}': (0, 1), 'up{job="prometheus"}': (1, 1)},
    "RayTooFewNodes": {'ray_cluster_active_nodes{job="ray"}': (1, 2)},
    "RayObjectStoreFull": {
        'ray_object_store_memory{instance="n1",Location="MMAP_SHM"}': (91, 90),
        'ray_object_store_memory{instance="n1",Location="SPILLED"}': (500, 500),
        'ray_resources{instance="n1",Name="object_store_memory",State="USED"}': (60, 60),
        'ray_resources{instance="n1",Name="object_store_memory",State="AVAILABLE"}': (40, 40),
    },
    "GpuWaste": {f"gpukeeper_gpu_idle_seconds{GPU}}}": (1801, 1800)},
    "UserGpuWaste": {
        f"gpukeeper_gpu_idle_seconds{GPU}}}": (7201, 7200),
        f'gpukeeper_gpu_holder{GPU},platform="docker",class="docker",owner="ann"}}': (1, 1),
        f'gpukeeper_gpu_holder{GPU},platform="docker",class="docker",owner="bob"}}': (1, 1),
    },
    "SystemGpuWaste": {
        'gpukeeper_gpus{instance="n1",model="H200",state="idle"}': (6, 5),
        'gpukeeper_gpus{instance="n1",model="H200",state="held"}': (4, 5),
        'gpukeeper_gpus{instance="n1",model="H200",state="free"}': (90, 90),
    },
    "GpuUnmanaged": {f'gpukeeper_gpu_state{GPU},state="outside"}}': (1, 0)},
    "GpuDirty": {f'gpukeeper_gpu_state{GPU},state="dirty"}}': (1, 0)},
    "GpuQuarantined": {f'gpukeeper_gpu_state{GPU},state="quarantined"}}': (1, 0)},
    "GpuStateUnknown": {f'gpukeeper_gpu_state{GPU},state="unknown"}}': (1, 0)},
    "GpuCapacityLow": {
        'gpukeeper_gpus{instance="n1",model="H200",state="free"}': (1, 2),
        'gpukeeper_gpus{instance="n1",model="H200",state="held"}': (19, 18),
    },
    "GpuTemperatureHigh": {'DCGM_FI_DEV_GPU_TEMP{gpu="0"}': (86, 85)},
    "GpuTemperatureCritical": {'DCGM_FI_DEV_GPU_TEMP{gpu="0"}': (91, 90)},
    "GpuMemoryHigh": {f"gpukeeper_gpu_memory_used_ratio{GPU}}}": (0.96, 0.95)},
    "GpuExporterDown": {'up{job="dcgm",instance="n1"}': (0, 1)},
    "GpuAcceptanceFailed": {'gpukeeper_acceptance_verdict{gpu="serial",verdict="FAIL"}': (1, 0)},
    "GpukeeperStateDiskFull": {"gpukeeper_state_disk_used_ratio": (0.91, 0.9)},
    "ContainerLogLarge": {
        f'gpukeeper_workload_log_bytes{ENGINE},workload="train"}}': (10000000001, 10000000000),
        f'gpukeeper_workload_log_bytes{ENGINE},workload="(other)"}}': (90000000000, 90000000000),
    },
    "ContainerWritesLarge": {
        f'gpukeeper_workload_written_bytes{ENGINE},workload="train"}}': (100000000001, 100000000000),
        f'gpukeeper_workload_written_bytes{ENGINE},workload="(other)"}}': (900000000000, 900000000000),
    },
    "GpukeeperTwoLeaders": {'gpukeeper_leader{instance="op-1"}': (1, 1), 'gpukeeper_leader{instance="op-2"}': (1, 0)},
    "GpukeeperLeaseDenied": {'gpukeeper_lease_denied{instance="op-1"}': (1, 0)},
    "GpukeeperOverdue": {"gpukeeper_oldest_overdue_seconds": (21601, 21600)},
    "GpukeeperBreakerOpen": {"gpukeeper_breaker_open": (1, 0)},
    "GpukeeperUnseen": {"gpukeeper_unseen": (1, 0)},
    # What ended in the last hour, what the host has, and another kind do not count.
    "GpukeeperFinishedPileUp": {
        LEADER: (1, 1),
        f'gpukeeper_finished{FINISHED},kind="trainjob",age="<1h"}}': (500, 500),
        f'gpukeeper_finished{FINISHED},kind="trainjob",age="<1d"}}': (101, 100),
        f'gpukeeper_finished{FINISHED},kind="trainjob",age="<7d"}}': (100, 100),
        f'gpukeeper_finished{FINISHED},kind="job",age="<7d"}}': (200, 200),
        'gpukeeper_finished{instance="n1",kind="container",age="<7d"}': (900, 900),
    },
    "GpukeeperFinishedOld": {
        LEADER: (1, 1),
        f'gpukeeper_finished{FINISHED},kind="trainjob",age=">=30d"}}': (1, 0),
        f'gpukeeper_finished{FINISHED},kind="trainjob",age="<30d"}}': (200, 200),
        'gpukeeper_finished{instance="n1",kind="container",age=">=30d"}': (9, 9),
    },
    "GpukeeperPassSlow": {"gpukeeper_pass_seconds": (301, 300)},
    "GpukeeperPodGpuNotMeasured": {
        'gpukeeper_pod_gpu_not_measured{instance="n1",what="use"}': (1, 0),
        'gpukeeper_pod_gpu_not_measured{instance="n1",what="driver"}': (0, 0),
    },
    "GpukeeperFleetCopyDisconnected": {"gpukeeper_fleet_copy_connected": (0, 1)},
    "GpukeeperFleetCopyLagging": {"gpukeeper_fleet_copy_lag_seconds": (601, 600)},
    "GpukeeperMemoryHigh": {'process_resident_memory_bytes{job="gpukeeper"}': (1000000001, 1000000000)},
}
CPU = 'node_cpu_seconds_total{instance="n1",cpu="0",mode="%s"}'
# Of what is counted or forecast: series, and minutes at which the alert is silent, fires, and is over.
COURSES: dict[str, tuple[dict[str, str], int, int, int]] = {
    # 15 % idle is 9 seconds of a minute; 30 % is 18.
    "HostCpuHigh": ({CPU % "idle": "0+9x30 270+18x200"}, 9, 20, 60),
    "HostCpuCritical": ({CPU % "idle": "0+2x30 60+18x200"}, 4, 20, 60),
    "HostIoWaitHigh": ({CPU % "iowait": "0+15x30 450+6x200"}, 9, 20, 60),
    "HostDiskFullSoon": ({f"node_filesystem_avail_bytes{FS}": "1000-5x40 800x200"}, 9, 20, 150),
    "HostNetworkErrors": (
        {
            'node_network_receive_errs_total{instance="n1",device="eth0"}': "0+90x30 2700x200",
            'node_network_transmit_errs_total{instance="n1",device="eth0"}': "0x300",
        },
        9,
        20,
        60,
    ),
    "HostRestarted": ({'node_boot_time_seconds{instance="n1"}': "1x10 600x200"}, 10, 13, 60),
    "RayHeadDown": ({'up{job="ray-head",instance="n1"}': "1x10 0x20 1x200"}, 14, 17, 40),
    "RayTasksFailing": ({'ray_tasks{job="ray",State="FAILED",Name="f"}': "0x5 0+2x20 40x200"}, 9, 25, 60),
    "GpuXid": ({'DCGM_FI_DEV_XID_ERRORS{gpu="0"}': "0x10 79x200"}, 10, 13, 90),
    "GpuMigMismatch": (
        {
            f"gpukeeper_gpu_state{SLICE}": "1x300",
            f"gpukeeper_gpu_state{SLICE.replace('slice-1', 'slice-2').replace('MIG-1', 'MIG-2')}": "1x300",
            'DCGM_FI_DEV_FB_USED{Hostname="n1",GPU_I_ID="1"}': "1x300",
            'DCGM_FI_DEV_FB_USED{Hostname="n1",GPU_I_ID="2"}': "_x20 1x200",
        },
        14,
        15,
        30,
    ),
    "GpukeeperStorageNotMeasured": (
        {
            f"gpukeeper_storage_seconds{ENGINE}}}": "180x300",
            f"gpukeeper_storage_timestamp_seconds{ENGINE}}}": "_x125 7500x200",
        },
        119,
        120,
        128,
    ),
    "GpukeeperSilent": (
        {LEADER: "1x300", 'gpukeeper_last_pass_timestamp_seconds{instance="op-1"}': "0x50 3060+60x200"},
        40,
        41,
        60,
    ),
    "GpukeeperFailing": ({'gpukeeper_failed_total{kind="job",result="refused"}': "0+1x60 60x300"}, 20, 30, 150),
    "GpukeeperPassFailed": ({'gpukeeper_passes_failed_total{place="n1"}': "0x10 1x300"}, 10, 17, 90),
    "GpukeeperWarningsNotDelivered": ({'gpukeeper_warnings_total{delivered="false"}': "0x10 1x300"}, 10, 17, 90),
}
# Also: a host that vanished, a Prometheus that was never there, and 500 TrainJobs of one week.
MORE: dict[str, list[tuple[dict[str, str], int, int, int]]] = {
    "RayHeadDown": [({'up{job="ray-head",instance="n1"}': "1x10"}, 60, 72, 100)],
    "GpukeeperFinishedPileUp": [
        (
            {LEADER: "1x400", f'gpukeeper_finished{FINISHED},kind="trainjob",age="<7d"}}': "0+10x50 500x60 0x100"},
            80,
            81,
            115,
        )
    ],
    "MonitoringDown": [({"up": "1x300", 'up{job="prometheus"}': "_x20 1x200"}, 4, 6, 30)],
}


def promtool(*arguments: str | Path) -> None:
    engines.require("promtool", engines.has_promtool())
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def minutes(rule: dict[str, Any]) -> int:
    return int(rule["for"][:-1]) * UNITS[rule["for"][-1]]


def level_course(alert: str) -> tuple[dict[str, str], int, int, int]:
    """First the value that fires, five minutes longer than it must; then the border."""
    lasts = minutes(RULES[alert])
    series = {name: f"{bad}x{lasts + 5} {border}x{LONG}" for name, (bad, border) in LEVELS[alert].items()}
    return series, lasts - 1, lasts, lasts + 8


def story(alert: str, number: int, course: tuple[dict[str, str], int, int, int]) -> dict[str, Any]:
    series, silent, fires, over = course
    asked = [
        {
            "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) > bool 0 or vector(0)',
            "eval_time": f"{minute}m",
            "exp_samples": [{"value": float(firing), "labels": "{}"}],
        }
        for minute, firing in ((silent, False), (fires, True), (over, False))
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    return {"name": f"{alert} {number}", "interval": "1m", "input_series": inputs, "promql_expr_test": asked}


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", *FILES)


def test_every_rule_fires_after_its_time_and_resolves(tmp_path: Path) -> None:
    """C15.4, C15.5: one story for each rule at least; promtool names those that differ."""
    assert set(LEVELS) | set(COURSES) == set(RULES)
    courses = [
        *((alert, level_course(alert)) for alert in LEVELS),
        *COURSES.items(),
        *((alert, one) for alert, more in MORE.items() for one in more),
    ]
    tests = [story(alert, number, course) for number, (alert, course) in enumerate(courses)]
    file = tmp_path / "test.yaml"
    with file.open("w") as out:
        YAML(typ="safe").dump(
            {"rule_files": [str(one) for one in FILES], "evaluation_interval": "1m", "tests": tests}, out
        )
    promtool("test", "rules", file)


def test_no_name_is_used_twice_among_all_rules() -> None:
    """Those of examples/ and deploy/ can be loaded together. Two are the same of hosts and of operators."""
    names = [rule["alert"] for group in GROUPS for rule in group["rules"]]
    others = YAML(typ="safe").load(ROOT / "examples" / "prometheus" / "ray-alerts.yaml")["groups"]
    shipped = {rule["alert"] for group in others for rule in group["rules"]}
    assert len(names) == len(set(names))
    assert set(names) & shipped == {"GpukeeperOverdue", "GpukeeperFailing"}


def test_a_rule_has_all_its_parts() -> None:
    """C15.4"""
    wrong = [
        f"{name}: {part}"
        for name, rule in RULES.items()
        for part, is_right in {
            "severity": rule["labels"]["severity"] in {"info", "warning", "critical"},
            "category": re.fullmatch(r"[a-z]+", rule["labels"]["category"]),
            "annotations": set(rule["annotations"]) - {"action"} == {"summary", "description", "impact", "runbook"},
            "runbook": rule["annotations"].get("runbook") == f"docs/runbooks/{name}.md",
            "a host in expr": not re.search(r"\d+\.\d+\.\d+\.\d+|instance=|\.lab\b", rule["expr"]),
            "for": minutes(rule) > 0,
        }.items()
        if not is_right
    ]
    assert not wrong, f"correct them in {DEPLOY.name} or {OF_OPERATORS.name}: {wrong}"


def test_every_alert_of_the_repository_has_an_impact_and_a_runbook_that_exists() -> None:
    """C15.4: in any rule file, also one that is added later."""
    found, wrong = 0, []
    for file in sorted(one for folder in ("deploy", "examples") for one in (ROOT / folder).rglob("*.yaml")):
        if not (rules := alerts_in(file.read_text())):
            continue
        for rule in rules:
            found += 1
            page, _, anchor = rule["annotations"].get("runbook", "").partition("#")
            there = page and (ROOT / page).is_file() and (not anchor or anchor in markdown.anchors(ROOT / page))
            if not rule["annotations"].get("impact") or not there:
                wrong.append(f"{file.relative_to(ROOT)}: {rule['alert']}")
    assert found > len(RULES), "the rule files were not found"
    assert not wrong, f"add an impact and a runbook that exists: {wrong}"


def alerts_in(text: str) -> list[dict[str, Any]]:
    """Of a rule file or a PrometheusRule; none in other files."""
    if not re.search(r"^ *- alert:", text, re.MULTILINE):
        return []
    loaded = YAML(typ="safe").load(text)
    return [rule for group in loaded.get("spec", loaded)["groups"] for rule in group["rules"] if "alert" in rule]


def test_every_rule_has_a_runbook_and_every_runbook_a_rule() -> None:
    assert {page.stem for page in RUNBOOKS.glob("*.md")} - {"README"} == set(RULES)


def test_a_runbook_has_the_rule_and_what_to_do() -> None:
    wrong = []
    for name, rule in RULES.items():
        text = (RUNBOOKS / f"{name}.md").read_text()
        parts = {
            "title": text.startswith(f"# {name}\n\nSeverity {rule['labels']['severity']}, category "),
            "description": f"after {rule['for']}. {rule['annotations']['description']}\n" in text,
            "expr": f"```\n{rule['expr']}\n```" in text,
            "sections": re.findall(r"^## (.+)$", text, re.MULTILINE)
            == ["What it means", "How to check", "How to fix it"],
        }
        wrong += [f"docs/runbooks/{name}.md: {part}" for part, is_right in parts.items() if not is_right]
    assert not wrong, f"correct them: {wrong}"


def test_rules_ask_for_series_that_gpukeeper_has() -> None:
    asked = {name for rule in RULES.values() for name in re.findall(r"\bgpukeeper_\w+", rule["expr"])}
    assert asked
    assert asked <= set(GAUGES) | set(COUNTERS)


def test_the_page_of_runbooks_lists_every_alert_with_its_severity() -> None:
    text = (RUNBOOKS / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[(\w+)\]\(\w+\.md\) \| .+ \| (\w+) \|$", text, re.MULTILINE))
    assert rows == {name: rule["labels"]["severity"] for name, rule in RULES.items()}

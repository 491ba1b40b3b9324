"""Writes the dashboards beside it: `python deploy/grafana/dashboards.py`. A test compares them, and runs every query.

One row of a table is one panel: title, kind, unit, queries with their legends, and what it shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
WIDTH, HEIGHT = 24, 8
SOURCE = {"type": "prometheus", "uid": "${source}"}
ONLY = 'instance=~"$instance"'


class Panel(NamedTuple):
    title: str
    kind: str  # stat, timeseries, table or bargauge
    unit: str
    queries: tuple[tuple[str, str], ...]  # expression, legend
    about: str
    width: int = 12


DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "fleet": (
        "gpukeeper: fleet",
        (
            Panel("GPUs", "stat", "short", ((f"sum(gpukeeper_gpus{{{ONLY}}})", ""),), "All GPUs and slices.", 4),
            *(
                Panel(
                    title,
                    "stat",
                    "short",
                    ((f'sum(gpukeeper_gpus{{{ONLY},state="{state}"}}) or vector(0)', ""),),
                    about,
                    4,
                )
                for title, state, about in (
                    ("Free", "free", "Without a holder."),
                    ("Held", "held", "Held and in use, or not measured."),
                    ("Idle", "idle", "Held and not used for 30 minutes."),
                    ("Outside", "outside", "Used by a process in no workload."),
                    ("Dirty", "dirty", "Not clean after its workload ended."),
                )
            ),
            Panel(
                "GPUs by state",
                "timeseries",
                "short",
                ((f"sum by (state) (gpukeeper_gpus{{{ONLY}}})", "{{state}}"),),
                "Free, held, idle, outside, dirty, quarantined and unknown over time.",
            ),
            Panel(
                "Use of each GPU",
                "timeseries",
                "percentunit",
                ((f"gpukeeper_gpu_use_ratio{{{ONLY}}}", "{{place}} {{gpu}}"),),
                "In the newest measured minute. A GPU that was not measured has no line.",
            ),
            Panel(
                "GPUs by owner",
                "bargauge",
                "short",
                (
                    (
                        f"count by (owner) (count by (owner, place, gpu, uuid) (gpukeeper_gpu_holder{{{ONLY}}}))",
                        "{{owner}}",
                    ),
                ),
                "GPUs that each owner holds.",
            ),
            Panel(
                "GPUs by owner and state",
                "timeseries",
                "short",
                ((f"sum by (owner, state) (gpukeeper_owner_gpus{{{ONLY}}})", "{{owner}} {{state}}"),),
                "Held and idle, over time.",
            ),
            Panel(
                "CPU and GPU memory by owner",
                "table",
                "short",
                (
                    (f"sum by (owner) (gpukeeper_owner_cpu_cores{{{ONLY}}})", "{{owner}} cores"),
                    (f"sum by (owner) (gpukeeper_owner_gpu_memory_bytes{{{ONLY}}})", "{{owner}} bytes of GPU memory"),
                ),
                "Of workloads with GPUs.",
            ),
            Panel(
                "GPUs by class",
                "bargauge",
                "short",
                (
                    (
                        f"count by (class) (count by (class, place, gpu, uuid) (gpukeeper_gpu_holder{{{ONLY}}}))",
                        "{{class}}",
                    ),
                ),
                "GPUs that workloads of each class hold.",
            ),
            Panel(
                "Held and not used",
                "table",
                "s",
                ((f"gpukeeper_gpu_idle_seconds{{{ONLY}}}", "{{place}} {{gpu}}"),),
                "Time since the last use, after 30 minutes.",
            ),
            Panel(
                "Memory of each GPU",
                "timeseries",
                "percentunit",
                ((f"gpukeeper_gpu_memory_used_ratio{{{ONLY}}}", "{{place}} {{gpu}}"),),
                "Share of the memory in use.",
            ),
            Panel(
                "Workloads",
                "timeseries",
                "short",
                ((f"sum by (kind, state) (gpukeeper_workloads{{{ONLY}}})", "{{kind}} {{state}}"),),
                "By kind and state.",
            ),
            Panel(
                "GPU-hours returned per day",
                "timeseries",
                "h",
                ((f"sum(increase(gpukeeper_gpu_hours_returned_total{{{ONLY}}}[1d]))", "GPU-hours"),),
                "GPU-hours of reclaimed work, of the last 24 hours at each moment.",
            ),
        ),
    ),
    "ray-and-disk": (
        "gpukeeper: Ray and disk",
        (
            Panel(
                "Disk usage",
                "timeseries",
                "percentunit",
                ((f"gpukeeper_disk_used_ratio{{{ONLY}}}", "{{instance}} {{node}} {{disk}}"),),
                "As in df. Alerts at 80 % and 90 %; of Ray nodes at 70 % and 85 %.",
            ),
            Panel(
                "Inodes in use",
                "timeseries",
                "percentunit",
                ((f"gpukeeper_disk_inodes_used_ratio{{{ONLY}}}", "{{instance}} {{node}} {{disk}}"),),
                "Absent if the filesystem has no limit.",
            ),
            Panel(
                "Temporary files of Ray nodes",
                "timeseries",
                "bytes",
                ((f"gpukeeper_node_temporary_bytes{{{ONLY}}}", "{{node}}"),),
                "In the temporary directories of each node, regardless of names.",
            ),
            Panel(
                "Busy Ray nodes",
                "timeseries",
                "short",
                ((f"sum by (instance) (gpukeeper_node_busy{{{ONLY}}})", "{{instance}}"),),
                "Nodes on which work runs.",
            ),
            Panel(
                "Directory trees",
                "timeseries",
                "bytes",
                ((f"sum by (category) (gpukeeper_tree_bytes{{{ONLY}}})", "{{category}}"),),
                "Bytes by category; trees that were not measured are excluded.",
            ),
            Panel(
                "Number of trees",
                "timeseries",
                "short",
                ((f"sum by (category) (gpukeeper_trees{{{ONLY}}})", "{{category}}"),),
                "By category.",
            ),
            Panel(
                "Deleted and still open",
                "timeseries",
                "bytes",
                ((f"gpukeeper_held_open_bytes{{{ONLY}}}", "{{instance}} {{disk}}"),),
                "Bytes of deleted files that processes still have open.",
            ),
            Panel(
                "Bytes returned per day",
                "timeseries",
                "bytes",
                ((f"sum by (rule) (increase(gpukeeper_bytes_returned_total{{{ONLY}}}[1d]))", "{{rule}}"),),
                "By rule, of the last 24 hours at each moment.",
            ),
            Panel(
                "Not measured",
                "timeseries",
                "short",
                ((f"sum by (what) (gpukeeper_not_measured{{{ONLY}}})", "{{what}}"),),
                "Values of nodes, disks and trees that could not be read.",
            ),
            Panel(
                "Images",
                "timeseries",
                "bytes",
                ((f"gpukeeper_image_bytes{{{ONLY}}}", "{{place}} {{image}}"),),
                "The largest images without shared layers, the rest, and shared layers; each layer counts once.",
            ),
            Panel(
                "Written by containers",
                "timeseries",
                "bytes",
                ((f"gpukeeper_workload_written_bytes{{{ONLY}}}", "{{place}} {{workload}}"),),
                "Outside of volumes; the largest, and the rest.",
            ),
            Panel(
                "Logs of containers",
                "timeseries",
                "bytes",
                ((f"gpukeeper_workload_log_bytes{{{ONLY}}}", "{{place}} {{workload}}"),),
                "With rotated files; the largest, and the rest.",
            ),
            Panel(
                "Build cache",
                "timeseries",
                "bytes",
                ((f"gpukeeper_build_cache_bytes{{{ONLY}}}", "{{place}}"),),
                "Without layers of images.",
            ),
            Panel(
                "Images, containers and logs that were not measured",
                "timeseries",
                "short",
                ((f"sum by (place, what) (gpukeeper_storage_not_measured{{{ONLY}}})", "{{place}} {{what}}"),),
                "Number of values.",
            ),
            Panel(
                "Age and duration of that measurement",
                "timeseries",
                "s",
                (
                    (f"time() - gpukeeper_storage_timestamp_seconds{{{ONLY}}}", "{{place}} age"),
                    (f"gpukeeper_storage_seconds{{{ONLY}}}", "{{place}} duration"),
                ),
                "It is repeated every 30 minutes, or less often if it is slow.",
            ),
            Panel(
                "Ray object store",
                "timeseries",
                "percentunit",
                (
                    (
                        'sum by (instance) (ray_object_store_memory{Location!="SPILLED"})'
                        ' / sum by (instance) (ray_resources{Name="object_store_memory"})',
                        "{{instance}}",
                    ),
                ),
                "From Ray's own metrics.",
            ),
        ),
    ),
    "acceptance": (
        "gpukeeper: acceptance",
        (
            Panel(
                "GPUs by verdict",
                "bargauge",
                "short",
                ((f"count by (verdict) (gpukeeper_acceptance_verdict{{{ONLY}}})", "{{verdict}}"),),
                "Of the last acceptance run of each GPU.",
            ),
            Panel(
                "Failed",
                "table",
                "short",
                ((f'gpukeeper_acceptance_verdict{{{ONLY},verdict="FAIL"}}', "{{instance}} {{gpu}}"),),
                "GPUs whose last run has the verdict FAIL, by serial number.",
            ),
            Panel(
                "Time since the last run",
                "timeseries",
                "s",
                ((f"time() - gpukeeper_acceptance_timestamp_seconds{{{ONLY}}}", "{{instance}} {{gpu}}"),),
                "Of each GPU.",
            ),
            Panel(
                "Quarantined or dirty",
                "table",
                "short",
                ((f'gpukeeper_gpu_state{{{ONLY},state=~"quarantined|dirty"}}', "{{place}} {{gpu}} {{state}}"),),
                "GPUs that are not in service.",
            ),
        ),
    ),
    "gpukeeper": (
        "gpukeeper: itself",
        (
            Panel(
                "Time since the last pass",
                "timeseries",
                "s",
                ((f"time() - gpukeeper_last_pass_timestamp_seconds{{{ONLY}}}", "{{instance}}"),),
                "Of the place that waits longest.",
            ),
            Panel(
                "Duration of a pass",
                "timeseries",
                "s",
                ((f"gpukeeper_pass_seconds{{{ONLY}}}", "{{instance}}"),),
                "Including steps; the longest of all places.",
            ),
            Panel(
                "May act",
                "timeseries",
                "bool",
                (
                    (f"gpukeeper_acting{{{ONLY}}}", "{{instance}}"),
                    (f"gpukeeper_breaker_open{{{ONLY}}}", "{{instance}} breaker"),
                ),
                "Whether the last pass was allowed to act, and whether the breaker was open.",
            ),
            Panel(
                "Oldest overdue",
                "timeseries",
                "s",
                ((f"gpukeeper_oldest_overdue_seconds{{{ONLY}}}", "{{instance}}"),),
                "Time since the oldest overdue subject became due.",
            ),
            Panel(
                "Decisions",
                "timeseries",
                "short",
                ((f"sum by (action, verdict) (gpukeeper_decisions{{{ONLY}}})", "{{action}} {{verdict}}"),),
                "Workloads by action, or by why they are kept.",
            ),
            Panel(
                "Events of the last day",
                "timeseries",
                "short",
                ((f"sum by (type) (gpukeeper_events_last_day{{{ONLY}}}) > 0", "{{type}}"),),
                "Lines of the ledger by type.",
            ),
            Panel(
                "Disk of the ledger",
                "timeseries",
                "percentunit",
                ((f"gpukeeper_state_disk_used_ratio{{{ONLY}}}", "{{instance}}"),),
                "As in df. An alert at 90 %.",
            ),
            Panel(
                "Idle rule",
                "timeseries",
                "short",
                ((f"sum by (result) (gpukeeper_idle_workloads{{{ONLY}}})", "{{result}}"),),
                "Running workloads that are monitored, or why they are skipped.",
            ),
            Panel(
                "Reclaimed per day",
                "timeseries",
                "short",
                (
                    (
                        f"sum by (rule, action) (increase(gpukeeper_reclaimed_total{{{ONLY}}}[1d]))",
                        "{{rule}} {{action}}",
                    ),
                ),
                "Verified, by rule and action, of the last 24 hours at each moment.",
            ),
            Panel(
                "Failed steps and passes per hour",
                "timeseries",
                "short",
                (
                    (f"sum by (result) (increase(gpukeeper_failed_total{{{ONLY}}}[1h]))", "{{result}}"),
                    (f"sum by (place) (increase(gpukeeper_passes_failed_total{{{ONLY}}}[1h]))", "pass on {{place}}"),
                ),
                "Steps by result, and aborted passes by place.",
            ),
            Panel(
                "Warnings per day",
                "timeseries",
                "short",
                (
                    (
                        f"sum by (delivered) (increase(gpukeeper_warnings_total{{{ONLY}}}[1d]))",
                        "delivered: {{delivered}}",
                    ),
                ),
                "Warnings to owners, by delivery.",
            ),
            Panel(
                "Fleet database",
                "timeseries",
                "s",
                ((f"gpukeeper_fleet_copy_lag_seconds{{{ONLY}}}", "{{instance}}"),),
                "Age of the oldest line that is not copied yet.",
            ),
            Panel(
                "Could not be read",
                "timeseries",
                "short",
                ((f"gpukeeper_unseen{{{ONLY}}}", "{{instance}}"),),
                "Objects and lists. Their workloads are unknown, not absent.",
            ),
            Panel(
                "Memory of gpukeeper",
                "timeseries",
                "bytes",
                ((f'process_resident_memory_bytes{{{ONLY},job="gpukeeper"}}', "{{instance}}"),),
                "Resident memory of the process.",
            ),
        ),
    ),
}


def dashboard(name: str) -> dict[str, Any]:
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"gpukeeper-{name}",
        "title": title,
        "tags": ["gpukeeper"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": "label_values(gpukeeper_info, instance)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                },
            ]
        },
        "panels": list(_placed(panels)),
    }


def _placed(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    found, x, y = [], 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > WIDTH:
            x, y = 0, y + HEIGHT
        found.append(_panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": HEIGHT}))
        x += panel.width
    return found


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    instant = panel.kind != "timeseries"
    return {
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "noValue": "no data"}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + n),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
            }
            for n, (expression, legend) in enumerate(panel.queries)
        ],
    }


def text(name: str) -> str:
    return json.dumps(dashboard(name), indent=2) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (HERE / f"{each}.json").write_text(text(each))

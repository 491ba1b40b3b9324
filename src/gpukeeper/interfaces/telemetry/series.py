"""The series that there are, in one sentence each, and how they are written. A test compares the reference page."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gpukeeper.notify.terminals import plain

# As of the last look at everything, each place's own. Of operators only who leads tells more than the first two.
GAUGES = {
    "gpukeeper_info": "Always 1; its labels say which version this is.",
    "gpukeeper_leader": "1 while this one leads. Told by operators only.",
    "gpukeeper_workloads": "Workloads by kind, state and outcome.",
    "gpukeeper_finished": "Finished workloads that are still there, by kind and by how long ago they ended.",
    "gpukeeper_finished_age_seconds": "How long ago the oldest finished workload of a kind ended.",
    "gpukeeper_wasted_gpus": "GPUs and slices that running workloads hold and did not use for 30 minutes, by class.",
    "gpukeeper_idle_workloads": "Running workloads by what the idle rule does (monitored, or why skipped) and class.",
    "gpukeeper_overdue": "Due and still there: not acted on, deferred, refused, or in mode plan.",
    "gpukeeper_oldest_overdue_seconds": "For how long the oldest of them has been due.",
    "gpukeeper_backlog": "Of those, deferred to a later pass by the budget.",
    "gpukeeper_unseen": "What could not be looked at. Its workloads are unknown, not absent.",
    "gpukeeper_breaker_open": "1 when the last pass refused every step because the world looked broken.",
    "gpukeeper_acting": "1 when the last pass was allowed to act: mode enforce, within its schedule, not paused.",
    "gpukeeper_last_pass_timestamp_seconds": "When the last look at everything was finished; the oldest of all places.",
    "gpukeeper_pass_seconds": "How long it took, steps included; the longest of all places.",
    "gpukeeper_trees": "Trees of files, by category.",
    "gpukeeper_tree_bytes": "Bytes of these trees. What was not measured is not in it.",
    "gpukeeper_node_temporary_bytes": "Bytes in the temporary folders of a node, whatever the entries are called.",
    "gpukeeper_node_busy": "1 while work runs on a node, 0 while none does.",
    "gpukeeper_disk_size_bytes": "Size of a disk: of a node, or of a root that the policy names.",
    "gpukeeper_disk_free_bytes": "Bytes of it that anybody may still write.",
    "gpukeeper_disk_used_ratio": "Share of its bytes that is used, as df tells it.",
    "gpukeeper_disk_inodes_used_ratio": "Share of its inodes that is used. Absent where a disk has no limit of them.",
    "gpukeeper_held_open_bytes": "Bytes of deleted files on it that processes still have open.",
    "gpukeeper_not_measured": "Facts about nodes, disks and trees that could not be learned; their series are absent.",
}
COUNTERS = {
    "gpukeeper_reclaimed_total": "Reclaimed and seen to be so, by kind, rule and action.",
    "gpukeeper_failed_total": "Steps that came to nothing, by kind and result.",
    "gpukeeper_passes_failed_total": "Passes that stopped midway, by place: the platform failed, or a bug.",
    "gpukeeper_warnings_total": "Warnings to owners, by whether they were delivered.",
    "gpukeeper_idle_warned_total": "Warnings to owners of idle work.",
    "gpukeeper_idle_stopped_total": "Idle work that was stopped, and seen to have.",
    "gpukeeper_gpu_hours_returned_total": "GPU-hours given back. What was not measured is not in it.",
    "gpukeeper_bytes_returned_total": "Bytes given back, by rule. What was not measured is not in it.",
    "gpukeeper_captured_bytes_total": "Evidence saved before a removal: logs, and the rest (manifests, events).",
}
COUNTED_BY: dict[str, tuple[str, ...]] = {
    "gpukeeper_reclaimed_total": ("kind", "rule", "action"),
    "gpukeeper_failed_total": ("kind", "result"),
    "gpukeeper_passes_failed_total": ("platform", "place"),
    "gpukeeper_warnings_total": ("delivered",),
    "gpukeeper_idle_warned_total": (),
    "gpukeeper_idle_stopped_total": (),
    "gpukeeper_gpu_hours_returned_total": (),
    "gpukeeper_bytes_returned_total": ("rule",),
    "gpukeeper_captured_bytes_total": ("what",),
}

Values = Mapping[tuple[str, ...], float]  # by the values of the labels


def gauge(name: str, values: Values, *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, GAUGES[name], labels=labels)
    for key, value in values.items():
        family.add_metric([plain(word) for word in key], float(value))
    return family


def counter(name: str, values: Values) -> CounterMetricFamily:
    family = CounterMetricFamily(name, COUNTERS[name], labels=COUNTED_BY[name])
    for key, value in values.items():
        family.add_metric([plain(word) for word in key], float(value))
    return family

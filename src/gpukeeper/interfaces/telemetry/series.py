"""All series, with one sentence each, and how they are written. A test compares the reference page."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gpukeeper.model.words import plain

# Of the last full pass at each place. Of several operators only the leader exports more than the first three.
GAUGES = {
    "gpukeeper_info": "Always 1; the label is the version.",
    "gpukeeper_leader": "1 if this instance is the leader. Exported by operators only.",
    "gpukeeper_lease_denied": "1 if this instance may not write its lease, so that it does nothing. Operators only.",
    "gpukeeper_workloads": "Workloads by kind, state and outcome.",
    "gpukeeper_finished": "Finished workloads that still exist, by kind and time since their end.",
    "gpukeeper_finished_age_seconds": "Time since the end of the oldest finished workload, by kind.",
    "gpukeeper_wasted_gpus": "GPUs and slices held by running workloads and unused for 30 minutes, by class.",
    "gpukeeper_idle_workloads": "Running workloads by result of the idle rule (monitored, or why skipped) and class.",
    "gpukeeper_decisions": "Workloads by class, action, verdict and rule of their decision.",
    "gpukeeper_overdue": "Subjects that are due and not reclaimed: not acted on, deferred, refused, or in mode plan.",
    "gpukeeper_oldest_overdue_seconds": "Time since the oldest overdue subject became due.",
    "gpukeeper_backlog": "Overdue subjects that the budget deferred to a later pass.",
    "gpukeeper_unseen": "Objects and lists that could not be read. Their workloads are unknown, not absent.",
    "gpukeeper_breaker_open": "1 if the breaker was open in the last pass.",
    "gpukeeper_acting": "1 if the last pass was allowed to act: mode enforce, within its schedule, not paused.",
    "gpukeeper_last_pass_timestamp_seconds": "End of the last full pass; the oldest of all places.",
    "gpukeeper_pass_seconds": "Duration of the last full pass, including steps; the longest of all places.",
    "gpukeeper_measured_apart_seconds": "Time between the last two measurements. Above 120 idle times begin anew.",
    "gpukeeper_trees": "Directory trees, by category.",
    "gpukeeper_tree_bytes": "Bytes in directory trees, by category. Trees that were not measured are excluded.",
    "gpukeeper_node_temporary_bytes": "Bytes in the temporary directories of a node, regardless of names.",
    "gpukeeper_node_busy": "1 if work runs on the node, else 0.",
    "gpukeeper_disk_size_bytes": "Size of a disk of a node, or of a root in the policy.",
    "gpukeeper_disk_free_bytes": "Bytes available to unprivileged users.",
    "gpukeeper_disk_used_ratio": "Share of bytes in use, as in df.",
    "gpukeeper_disk_inodes_used_ratio": "Share of inodes in use. Absent if the filesystem has no inode limit.",
    "gpukeeper_held_open_bytes": "Bytes of deleted files that processes still have open.",
    "gpukeeper_not_measured": "Values of nodes, disks and trees that could not be measured; their series are absent.",
    "gpukeeper_gpus": "GPUs and slices by place, model and state.",
    "gpukeeper_gpu_state": "Always 1; the label is the state of the GPU.",
    "gpukeeper_gpu_use_ratio": "Share of time with work on the GPU, in the newest measured minute.",
    "gpukeeper_gpu_memory_used_ratio": "Share of the GPU memory in use.",
    "gpukeeper_gpu_idle_seconds": "Time since the last use of a GPU that a running workload holds, after 30 minutes.",
    "gpukeeper_gpu_holder": "Always 1; one for each holder: its platform, class and owner.",
    "gpukeeper_owner_gpus": "GPUs and slices that an owner's workloads hold, by state.",
    "gpukeeper_owner_gpu_memory_bytes": "Memory in use of the GPUs that an owner's workloads hold.",
    "gpukeeper_owner_cpu_cores": "CPU of an owner's workloads with GPUs, in cores, in the newest measured minute.",
    "gpukeeper_acceptance_verdict": "Always 1; the label is the verdict of the GPU's last acceptance run.",
    "gpukeeper_acceptance_timestamp_seconds": "Time of the GPU's last acceptance run.",
    "gpukeeper_events_last_day": "Lines of the ledger in the last 24 hours, by type.",
    "gpukeeper_state_disk_free_bytes": "Bytes available on the disk with the ledger.",
    "gpukeeper_state_disk_used_ratio": "Share of bytes in use on the disk with the ledger, as in df.",
    "gpukeeper_image_bytes": "Bytes of the largest images without shared layers; the rest; shared layers, each once.",
    "gpukeeper_workload_written_bytes": "Bytes that the largest workloads wrote outside of volumes; the rest.",
    "gpukeeper_workload_log_bytes": "Bytes of the largest logs with their rotated files; the rest.",
    "gpukeeper_build_cache_bytes": "Bytes of the build cache that are no layers of images.",
    "gpukeeper_storage_timestamp_seconds": "Time of the measurement of images, workloads and logs.",
    "gpukeeper_storage_seconds": "Duration of that measurement.",
    "gpukeeper_storage_not_measured": "Values of images, workloads and logs that could not be measured.",
    "gpukeeper_pod_gpu_processes": "Processes on GPUs, by whether their pod is known. With `serve --pods`.",
    "gpukeeper_pod_gpu_not_measured": "What is missing in the GPU use of pods. With `serve --pods`.",
    "gpukeeper_pod_log_bytes": "Bytes of the largest logs of pods, also of ended ones; the rest. With `serve --pods`.",
    "gpukeeper_fleet_copy_connected": "1 if the fleet database is connected. Exported only if it is configured.",
    "gpukeeper_fleet_copy_lag_seconds": "Age of the oldest journal line that is not in the fleet database yet.",
    "gpukeeper_fleet_copy_unsent_lines": "Journal lines that are not in the fleet database yet.",
}
COUNTERS = {
    "gpukeeper_reclaimed_total": "Reclaimed subjects, verified, by kind, rule and action.",
    "gpukeeper_failed_total": "Steps that failed, by kind and result.",
    "gpukeeper_passes_failed_total": "Passes that were aborted by a platform error or a bug, by place.",
    "gpukeeper_warnings_total": "Warnings to owners, by delivery.",
    "gpukeeper_idle_checks_total": "Checks of running workloads by the idle rule, by result and class.",
    "gpukeeper_idle_warned_total": "Warnings to owners of idle work.",
    "gpukeeper_idle_stopped_total": "Idle workloads that were stopped, verified.",
    "gpukeeper_gpu_hours_returned_total": "GPU-hours returned. Values that were not measured are excluded.",
    "gpukeeper_bytes_returned_total": "Bytes returned, by rule. Values that were not measured are excluded.",
    "gpukeeper_captured_bytes_total": "Evidence captured before removals: logs, and the rest (manifests, events).",
}
COUNTED_BY: dict[str, tuple[str, ...]] = {
    "gpukeeper_reclaimed_total": ("kind", "rule", "action"),
    "gpukeeper_failed_total": ("kind", "result"),
    "gpukeeper_passes_failed_total": ("platform", "place"),
    "gpukeeper_warnings_total": ("delivered",),
    "gpukeeper_idle_checks_total": ("result", "class"),
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

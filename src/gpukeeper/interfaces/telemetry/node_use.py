"""GPU use of the pods of this node, under the names and labels of a DCGM exporter: the operator and other tools read
those already.

Of a GPU whose use is unknown there is no series, and of one without a pod neither. What is missing is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric, UnknownMetricFamily

from gpukeeper.devices.busy import GpuUse
from gpukeeper.interfaces.telemetry.series import gauge
from gpukeeper.model.printable import plain
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.node_pods import PROCESS_RESULTS
from gpukeeper.platforms.kubernetes.node_use import PodUse

ENGINE, ENERGY = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
MEMORY = "DCGM_FI_DEV_FB_USED"
LABELS = ("UUID", "GPU_I_ID", "namespace", "pod", "pod_uid", "vgpu")
Numbers = dict[tuple[str, ...], float]


def of_node_use(seen: PodUse) -> Iterator[Metric]:
    if isinstance(seen.uses, Unknown):
        yield gauge("gpukeeper_pod_gpu_not_measured", {("driver",): 1}, "what")
        return
    engine, energy, memory = _values(seen, seen.uses)
    yield _family(GaugeMetricFamily(ENGINE, "Share of time with work on the GPU, by gpukeeper.", labels=LABELS), engine)
    # A counter, but prometheus_client would give it another name.
    yield _family(UnknownMetricFamily(ENERGY, "Energy in mJ since the driver was loaded.", labels=LABELS), energy)
    yield _family(GaugeMetricFamily(MEMORY, "GPU memory in use, in MiB.", labels=LABELS), memory)
    results: Numbers = {(result,): seen.pods.processes.get(result, 0) for result in PROCESS_RESULTS}
    yield gauge("gpukeeper_pod_gpu_processes", results, "result")
    yield gauge("gpukeeper_pod_gpu_not_measured", _missing(seen, seen.uses), "what")


def _values(seen: PodUse, uses: Mapping[str, GpuUse]) -> tuple[Numbers, Numbers, Numbers]:
    engine: Numbers = {}
    energy: Numbers = {}
    memory: Numbers = {}
    for parent in sorted(_cut(uses)):
        # Slices have no counter of their own: the operator takes that of the whole GPU.
        _add(energy, _labels(parent), uses[parent].energy_mj)
    for one in seen.pods.found:
        use, busy = uses[one.uuid], seen.busiest.get(one.uuid)
        instance = use.gpu_instance if use.slice else ""
        if busy is None or isinstance(instance, Unknown):
            continue
        holder = (one.pod.namespace, one.pod.name, one.pod.uid, one.replica)
        labels = _labels(use.parent or use.uuid, str(instance), *holder)
        _add(engine, labels, busy / 100)
        _add(memory, labels, use.memory_used_mib)
        if not use.slice:
            _add(energy, labels, use.energy_mj)
    return engine, energy, memory


def _missing(seen: PodUse, uses: Mapping[str, GpuUse]) -> Numbers:
    cut = _cut(uses)
    named = {uuid for uuid, one in uses.items() if not (one.slice and isinstance(one.gpu_instance, Unknown))}
    return {
        ("driver",): 0,
        ("use",): len(set(uses) - cut - (named & set(seen.busiest))),
        ("processes",): sum(isinstance(one.pids, Unknown) for one in uses.values()),
        ("assignments",): seen.assigned is not None,
        ("names",): seen.named is not None,
        ("devices",): seen.pods.nameless,
    }


def _cut(uses: Mapping[str, GpuUse]) -> set[str]:
    """GPUs that are split into slices: they have no use of their own."""
    return {one.parent for one in uses.values() if one.parent is not None} & set(uses)


def _labels(
    uuid: str, instance: str = "", namespace: str = "", name: str = "", uid: str = "", replica: str = ""
) -> tuple[str, ...]:
    return uuid, instance, namespace, name, uid, replica


def _add(values: Numbers, labels: tuple[str, ...], value: float | Unknown) -> None:
    """Two slices may be in one GPU instance: the larger value counts."""
    if not isinstance(value, Unknown):
        values[labels] = max(value, values.get(labels, value))


def _family(family: GaugeMetricFamily | UnknownMetricFamily, values: Numbers) -> Metric:
    for labels, value in values.items():
        family.add_metric([plain(word) for word in labels], float(value))
    return family

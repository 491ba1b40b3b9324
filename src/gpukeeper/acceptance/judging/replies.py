"""Replies of probes, of one GPU or of the ranks of several: results to interpret, and a finding for each failure.

Kinds of failures are recognized in the output of PyTorch, CUDA and NCCL. A probe that could not run proves nothing
about the GPU, so most kinds are inconclusive. Two mean a broken GPU.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpukeeper.acceptance.check import CheckContext, CheckRun
from gpukeeper.acceptance.judging import judge
from gpukeeper.acceptance.record import Finding, ProbeFailure, ProbeResult, Remedy, Values
from gpukeeper.model.gpu import Gpu, Grade

LONGEST_QUOTE = 240
SIGNALS_FROM = 128  # a shell reports 128 + signal, subprocess -signal
MOST_SIGNALS = 64


@dataclass(frozen=True)
class FailureKind:
    sentence: str
    advice: str
    remedy: Remedy
    grade: Grade = Grade.INCONCLUSIVE


FAILURE_KINDS: Mapping[str, FailureKind] = {
    "ecc": FailureKind(
        "The GPU's memory had an uncorrectable ECC error.",
        "Take it out of service, reset it (nvidia-smi --gpu-reset -i INDEX, or reboot) and test again; if it happens"
        " again, replace it.",
        Remedy.RESET_GPU,
        Grade.FAIL,
    ),
    "lost_gpu": FailureKind(
        "The GPU fell off the bus: the driver can no longer reach it.",
        "Reboot. If it happens again, reseat the board, check its power cables and cooling, then replace it. For"
        " details see the kernel log (dmesg | grep Xid).",
        Remedy.REBOOT,
        Grade.FAIL,
    ),
    "kernel_fault": FailureKind(
        "The GPU aborted a kernel of the probe (illegal address or instruction, or an unspecified failure).",
        "Run it again: these kernels are known to be correct, so if the same GPU fails twice, it is faulty. Check the"
        " kernel log for Xid 13 or 31.",
        Remedy.RETEST,
    ),
    "out_of_memory": FailureKind(
        "The GPU had too little free memory for this check.",
        "To find the process: nvidia-smi, or gpukeeper observe. Stop it, or test less memory (--set CHECK.share=0.2).",
        Remedy.RETEST,
    ),
    "busy_gpu": FailureKind(
        "Another process uses the GPU, or its compute mode allows only one process.",
        "To find the process: nvidia-smi, or gpukeeper observe. Stop it; if there is none, allow several processes"
        " with nvidia-smi -c DEFAULT (as root).",
        Remedy.RETEST,
    ),
    "driver_too_old": FailureKind(
        "The NVIDIA driver is too old for this PyTorch build.",
        "Update the driver, or use a PyTorch built for an older CUDA: nvidia-smi shows the newest CUDA version that"
        " the driver supports, python -c 'import torch; print(torch.version.cuda)' the one that PyTorch needs.",
        Remedy.CHECK_CONFIG,
    ),
    "driver_mismatch": FailureKind(
        "The kernel driver and the driver library have different versions.",
        "A driver update needs a reboot, or the image contains its own libcuda: reboot, or remove that library.",
        Remedy.REBOOT,
    ),
    "fabric": FailureKind(
        "The NVLink switches are not initialized, so CUDA does not start.",
        "Start the fabric manager of exactly the driver's version: systemctl start nvidia-fabricmanager; in a virtual"
        " machine this must be done on the host.",
        Remedy.CHECK_CONFIG,
    ),
    "cuda_mismatch": FailureKind(
        "This PyTorch cannot use this GPU: it was built without CUDA, for another CUDA version, or without code for"
        " this model.",
        "Use a PyTorch built for CUDA and for this GPU (in a clone of gpukeeper: pip install '.[accept]'), or select"
        " another interpreter with --python. LD_LIBRARY_PATH with libraries of another CUDA version has the same"
        " effect: unset it.",
        Remedy.CHECK_CONFIG,
    ),
    "no_torch": FailureKind(
        "PyTorch is not installed in this Python.",
        "Install it (in a clone of gpukeeper: pip install '.[accept]'), or select an interpreter that has it with"
        " --python.",
        Remedy.CHECK_CONFIG,
    ),
    "no_gpu": FailureKind(
        "No GPU is visible from here.",
        "In a container: start it with --gpus all (Docker), or request nvidia.com/gpu (Kubernetes), and check that"
        " the NVIDIA container toolkit is installed. On a machine: check that nvidia-smi lists the GPU, and that"
        " CUDA_VISIBLE_DEVICES is not empty.",
        Remedy.CHECK_CONFIG,
    ),
    "port_taken": FailureKind(
        "The rendezvous port of the ranks is in use by another program (29500 unless MASTER_PORT is set).",
        "Stop the other run, or choose another port: MASTER_PORT=29501. To find the process: ss -ltnp | grep 29500",
        Remedy.CHECK_CONFIG,
    ),
    "dns": FailureKind(
        "The name of the rendezvous host (MASTER_ADDR) cannot be resolved.",
        "Run getent hosts NAME on every node. In Kubernetes the headless Service must publish addresses that are not"
        " ready yet (publishNotReadyAddresses: true); otherwise set MASTER_ADDR to an IP address.",
        Remedy.CHECK_CONFIG,
    ),
    "rendezvous": FailureKind(
        "The ranks could not connect to each other at MASTER_ADDR, port 29500 (or MASTER_PORT).",
        "Check that every node runs the same command with the same number of nodes, that the first one is up, and"
        " that the port is open between them: nc -vz MASTER_ADDR 29500. This is not a finding about the GPUs.",
        Remedy.CHECK_CONFIG,
    ),
    "nccl": FailureKind(
        "NCCL could not connect the GPUs.",
        "The report contains NCCL's log. Common causes: /dev/shm is too small (--ipc=host or --shm-size), memlock is"
        " limited (--ulimit memlock=-1), the wrong network (NCCL_SOCKET_IFNAME), P2P blocked by ACS (test with"
        " NCCL_P2P_DISABLE=1).",
        Remedy.CHECK_CONFIG,
    ),
    "no_data": FailureKind(
        "The data set was not found, so nothing was trained; synthetic data was not used instead.",
        "Copy it to the path in the message, set its directory (--set throughput.data_dir=DIR), or use synthetic data"
        " (--set throughput.data=synthetic).",
        Remedy.CHECK_CONFIG,
    ),
    "bad_setting": FailureKind(
        "A parameter of the check is not valid.",
        "Fix the parameter named below; gpukeeper check show CHECK lists all parameters.",
        Remedy.CHECK_CONFIG,
    ),
    "timeout": FailureKind(
        "The check exceeded its timeout and was stopped.",
        "Run it again alone (--check NAME). If it hangs again while others pass, check the kernel log for Xids, and"
        " with several GPUs the rank that arrived last.",
        Remedy.RETEST,
    ),
    "crashed": FailureKind(
        "The probe crashed without a result.",
        "Run it again. If it was killed (signal 9), the machine or the container had too little memory. Otherwise see"
        " the kernel log and the last output below.",
        Remedy.RETEST,
    ),
    "failed": FailureKind(
        "The probe failed with an error.",
        "See its output below; if the cause is not on your side, report a bug with the report's JSON.",
        Remedy.RETEST,
    ),
}

# In this order: the first that is found names the kind. What the hardware reports comes before its consequences, and
# the cause (a port, a name) before the error of the process that waited for it.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ecc", ("uncorrectable ECC error", "ECC_UNCORRECTABLE", "double.bit ECC")),
    ("lost_gpu", ("fallen off the bus", "GPU is lost", "GPU_IS_LOST", "Xid.{0,60}: 79,", "device is lost")),
    ("fabric", ("Error 802", "system not yet initialized", "SYSTEM_NOT_READY")),
    ("driver_mismatch", ("Driver/library version mismatch", "Error 803", "unsupported display driver / cuda driver")),
    (
        "driver_too_old",
        (
            *("driver on your system is too old", "CUDA driver version is insufficient", "Error 804"),
            *("forward compatibility was attempted", "compiled with an unsupported toolchain"),
        ),
    ),
    (
        "cuda_mismatch",
        (
            *("Torch not compiled with CUDA", "no kernel image is available", "compatible with the current PyTorch"),
            r"lib(?:cuda|cudart|cublas|cudnn|nccl|nvrtc|nvJitLink|cusparse|cufft|torch)\w*\.so\S*: ",
            *(r"undefined symbol: \S*(?:nccl|cuda|cublas|cudnn|nvJitLink)", "CUDNN_STATUS_(?:NOT_INIT|ARCH_MISMATCH)"),
        ),
    ),
    ("no_torch", (r"No module named ['\"]?torch\b", "torch is not installed")),
    ("busy_gpu", (r"CUDA-capable device\S* (?:is/)?are busy", "exclusive.process", "DEVICE_UNAVAILABLE")),
    ("out_of_memory", ("out of memory", "OutOfMemoryError", "STATUS_ALLOC_FAILED", "Cannot allocate memory")),
    (
        "no_gpu",
        (
            *("No CUDA GPUs are available", "Found no NVIDIA driver", "no CUDA-capable device is detected"),
            *("NO_DEVICE", "invalid device ordinal", "communicate with the NVIDIA driver", "CUDA unknown error"),
            *("NVML Shared Library Not Found", r"libnvidia-ml\.so", "could not select device driver"),
        ),
    ),
    (
        "kernel_fault",
        (
            *("illegal memory access", "illegal instruction was encountered", "unspecified launch failure"),
            *("misaligned address", "device-side assert", "hardware stack error", "invalid program counter"),
        ),
    ),
    ("port_taken", ("EADDRINUSE", "Address already in use", "failed to listen on any local network address")),
    ("no_data", (r"DataMissing\b", "data set .{0,80} is not (?:there|here|in)")),
    ("bad_setting", (r"BadSetting\b", r"UsageError\b", "^ValueError: ")),
    ("nccl", ("NCCL error in", "nccl(?:System|Internal|Remote|UnhandledCuda)Error", "ncclInvalid")),
    (
        "dns",
        (
            *("Name or service not known", "Temporary failure in name resolution", "nodename nor servname"),
            *("gaierror", "getaddrinfo failed", "No address associated with hostname"),
        ),
    ),
    (
        "rendezvous",
        (
            *(r"Rendezvous\w*Error", "client socket has (?:timed out|failed to connect)", "waiting for clients"),
            *("DistStoreError", "DistNetworkError", "connectFullMesh failed", "Connection refused"),
            "^.{0,40}rendezvous failed",
            "timed out .{0,30}waiting for .{0,60}(?:clients|workers|store|ranks)",
        ),
    ),
    ("timeout", ("caught collective operation timeout", r"Timed out waiting \d+ms for (?:recv|send)")),
)
_KINDS = tuple((kind, re.compile("|".join(signs), re.IGNORECASE | re.MULTILINE)) for kind, signs in _SIGNS)
# torch tries IPv6 first and logs it; it is no fault while the IPv4 address was found.
_HARMLESS = re.compile(r"^.*\[c10d\] The IPv6 network addresses of .* cannot be retrieved.*$", re.MULTILINE)


def classify(words: str, exit_code: int | None = None, timed_out: bool = False) -> str:
    """The kind of failure, by its output and how it ended."""
    output = _HARMLESS.sub("", words)
    found = next((kind for kind, signs in _KINDS if signs.search(output)), None)
    if found:
        return found
    if timed_out:
        return "timeout"
    return "crashed" if exit_code is not None and _by_signal(exit_code) else "failed"


def broken_finding(check: str, gpu: str | None, answer: ProbeFailure, metric: str = "") -> Finding:
    """A finding about a probe without a result. Its last output is kept as evidence."""
    kind = answer.kind if answer.kind in FAILURE_KINDS else classify(answer.words)
    lesson = FAILURE_KINDS[kind]
    return Finding(
        check=check,
        metric=metric,
        gpu=gpu,
        verdict=lesson.grade,
        code=kind.replace("_", "-"),
        message=f"{lesson.sentence} {lesson.advice}{_quote(answer.words)}",
        action=lesson.remedy,
        evidence={"words": answer.words},
        seconds=answer.seconds,
    )


def _by_signal(exit_code: int) -> bool:
    return exit_code < 0 or SIGNALS_FROM < exit_code <= SIGNALS_FROM + MOST_SIGNALS


def _quote(words: str) -> str:
    """The last line: with PyTorch and Python that is the error; the lines before are the traceback."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return f' Output: "{lines[-1][:LONGEST_QUOTE]}"' if lines else ""


def of_gpus(check: str, trial: CheckRun) -> tuple[dict[str, Values], tuple[Finding, ...]]:
    """By uuid the result of each probe, and findings about probes without a result."""
    results: dict[str, Values] = {}
    findings = []
    for gpu, answer in trial.answers.items():
        if isinstance(answer, ProbeFailure):
            findings.append(broken_finding(check, gpu, answer))
        else:
            results[gpu] = answer.result
    return results, tuple(findings)


def read_each(
    check: str, trial: CheckRun, read: Callable[[str, Values], Iterable[Finding]]
) -> tuple[dict[str, Values], tuple[Finding, ...]]:
    """One or more findings for each result. A result without a required field is not a measurement."""
    results, findings = of_gpus(check, trial)
    found = list(findings)
    for gpu, result in results.items():
        try:
            found += read(gpu, result)
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            why = f"the probe's result could not be read ({type(error).__name__}: {error})"
            found.append(judge.missing(check, "", gpu, why))
    return results, tuple(found)


def figures(value: Any) -> tuple[float, ...]:
    """Samples. JSON has no infinity, so probes write such figures as words."""
    return tuple(float(one) for one in value) if isinstance(value, list | tuple) else ()


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def against_majority(values: Mapping[str, str], context: CheckContext) -> dict[str, tuple[str, int]]:
    """Of GPUs of one model that should all report the same: by uuid how one compares, and among how many.

    "like" the majority, "odd" against it, or "split": they differ without a majority, so it is unknown which one is
    wrong.
    """
    found: dict[str, tuple[str, int]] = {}
    for group in _by_model(values, context):
        majority, votes = Counter(values[gpu] for gpu in group).most_common(1)[0]
        decided = votes * 2 > len(group)  # never among two that differ: it is unknown which one is wrong
        for gpu in group:
            alike = decided and values[gpu] == majority
            found[gpu] = ("like" if alike else "odd" if decided else "split", len(group))
    return found


def _by_model(values: Mapping[str, str], context: CheckContext) -> Iterable[list[str]]:
    """A GPU without peers, or of an unknown model, is not compared."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for gpu in values:
        one = context.gpu(gpu)
        if isinstance(one.name, str):
            groups.setdefault((one.name, one.profile), []).append(gpu)
    return (group for group in groups.values() if len(group) > 1)


NODE_FACT = "node"  # a fact of a GPU, where ranks are on several nodes: which one
STOPPED = "was stopped because rank"  # of a rank that ended because another one did: that one has the reason


Reader = Callable[[Mapping[int, Values], CheckContext], Iterable[Finding]]


def interpret_ranks(check: str, trial: CheckRun, context: CheckContext, reader: Reader) -> tuple[Finding, ...]:
    """The findings of the reader about all ranks' results. Called only if every rank has one: half a collective is
    none.

    A reply without the fields that a probe always sends is no measurement.
    """
    answers = rank_results(trial)
    found = broken_ranks(check, trial, context)
    if found or not answers:
        return found or (judge.missing(check, "", None, "no rank returned a result"),)
    if wrong := _other_world(answers, len(context.gpus)):
        return (judge.missing(check, "", None, wrong),)
    try:
        return tuple(reader(answers, context))
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        why = f"the probe's result could not be read ({type(error).__name__}: {error})"
        return (judge.missing(check, "", None, why),)


def _other_world(answers: Mapping[int, Values], gpus: int) -> str:
    """Ranks that met in smaller groups tested each group, not the machine."""
    worlds = ((rank, answer.get("world", answer.get("world_size", gpus))) for rank, answer in answers.items())
    other = (f"rank {rank} reported {world} ranks instead of {gpus}" for rank, world in worlds if world != gpus)
    return next(other, "")


def rank_results(trial: CheckRun) -> dict[int, Values]:
    """By rank: those that measured."""
    done = {int(rank): answer.result for rank, answer in trial.answers.items() if isinstance(answer, ProbeResult)}
    return dict(sorted(done.items()))


def rank_gpu(rank: int, context: CheckContext) -> Gpu | None:
    """Ranks are started in the order of the GPUs."""
    return context.gpus[rank] if 0 <= rank < len(context.gpus) else None


def rank_uuid(rank: int, context: CheckContext) -> str | None:
    found = rank_gpu(rank, context)
    return None if found is None else found.uuid


def named_ranks(ranks: Iterable[int], context: CheckContext) -> str:
    """rank 2 (GPU 2) and rank 3 (GPU 3); over several nodes: rank 9 (gpu-2 GPU 1)."""
    words = []
    for rank in ranks:
        found = rank_gpu(rank, context)
        node = "" if found is None or found.facts.get(NODE_FACT) is None else f"{found.facts[NODE_FACT]} "
        words.append(f"rank {rank}" if found is None else f"rank {rank} ({node}GPU {found.index})")
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def broken_ranks(check: str, trial: CheckRun, context: CheckContext) -> tuple[Finding, ...]:
    """One for each cause: of several ranks it is the node's. Ranks that only followed another one add nothing."""
    missing = [rank for rank in range(len(context.gpus)) if str(rank) not in trial.answers]
    failures = {int(rank): answer for rank, answer in trial.answers.items() if isinstance(answer, ProbeFailure)}
    causes = {rank: answer for rank, answer in failures.items() if STOPPED not in answer.words} or failures
    by_kind: dict[str, list[int]] = defaultdict(list)
    for rank, answer in sorted(causes.items()):
        by_kind[answer.kind].append(rank)
    found = [_of_cause(check, ranks, causes[ranks[0]], context) for ranks in by_kind.values()]
    if missing and not failures:
        why = f"{named_ranks(missing, context)} returned no result"
        found.append(judge.missing(check, "", rank_uuid(missing[0], context) if len(missing) == 1 else None, why))
    return tuple(found)


def _of_cause(check: str, ranks: Sequence[int], answer: ProbeFailure, context: CheckContext) -> Finding:
    whose = rank_uuid(ranks[0], context) if len(ranks) == 1 else None
    found = broken_finding(check, whose, answer)
    return msgspec.structs.replace(
        found,
        message=f"{named_ranks(ranks, context)}: {found.message}",
        evidence={**found.evidence, "ranks": list(ranks)},
    )


def as_noted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Values without a reference at first: reported and kept for comparison in later runs, neither good nor bad.

    Only for secondary values of a check: its main value stays inconclusive without a reference.
    """
    return tuple(_noted(one) if one.code.endswith("-no-yardstick") else one for one in findings)


def _noted(finding: Finding) -> Finding:
    what = " ".join(part for part in (finding.check, finding.metric) if part).replace("_", " ")
    return msgspec.structs.replace(
        finding,
        verdict=Grade.SKIPPED,
        code=judge.code_of(finding.check, "noted"),
        message=f"{what}: {judge.amount(finding.value or 0.0, finding.unit)}. Reported, not judged: no reference"
        " value yet. Later runs are compared with it.",
        action=Remedy.NONE,
    )


def with_evidence(findings: Iterable[Finding], evidence: Mapping[str, Any]) -> tuple[Finding, ...]:
    return tuple(msgspec.structs.replace(one, evidence={**one.evidence, **evidence}) for one in findings)

"""Kinds of probe failures and what to do about them, recognized in the output of PyTorch, CUDA and NCCL.

A probe that could not run proves nothing about the GPU, so most kinds are inconclusive. Two mean a broken GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpukeeper.acceptance.record import Finding, ProbeFailure, Remedy
from gpukeeper.model.grade import Grade

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

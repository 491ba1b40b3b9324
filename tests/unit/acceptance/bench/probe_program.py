"""A small program that speaks the protocol of the probes and needs no PyTorch: for tests of who starts them.

Its probes: echo (params and some of the environment), sleep, die, mumble (no record), fail (params.words), family
(starts a process with a session of its own, and hangs). HELLO in its environment says how it begins.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    if arguments[0] == "ranks":
        return rank(Path(arguments[1]), json.loads(arguments[3]))
    match os.environ.get("HELLO"):
        case "broken":
            say({"broken": {"words": "ModuleNotFoundError: No module named 'torch'"}})
            return 3
        case "silent":
            signal.pause()
        case "dies":
            sys.stderr.write("CUDA error: uncorrectable ECC error encountered\n")
            return 1
    say(
        {
            "hello": {
                "torch": "9.9",
                "cuda": "13.0",
                "python": "3",
                "device": arguments[1],
                "pid": os.getpid(),
                "sms": 132,
            }
        }
    )
    for line in sys.stdin:
        job = json.loads(line)
        run(job["probe"], job["params"])
    return 0


def run(probe: str, params: dict[str, Any]) -> None:
    match probe:
        case "echo":
            kept = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUBLAS_WORKSPACE_CONFIG", "PYTHONSAFEPATH", "RANK")
            result = {"params": params, "pid": os.getpid(), "env": {name: os.environ.get(name) for name in kept}}
            say({"done": result, "seconds": 1.5, "busy_s": 1.25})
        case "sleep":
            sys.stderr.write("about to sleep\n")
            sys.stderr.flush()
            signal.pause()
        case "family":
            child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
            Path(params["file"]).write_text(f"{os.getpid()} {child.pid}")
            signal.pause()
        case "die":
            sys.stderr.write("terminate called without an active exception\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGABRT)
        case "mumble":
            sys.stdout.write("NCCL version 2.28\n")
            sys.stdout.flush()
        case "fail":
            say({"broken": {"words": params["words"]}})


def rank(folder: Path, job: dict[str, Any]) -> int:
    """As torchrun starts it. `die`, `hang`, `refuse`: the ranks that do so."""
    number, params = int(os.environ["RANK"]), job["params"]
    stage = folder / f"rank-{number}.stage"
    stage.write_text("rendezvous")
    if number in params.get("refuse", ()):
        sys.stderr.write("RuntimeError: CUDA error: out of memory\n")
        return 1
    if number in params.get("die", ()):
        os.kill(os.getpid(), signal.SIGKILL)
    if number in params.get("hang", ()):
        stage.write_text(job["probe"])
        signal.pause()
    if params.get("wait"):
        signal.pause()
    Path(os.environ["NCCL_DEBUG_FILE"].replace("%h", "host").replace("%p", str(number))).write_text("NCCL INFO ring")
    record = {"done": {"rank": number, "shown": os.environ["CUDA_VISIBLE_DEVICES"]}, "seconds": 2.0, "busy_s": 1.0}
    (folder / f"rank-{number}.json").write_text(json.dumps(record))
    return 0


def say(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

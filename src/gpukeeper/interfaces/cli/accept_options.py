"""The options of `gpukeeper accept` as typed: of a test run, and of a run over many nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpukeeper.interfaces.terminal import completion
from gpukeeper.interfaces.terminal import options as o


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a test run."""

    quick: Annotated[bool, typer.Option("--quick", help="Run for about a minute (default).")] = False
    full: Annotated[bool, typer.Option("--full", help="Same as --within 30m.")] = False
    within: Annotated[
        str | None,
        typer.Option(
            "--within", metavar="DURATION", help="Time limit: run as many checks as fit into 5m, 30m, 4h, 24h, …"
        ),
    ] = None
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpus", metavar="GPU,…", help="Only these GPUs: index, UUID or serial number. Default: all."),
    ] = None
    expect: Annotated[
        int | None, typer.Option("--expect", min=1, metavar="N", help="Expected number of GPUs; fewer is a FAIL.")
    ] = None
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="DEVICE", help="cuda; or cpu or simulated, for a trial run that accepts no GPU."
        ),
    ] = "cuda"
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="With cpu or simulated: number of devices to use instead of GPUs."),
    ] = None
    check: Annotated[
        list[str] | None,
        typer.Option(
            "--check",
            metavar="CHECK,…",
            help="Only these checks; see `gpukeeper check list`.",
            autocompletion=completion.checks,
        ),
    ] = None
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="CHECK,…", help="Skip these checks.", autocompletion=completion.checks),
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="CHECK.PARAM=VALUE", help="Override a check parameter; see `gpukeeper check show`."
        ),
    ] = None
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="FILE", help="File with your own floors and ceilings, YAML or JSON."),
    ] = None
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="EXE", help="Python interpreter with PyTorch. Default: found automatically."),
    ] = None
    report_dir: Annotated[
        Path | None,
        typer.Option("--report-dir", metavar="DIR", help="Report directory. Default: reports/ in the state directory."),
    ] = None
    report_name: Annotated[
        str, typer.Option("--report-name", metavar="NAME", help="With --legacy: file name of the summary.")
    ] = "summary.json"
    keep: Annotated[bool, typer.Option("--keep", help="Exclude this report from automatic deletion.")] = False
    legacy: Annotated[
        bool, typer.Option("--legacy", help="Also write the files of the older test kits, directly in --report-dir.")
    ] = False
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 on WARN, too.")] = False
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Inject faults and verify that each is detected. Tests no GPU.")
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all findings and skipped checks.")] = False
    json: o.Json = False
    together: Annotated[
        bool, typer.Option("--together", help="Also test several nodes as one run: with --on all of them.")
    ] = False
    report_to_log: Annotated[
        str | None,
        typer.Option(
            "--report-to-log",
            metavar="RUN",
            help="As one node of a run over many: print the report as lines of the log.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of a run over many nodes. Those of a test run are forwarded to each node."""

    on: Annotated[
        str | None,
        typer.Option("--on", metavar="ENGINE", help="Test many nodes: docker, kubernetes, ray, ssh or simulated."),
    ] = None
    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="NODES", help="With --on: all, NAME,NAME or a label selector.")
    ] = None
    as_: Annotated[
        str | None,
        typer.Option("--as", metavar="FORM", help="With --on kubernetes: job, daemonset, indexed-job, statefulset, …"),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node", min=1, metavar="N", help="With --on: GPUs to request on each node; also --expect."
        ),
    ] = None
    image: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="With --on: the image to run.")] = None
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="DURATION", help="With --on: deadline of the run. Default: 1h.")
    ] = None
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="NAME", help="With --on kubernetes: the namespace.")
    ] = None
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="With --on: an option of the engine.")
    ] = None
    owner: Annotated[
        str | None,
        typer.Option("--owner", metavar="NAME", help="With --on: owner of the run. Default: your user name."),
    ] = None
    render: Annotated[
        bool, typer.Option("--render", help="With --on: print what would be started, and start nothing.")
    ] = False
    keep_objects: Annotated[bool, typer.Option("--keep-objects", help="With --on: do not remove what was started.")] = (
        False
    )

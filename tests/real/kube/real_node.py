"""A real node: kubelet and containerd of its own, pods that are processes, on a bridge that nothing else uses.

For what happens inside a pod: its log, its end by SIGTERM, what it holds open. Needs root. It is tainted, so
that pods meant for pretended nodes do not come here; `RealNode.placement` goes into the spec of those that shall.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests.real.docker import images, kernel
from tests.real.kube import binaries
from tests.real.kube.api import Object
from tests.real.kube.nodes import GPU
from tests.real.kube.processes import listens

if TYPE_CHECKING:
    from tests.real.kube.control_plane import ControlPlane

NAME = "real"
# A kubelet insists on these, for the whole machine.
KUBELET_SETS = {"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
# Name and what it runs by itself. The first holds a pod's namespaces and is killed without waiting.
IMAGES = {"local/pause:1": ["/bin/sleep", "1000000"], "local/busybox:1": ["/bin/sh"]}


@dataclass(frozen=True)
class RealNode:
    plane: ControlPlane
    folder: Path
    cgroup: str
    name: str = NAME
    number: int = 0  # of several nodes of one plane
    dns: bool = False  # pods ask the address of the bridge; the test answers

    @property
    def address(self) -> str:
        """Of the bridge on this machine. The kubelet listens on it: it must not be a loopback one."""
        return f"198.19.{self.plane.block.number}.1"

    def program(self, name: str) -> str:
        """What the plane calls it."""
        return f"{name}-{self.number}" if self.number else name

    @property
    def placement(self) -> Object:
        """Of a pod's spec."""
        return {"nodeSelector": {"test/real": "true"}, "tolerations": [{"key": "test/real", "operator": "Exists"}]}

    def pids(self, pod_uid: str) -> list[int]:
        """All processes of a pod on this machine, by their cgroup."""
        return [pid for pid in kernel.all_pids() if f"pod{pod_uid}" in kernel.read(pid, "cgroup")]


def start_real_node(
    plane: ControlPlane, gpus: int = 4, *, number: int = 0, prepare: Callable[[RealNode], str] = lambda node: ""
) -> RealNode:
    """Ready, with so many GPUs that only the API server believes in. `number`: one more, with a containerd of its own,
    named after the number, whose pods have DNS. `prepare`: before containerd starts; lines of its configuration."""
    own, stem = _own_name(plane.block.number), f"node-{number}" if number else "node"
    cgroup, name = (f"{own}/{number}", f"{NAME}-{number}") if number else (own, NAME)
    node = RealNode(plane, plane.folder / stem, cgroup, name, number, dns=number > 0)
    node.folder.mkdir()
    plane.at_the_end(lambda: _remove(node))
    _make_bridge(node)
    _start_containerd(node, prepare(node))
    _start_kubelet(node, node.address)
    plane.api.wait_condition("nodes", None, name, "Ready")
    taint = {"spec": {"taints": [{"key": "test/real", "value": "true", "effect": "NoSchedule"}]}}
    plane.until(
        lambda: not (plane.api.get("nodes", None, name) or {})["spec"].get("taints"), "it is not tainted as new"
    )
    plane.api.patch("nodes", None, name, taint)
    room = {"status": {"capacity": {GPU: str(gpus)}, "allocatable": {GPU: str(gpus)}}}
    plane.api.patch("nodes", None, name, room, subresource="status")
    return node


def import_image(node: RealNode, image: str, layer: Path, config: Object) -> None:
    """A root filesystem as an image of one layer, as `docker save` writes it."""
    archive = node.folder / "image.tar"
    with archive.open("wb") as file, layer.open("rb") as content:
        _write_archive(file, image, content, config)
    _ctr(node.folder / "c", "images", "import", str(archive))
    archive.unlink()


def _start_containerd(node: RealNode, more: str) -> None:
    folder, socket = node.folder, node.folder / "c"
    bridge = {
        "type": "bridge",
        "bridge": _own_name(node.plane.block.number),
        "isGateway": True,
        "ipam": _addresses(node),
    }
    (folder / "cni").mkdir()
    (folder / "cni/10-engine.conflist").write_text(
        json.dumps({"cniVersion": "0.4.0", "name": _own_name(node.plane.block.number), "plugins": [bridge]})
    )
    config = folder / "containerd.toml"
    config.write_text(_CONTAINERD.format(folder=folder, plugins=binaries.cni_plugins()) + more)
    program = shutil.which("containerd")
    assert program is not None
    node.plane.start_program(node.program("containerd"), [program, "--config", str(config)], lambda: _answers(socket))
    for image, command in IMAGES.items():
        archive = folder / "image.tar"
        with archive.open("wb") as file, images.tar_of("box:1") as layer:
            _write_archive(file, image, layer, {"Env": [images.PATH], "Cmd": command})
        _ctr(socket, "images", "import", str(archive))
        archive.unlink()


def _start_kubelet(node: RealNode, address: str) -> None:
    plane, folder = node.plane, node.folder
    port, health = plane.block.port(), plane.block.port()
    for root in kernel.cgroup_roots():
        for part in dict.fromkeys((_own_name(plane.block.number), node.cgroup)):
            (root / part).mkdir(exist_ok=True)
            _inherit_cpus(root / part)
    config: Object = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{folder}/c",
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",  # two beds with the same would remove each other's pods
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": False,
        "address": address,
        "port": port,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": health,
        "tlsCertFile": str(plane.certificates.certificate),
        "tlsPrivateKeyFile": str(plane.certificates.key),
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "makeIPTablesUtilChains": False,  # the host's firewall is not ours
        "resolvConf": "",
        "podLogsDir": f"{folder}/logs",
        "volumePluginDir": f"{folder}/volume-plugins",
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1Mi", "imagefs.available": "1Mi"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "2s",
        "shutdownGracePeriod": "0s",
    }
    if node.dns:
        config |= {"clusterDNS": [address], "clusterDomain": "cluster.local"}
    _remember_kernel(folder)
    file = folder / "kubelet.json"
    file.write_text(json.dumps(config, indent=1))
    command = [
        *(binaries.program("kubelet"), f"--config={file}", f"--kubeconfig={plane.kubeconfig()}"),
        *(f"--root-dir={folder}/kubelet", f"--hostname-override={node.name}", f"--node-ip={address}"),
        "--node-labels=test/real=true",
    ]
    plane.start_program(node.program("kubelet"), command, lambda: listens(health), deadline=60)


def _remove(node: RealNode) -> None:
    """kubelet first: it would start again what is killed."""
    for name in (node.program("kubelet"), node.program("containerd")):
        if name in node.plane.programs:
            node.plane.programs[name].kill()
    restore_kernel(node.folder)
    kernel.remove_all_of(node.folder)
    if not any(path.is_dir() for path in node.plane.folder.glob("node*")):  # the last one: they share a bridge
        remove_rest(node.plane.block.number)


def remove_rest(number: int) -> None:
    """What a real node of the engine with this number has outside its folder, once its processes are gone."""
    for root in kernel.cgroup_roots():
        below = sorted((root / _own_name(number)).glob("**/"), key=lambda path: len(path.parts), reverse=True)
        for folder in below:
            kernel.remove_cgroup(folder)
    for result in Path("/var/lib/cni/results").glob(f"{_own_name(number)}-*"):
        result.unlink(missing_ok=True)
    if shutil.which("ip"):
        subprocess.run(["ip", "link", "del", _own_name(number)], capture_output=True, check=False)


def restore_kernel(folder: Path) -> None:
    """The settings of this machine that a kubelet changed."""
    with suppress(FileNotFoundError):
        for setting, value in json.loads((folder / "kernel.json").read_text()).items():
            Path("/proc/sys", setting).write_text(value)


def _remember_kernel(folder: Path) -> None:
    """What is already as a kubelet wants it may be another engine's doing, which that one takes back."""
    found = {setting: Path("/proc/sys", setting).read_text().strip() for setting in KUBELET_SETS}
    changed = {setting: value for setting, value in found.items() if value != KUBELET_SETS[setting]}
    (folder / "kernel.json").write_text(json.dumps(changed))


def _own_name(number: int) -> str:
    """Of its bridge and its cgroups."""
    return f"gkkube{number}"


def _inherit_cpus(cgroup: Path) -> None:
    """In version 1 a new cpuset is empty, and takes no process."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = cgroup / name
        if file.exists() and not file.read_text().strip():
            file.write_text((cgroup.parent / name).read_text())


def _make_bridge(node: RealNode) -> None:
    name = _own_name(node.plane.block.number)
    if Path("/sys/class/net", name).exists():
        return  # of another node of this plane
    for step in (
        ["link", "add", name, "type", "bridge"],
        ["addr", "add", f"{node.address}/24", "dev", name],
        ["link", "set", name, "up"],
    ):
        subprocess.run(["ip", *step], check=True, capture_output=True)


def _addresses(node: RealNode) -> Object:
    number = node.plane.block.number
    first = 10 + 40 * node.number  # each of six nodes has addresses of its own for its pods
    of_node = {"rangeStart": f"198.19.{number}.{first}", "rangeEnd": f"198.19.{number}.{first + 39}"}
    ranges = [[{"subnet": f"198.19.{number}.0/24", "gateway": node.address, **of_node}]]
    return {"type": "host-local", "dataDir": f"{node.folder}/addresses", "ranges": ranges}


def _answers(socket: Path) -> bool:
    return subprocess.run(["ctr", "-a", str(socket), "version"], capture_output=True, check=False).returncode == 0


def _ctr(socket: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["ctr", "-a", str(socket), "-n", "k8s.io", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ctr {arguments}: {done.stderr}"


def _write_archive(file: IO[bytes], image: str, layer: IO[bytes], config: Object) -> None:
    """As `docker save` writes it, without a Docker."""
    digest = hashlib.file_digest(layer, "sha256").hexdigest()  # type: ignore[arg-type]  # any file will do
    size = layer.tell()
    layer.seek(0)
    whole = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [image], "Layers": ["layer.tar"]}]
    with tarfile.open(fileobj=file, mode="w") as tar:
        _add(tar, "config.json", json.dumps(whole).encode())
        entry = tarfile.TarInfo("layer.tar")
        entry.size = size
        tar.addfile(entry, layer)
        _add(tar, "manifest.json", json.dumps(manifest).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


_CONTAINERD = """
version = 2
root = "{folder}/data"
state = "{folder}/state"
oom_score = 0

[grpc]
address = "{folder}/c"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "local/pause:1"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
stream_server_address = "127.0.0.1"
stream_server_port = "0"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{folder}/cni"

[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
"""

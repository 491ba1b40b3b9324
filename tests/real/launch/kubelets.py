"""Several real nodes for runs of the acceptance image: kubelets with pods that run real probes on the CPU.

PyTorch is mounted by the runtime, through a RuntimeClass, as a GPU driver is. The nodes are one machine, so a measured
speed says nothing. Names are answered by a small DNS server from the real EndpointSlices, since there is no CoreDNS.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.real.image import acceptance_image as image
from tests.real.kube.api import Api
from tests.real.kube.control_plane import ControlPlane
from tests.real.kube.real_node import RealNode, import_image, start_real_node

RUNTIME = "torch"
DOMAIN = ["svc", "cluster", "local"]
_TYPE_A, _IN = 1, 1


def start_kubelets(plane: ControlPlane, count: int) -> list[RealNode]:
    archive, config = image.root_filesystem(), image.settings().config
    nodes = [start_real_node(plane, 1, number=number, prepare=_mount_torch) for number in range(1, count + 1)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda node: import_image(node, image.NAME, archive, config), nodes))
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": RUNTIME}}
    plane.api.must("POST", "/apis/node.k8s.io/v1/runtimeclasses", {**runtime, "handler": RUNTIME})
    server = NameServer(plane.api, nodes[0].address)
    plane.at_the_end(server.close)
    return nodes


def _mount_torch(node: RealNode) -> str:
    """Images are kept in memory: they have many files. remove_all_of unmounts what is below the folder."""
    data = node.folder / "data"
    data.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", data], check=True)
    spec = json.loads(subprocess.run(["ctr", "oci", "spec"], capture_output=True, check=True).stdout)
    spec["mounts"].append(
        {
            "destination": image.SITE,
            "type": "bind",
            "source": image.torch_packages(),
            "options": ["rbind", "ro"],
        }
    )
    file = node.folder / "torch-spec.json"
    file.write_text(json.dumps(spec))
    runtimes = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes'
    return f"""
{runtimes}.runc]
runtime_type = "io.containerd.runc.v2"

{runtimes}.{RUNTIME}]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{file}"
"""


class NameServer:
    """Answers SERVICE.NAMESPACE.svc.cluster.local with the addresses of its pods, HOSTNAME.SERVICE… with one."""

    def __init__(self, api: Api, address: str) -> None:
        self._api = api
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                asked, peer = self._socket.recvfrom(512)
                self._socket.sendto(self._reply(asked), peer)
            except OSError:
                return

    def _reply(self, asked: bytes) -> bytes:
        labels, end = _labels(asked)
        kind = struct.unpack("!H", asked[end : end + 2])[0]
        addresses = self._addresses(labels)
        given = addresses if kind == _TYPE_A else []
        flags = 0x8580 | (0 if addresses else 3)  # there is no such name
        head = asked[:2] + struct.pack("!HHHHH", flags, 1, len(given), 0, 0)
        answers = b"".join(struct.pack("!HHHIH", 0xC00C, _TYPE_A, _IN, 1, 4) + socket.inet_aton(one) for one in given)
        return head + asked[12 : end + 4] + answers

    def _addresses(self, labels: Sequence[str]) -> list[str]:
        *hosts, service, namespace = labels[: -len(DOMAIN)] if len(labels) >= 2 + len(DOMAIN) else ["", ""]
        if len(hosts) > 1 or list(labels[-len(DOMAIN) :]) != DOMAIN:
            return []
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        slices = self._api.must("GET", path)["items"]
        return [
            address
            for one in slices
            if one["metadata"]["labels"].get("kubernetes.io/service-name") == service
            for endpoint in one["endpoints"] or []
            if not hosts or endpoint.get("hostname") == hosts[0]
            for address in endpoint["addresses"]
        ]


def _labels(asked: bytes) -> tuple[list[str], int]:
    found, at = [], 12
    while length := asked[at]:
        found.append(asked[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    return found, at + 1

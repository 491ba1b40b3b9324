"""Where the programs are that `make kube` built (build.sh, pins.txt), and the CRDs that came with them.

`KUBEBUILDER_ASSETS`, a folder with etcd, kube-apiserver, kubectl and so on, comes first where it has one of them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

PINS = Path(__file__).with_name("pins.txt")
PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
CONTROLLERS = ("kwok", "jobset", "trainer-v2.1.0", "trainer-v2.3.0", "training-operator", "kuberay")
NODE = ("kubelet",)
CNI_PLUGINS = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")


def cache() -> Path:
    """The folder of these pins; build.sh makes the same name."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpukeeper/kube")
    of_all = Path(os.environ.get("GPUKEEPER_KUBE_CACHE") or usual)
    return of_all / hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]


def found(name: str) -> Path | None:
    for folder in (os.environ.get("KUBEBUILDER_ASSETS"), cache() / "bin"):
        if folder and os.access(Path(folder, name), os.X_OK):
            return Path(folder, name)
    return None


def program(name: str) -> str:
    path = found(name)
    assert path is not None, f"{name} is not built: run `make kube`"
    return str(path)


def missing(*names: str) -> list[str]:
    return [name for name in names if found(name) is None]


def crds(name: str) -> list[Path]:
    """The CRD files of a controller, as its release carries them."""
    files = sorted((cache() / "crds" / name).glob("*.yaml"))
    assert files, f"no CRDs of {name} in {cache()}: run `make kube`"
    return files


def cni_plugins() -> str | None:
    """The folder with Debian's containernetworking-plugins, or what others call it."""
    return next((folder for folder in CNI_PLUGINS if shutil.which("bridge", path=folder)), None)

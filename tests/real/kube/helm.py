"""The real helm (`make helm`), with nothing of the user's own: its files are in a folder of the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "gpukeeper"
TEMPLATE = ("template", "gpukeeper", str(CHART), "--kube-version", "v1.34.0")  # one from its module assumes an old one


def program() -> Path:
    """As helm.sh has it."""
    script = Path(__file__).with_name("helm.sh").read_text()
    version = next(line.partition("=")[2] for line in script.splitlines() if line.startswith("version="))
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("GPUKEEPER_HELM_CACHE") or caches / "gpukeeper/helm")
    return cache / version / "helm"


def packed(version: str, folder: Path) -> Path:
    """The chart of this checkout as the package of that version."""
    dist = folder / f"dist-{version}"
    dist.mkdir()
    (dist / f"gpukeeper-{version}-py3-none-any.whl").touch()  # only its name counts
    subprocess.run([sys.executable, CHART.parent / "package.py", dist], check=True, capture_output=True)
    (chart,) = dist.glob("*.tgz")
    return chart


class Helm:
    def __init__(self, folder: Path, kubeconfig: Path | None = None) -> None:
        self._folder = folder
        self._environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "HELM_CACHE_HOME": str(folder / "cache"),
            "HELM_CONFIG_HOME": str(folder / "config"),
            "HELM_DATA_HOME": str(folder / "data"),
            "KUBECONFIG": str(kubeconfig or folder / "none"),
        }

    def run(
        self, *words: str, values: Mapping[str, Any] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """`values`: as a values file."""
        more: list[str] = []
        if values is not None:
            file = self._folder / "values.yaml"
            with file.open("w") as out:
                YAML(typ="safe").dump(dict(values), out)
            more = ["--values", str(file)]
        return subprocess.run(
            [str(program()), *words, *more],
            env=self._environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def must(self, *words: str, values: Mapping[str, Any] | None = None, timeout: float = 300) -> str:
        done = self.run(*words, values=values, timeout=timeout)
        assert done.returncode == 0, f"helm {' '.join(words)}: {done.stderr}\n{done.stdout}"
        return done.stdout

    def rendered(self, values: Mapping[str, Any], *words: str, namespace: str = "gpukeeper") -> list[dict[str, Any]]:
        """Every object, those of hooks too."""
        text = self.must(*TEMPLATE, "--namespace", namespace, *words, values=values)
        return [one for one in YAML(typ="safe").load_all(text) if one]

    def refused(self, values: Mapping[str, Any]) -> str:
        """Why these values render nothing."""
        done = self.run(*TEMPLATE, values=values)
        assert done.returncode != 0, done.stdout
        return done.stderr

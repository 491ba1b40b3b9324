"""Packs the Helm chart with the version of the wheel, which comes from the tag.

    python deploy/helm/package.py dist

dist/ has the wheel already (`make package`). `appVersion` is the version of the wheel; `version` is the same in the
form that Helm wants (SemVer). The same sources and version give the same file, byte by byte; `helm package` does not.
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import tarfile
from pathlib import Path

CHART = Path(__file__).parent / "gpukeeper"


def package(version: str, to: Path) -> Path:
    chart = semver(version)
    described = (CHART / "Chart.yaml").read_text()
    for key, value in (("version", chart), ("appVersion", version)):
        described, found = re.subn(rf"^{key}: .*$", f'{key}: "{value}"', described, flags=re.MULTILINE)
        assert found == 1, key
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(CHART.rglob("*")):
            if path.is_file():  # links are followed: the package has no other files to point at
                content = described.encode() if path.name == "Chart.yaml" else path.read_bytes()
                entry = tarfile.TarInfo(f"gpukeeper/{path.relative_to(CHART)}")
                entry.size, entry.mode = len(content), 0o644
                archive.addfile(entry, io.BytesIO(content))
    made = to / f"gpukeeper-{chart}.tgz"
    made.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return made


def semver(version: str) -> str:
    """1.2.0rc1 is 1.2.0-rc.1; 0.2.dev5+gabc is 0.2.0-dev.5+gabc."""
    found = re.fullmatch(r"(\d+(?:\.\d+){0,2})(?:(a|b|rc)(\d+))?(?:\.dev(\d+))?(?:\+([\w.]+))?", version)
    if found is None:
        sys.exit(f'"{version}" cannot be the version of a chart. Tag releases like v1.2.0 or v1.2.0rc1.')
    release, phase, number, dev, local = found.groups()
    before = [phase, number] * (phase is not None) + ["dev", dev] * (dev is not None)
    numbers = [*release.split("."), "0", "0"][:3]
    return ".".join(numbers) + ("-" + ".".join(before) if before else "") + (f"+{local}" if local else "")


def version_of(dist: Path) -> str:
    own = sorted(dist.glob("gpukeeper-*.whl"))
    if len(own) != 1:
        sys.exit(f"{dist} has {len(own)} wheels of gpukeeper; one is needed. Run: make package")
    return own[0].name.split("-")[1]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    sys.stdout.write(f"{package(version_of(place), place)}\n")

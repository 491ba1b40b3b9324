"""`make sbom`: the SBOM of the pinned dependencies (CycloneDX), which the wheel has. The same pins give the same bytes.

Packages are named by their package URLs, not by the address of an index: which one they come from is up to those who
install them. The links to the homepage of the tool that wrote it are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).with_name("gpukeeper.cdx.json")
PINS = ("requirements.txt", "--pyproject", "pyproject.toml", "--index-url", "pkg:pypi", "--output-reproducible")


def main() -> None:
    program = Path(sys.executable).with_name("cyclonedx-py")
    written = subprocess.run([program, "requirements", *PINS, "--output-file", "-"], check=True, capture_output=True)
    sbom = json.loads(written.stdout)
    for tool in sbom["metadata"]["tools"]["components"]:
        tool.pop("externalReferences", None)
    FILE.write_text(json.dumps(sbom, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""Fetch dagre, the layout library of the HTML page, into ``fxshard/viewer``; needs ``npm``.

    python tools/vendor_dagre.py            # the version below
    python tools/vendor_dagre.py 3.2.0      # another one: change VERSION when the tests pass with it

dagre is under the MIT licence; its text lies beside it and goes into the wheel.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE, VERSION = "@dagrejs/dagre", "3.1.3"
VIEWER = Path(__file__).parent.parent / "fxshard" / "viewer"


def main() -> None:
    """Write ``dagre.min.js`` and its licence."""
    version = sys.argv[1] if len(sys.argv) > 1 else VERSION
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", f"{PACKAGE}@{version}"], cwd=folder, check=True)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        package = Path(folder) / "package"
        script = (package / "dist" / "dagre.min.js").read_text().splitlines()
        kept = [line for line in script if not line.startswith(("//# sourceMappingURL", "/*! For license"))]
        head = f"/*! {PACKAGE} {version}, MIT licence: see dagre.LICENSE.txt */"
        (VIEWER / "dagre.min.js").write_text("\n".join([head, *kept]) + "\n")
        (VIEWER / "dagre.LICENSE.txt").write_text((package / "LICENSE").read_text())
    print(f"{PACKAGE} {version} is in {VIEWER}")


if __name__ == "__main__":
    main()

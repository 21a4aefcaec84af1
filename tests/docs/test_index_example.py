"""The example in the client's docstring does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvstore.client import index as module
from kvstore.testing.process import Lab
from tests.kit.processes import IndexProcess

pytestmark = pytest.mark.slow


def test_the_example_runs(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "pki")
    assert module.__doc__ is not None
    (example,) = re.findall(r"\n\n((?:    .*\n)+)\n", module.__doc__)
    files = lab.files("client", "c1")
    names = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
    code = textwrap.dedent(example).replace("ca=…, cert=…, key=…", "**paths")
    with IndexProcess.start(tmp_path, lab.flags("index", "i1")) as index:
        program = f"""
from pathlib import Path
from kvstore.client.index import IndexClient
from kvstore.client.tls import TlsFiles
paths = {{name: Path(path) for name, path in {names}.items()}}
space, keys = bytes(32), bytes(64)
{code.replace("10.0.0.1:9470", index.address)}
print(best)
"""
        for _ in range(5):
            done = subprocess.run(
                [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
            )
            if "the index did not answer" not in done.stderr:  # late, on a busy machine
                break
    assert (done.stdout, done.stderr) == ("None\n", "")

"""Run vLLM's own connector tests against kvstore: `make upstream`.

Their text is vLLM's and stays out of this repository: it comes with vLLM's source distribution,
fetched by pip once. Which tests run is in `selection.py`, how they get kvstore's connector in
`against_kvstore.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.upstream.selection import DOES_NOT_APPLY, SINGLE_TESTS, WHOLE_FILES

VERSION: Final = "0.32.0"
HERE: Final = Path(__file__).resolve().parent
SOURCES: Final = HERE.parents[1] / ".venv" / f"upstream-{VERSION}"
FETCH_S: Final = 300
RUN_S: Final = 600

_MODEL: Final = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
"""The tests name a model of a hub; only its shape matters, and it is found in the folder."""


class NoSources(Exception):
    """vLLM's source distribution could not be had; says what pip said."""


def fetch(target: Path = SOURCES) -> Path:
    """The folder that holds upstream's `tests` and `examples`, fetched when it is not there yet.

    pip keeps sources only of what it can build, and this one wants a compiler: so it is told to
    keep its working folder, and the tests are taken from there.

    Raises:
        NoSources: no index has it, or it holds no tests.
    """
    if (target / "examples").is_dir():
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        pip += [f"vllm=={VERSION}", "--no-deps", "--no-binary", "vllm"]
        pip += ["--no-build-isolation", "--no-clean", "--dest", work]
        done = subprocess.run(
            pip, capture_output=True, text=True, env={**os.environ, "TMPDIR": work}, timeout=FETCH_S
        )
        found = list(Path(work).glob("pip-*/*/tests/v1/kv_connector/unit/utils.py"))
        if not found:
            raise NoSources(
                f"pip did not bring the source distribution of vllm {VERSION}: "
                f"{(done.stderr or done.stdout)[-400:].strip()}"
            )
        complete = Path(work) / "complete"
        complete.mkdir()
        for folder in ("tests", "examples"):
            shutil.move(found[0].parents[4] / folder, complete / folder)
        complete.rename(target)
    return target


def run(sources: Path, arguments: list[str], *, folder: Path) -> subprocess.CompletedProcess[str]:
    """Upstream's pytest in `folder`, with our plugin."""
    (folder / "tests").symlink_to(sources / "tests")
    model = folder / "facebook" / "opt-125m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-q", "-rs", "--tb=short"]
    # The top conftest wants a GPU's libraries; the one of the unit tests is enough.
    command += ["--confcutdir=tests/v1/kv_connector/unit", "-p", "against_kvstore"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly"]
    command += [f"--deselect={name}" for name in DOES_NOT_APPLY]
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return subprocess.run(
        [*command, *WHOLE_FILES, *SINGLE_TESTS, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
    )


def main() -> int:
    """Command line; further arguments are pytest's."""
    try:
        sources = fetch()
    except NoSources as error:
        sys.stderr.write(f"kvstore: {error}\n")
        return os.EX_UNAVAILABLE
    with tempfile.TemporaryDirectory() as folder:
        done = run(sources, sys.argv[1:], folder=Path(folder))
    sys.stdout.write(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

"""`kvstore up` as a user runs it: node, real engines and router from one command, until SIGTERM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvstore.testing.process import popen_tied
from tests.kit.router_thread import ask

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT = tuple(range(3, 203)) * 3
FORKING = """
import sys
if sys.orig_argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
    from multiprocessing import context, resource_tracker
    known = vars(context)["_concrete_contexts"]
    known["spawn"] = known["fork"]
    resource_tracker.ensure_running()
"""
"""Read when Python starts. Two of an engine's three processes are forked from the first, where vLLM
on CPUs would spawn them: each would import vLLM anew, for 8 s."""


def test_one_command_serves_survives_an_engine_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    log, site = tmp_path / "up.log", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(FORKING)
    paths = f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "kvstore.cli.main", "up", str(tiny_model), "--port", "0"]
    command += ["--dram", "64MiB", "--", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--num-gpu-blocks-override", "40"]
    with log.open("w") as output:
        process = popen_tied(
            command,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        )
    out = process.stdout
    assert out is not None
    try:
        said, port = [], 0
        for line in out:
            said.append(line)
            if found := re.search(r"127.0.0.1:(\d+)/v1 serves (\S+) until", line):
                port, name = int(found[1]), found[2]
            if line.startswith("kill -9") and len([x for x in said if "kill -9" in x]) == 2:
                break
        assert port, "".join(said) + log.read_text()
        assert name == tiny_model.name
        body = {"model": name, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        answers = [ask(port, body, timeout_s=60) for _ in range(2)]
        assert [status for status, *_ in answers] == [200, 200]
        texts = [json.loads(content)["choices"][0]["text"] for *_, content in answers]
        assert texts[0] == texts[1]
        children = psutil.Process(process.pid).children(recursive=True)
        guards = [each for each in children if "tied.py" in " ".join(each.cmdline())]
        assert len(guards) == 2
        guards[0].children()[0].kill()
        ended = out.readline()
        assert "has ended, the others go on: ended by SIGKILL" in ended
        status, *_ = ask(port, body, timeout_s=60)
        assert status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(150) == 0
        assert "All of it was stopped." in out.read()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
        kept = Path(re.findall(r"\(log: (.*)\)", ended)[0])
        assert kept.exists(), "the line above names it"
        shutil.rmtree(kept.parent)
    finally:
        process.kill()
        process.wait()
        out.close()

"""A real Prometheus that scrapes each second, for tests.

with PrometheusProcess.start(tmp_path, {"node": node.metrics_url}, rules) as prometheus:
    prometheus.query("kvstore_blocks")
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvstore.testing.process import ChildServer, popen_tied
from tests.integration.node.conftest import eventually

LISTENS = re.compile(r'msg="Listening on" address=(127\.0\.0\.1:\d+)')

READY = "Server is ready to receive web requests."


class PrometheusProcess(ChildServer):
    """One Prometheus, whose log and data are in a directory."""

    url = ""

    @classmethod
    def start(
        cls, directory: Path, targets: Mapping[str, str], rules: Mapping[str, Any]
    ) -> PrometheusProcess:
        """`targets`: job → URL of its metrics. `rules`: content of its rules file."""
        (directory / "rules.yaml").write_text(yaml.safe_dump(dict(rules)))
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [urllib.parse.urlsplit(url).netloc]}]}
            for job, url in targets.items()
        ]
        times = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        content = {"global": times, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(content))
        log = directory / "prometheus.log"
        with log.open("w") as out:
            process = popen_tied(
                [
                    *("prometheus", f"--config.file={directory / 'prometheus.yaml'}"),
                    *(
                        f"--storage.tsdb.path={directory / 'tsdb'}",
                        "--web.listen-address=127.0.0.1:0",
                    ),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
            )
        made = cls(process, "", log)
        try:
            assert eventually(lambda: READY in made.log), made.log
        except BaseException:
            made.__exit__()
            raise
        found = LISTENS.search(made.log)
        assert found is not None
        made.url = f"http://{found[1]}"
        return made

    def query(self, text: str) -> list[dict[str, Any]]:
        """Samples of an instant query."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found

    def firing(self) -> set[str]:
        """Names of alerts."""
        found = self.query('ALERTS{alertstate="firing"}')
        return {each["metric"]["alertname"] for each in found}

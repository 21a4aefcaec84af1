"""One part of the run, in a process of its own.

    python -m bench.gpu.part NAME [--into FILE] [--seed N] [--rehearse] [--short]

Findings are in FILE after each of them, so that a part that hangs or crashes keeps what it had;
without FILE they are printed in the end. Exit code 0: it came to its end; 1: it failed; 77: what it
needs is not on this machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import secrets
import sys
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # bench/ is not installed

from bench.gpu.findings import NAMES, NOT_HERE, Findings, NotHere, Options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--into", type=Path)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    options = Options(given.seed, is_rehearsal=given.rehearse, is_short=given.short)
    findings, code = Findings(given.into), 0
    findings.say(seed=options.seed)
    try:
        importlib.import_module(f"bench.gpu.{given.name}").run(findings, options)
    except NotHere as error:
        findings.say(not_here=str(error))
        code = NOT_HERE
    except Exception as error:  # noqa: BLE001 - whatever it is, what was found so far stays
        findings.say(error=f"{type(error).__name__}: {error}"[:500])
        traceback.print_exc()
        code = 1
    if given.into is None:
        print(json.dumps(findings.values, indent=1), flush=True)
    return code


if __name__ == "__main__":
    result = main()
    sys.stdout.flush()
    # Threads of a copy engine that waits for a device in trouble would keep the process.
    os._exit(result)

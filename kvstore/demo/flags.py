"""The flags of `kvstore demo` and `kvstore up`, apart from them: their help loads no engine.

    python -m kvstore.demo.flags demo --help

Does not cover: the demo (`play`), and what stays up (`up`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from kvstore.demo.workload import ConversationPlan

PLAN: Final = ConversationPlan(
    seed=20261121,
    users=5,
    rounds=4,
    system_words=70,
    document_words=260,
    question_words=30,
    answer_tokens=16,
)
ROUTER_PLAN: Final = msgspec.structs.replace(
    PLAN, users=6, rounds=16, document_words=320, question_words=6
)
WAYS: Final = {
    "--cluster": "two nodes and two engines that are one cache",
    "--pd": "prefill on one engine and node, decode on another",
    "--router": "two engines behind the router, beside round robin",
}


class DemoParser(argparse.ArgumentParser):
    """Parser whose errors have the form of all other commands."""

    def error(self, message: str) -> NoReturn:
        said = message.removeprefix("argument ").replace(": ", " ", 1)
        said = said if message.startswith("argument ") else message
        self.exit(2, f"kvstore: {said}: see '{self.prog} --help'\n")


def parser() -> argparse.ArgumentParser:
    """Parser of `kvstore demo`."""
    made = DemoParser(
        prog="kvstore demo",
        description="A real vLLM without and with kvstore, in a few minutes.",
        epilog="examples:\n  kvstore demo\n  kvstore demo --cluster\n"
        "  kvstore demo --pd --plot pd.png\n  kvstore demo --router\n  kvstore demo --users 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--seed", type=int, default=PLAN.seed, help="seed of the conversations")
    made.add_argument("--users", type=_count, help="concurrent users")
    made.add_argument("--rounds", type=_rounds, help="questions per user, at least 2")
    one = made.add_mutually_exclusive_group()
    for flag, text in WAYS.items():
        one.add_argument(flag, action="store_true", help=text)
    made.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="picture of --pd or --router [default: in the cache]",
    )
    return made


def read_flags(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, ConversationPlan]:
    """(flags, checked; their conversations) of `kvstore demo`. Exits if the flags are wrong."""
    flags = parser()
    chosen = flags.parse_args(arguments)
    is_drawn = chosen.pd or chosen.router
    if chosen.plot and not (is_drawn and os.path.isdir(chosen.plot.absolute().parent)):
        flags.error(
            "--plot names a file in a folder that is there, for the picture of --pd or --router"
        )
    given = {name: getattr(chosen, name) for name in ("seed", "users", "rounds")}
    changes = {name: count for name, count in given.items() if count is not None}
    return chosen, msgspec.structs.replace(ROUTER_PLAN if chosen.router else PLAN, **changes)


def up_parser() -> argparse.ArgumentParser:
    """Parser of `kvstore up`."""
    made = DemoParser(
        prog="kvstore up",
        usage="kvstore up [-h] [options] [MODEL] [-- VLLM_FLAG ...]",
        description="A node, engines that share it and a router on this machine, until Ctrl-C.",
        epilog="examples:\n  kvstore up\n  kvstore up Qwen/Qwen3-8B --engines 2 --dram 64GiB\n"
        "  kvstore up /models/llama --file /var/lib/kvstore:1TiB -- --tensor-parallel-size 4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory or name in a hub [default: the demo's, of random weights, on a CPU]",
    )
    made.add_argument("--engines", type=_count, default=2, help="engines [default: 2]")
    made.add_argument(
        "--port", type=_port, default=8000, help="of the API on 127.0.0.1 [default: 8000]"
    )
    made.add_argument("--dram", help="of the node [default: auto; without a MODEL 2GiB]")
    made.add_argument("--file", metavar="DIRECTORY:SIZE", help="the node's disk tier")
    made.add_argument("flags", nargs="*", metavar="VLLM_FLAG", help="further flags of each engine")
    return made


def read_up_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of `kvstore up`; those behind ``--`` are for the engines. Exits if they
    are wrong.
    """
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    chosen = up_parser().parse_args(words[:end])
    if chosen.flags:
        up_parser().error(f"'{chosen.flags[0]}' is one word too many: vLLM's flags come behind --")
    chosen.flags = words[end + 1 :]
    return chosen


def default_cache() -> Path:
    """Directory that keeps the demo's model between runs."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvstore"


def _rounds(text: str) -> int:
    """Number of rounds, at least 2, since times are compared from round 2 on."""
    if (count := _count(text)) < 2:
        raise argparse.ArgumentTypeError(f"'{text}' must be at least 2: the first has no history")
    return count


def _port(text: str) -> int:
    """Port number; 0: the kernel chooses one."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"'{text}' must be a port, 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    """Whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be a number of at least 1")
    return int(text)


if __name__ == "__main__":
    (up_parser() if sys.argv.pop(1) == "up" else parser()).parse_args()

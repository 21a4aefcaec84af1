"""Facts that `kvstore doctor` judges, and diagnoses: the vocabulary of its checks. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

OK, WARNING, ERROR, NOT_APPLICABLE = "ok", "warning", "error", "not applicable"
EXIT_STATUS: Final = {OK: 0, NOT_APPLICABLE: 0, WARNING: 1, ERROR: 2}
RANGES: Final = {"vllm": "vllm>=0.32,<0.34", "nixl": "nixl>=1.5,<2", "ucx": "ucxx-cu13>=0.52,<0.53"}
"""Supported versions, as pip reads them."""


class Diagnosis(NamedTuple):
    """Outcome of a check."""

    verdict: str
    text: str
    mend: str = ""
    """Command or setting; empty if there is nothing to mend."""


class EngineFacts(NamedTuple):
    """A vLLM process. None: not readable."""

    pid: int
    flags: Mapping[str, str]
    """Without dashes in front, with - for _."""
    transfer: Mapping[str, object] | None
    """`--kv-transfer-config`; empty: not given; None: no JSON object."""
    environment: Mapping[str, str] | None = None
    """Its variables, as far as they are judged."""

    @property
    def is_ours(self) -> bool:
        """Whether it loads and stores by kvstore."""
        return "KVStoreConnector" in str(self.transfer)


class DiskFacts(NamedTuple):
    """Directory of --file."""

    capacity_bytes: int
    room_bytes: int = 0
    """Free, and that of the tier's own files."""
    refusal: str = ""
    """Why a node does not start with it."""
    is_direct: bool = True
    """Whether O_DIRECT works."""
    rates: tuple[float, float] | None = None
    """Bytes per second written, and read."""


class NodeFacts(NamedTuple):
    """Answer of a running node."""

    pid: int
    troubles: tuple[tuple[str, str], ...] = ()
    """Findings and mends."""
    dram_bytes: int = 0
    ready_bytes: int = 0
    pinned_bytes: int = 0
    blocks_hit: int = 0
    blocks_missed: int = 0
    outcomes: tuple[str, ...] = ()
    """Reason of each of the latest requests that loaded nothing, or not all."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Figures that are not texts of files. None, and empty: not there."""

    socket: str
    dram_bytes: int
    transport: str = ""
    """Transport between nodes; empty: no peers."""
    plugin: str = ""
    """NIXL's."""
    has_cluster: bool = False
    file: DiskFacts | None = None
    versions: Mapping[str, str]
    plugins: frozenset[str] = frozenset()
    engines: tuple[EngineFacts, ...] = ()
    allocator: str = ""
    """PYTORCH_CUDA_ALLOC_CONF of this process."""
    clock: tuple[int, int] | None = None
    """State and status of adjtimex."""
    certificate_days: float | None = None
    certificate_refusal: str = ""
    node: NodeFacts | None = None
    no_node: str = ""
    """Why no node has answered."""


Texts = Mapping[str, str]
Judge = Callable[[Texts, Facts], Diagnosis]


class Check(NamedTuple):
    """A row of the table."""

    name: str
    reads: tuple[str, ...]
    judge: Judge


def found_in(texts: Texts, pattern: str) -> dict[tuple[str, ...], str]:
    """Texts of files whose path fits, by the groups of the pattern."""
    hits = ((re.fullmatch(pattern, path), text) for path, text in texts.items())
    return {hit.groups(): text.strip() for hit, text in hits if hit}


def fields_of(text: str) -> dict[str, str]:
    """Lines such as `Name:   value`."""
    return {name: value.strip() for name, _, value in (x.partition(":") for x in text.splitlines())}


def version_of(text: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])[:2]))


def is_within(version: str, requirement: str) -> bool:
    """Whether a version fits a requirement of RANGES."""
    least, end = (version_of(part) for part in requirement.partition(">=")[2].split(","))
    return least <= version_of(version) < end


def worst(findings: Iterable[Diagnosis], otherwise: Diagnosis) -> Diagnosis:
    """All findings in one, with the mends; `otherwise`: there are none."""
    every = list(findings)
    if not every:
        return otherwise
    verdict = max((each.verdict for each in every), key=EXIT_STATUS.__getitem__)
    mends = "; ".join(dict.fromkeys(each.mend for each in every if each.mend))
    return Diagnosis(verdict, "; ".join(each.text for each in every), mends)

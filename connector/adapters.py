"""LoRA adapters: digests of their weights, which become part of a request's keys.

vLLM's keys hold an adapter's name and path, and not its weights. So each key of a request with an
adapter is hashed together with a digest of the adapter's files: another rank, other target modules
or other weights make other keys.

The digest is read on a thread while the first request waits. An adapter whose files change while
the engine runs has an unknown state in the engine, which reads them when it needs them: it is not
served any more, until the engine loads it under another number. As with the model's own weights,
changes between the engine's reading and the first request are not seen.

Does not cover: digests of files (`weights.py`), requests that wait (`scheduler_side.py`).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

from kvstore.connector.checks import NotServed
from kvstore.connector.weights import digest_path, downloaded

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

ADAPTERS_MAX: Final = 4096
"""Numbers of adapters that are remembered; the engine counts them up."""
LOOK_NS: Final = 50_000_000
"""Files of an adapter are looked at so often at the most."""

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of the last change of each file."""

logger = logging.getLogger("vllm.kvstore.adapters")


class AdapterKeys(Sequence[bytes]):
    """A request's keys with an adapter, made when they are asked for."""

    def __init__(self, request: Request, digest: bytes) -> None:
        """`digest`: of the adapter. `request` goes on making its own keys."""
        self._request = request
        self._digest = digest
        self._made: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._request.block_hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        found = self._request.block_hashes[index]
        return list(map(self._key, found)) if isinstance(index, slice) else self._key(found)

    def _key(self, own: bytes) -> bytes:
        made = self._made.get(own)
        if made is None:
            made = self._made[own] = hashlib.sha256(self._digest + own).digest()
        return made


class _Adapter:
    def __init__(
        self, path: Path, stamp: Stamp, digest: Future[bytes | NotServed], now_ns: int
    ) -> None:
        self.path, self.stamp, self.digest = path, stamp, digest
        self.looked_ns = now_ns
        self.changed: NotServed | None = None


class Adapters:
    """All adapters of one engine, in the scheduler's process."""

    def __init__(self, *, dtype: str) -> None:
        """`dtype`: type in which the engine keeps the weights of adapters."""
        self._dtype = dtype
        self._reader: ThreadPoolExecutor | None = None
        self._found: OrderedDict[int, _Adapter] = OrderedDict()
        """By the engine's number of the adapter."""

    def look(self, adapter: LoRARequest, now_ns: int) -> bytes | NotServed | None:
        """The adapter's digest; None while it is being read."""
        found = self._found.get(adapter.lora_int_id) or self._read(adapter, now_ns)
        if not found.digest.done():
            return None
        if found.changed is None and now_ns - found.looked_ns >= LOOK_NS:
            found.looked_ns = now_ns
            if _stamp(found.path) != found.stamp:
                found.changed = NotServed("its files changed while the engine ran")
                _say(adapter, found.changed)
        return found.changed or found.digest.result()

    def close(self) -> None:
        """Read nothing more."""
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, adapter: LoRARequest, now_ns: int) -> _Adapter:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="kvstore-adapter")
        path = Path(adapter.lora_path)
        stamp = _stamp(path)  # first: what changes while it is read is seen later
        reading = self._reader.submit(_read, adapter, path, self._dtype)
        found = self._found[adapter.lora_int_id] = _Adapter(path, stamp, reading, now_ns)
        while len(self._found) > ADAPTERS_MAX:
            self._found.popitem(last=False)
        return found


def _say(adapter: LoRARequest, why: NotServed) -> None:
    logger.warning(
        "kvstore: requests with the adapter %s are computed: %s", adapter.lora_name, why.reason
    )


def _read(adapter: LoRARequest, path: Path, dtype: str) -> bytes | NotServed:
    """On the reader's thread."""
    try:
        found = _digest(adapter, path, dtype)
    except OSError as error:
        found = NotServed(f"its files cannot be read: {error}")
    if isinstance(found, NotServed):
        _say(adapter, found)
    return found


def _digest(adapter: LoRARequest, path: Path, dtype: str) -> bytes | NotServed:
    if adapter.load_inplace:
        return NotServed("it is loaded in place of another one, under the same number")
    folder = path if path.exists() else downloaded(adapter.lora_path, None, None)
    if folder is None:
        return NotServed(f"its files cannot be found at {adapter.lora_path}")
    found = digest_path(folder)
    if isinstance(found, NotServed):
        return found
    text = f"kvstore adapter 1 {dtype} {adapter.is_3d_lora_weight} {found.digest} "
    return hashlib.sha256(text.encode()).digest()


def _stamp(path: Path) -> Stamp:
    """Empty without such a folder, as of an adapter in the hub's cache, whose files stay."""
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        stats: list[Any] = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)

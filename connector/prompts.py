"""Prompts and their keys: images, the tail behind the last whole block, LoRA adapters.

**Images.** A key holds each image's `identifier`, which is also the item's key in vllm's processor,
encoder and prefix caches. An identifier is a digest of the content (`MultiModalHasher`, hex) or, if
the client supplied one, its `uuid` verbatim, which two images may share. (With both of vllm's
caches off it is a number of the request.) The request does not say which kind it is, so the form
decides. Not detected: a uuid that looks like a digest, whether chosen so or hashed by vllm together
with the request's own processor settings. The item's content is no help: vllm's caches use the same
identifier, so the computed item need not be the one that arrived. Against clients that forge
uuids, drop `uuid` at the front door or set `images` to "none" (threats.md, T1).

**Tails.** vLLM names whole blocks only, so a decode engine would compute up to a block of tokens
that the prefill engine has computed. Their tail has a key of its own, made from the key of the
block before it and its tokens; both engines of a transfer make the same one (ADR 12). Engines
without tails: those with several KV cache groups, served or not (`SchedulerSide`), or with drafts
that exclude the last block of a hit (`SchedulerCore.new_request`).

**Adapters.** vLLM's keys hold an adapter's name and path, and not its weights. So each key of a
request with an adapter is hashed together with a digest of the adapter's files: another rank, other
target modules or other weights make other keys. The scheduler's thread touches no file: a disk that
hangs would stop it. A thread of its own reads the digest while the first requests wait, and looks
at the files again and again. An adapter whose files change has an unknown state in the engine,
which reads them when it needs them: it is not served any more, until the engine loads it under
another number. As with the model's own weights, changes between the engine's reading and the first
request are not seen.

Does not cover: digests of files (`weights.py`), requests that wait (`scheduler_side.py`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from kvstore.client.core.request import DerivedKeys
from kvstore.connector.checks import NotServed
from kvstore.connector.config import Images
from kvstore.connector.weights import digest_path, downloaded
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.requests import DecodePart, PrefillPart, adapter_answer, asks_for_adapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


_DOMAIN: Final = b"kvstore prompt tail 1 "
"""Begin of the bytes that a tail's key is a digest of: vLLM's keys are digests of CBOR, which never
begins like this."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""Hex digests of blake3 and sha256, and of sha512."""


def why_left_out(request: Request, images: Images) -> str:
    """The outcome of a request that is neither stored nor loaded because of its images, video or
    audio; empty when it may be."""
    if not request.mm_features:
        return ""
    if images == "none":
        return "images off"
    if all(_DIGEST.fullmatch(feature.identifier) for feature in request.mm_features):
        return ""
    return "image uuid"


def tail_key(
    request: Request,
    keys: Sequence[bytes],
    transfer: PrefillPart | DecodePart | None,
    block_tokens: int,
) -> bytes:
    """Key of the prompt's tail; empty: it has none. `keys`: of its whole blocks. `block_tokens`:
    tokens of a block; 0: no prompt of the engine has a tail.

    Prompts without a tail: those shorter than a block (the salt is in the key of the first one),
    with images or embeddings (which their tokens do not name), or whose prefill engine goes on to
    decode and writes into the same block. A tail of one token is computed in any case.
    """
    if transfer is None or not block_tokens:
        return b""
    whole, rest = divmod(request.num_prompt_tokens, block_tokens)
    tokens = request.prompt_token_ids
    if tokens is None or not (rest > 1 and 0 < whole <= len(keys)):
        return b""
    if request.mm_features or request.prompt_embeds is not None:
        return b""
    if isinstance(transfer, PrefillPart) and request.max_tokens != 1:
        return b""
    tail = np.array(tokens[whole * block_tokens :], "<u4").tobytes()
    return hashlib.sha256(_DOMAIN + bytes(keys[whole - 1]) + tail).digest()


# ── adapters ──────────────────────────────────────────────────────────────────────────────────────

ADAPTERS_MAX: Final = 16_384
"""Most adapters of one engine: the state of each is kept for good, since its files may change."""
READ_NS_MAX: Final = 500 * NS_PER_MS
"""Longest wait for a digest; requests are computed from then on, until it is there."""
LOOK_NS: Final = 50 * NS_PER_MS
"""Shortest time between two looks at the files of an adapter."""
LOOK_NS_MAX: Final = NS_PER_S
"""Longest look at an adapter's files: from then until it ends, its requests are computed."""

Stamp = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of the last change of each file."""
T = TypeVar("T")

logger = logging.getLogger("vllm.kvstore.adapters")

_SLOW: Final = "its files take too long to read"
_IN_PLACE: Final = "it was loaded in place of another one, under the same number"
_TOO_MANY: Final = f"there are more than {ADAPTERS_MAX} adapters"
_CHANGED: Final = "its files changed while the engine ran"


def adapter_keys(request: Request, digest: bytes) -> DerivedKeys:
    """Keys of a request with an adapter: vLLM's keys, each hashed with the adapter's digest when it
    is read first. `request` goes on making its own keys."""
    hashed = functools.cache(lambda own: hashlib.sha256(digest + own).digest())
    return DerivedKeys(
        lambda: len(request.block_hashes), lambda at: hashed(request.block_hashes[at])
    )


class _Files(NamedTuple):
    stamp: Stamp
    digest: bytes


class _Adapter:
    def __init__(self, path: str, reading: Future[_Files | str], now_ns: int) -> None:
        self.path, self.reading = path, reading
        self.looked_ns = now_ns
        """When the last read of its files, or look at them, began."""
        self.look: Future[Stamp] | None = None
        """The look at its files that is under way; None: there is none."""
        self.is_changed = False


class _Reader:
    """A thread that reads files. A daemon thread: one that hangs in a disk does not keep the
    process from ending."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-adapter", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """The thread ends after the job in flight."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            future.set_result(job())


class Adapters:
    """All adapters of one engine, in the scheduler's process. No call waits."""

    def __init__(self, *, dtype: str) -> None:
        """`dtype`: type in which the engine keeps the weights of adapters."""
        self._dtype = dtype
        self._reader = _Reader()
        self._found: dict[int, _Adapter] = {}
        """Adapters seen so far, by the engine's number of each."""

    def look(self, adapter: LoRARequest, now_ns: int) -> bytes | str | None:
        """The adapter's digest; None: it is being read, ask again; a text: why the requests of this
        adapter are computed."""
        found = self._found.get(adapter.lora_int_id)
        if found is None:
            if len(self._found) >= ADAPTERS_MAX:
                return _TOO_MANY
            reading = self._reader.submit(lambda: _read(adapter, self._dtype))
            found = self._found[adapter.lora_int_id] = _Adapter(adapter.lora_path, reading, now_ns)
        if adapter.load_inplace or adapter.lora_path != found.path:
            return _IN_PLACE
        if not found.reading.done():
            return None if now_ns - found.looked_ns < READ_NS_MAX else _SLOW
        files = found.reading.result()
        if isinstance(files, str):
            return files
        self._watch(adapter, found, files.stamp, now_ns)
        if found.is_changed:
            return _CHANGED
        if found.look is not None and now_ns - found.looked_ns >= LOOK_NS_MAX:
            return _SLOW
        return files.digest

    def answer(self, request: Request, now_ns: int) -> dict[str, Any] | None:
        """Parameters for a router that asked for the digest of a request's adapter; None: for all
        other requests."""
        adapter = request.lora_request
        if adapter is None or not asks_for_adapter(request.kv_transfer_params):
            return None
        found = self.look(adapter, now_ns)
        return adapter_answer("its files are being read" if found is None else found)

    def close(self) -> None:
        """Read nothing more."""
        self._reader.close()

    def _watch(self, adapter: LoRARequest, found: _Adapter, stamp: Stamp, now_ns: int) -> None:
        if found.look is not None and found.look.done():
            if found.look.result() != stamp and not found.is_changed:
                found.is_changed = True
                _say(adapter, _CHANGED)
            found.look = None
        if found.look is None and now_ns - found.looked_ns >= LOOK_NS:
            found.looked_ns = now_ns
            found.look = self._reader.submit(lambda: _stamp(Path(found.path)))


def _say(adapter: LoRARequest, reason: str) -> None:
    logger.warning(
        "kvstore: requests with the adapter %s are computed: %s", adapter.lora_name, reason
    )


def _read(adapter: LoRARequest, dtype: str) -> _Files | str:
    """The adapter's digest, and the stamp of its files from before they were read, so that a change
    meanwhile is noticed by a later look; a text: why there is none."""
    path = Path(adapter.lora_path)
    try:
        stamp = _stamp(path)
        folder = path if path.exists() else downloaded(adapter.lora_path, None, None)
        if folder is None:
            raise NotServed(f"its files cannot be found at {adapter.lora_path}")
        found = digest_path(folder)
    except (NotServed, OSError, ValueError) as error:
        reason = str(error)
        if not isinstance(error, NotServed):
            reason = f"its files cannot be read: {error}"
        _say(adapter, reason)
        return reason
    text = f"kvstore adapter 1 {dtype} {adapter.is_3d_lora_weight} {found.digest} "
    return _Files(stamp, hashlib.sha256(text.encode()).digest())


def _stamp(path: Path) -> Stamp:
    """State of the files in a folder, to compare with a later one; empty without such a folder, as
    for an adapter in the hub's cache, whose files stay."""
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        stats: list[Any] = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)

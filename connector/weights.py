"""A digest of a model's weights that takes milliseconds: the same path with other weights differs.

Covers: the configuration files; of every weight file its name, size and sampled pieces; of a
safetensors file also the header, and pieces of each tensor, small ones whole. So a tensor that is
replaced, by a fine-tune or a merge, is seen. A few bytes changed by hand in the middle of a large
tensor may not be: a program that changes weights in place calls the engine's `reset_cache`.
Reads pieces, never unpickles.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.connector.checks import NotServed

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

PIECE_BYTES = 4096
WHOLE_BYTES_MAX = 4 * PIECE_BYTES
"""Tensors up to this size are read whole: norms, biases, scales."""
PIECES_PER_TENSOR_MAX = 8
PIECES_MAX = 16384
"""Most pieces of a file, 64 MiB, unless it has more tensors, of which each has a piece."""
HEADER_BYTES_MAX = 100_000_000
"""The limit of the safetensors format itself."""

_CONFIG_FILES = (
    "adapter_config.json",
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Configuration files that are part of a digest; the last three are about images."""
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_FILE_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats whose weights are the files in the model's folder."""


class WeightsDigest(msgspec.Struct, frozen=True):
    """A digest, and the cost of making it."""

    digest: str
    file_count: int
    read_bytes: int


class _Tensor(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor_decoder = msgspec.json.Decoder(_Tensor)


def digest_weights(model: ModelConfig, load: LoadConfig) -> WeightsDigest:
    """The digest of the weights that the engine is configured to load. Raises NotServed."""
    load_format = str(load.load_format)
    if load_format == "dummy":
        text = f"dummy {model.seed}"
        return WeightsDigest(hashlib.sha256(text.encode()).hexdigest(), 0, 0)
    if load_format not in _FILE_FORMATS:
        raise NotServed(f"weights of load format {load_format} cannot be distinguished from others")
    path = Path(model.model)
    if not path.exists():
        found = downloaded(model.model, model.revision, load.download_dir)
        if found is None:
            raise NotServed(f"the weight files of {model.model} cannot be found")
        path = found
    return digest_path(path)


def downloaded(model: str, revision: str | None, folder: str | None) -> Path | None:
    """The folder in which the hub's client keeps a download of the engine; None: there is none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=folder, local_files_only=True)
        )
    except (OSError, ValueError):  # its own errors derive from these
        return None


def digest_path(path: Path) -> WeightsDigest:
    """The digest of a model's folder, or of a single weight file. Raises NotServed."""
    hasher = _Hasher()
    try:
        folder = path if path.is_dir() else path.parent
        files = sorted(folder.iterdir()) if path.is_dir() else [path]
        weights = [file for file in files if file.suffix in _SUFFIXES and file.is_file()]
        if not weights:
            raise NotServed(f"there are no weight files in {path}")
        for name in _CONFIG_FILES:
            if (folder / name).is_file():
                hasher.add(name, (folder / name).read_bytes())
        for file in weights:
            _add_file(hasher, file)
    except OSError as error:
        raise NotServed(f"weight files cannot be read: {error}") from None
    return WeightsDigest(hasher.digest(), len(weights), hasher.read_bytes)


class _Hasher:
    """Digest of named parts, each hashed with its length, so that no two lists of parts look
    alike."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"kvstore weights 1")
        self.read_bytes = 0

    def add(self, name: str, content: bytes) -> None:
        self._hash.update(f"{len(name)} {name} {len(content)} ".encode())
        self._hash.update(content)
        self.read_bytes += len(content)

    def digest(self) -> str:
        return self._hash.hexdigest()


def _add_file(hasher: _Hasher, file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead between pieces
        hasher.add(f"{file.name} size", str(size).encode())
        if file.suffix == ".safetensors":
            _add_tensors(hasher, descriptor, size, file.name)
        else:
            _add_range(hasher, descriptor, file.name, 0, size, pieces=PIECES_MAX // 16)
    finally:
        os.close(descriptor)


def _add_tensors(hasher: _Hasher, descriptor: int, size: int, name: str) -> None:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    begin = 8 + length
    if length > HEADER_BYTES_MAX or begin > size:
        raise NotServed(f"{name} is no safetensors file")
    content = os.pread(descriptor, length, 8)
    hasher.add(f"{name} header", content)
    try:
        entries: dict[str, Any] = _header_decoder.decode(content)
        entries.pop("__metadata__", None)
        tensors = {key: _tensor_decoder.decode(value) for key, value in entries.items()}
    except msgspec.DecodeError:
        raise NotServed(f"{name} has a header that is no safetensors header") from None
    pieces = min(max(PIECES_MAX // max(len(tensors), 1), 1), PIECES_PER_TENSOR_MAX)
    for key, tensor in sorted(tensors.items()):
        first, last = tensor.data_offsets
        if not 0 <= first <= last <= size - begin:
            raise NotServed(f"{name} is shorter than its header says")
        _add_range(hasher, descriptor, key, begin + first, begin + last, pieces=pieces)


def _add_range(
    hasher: _Hasher, descriptor: int, name: str, begin: int, end: int, *, pieces: int
) -> None:
    """Bytes [begin, end) whole if they are few, else pieces at equal distances, ends included."""
    if end - begin <= max(WHOLE_BYTES_MAX, pieces * PIECE_BYTES):
        hasher.add(name, os.pread(descriptor, end - begin, begin))
        return
    room = end - begin - PIECE_BYTES
    offsets = [room // 2] if pieces == 1 else [room * i // (pieces - 1) for i in range(pieces)]
    hasher.add(name, b"".join(os.pread(descriptor, PIECE_BYTES, begin + at) for at in offsets))

"""Decodes manifests of every format. Format 2, the present one, is described in `manifest.py`.

Format 1 had no indices: the manifest held the chunks of all files, with their digests. For a large model on many ranks
it became larger than a reader takes (405 B parameters on 1,024 ranks: 306 MB).

    "format": 1,
    "files":   [{"name": "rank-00000.safetensors", "bytes": ..., "header_bytes": ..., "digest": "<of header>"}, ...],
    "tensors": {"model/embed.weight": {"shape": [...], "dtype": "F32",
                                       "chunks": [[file, offset, start, stop, [digest, ...]], ...]}, ...}
"""

from __future__ import annotations

from typing import Any

from zeroshard.checkpoint.index import Chunk, Index, decoded_chunk, expect_digests
from zeroshard.checkpoint.manifest import (
    FORMAT,
    FileEntry,
    Manifest,
    Run,
    TensorEntry,
    decode_file,
    decode_tensor,
    expect_whole,
    file_name_and_size,
    joined,
    shape_and_dtype,
    unpacked,
)
from zeroshard.io.checked import integer, refuse, short, typed
from zeroshard.io.tensor_file import MAX_HEADER_BYTES


def decode(data: bytes) -> Manifest:
    """
    Raises:
        CheckpointError: the bytes cannot be the result of `Manifest.encode`, of this version or an earlier one.
    """
    body = unpacked(data)
    number = body.get("format")
    if isinstance(number, bool) or number not in (1, FORMAT):
        refuse(f"has format {short(number)}; this version of zeroshard reads the formats 1 to {FORMAT}")
    return _format_1(body) if number == 1 else _format_2(body)


def _format_2(body: dict[str, Any]) -> Manifest:
    files = tuple(decode_file(entry) for entry in typed(body.get("files"), list, "files"))
    entries = typed(body.get("tensors"), dict, "tensors").items()
    return Manifest.checked(body, files, {name: decode_tensor(name, entry, len(files)) for name, entry in entries})


# Format 1 -------------------------------------------------------------------------------------------------------------


def _format_1(body: dict[str, Any]) -> Manifest:
    files, headers = [], []
    for entry in typed(body.get("files"), list, "files"):
        name, num_bytes = file_name_and_size(typed(entry, dict, "a file"))
        header_bytes = integer(entry.get("header_bytes"), f"the header of {name}", MAX_HEADER_BYTES)
        files.append(FileEntry(name, num_bytes))
        headers.append((header_bytes, expect_digests(entry.get("digest"), 1, "a file's digest")))
    tensors = {}
    of_files: list[dict[str, list[Chunk]]] = [{} for _ in files]
    for name, entry in typed(body.get("tensors"), dict, "tensors").items():
        shape, dtype = shape_and_dtype(name, typed(entry, dict, f"tensor {short(name)}"))
        chunks = [_chunk(name, dtype, item, len(files)) for item in typed(entry.get("chunks"), list, "chunks")]
        for file, chunk in chunks:
            of_files[file].setdefault(name, []).append(chunk)
        parts = joined(_parts(chunks))
        expect_whole(name, shape, parts)
        tensors[name] = TensorEntry(name, shape, dtype, parts)
    indices = [
        Index(*header, {name: tuple(chunks) for name, chunks in of_file.items()})
        for header, of_file in zip(headers, of_files, strict=True)
    ]
    return Manifest.checked(body, tuple(files), tensors, tuple(indices))


def _chunk(name: str, dtype: Any, item: Any, num_files: int) -> tuple[int, Chunk]:
    if len(typed(item, list, f"a chunk of {short(name)}")) != 5:
        refuse(f"tensor {short(name)}: a chunk has five parts, found {len(item)}")
    file, *place, digests = item
    if integer(file, f"a chunk of {short(name)}", 1 << 62) >= num_files:
        refuse(f"tensor {short(name)} lies in file number {file} of {num_files}")
    texts = [expect_digests(text, 1, "a digest") for text in typed(digests, list, "digests")]
    return file, decoded_chunk(name, dtype, [*place, "".join(texts)])


def _parts(chunks: list[tuple[int, Chunk]]) -> list[Run]:
    """One run for each interval of a file; chunks that touch are one."""
    parts: list[Run] = []
    for file, chunk in chunks:
        last = parts[-1] if parts else None
        if last and (last.file, last.stop) == (file, chunk.interval.start):
            parts[-1] = Run(file, last.start, last.numel + chunk.interval.numel)
        else:
            parts.append(Run(file, chunk.interval.start, chunk.interval.numel))
    return parts

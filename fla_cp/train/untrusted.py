"""Reads checkpoints of torch.distributed.checkpoint (DCP) without running code that they contain.

DCP writes two kinds of pickles. The first is `.metadata`, which DCP's reader unpickles without
restrictions. The second are objects in the shards that are not tensors (a learning rate, a list of
names), which DCP's planner loads with weights_only=False. Here `.metadata` is read into plain
stand-ins, and DCP's classes are built from them after their fields were checked. Objects in shards
are read with weights_only=True, as DCP itself does for tensors.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import ReadItem

from fla_cp.train.integrity import Damaged

TRUST = "--run.trust-checkpoint"


class _Stand:
    """Holds the fields of a DCP object until they are checked.

    The pickle can reach this class, but never DCP's own.
    """

    kind = ""

    def __setstate__(self, state: Any) -> None:
        fields = state if isinstance(state, dict) else {"state": state}
        self.__dict__.update(fields)


_STANDS = {
    "torch.distributed.checkpoint.metadata": (
        *("ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata", "Metadata"),
        *("MetadataIndex", "TensorProperties", "StorageMeta"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}


def _nothing(*_: Any) -> None:
    """Replaces functions whose results are not used: a layout, a memory format."""


class _Unpickler(pickle.Unpickler):
    """Unpickles DCP's metadata and nothing else. torch 2.10 to 2.13 write these classes."""

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))
        self.stands: dict[str, type[_Stand]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _STANDS.get(module, ()):
            # A new class for each unpickler, since a pickle may set attributes of the classes it
            # gets.
            return self.stands.setdefault(name, type(name, (_Stand,), {"kind": name}))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            # 3.13 names the module pathlib._local
            windows = name in ("WindowsPath", "PureWindowsPath")
            return pathlib.PureWindowsPath if windows else pathlib.PurePosixPath
        if (module, name) in (
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ):
            return _nothing
        raise pickle.UnpicklingError(
            f"asks for {module}.{name}, which no checkpoint of torch needs and which may run any "
            f"code; {TRUST} loads it all the same"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("asks for an object from elsewhere")


def _need(ok: bool, what: str) -> None:
    if not ok:
        raise TypeError(what)


def _kind(value: Any) -> str:
    return value.kind if isinstance(value, _Stand) else type(value).__name__


def _sizes(value: Any) -> torch.Size:
    _need(isinstance(value, (torch.Size, tuple, list)), f"a size is a {_kind(value)}")
    _need(all(type(n) is int and n >= 0 for n in value), f"a size is {value}")
    return torch.Size(value)


def _entry(value: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if _kind(value) == "BytesStorageMetadata":
        return dcp.BytesStorageMetadata()
    _need(_kind(value) == "TensorStorageMetadata", f"an entry is a {_kind(value)}")
    _need(_kind(value.properties) == "TensorProperties", "an entry has no properties")
    dtype = value.properties.state[0]
    _need(isinstance(dtype, torch.dtype), "an entry has no dtype")
    for chunk in value.chunks:
        _need(_kind(chunk) == "ChunkStorageMetadata", f"a chunk is a {_kind(chunk)}")
    return dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype),
        _sizes(value.size),
        [dcp.ChunkStorageMetadata(_sizes(c.offsets), _sizes(c.sizes)) for c in value.chunks],
    )


def _index(value: Any) -> dcp.MetadataIndex:
    _need(_kind(value) == "MetadataIndex" and type(value.fqn) is str, "a key is no MetadataIndex")
    offset, index = getattr(value, "offset", None), getattr(value, "index", None)
    _need(index is None or type(index) is int, "an index is no number")
    return dcp.MetadataIndex(value.fqn, None if offset is None else _sizes(offset), index)


def _place(value: Any) -> dcp_files._StorageInfo:
    _need(_kind(value) == "_StorageInfo", f"a place is a {_kind(value)}")
    name, offset, length = value.relative_path, value.offset, value.length
    _need(type(name) is str, "a file's name is no text")
    _need(type(offset) is int and type(length) is int, "a place is no number")
    _need(not getattr(value, "transform_descriptors", None), "its files are encoded")
    return dcp_files._StorageInfo(name, offset, length)


def restricted_metadata(text: bytes) -> dcp.Metadata:
    """The checked metadata in the bytes of a `.metadata` file. Raises Damaged."""
    try:
        found = _Unpickler(text).load()
    except pickle.UnpicklingError as error:
        raise Damaged(f".metadata {error}".splitlines()[0]) from None
    except Exception as error:  # pickle can raise almost any exception for damaged bytes
        raise Damaged(f".metadata cannot be read ({type(error).__name__})") from None
    try:
        _need(_kind(found) == "Metadata", f"it is a {_kind(found)}")
        entries = {name: _entry(value) for name, value in found.state_dict_metadata.items()}
        _need(all(type(name) is str for name in entries), "a name is no text")
        places = {_index(key): _place(value) for key, value in found.storage_data.items()}
        version = getattr(found, "version", None)
        _need(version is None or type(version) is str, "its version is no text")
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Damaged(f".metadata is not DCP's: {reason}") from None
    return dcp.Metadata(
        entries, storage_data=places, storage_meta=dcp.StorageMeta(), version=version
    )


def trusted_metadata(text: bytes) -> dcp.Metadata:
    """The metadata in these bytes, read by plain pickle, which may run any code. Raises Damaged."""
    try:
        found = pickle.loads(text)
    except Exception as error:
        raise Damaged(f".metadata cannot be read ({type(error).__name__})") from None
    if not isinstance(found, dcp.Metadata) or not isinstance(found.storage_data, dict):
        raise Damaged(f".metadata is a {type(found).__name__}")
    return found


def check_places(folder: Path, metadata: dcp.Metadata) -> None:
    """Raises Damaged if an entry is in no file of this folder, or beyond the file's end."""
    sizes: dict[str, int] = {}
    for key, place in metadata.storage_data.items():
        name = place.relative_path
        if name not in sizes:
            if not name or "/" in name or "\0" in name or name in (".", ".."):
                raise Damaged(f".metadata names a file outside the checkpoint: {name!r}")
            if not (folder / name).is_file():
                raise Damaged(f"{name} is missing")
            sizes[name] = (folder / name).stat().st_size
        if place.offset < 0 or place.length < 0 or place.offset + place.length > sizes[name]:
            raise Damaged(f"{name} has {sizes[name]} bytes, too few for {key.fqn}")


class CheckedReader(FileSystemReader):
    """DCP's reader of a folder, with metadata that were read and checked before."""

    def __init__(self, folder: Path, metadata: dcp.Metadata) -> None:
        super().__init__(folder)
        self.checked = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        kept = self.checked.storage_meta or dcp.StorageMeta()
        return dataclasses.replace(
            self.checked, storage_meta=dataclasses.replace(kept, load_id=self.load_id)
        )


class SafePlanner(DefaultLoadPlanner):
    """DCP's planner, with objects in shards read by weights_only=True."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            # torch's message has several lines and advises to load the object anyway
            raise Damaged(
                f"{read_item.storage_index.fqn} holds an object that may run any code; {TRUST} "
                "loads it all the same"
            ) from None
        # The base class unpickles without restrictions, so it gets a pickle that is made here.
        safe = io.BytesIO()
        torch.save(found, safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)


def reading(trust: bool) -> tuple[Callable[[bytes], dcp.Metadata], type[DefaultLoadPlanner]]:
    """The function that reads `.metadata`, and the class of the load planner."""
    if trust:
        return trusted_metadata, DefaultLoadPlanner
    return restricted_metadata, SafePlanner

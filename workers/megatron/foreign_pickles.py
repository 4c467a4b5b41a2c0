"""What a checkpoint directory may hold as a pickle: nothing that runs code of whoever wrote it.

The index `.metadata` and the objects among the tensors are pickles, which torch and Megatron read without restriction.
They are read here first, by readers that know the few classes such files are made of; what passes is the same to the
others. A directory whose files change meanwhile is not guarded against.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from state.errors import ResumeError

INDEX = ".metadata"
_OF_INDEX: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, known.__name__): known
        for known in (
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,  # as Python 3.13 writes it
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


def read_index(path: Path) -> metadata.Metadata:
    """The index of the checkpoint in `path`.

    Raises:
        ResumeError: it is cut, or names a class that no index is made of.
    """
    file = path / INDEX
    try:
        with file.open("rb") as stream:
            index = _Reader(stream).load()
    except _Foreign as error:
        raise ResumeError(f"{file} is refused: it names {error}, which could run code and no index has") from error
    except Exception as error:  # damage comes as any of them
        raise ResumeError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(index, metadata.Metadata):
        raise ResumeError(f"{file} cannot be read: it holds a {type(index).__name__}, not the index of a checkpoint")
    return index


def check_objects(path: Path, index: metadata.Metadata, keys: Iterable[str]) -> None:
    """Read those of `keys` that are objects as tensors and plain values alone.

    Raises:
        ResumeError: one is damaged, or has anything else in it; names the file, the object and the class.
    """
    for key in sorted(set(keys)):
        if not isinstance(index.state_dict_metadata.get(key), metadata.BytesStorageMetadata):
            continue
        part = (index.storage_data or {}).get(metadata.MetadataIndex(key))
        if part is None:
            raise ResumeError(f"{path} is not a whole checkpoint: its index does not say where {key} is")
        if part.transform_descriptors or part.length < 0:
            raise ResumeError(f"{path / part.relative_path} is refused: {key} is not stored as it is")
        try:
            with (path / part.relative_path).open("rb") as stream:
                stream.seek(part.offset)
                torch.load(io.BytesIO(stream.read(part.length)), map_location="cpu", weights_only=True)
        except Exception as error:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            said = f"it names {named[1]}" if named else f"{type(error).__name__}: {str(error).splitlines()[0]}"
            raise ResumeError(
                f"{path / part.relative_path} is refused: {key} is not made of tensors and plain values ({said})"
            ) from error


class _Foreign(Exception):
    """The name of what is not to be looked up."""


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _OF_INDEX[module_name, global_name]
        except KeyError:
            raise _Foreign(f"{module_name}.{global_name}") from None

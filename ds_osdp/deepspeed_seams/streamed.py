"""Write a checkpoint file whose large tensors are made while they are written, one parameter at a time.

A flat tensor of the stock layout spans many parameters, of which a planned engine holds other parts: made whole, the flat
tensors of a file would be as much memory again as the optimizer states.  So the file is written with the places of all
tensors and without their data (``torch.serialization.skip_data``), and filled after that.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from zipfile import ZipFile

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from torch.utils._pytree import tree_leaves

__all__ = ["StreamedFile"]


class StreamedFile:
    """In the place of DeepSpeed's checkpoint engine for one ``save``."""

    def __init__(self) -> None:
        self._fake = FakeTensorMode()
        self._pieces: dict[int, Iterator[torch.Tensor]] = {}

    def join(self, pieces: Iterator[torch.Tensor], numel: int, like: torch.Tensor) -> torch.Tensor:
        """What stands in the state for the 1-D tensor of ``numel`` elements that ``pieces`` make, taken when it is written."""
        with self._fake:
            stand_in = torch.empty(numel, dtype=like.dtype, device=like.device)
        self._pieces[id(stand_in)] = pieces
        return stand_in

    def save(self, state: dict[str, Any], path: str) -> None:
        """Write ``state`` to ``path``, which is there when all of it is.

        Raises:
            OSError: it cannot be written; ``path`` is as before.  All pieces were taken: ranks make some of them together.
        """
        beside = f"{path}.part"
        try:
            self._write(state, beside)
            os.replace(beside, path)
        except (OSError, RuntimeError):
            for tensor in tree_leaves(state):
                deque(self._pieces.get(id(tensor), ()), maxlen=0)
            with suppress(FileNotFoundError):
                os.unlink(beside)
            raise

    def _write(self, state: dict[str, Any], path: str) -> None:
        with skip_data(materialize_fake_tensors=True):
            torch.save(state, path)
        with self._fake:
            places = torch.load(path, map_location="cpu", weights_only=False)
        tensors = [tensor for tensor in tree_leaves(state) if isinstance(tensor, torch.Tensor)]
        targets = [place for place in tree_leaves(places) if isinstance(place, torch.Tensor)]
        _check_complete(path, targets)
        with open(path, "r+b") as file:
            for tensor, place in zip(tensors, targets, strict=True):
                file.seek(_offset(place))
                for piece in self._pieces.get(id(tensor), iter([tensor])):
                    file.write(_bytes(piece))


def _check_complete(path: str, tensors: list[torch.Tensor]) -> None:
    """Every tensor in the file must be one that is filled: one inside an object of another class would be left empty."""
    with ZipFile(path) as file:
        stored = sum("/data/" in name for name in file.namelist())
    assert stored == len({_offset(tensor) for tensor in tensors}), path


def _offset(place: torch.Tensor) -> int:
    """Where in the file the data of a tensor that was loaded without them begins."""
    offset = place.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


def _bytes(piece: torch.Tensor) -> memoryview:
    return piece.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy().data

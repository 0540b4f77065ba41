"""Rows of a model as its files have it, a few megabytes at a time: for whoever needs the weights and holds none.

Tensors that transformers' converters merge, split or transpose are put together one conversion at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy

import torch

from coremill.model.build import build_on_meta
from coremill.model.initialise import initialise, record_initialisation
from coremill.model.load import aliases_of, converted_tensors
from coremill.model.names import NameMap, map_names
from coremill.model.read import FLOATING, TensorReader, dtype_of
from coremill.model.slices import RowSlice, named_tensors
from coremill.model.source import ModelFolder
from coremill.plan.headers import read_headers
from coremill.plan.memory import EXPORT_PIECE_BYTES


class BaseRows:
    """A model on disk by the names of its module; what is in no file is drawn again, from the same seed."""

    def __init__(self, source: ModelFolder, *, seed: int) -> None:
        self._source, self._seed = source, seed
        self.blueprint = build_on_meta(source, attention="eager")
        tensors = named_tensors(self.blueprint)
        self._headers = read_headers(source.folder) if source.weights == "pretrained" else {}
        names = map_names(self.blueprint, self._headers) if self._headers else NameMap({}, {}, (), ())
        if self._headers:
            self.blueprint._weight_conversions = list(names.used)  # by which an export is in the form of the files
        self._conversions = names.conversions
        made_by = self._made_by()
        self._header_of, self._conversion_of = {}, {}
        self.drawn: set[str] = set()  # parameters that are in no file
        for tied in aliases_of(tensors):
            stored = [names.renamed[name] for name in tied if name in names.renamed]
            converted = [made_by[name] for name in tied if name in made_by]
            for name in tied:
                if stored:
                    self._header_of[name] = self._headers[stored[0]]
                elif converted:
                    self._conversion_of[name] = converted[0]
                elif isinstance(tensors[name], torch.nn.Parameter):
                    self.drawn.add(name)
        self._first_name = {name: tied[0] for tied in aliases_of(tensors) for name in tied}
        self._record = record_initialisation(self.blueprint, seed) if self.drawn else {}
        self._converted: tuple[str, dict[str, torch.Tensor]] = ("", {})  # the last conversion and what it made

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """In which the files hold each parameter; what is drawn is left out."""
        found = {name: dtype_of(header) for name, header in self._header_of.items()}
        for name, target in self._conversion_of.items():
            found[name] = dtype_of(self._headers[self._conversions[target].sources[0][0]])
        return found

    @property
    def main_dtype(self) -> torch.dtype:
        """Of most numbers in the files; fp32 where there are none."""
        bytes_of: Counter[str] = Counter()
        for header in self._headers.values():
            bytes_of[header.dtype] += header.bytes
        found = [FLOATING[name] for name, _ in bytes_of.most_common() if name in FLOATING]
        return found[0] if found else torch.float32

    def pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """First row, end and the rows in fp32, which share a buffer."""
        rows, row_shape = (shape[0], shape[1:]) if shape else (1, ())
        row_elements = torch.Size(row_shape).numel()
        at_once = max(1, EXPORT_PIECE_BYTES // (4 * max(1, row_elements)))
        buffer = torch.empty((min(at_once, rows), *row_shape))
        with TensorReader(self._source.folder) as reader:
            whole = self._converted_whole(reader, name) if name in self._conversion_of else None
            for start in range(0, rows if row_elements else 0, at_once):
                stop = min(start + at_once, rows)
                piece = buffer[: stop - start] if shape else buffer.view(())
                if whole is not None:
                    piece.copy_(whole[start:stop] if shape else whole)
                elif name in self._header_of:
                    reader.read_rows(self._header_of[name], start, stop, piece)
                else:
                    initialise(RowSlice(self._first_name[name], shape, start, stop, piece), self._record, self._seed)
                yield start, stop, piece

    def _made_by(self) -> dict[str, str]:
        """Parameters that a conversion makes, each with the name it goes by: one tensor may become several."""
        found: dict[str, str] = {}
        for target, conversion in self._conversions.items():
            ends = conversion.converter.target_patterns
            before, _, after = next((target.partition(end) for end in ends if end in target), (target, "", ""))
            named = [f"{before}{end}{after}" for end in ends] if before != target else []
            found |= dict.fromkeys([*named, target], target)
        return found

    def _converted_whole(self, reader: TensorReader, name: str) -> torch.Tensor:
        target = self._conversion_of[name]
        if self._converted[0] != target:
            self._converted = ("", {})  # let go of the last one first
            conversion = deepcopy(self._conversions[target])  # it keeps what it was given
            made = converted_tensors(reader, target, conversion, self._headers, self.blueprint)
            self._converted = (target, made)
        return self._converted[1][name]

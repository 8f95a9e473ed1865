"""ONNX models as weights: initializers and the tensors held by Constant nodes, in every subgraph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wpk.ir.errors import WeightsError
from wpk.registry.formats.files import DAMAGED, first_line, readable
from wpk.registry.formats.tensors import Array, TensorInfo, TensorSet

if TYPE_CHECKING:
    import onnx

_ONNX_DTYPES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT16": "float16",
    "BFLOAT16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT16": "int16",
    "INT8": "int8",
    "UINT64": "uint64",
    "UINT32": "uint32",
    "UINT16": "uint16",
    "UINT8": "uint8",
    "BOOL": "bool",
}


def _import_onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise WeightsError(
            "reading ONNX files needs the package onnx",
            wanted="onnx",
            found="not installed",
            hint="pip install 'wpk[zoo]'",
        ) from error
    return onnx


class OnnxFile(TensorSet):
    """The tensors of an ONNX model: initializers, and Constant nodes by the name of their output.

    A name that occurs once in the file is used as it is. Where subgraphs (of If, Loop, Scan, functions) repeat a
    name, each of theirs gets its path, "NODE.BRANCH/name"; a node without a name is called OPTYPE#INDEX.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._onnx = _import_onnx()
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

        with readable(path):
            pass
        try:
            model = self._onnx.load(str(path), load_external_data=False)
        except (DecodeError, ValueError, OSError) as error:
            raise WeightsError(f"{path} is no whole ONNX file", found=first_line(error), hint=DAMAGED) from error
        if not model.HasField("graph") or not model.graph.node:
            raise WeightsError(f"{path} holds no ONNX graph", wanted="a graph with nodes", found="none", hint=DAMAGED)
        found = [*self._walk(model.graph.node, model.graph.initializer, "")]
        for function in model.functions:
            found += self._walk(function.node, (), f"{function.domain}.{function.name}/")
        times = Counter(name for _, name, _ in found)
        self._protos: dict[str, onnx.TensorProto] = {}
        for place, name, proto in found:
            unique = name if times[name] == 1 else place + name
            if unique in self._protos:
                raise WeightsError(f"{path} defines the tensor {unique} twice", hint=DAMAGED)
            self._protos[unique] = proto
        self.tensors = {name: self._info(name, proto) for name, proto in self._protos.items()}

    def _walk(self, nodes: Any, initializers: Any, place: str) -> Iterator[tuple[str, str, onnx.TensorProto]]:
        for proto in initializers:
            yield place, proto.name, proto
        for index, node in enumerate(nodes):
            label = node.name or f"{node.op_type}#{index}"
            for attribute in node.attribute:
                if node.op_type == "Constant":
                    proto = self._constant(attribute)
                    if proto is not None:
                        yield place, node.output[0], proto
                for branch, graph in enumerate([attribute.g] if attribute.HasField("g") else attribute.graphs):
                    name = attribute.name if attribute.HasField("g") else f"{attribute.name}{branch}"
                    yield from self._walk(graph.node, graph.initializer, f"{place}{label}.{name}/")

    def _constant(self, attribute: Any) -> Any:
        """The value of a Constant node as a TensorProto; None where it holds no numbers (strings, sparse)."""
        from onnx import numpy_helper

        if attribute.name == "value":
            return attribute.t
        if attribute.name in ("value_float", "value_floats"):
            values = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            return numpy_helper.from_array(np.asarray(values, np.float32))
        if attribute.name in ("value_int", "value_ints"):
            whole = attribute.i if attribute.name == "value_int" else list(attribute.ints)
            return numpy_helper.from_array(np.asarray(whole, np.int64))
        return None

    def _info(self, name: str, proto: Any) -> TensorInfo:
        shape = tuple(proto.dims)
        types = self._onnx.TensorProto.DataType
        official = str(types.Name(proto.data_type)) if proto.data_type in types.values() else "unknown"
        dtype = _ONNX_DTYPES.get(official, official.lower())
        if official in _ONNX_DTYPES and proto.HasField("raw_data"):
            wanted = math.prod(shape) * np.dtype("uint16" if dtype == "bfloat16" else dtype).itemsize
            if len(proto.raw_data) != wanted:
                raise WeightsError(
                    f"{self._path}: tensor {name} {dtype} {list(shape)}",
                    wanted=f"{wanted} bytes",
                    found=f"{len(proto.raw_data)} bytes",
                    hint=DAMAGED,
                )
        # Weights are fractions or quantised bytes, with at least one axis; the graph's arithmetic is the rest.
        return TensorInfo(shape, dtype, auxiliary=not shape or dtype in ("int64", "int32", "bool", "string"))

    def _load(self, name: str) -> Array:
        from onnx import numpy_helper

        try:
            values = np.asarray(numpy_helper.to_array(self._protos[name], str(self._path.parent)))
        except Exception as error:  # onnx's helpers raise whatever the bytes drive them into
            raise WeightsError(f"{self._path}: tensor {name} cannot be read", found=first_line(error)) from error
        if values.shape != self.tensors[name].shape:
            raise WeightsError(
                f"{self._path}: tensor {name}", wanted=self.tensors[name].shape, found=values.shape, hint=DAMAGED
            )
        return values.view(np.uint16) if self.tensors[name].dtype == "bfloat16" else values

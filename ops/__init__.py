"""The operator library: a file per family. Importing this package declares every operator of `LIBRARY`."""

from wpk.ops import (
    attention,
    blockwise,
    blockwise_windows,
    characters,
    codebooks,
    constants,
    conv2d,
    elementwise,
    filterbank,
    index,
    kv,
    kv_attention,
    linear,
    mamba,
    norm,
    overlap,
    philox,
    recurrent,
    reduce,
    relative_attention,
    rope,
    sampling,
    scalar_program,
    shape,
    spectral,
    streaming,
    tf32,
    tiles,
    words,
)
from wpk.ops.operator import LIBRARY, Cost, Operator, attr, body, operand, operator

__all__ = [  # noqa: RUF022
    "LIBRARY", "Cost", "Operator", "attr", "body", "operand", "operator",
    "attention", "blockwise", "blockwise_windows", "characters", "codebooks", "constants", "conv2d", "elementwise",
    "filterbank", "index", "kv", "kv_attention", "linear", "mamba", "norm", "overlap", "philox", "recurrent", "reduce",
    "relative_attention", "rope", "sampling", "scalar_program", "shape", "spectral", "streaming", "tf32", "tiles",
    "words",
]  # fmt: skip

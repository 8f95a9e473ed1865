"""The operators that have a block-wide body of their own, and where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wpk.kernel.blockwise.attention import make_attention
from wpk.kernel.blockwise.norms import make_layer_norm, make_rms_norm
from wpk.kernel.layout import Shape

# Operator -> what makes the device function of its version 1 for a kernel's shape.
MAKERS: dict[str, Callable[[Shape], Any]] = {
    "attention": make_attention,
    "layer_norm": make_layer_norm,
    "rms_norm": make_rms_norm,
}

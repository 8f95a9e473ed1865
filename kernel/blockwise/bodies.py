"""The operators that have a block-wide body of their own, and where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wpk.kernel.blockwise.attention import make_attention
from wpk.kernel.blockwise.choices import make_argmax, make_top_p
from wpk.kernel.blockwise.elementwise import make_cast, make_select
from wpk.kernel.blockwise.matmul import make_matmul
from wpk.kernel.blockwise.norms import make_layer_norm, make_rms_norm
from wpk.kernel.blockwise.partials import argmax_merge, attention_merge, gated_rms_norm, rms_norm_terms
from wpk.kernel.blockwise.relative import make_relative_attention
from wpk.kernel.blockwise.tables import make_residual_quantise, make_selected_linear
from wpk.kernel.blockwise.windows import make_conv2d_window, make_depthwise_window
from wpk.kernel.layout import Shape

# Operator -> the device function of its version 1, the same for kernels of all shapes.
BODIES: dict[str, Any] = {
    "argmax_merge": argmax_merge,
    "attention_merge": attention_merge,
    "gated_rms_norm": gated_rms_norm,
    "rms_norm_terms": rms_norm_terms,
}
# Operator -> what makes the device function of its version 1 for a kernel's shape.
MAKERS: dict[str, Callable[[Shape], Any]] = {
    "argmax": make_argmax,
    "attention": make_attention,
    "cast": make_cast,
    "conv2d_window": make_conv2d_window,
    "depthwise_window": make_depthwise_window,
    "layer_norm": make_layer_norm,
    "matmul": make_matmul,
    "relative_attention": make_relative_attention,
    "residual_quantise": make_residual_quantise,
    "rms_norm": make_rms_norm,
    "select": make_select,
    "selected_linear": make_selected_linear,
    "top_p": make_top_p,
}

"""What a user of a model would run instead of WPK: the baselines of `wpk bench`.

`onnx` says how published ONNX files run in their own runtime. `torch_step` writes a step of a model in PyTorch, from
the dimensions of its spec.
"""

from wpk.zoo.baselines.onnx import BASELINES, Baseline, Feed, Network, Size

__all__ = ["BASELINES", "Baseline", "Feed", "Network", "Size"]

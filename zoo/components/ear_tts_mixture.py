"""Codes drawn from a hidden state: a mixture of Gaussians over the codec's latent space, a few codes a pass.

As in masked generation (MaskGIT, Chang et al. 2022) a schedule says how many codes are still unknown after each
iteration; the codes of a residual quantiser are fixed from the coarse book to the fine one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32
from wpk.zoo.component import concat, reshape
from wpk.zoo.components.ear_tts_layers import gated_feed_forward, product, rms_norm
from wpk.zoo.tensors import Tensors

SMALL = 1e-8  # keeps the logarithms of Gumbel noise finite


def masked_codes(codebooks: int, iterations: int, exponent: float) -> list[int]:
    """Codes still unknown before each iteration and after the last: ceil(n (1 - (i / N)^e)^(1 / e))."""
    shares = [(1.0 - (i / iterations) ** exponent) ** (1.0 / exponent) for i in range(iterations)]
    return [*(math.ceil(codebooks * share) for share in shares), 0]


@dataclass(frozen=True)
class Mixture:
    """[2, hidden] -> codes i32[codebooks]. passes: how many codes each one fixes, in the books' order.

    A pass: x = hidden + embed_code(sum of the rows of the codes fixed so far), both rows through `layers` residual
    feed-forward layers and a norm; x = c + guidance (c - u), one row from here. Component k = argmax(top_p(logits) +
    Gumbel noise); log scale l = max(proj_logs x, min_log_scale); mean m = low_mat[k] proj_mus[k] x; point
    z = e^l (m + noise N(0, I)) + proj_else x. The pass's codes are the residual quantisation of z with their books: z
    stands for what remains after the codes fixed before, which are not taken from it again.
    """

    passes: tuple[int, ...]
    components: int
    rank: int
    layers: int
    inner: int
    eps: float
    guidance: float
    top_p: float
    noise: float
    gumbel: bool
    min_log_scale: float
    stream: int  # of the uniform numbers; the normal ones are of the next

    def build(
        self, g: GraphBuilder, hidden: Value, seed: Value, books: Value, embed_code: Value, tensors: Tensors
    ) -> Value:  # fmt: skip
        _, _, latent = books.type.shape
        squares = g.op("sum", g.op("square", books))
        gumbel, normal = self._gumbel(g, seed), self._normal(g, seed, latent)
        codes: list[Value] = []
        known: Value | None = None
        first = 0
        for index, count in enumerate(self.passes):
            with g.scope(f"mog_head.{index}"):
                x = hidden if known is None else g.op("add", hidden, g.op("linear", known, embed_code))
                x = self._guided(g, self._stack(g, x, tensors))
                k = self._component(g, x, _row(g, gumbel, index), tensors)
                z = self._point(g, x, k, _row(g, normal, index), tensors, latent)
                made, _ = g.op("residual_quantise", z, books, squares, first=first, count=count)
                codes.append(made)
                first += count
                if first < sum(self.passes):
                    rows = g.op("embedding_sum", made, books, first=first - count)
                    known = rows if known is None else g.op("add", known, rows)
        return concat(g, codes, axis=0)

    # --- random numbers of all passes, which wait for nothing --------------------------------------------------------
    def _gumbel(self, g: GraphBuilder, seed: Value) -> Value | None:
        """-log(small - log(u + small)) [passes, components], Gumbel 1954; None where nothing is drawn."""
        if not self.gumbel:
            return None
        shape = (len(self.passes), self.components)
        u = g.op("random_uniform", seed, g.position(), shape=shape, stream=self.stream)
        exponential = g.op("affine", g.op("log", g.op("affine", u, offset=SMALL)), scale=-1.0, offset=SMALL)
        return g.op("neg", g.op("log", exponential))  # type: ignore[no-any-return]

    def _normal(self, g: GraphBuilder, seed: Value, latent: int) -> Value | None:
        if self.noise == 0.0:
            return None
        shape = (len(self.passes), latent)
        normal = g.op("random_normal", seed, g.position(), shape=shape, stream=self.stream + 1)
        return g.op("affine", normal, scale=self.noise)  # type: ignore[no-any-return]

    # --- one pass -----------------------------------------------------------------------------------------------------
    def _stack(self, g: GraphBuilder, x: Value, tensors: Tensors) -> Value:
        for i in range(self.layers):
            layer = f"mog_head.mlp_stack.{i}"
            y = rms_norm(g, x, tensors, f"{layer}.pre_norm", self.eps)
            y = gated_feed_forward(g, y, tensors, f"{layer}.mlp", self.inner)
            x = g.op("add", x, rms_norm(g, y, tensors, f"{layer}.post_norm", self.eps))
        return rms_norm(g, x, tensors, f"mog_head.mlp_stack.{self.layers}", self.eps)

    def _guided(self, g: GraphBuilder, x: Value) -> Value:
        width = x.type.shape[1]
        c, u = (reshape(g, g.op("slice", x, axis=0, start=i, stop=i + 1), (width,)) for i in (0, 1))
        return g.op("add", c, g.op("affine", g.op("sub", c, u), scale=self.guidance))  # type: ignore[no-any-return]

    def _component(self, g: GraphBuilder, x: Value, gumbel: Value | None, tensors: Tensors) -> Value:
        """i32[]. The logits' normaliser is the same for all: log_softmax would change no argmax."""
        logits = product(g, x, tensors, "mog_head.proj_logits", self.components)
        if gumbel is None:
            return g.op("argmax", logits)  # type: ignore[no-any-return]  # the greatest is in every nucleus
        return g.op("argmax", g.op("add", g.op("top_p", logits, p=self.top_p), gumbel))  # type: ignore[no-any-return]

    def _point(
        self, g: GraphBuilder, x: Value, k: Value, normal: Value | None, tensors: Tensors, latent: int
    ) -> Value:  # fmt: skip
        width = x.type.size
        mus = tensors.get("mog_head.proj_mus.weight", f32(self.components * self.rank, width))
        low = g.op("selected_linear", x, reshape(g, mus, (self.components, self.rank, width)), k)
        mean = g.op("selected_linear", low, tensors.get("mog_head.low_mat", f32(self.components, latent, self.rank)), k)
        floor = g.op("full", shape=(1,), value=self.min_log_scale)
        scale = g.op("exp", g.op("maximum", product(g, x, tensors, "mog_head.proj_logs", 1), floor))
        spread = mean if normal is None else g.op("add", mean, normal)
        rest = product(g, x, tensors, "mog_head.proj_else", latent)
        return g.op("add", g.op("mul", spread, scale), rest)  # type: ignore[no-any-return]


def _row(g: GraphBuilder, x: Value | None, index: int) -> Value | None:
    if x is None:
        return None
    return reshape(g, g.op("slice", x, axis=0, start=index, stop=index + 1), x.type.shape[1:])

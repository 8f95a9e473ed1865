"""A table of embeddings made from the spelling of its entries, when a profile is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, f32
from wpk.ops.operator import Array, Cost, Dims, Operator, attr, make, operand, operator
from wpk.ops.rope import Rope
from wpk.ops.scalars import gelu_tanh64

AT_ONCE = 2048  # characters that are encoded together: some 0.3 GB of intermediate results at a width of 5000


@operator("character_table", version=1)
class CharacterTable(Operator):
    """Row i: the characters of entry i through one encoder layer, averaged, projected; plus a vector of i's kind.

    characters [v, c] i32: ids below n - 1, and n - 1 from an entry's end on; embedding [n, d] is multiplied by sqrt(d);
    projection [p, d]; kinds [v] i32 and kind_vectors [m, p]; all weights, the others f32. y [v, p] f32.

    The layer is T5Gemma's encoder layer (Zhang et al. 2025): RMSNorm with 1 + weight before and after each of attention
    and feed-forward, x + norm(f(norm(x))); attention both ways over the entry's characters, with rotary positions
    (`theta`), scores multiplied by `scale` and bounded, softcap tanh(s / softcap); feed-forward
    down(gelu_tanh(gate x) * up x); one more RMSNorm at the end. Entries are taken by length, so that none is padded,
    and some at a time: what is held beside the table does not grow with it. It has no body: a table is made once.
    """

    characters = operand("v c", dtypes=DType.I32, weight=True)
    embedding = operand("n d", weight=True)
    query = operand("w d", weight=True)
    key = operand("w d", weight=True)
    value = operand("w d", weight=True)
    output = operand("d w", weight=True)
    before_attention = operand("d", weight=True)
    after_attention = operand("d", weight=True)
    before_feed_forward = operand("d", weight=True)
    after_feed_forward = operand("d", weight=True)
    gate = operand("f d", weight=True)
    up = operand("f d", weight=True)
    down = operand("d f", weight=True)
    last = operand("d", weight=True)
    projection = operand("p d", weight=True)
    kinds = operand("v", dtypes=DType.I32, weight=True)
    kind_vectors = operand("m p", weight=True)
    heads: int = attr()
    scale: float = attr()
    softcap: float = attr(50.0)
    theta: float = attr(10000.0)
    eps: float = attr(1e-6)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.heads < 1 or dims["w"] % (2 * self.heads):
            wanted = "that divide the rows of `query` into even parts"
            raise GraphError("character_table: heads", wanted=wanted, found=f"{self.heads} of {dims['w']} rows")
        return (f32(dims["v"], dims["p"]),)

    def cost(self, *types: Type) -> Cost:
        return Cost({})

    def meaning(self, characters: Array, embedding: Array, *rest: Array) -> Array:
        *layer, projection, kinds, kind_vectors = rest
        pad, table = len(embedding) - 1, embedding * np.sqrt(embedding.shape[1])
        ids, which = np.unique(np.clip(np.asarray(characters, np.int64), 0, pad), axis=0, return_inverse=True)
        spelled = np.zeros((len(ids), len(projection)), np.float32)  # each spelling once: made-up ones are few
        for rows, length in _groups(ids, pad):
            if length:
                encoded = self._encoded(table[ids[rows, :length].reshape(-1)], length, *layer)
                spelled[rows] = encoded.reshape(len(rows), length, -1).mean(axis=1) @ projection.T
        made = np.empty((len(which), len(projection)), np.float32)
        for start in range(0, len(made), AT_ONCE):
            piece = slice(start, start + AT_ONCE)
            kind = np.clip(np.asarray(kinds[piece], np.int64), 0, len(kind_vectors) - 1)
            made[piece] = spelled[which.reshape(-1)[piece]] + kind_vectors[kind]
        return made

    def _encoded(
        self, x: Array, length: int, query: Array, key: Array, value: Array, output: Array, before_attention: Array,
        after_attention: Array, before_feed_forward: Array, after_feed_forward: Array, gate: Array, up: Array,
        down: Array, last: Array,
    ) -> Array:  # fmt: skip
        """Of [entries * length, d]: entries one after the other, so that products are of matrices."""
        normal = self._norm(x, before_attention)
        q, k, v = (normal @ matrix.T for matrix in (query, key, value))
        x = x + self._norm(self._attention(q, k, v, length) @ output.T, after_attention)
        normal = self._norm(x, before_feed_forward)
        x = x + self._norm((gelu_tanh64(normal @ gate.T) * (normal @ up.T)) @ down.T, after_feed_forward)
        return self._norm(x, last)

    def _norm(self, x: Array, weight: Array) -> Array:
        return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.eps) * (1.0 + weight))

    def _attention(self, query: Array, key: Array, value: Array, length: int) -> Array:
        by_head = (len(query) // length, length, self.heads, query.shape[1] // self.heads)
        q, k, v = (x.reshape(by_head) for x in (query, key, value))
        turn = make(Rope, {"theta": self.theta})
        for x in (q, k):
            for position in range(length):
                x[:, position] = turn.meaning(x[:, position], position)
        scores = np.einsum("eqhd,ekhd->ehqk", q, k) * self.scale
        scores = self.softcap * np.tanh(scores / self.softcap)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("ehqk,ekhd->eqhd", weights, v).reshape(query.shape)


def _groups(ids: Array, pad: int) -> Iterator[tuple[Array, int]]:
    """Entries of one length that are encoded together, and that length."""
    ended = ids == pad
    lengths = np.where(ended.any(axis=1), ended.argmax(axis=1), ids.shape[1])
    for length in np.unique(lengths).tolist():
        entries, count = np.flatnonzero(lengths == length), max(1, AT_ONCE // max(length, 1))
        for start in range(0, len(entries), count):
            yield entries[start : start + count], length

"""Transducers for speech recognition (RNN-T, Graves 2012, arXiv 1211.3711): what turns encoder frames into symbols."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated

from pydantic import Field

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32
from wpk.ops.rules import Integer, record
from wpk.zoo.component import Built, Component, Size, component, concat, reshape
from wpk.zoo.tensors import Tensors

_Few = Annotated[int, Field(strict=True, ge=1, le=64)]
_State = list[tuple[Value, Value]]  # (h, c) of each layer
_Layers = list[tuple[Value, ...]]  # weights of each layer, as `lstm` takes them


@component("rnnt_greedy")
class RnntGreedy(Component):
    """Greedy RNN-T decoding of one encoder frame f32[d]: the symbols i32[max_symbols] that it adds to the transcript.

    The predictor is an embedding [vocab_size + 1, units] and `layers` LSTM layers over the symbols so far; the joint
    network gives joint_net.2(relu(enc(frame) + pred(g))) for its last output g. While the greatest of these vocab_size
    + 1 numbers is not the blank (the last id), it is emitted and fed to the predictor, at most `max_symbols` times a
    frame. Outputs: symbols, the blank's id where nothing was emitted; count i32[] of those emitted; is_blank i32[], 1
    where already the first decision was blank.

    start_steps: zero vectors that the predictor has read, from a state of zeros, when a session begins: 1 in NeMo's
    greedy decoding, 2 where `predict(y=None, add_sos=True)` starts it. No number is biased before a decision: a bias
    towards punctuation in long pauses, which some servers add, is not part of this.

    Parameters as NeMo publishes them: rnnt_decoder.prediction.embed.weight, LSTM weights
    rnnt_decoder.prediction.dec_rnn.lstm.{weight_ih, weight_hh, bias_ih, bias_hh}_l{LAYER} (gates i, f, g, o),
    rnnt_joint.{enc, pred, joint_net.2}.{weight, bias}. State a session: h and c of each layer, f32[units].
    """

    vocab_size: Size
    units: Size
    joint_units: Size
    layers: _Few = 2
    max_symbols: _Few = 10
    start_steps: _Few = 1

    def outputs(self) -> tuple[str, ...]:
        return ("symbols", "count", "is_blank")

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Built:
        (frame,) = inputs
        if len(frame.type.shape) != 1:
            raise GraphError("rnnt_greedy reads one encoder frame", wanted="f32[d]", found=frame.type)
        embedding, layers = self._predictor(tensors)
        enc, pred, out = (
            self._linear(tensors, f"rnnt_joint.{name}", rows, columns)
            for name, rows, columns in (
                ("enc", self.joint_units, frame.type.size),
                ("pred", self.joint_units, self.units),
                ("joint_net.2", self.vocab_size + 1, self.joint_units),
            )
        )
        blank = g.op("full", shape=(), value=self.vocab_size, dtype="i32")
        state = self._held(g, layers)
        encoded, symbols = g.op("linear", frame, *enc), []
        # A session that has met the blank has its state from before, hence the same numbers and the blank again in
        # every round that is left: the decision alone is its predicate, and its symbols fill up with blanks.
        for i in range(self.max_symbols):
            with g.scope(f"symbol.{i}"):
                joint = g.op("relu", g.op("add", g.op("linear", state[-1][0], *pred), encoded))
                symbol = g.op("argmax", g.op("linear", joint, *out))
                symbols.append(reshape(g, symbol, (1,)))
                ended = g.op("equal", symbol, blank)
                following = self._step(g, g.op("embedding", symbol, embedding), state, layers)
                state = [
                    (g.op("select", ended, old_h, h), g.op("select", ended, old_c, c))
                    for (old_h, old_c), (h, c) in zip(state, following, strict=True)
                ]
        for layer, (h, c) in enumerate(state):
            g.update(self.state(f"{layer}.h"), h)
            g.update(self.state(f"{layer}.c"), c)
        return self._summary(g, concat(g, symbols, axis=0))

    def _predictor(self, tensors: Tensors) -> tuple[Value, _Layers]:
        path, gates = "rnnt_decoder.prediction", 4 * self.units
        shapes = {
            "weight_ih": (gates, self.units),
            "weight_hh": (gates, self.units),
            "bias_ih": (gates,),
            "bias_hh": (gates,),
        }
        layers = [
            tuple(tensors.get(f"{path}.dec_rnn.lstm.{name}_l{layer}", f32(*shape)) for name, shape in shapes.items())
            for layer in range(self.layers)
        ]
        return tensors.get(f"{path}.embed.weight", f32(self.vocab_size + 1, self.units)), layers

    def _linear(self, tensors: Tensors, name: str, rows: int, columns: int) -> tuple[Value, Value]:
        return tensors.get(f"{name}.weight", f32(rows, columns)), tensors.get(f"{name}.bias", f32(rows))

    def _step(self, g: GraphBuilder, x: Value, state: _State, layers: _Layers) -> _State:
        following = []
        for (h, c), weights in zip(state, layers, strict=True):
            h, c = g.op("lstm", x, h, c, *weights)
            following.append((h, c))
            x = h
        return following

    def _held(self, g: GraphBuilder, layers: _Layers) -> _State:
        """The predictor's state; a session's first is computed from the weights when they are loaded."""
        zeros = g.op("full", shape=(self.units,), value=0.0)
        initial: _State = [(zeros, zeros)] * self.layers
        for _ in range(self.start_steps):
            initial = self._step(g, zeros, initial, layers)
        return [
            (
                g.register(self.state(f"{layer}.h"), f32(self.units), h),
                g.register(self.state(f"{layer}.c"), f32(self.units), c),
            )
            for layer, (h, c) in enumerate(initial)
        ]

    def _summary(self, g: GraphBuilder, symbols: Value) -> Built:
        def summary(_: SimpleNamespace, *symbols: Integer) -> dict[str, Integer]:
            emitted = [symbol != self.vocab_size for symbol in symbols]
            return {"count": sum(emitted), "is_blank": symbols[0] == self.vocab_size}

        program = record(summary, state=(), inputs=[f"symbol{i}" for i in range(self.max_symbols)])
        counted, _ = program.apply(g, symbols)
        return {"symbols": symbols, **counted}

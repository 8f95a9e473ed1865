"""Greedy RNN-T decoding: against a loop over torch's own modules, between sessions and slots, and as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from wpk import registry
from wpk.ir.errors import SpecError
from wpk.ops.evaluate import Reference
from wpk.registry.settings import Settings
from wpk.zoo.build import build_graph, expected_tensors, parameter_count, state_bytes
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]
WIDTH, VOCABULARY, UNITS, JOINT, LAYERS = 16, 12, 24, 20, 2
BLANK, FRAMES, CAP = VOCABULARY, 64, 10
PORTS = {"symbols": f"i32[{CAP}]", "count": "i32[]", "is_blank": "i32[]"}


def spec(width: int = WIDTH, steps_per_beat: int = 1, **fields: Any) -> ModelSpec:
    part = {"kind": "rnnt_greedy", "vocab_size": VOCABULARY, "units": UNITS, "joint_units": JOINT, **fields}
    data: dict[str, Any] = {
        "name": "rnnt", "version": 1, "task": "asr", "description": "a small recognition head",
        "licence": {"code": "MIT", "weights": "MIT"}, "weights": {"synthetic": 1},
        "clock": {"sample_rate": 25, "samples_per_step": 2, "steps_per_beat": steps_per_beat},
        "ports": {
            "inputs": {"frame": {"type": f"f32[{width}]", "kind": "features"}},
            "outputs": {n: {"type": t, "kind": "tokens", "from": f"rnnt_greedy.{n}"} for n, t in PORTS.items()},
        },
        "components": [part], "tensors": {"rnnt_greedy.*": "stt_model.*"},
    }  # fmt: skip
    return ModelSpec.from_data(data)


# --- against torch ------------------------------------------------------------------------------------------------
class Head:
    """torch's modules under the published names, with random weights, and greedy decoding written out.

    One unit of the joint network argues for the blank as loudly as a frame's first number, one against it as the
    second; so that frames can be made that emit nothing, something, or more than may be emitted.
    """

    def __init__(self, folder: Path) -> None:
        torch = pytest.importorskip("torch")
        from safetensors.torch import save_file

        nn = torch.nn
        torch.set_num_threads(1)  # of modules as small as these, more are slower
        torch.manual_seed(4)
        lstm = nn.LSTM(UNITS, UNITS, LAYERS)
        embed, enc, pred = nn.Embedding(VOCABULARY + 1, UNITS), nn.Linear(WIDTH, JOINT), nn.Linear(UNITS, JOINT)
        out = nn.Sequential(nn.ReLU(), nn.Dropout(), nn.Linear(JOINT, VOCABULARY + 1))
        decoder = nn.ModuleDict({"embed": embed, "dec_rnn": nn.ModuleDict({"lstm": lstm})})
        joint = nn.ModuleDict({"enc": enc, "pred": pred, "joint_net": out})
        model = nn.ModuleDict(
            {"rnnt_decoder": nn.ModuleDict({"prediction": decoder}), "rnnt_joint": joint}
        ).eval()  # fmt: skip
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                spread = 0.2 if parameter.ndim == 1 else 0.35 if "enc" in name else 1.5 if "embed" in name else 0.7
                parameter.copy_(torch.randn(parameter.shape) * spread)
            embed.weight[BLANK], enc.weight[:, :2] = 0.0, 0.0
            for unit, sign in ((0, 1.0), (1, -1.0)):
                enc.weight[unit], enc.bias[unit], pred.weight[unit], pred.bias[unit] = 0.0, 0.0, 0.0, 0.0
                enc.weight[unit, unit] = 1.0
                out[2].weight[:, unit] = 0.0
                out[2].weight[BLANK, unit] = sign
        save_file({f"stt_model.{k}": v.contiguous() for k, v in model.state_dict().items()}, folder / "a.safetensors")
        self.torch, self.lstm, self.embed, self.enc, self.pred, self.out = torch, lstm, embed, enc, pred, out
        self.margin = float("inf")  # least distance of the greatest number from the next, of all decisions

    def start(self, steps: int) -> tuple[Any, Any]:
        """The predictor's last output and its state after that many zero vectors."""
        with self.torch.no_grad():
            outputs, state = self.lstm(self.torch.zeros(steps, 1, UNITS))
        return outputs[-1, 0], state

    def decode(self, frames: Array, start_steps: int) -> list[list[int]]:
        """The symbols of each frame."""
        torch, (g, state), found = self.torch, self.start(start_steps), []
        with torch.no_grad():
            for frame in torch.from_numpy(frames):
                found.append([])
                while True:
                    scores = self.out(self.enc(frame) + self.pred(g))
                    best = scores.topk(2)
                    self.margin = min(self.margin, float(best.values[0] - best.values[1]))
                    symbol = int(best.indices[0])
                    if symbol == BLANK:
                        break
                    found[-1].append(symbol)
                    outputs, state = self.lstm(self.embed(torch.tensor([[symbol]])), state)
                    g = outputs[0, 0]
                    if len(found[-1]) == CAP:
                        break
        return found


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Head, Path]:
    folder = tmp_path_factory.mktemp("head")
    return Head(folder), folder


def utterance(seed: int) -> Array:
    """f32[frames, width]: pauses, speech, and a few frames in which no blank can win."""
    rng = np.random.default_rng(seed)
    frames = rng.standard_normal((FRAMES, WIDTH)).astype(np.float32)
    frames[:, :2] = 0.0
    kind = rng.random(FRAMES)
    frames[:, 0] = np.where(kind < 0.35, 30.0, 6.0)
    frames[kind > 0.92, :2] = 0.0, 30.0
    return frames


def heard(outputs: dict[str, Array]) -> list[int]:
    """The symbols of a frame; the other outputs must say the same."""
    count = int(outputs["count"].item())
    symbols = outputs["symbols"].reshape(-1).tolist()
    assert symbols[count:] == [BLANK] * (CAP - count) and BLANK not in symbols[:count]
    assert int(outputs["is_blank"].item()) == int(count == 0)
    return symbols[:count]


@pytest.mark.oracle
@pytest.mark.parametrize("start_steps", [1, 2])
def test_the_symbols_are_those_of_a_loop_over_torch(start_steps: int, head: Any, shared: Settings) -> None:
    original, folder = head
    given = [utterance(seed) for seed in range(3)]
    wanted = [original.decode(frames, start_steps) for frames in given]
    assert original.margin > 1e-4, "no rounding may turn a decision"
    model = spec(start_steps=start_steps)
    with registry.load(model, capacity=4, target="cpu", threads=1, weights=folder, where=shared) as cohort:
        sessions = [cohort.join() for _ in given]
        found: list[list[list[int]]] = [[] for _ in given]
        for frame in zip(*given, strict=True):
            made = cohort.beat({s: {"frame": x} for s, x in zip(sessions, frame, strict=True)})
            for session, symbols in zip(sessions, found, strict=True):
                symbols.append(heard(made[session]))
    assert found == wanted
    # It is worth comparing: frames with nothing, with something and with all that may be, in each session.
    for symbols in wanted:
        counts = [len(s) for s in symbols]
        assert counts.count(0) > 10 and sum(0 < c < CAP for c in counts) >= 5 and counts.count(CAP) > 2
        assert len({s for frame in symbols for s in frame}) > 6
    assert wanted[0] != original.decode(given[0], 3 - start_steps), "how often the predictor starts must matter"


@pytest.mark.oracle
@pytest.mark.parametrize("start_steps", [1, 2])
def test_a_session_begins_with_the_state_after_zero_vectors(start_steps: int, head: Any) -> None:
    original, _ = head
    _, (h, c) = original.start(start_steps)
    weights = {f"stt_model.rnnt_decoder.prediction.dec_rnn.lstm.{k}": v for k, v in original.lstm.named_parameters()}
    graph = build_graph(spec(start_steps=start_steps))
    given = {p.name: weights[p.name].detach().numpy() if p.name in weights else np.zeros(p.value.type.shape)
             for p in graph.weights}  # fmt: skip
    state = Reference(graph, given).state
    for layer in range(LAYERS):
        np.testing.assert_allclose(state[f"rnnt_greedy.{layer}.h"], h[layer, 0].numpy(), atol=1e-6)
        np.testing.assert_allclose(state[f"rnnt_greedy.{layer}.c"], c[layer, 0].numpy(), atol=1e-6)
    assert np.abs(state["rnnt_greedy.1.c"]).max() > 0.01


# --- between slots ------------------------------------------------------------------------------------------------
def test_a_session_gets_the_same_symbols_in_any_slot_and_company(head: Any, shared: Settings) -> None:
    _, folder = head
    frames, model, rng = utterance(0)[:24], spec(), np.random.default_rng(9)
    with registry.load(model, capacity=4, target="cpu", threads=1, weights=folder, where=shared) as cohort:
        session = cohort.join()
        alone = [heard(cohort.beat({session: {"frame": frame}})[session]) for frame in frames]
        cohort.leave(session)
        again = cohort.join()  # in a slot that was used
        assert [heard(cohort.beat({again: {"frame": frame}})[again]) for frame in frames] == alone
    assert len({tuple(symbols) for symbols in alone}) > 5
    with registry.load(model, capacity=8, target="cpu", threads=2, weights=folder, where=shared) as cohort:
        others = [cohort.join() for _ in range(5)]
        session = cohort.join()
        for step, frame in enumerate(frames):
            if step == 9:
                cohort.leave(others.pop(0))
                others += [cohort.join(), cohort.join()]
            garbage = rng.standard_normal((len(others), WIDTH)).astype(np.float32)
            garbage[0] *= np.float32(1e37)  # so that the joint network overflows
            inputs = {other: {"frame": x} for other, x in zip(others, garbage, strict=True)}
            assert heard(cohort.beat(inputs | {session: {"frame": frame}})[session]) == alone[step], step


def test_a_beat_of_two_steps_gives_what_its_steps_give(head: Any, shared: Settings) -> None:
    original, folder = head
    frames = utterance(1)[:32]
    model = spec(steps_per_beat=2)
    with registry.load(model, capacity=1, target="cpu", threads=1, weights=folder, where=shared) as cohort:
        session, found = cohort.join(), []
        for pair in frames.reshape(16, 2, WIDTH):
            made = cohort.beat({session: {"frame": pair}})[session]
            found += [heard({port: value.reshape(2, -1)[step] for port, value in made.items()}) for step in range(2)]
    assert found == original.decode(frames, 1)


# --- as data ------------------------------------------------------------------------------------------------------
def test_the_published_head_has_its_names_and_sizes() -> None:
    model = spec(width=1024, vocab_size=1024, units=640, joint_units=640, start_steps=2)
    lstm, joint = "stt_model.rnnt_decoder.prediction.dec_rnn.lstm", "stt_model.rnnt_joint"
    layers = {f"{lstm}.weight_{part}_l{layer}": (2560, 640) for part in ("ih", "hh") for layer in (0, 1)}
    layers |= {f"{lstm}.bias_{part}_l{layer}": (2560,) for part in ("ih", "hh") for layer in (0, 1)}
    decoder = layers | {"stt_model.rnnt_decoder.prediction.embed.weight": (1025, 640)}
    others = {
        f"{joint}.pred.weight": (640, 640), f"{joint}.pred.bias": (640,),
        f"{joint}.enc.weight": (640, 1024), f"{joint}.enc.bias": (640,),
        f"{joint}.joint_net.2.weight": (1025, 640), f"{joint}.joint_net.2.bias": (1025,),
    }  # fmt: skip
    found = expected_tensors(model)
    assert {name: type.shape for name, type in found.items()} == decoder | others and len(found) == 15
    assert sum(found[name].size for name in decoder) == 7_219_840
    assert sum(found[name].size for name in others) == 1_723_265
    assert parameter_count(model) == 7_219_840 + 1_723_265
    assert state_bytes(build_graph(model)) == {"fixed": 4 * 4 * 640, "per_step": 0}


def test_what_is_no_frame_is_refused() -> None:
    data = spec().to_data()
    data["ports"]["inputs"]["frame"]["type"] = "f32[2,16]"
    with pytest.raises(SpecError, match=r"reads one encoder frame; wanted f32\[d\]; found f32\[2,16\]"):
        build_graph(ModelSpec.from_data(data))
    with pytest.raises(SpecError, match="max_symbols"):
        spec(max_symbols=0)

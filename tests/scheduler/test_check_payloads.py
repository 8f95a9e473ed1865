"""Payloads that a body could not execute safely are refused, word by word; so are values of another dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np
import pytest

from tests.scheduler.fuzz import Draft, words_off
from tests.scheduler.test_check import Hand, assemble, failed
from wpk.ops import LIBRARY
from wpk.ops.legal import is_permutation
from wpk.ops.payload import encode_parameter
from wpk.scheduler.program import DTYPES, Program, Role

ROLES = {"i": Role.INPUT, "w": Role.WEIGHT, "s": Role.STATE, "o": Role.OUTPUT}


@dataclass(frozen=True)
class Case:
    """A phase: parameters, then its operands: a letter of ROLES each, - for an absent one; those not f32 by place."""

    op: str
    parameters: tuple[int | float, ...]
    operands: str
    parts: int = 1
    dtypes: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.op

    def program(self) -> Program:
        """The phase alone; the storage of its operands is what its parameters say."""
        parameters = tuple(encode_parameter(p) for p in self.parameters)
        cls, count = LIBRARY.get(self.op), len(self.operands)
        extents = cls.extents((*parameters, *[0] * (9 - len(parameters))), count)
        names = [None if r == "-" else f"v{j}@0" if r in "io" else f"v{j}" for j, r in enumerate(self.operands)]
        for result, operand in cls.alias.items():
            names[cls.writes(count)[result]] = names[operand]
        values = {
            name: (ROLES[role], self.dtypes.get(j, "f32"), extents[j])
            for j, (name, role) in enumerate(zip(names, self.operands, strict=True)) if name
        }  # fmt: skip
        hand = Hand(self.op, 0, tuple(names), (*parameters, *[0] * (9 - len(parameters))), self.parts)
        return assemble(values, [hand], slots=2, blocks=2)


I32, FLAG, BF16 = "i32", "bool", "bf16"
CASES = [
    Case("tanh", (300,), "io", 2),
    Case("clamp", (300, -1.0, 1.0), "io", 2),
    Case("affine", (3, 2.0, 1.0), "io"),
    Case("leaky_relu", (3, 0.5), "io"),
    Case("add", (12, 12, 4, 0), "iio"),
    Case("add", (12, 12, 12, 1), "iio", 1, {0: I32, 1: I32, 2: I32}),
    Case("less", (12, 1, 12, 0), "iio", 1, {2: FLAG}),
    Case("logical_and", (4, 4, 4, 1), "iio", 1, {0: FLAG, 1: FLAG, 2: FLAG}),
    Case("increment", (4, 1), "io", 1, {0: I32, 1: I32}),
    Case("remainder", (4, 7), "io", 1, {0: I32, 1: I32}),
    Case("logical_not", (4,), "io", 1, {0: FLAG, 1: FLAG}),
    Case("select", (4, 4), "iiio", 1, {0: FLAG}),
    Case("select", (4, 1), "iiio", 1, {0: FLAG, 1: I32, 2: I32, 3: I32}),
    Case("cast", (5, 2, 0), "io", 1, {0: I32}),
    Case("cast", (6, 0, 1), "io", 1, {1: "bf16"}),
    Case("gather", (5, 3, 2), "iio", 1, {1: I32}),
    Case("embedding", (5, 3, 2, 0), "iwo", 1, {0: I32}),
    Case("embedding", (5, 70, 2, 1), "iwo", 2, {0: I32, 1: BF16}),
    Case("matmul", (2, 8, 4, 2, 12, 0, 20, 1, 1), "iww--o", 2),
    Case("matmul", (1, 8, 8, 0, 8, 5, 20, 0, 7), "iwwiio", 2),
    Case("tiled_matmul", (24, 130, 2, 0, 1, 1, 2, 1e-5), "iwwio", 2, {0: BF16, 1: BF16, 4: BF16}),
    Case("tiled_matmul", (24, 130, 2, 3, 0, 0, 0, 0.0), "iw--o", 6, {0: BF16, 1: BF16}),
    Case("tf32_matmul", (24, 33, 3, 5, 12, 81, 1, 64, 3), "iwwio", 3),
    Case("tf32_matmul", (24, 33, 2, 130, 4, 549, 0, 64, 0), "iw--o", 6),
    Case("layer_norm", (3, 8, 1e-5), "iw-o", 3),
    Case("layer_norm", (3, 8, 1e-5), "iwwo", 3),
    Case("rms_norm", (3, 8, 1e-5, 1.0), "iwo", 3),
    Case("group_norm", (3, 8, 2, 1e-5), "iwwo", 3),
    Case("rms_norm_terms", (300, 2, 1.0), "iwiooo", 3, {4: BF16}),
    Case("rms_norm_terms", (300, 0, 0.0), "iw-ooo", 3, {4: BF16}),
    Case("gated_rms_norm", (12, 3, 1e-5, 1), "iiwo", 3, {3: BF16}),
    Case("sum", (3, 8), "io", 3),
    Case("argmax", (3, 8), "io", 3, {1: I32}),
    Case("argmax_projection", (24, 130, 2, 2, 1e-5), "iwio", 2, {0: BF16, 1: BF16}),
    Case("argmax_merge", (5,), "io", 1, {1: I32}),
    Case("scalar_program", (3, 9, 2, 4, 1, 0, 0, 0), "wsi---o", 1, {0: I32, 1: I32, 2: I32, 6: I32}),
    Case("softmax", (3, 8), "io", 3),
    Case("lstm_cell", (70,), "isos", 2),
    Case("gru_cell", (70,), "iiio", 2),
    Case("slice", (2, 6, 1, 3), "io"),
    Case("concat", (2, 2, 3, 4), "iio"),
    Case("concat", (1, 6, 1, 2, 3, 4, 5, 6), "iiiiiio"),
    Case("transpose", (1, 2, 3, 4, 0, 1, 8, 2), "io"),
    Case("pad", (4, 2, 1, 2, 2), "io"),
    Case("copy", (4,), "io", 1, {0: I32, 1: I32}),
    Case("max_pool1d", (6, 2, 3, 2), "io"),
    Case("magnitude", (2, 5, 1, 0.0), "io", 2),
    Case("overlap_add", (8, 3), "iioo"),
    Case("overlap_add_frames", (5, 8, 2, 3), "io"),
    Case("depthwise_window", (9, 70, 3, 3, 3, 1, 1), "iwwo", 2),
    Case("ring_shift", (4, 2, 70), "iio", 2),
    Case("attention", (4, 8, 5, 2, 6, 0.3), "issio", 2, {3: I32}),
    Case("relative_attention", (5, 2, 8, 0.3), "iswio", 2, {3: I32}),
    Case("conv2d_window", (7, 8, 4, 6, 2, 3 | 3 << 16, 3 | 4 << 16, 2 | 2 << 8, 1), "iww-o", 12),
    Case("conv2d_window", (7, 8, 4, 4, 4, 3 | 3 << 16, 3 | 4 << 16, 2 | 2 << 8, 1), "iwwio", 12, {3: I32}),
    Case("mamba2_split", (8, 16, 8), "iswos", 4, {1: BF16, 4: BF16}),
    Case("mamba2_projection", (32, 130, 2, 8, 16, 8, 2, 1e-5), "iwiwsos", 2, {0: BF16, 1: BF16, 4: BF16, 6: BF16}),
    Case("mamba2_step", (4, 80, 2, 40), "isos", 8),
    Case("qkv_split", (4, 2, 8, 5, 0.3), "isios", 8, {1: BF16, 2: I32, 3: BF16, 4: BF16}),
    Case(
        "qkv_projection", (130, 2, 4, 2, 8, 5, 2, 1e-5, 0.3), "iwisios", 2,
        {0: BF16, 1: BF16, 3: BF16, 4: I32, 5: BF16, 6: BF16},
    ),
    Case("attention_parts", (4, 2, 8, 5, 3), "isio", 3, {0: BF16, 1: BF16, 2: I32}),
    Case("attention_merge", (4, 8, 3, 1), "io", 4, {1: BF16}),
    Case("rope", (3, 8, 0, 0.5, 0.0), "iio", 3, {1: I32}),
    Case("random_uniform", (300, 1), "iio", 2, {0: I32, 1: I32}),
    Case("top_p", (3, 8, 0.05), "io", 3),
    Case("embedding_sum", (5, 3, 70, 2, 1), "iwo", 2, {0: I32}),
    Case("selected_linear", (3, 20, 4), "iwio", 2, {2: I32}),
    Case("residual_quantise", (5, 3, 4, 2, 1), "iwwoo", 1, {3: I32}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_word_and_no_dtype_of_a_payload_may_change(case: Case) -> None:
    program = case.program()
    assert failed(program) == {}
    semantic, accepted = LIBRARY.get(case.op).semantic_parameters, []
    for k, old in enumerate(program.payloads["parameter"][0].tolist()):
        for word in words_off(old):
            draft = Draft(program)
            draft.payloads["parameter"][0, k] = word
            if word not in semantic.get(k, ()) and not failed(draft.bytes()):
                accepted.append(f"parameter {k}: {old} -> {word}")
    for v, old in enumerate(program.values["dtype"].tolist()):
        for dtype in range(len(DTYPES)):
            draft = Draft(program)
            draft.values["dtype"][v] = dtype
            if dtype != old and not failed(draft.bytes()):
                accepted.append(f"value {v}: {DTYPES[old]} -> {DTYPES[dtype]}")
    assert not accepted


def test_every_operator_with_a_body_has_a_case() -> None:
    """One of each family: of those that share a `legal` and differ in a scalar function, any."""
    bodies = [cls for cls in LIBRARY if LIBRARY.targets(cls.name, cls.version)]
    covered = {LIBRARY.get(case.op).legal.__func__ for case in CASES} | {LIBRARY.get("cache_append").legal.__func__}
    assert not [cls.name for cls in bodies if cls.legal.__func__ not in covered]


# All else of these fits: storage is what the parameters say.
UNSAFE = {
    "a source stride of a transpose beyond its operand": Case("transpose", (1, 1, 3, 4, 0, 0, 1, 1 << 28), "io"),
    "a second operand by k2 alone": Case("matmul", (1, 3, 8, 0, 8, 5, 20, 0, 0), "iw---o", 2),
    "one operand more than there are": Case("concat", (2, 3, 3, 4, 7), "iio"),
    "a negative code of a dtype": Case("cast", (5, -3, 0), "io", 1, {0: "bf16"}),
    "equal operands smaller than the result": Case("add", (12, 4, 4, 0), "iio"),
    "a dilation that leaves the operand": Case("depthwise_window", (9, 4, 3, 3, 3, 10**6, 0), "iwwo"),
    "a negative window": Case("max_pool1d", (6, 2, -1, 3), "io"),
    "an activation that is none": Case("matmul", (1, 8, 8, 0, 8, 0, 20, 99, 0), "iw---o", 2),
    "a mirror of more rows than there are": Case("pad", (2, 2, 2, 0, 2), "io"),
    "groups that do not divide the channels": Case("group_norm", (3, 8, 3, 1e-5), "iwwo", 3),
    "more query heads than scratch has room for": Case("attention", (514, 1, 5, 2, 1, 0.3), "issio", 2, {3: I32}),
    "a scale that is no number": Case("attention", (4, 8, 5, 2, 6, float("nan")), "issio", 2, {3: I32}),
    "bounds in the wrong order": Case("clamp", (3, 1.0, -1.0), "io"),
    "rows beyond the hop": Case("overlap_add", (8, 9), "iioo"),
    "groups of no channel": Case("conv2d_window", (7, 8, 4, 6, 3, 3 | 3 << 16, 3 | 4 << 16, 257, 1), "iww-o", 12),
    "a root of a negative number": Case("rms_norm", (3, 8, -1.0, 0.0), "iwo", 3),
}  # fmt: skip


@pytest.mark.parametrize("what", UNSAFE)
def test_what_a_body_could_not_execute_is_refused(what: str) -> None:
    found = failed(UNSAFE[what].program())
    assert set(found) == {"operators"} and "wanted" in found["operators"]


def test_a_result_of_another_dtype_is_refused() -> None:
    found = failed(Case("tanh", (3,), "io", 1, {1: I32}).program())
    assert set(found) == {"references"} and "is i32, the operator wants f32" in found["references"]
    assert set(failed(Case("cast", (3, 2, 0), "io").program())) == {"references"}  # the source's code is i32's
    assert set(failed(Case("concat", (1, 2, 3, 4), "iio", 1, {1: I32}).program())) == {"references"}


def test_the_strides_of_a_transpose_are_those_of_a_permutation() -> None:
    for shape in ((2, 3, 4, 5), (1, 3, 1, 2), (1, 1, 1, 1)):
        strides = [0 if n == 1 else int(np.prod(shape[i + 1 :])) for i, n in enumerate(shape)]
        for axes in permutations(range(4)):
            assert is_permutation([shape[a] for a in axes], [strides[a] for a in axes])
    for sizes, steps in (((2, 3), (3, 2)), ((2, 3), (-3, 1)), ((2, 3), (0, 1)), ((0, 3), (3, 1)), ((1, 3), (7, 1))):
        assert not is_permutation(sizes, steps)

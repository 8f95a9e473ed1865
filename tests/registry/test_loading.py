"""Weights reach the arenas as the program wants them, or are refused by name."""

import numpy as np
import pytest

from tests.zoo.specs import small
from wpk.ir.errors import WeightsError
from wpk.ops import LIBRARY
from wpk.ops.requirements import Selection
from wpk.registry.formats import TensorInfo, TensorSet
from wpk.registry.loading import fill_arenas
from wpk.scheduler.compile import Compiled, compile_graph
from wpk.scheduler.target import find_target
from wpk.zoo.build import build_graph, expected_tensors
from wpk.zoo.spec import ModelSpec

SPEC = ModelSpec.from_data(small())


class Tensors(TensorSet):
    """Ones, and one tensor as given."""

    def __init__(self, changes: dict[str, np.ndarray]) -> None:
        self.changes = changes
        self.tensors = {n: TensorInfo(t.shape, "float32") for n, t in expected_tensors(SPEC).items()}

    def _load(self, name: str) -> np.ndarray:
        return self.changes.get(name, np.ones(self.tensors[name].shape, np.float32))


def compiled() -> Compiled:
    library = Selection(SPEC.operators, LIBRARY)
    return compile_graph(build_graph(SPEC), library, find_target("cpu"), capacity=2)


NAME = next(iter(expected_tensors(SPEC)))
SHAPE = expected_tensors(SPEC)[NAME].shape


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_weights_that_are_not_finite_are_refused_by_name(value: float) -> None:
    made = compiled()
    array = np.ones(SHAPE)
    array.reshape(-1)[-1] = value
    with pytest.raises(WeightsError, match=f"tensor '{NAME}' is not finite"):
        fill_arenas(made.program, made.load, Tensors({NAME: array}))


def test_weights_of_another_shape_are_refused_by_name() -> None:
    made = compiled()
    with pytest.raises(WeightsError, match=f"tensor '{NAME}' has the wrong shape"):
        fill_arenas(made.program, made.load, Tensors({NAME: np.ones((*SHAPE, 1), np.float32)}))


def test_arenas_have_the_sizes_that_the_program_names() -> None:
    made = compiled()
    arenas, image = fill_arenas(made.program, made.load, Tensors({}))
    assert [len(a) for a in arenas] == [max(1, n) for n in made.program.arenas]
    assert len(image) == made.program.arenas[1] // 2

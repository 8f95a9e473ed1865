"""A graph builder refuses what makes no sense, and says where."""

import pytest

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, StateKind
from wpk.ir.types import Type, boolean, f32, i32, parse_type
from wpk.ops import LIBRARY
from wpk.ops.requirements import Selection


def builder(context: int = 1) -> GraphBuilder:
    return GraphBuilder("toy", Selection({}, LIBRARY), context=context)


def test_a_value_has_the_type_that_the_operator_gives_it():
    g = builder()
    y = g.op("linear", g.input("audio", f32(3, 4)), g.weight("w", f32(2, 4)))
    assert y.type == f32(3, 2)
    assert not y.weight


def test_what_is_made_of_weights_alone_is_a_weight():
    g = builder()
    assert g.op("transpose", g.weight("w", f32(2, 4)), axes=(1, 0)).weight


def test_a_shape_that_does_not_fit_names_the_place_operand_and_sizes():
    g = builder()
    with g.scope("encoder"), g.scope("0"), pytest.raises(GraphError) as caught:
        g.op("linear", g.input("audio", f32(3, 5)), g.weight("w", f32(2, 4)))
    text = str(caught.value)
    assert "toy: encoder.0" in text and "'weight'" in text and "f32[2,4]" in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: g.op("linaer", g.input("x", f32(4))), "no operator 'linaer'"),
        (lambda g: g.op("linear", g.input("x", f32(4))), "wrong number of operands"),
        (lambda g: g.op("relu", g.input("x", i32(4))), "wrong dtype"),
        (lambda g: g.op("linear", g.input("x", f32(4)), g.input("w", f32(2, 4))), "operand 'weight'"),
        (lambda g: g.op("layer_norm", g.input("x", f32(4)), g.weight("w", f32(4)), epsilon=1.0), "unknown: epsilon"),
        (lambda g: g.op("affine", g.input("x", f32(4)), scale="big", offset=0.0), "attribute 'scale'"),
    ],
)
def test_bad_applications_are_refused(make, message):
    with pytest.raises(Exception, match=message):
        make(builder())


def test_products_are_what_operators_have_that_ask_for_it():
    g = builder()
    x, w = g.input("x", f32(4)), g.weight("w", f32(4, 4))
    with g.products("tf32"):
        g.op("relu", g.op("linear", x, w))
        with g.products("f32"):
            g.op("linear", x, w)
        g.op("linear", x, w, products="f32")
        g.output("y", g.op("linear", x, w))
    g.op("linear", x, w)
    found = [node.attributes["products"] for node in g.build().nodes if node.op == "linear"]
    assert found == ["tf32", "f32", "f32", "tf32", "f32"]
    with pytest.raises(GraphError, match=r"linear: products; wanted f32 \| tf32; found f16"), g.products("f16"):
        g.op("linear", x, w)


def test_values_of_another_graph_are_refused():
    other = builder().input("x", f32(4))
    g = builder()
    g.input("a", f32(4))
    with pytest.raises(GraphError, match="not a value of this graph"):
        g.op("relu", other)


def test_names_are_declared_once():
    g = builder()
    g.input("x", f32(4))
    with pytest.raises(GraphError, match="declared twice"):
        g.input("x", f32(4))
    assert g.weight("w", f32(2)) is g.weight("w", f32(2))
    with pytest.raises(GraphError, match="declared twice"):
        g.weight("w", f32(3))


def test_a_graph_does_something_and_every_state_has_an_update():
    g = builder()
    with pytest.raises(GraphError, match="does nothing"):
        g.build()
    g.output("y", g.op("relu", g.input("x", f32(4))))
    g.register("h", f32(4))
    with pytest.raises(GraphError, match="'h' is never updated"):
        g.build()


def test_state_kinds_have_their_own_update_rules():
    g = builder(context=6)
    x = g.input("x", f32(2, 3))
    register, ring, cache = g.register("a", f32(2, 3)), g.ring("b", 5, f32(3)), g.cache("c", f32(3))
    assert (register.type, ring.type, cache.type) == (f32(2, 3), f32(5, 3), f32(6, 3))
    with pytest.raises(GraphError, match="update of register"):
        g.update("a", g.op("reshape", x, shape=(3, 2)))
    with pytest.raises(GraphError, match="update of ring"):
        g.update("b", g.op("reshape", x, shape=(3, 2)))
    with pytest.raises(GraphError, match="updated by append"):
        g.update("c", x)
    row = g.op("reshape", g.op("slice", x, axis=0, start=0, stop=1), shape=(3,))
    appended = g.append("c", row)
    assert appended.type == cache.type
    with pytest.raises(GraphError, match="appended to twice"):
        g.append("c", row)
    g.update("a", x)
    g.update("b", x)
    g.output("y", x)
    kinds = {s.name: s.kind for s in g.build().states}
    assert kinds == {
        "a": StateKind.REGISTER, "b": StateKind.RING, "c": StateKind.CACHE, "position": StateKind.REGISTER,
    }  # fmt: skip


def test_an_initial_image_must_be_a_weight_of_the_state_s_type():
    g = builder()
    with pytest.raises(GraphError, match="initial image"):
        g.register("h", f32(4), initial=g.weight("h0", f32(3)))
    with pytest.raises(GraphError, match="initial image"):
        g.register("k", f32(4), initial=g.input("x", f32(4)))


def test_a_loop_is_bounded_and_its_predicate_a_bool_scalar():
    g = builder()
    x = g.input("x", f32())
    with pytest.raises(GraphError, match="a bound"):
        g.loop(0, [x], lambda i, c: (c, c[0]))
    with pytest.raises(GraphError, match="predicate"):
        g.loop(2, [x], lambda i, c: (c, c[0]))
    (y,) = g.loop(3, [x], lambda i, c: ([g.op("add", c[0], c[0])], g.op("less", c[0], x)))
    assert y.type == x.type


def test_types_print_and_parse():
    for t in (f32(), f32(2, 3), i32(1), boolean()):
        assert parse_type(str(t)) == t
    for text in ("f32", "f64[2]", "f32[0]", "f32[a]", "f32[1"):
        with pytest.raises(GraphError):
            parse_type(text)
    with pytest.raises(GraphError):
        Type(f32().dtype, (0,))

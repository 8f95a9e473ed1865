"""The dispatch over streamed operators, made for those that a program has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wpk.kernel.cuda_library import device
from wpk.kernel.layout import CACHE_KIND, KINDS, STATE_KIND, Shape
from wpk.kernel.streamed import attention, product, state
from wpk.kernel.streamed.ring import enter


def _kind_of(names: Sequence[str]) -> Any:
    """The device function opcode -> kind, -1 where the operator is not streamed."""
    codes = {code: KINDS[name] for code, name in enumerate(names) if name in KINDS}
    lines = ["def kind_of(code):"]
    lines += [f"    if code == {code}:\n        return {kind}" for code, kind in codes.items()]
    space: dict[str, Any] = {}
    exec("\n".join([*lines, "    return -1"]), space)
    return device(space["kind_of"])


def make_consume(names: Sequence[str], shape: Shape) -> Any:
    """The device function that runs a task where its operator is streamed; the place in the ring after it."""
    kinds = frozenset(KINDS[name] for name in names if name in KINDS)
    kind_of = _kind_of(names)
    products = frozenset(k for k in kinds if k < STATE_KIND)
    multiply = product.make_consume(shape, products) if products else None
    advance = state.make_consume() if STATE_KIND in kinds else None
    attend = attention.make_consume() if CACHE_KIND in kinds else None
    task = "record, arenas, slot_lo, slot_hi, part_lo, part_hi"
    lines = [f"def consume(code, {task}, live, all_slots, base, ring):", "    kind = kind_of(code)"]
    if kinds:
        lines += ["    if kind >= 0:", "        ring = enter(ring, record)"]
    if multiply is not None:
        lines += [
            f"    if kind >= 0 and kind < {STATE_KIND}:",
            f"        return multiply(kind, {task}, all_slots, base, ring)",
        ]
    for kind, name, body in ((STATE_KIND, "advance", advance), (CACHE_KIND, "attend", attend)):
        if body is not None:
            lines += [f"    if kind == {kind}:", f"        return {name}({task}, live, base, ring)"]
    space: dict[str, Any] = {
        "kind_of": kind_of,
        "enter": enter,
        "multiply": multiply,
        "advance": advance,
        "attend": attend,
    }
    exec("\n".join([*lines, "    return ring"]), space)
    return device(space["consume"])

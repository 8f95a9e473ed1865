"""The operator bodies for the GPU: the same Python functions, their helpers rebound to what the GPU has.

A body refers to helpers by name: payload accessors, views of memory, `math32`, `vector`. Here a copy of the function
is made whose globals and closure hold the GPU's version of each: the one in `_OVERRIDES` where LLVM IR for the CPU
must be replaced, else the same source, copied in the same way. So what an operator computes is written once.

A body written for one CPU thread runs in every thread of a block, on one part of one session at a time; a part is an
independent piece by contract. Where parts are cut into chunks of elements only to suit a CPU's registers, the
constant that says how many is smaller here, mostly 1: neighbouring threads then take neighbouring elements.
"""

from __future__ import annotations

import dis
import types as python
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic
from numba.cuda.np.arrayobj import populate_array

from wpk.ir.errors import KernelError
from wpk.kernel import ptx
from wpk.kernel.layout import ORDER_ADDRESSES, PLAIN, SCRATCH_WORDS, THREADS, Shape
from wpk.ops import blockwise, math32, memory, payload, simd, vector
from wpk.ops.operator import LIBRARY

PACKAGE = "wpk."
COPIES = 6  # of 16 bytes that a thread has under way where it copies
COPIED = 4 * COPIES  # words of them

# The module constant that says how many elements a part is; on the GPU fewer: 1, or what is made at a time.
_GRAINS = {
    "wpk.ops.elementwise": ("CHUNK", 1),
    "wpk.ops.index": ("COLUMNS", 1),
    "wpk.ops.philox": ("NUMBERS_OF_A_PART", 4),
    "wpk.ops.recurrent": ("CELL_BLOCK", 1),
    "wpk.ops.streaming": ("BLOCK", 1),
    "wpk.ops.words": ("CHUNK", 1),
}
_CONSTANTS: dict[str, dict[str, int]] = {
    **{module: {name: size} for module, (name, size) in _GRAINS.items()},
    "wpk.ops.vector": {"CHUNK": SCRATCH_WORDS},
}
_CONSTANTS["wpk.ops.streaming"]["CHUNK"] = SCRATCH_WORDS

device: Callable[..., Any] = cuda.jit(device=True, forceinline=True)


# --- what every part of the kernel reads --------------------------------------------------------------------------
@device
def word(context, index):
    """A word of the context (`wpk.kernel.layout`): the same for all blocks and all beats."""
    return ptx.load_constant(context + 8 * index)


@device
def constant_32(address):
    return np.int64(ptx.load_constant_32(address))


@device
def shared_base():
    """Start of the block's shared memory, aligned to 1024 bytes, as a 32-bit address."""
    everything = cuda.shared.array(0, types.uint8)
    return np.int32((ptx.shared_address(everything) + np.int32(1023)) & np.int32(~1023))


# --- memory -------------------------------------------------------------------------------------------------------
def _view_of(element: Any) -> Any:
    """(byte address in global memory, size) -> a 1-D array that owns nothing."""
    kind = types.Array(element, 1, "C")
    width = element.bitwidth // 8

    @intrinsic
    def view(typingctx: Any, address: Any, size: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data_type = context.get_data_type(element)
            # Through the global address space, so that accesses are ld.global and not generic.
            place = builder.inttoptr(args[0], ir.PointerType(data_type, 1))
            array = context.make_array(kind)(context, builder)
            item = ir.Constant(ir.IntType(64), width)
            populate_array(
                array, data=builder.addrspacecast(place, ir.PointerType(data_type)),
                shape=cgutils.pack_array(builder, [args[1]]), strides=cgutils.pack_array(builder, [item]),
                itemsize=item, meminfo=None,
            )  # fmt: skip
            return array._getvalue()

        return kind(types.int64, types.int64), codegen

    return view


_view_f32, _view_i32, _view_i64 = _view_of(types.float32), _view_of(types.int32), _view_of(types.int64)


# --- the payload: in an order (`wpk.kernel.layout`), constant as long as its body runs ------------------------------
@device
def _present(record, operand):
    return (ptx.load_order(record + 8 + 8 * operand) >> 56) != -1


@device
def _stride(record, operand):
    return np.int64(ptx.load_order_32(record + 64 + 4 * operand)) & 0xFFFFFFFF


@device
def _address(record, arenas, operand, slot):
    return ptx.load_order(record + ORDER_ADDRESSES + 8 * operand) + slot * _stride(record, operand)


@device
def _parameter(record, index):
    return np.int64(ptx.load_order_32(record + 92 + 4 * index))


@device
def _parameter_f32(record, index):
    return ptx.load_order_f32(record + 92 + 4 * index)


# A device function may not return an array, but its body may be pasted into the caller.
@cuda.jit(device=True, inline="always")
def _operand_f32(record, arenas, operand, slot, size):
    return _view_f32(_address(record, arenas, operand, slot), size)


@cuda.jit(device=True, inline="always")
def _operand_i32(record, arenas, operand, slot, size):
    return _view_i32(_address(record, arenas, operand, slot), size)


# --- arithmetic ---------------------------------------------------------------------------------------------------
@intrinsic
def _bits_of(typingctx: Any, x: Any) -> Any:
    return types.int32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _from_bits(typingctx: Any, bits: Any) -> Any:
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _select(typingctx: Any, condition: Any, a: Any, b: Any) -> Any:
    if condition != types.boolean or a != b:
        return None

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bit = args[0]
        if bit.type.width != 1:
            bit = builder.icmp_unsigned("!=", bit, bit.type(0))
        return builder.select(bit, args[1], args[2])

    return a(condition, a, b), lower


@device
def _dot_whole(a, b, size):
    """`vector._dot_whole`: LANES chains of multiply and add, then halves onto each other."""
    sums = cuda.local.array(16, types.float32)
    for lane in range(16):
        sums[lane] = np.float32(0.0)
    x, y = _view_f32(a, size), _view_f32(b, size)
    for first in range(0, size, 16):
        for lane in range(16):
            sums[lane] += x[first + lane] * y[first + lane]
    for lane in range(8):
        sums[lane] += sums[lane + 8]
    for lane in range(4):
        sums[lane] += sums[lane + 4]
    for lane in range(2):
        sums[lane] += sums[lane + 2]
    return sums[0] + sums[1]


assert vector.LANES == 16


@device
def _thread_index():
    return np.int64(ptx.thread_index())


@device
def _thread_count():
    return np.int64(THREADS)


@device
def _divided(a, b):
    return np.int64(ptx.quotient(np.int32(a), np.int32(b)))


@device
def _wait():
    ptx.barrier()


@device
def _copy_words(target, source, words):
    """Many words under way: 16 bytes at a time where both addresses allow it."""
    held = cuda.local.array(COPIED, types.float32)
    first, size = ptx.thread_index(), np.int32(words)
    if (target | source | 4 * words) & 15 == 0:
        pieces = np.int32(size >> np.int32(2))
        while first < pieces:
            for k in range(COPIES):
                at = min(np.int32(first + np.int32(k * THREADS)), np.int32(pieces - np.int32(1)))
                a, b, c, d = ptx.load_l2_4(ptx.advanced(at, np.int32(16), source))
                held[4 * k], held[4 * k + 1], held[4 * k + 2], held[4 * k + 3] = a, b, c, d
            for k in range(COPIES):
                at = np.int32(first + np.int32(k * THREADS))
                if at < pieces:
                    place = ptx.advanced(at, np.int32(16), target)
                    ptx.store_4(place, held[4 * k], held[4 * k + 1], held[4 * k + 2], held[4 * k + 3])
            first = np.int32(first + np.int32(COPIES * THREADS))
    else:
        while first < size:
            for k in range(COPIED):
                at = min(np.int32(first + np.int32(k * THREADS)), np.int32(size - np.int32(1)))
                held[k] = ptx.load_l2(ptx.advanced(at, np.int32(4), source))
            for k in range(COPIED):
                at = np.int32(first + np.int32(k * THREADS))
                if at < size:
                    ptx.store_1(ptx.advanced(at, np.int32(4), target), held[k])
            first = np.int32(first + np.int32(COPIED * THREADS))


_OVERRIDES: dict[Any, Any] = {
    memory.view_f32: _view_f32,
    memory.view_i32: _view_i32,
    memory.view_i64: _view_i64,
    memory.view_u8: _view_of(types.uint8),
    memory.view_u16: _view_of(types.uint16),
    payload.present: _present,
    payload.stride: _stride,
    payload.address: _address,
    payload.parameter: _parameter,
    payload.parameter_f32: _parameter_f32,
    payload.operand_f32: _operand_f32,
    payload.operand_i32: _operand_i32,
    math32.bits_of: _bits_of,
    math32.from_bits: _from_bits,
    math32.select: _select,
    vector._dot_whole: _dot_whole,
    blockwise.thread_index: _thread_index,
    blockwise.thread_count: _thread_count,
    blockwise.divided: _divided,
    blockwise.wait: _wait,
    blockwise.copy_words: _copy_words,
}


# --- rebinding ----------------------------------------------------------------------------------------------------
_translated: dict[Any, Any] = {}


def translate(function: Callable[..., Any]) -> Any:
    """The device function that computes what a Python function of this package does, inlined where it is called."""
    if function not in _translated:
        _translated[function] = device(rebind(function))
    return _translated[function]


def rebind(function: Callable[..., Any]) -> Any:
    """A copy of a Python function whose globals and closure hold the GPU's versions of its helpers."""
    code: Any = function.__code__
    names, attributes = _names(code, "LOAD_GLOBAL"), _names(code, "LOAD_ATTR")
    own = function.__globals__
    space = {name: _value(own[name], attributes) for name in names if name in own}
    space |= _CONSTANTS.get(function.__module__, {})
    space["__name__"], space["__builtins__"] = function.__module__, own["__builtins__"]
    cells = tuple(python.CellType(_value(cell.cell_contents, attributes)) for cell in function.__closure__ or ())
    return python.FunctionType(code, space, function.__name__, function.__defaults__, cells)


def _value(value: Any, attributes: Sequence[str] = ()) -> Any:
    """What a name stands for on the GPU. attributes: those that the code takes of anything, modules among them."""
    if isinstance(value, python.ModuleType):
        if not value.__name__.startswith(PACKAGE):
            return value
        stand_in = python.ModuleType(value.__name__)
        for name in attributes:
            if hasattr(value, name):
                setattr(stand_in, name, _value(getattr(value, name), ()))
        return stand_in
    try:
        if value in _OVERRIDES:
            return _OVERRIDES[value]
    except TypeError:  # not hashable: data
        return value
    value = getattr(value, "py_func", value)  # what a CPU dispatcher compiles
    if isinstance(value, python.FunctionType):
        return translate(value) if value.__module__.startswith(PACKAGE) else value
    if hasattr(value, "_defn"):
        raise KernelError(
            f"{value._defn.__module__}.{value._defn.__name__} is written in LLVM IR for the CPU",
            wanted="a version for the GPU in wpk.kernel.cuda_library", found="none",
        )  # fmt: skip
    return value


def _names(code: Any, instruction: str) -> tuple[str, ...]:
    """Names that a code object looks up by this instruction."""
    methods = (instruction, instruction.replace("ATTR", "METHOD"))
    return tuple(dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname in methods))


# --- switches, generated ------------------------------------------------------------------------------------------
def switch(name: str, cases: Mapping[int, Any], arguments: str, default: str = "") -> Any:
    """A device function (code, *arguments) that calls the case of that code: a chain of comparisons."""
    lines = [f"def {name}(code, {arguments}):"]
    for code in cases:
        lines += [f"    {'el' if len(lines) > 1 else ''}if code == {code}:", f"        return case_{code}({arguments})"]
    lines.append(f"    return {default}")
    space: dict[str, Any] = {f"case_{code}": function for code, function in cases.items()}
    exec("\n".join(lines), space)
    return device(space[name])


_activations = {code: function for code, (_, function) in enumerate(simd._ACTIVATION_FUNCTIONS) if function}
_activate_code = switch("activate_code", {c: translate(rebindable) for c, rebindable in _activations.items()}, "x", "x")


@device
def _activate(x, code):
    return _activate_code(code, x)


@device
def _activate_in_place(address, n, code):
    values = _view_f32(address, n)
    for i in range(n):
        values[i] = _activate_code(code, values[i])


activate_code = _activate_code
address, parameter, parameter_f32, present, stride = _address, _parameter, _parameter_f32, _present, _stride
_OVERRIDES |= {blockwise.activate: _activate, simd.activate_in_place: _activate_in_place}
is_live = translate(blockwise.is_live)


# --- bodies -------------------------------------------------------------------------------------------------------
def block_body(name: str, shape: Shape = PLAIN) -> Any:
    """The device function of operator `name@version`, with the signature of `wpk.ops.blockwise`."""
    from wpk.kernel.blockwise.bodies import BODIES, MAKERS
    from wpk.kernel.blockwise.elementwise import elementwise_body

    operator, _, version = name.partition("@")
    if operator in BODIES:
        return BODIES[operator]
    if operator in MAKERS:
        return MAKERS[operator](shape)
    own = LIBRARY.body(operator, int(version), "cuda")
    if own is not None:
        return device(rebind(own.function))
    shared = LIBRARY.body(operator, int(version), "cpu")
    if shared is None:
        found = LIBRARY.targets(operator, int(version))
        raise KernelError(f"operator {name} has no body for a GPU", wanted="a body for cuda or cpu", found=found)
    family = elementwise_body(shared.function)
    return family if family is not None else _by_threads(shared.function)


def threads_body(operator: str, version: int) -> Any:
    """The body of an operator where each thread does what a CPU's would, part by part: slow, but for any sizes."""
    shared = LIBRARY.body(operator, version, "cpu")
    assert shared is not None
    return _by_threads(shared.function)


def _by_threads(function: Callable[..., None]) -> Any:
    """A block's body out of one thread's: each thread takes single parts of single slots."""
    inner = device(rebind(function))
    grain = _grain(function)

    @device
    def by_threads(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        first, parts = part_lo * grain, (part_hi - part_lo) * grain
        for unit in range(_thread_index(), (slot_hi - slot_lo) * parts, _thread_count()):
            turn = _divided(unit, parts)
            slot, part = slot_lo + turn, first + unit - turn * parts
            if is_live(live, slot):
                inner(record, arenas, slot, slot + 1, part, part + 1, scratch)

    return by_threads


def _grain(function: Callable[..., None]) -> int:
    """Parts of the GPU's in one of the CPU's."""
    name, size = _GRAINS.get(function.__module__, ("", 1))
    return int(function.__globals__[name]) // size if name in _names(function.__code__, "LOAD_GLOBAL") else 1

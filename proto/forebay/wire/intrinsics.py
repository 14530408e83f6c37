"""What numba has no words for: instructions and facts of types that the loops of `forebay.wire.compiled` are made of.

Numba's cache does not look here: who changes this file deletes the `__pycache__` beside it.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

_LINE_BYTES = 64


@intrinsic  # type: ignore[untyped-decorator]
def width_of(typing_context: Any, bits: Any) -> Any:
    """Bits of an element, known when the loop is compiled (an array's `itemsize` is looked up and divided by)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.uint64, bits.dtype.bitwidth)

    return types.uint64(bits), generate


@intrinsic  # type: ignore[untyped-decorator]
def word_shift_of(typing_context: Any, bits: Any) -> Any:
    """log2 of the elements in a word of 8 bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(types.int64, 7 - bits.dtype.bitwidth.bit_length())

    return types.int64(bits), generate


def _loaded_line(context: Any, builder: Any, array_type: Any, array: Any, line: Any) -> Any:
    """Code that loads 64 bytes of an array, wherever they lie, as a vector of its elements."""
    from llvmlite import ir

    width = array_type.dtype.bitwidth
    vector = ir.VectorType(ir.IntType(width), 8 * _LINE_BYTES // width)
    data = context.make_array(array_type)(context, builder, array).data
    return builder.load(builder.gep(builder.bitcast(data, vector.as_pointer()), [line]), align=1)


def _as_mask(builder: Any, truths: Any) -> Any:
    """Code that makes 64 bits of a vector of truth values, the first one lowest."""
    from llvmlite import ir

    mask = builder.bitcast(truths, ir.IntType(truths.type.count))
    return builder.zext(mask, ir.IntType(64)) if truths.type.count < 64 else mask


@intrinsic  # type: ignore[untyped-decorator]
def line_mask(typing_context: Any, base: Any, new: Any, line: Any) -> Any:
    """Bit k: element k of the 64-byte line differs. One comparison of vectors where the machine has such."""
    signature = types.uint64(base, new, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lines = [
            _loaded_line(context, builder, array_type, array, arguments[2])
            for array_type, array in zip(signature.args[:2], arguments[:2], strict=True)
        ]
        return _as_mask(builder, builder.icmp_unsigned("!=", *lines))

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def line_below(typing_context: Any, bits: Any, line: Any, limit: Any) -> Any:
    """Bit k: element k of the 64-byte line is smaller than `limit`, signs left out."""
    signature = types.uint64(bits, types.intp, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        line = _loaded_line(context, builder, signature.args[0], arguments[0], arguments[1])
        width, lanes, vector = line.type.element.width, line.type.count, line.type
        element = vector.element
        magnitudes = builder.and_(line, ir.Constant(vector, [(1 << (width - 1)) - 1] * lanes))
        bound = arguments[2] if width == 64 else builder.trunc(arguments[2], element)
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), bound, ir.Constant(ir.IntType(32), 0))
        picks = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        below = builder.icmp_unsigned("<", magnitudes, builder.shuffle_vector(one, one, picks))
        return _as_mask(builder, below)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def load_word(typing_context: Any, bits: Any, word: Any) -> Any:
    """The 8 bytes at 8 * word, wherever they lie."""
    signature = types.uint64(bits, types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.gep(builder.bitcast(data, ir.IntType(64).as_pointer()), [arguments[1]])
        return builder.load(pointer, align=1)

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def store_word(typing_context: Any, bits: Any, word: Any, value: Any) -> Any:
    """Write the 8 bytes at 8 * word: what is read as a word soon must have been written as one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.gep(builder.bitcast(data, ir.IntType(64).as_pointer()), [arguments[1]])
        builder.store(arguments[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(bits, types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def lowest(typing_context: Any, mask: Any) -> Any:
    """Index of the lowest bit that is set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def ones(typing_context: Any, mask: Any) -> Any:
    """How many bits are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, bits: Any, at: Any) -> Any:
    """Ask for the line of an element that will be changed soon: they lie too far apart for the machine to guess."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(prefetch, [address, *(ir.Constant(number, value) for value in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(bits, types.intp), generate

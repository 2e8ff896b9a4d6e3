"""Gluon inside Inductor: a template whose kernel is ``@gluon.jit``.

Gluon (``triton.experimental.gluon``) is Triton's language with explicit layouts, barriers and warp
specialization. Inductor does not know it (https://github.com/pytorch/pytorch/issues/188212 proposes
it). Little is missing: the decorator, the class that carries a kernel to the compiler, and one kind
of constant. Generated kernels import ``runtime``, in Inductor's compile workers too.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from typing import Any

from inductor_quant._compat.symbols import symbol

RUNTIME = "from inductor_quant._compat.gluon import runtime as _gluon_runtime"
_GLUON = "triton.experimental.gluon"
_LANGUAGE = f"{_GLUON}.language"
_HOPPER = f"{_LANGUAGE}.nvidia.hopper"
_AMPERE = f"{_LANGUAGE}.nvidia.ampere"
# name in a kernel -> symbol
_SYMBOLS = {
    "gluon": f"{_GLUON}:",
    "gl": f"{_LANGUAGE}:",
    "mbarrier": f"{_HOPPER}:mbarrier",
    "tma": f"{_HOPPER}:tma",
    "tma_load": f"{_HOPPER}:tma.async_load",
    "async_copy": f"{_AMPERE}:async_copy",
    "copy_async": f"{_AMPERE}:async_copy.async_load",
    "mma_v2": f"{_AMPERE}:mma_v2",
    "cta_barrier": f"{_LANGUAGE}:barrier",
    "fence_async_shared": f"{_HOPPER}:fence_async_shared",
    "warpgroup_mma": f"{_HOPPER}:warpgroup_mma",
    "warpgroup_mma_init": f"{_HOPPER}:warpgroup_mma_init",
    "warpgroup_mma_wait": f"{_HOPPER}:warpgroup_mma_wait",
}
_NAMES = (
    *_SYMBOLS,
    *("tile_load", "tile_store", "tile_round", "tile_exp", "tile_over"),
    *("limit_registers", "parts_of_tiles", "sums_of_tiles", "warps"),
)


@functools.cache
def available() -> bool:
    """Whether the installed Triton has a Gluon in which our templates can be compiled."""
    try:
        symbol(f"{_GLUON}._runtime:GluonASTSource")
        _names()
        return True
    except (ImportError, AttributeError):
        return False


@functools.cache
def _names() -> dict[str, Any]:
    return {name: symbol(where) for name, where in _SYMBOLS.items()}


@functools.cache
def runtime() -> dict[str, Any]:
    """The names that a Gluon kernel uses. Patches Inductor's runtime and Gluon, once a process."""
    if symbol("triton:knobs.runtime").interpret:
        return interpreted_names()
    names = _names()
    _compile_gluon_sources()
    _allow_scalar_constants()
    _allow_two_layouts()
    mine = {
        "limit_registers": _limit_registers(),
        "parts_of_tiles": _parts_of_tiles(),
        "sums_of_tiles": _sums_of_tiles(),
        "warps": importlib.import_module("inductor_quant._compat.gluon_barriers"),
    }
    return names | _tile_access() | _fast_math_functions() | mine


def interpreted_names() -> dict[str, Any]:
    """The same names for Triton's interpreter."""
    found: dict[str, Any] = importlib.import_module(
        "inductor_quant.simulate.interpreter.gluon"
    ).names()
    return {name: found.get(name) for name in _NAMES}


def _compile_gluon_sources() -> None:
    """``CachingAutotuner`` wraps every kernel in ``ASTSource``; Gluon's needs its own subclass."""
    heuristics: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    ordinary = symbol("torch._inductor.runtime.triton_heuristics:ASTSource")
    gluon_source = symbol(f"{_GLUON}._runtime:GluonASTSource")

    def source(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return (gluon_source if fn.is_gluon() else ordinary)(fn, *args, **kwargs)

    heuristics.ASTSource = source


def _allow_scalar_constants() -> None:
    """``tl.full([1, 1], v, dtype)``, Inductor's spelling of a constant, becomes a scalar, and a
    scalar stays a scalar when it is broadcast.

    Every Gluon tensor has a layout, and the layout of a constant is unknown where it is written. A
    scalar takes the layout of the other operand. Other shapes without a layout still fail.
    """
    semantic: Any = importlib.import_module(f"{_LANGUAGE}._semantic")
    ordinary = symbol(f"{_LANGUAGE}._semantic:GluonSemantic.full")
    ordinary_broadcast = symbol(f"{_LANGUAGE}._semantic:GluonSemantic.broadcast_impl_shape")

    def plain(item: Any) -> Any:
        return getattr(item, "value", item)  # of a constexpr

    def full(self: Any, shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        sizes = [plain(size) for size in getattr(shape, "values", shape)]
        if layout is not None or any(size != 1 for size in sizes):
            return ordinary(self, shape, value, dtype, layout)
        if hasattr(value, "handle"):
            return self.to_tensor(value)
        return self.scalar_constant(plain(value), plain(dtype))

    def broadcast(self: Any, value: Any, shape: Any) -> Any:
        return ordinary_broadcast(self, value, shape) if value.type.is_block() else value

    semantic.GluonSemantic.full = full
    semantic.GluonSemantic.broadcast_impl_shape = broadcast


def _allow_two_layouts() -> None:
    """An operation on two layouts converts the right operand to the layout of the left one.

    An epilogue may compute with indices, which have the layout of memory, see ``_tile_access``.
    Gluon itself rejects such an operation, so the patch changes no program that compiled before.
    """
    core = symbol(f"{_LANGUAGE}._core:")
    semantic: Any = importlib.import_module(f"{_LANGUAGE}._semantic")
    ordinary = symbol(f"{_LANGUAGE}._semantic:GluonSemantic.broadcast_impl_value")

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block():
            layouts = left.type.layout, right.type.layout
            is_known = not any(isinstance(layout, core.AutoLayout) for layout in layouts)
            if is_known and layouts[0] != layouts[1]:
                right = _in_layout(right, layouts[0], self)
        return ordinary(self, left, right)

    semantic.GluonSemantic.broadcast_impl_value = broadcast


def _in_layout(value: Any, layout: Any, semantic: Any) -> Any:
    """``value`` in ``layout``, without shared memory: a kernel's stages may take all of it.

    Between layouts in which each warp holds the same elements Triton shuffles elements of up to 32
    bits within the warp. Elements of 64 bits go through shared memory (64 KB for a 64 x 128 tile),
    so they are converted as two halves.
    """
    element = value.type.element_ty
    if element.primitive_bitwidth != 64 or value.type.layout == layout:
        return semantic.convert_layout(value, layout)
    core = symbol(f"{_LANGUAGE}._core:")
    bits = semantic.bitcast(value, core.int64)
    high = semantic.cast(semantic.ashr(bits, semantic.to_tensor(32)), core.int32)
    low = semantic.bitcast(semantic.cast(bits, core.int32), core.uint32)
    high, low = (semantic.convert_layout(half, layout) for half in (high, low))
    high = semantic.shl(semantic.cast(high, core.int64), semantic.to_tensor(32))
    return semantic.bitcast(semantic.or_(high, semantic.cast(low, core.int64)), element)


def _tile_access() -> dict[str, Any]:
    """Replacements for ``tl.load`` and ``tl.store`` in an epilogue.

    Accumulators have the layout of the matrix unit, in which a thread holds two columns of a row;
    memory wants 16 contiguous bytes a thread. The epilogue computes in the former, the constexpr
    EPILOGUE of the template. Loads and stores convert in the dtype of memory: half the bytes of
    fp32.
    """
    core = symbol(f"{_LANGUAGE}._core:")

    @core.builtin
    def tile_load(
        layout: Any,
        pointer: Any,
        mask: Any = None,
        other: Any = None,
        *,
        _semantic: Any,
        **how: Any,
    ) -> Any:
        """``tl.load``, then in ``layout``."""
        value = core.load(pointer, mask, other, **how, _semantic=_semantic)
        if not value.type.is_block():
            return value
        return _in_layout(value, core._unwrap_if_constexpr(layout), _semantic)

    @core.builtin
    def tile_store(
        pointer: Any, value: Any, mask: Any = None, *, _semantic: Any, **how: Any
    ) -> Any:
        """``tl.store`` of a value whose layout differs from the pointer's."""
        if value.type.is_block():
            value = value.to(pointer.dtype.element_ty, _semantic=_semantic)
            value = _in_layout(value, pointer.type.layout, _semantic)
        return core.store(pointer, value, mask, **how, _semantic=_semantic)

    return {"tile_load": tile_load, "tile_store": tile_store}


# The mask of a template whose indices are in bounds where it is false, too: of stores alone.
_STORE_MASK = "store_mask"
_MASKED_LOAD = re.compile(rf"(tl\.load\(.*), {_STORE_MASK}(?=[,)])")


def fast_math(epilogue: str) -> str:
    """An epilogue with fewer instructions, for values that are stored in 16 bits.

    The matrix unit idles while an epilogue runs. Values are rounded in pairs; ``exp``, and division
    by ``1 + exp`` (at least 1), use the special function unit. The relative error is below 2^-17:
    x log2(e), up to 127, is rounded at 2^-24, log2(e) itself at 2^-26, and the unit's error is
    2^-22.
    """
    epilogue = re.sub(r"\b(\w+)\.to\(tl\.(bfloat16|float16)\)", r"tile_round(\1, tl.\2)", epilogue)
    exponentials = set(re.findall(r"(\w+) = libdevice\.exp\(", epilogue))
    ones = {"1.0", *re.findall(r"(\w+) = tl\.full\(\[1(?:, 1)?\], 1\.0, tl\.float32\)", epilogue)}
    for total, left, right in re.findall(r"(\w+) = (\w+) \+ (\w+)\n", epilogue):
        if {left, right} & exponentials and {left, right} & ones:
            epilogue = re.sub(rf"\((\w+) / {total}\)", rf"tile_over(\1, {total})", epilogue)
    return epilogue.replace("libdevice.exp(", "tile_exp(")


def _fast_math_functions() -> dict[str, Any]:
    """Replacements for ``.to``, ``libdevice.exp`` and ``/`` in ``fast_math``, for fp32 tiles."""
    core = symbol(f"{_LANGUAGE}._core:")
    exp = symbol("triton.language.math:exp")

    def is_tile(*values: Any) -> bool:
        return all(value.type.is_block() and value.dtype.is_fp32() for value in values)

    def each(asm: str, constraints: str, values: list[Any], dtype: Any, semantic: Any) -> Any:
        pack = 32 // dtype.primitive_bitwidth
        return core.inline_asm_elementwise(
            asm, constraints, values, dtype, is_pure=True, pack=pack, _semantic=semantic
        )

    @core.builtin
    def tile_round(value: Any, dtype: Any, *, _semantic: Any) -> Any:
        """``value.to(dtype)`` for bf16 and fp16."""
        dtype = core._unwrap_if_constexpr(dtype)
        if not is_tile(value):
            return value.to(dtype, _semantic=_semantic)
        asm = f"cvt.rn.{'bf16x2' if dtype.is_bf16() else 'f16x2'}.f32 $0, $2, $1;"
        return each(asm, "=r,f,f", [value], dtype, _semantic)

    @core.builtin
    def tile_exp(value: Any, *, _semantic: Any) -> Any:
        """exp(x) as 2^(x log2 e): 0 or infinity outside the normal range of fp32."""
        if not is_tile(value):
            return exp(value, _semantic=_semantic)
        asm = "{ .reg .f32 t; mul.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }"
        return each(asm, "=f,f", [value], core.float32, _semantic)

    @core.builtin
    def tile_over(value: Any, divisor: Any, *, _semantic: Any) -> Any:
        """value / divisor for a divisor of at least 1, infinity or NaN."""
        if not is_tile(value, divisor):
            return _semantic.truediv(value, divisor)
        asm = "{ .reg .f32 t; rcp.approx.ftz.f32 t, $2; mul.f32 $0, $1, t; }"
        return each(asm, "=f,f,f", [value, divisor], core.float32, _semantic)

    return {"tile_round": tile_round, "tile_exp": tile_exp, "tile_over": tile_over}


@functools.cache
def template_type() -> type:
    """A ``TritonTemplate`` whose kernels are written in Gluon.

    Templates may call two more functions:

    ``kernel_args()``: the names of all arguments of the kernel, those of its epilogue included.
    ``partition(name, *parameters)``: the header of a ``@gluon.jit`` function that takes the
    parameters and then all arguments of the kernel, for a partition of ``gl.warp_specialize``; one
    of them contains ``store_output``.

    ``store_output`` takes indices in a layout that suits memory, and a value in the layout
    EPILOGUE: see ``_tile_access``. With the constant ``FAST_MATH_EPILOGUE`` its text goes through
    ``fast_math``. Under the mask ``store_mask`` indices are in bounds everywhere, and loads take no
    mask: ptxas does not move a load that may not happen, and in a large tile it then has registers
    for addresses, not for values, each of which it waits for and spills.
    """
    kernel = symbol("torch._inductor.select_algorithm:TritonTemplateKernel")
    template = symbol("torch._inductor.select_algorithm:TritonTemplate")
    virtualized = symbol("torch._inductor.select_algorithm:V")
    texpr = symbol("torch._inductor.select_algorithm:texpr")

    class GluonTemplateKernel(kernel):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._register_extra_template_env_fns(self.kernel_args, self.partition)

        def jit_lines(self) -> str:
            return super().jit_lines().replace("@triton.jit", "@gluon.jit")

        @classmethod
        def gen_common_triton_imports(cls) -> str:
            names = "\n".join(f"{name} = _gluon_runtime()[{name!r}]" for name in _NAMES)
            return f"{super().gen_common_triton_imports()}\n{RUNTIME}\n{names}\n"

        def store_output(self, *args: Any, **kwargs: Any) -> str:
            name = str(super().store_output(*args, **kwargs))
            ordinary = self.render_hooks[name]

            def hook() -> str:
                text = str(ordinary())
                if self.meta.get("FAST_MATH_EPILOGUE") and self._stores_16_bits():
                    text = fast_math(text)
                text = _MASKED_LOAD.sub(r"\1", text)
                return text.replace("tl.load(", "tile_load(EPILOGUE, ").replace(
                    "tl.store(", "tile_store("
                )

            self.render_hooks[name] = hook
            return name

        def _stores_16_bits(self) -> bool:
            """Whether every output of the kernel and its epilogue has at most 16 bits."""
            stored = {*self.args.output_buffers, *self.args.inplace_buffers}
            return all(virtualized.graph.get_dtype(n).itemsize <= 2 for n in stored)

        def _argument_names(self) -> str:
            definitions, *_ = self.args.python_argdefs()
            return ", ".join(definition.name for definition in definitions)

        def kernel_args(self) -> str:
            return self._register_hook(
                "<KERNEL_ARGS>", self._argument_names, allow_overwriting=True
            )

        def _inputs(self) -> list[str]:
            """Assignments of each input to its name in the template, as in ``def_kernel``, with the
            offset of a view."""
            lines = []
            for name, node in self.named_input_nodes.items():
                offset = self.rename_indexing(node.get_layout().offset)
                begin = f" + {texpr(offset)}" if offset != 0 else ""
                lines.append(f"{name} = {self.args.input_buffers[node.get_name()]}{begin}")
            return lines

        def partition(self, name: str, *parameters: str) -> str:
            inputs = self._inputs()

            def header() -> str:
                lines = [line for line in str(self.defines).splitlines() if line.strip()]
                lines += inputs
                body = "".join(f"    {line}\n" for line in lines)
                taken = ", ".join(parameters)
                return f"@gluon.jit\ndef {name}({taken}, {self._argument_names()}):\n{body}"

            return self._register_hook(f"<PARTITION_{name}>", header)

    class GluonTemplate(template):  # type: ignore[valid-type, misc]
        kernel_type = GluonTemplateKernel

    return GluonTemplate


def _limit_registers() -> Any:
    core = symbol(f"{_LANGUAGE}._core:")

    @core.builtin
    def limit_registers(most: Any, *, _semantic: Any, _generator: Any) -> None:
        """At most ``most`` registers a thread: Triton's option ``maxnreg``, which Inductor does not
        pass."""
        value = _semantic.builder.get_int32_attr(core._unwrap_if_constexpr(most))
        _generator.module.set_attr("ttg.maxnreg", value)

    return limit_registers


def _parts_of_tiles() -> Any:
    core = symbol(f"{_LANGUAGE}._core:")
    reinterpret = symbol(f"{_LANGUAGE}._core:shared_memory_descriptor.reinterpret")

    @core.builtin
    def parts_of_tiles(buffers: Any, across: Any, down: Any, *, _semantic: Any) -> Any:
        """A ring of tiles [rows, columns], whose swizzle is as wide as ``columns / across``, as one
        of tiles of so many columns and of ``rows / down``, eights of rows: in shared memory those
        of the same columns follow one another."""
        stages, rows, columns = buffers.shape
        across, down = core._unwrap_if_constexpr(across), core._unwrap_if_constexpr(down)
        shape = [stages * across * down, rows // down, columns // across]
        return reinterpret(buffers, buffers.dtype, shape, buffers.layout, _semantic=_semantic)

    return parts_of_tiles


def _sums_of_tiles() -> Any:
    core = symbol(f"{_LANGUAGE}._core:")
    reinterpret = symbol(f"{_LANGUAGE}._core:shared_memory_descriptor.reinterpret")
    in_order = symbol(f"{_LANGUAGE}:").SwizzledSharedLayout(1, 1, 1, [0])

    @core.builtin
    def sums_of_tiles(buffers: Any, count: Any, *, _semantic: Any) -> Any:
        """A ring of tiles as one of ``count`` arrays of fp32."""
        count = core._unwrap_if_constexpr(count)
        bits = math.prod(buffers.shape) * buffers.dtype.primitive_bitwidth
        shape = [count, bits // core.float32.primitive_bitwidth // count]
        return reinterpret(buffers, core.float32, shape, in_order, _semantic=_semantic)

    return sums_of_tiles

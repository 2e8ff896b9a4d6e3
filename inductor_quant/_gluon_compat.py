"""The boundary's part for Gluon: a template whose kernel is ``@gluon.jit``, inside Inductor.

Gluon (``triton.experimental.gluon``) is Triton's language with explicit layouts, barriers and warp
specialisation. Inductor does not know it (https://github.com/pytorch/pytorch/issues/188212 proposes
it), but little is missing: the decorator, the class that carries a kernel to the compiler, and one
kind of constant. ``runtime`` is what generated kernels import, also in Inductor's compile workers.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

RUNTIME = "from inductor_quant._gluon_compat import runtime as _gluon_runtime"
_NAMES = (
    *("gluon", "gl", "mbarrier", "tma", "tma_load", "async_copy", "cta_barrier"),
    *("copy_async", "mma_v2"),
    *("fence_async_shared", "warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait"),
    *("tile_load", "tile_store", "tile_round", "tile_exp", "tile_over"),
    *("limit_registers", "warps"),
)


@functools.cache
def available() -> bool:
    """Whether the installed Triton has a Gluon that our templates are written in."""
    try:
        _names()
        return True
    except (ImportError, AttributeError):
        return False


@functools.cache
def _names() -> dict[str, Any]:
    gluon = importlib.import_module("triton.experimental.gluon")
    hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    ampere = importlib.import_module("triton.experimental.gluon.language.nvidia.ampere")
    gl = importlib.import_module("triton.experimental.gluon.language")
    tma = hopper.tma
    importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource  # noqa: B018
    return {
        "gluon": gluon,
        "gl": gl,
        "mbarrier": hopper.mbarrier,
        "tma": tma,
        # Triton <= 3.7: the second name, of this and of copy_async. Drop with 3.7.
        "tma_load": getattr(tma, "async_load", None) or tma.async_copy_global_to_shared,
        "async_copy": ampere.async_copy,
        "copy_async": getattr(ampere.async_copy, "async_load", None)
        or ampere.async_copy.async_copy_global_to_shared,
        "mma_v2": ampere.mma_v2,
        # Triton <= 3.6: the second name. Drop with 3.6.
        "cta_barrier": getattr(gl, "barrier", None) or gl.thread_barrier,
        "fence_async_shared": hopper.fence_async_shared,
        "warpgroup_mma": hopper.warpgroup_mma,
        "warpgroup_mma_init": hopper.warpgroup_mma_init,
        "warpgroup_mma_wait": hopper.warpgroup_mma_wait,
    }


@functools.cache
def runtime() -> dict[str, Any]:
    """The names that a Gluon kernel is written in, after Inductor's runtime and Gluon have been
    made to fit: idempotent, once a process."""
    if importlib.import_module("triton").knobs.runtime.interpret:
        return interpreted_names()
    names = _names()
    _compile_gluon_sources()
    _allow_scalar_constants()
    _allow_two_layouts()
    mine = {
        "limit_registers": _limit_registers(),
        "warps": importlib.import_module("inductor_quant._gluon_warps"),
    }
    return names | _tile_access() | _brisk_functions() | mine


def interpreted_names() -> dict[str, Any]:
    """The same names for Triton's interpreter."""
    found: dict[str, Any] = importlib.import_module("inductor_quant.simulate._gluon").names()
    return {name: found.get(name) for name in _NAMES}


def _compile_gluon_sources() -> None:
    """``CachingAutotuner`` takes a Gluon kernel to the compiler as what it is.

    It makes ``ASTSource(fn, ...)`` of every kernel; a Gluon function needs the subclass.
    """
    heuristics: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    ordinary = heuristics.ASTSource
    gluon_source = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource

    def source(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return (gluon_source if fn.is_gluon() else ordinary)(fn, *args, **kwargs)

    heuristics.ASTSource = source


def _allow_scalar_constants() -> None:
    """``tl.full([1, 1], v, dtype)``, which is how Inductor writes a constant, becomes a scalar, and
    a scalar that is broadcast stays one.

    A tensor in Gluon has a layout, and that of a constant is not known where it is written; a
    scalar takes the layout of what it meets. Other shapes without a layout are refused as before.
    """
    semantic = importlib.import_module("triton.experimental.gluon.language._semantic")
    ordinary = semantic.GluonSemantic.full
    ordinary_broadcast = semantic.GluonSemantic.broadcast_impl_shape

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
    """Operands of one operation in different layouts meet in the left one's.

    An epilogue may compute with positions, which have the layout of memory, see ``_tile_access``.
    Gluon refuses such an operation, so that no program of others changes.
    """
    core = importlib.import_module("triton.experimental.gluon.language._core")
    semantic = importlib.import_module("triton.experimental.gluon.language._semantic")
    ordinary = semantic.GluonSemantic.broadcast_impl_value

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block():
            layouts = left.type.layout, right.type.layout
            is_known = not any(isinstance(layout, core.AutoLayout) for layout in layouts)
            if is_known and layouts[0] != layouts[1]:
                right = _in_layout(right, layouts[0], self)
        return ordinary(self, left, right)

    semantic.GluonSemantic.broadcast_impl_value = broadcast


def _in_layout(value: Any, layout: Any, semantic: Any) -> Any:
    """``value`` in ``layout``, without shared memory: a kernel's stages may have taken all of it.

    Between two layouts in which a warp has the same elements Triton shuffles up to 32 bits within
    the warp; 64 take 64 KB (a tile of 64 x 128), so they travel as two halves.
    """
    element = value.type.element_ty
    if element.primitive_bitwidth != 64 or value.type.layout == layout:
        return semantic.convert_layout(value, layout)
    core = importlib.import_module("triton.experimental.gluon.language._core")
    bits = semantic.bitcast(value, core.int64)
    high = semantic.cast(semantic.ashr(bits, semantic.to_tensor(32)), core.int32)
    low = semantic.bitcast(semantic.cast(bits, core.int32), core.uint32)
    high, low = (semantic.convert_layout(half, layout) for half in (high, low))
    high = semantic.shl(semantic.cast(high, core.int64), semantic.to_tensor(32))
    return semantic.bitcast(semantic.or_(high, semantic.cast(low, core.int64)), element)


def _tile_access() -> dict[str, Any]:
    """What loads and stores of an epilogue become.

    Sums lie in the matrix unit's layout, where a thread has two columns of a row; memory wants 16
    bytes a thread and neighbours side by side. The epilogue computes in the first; what it loads
    and stores changes over in the type that memory has, half the bytes of fp32. A template says in
    which layout its epilogue computes: the constexpr EPILOGUE.
    """
    core = importlib.import_module("triton.experimental.gluon.language._core")

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
        """``tl.store`` of a value in another layout than the pointer's."""
        if value.type.is_block():
            value = value.to(pointer.dtype.element_ty, _semantic=_semantic)
            value = _in_layout(value, pointer.type.layout, _semantic)
        return core.store(pointer, value, mask, **how, _semantic=_semantic)

    return {"tile_load": tile_load, "tile_store": tile_store}


def brisk(epilogue: str) -> str:
    """The text of an epilogue for values that end in 16 bits, with fewer instructions.

    The matrix unit waits while a tile is finished. Roundings are made in pairs; ``exp`` and a
    division by ``1 + exp``, by a number of at least 1, are those of the special function unit.
    Their relative error is below 2^-17: x log2 e, up to 127, is rounded at 2^-24, log2 e itself at
    2^-26, and the unit's own error is 2^-22.
    """
    epilogue = re.sub(r"\b(\w+)\.to\(tl\.(bfloat16|float16)\)", r"tile_round(\1, tl.\2)", epilogue)
    exponentials = set(re.findall(r"(\w+) = libdevice\.exp\(", epilogue))
    ones = {"1.0", *re.findall(r"(\w+) = tl\.full\(\[1(?:, 1)?\], 1\.0, tl\.float32\)", epilogue)}
    for total, left, right in re.findall(r"(\w+) = (\w+) \+ (\w+)\n", epilogue):
        if {left, right} & exponentials and {left, right} & ones:
            epilogue = re.sub(rf"\((\w+) / {total}\)", rf"tile_over(\1, {total})", epilogue)
    return epilogue.replace("libdevice.exp(", "tile_exp(")


def _brisk_functions() -> dict[str, Any]:
    """What ``brisk`` puts for ``.to``, ``libdevice.exp`` and ``/``: quick for tiles of fp32."""
    core = importlib.import_module("triton.experimental.gluon.language._core")
    math = importlib.import_module("triton.language.math")

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
        """exp(x) as 2^(x log2 e): beyond fp32's normal numbers 0 or infinity."""
        if not is_tile(value):
            return math.exp(value, _semantic=_semantic)
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
    """A ``TritonTemplate`` whose kernels are Gluon's.

    Its source may use two functions more than ``TritonTemplate``'s:

    ``kernel_args()``: the names of all of the kernel's arguments, those of its epilogue among them.
    ``partition(name, *parameters)``: the header of a ``@gluon.jit`` function that takes the
    parameters and then all of the kernel's arguments, under the names that the kernel has for them;
    for the parts of ``gl.warp_specialize``, in one of which ``store_output`` then stands.

    ``store_output`` is given positions in a layout that is good for memory, and a value in the
    layout ``sums``, a name that the template defines: see ``_tile_access``. With the constant
    ``BRISK_EPILOGUE`` its text passes through ``brisk``.
    """
    select_algorithm = importlib.import_module("torch._inductor.select_algorithm")

    class GluonTemplateKernel(select_algorithm.TritonTemplateKernel):  # type: ignore[name-defined]
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
                if self.meta.get("BRISK_EPILOGUE") and self._stores_16_bits():
                    text = brisk(text)
                return text.replace("tl.load(", "tile_load(EPILOGUE, ").replace(
                    "tl.store(", "tile_store("
                )

            self.render_hooks[name] = hook
            return name

        def _stores_16_bits(self) -> bool:
            """Whether all that the kernel and what is fused into it store has 16 bits or fewer."""
            stored = {*self.args.output_buffers, *self.args.inplace_buffers}
            return all(select_algorithm.V.graph.get_dtype(n).itemsize <= 2 for n in stored)

        def _argument_names(self) -> str:
            definitions, *_ = self.args.python_argdefs()
            return ", ".join(definition.name for definition in definitions)

        def kernel_args(self) -> str:
            return self._register_hook(
                "<KERNEL_ARGS>", self._argument_names, allow_overwriting=True
            )

        def _inputs(self) -> list[str]:
            """Assignments that give each input its name in the template, as in ``def_kernel``: a
            view of a buffer begins at its offset."""
            lines = []
            for name, node in self.named_input_nodes.items():
                offset = self.rename_indexing(node.get_layout().offset)
                begin = f" + {select_algorithm.texpr(offset)}" if offset != 0 else ""
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

    class GluonTemplate(select_algorithm.TritonTemplate):  # type: ignore[name-defined]
        kernel_type = GluonTemplateKernel

    return GluonTemplate


def _limit_registers() -> Any:
    core = importlib.import_module("triton.experimental.gluon.language._core")

    @core.builtin
    def limit_registers(most: Any, *, _semantic: Any, _generator: Any) -> None:
        """A thread of the kernel has ``most`` registers: Triton's option ``maxnreg``, which
        Inductor does not pass on."""
        value = _semantic.builder.get_int32_attr(core._unwrap_if_constexpr(most))
        _generator.module.set_attr("ttg.maxnreg", value)

    return limit_registers

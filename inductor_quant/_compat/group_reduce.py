"""A reduction over groups of columns, in the same Inductor kernel as a reduction over rows.

Inductor fuses a row reduction (a norm) with pointwise ops over the same rows. A reduction over
groups of 128 columns has another iteration space, and stays a kernel of its own. The nodes here
iterate over whole rows, and to the scheduler they are scans: ``reduce`` gives each element the
maximum of its group, ``value`` stores one element of each group. The code reshapes the CTA's tile
to [groups, group_size]: three operations that Inductor's handlers learn by name.

The tile must hold whole rows. Inductor asks ``V.choices`` about each kernel; our subclass answers
for kernels with these operations.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from inductor_quant._compat.symbols import has, symbol

_CONFIG = "torch._inductor.config:"
REDUCE, VALUE, INDEX = (f"inductor_quant_group_{name}" for name in ("reduce_", "value", "index"))
# Inductor never splits the reduction of a shorter row (InductorChoices.reduction_split_factor); the
# norm of a longer one may be three kernels anyway. Such a row takes 32 registers a thread.
LONGEST = 8192
# kind -> the reduction of a tile's last dimension, in Triton. Those of floats keep NaN.
_REDUCTIONS = {
    "max": "tl.max({}, 1)",  # of integers
    "amax": "triton_helpers.max2({}, 1)",
    "amin": "triton_helpers.min2({}, 1)",
}


def takes(length: int, size: int) -> bool:
    """Whether rows of ``length`` elements, in groups of ``size``, can be reduced this way."""
    is_power = size > 1 and size & (size - 1) == 0  # the tile is a power of two
    is_short = 0 < length <= LONGEST and length % max(size, 1) == 0
    return is_power and is_short and available() and _is_allowed()


def _is_allowed() -> bool:
    """Whether no option of Inductor changes tiles or indices in a way that breaks ours."""
    is_unusual = symbol(f"{_CONFIG}combo_kernels") or symbol(f"{_CONFIG}triton.dense_indexing")
    return symbol(f"{_CONFIG}triton.persistent_reductions") and not is_unusual


@functools.cache
def available() -> bool:
    """Whether the installed Inductor has everything that this module needs."""
    try:
        _register()
        _nodes()
        return has("torch._inductor.choices:InductorChoices.triton_kernel_kwargs")
    except (ImportError, AttributeError, TypeError):
        return False


def reduce(x: Any, kind: str, group: int) -> Any:
    """IR of [..., K]: each element becomes the reduction of its group of ``group`` columns."""
    return _realized("reduce", x, list(x.get_size()), group, kind)


def value(x: Any, group: int, *, along_rows: bool) -> Any:
    """IR of [M, K / group]: one element of each group of the M rows of ``x`` [..., K]."""
    *rows, k = x.get_size()
    m, count = math.prod(rows), k // group
    result = _realized("value", x, [m, count], group)
    result.data.freeze_layout_with_exact_strides([1, m] if along_rows else [count, 1])
    return result


# Groups a CTA, and its warps, in a kernel that only quantizes in groups. Inductor picks 1, 8 or 32
# groups by a single timing, with two warps, and may pick a slow one: 1024 x 7168 takes 35.9 us with
# 1 group and 6.2 with 16 (H200).
TILE = {"YBLOCK": 1, "XBLOCK": 16, "num_warps": 4}


def quantize_in_tiles(buffer: Any, group: int) -> None:
    """The kernel that computes ``buffer``, if it reduces groups of ``group`` elements, uses
    ``TILE``, in compilations of this thread. Kernels of other buffers do not change."""
    virtualized = symbol("torch._inductor.virtualized:V")
    tiled = vars(virtualized.graph).setdefault("inductor_quant_groups", {})
    tiled[buffer.get_name()] = group
    fixed_config = symbol("torch._inductor.codegen.triton:FixedTritonConfig")

    def tile(features: Any, tiling: Any, given: Any) -> dict[str, Any]:
        if given.get("fixed_config") is not None or not _reduces_groups(features, tiling):
            return {}
        return {"fixed_config": fixed_config(_tile_of(tiling)), **PERSISTENT}

    _choose_also("tiles", tile)


def _reduces_groups(features: Any, tiling: Any) -> bool:
    """Whether a kernel reduces such groups, over one or two other dimensions."""
    virtualized = symbol("torch._inductor.virtualized:V")
    tiled = getattr(virtualized.graph, "inductor_quant_groups", {})
    names = {name for node in features.scheduler_nodes() for name in node.get_buffer_names()}
    sizes = {tiled[name] for name in names & tiled.keys()}
    is_known = list(tiling)[-2:] == ["x", "r0_"] and len(tiling) <= 3
    return is_known and sizes == {features.reduction_numel} and _is_allowed()


def _tile_of(tiling: Any) -> dict[str, int]:
    """Without ``YBLOCK`` where groups have one dimension."""
    return {name: size for name, size in TILE.items() if name != "YBLOCK" or "y" in tiling}


def keep_rows_whole() -> None:
    """Kernels with one of these operations hold whole rows, in compilations of this thread.
    Idempotent."""

    def whole(features: Any, tiling: Any, given: Any) -> dict[str, Any]:
        is_ours = any(map(features.contains_op, (VALUE, *(REDUCE + kind for kind in _REDUCTIONS))))
        return PERSISTENT if is_ours else {}

    _choose_also("rows", whole)


PERSISTENT = {"override_persistent_reduction": True, "override_cooperative_reduction": False}


def _choose_also(name: str, more: Callable[[Any, Any, Any], dict[str, Any]]) -> None:
    """Add ``more(features, tiling, chosen)`` to the keyword arguments of each Triton kernel, in
    compilations of this thread. Once for each ``name``."""
    virtualized = symbol("torch._inductor.virtualized:V")
    before = virtualized.choices
    known = getattr(before, "inductor_quant_knows", ())
    if name in known:
        return

    class Choices(type(before)):  # type: ignore[misc]
        inductor_quant_knows = (*known, name)

        def triton_kernel_kwargs(self, kernel: Any, features: Any, groups: Any, given: Any) -> Any:
            given = super().triton_kernel_kwargs(kernel, features, groups, given)
            return given | more(features, groups[0], given)

    after = copy.copy(before)
    after.__class__ = Choices
    virtualized.set_choices_handler(after)


# ------------------------------------------------------------------------------------------
# the nodes


def _realized(node: str, x: Any, size: list[Any], group: int, kind: str = "") -> Any:
    _register()
    keep_rows_whole()
    *rows, k = x.get_size()
    loader, dtype = x.make_loader(), x.get_dtype()
    result = symbol("torch._inductor.ir:TensorBox").create(
        _nodes()[node](
            device=x.get_device(),
            dtype=dtype,
            inner_fn=loader,
            ranges=rows,
            scan_ranges=[k],
            size=size,
            group=int(group),
            kind=kind,
            # what a scan has besides
            dtypes=(dtype,),
            inner_fns=(loader,),
            combine_fn=None,
            reindex=lambda index, column: [*index, *column],
            reduction_hint=symbol("torch._inductor.ir:ReductionHint").INNER,
            output_index=0,
        )
    )
    result.realize()
    return result


@functools.cache
def _nodes() -> dict[str, Any]:
    scan = symbol("torch._inductor.ir:Scan")
    loops = symbol("torch._inductor.ir:Loops")
    ops = symbol("torch._inductor.virtualized:ops")

    @symbol("torch._inductor.ir:ir_dataclass")
    class GroupNode(scan):  # type: ignore[valid-type, misc]
        group: int
        kind: str

        def __post_init__(self) -> None:
            loops.__post_init__(self)  # a scan's size is that of its ranges

    class GroupReduce(GroupNode):
        def store_reduction(self, name: Any, indexer: Any, rows: Any, column: Any) -> Any:
            index = self.reindex(rows, column)
            result = getattr(ops, REDUCE + self.kind)(self.inner_fn(index), self.group)
            return ops.store(name or "unnamed", indexer(index), result)

    class GroupValue(GroupNode):
        def store_reduction(self, name: Any, indexer: Any, rows: Any, column: Any) -> Any:
            count = int(self.size[-1])
            number = getattr(ops, INDEX)(count, self.group)
            number = ops.indirect_indexing(
                number, sympy.Integer(count), check=False, wrap_neg=False
            )
            row = sum(at * math.prod(self.ranges[i + 1 :]) for i, at in enumerate(rows))
            result = getattr(ops, VALUE)(self.inner_fn(self.reindex(rows, column)), self.group)
            return ops.store_reduction(name or "unnamed", indexer([row, number]), result)

    return {"reduce": GroupReduce, "value": GroupValue}


# ------------------------------------------------------------------------------------------
# the operations


@functools.cache
def _register() -> None:
    """Register the operations with Inductor's handlers: default, dtype propagation, Triton code.

    (The shape is that of the arguments, unless the generated variable has another.)
    """
    handler = symbol("torch._inductor.ops_handler:DefaultHandler")
    dtypes = symbol("torch._inductor.dtype_propagation:DtypePropagationOpsHandler")
    triton = symbol("torch._inductor.codegen.triton:TritonKernelOverrides")
    operations: list[tuple[str, Callable[..., torch.dtype], Callable[..., Any]]] = [
        (VALUE, lambda x, group: x.dtype, _value_code),
        (INDEX, lambda count, group: torch.int32, _index_code),
    ]
    for kind in _REDUCTIONS:
        write = functools.partial(_reduce_code, kind)
        operations.append((REDUCE + kind, lambda x, group: x.dtype, write))
    for name, dtype, code in operations:
        setattr(handler, name, handler._call_default(name))
        setattr(dtypes, name, staticmethod(dtype))
        setattr(triton, name, staticmethod(code))


def _kernel() -> Any:
    """The kernel that is being generated."""
    return symbol("torch._inductor.virtualized:V").kernel


def _text(shape: list[str]) -> str:
    return f"[{', '.join(shape)}]"


def _variable(kernel: Any, code: str, dtype: torch.dtype, shape: list[str]) -> Any:
    return kernel.cse.generate(kernel.compute, code, dtype=dtype, shape=tuple(shape))


def _tile(x: Any, group: int) -> tuple[Any, list[str], list[str]]:
    """``x`` with a row for each group, that shape, and the original shape."""
    kernel = _kernel()
    whole = kernel.dense_size_list()
    if not kernel.persistent_reduction or "R0_BLOCK" not in whole[-1]:
        raise AssertionError(f"groups in a kernel with tiles of {whole}, which are no whole rows")
    shape = [f"{' * '.join(whole)} // {group}", str(group)]
    code = f"tl.reshape(tl.broadcast_to({x}, {_text(whole)}), {_text(shape)})"
    return _variable(kernel, code, x.dtype, shape), shape, whole


def _reduce_code(kind: str, x: Any, group: int) -> Any:
    tile, shape, whole = _tile(x, group)
    most = f"{_REDUCTIONS[kind].format(tile)}[:, None]"
    code = f"tl.reshape(tl.broadcast_to({most}, {_text(shape)}), {_text(whole)})"
    return _variable(_kernel(), code, x.dtype, whole)


def _value_code(x: Any, group: int) -> Any:
    # The maximum of equal values: within a thread they are one register, so it costs nothing.
    tile, _, whole = _tile(x, group)
    shape = [*whole[:-1], f"{whole[-1]} // {group}"]
    return _variable(_kernel(), f"tl.reshape(tl.max({tile}, 1), {_text(shape)})", x.dtype, shape)


def _index_code(count: int, group: int) -> Any:
    """The index of each group in its row; groups from ``count`` on are masked."""
    kernel = _kernel()
    whole = kernel.dense_size_list()
    last, length = len(whole) - 1, f"{whole[-1]} // {group}"
    shape = ["1"] * last + [length]
    code = f"tl.arange(0, {length}){kernel.indexing_size_str(last)}"
    index = _variable(kernel, code, torch.int32, shape)
    mask = _variable(kernel, f"{index} < {count}", torch.bool, shape)
    index.mask_vars.add(str(mask))
    return index

"""The boundary's part for groups within a row: reductions of both in one kernel of Inductor.

Inductor joins a reduction over rows (a norm) with what else runs over the same rows and columns. A
reduction over groups of 128 columns runs over other rows, 128 columns each, and stays a kernel of
its own. The nodes here run over the whole rows, as Inductor's scans do, which they are to the
scheduler: ``reduce`` gives each element the maximum of its group, ``value`` stores one element of
each group. Within a group they work on the tile of the program, which Triton reshapes to
[groups, columns of a group]: three operations that Inductor's handlers learn by name. Nothing that
Inductor has is replaced.

A tile has to hold whole rows. Inductor asks the object behind ``V.choices`` about each kernel; ours
answers so where these operations are in it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

REDUCE, VALUE, INDEX = (f"inductor_quant_group_{name}" for name in ("reduce_", "value", "index"))
# A row that Inductor does not reduce in parts either, whatever the number of rows
# (InductorChoices.reduction_split_factor): the norm of a longer one may be three kernels anyway.
# In registers it takes 32 of each thread.
LONGEST = 8192
# kind -> the reduction of a tile's last dimension, in Triton. Those of floats keep NaN.
_REDUCTIONS = {
    "max": "tl.max({}, 1)",  # of integers
    "amax": "triton_helpers.max2({}, 1)",
    "amin": "triton_helpers.min2({}, 1)",
}


def takes(length: int, size: int) -> bool:
    """Whether rows of ``length`` elements, in groups of ``size``, can be treated so."""
    is_power = size > 1 and size & (size - 1) == 0  # the tile is a power of two
    is_short = 0 < length <= LONGEST and length % max(size, 1) == 0
    return is_power and is_short and available() and _is_allowed()


def _is_allowed() -> bool:
    """Whether no option of Inductor is set that decides otherwise about tiles and indices."""
    config = importlib.import_module("torch._inductor.config")
    is_unusual = config.combo_kernels or config.triton.dense_indexing
    return config.triton.persistent_reductions and not is_unusual


@functools.cache
def available() -> bool:
    """Whether the installed Inductor has what this module builds on."""
    try:
        _register()
        _nodes()
        choices = importlib.import_module("torch._inductor.choices").InductorChoices
        return hasattr(choices, "triton_kernel_kwargs")
    except (ImportError, AttributeError, TypeError):
        return False


def reduce(x: Any, kind: str, group: int) -> Any:
    """``x`` [..., K], as IR: each element's group of so many columns reduced, at full size."""
    return _realized("reduce", x, list(x.get_size()), group, kind)


def value(x: Any, group: int, *, along_rows: bool) -> Any:
    """[M, K / group], as IR: of the M rows of ``x`` [..., K] one element of each group."""
    *rows, k = x.get_size()
    m, count = math.prod(rows), k // group
    result = _realized("value", x, [m, count], group)
    result.data.freeze_layout_with_exact_strides([1, m] if along_rows else [count, 1])
    return result


# Groups that a program has where a kernel reduces them alone, and its warps. Inductor takes 1, 8 or
# 32, two warps in any case, whichever its one timing shows as the fastest, which it is not always.
# H200, us, groups of 128, by trials (no command here prints them):
#     M x K        1     8    32  these
#     128x2048   2.4   1.75  2.0   1.8
#     64x16384   6.2   2.1   2.6   2.2
#     1024x7168 35.9   6.3   6.2   6.2
TILE = {"YBLOCK": 1, "XBLOCK": 16, "num_warps": 4}


def quantize_in_tiles(buffer: Any, group: int) -> None:
    """The kernel that computes ``buffer``, if it reduces groups of ``group`` elements, has ``TILE``
    of them a program: for the compilations of this thread, through the object that Inductor asks.
    Kernels of other buffers are treated as before."""
    virtualized = importlib.import_module("torch._inductor.virtualized").V
    tiled = vars(virtualized.graph).setdefault("inductor_quant_groups", {})
    tiled[buffer.get_name()] = group
    fixed_config = importlib.import_module("torch._inductor.codegen.triton").FixedTritonConfig

    def tile(features: Any, tiling: Any, given: Any) -> dict[str, Any]:
        if given.get("fixed_config") is not None or not _reduces_groups(features, tiling):
            return {}
        return {"fixed_config": fixed_config(_tile_of(tiling)), **PERSISTENT}

    _choose_also("tiles", tile)


def _reduces_groups(features: Any, tiling: Any) -> bool:
    """Whether a kernel is one of those, in one dimension or two beside that of a group."""
    virtualized = importlib.import_module("torch._inductor.virtualized").V
    tiled = getattr(virtualized.graph, "inductor_quant_groups", {})
    names = {name for node in features.scheduler_nodes() for name in node.get_buffer_names()}
    sizes = {tiled[name] for name in names & tiled.keys()}
    is_known = list(tiling)[-2:] == ["x", "r0_"] and len(tiling) <= 3
    return is_known and sizes == {features.reduction_numel} and _is_allowed()


def _tile_of(tiling: Any) -> dict[str, int]:
    """Without ``YBLOCK`` where groups have one dimension."""
    return {name: size for name, size in TILE.items() if name != "YBLOCK" or "y" in tiling}


def keep_rows_whole() -> None:
    """Kernels with one of these operations hold whole rows: for the compilations of this thread,
    through the object that Inductor asks. Idempotent."""

    def whole(features: Any, tiling: Any, given: Any) -> dict[str, Any]:
        is_ours = any(map(features.contains_op, (VALUE, *(REDUCE + kind for kind in _REDUCTIONS))))
        return PERSISTENT if is_ours else {}

    _choose_also("rows", whole)


PERSISTENT = {"override_persistent_reduction": True, "override_cooperative_reduction": False}


def _choose_also(name: str, more: Callable[[Any, Any, Any], dict[str, Any]]) -> None:
    """For the compilations of this thread, Inductor makes a kernel with what ``more`` (features of
    it, its tiling, what is chosen) says beside what it chooses. Once for each ``name``."""
    virtualized = importlib.import_module("torch._inductor.virtualized").V
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
    ir = importlib.import_module("torch._inductor.ir")
    _register()
    keep_rows_whole()
    *rows, k = x.get_size()
    loader, dtype = x.make_loader(), x.get_dtype()
    result = ir.TensorBox.create(
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
            reduction_hint=ir.ReductionHint.INNER,
            output_index=0,
        )
    )
    result.realize()
    return result


@functools.cache
def _nodes() -> dict[str, Any]:
    ir = importlib.import_module("torch._inductor.ir")
    ops = importlib.import_module("torch._inductor.virtualized").ops
    sympy = importlib.import_module("sympy")

    @ir.ir_dataclass
    class GroupNode(ir.Scan):  # type: ignore[name-defined]
        group: int
        kind: str

        def __post_init__(self) -> None:
            ir.Loops.__post_init__(self)  # a scan's size is that of its ranges

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
    """Names for Inductor's handlers: those that pass operations on, of dtypes, of Triton's code.

    (Of shapes: that of the arguments, unless the code is a variable with another.)
    """
    handler = importlib.import_module("torch._inductor.ops_handler").DefaultHandler
    dtypes = importlib.import_module("torch._inductor.dtype_propagation").DtypePropagationOpsHandler
    triton = importlib.import_module("torch._inductor.codegen.triton").TritonKernelOverrides
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
    """The kernel whose code is being written."""
    return importlib.import_module("torch._inductor.virtualized").V.kernel


def _text(shape: list[str]) -> str:
    return f"[{', '.join(shape)}]"


def _variable(kernel: Any, code: str, dtype: torch.dtype, shape: list[str]) -> Any:
    return kernel.cse.generate(kernel.compute, code, dtype=dtype, shape=tuple(shape))


def _tile(x: Any, group: int) -> tuple[Any, list[str], list[str]]:
    """``x`` with its groups as rows, that shape, and the shape it comes from."""
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
    # The maximum of equal numbers: within a thread they are one register, and so it costs nothing.
    tile, _, whole = _tile(x, group)
    shape = [*whole[:-1], f"{whole[-1]} // {group}"]
    return _variable(_kernel(), f"tl.reshape(tl.max({tile}, 1), {_text(shape)})", x.dtype, shape)


def _index_code(count: int, group: int) -> Any:
    """The number of each group of the row; those from ``count`` on are masked where it is used."""
    kernel = _kernel()
    whole = kernel.dense_size_list()
    last, length = len(whole) - 1, f"{whole[-1]} // {group}"
    shape = ["1"] * last + [length]
    code = f"tl.arange(0, {length}){kernel.indexing_size_str(last)}"
    index = _variable(kernel, code, torch.int32, shape)
    mask = _variable(kernel, f"{index} < {count}", torch.bool, shape)
    index.mask_vars.add(str(mask))
    return index

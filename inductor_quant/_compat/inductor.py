"""Inductor and Dynamo: re-exports, and one adapter for each difference between torch versions.

Each adapter says which versions it serves and when it can go. The symbols themselves, and the check
that they are there, are in ``symbols``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_quant._compat import padding
from inductor_quant._compat.symbols import SYMBOLS, config_module, has, symbol

# name here -> name in SYMBOLS; resolved on first use, so that this module imports on any torch
EXPORTS = {
    name.rpartition(":")[2]: name
    for name in SYMBOLS
    if name.rpartition(":")[2]
    in {
        *("CustomGraphPass", "FixedLayout", "StorageBox", "SymbolicGridFn", "TritonTemplate"),
        *("add_dont_constant_fold", "compile_fx", "fallback_handler", "lowerings"),
        *("make_pointwise", "register_lowering"),
    }
}


def __getattr__(name: str) -> Any:
    if name in EXPORTS:
        value = symbol(EXPORTS[name])
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def inductor_config() -> Any:
    """``torch._inductor.config``."""
    return config_module()


def _setting(name: str) -> Any:
    """An entry of Inductor's config, as the compilation under way has it."""
    return symbol(f"torch._inductor.config:{name}")


def uses_max_autotune() -> bool:
    """Whether the current compilation times several configurations."""
    return bool(_setting("max_autotune") or _setting("max_autotune_gemm"))


def choice_filter() -> Any:
    """The regular expression that the name of a choice has to match, as text; None: any may."""
    return _setting("test_configs.autotune_choice_name_regex")


def is_exporting() -> bool:
    """Whether the current compilation is AOTInductor's, for another process."""
    return bool(getattr(symbol("torch._inductor.virtualized:V"), "aot_compilation", False))


def keeps_roundings() -> bool:
    """Whether Inductor rounds to bf16 and fp16 where eager mode does, without fused multiply-adds.

    It holds for Inductor's own kernels; templates need ``triton_meta``."""
    return bool(_setting("emulate_precision_casts"))


def triton_kernel_name(index: int) -> str:
    """The name of a Triton kernel that a graph calls, by ``kernel_idx``; "" if it is not known."""
    try:
        kernel = symbol("torch._higher_order_ops.triton_kernel_wrap:kernel_side_table.get_kernel")(
            index
        )
    except (ImportError, AttributeError, AssertionError):
        return ""
    while hasattr(kernel, "fn"):  # the autotuner, then the JIT function
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", ""))


def uses_cpp_wrapper() -> bool:
    """Whether C++ launches the kernels: in an AOTInductor package, or with ``cpp_wrapper``."""
    return is_exporting() or bool(_setting("cpp_wrapper"))


def is_saved_whole() -> bool:
    """Whether the result of the current compilation is saved as one piece, a package or what
    ``standalone_compile`` returns, or launched from C++."""
    return uses_cpp_wrapper() or bool(_setting("triton.autotune_at_compile_time"))


def may_make_descriptors() -> bool:
    """Whether kernels of the current compilation may make tensor descriptors: the launcher has to
    allocate memory for those of each CTA."""
    return not uses_cpp_wrapper() or _cpp_scratch_is_of_the_grid()


@functools.cache
def _cpp_scratch_is_of_the_grid() -> bool:
    # 2.11: C++ allocates for one CTA, and the others write past its end; >= 2.13: for the grid
    # (pytorch/pytorch#175385). Drop with 2.11.
    overrides = symbol("torch._inductor.codegen.cuda.device_op_overrides:CUDADeviceOpOverrides")
    workspace = symbol("torch._inductor.codegen.common:TritonScratchWorkspace")
    lines, _ = overrides().cpp_scratch(0, workspace(1, lambda: "uint8"))
    return any("grid_0" in line for line in lines)


def folds_when_loaded() -> bool:
    """Whether an AOTInductor package folds its constants when it is loaded, and again whenever they
    are replaced."""
    return is_exporting() and bool(_setting("aot_inductor.use_runtime_constant_folding"))


def overlaps_collectives() -> bool:
    """Whether Inductor fuses matrix products with the collectives beside them."""
    return bool(_setting("_micro_pipeline_tp"))


def is_parameter(placeholder: torch.fx.Node) -> bool:
    """Whether an input of a post-grad graph is a parameter or buffer; True if that is not known."""
    context = symbol("torch._guards:TracingContext.try_get")()
    static = getattr(getattr(context, "fw_metadata", None), "static_input_indices", None)
    inputs = list(placeholder.graph.find_nodes(op="placeholder"))
    is_backward = any("tangents" in node.name for node in inputs)  # of other inputs
    return static is None or is_backward or inputs.index(placeholder) in static


def is_freezing() -> bool:
    """Whether Inductor turns parameters into constants and folds what depends on them alone."""
    return bool(_setting("freezing"))


def inductor_wrapper(mode: str | None, options: dict[str, Any]) -> Any:
    """torch.compile's own object for backend="inductor": validates ``options``, expands ``mode``.

    Its ``.config`` holds the resulting config patches, ``.reset()`` is what ``torch.compile``
    calls.
    """
    return symbol("torch:_TorchCompileInductorWrapper")(mode, options, None)


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tracing treats this size as unknown, and fails if the code depends on it."""
    symbol("torch._dynamo:mark_dynamic")(tensor, dim)


def values_of(tensor: torch.Tensor) -> list[Any]:
    """The elements of a real tensor, row-major, even while fake tensors are traced."""
    with symbol("torch.utils._python_dispatch:_disable_current_modes")():
        found: list[Any] = tensor.detach().flatten().tolist()
    return found


def is_of_module(placeholder: torch.fx.Node) -> bool:
    """Whether Dynamo found this graph input in a module; False if it does not say."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    where = getattr(source, "guard_source", None)
    where = where() if callable(where) else where
    asked = ("is_unspecialized_nn_module", "is_specialized_nn_module")
    return any(getattr(where, name, bool)() for name in asked)


# ------------------------------------------------------------------------------------------
# slots of custom graph passes


def passes_in(slot_value: Any) -> tuple[Any, ...]:
    """The passes in a value of a custom-pass slot, in order."""
    if slot_value is None:
        return ()
    if isinstance(slot_value, (list, tuple)):
        return tuple(slot_value)
    members = getattr(slot_value, "chained_passes", None)  # the 2.11 composite below
    return members if members is not None else (slot_value,)


def slot_value(passes: Sequence[Any]) -> Any:
    """A value for a custom-pass slot that runs ``passes`` in order.

    2.11: one pass object, so several go into a composite; >= 2.13: a tuple. Drop with 2.11.
    """
    if len(passes) <= 1:
        return passes[0] if passes else None
    if has("torch._inductor.custom_graph_pass:get_custom_graph_passes"):
        return tuple(passes)
    return _chain(tuple(passes))


def _chain(passes: tuple[Any, ...]) -> Any:
    base = symbol("torch._inductor.custom_graph_pass:CustomGraphPass")

    class ChainedPasses(base):  # type: ignore[valid-type, misc]
        chained_passes = passes

        def __call__(self, graph: torch.fx.Graph) -> None:
            for item in passes:
                item(graph)

        def uuid(self) -> Any:
            ids = [item.uuid() if isinstance(item, base) else None for item in passes]
            return None if any(i is None for i in ids) else tuple(ids)

    return ChainedPasses()


def install_globally(slot: str, item: Any) -> None:
    """Append ``item`` to a slot for all threads of the process. Idempotent."""
    _edit_global_slot(slot, lambda old: [p for p in old if p is not item] + [item])


def uninstall_globally(slot: str, item: Any) -> None:
    """Remove ``item`` from a slot and leave the others. Idempotent."""
    _edit_global_slot(slot, lambda old: [p for p in old if p is not item])


def _edit_global_slot(slot: str, edit: Callable[[tuple[Any, ...]], list[Any]]) -> None:
    # 2.11: one value for the process. >= 2.13: what a user sets is a context variable, seen by the
    # thread that set it alone, so a setting for the process has to be the default; a tuple, because
    # only immutable defaults are not deep-copied on access. Drop the first branch with 2.11.
    config = inductor_config()
    entry = _setting("_config")[slot]
    if not hasattr(entry.user_override, "get"):
        setattr(config, slot, slot_value(edit(passes_in(getattr(config, slot)))))
        return
    entry.default = tuple(edit(passes_in(entry.default))) or None
    _setting("_hash_dirty_var").set(True)
    unset = symbol("torch.utils._config_module:_UNSET_SENTINEL")
    if entry.user_override.get() is not unset:  # this thread set the slot itself
        setattr(config, slot, slot_value(edit(passes_in(entry.user_override.get()))))


# ------------------------------------------------------------------------------------------
# lowering


def select(
    name: str, choices: list[Any], inputs: list[Any], layout: Any, examples: Any = None
) -> tuple[Any, list[float | None]]:
    """The chosen kernel's output as a TensorBox, and what each choice took (ms; None: not timed).
    ``examples``: by number of an input, what makes it for the timing, from its buffer.

    ``return_multi_template=False``: the bare kernels are timed and one is chosen here; the epilogue
    is then fused into it without another benchmark, so fusion is deterministic."""
    timed: dict[Any, float] = {}

    def save(timings: dict[Any, float], *_: Any) -> None:
        timed.update(timings)

    symbol("torch._inductor.select_algorithm:add_feedback_saver")(save)
    how = {"return_multi_template": False, "input_gen_fns": examples}
    select_algorithm = symbol("torch._inductor.select_algorithm:autotune_select_algorithm")
    try:  # 2.11: the node; >= 2.13: (node, choice). Drop with 2.11.
        result = select_algorithm(name, choices, inputs, layout, **how)
    finally:
        cache = symbol("torch._inductor.select_algorithm:get_algorithm_selector_cache")()
        cache.feedback_saver_fns.remove(save)
    node = result[0] if isinstance(result, tuple) else result
    return node, [timed.get(choice) for choice in choices]


class BytePointers(dict[str, Any]):
    """A template's ``triton_meta`` that types e4m3 tensors as bytes: Triton has no e4m3 pointers
    below sm_89. Inductor adds its own entries with ``update``."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        if "signature" in self:
            types = self["signature"].items()
            self["signature"] = {n: "*u8" if t == "*fp8e4nv" else t for n, t in types}


def keep_rows_in_registers(op: Any, longest: int) -> None:
    """Reductions that ``op`` lowers to are persistent for rows of up to ``longest`` elements: the
    row is loaded once and stays in registers for the rest of the kernel.

    Holds for compilations of this thread (``V.choices``). Idempotent. Kernels without ``op`` do not
    change.
    """
    virtualized = symbol("torch._inductor.virtualized:V")
    before = virtualized.choices
    if op in getattr(before, "row_ops", ()):
        return

    def fits(features: Any) -> bool:
        size = known_int(features.reduction_numel)
        nodes = [node.node for node in features.scheduler_nodes()]
        return (
            _setting("triton.persistent_reductions")
            and size is not None
            and size <= longest
            and any(origin.target == op for node in nodes for origin in node.get_origins())
        )

    class RowChoices(type(before)):  # type: ignore[misc]
        row_ops = (op, *getattr(before, "row_ops", ()))

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            return before.should_use_persistent_reduction(features, cooperative_reduction) or (
                not cooperative_reduction and fits(features)
            )

    after = copy.copy(before)
    after.__class__ = RowChoices
    virtualized.set_choices_handler(after)


def unchanged_choices() -> Any:
    """A context after which ``V.choices`` is what it was before."""
    virtualized = symbol("torch._inductor.virtualized:V")
    return virtualized.set_choices_handler(virtualized.choices)


def surround_compilation(boundary: Callable[..., Any]) -> None:
    """Let ``boundary(inner, gm, inputs, kwargs)`` run Inductor's compilation of each graph,
    ``inner(gm, inputs, **kwargs)``: its post-grad passes, lowering, code generation, and the
    look-up in its cache."""
    inner = symbol("torch._inductor.compile_fx:_compile_fx_inner")

    @functools.wraps(inner)
    def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return boundary(inner, gm, inputs, kwargs)

    symbol("torch._inductor.compile_fx:")._compile_fx_inner = compile_graph


def ops() -> Any:
    """The ops of a pointwise lowering (``ops.add``, ``ops.fma``, ...)."""
    return symbol("torch._inductor.virtualized:ops")


def current_node() -> torch.fx.Node | None:
    """The FX node that is being lowered."""
    return getattr(symbol("torch._inductor.virtualized:V").graph, "current_node", None)


def realize(node: Any) -> Any:
    """``node`` as a buffer or a strided view of one; templates take any strides.

    The strides are frozen: kernels are chosen by them, and Inductor may otherwise still reorder a
    buffer that it computes, to match its inputs (``quantize(x.t())``)."""
    with padding.of_rows_only(node):
        buffer = symbol("torch._inductor.ir:ExternKernel.realize_input")(node)
        buffer.freeze_layout()
    return buffer


def is_in_memory(box: Any, *, reduces: bool) -> bool:
    """Whether ``box``, or its base, is already in memory: not the result of a kernel into which
    Inductor could fuse a reduction (``reduces``) or a pointwise op (templates included)."""
    views = (symbol("torch._inductor.ir:MutableBox"), symbol("torch._inductor.ir:BaseView"))
    while isinstance(box, views):
        box = box.data
    fused = [symbol("torch._inductor.ir:ComputedBuffer")]
    if not reduces:
        fused.append(symbol("torch._inductor.ir:TemplateBuffer"))
    return isinstance(box, symbol("torch._inductor.ir:Buffer")) and not isinstance(
        box, tuple(fused)
    )


def compute_at_each_reader(box: Any) -> None:
    """Inline the pointwise ``box`` into every reader, where Inductor would materialize it because
    it has two users or reads many values. A reader that needs it in memory still stores it."""
    kind = _inlined_box()
    if isinstance(box.data, symbol("torch._inductor.ir:StorageBox")):
        box.data = kind(box.data.data)


@functools.cache
def _inlined_box() -> Any:
    class InlinedBox(symbol("torch._inductor.ir:StorageBox")):  # type: ignore[misc]
        def should_realize_on_reuse(self, users: int, **_: Any) -> bool:
            return False

        def has_exceeded_max_reads(self) -> bool:
            return False

    return InlinedBox


def has_aligned_rows(node: Any, dim: int) -> bool:
    """Whether each row of the matrix ``node`` (a buffer; ``dim`` counts its rows) is contiguous and
    starts at a multiple of 16 bytes, for certain, even with symbolic sizes: tensor descriptors need
    it. Not an expanded row: a stride of 0 is not documented for descriptors."""
    strides = [known_int(stride) for stride in node.get_stride()]
    distance = strides[dim]
    return (
        is_aligned(node)
        and strides[1 - dim] == 1
        and distance is not None
        and distance * node.get_dtype().itemsize % 16 == 0
        and distance != 0
    )


def is_aligned(node: Any) -> bool:
    """Whether ``node``, a buffer, starts at a multiple of 16 bytes, for certain."""
    offset = known_int(node.get_layout().offset)
    return (
        node.get_name() not in symbol("torch._inductor.virtualized:V").graph.unaligned_buffers
        and offset is not None
        and offset * node.get_dtype().itemsize % 16 == 0
    )


def size_hints(sizes: Iterable[Any]) -> list[int]:
    """Ints for possibly symbolic sizes: their values in the call that is being compiled."""
    sizevars = symbol("torch._inductor.virtualized:V").graph.sizevars
    return [int(sizevars.optimization_hint(size)) for size in sizes]


def known_int(size: Any) -> int | None:
    """The value of a size, None if it is symbolic. Adds no guard."""
    return int(size) if isinstance(size, int) or getattr(size, "is_Integer", False) else None


def limit(size: Any) -> int | None:
    """The most that a size, of FX or of IR, is in any call, if the compilation is for that value:
    it is an int, or its hint is its upper bound. None: unknown. Adds no guard."""
    if (known := known_int(size)) is not None:
        return known
    if isinstance(size, torch.SymInt):
        env, expr, hint = size.node.shape_env, size.node.expr, size.node.hint
    else:
        sizevars = symbol("torch._inductor.virtualized:V").graph.sizevars
        env, expr, hint = sizevars.shape_env, size, None
    upper = env.bound_sympy(expr).upper
    if not getattr(upper, "is_Integer", False):
        return None
    if hint is None and not isinstance(size, torch.SymInt):
        [hint] = size_hints([size])
    return int(upper) if upper == hint else None


def active_passes(slot: str) -> tuple[Any, ...]:
    """The passes in ``slot`` in the current compilation."""
    return passes_in(getattr(inductor_config(), slot))


# ------------------------------------------------------------------------------------------
# devices


def runs_triton(device: torch.device) -> bool:
    """Whether Inductor lowers to Triton for this device, and Triton has matrix instructions for
    it: CUDA (not ROCm) from compute capability 8.0 on, or a CPU with ``cpu_backend="triton"`` (the
    interpreter)."""
    if device.type == "cuda":
        is_triton = getattr(inductor_config(), "cuda_backend", "triton") == "triton"
        is_cuda = torch.version.hip is None
        return is_cuda and is_triton and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and _setting("cpu_backend") == "triton"


@contextmanager
def fake_mode_of(values: Iterable[Any]) -> Iterator[None]:
    """The fake mode of the first fake tensor among ``values``, entered."""
    for value in values:
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            with mode:
                yield
            return
    yield


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of ``tensor`` on ``device``. (``simulate`` replaces it: its device is virtual.)"""
    return tensor.to(device)


def real_tensors() -> AbstractContextManager[None]:
    """Within, ops run on real tensors, also while a fake mode is entered."""
    return symbol("torch._subclasses.fake_tensor:unset_fake_temporarily")()


def traced(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """The graph of ``function(*values)``, in the ops that Inductor decomposes to, but with every
    matrix product (of one row it makes a sum under some options); ``values``: fake tensors."""
    table = dict(symbol("torch._inductor.decomposition:select_decomp_table")())
    for product in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
        table.pop(product.default, None)
    with fake_mode_of(values):
        gm = make_fx(function, table, tracing_mode="real")(*values)
    gm.graph.eliminate_dead_code()
    return gm

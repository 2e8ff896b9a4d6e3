"""The boundary: every private torch symbol and every difference between torch versions.

Nothing else in the package imports ``torch._inductor``, ``torch._dynamo`` or another private module
(a lint rule and a test see to it). Three parts: what we need and a check that it is there; plain
re-exports, resolved on first use so that this module imports on any torch; one adapter per
difference, with the versions it serves and when it can go.

``python -m inductor_quant._torch_compat`` lists everything missing or changed in the installed
torch.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

SUPPORTED = ("2.11", "2.13", "2.15")

# name here -> module it lives in (the same in all supported versions)
_EXPORTS = {
    "AlgorithmSelectorCache": "torch._inductor.select_algorithm",
    "CustomGraphPass": "torch._inductor.custom_graph_pass",
    "ExternKernel": "torch._inductor.ir",
    "StorageBox": "torch._inductor.ir",
    "SymbolicGridFn": "torch._inductor.select_algorithm",
    "TritonTemplate": "torch._inductor.select_algorithm",
    "V": "torch._inductor.virtualized",
    "add_dont_constant_fold": "torch._inductor.constant_folding",
    "add_feedback_saver": "torch._inductor.select_algorithm",
    "autotune_select_algorithm": "torch._inductor.select_algorithm",
    "compile_fx": "torch._inductor.compile_fx",
    "FixedLayout": "torch._inductor.ir",
    "fallback_handler": "torch._inductor.lowering",
    "get_algorithm_selector_cache": "torch._inductor.select_algorithm",
    "lowerings": "torch._inductor.lowering",
    "make_pointwise": "torch._inductor.lowering",
    "register_lowering": "torch._inductor.lowering",
}

# name -> parameters that we pass to it by keyword or position
_PARAMETERS = {
    "TritonTemplate": ("name", "grid", "source"),
    "compile_fx": ("model_", "example_inputs_", "config_patches"),
    "FixedLayout": ("device", "dtype", "size"),
    "make_pointwise": ("fn", "override_return_dtype"),
    "fallback_handler": ("kernel", "add_to_fallback_set"),
    "register_lowering": ("aten_fn", "type_promotion_kind"),
}

_SELECT = ("name", "choices", "input_nodes", "layout", "return_multi_template")
_CONFIG = (
    "max_autotune",
    "max_autotune_gemm",
    "emulate_precision_casts",
    "freezing",
    "cpu_backend",
    "joint_custom_pre_pass",
    "post_grad_custom_pre_pass",
)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def problems() -> tuple[str, ...]:
    """What the installed torch lacks of what we need, one sentence each; empty: nothing."""
    found = []
    for name, module in _EXPORTS.items():
        try:
            symbol = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            found.append(f"{module}.{name} is missing ({error})")
            continue
        found += _missing_parameters(f"{module}.{name}", symbol, _PARAMETERS.get(name, ()))
        if name == "AlgorithmSelectorCache":  # which autotune_select_algorithm(*args, **how) calls
            found += _missing_parameters(f"{module}.{name}", symbol.__call__, _SELECT)
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is None or not {"mode", "options", "dynamic"} <= set(_parameters(wrapper)):
        found.append("torch._TorchCompileInductorWrapper is missing or changed")
    try:
        config = inductor_config()
        found += [
            f"torch._inductor.config.{n} is missing" for n in _CONFIG if not hasattr(config, n)
        ]
    except ImportError as error:
        found.append(f"torch._inductor.config cannot be imported ({error})")
    return tuple(found)


def _missing_parameters(where: str, symbol: Any, expected: tuple[str, ...]) -> list[str]:
    found = _parameters(symbol)
    # One that takes anything (a wrapper, of a profiler or of ours) says nothing.
    if any(kind is inspect.Parameter.VAR_KEYWORD for kind in found.values()):
        return []
    missing = [name for name in expected if name not in found]
    return [f"{where} no longer takes {', '.join(missing)}"] if missing else []


def _parameters(symbol: Any) -> dict[str, Any]:
    """The names of a callable's parameters and their kinds; none where it cannot be told."""
    try:
        return {name: p.kind for name, p in inspect.signature(symbol).parameters.items()}
    except (TypeError, ValueError):
        return {}


def inductor_config() -> Any:
    """``torch._inductor.config``."""
    return importlib.import_module("torch._inductor.config")


def uses_max_autotune() -> bool:
    """Whether the current compilation pays for timing several configurations."""
    config = inductor_config()
    return bool(config.max_autotune or config.max_autotune_gemm)


def is_exporting() -> bool:
    """Whether the compilation under way is AOTInductor's, for another process."""
    return bool(getattr(__getattr__("V"), "aot_compilation", False))


def keeps_roundings() -> bool:
    """Whether Inductor rounds to bf16 and fp16 wherever eager mode does, and fuses no multiply-add.

    (Its own kernels; templates are told by ``triton_meta``.)
    """
    return bool(inductor_config().emulate_precision_casts)


def triton_kernel_name(index: int) -> str:
    """Of a Triton kernel that a graph calls, by its ``kernel_idx``; "" where it is not known."""
    try:
        module = importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")
        kernel = module.kernel_side_table.get_kernel(index)
    except (ImportError, AttributeError, AssertionError):
        return ""
    while hasattr(kernel, "fn"):  # what autotunes it, and what compiles it
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", ""))


def uses_cpp_wrapper() -> bool:
    """Whether C++ launches the kernels: in a package, or as the user asked."""
    return is_exporting() or bool(inductor_config().cpp_wrapper)


def may_make_descriptors() -> bool:
    """Whether kernels of the compilation under way may make tensor descriptors: these lie in memory
    that the launcher has to provide for each program."""
    return not uses_cpp_wrapper() or _cpp_scratch_is_of_the_grid()


@functools.cache
def _cpp_scratch_is_of_the_grid() -> bool:
    # 2.11: C++ provides the memory of one program, and all others write past its end; >= 2.13: of
    # the grid (pytorch/pytorch#175385); drop with 2.11
    overrides = importlib.import_module("torch._inductor.codegen.cuda.device_op_overrides")
    common = importlib.import_module("torch._inductor.codegen.common")
    workspace = common.TritonScratchWorkspace(1, lambda: "uint8")
    lines, _ = overrides.CUDADeviceOpOverrides().cpp_scratch(0, workspace)
    return any("grid_0" in line for line in lines)


def folds_when_loaded() -> bool:
    """Whether a package of AOTInductor computes what depends on its constants alone where it is
    loaded, and anew whenever they are replaced."""
    return is_exporting() and bool(inductor_config().aot_inductor.use_runtime_constant_folding)


def inputs_to_be_frozen() -> int:
    """How many of a graph's placeholders, from the first on, freezing replaces by constants (but
    for those that are written to or returned)."""
    context = torch._guards.TracingContext.try_get()
    return len(getattr(context, "params_flat_unwrap_subclasses", None) or ())


def is_freezing() -> bool:
    """Whether Inductor makes constants of parameters, and folds what is computed of them."""
    return bool(inductor_config().freezing)


def inductor_wrapper(mode: str | None, options: dict[str, Any]) -> Any:
    """torch.compile's own object for backend="inductor": validates ``options``, expands ``mode``.

    Its ``.config`` holds the resulting config patches, ``.reset()`` is what ``torch.compile``
    calls.
    """
    return torch._TorchCompileInductorWrapper(mode, options, None)


def values_of(tensor: torch.Tensor) -> list[Any]:
    """The elements of a tensor that has some, row-major; also while fake tensors are traced."""
    modes = importlib.import_module("torch.utils._python_dispatch")
    with modes._disable_current_modes():
        found: list[Any] = tensor.detach().flatten().tolist()
    return found


def is_of_module(placeholder: torch.fx.Node) -> bool:
    """Whether Dynamo found this input of a graph in a module; False where it does not say."""
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
    module = importlib.import_module("torch._inductor.custom_graph_pass")
    if hasattr(module, "get_custom_graph_passes"):
        return tuple(passes)
    return _chain(tuple(passes))


def _chain(passes: tuple[Any, ...]) -> Any:
    base = __getattr__("CustomGraphPass")

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
    entry = config._config[slot]
    if not hasattr(entry.user_override, "get"):
        setattr(config, slot, slot_value(edit(passes_in(getattr(config, slot)))))
        return
    entry.default = tuple(edit(passes_in(entry.default))) or None
    config._hash_dirty_var.set(True)
    unset = importlib.import_module("torch.utils._config_module")._UNSET_SENTINEL
    if entry.user_override.get() is not unset:  # this thread set the slot itself
        setattr(config, slot, slot_value(edit(passes_in(entry.user_override.get()))))


# ------------------------------------------------------------------------------------------
# lowering


def select(
    name: str, choices: list[Any], inputs: list[Any], layout: Any
) -> tuple[Any, list[float | None]]:
    """The chosen kernel's output as a TensorBox, and what each choice took (ms; None: not timed).

    ``return_multi_template=False``: the choice is made here, by the times of the bare kernels, and
    what follows is then fused into the winner without a further benchmark. Fusion is deterministic.
    """
    timed: dict[Any, float] = {}

    def save(timings: dict[Any, float], *_: Any) -> None:
        timed.update(timings)

    selector = importlib.import_module("torch._inductor.select_algorithm")
    selector.add_feedback_saver(save)
    try:
        # 2.11: the node; >= 2.13: (node, choice). Drop with 2.11.
        result = selector.autotune_select_algorithm(
            name, choices, inputs, layout, return_multi_template=False
        )
    finally:
        selector.get_algorithm_selector_cache().feedback_saver_fns.remove(save)
    node = result[0] if isinstance(result, tuple) else result
    return node, [timed.get(choice) for choice in choices]


class BytePointers(dict[str, Any]):
    """A template's ``triton_meta`` in which e4m3 tensors are bytes: Triton has no pointers to e4m3
    below compute capability 8.9. Inductor puts its own entries in by ``update``."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        if "signature" in self:
            types = self["signature"].items()
            self["signature"] = {n: "*u8" if t == "*fp8e4nv" else t for n, t in types}


def keep_rows_in_registers(op: Any, longest: int) -> None:
    """Reductions that ``op`` was lowered to become persistent up to rows of ``longest`` elements:
    the row is loaded once, and kept in registers for what else its kernel computes from it.

    For the compilations of this thread, through the object that Inductor asks for such choices.
    Idempotent. Kernels without ``op`` are treated as before.
    """
    virtualized = __getattr__("V")
    before = virtualized.choices
    if op in getattr(before, "row_ops", ()):
        return

    def fits(features: Any) -> bool:
        size = known_int(features.reduction_numel)
        nodes = [node.node for node in features.scheduler_nodes()]
        return (
            inductor_config().triton.persistent_reductions
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


def ops() -> Any:
    """What a pointwise lowering is written in (``ops.add``, ``ops.fma``, ...)."""
    return importlib.import_module("torch._inductor.virtualized").ops


def current_node() -> torch.fx.Node | None:
    """The FX node that is being lowered."""
    return getattr(__getattr__("V").graph, "current_node", None)


def realize(node: Any) -> Any:
    """``node`` as a buffer or a strided view of one, whatever its strides: templates take any.

    They are final: kernels are chosen by them, and Inductor would still change those of a buffer
    that it computes, to the order of what is read for it (``quantize(x.t())``).
    """
    buffer = __getattr__("ExternKernel").realize_input(node)
    buffer.freeze_layout()
    return buffer


def is_in_memory(box: Any, *, reduces: bool) -> bool:
    """Whether ``box``, or what it views, is no result of a kernel into which Inductor could fuse a
    reduction (``reduces``), or what is computed element by element: into a template's as well."""
    ir = importlib.import_module("torch._inductor.ir")
    while isinstance(box, (ir.MutableBox, ir.BaseView)):
        box = box.data
    fused = ir.ComputedBuffer if reduces else (ir.ComputedBuffer, ir.TemplateBuffer)
    return isinstance(box, ir.Buffer) and not isinstance(box, fused)


def compute_at_each_reader(box: Any) -> None:
    """Let Inductor not store ``box``, computed element by element, because two nodes read it, or
    because it reads much. What needs it in memory still stores it."""
    kind = _inlined_box()
    if isinstance(box.data, __getattr__("StorageBox")):
        box.data = kind(box.data.data)


@functools.cache
def _inlined_box() -> Any:
    class InlinedBox(__getattr__("StorageBox")):  # type: ignore[misc]
        def should_realize_on_reuse(self, users: int, **_: Any) -> bool:
            return False

        def has_exceeded_max_reads(self) -> bool:
            return False

    return InlinedBox


def has_aligned_rows(node: Any, dim: int) -> bool:
    """Whether the matrix ``node``, a buffer, begins at a multiple of 16 bytes, and so does whatever
    ``dim`` counts, which is contiguous: certainly, also where sizes are symbolic. Not one row that
    is expanded: whether a tensor descriptor may step by 0 is not documented."""
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
    """Whether ``node``, a buffer, begins at a multiple of 16 bytes, certainly."""
    offset = known_int(node.get_layout().offset)
    return (
        node.get_name() not in __getattr__("V").graph.unaligned_buffers
        and offset is not None
        and offset * node.get_dtype().itemsize % 16 == 0
    )


def size_hints(sizes: Iterable[Any]) -> list[int]:
    """Ints for possibly symbolic sizes: what they were in the call that is being compiled."""
    sizevars = __getattr__("V").graph.sizevars
    return [int(sizevars.optimization_hint(size)) for size in sizes]


def known_int(size: Any) -> int | None:
    """The value of a size that is not symbolic, else None. Adds no guard."""
    return int(size) if isinstance(size, int) or getattr(size, "is_Integer", False) else None


def active_passes(slot: str) -> tuple[Any, ...]:
    """The passes that the compilation under way has in ``slot``."""
    return passes_in(getattr(inductor_config(), slot))


# ------------------------------------------------------------------------------------------
# devices


def runs_triton(device: torch.device) -> bool:
    """Whether Inductor lowers to Triton for this device, and Triton has matrix instructions for
    it: CUDA (not ROCm) from compute capability 8.0 on, or a CPU with ``cpu_backend="triton"`` (the
    interpreter)."""
    config = inductor_config()
    if device.type == "cuda":
        is_triton = getattr(config, "cuda_backend", "triton") == "triton"
        is_cuda = torch.version.hip is None
        return is_cuda and is_triton and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and config.cpu_backend == "triton"


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


def main() -> int:
    found = problems()
    print(f"torch {torch.__version__}; supported: {', '.join(SUPPORTED)}")
    for problem in found:
        print(f"  {problem}")
    print("everything that inductor_quant needs is there" if not found else "NOT USABLE")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

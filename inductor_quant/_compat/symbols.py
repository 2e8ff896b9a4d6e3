"""Every private symbol of torch and Triton that this package uses, and a check that it is there.

``symbol(name)`` is the only way to one: a name that is not in ``SYMBOLS`` is an error, so the table
is complete. ``problems()`` compares it with what is installed. README.md in this folder says why
each is needed, and from which version on it can go.

``python -m inductor_quant._compat`` prints what is missing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from typing import Any

import torch

SUPPORTED = ("2.11", "2.13", "2.15")
# What is lost with a symbol: everything, the kernels in Gluon, or the fusion of a norm with a
# quantization in groups.
PARTS = ("inductor", "gluon", "group_reduce")


@dataclasses.dataclass(frozen=True)
class Symbol:
    """One private symbol.

    names       ``module:attribute``, or ``module:``; of several spellings the newest first
    part        one of ``PARTS``
    parameters  that we pass to it, or that our replacement of it takes
    is_patched  we replace it
    since       the first version of torch that has it, where an older one does not need it
    """

    names: tuple[str, ...]
    part: str
    parameters: tuple[str, ...] = ()
    is_patched: bool = False
    since: str = ""


SYMBOLS: dict[str, Symbol] = {}


def _add(
    part: str,
    module: str,
    *names: str,
    parameters: tuple[str, ...] = (),
    is_patched: bool = False,
    since: str = "",
) -> None:
    for name in names:
        spellings = tuple(f"{module}:{spelling}" for spelling in name.split("|"))
        found = Symbol(spellings, part, parameters, is_patched, since)
        assert spellings[0] not in SYMBOLS, spellings
        SYMBOLS[spellings[0]] = found


_SELECT = "torch._inductor.select_algorithm"
_add("inductor", _SELECT, "", "SymbolicGridFn", "V", "add_feedback_saver", "texpr")
_add("inductor", _SELECT, "PyCodeCache", is_patched=True)
_add("inductor", _SELECT, "TritonTemplate", parameters=("name", "grid", "source"))
_add("inductor", _SELECT, "autotune_select_algorithm", "get_algorithm_selector_cache")
_add(
    "inductor",
    _SELECT,
    "AlgorithmSelectorCache.__call__",
    parameters=("name", "choices", "input_nodes", "layout", "return_multi_template"),
)
_add("inductor", "torch._inductor.custom_graph_pass", "CustomGraphPass")
_add("inductor", "torch._inductor.custom_graph_pass", "get_custom_graph_passes", since="2.13")
_IR = "torch._inductor.ir"
_add("inductor", _IR, "ExternKernel.realize_input", "StorageBox", "MutableBox", "BaseView")
_add("inductor", _IR, "Buffer", "ComputedBuffer", "TemplateBuffer", "Layout")
_add(
    *("inductor", _IR, "Layout._pad_strides"),
    parameters=("in_strides", "size", "dtype"),
    is_patched=True,
)
_add("inductor", _IR, "FixedLayout", parameters=("device", "dtype", "size"))
_add("inductor", _IR, "InputBuffer", parameters=("name", "layout"))
_add("inductor", _IR, "Pointwise")
_LOWERING = "torch._inductor.lowering"
_add("inductor", _LOWERING, "lowerings")
_add("inductor", _LOWERING, "fallback_handler", parameters=("kernel", "add_to_fallback_set"))
_add("inductor", _LOWERING, "make_pointwise", parameters=("fn", "override_return_dtype"))
_add("inductor", _LOWERING, "register_lowering", parameters=("aten_fn", "type_promotion_kind"))
_add("inductor", "torch._inductor.virtualized", "V", "ops")
_add("inductor", "torch._inductor.constant_folding", "add_dont_constant_fold")
_add(
    "inductor",
    "torch._inductor.compile_fx",
    "compile_fx",
    parameters=("model_", "example_inputs_", "config_patches"),
)
_add("inductor", "torch._inductor.compile_fx", "", "compile_fx_inner")
_add("inductor", "torch._inductor.decomposition", "select_decomp_table")
_add("inductor", "torch._inductor.compile_fx", "_compile_fx_inner", is_patched=True)
_add("inductor", "torch._inductor.fx_passes.joint_graph", "patterns")
_add("inductor", "torch._inductor.async_compile", "AsyncCompile")
_add("inductor", "torch._inductor.async_compile", "AsyncCompile.wait", is_patched=True)
_add("inductor", "torch._inductor.codecache", "CodeCacheFuture", "PyCodeCache")
_add("inductor", "torch._inductor.codecache", "PyCodeCache.write", "PyCodeCache.load")
_add("inductor", "torch._inductor.codegen.triton", "TritonScheduling")
_add("inductor", "torch._inductor.utils", "Placeholder.KERNEL_NAME")
_add(
    *("inductor", "torch._inductor.codegen.triton", "TritonScheduling.define_kernel"),
    parameters=("src_code", "node_schedule", "kernel"),
    is_patched=True,
)
_add("inductor", "torch._subclasses.fake_tensor", "FakeTensorMode", "unset_fake_temporarily")
_CONFIG = "torch._inductor.config"
_add("inductor", _CONFIG, "max_autotune", "max_autotune_gemm", "emulate_precision_casts")
_add("inductor", _CONFIG, "freezing", "cpu_backend", "cpp_wrapper", "combo_kernels")
_add("inductor", _CONFIG, "comprehensive_padding", "padding_alignment_bytes")
_add("inductor", _CONFIG, "padding_stride_threshold")
_add("inductor", _CONFIG, "joint_custom_pre_pass", "post_grad_custom_pre_pass")
_add("inductor", _CONFIG, "triton.autotune_at_compile_time")
_add("inductor", _CONFIG, "triton.persistent_reductions", "triton.dense_indexing", "_config")
_add("inductor", _CONFIG, "_micro_pipeline_tp", "test_configs.autotune_choice_name_regex")
_add("inductor", _CONFIG, "aot_inductor.use_runtime_constant_folding")
_add("inductor", _CONFIG, "_hash_dirty_var", since="2.13")
_add("inductor", "torch.utils._config_module", "_UNSET_SENTINEL", since="2.13")
_add("inductor", "torch._higher_order_ops.triton_kernel_wrap", "kernel_side_table.get_kernel")
_add("inductor", "torch._inductor.codegen.cuda.device_op_overrides", "CUDADeviceOpOverrides")
_add("inductor", "torch._inductor.codegen.common", "TritonScratchWorkspace")
_add("inductor", "torch._dynamo", "mark_dynamic")
_GUARDS = "torch._guards"
_add("inductor", _GUARDS, "TracingContext", "TracingContext.try_get", "tracing")
_add("inductor", _GUARDS, "CompileContext.try_get", "compile_context")
_SHAPES = "torch.fx.experimental.symbolic_shapes"
_add("inductor", _SHAPES, "DimDynamic", "ShapeEnv", "ShapeEnv.bound_sympy")
_add("inductor", _SHAPES, "statically_known_true")
_add(
    "inductor",
    _SHAPES,
    "ShapeEnv.create_symbol",
    parameters=("val", "source", "dynamic_dim", "do_not_specialize_zero_one"),
)
_add("inductor", _SHAPES, "ShapeEnv.create_symintnode", parameters=("sym", "hint"))
_add("inductor", _SHAPES, "ShapeEnv.create_symfloatnode", parameters=("sym", "hint"))
_add("inductor", "torch.utils._sympy.numbers", "int_oo")
_add("inductor", "torch.utils._sympy.printers", "PythonPrinter")
_add("inductor", "torch.utils._sympy.value_ranges", "ValueRanges")
_add("inductor", "torch._dynamo.convert_frame", "compile_lock")
_add("inductor", "torch._dynamo.source", "ConstantSource")
_add("inductor", "torch._dynamo.utils", "counters")
_add("inductor", "torch.utils._python_dispatch", "_disable_current_modes")
_add(
    "inductor",
    "torch",
    "_TorchCompileInductorWrapper",
    parameters=("mode", "options", "dynamic"),
)

_GLUON = "triton.experimental.gluon"
_add("gluon", "triton", "knobs.runtime")
_add("gluon", _GLUON, "")
_add("gluon", f"{_GLUON}.language", "")
_add("gluon", f"{_GLUON}._runtime", "GluonASTSource")
_add("gluon", f"{_GLUON}.language", "barrier|thread_barrier")
_HOPPER = f"{_GLUON}.language.nvidia.hopper"
_add("gluon", _HOPPER, "mbarrier", "mbarrier.wait", "tma", "fence_async_shared")
_add("gluon", _HOPPER, "tma.async_load|tma.async_copy_global_to_shared")
_add("gluon", _HOPPER, "warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait")
_AMPERE = f"{_GLUON}.language.nvidia.ampere"
_add("gluon", _AMPERE, "mma_v2", "async_copy")
_add("gluon", _AMPERE, "async_copy.async_load|async_copy.async_copy_global_to_shared")
_CORE = f"{_GLUON}.language._core"
_add("gluon", _CORE, "", "builtin", "AutoLayout", "_unwrap_if_constexpr", "inline_asm_elementwise")
_BUFFER = "shared_memory_descriptor"  # its method is public from Triton 3.9 on
_add("gluon", _CORE, f"{_BUFFER}.reinterpret|{_BUFFER}._reinterpret")
_add("gluon", "triton.language.math", "exp")
_SEMANTIC = f"{_GLUON}.language._semantic"
_add(
    "gluon",
    _SEMANTIC,
    "GluonSemantic.full",
    parameters=("shape", "value", "dtype", "layout"),
    is_patched=True,
)
_add("gluon", _SEMANTIC, "GluonSemantic.broadcast_impl_shape", is_patched=True)
_add("gluon", _SEMANTIC, "GluonSemantic.broadcast_impl_value", is_patched=True)
_add(
    "gluon",
    "torch._inductor.runtime.triton_heuristics",
    "ASTSource",
    parameters=("fn",),
    is_patched=True,
)
_KERNEL = "TritonTemplateKernel"
_add("gluon", _SELECT, _KERNEL, f"{_KERNEL}.jit_lines", f"{_KERNEL}.store_output")
_add("gluon", _SELECT, f"{_KERNEL}.gen_common_triton_imports", f"{_KERNEL}._register_hook")
_add("gluon", _SELECT, f"{_KERNEL}._register_extra_template_env_fns")

_add("group_reduce", _IR, "ir_dataclass", "Scan", "Loops", "TensorBox", "ReductionHint")
_add(
    "group_reduce",
    "torch._inductor.ops_handler",
    "DefaultHandler",
    "DefaultHandler._call_default",
)
_add("group_reduce", "torch._inductor.dtype_propagation", "DtypePropagationOpsHandler")
_add("group_reduce", "torch._inductor.codegen.triton", "TritonKernelOverrides", "FixedTritonConfig")
_add(
    "group_reduce",
    "torch._inductor.choices",
    "InductorChoices.triton_kernel_kwargs",
    "InductorChoices.should_use_persistent_reduction",
)


def symbol(name: str) -> Any:
    """The symbol under its first name in ``SYMBOLS``. Raises KeyError for a name that is not
    there, ImportError or AttributeError for a symbol that is not installed."""
    error: Exception | None = None
    for spelling in SYMBOLS[name].names:
        try:
            return _resolve(spelling)
        except (ImportError, AttributeError) as missing:
            error = error or missing
    assert error is not None
    raise error


def has(name: str) -> bool:
    """Whether the symbol is installed."""
    try:
        symbol(name)
    except (ImportError, AttributeError):
        return False
    return True


def config_module() -> Any:
    """``torch._inductor.config``, to be written to; it is read by ``symbol``."""
    return importlib.import_module(_CONFIG)


def _resolve(spelling: str) -> Any:
    where, _, path = spelling.partition(":")
    found = importlib.import_module(where)
    for attribute in filter(None, path.split(".")):
        found = getattr(found, attribute)
    return found


@functools.cache
def problems(part: str = "") -> tuple[str, ...]:
    """What the installed torch and Triton lack, one sentence each; of one part alone, if given."""
    found = []
    for name, needed in SYMBOLS.items():
        if part not in ("", needed.part) or (
            needed.since and _installed() < _version(needed.since)
        ):
            continue
        try:
            value = symbol(name)
        except (ImportError, AttributeError) as error:
            found.append(f"{name} is missing ({error})")
            continue
        found += _lost_parameters(name, value, needed.parameters)
    return tuple(found)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _installed() -> tuple[int, ...]:
    return _version(torch.__version__)


def _lost_parameters(name: str, value: Any, expected: tuple[str, ...]) -> list[str]:
    try:
        taken = {name: p.kind for name, p in inspect.signature(value).parameters.items()}
    except (TypeError, ValueError):
        taken = {}
    # A wrapper that takes anything, of a profiler or of ours, says nothing.
    if any(kind is inspect.Parameter.VAR_KEYWORD for kind in taken.values()):
        return []
    lost = [parameter for parameter in expected if parameter not in taken]
    return [f"{name} no longer takes {', '.join(lost)}"] if lost else []


def main() -> int:
    found = problems()
    print(f"torch {torch.__version__}; supported: {', '.join(SUPPORTED)}")
    for problem in found:
        print(f"  {problem}")
    print("everything that inductor_quant needs is there" if not found else "NOT USABLE")
    return 1 if found else 0

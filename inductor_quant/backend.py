"""The entry points: the ``torch.compile`` backend, and ``enable`` / ``disable`` / ``enabled``.

Importing this module registers canonical ops, templates and lowerings, before any cache look-up. On
a torch without the symbols that we need it registers nothing, and every entry point is plain
Inductor.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from inductor_quant import fallback, row_buckets
from inductor_quant._compat import inductor as compat
from inductor_quant._compat import narrow_casts
from inductor_quant._compat.symbols import SUPPORTED, problems
from inductor_quant.errors import OptionError, UnsupportedTorchError
from inductor_quant.options import PREFIX, Options, is_disabled_by_environment
from inductor_quant.tables import constant_buffers

if TYPE_CHECKING:
    from inductor_quant.patterns.graph_pass import QuantGemmPass


def inductor_quant_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Inductor with quantized GEMMs fused: ``torch.compile(model, backend="inductor_quant")``.

    ``mode`` and ``options`` are Inductor's; options named ``inductor_quant.<name>`` are fields of
    ``Options``. Only this compilation is affected. The user's custom passes, global or in
    ``options``, run before ours in the same slot, and unchanged in every other.

    Raises OptionError for an unknown ``inductor_quant.`` option, and for ``freezing``, which must
    be set before tracing begins.
    """
    ours, inductors = Options.split(options)
    checked = Options.make(ours)
    wrapper = compat.inductor_wrapper(mode, inductors)
    if wrapper.config.get("freezing"):
        raise OptionError(
            'options={"freezing": True} comes too late: parameters are frozen while the model is '
            "traced, before any backend runs. Set torch._inductor.config.freezing = True instead, "
            "before the first call."
        )
    if not is_usable(checked):
        return wrapper(gm, example_inputs)

    def prepared() -> tuple[Any, dict[str, Any]]:
        found = _tables(gm, example_inputs, checked)
        guard = None
        if any(table.position is not None for table in found):
            general = functools.partial(_general, constant_buffers.copy_of(gm), mode, options)
            effects = constant_buffers.has_effects(gm)
            guard = functools.partial(
                constant_buffers.guarded, buffers=found, general=general, has_effects=effects
            )
        patched = patches(wrapper.config, checked, constant_buffers.digest(found))
        constant_buffers.make_constant(gm, found)
        return guard, patched

    guard, patched = fallback.run(prepared, lambda: (None, wrapper.config), checked)
    compiled = compat.compile_fx(gm, example_inputs, config_patches=patched)
    return compiled if guard is None else guard(compiled)


def _tables(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> list[constant_buffers.ConstantBuffer]:
    reads = {"weight_only", "w4a8", "block_sparse"}
    if not options.read_tables or reads.isdisjoint(options.families):
        return []
    return constant_buffers.find(gm, example_inputs)


def _general(
    gm: torch.fx.GraphModule, mode: str | None, options: dict[str, Any] | None
) -> Callable[..., Any]:
    """``gm`` compiled again, by Dynamo, for any content of its tables."""
    ours, inductors = Options.split(options)
    if ours.get("include_modules") or ours.get("exclude_modules"):
        ours["families"] = ()  # the modules of its nodes are no longer known
    settings = {PREFIX + name: value for name, value in (ours | {"read_tables": False}).items()}
    settings.pop(PREFIX + "require", None)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return inductor_quant_backend(
            gm, example_inputs, mode=mode, options=inductors | settings or None
        )

    def call(*args: Any) -> Any:  # Dynamo does not trace a GraphModule that it is given
        return gm(*args)

    return torch.compile(call, backend=backend)


def _reset() -> None:
    compat.inductor_wrapper(None, {}).reset()


# torch.compile calls it to reset the compiled function.
inductor_quant_backend.reset = _reset  # type: ignore[attr-defined]


def patches(
    inductor_config: dict[str, Any], options: Options, constants: str = ""
) -> dict[str, Any]:
    """``inductor_config`` (config patches) with our pass appended to its slot; with frozen
    parameters, to the slot before constant folding too.

    ``constants``: a digest that becomes part of the graph's key in Inductor's caches.
    """
    from inductor_quant.patterns.graph_pass import EARLY_SLOT, SLOT, QuantGemmPass, for_options

    patched = dict(inductor_config)
    if options.numerics == "strict":
        patched["emulate_precision_casts"] = True
    for slot in (EARLY_SLOT, SLOT) if compat.is_freezing() else (SLOT,):
        old = inductor_config.get(slot, getattr(compat.inductor_config(), slot))
        users = [item for item in compat.passes_in(old) if not isinstance(item, QuantGemmPass)]
        ours = for_options(options, constants, is_early=slot == EARLY_SLOT)
        patched[slot] = compat.slot_value([*users, ours])
    return patched


def is_usable(options: Options) -> bool:
    """Whether the plugin may act: the environment does not disable it, and torch has our symbols.

    If torch lacks some, raises UnsupportedTorchError with ``on_error="raise"``, else warns once.
    """
    if is_disabled_by_environment():
        return False
    found = problems("inductor")
    if not found:
        return True
    error = UnsupportedTorchError(torch.__version__, ", ".join(SUPPORTED), found)
    if options.on_error == "raise":
        raise error
    _warn_unsupported(str(error))
    return False


@functools.cache
def _warn_unsupported(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


# ------------------------------------------------------------------------------------------
# every backend="inductor" compilation

_process_options: Options | None = None
# Set by ``enabled``. A context variable, so that it applies to the block's own thread alone.
_block_options: ContextVar[Options | None] = ContextVar("inductor_quant_enabled", default=None)
_open_blocks = 0
# Guards _process_options, _open_blocks and the slots: a block that closes must not remove the pass
# of one that opens in another thread.
_lock = threading.RLock()


def _ambient_options() -> Options | None:
    if is_disabled_by_environment():
        return None
    return _block_options.get() or _process_options


def _ambient_pass(*, is_early: bool = False) -> QuantGemmPass:
    return _made_ambient(is_early)


@functools.cache
def _made_ambient(is_early: bool) -> QuantGemmPass:
    """The one pass of ``enable`` and ``enabled`` in its slot. It looks up its options at each
    use."""
    from inductor_quant.patterns.graph_pass import QuantGemmPass

    class AmbientPass(QuantGemmPass):
        @property
        def options(self) -> Options | None:
            return _ambient_options()

    return AmbientPass(Options(), is_early=is_early)


def enable(**options: Any) -> None:
    """Act on every ``backend="inductor"`` compilation of the process from now on.

    ``options`` are the fields of ``Options``. Our pass runs after one that the user set. A second
    call replaces the options. Raises OptionError for unknown options.
    """
    global _process_options
    checked = Options.make(options)
    if not is_usable(checked):
        return
    with _lock:
        _process_options = checked
        _install()


def disable() -> None:
    """Undo ``enable``. What is compiled already stays compiled."""
    global _process_options
    with _lock:
        _process_options = None
        _uninstall_if_unused()


@contextmanager
def enabled(**options: Any) -> Iterator[None]:
    """``enable`` for the compilations that this thread starts inside the block."""
    global _open_blocks
    checked = Options.make(options)
    if not is_usable(checked):
        yield
        return
    token = _block_options.set(checked)
    with _lock:
        _open_blocks += 1
        _install()
    try:
        yield
    finally:
        _block_options.reset(token)
        with _lock:
            _open_blocks -= 1
            _uninstall_if_unused()


def _install() -> None:
    from inductor_quant.patterns.graph_pass import EARLY_SLOT, SLOT

    for slot in (EARLY_SLOT, SLOT):
        compat.install_globally(slot, _ambient_pass(is_early=slot == EARLY_SLOT))


def _uninstall_if_unused() -> None:
    if _process_options is None and _open_blocks == 0 and not problems("inductor"):
        from inductor_quant.patterns.graph_pass import EARLY_SLOT, SLOT

        for slot in (EARLY_SLOT, SLOT):
            compat.uninstall_globally(slot, _ambient_pass(is_early=slot == EARLY_SLOT))


def _register() -> None:
    if not problems("inductor"):
        # imported for their registrations
        from inductor_quant import lowering, ops  # noqa: F401
        from inductor_quant.patterns import graph_pass  # noqa: F401

        modules = (ops.w8a8, ops.weight_only, ops.fp8, ops.fp8_block, ops.block_sparse)
        ours = [module.op for module in (*modules, ops.row_reduce, ops.quantize)]
        for op in (*ours, ops.group_reduce.reduce_op, ops.group_reduce.value_op):
            compat.add_dont_constant_fold(op)
        compat.surround_compilation(row_buckets.compile_graph)
        narrow_casts.keep(lambda: fallback.active_options() is not None)


_register()

"""The user's way in: the ``torch.compile`` backend, and ``enable`` / ``disable`` / ``enabled``.

Importing this module registers canonical ops, templates and lowerings, once, before any cache
look-up; on a torch that lacks what we need it registers nothing, and every way in is plain
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

from inductor_quant import _torch_compat as compat
from inductor_quant import tables
from inductor_quant.errors import OptionError, UnsupportedTorchError
from inductor_quant.options import PREFIX, Options, is_disabled_by_environment

if TYPE_CHECKING:
    from inductor_quant.patterns.pipeline import QuantGemmPass


def inductor_quant_backend(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Inductor with quantized GEMMs fused: ``torch.compile(model, backend="inductor_quant")``.

    ``mode`` and ``options`` mean what they mean for Inductor; options named
    ``inductor_quant.<name>`` are fields of ``Options``. Only this compilation is affected. Custom
    passes of the user, global or in ``options``, run before ours in the same slot, and untouched in
    every other.

    Raises OptionError for an unknown ``inductor_quant.`` option and for ``freezing``, which cannot
    be honoured here: it must be set before tracing begins.
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
    found = _tables(gm, example_inputs, checked)
    general = None
    if any(table.position is not None for table in found):
        general = functools.partial(_general, tables.copy_of(gm), mode, options)
    tables.make_constant(gm, found)
    patched = patches(wrapper.config, checked, tables.digest(found))
    compiled = compat.compile_fx(gm, example_inputs, config_patches=patched)
    return compiled if general is None else tables.guarded(compiled, found, general)


def _tables(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> list[tables.Table]:
    if not options.read_tables or "weight_only" not in options.families:
        return []
    try:
        return tables.find(gm, example_inputs)
    except Exception as error:
        if options.on_error == "raise":
            raise
        warnings.warn(f"inductor_quant reads no tables: {error!r}", RuntimeWarning, stacklevel=3)
        return []


def _general(
    gm: torch.fx.GraphModule, mode: str | None, options: dict[str, Any] | None
) -> Callable[..., Any]:
    """``gm`` compiled anew, by Dynamo, for whatever its tables hold."""
    ours, inductors = Options.split(options)
    if ours.get("include_modules") or ours.get("exclude_modules"):
        ours["families"] = ()  # where its nodes come from is not known any more
    settings = {PREFIX + name: value for name, value in (ours | {"read_tables": False}).items()}
    settings.pop(PREFIX + "require", None)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return inductor_quant_backend(
            gm, example_inputs, mode=mode, options=inductors | settings or None
        )

    def call(*args: Any) -> Any:  # of a GraphModule that it is given, Dynamo traces nothing
        return gm(*args)

    return torch.compile(call, backend=backend)


def _reset() -> None:
    compat.inductor_wrapper(None, {}).reset()


# torch.compile calls it when the compiled function is reset.
inductor_quant_backend.reset = _reset  # type: ignore[attr-defined]


def patches(
    inductor_config: dict[str, Any], options: Options, constants: str = ""
) -> dict[str, Any]:
    """``inductor_config`` (config patches) with our pass appended to its slot, and to the one
    before constant folding where parameters are frozen.

    ``constants``: a digest of what Inductor's caches must know the graph by as well.
    """
    from inductor_quant.patterns.pipeline import EARLY_SLOT, SLOT, QuantGemmPass, for_options

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
    """Whether the plugin may act: not disabled by the environment, on a torch that it knows.

    Raises UnsupportedTorchError on another torch with ``on_error="raise"``, else warns once.
    """
    if is_disabled_by_environment():
        return False
    found = compat.problems()
    if not found:
        return True
    error = UnsupportedTorchError(torch.__version__, ", ".join(compat.SUPPORTED), found)
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
# Set by ``enabled``; a context variable, so that it reaches the block's own thread alone.
_block_options: ContextVar[Options | None] = ContextVar("inductor_quant_enabled", default=None)
_open_blocks = 0
# Guards _process_options, _open_blocks and the slot: a block that closes must not take away the
# pass of one that opens in another thread.
_lock = threading.RLock()


def _ambient_options() -> Options | None:
    if is_disabled_by_environment():
        return None
    return _block_options.get() or _process_options


def _ambient_pass(*, is_early: bool = False) -> QuantGemmPass:
    return _made_ambient(is_early)


@functools.cache
def _made_ambient(is_early: bool) -> QuantGemmPass:
    """The one pass behind ``enable`` and ``enabled`` in its slot: asks on each use whether it is to
    act."""
    from inductor_quant.patterns.pipeline import QuantGemmPass

    class AmbientPass(QuantGemmPass):
        @property
        def options(self) -> Options | None:
            return _ambient_options()

    return AmbientPass(Options(), is_early=is_early)


def enable(**options: Any) -> None:
    """Act on every ``backend="inductor"`` compilation of the process from now on.

    ``options`` are the fields of ``Options``. Our pass goes behind one that the user set.
    Idempotent; a second call replaces the options. Raises OptionError for unknown options.
    """
    global _process_options
    checked = Options.make(options)
    if not is_usable(checked):
        return
    with _lock:
        _process_options = checked
        _install()


def disable() -> None:
    """Undo ``enable``; what is compiled already stays compiled. Idempotent."""
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
    from inductor_quant.patterns.pipeline import EARLY_SLOT, SLOT

    compat.install_globally(EARLY_SLOT, _ambient_pass(is_early=True))
    compat.install_globally(SLOT, _ambient_pass())


def _uninstall_if_unused() -> None:
    if _process_options is None and _open_blocks == 0 and not compat.problems():
        from inductor_quant.patterns.pipeline import EARLY_SLOT, SLOT

        compat.uninstall_globally(EARLY_SLOT, _ambient_pass(is_early=True))
        compat.uninstall_globally(SLOT, _ambient_pass())


def _register() -> None:
    if not compat.problems():
        # imported for their registrations
        from inductor_quant import lowering, ops  # noqa: F401
        from inductor_quant.patterns import pipeline  # noqa: F401

        ours = ("w8a8", "weight_only", "fp8", "fp8_block", "row_reduce", "quantize")
        for name in ours:
            compat.add_dont_constant_fold(getattr(ops, name).op)
        for op in (ops.group_reduce.reduce_op, ops.group_reduce.value_op):
            compat.add_dont_constant_fold(op)


_register()

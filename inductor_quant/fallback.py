"""The boundary around all that this package does while Inductor compiles a graph.

Nothing inside it catches its own exceptions. Whatever raises, recognition, a pass in the midst of
writing, a lowering, code generation, a kernel's compilation or its timing: the graph is restored
and compiled again, without the GEMM at which it failed. If that is not known, or fails again
``MAX_DECLINED`` times, it is compiled without our pass. One warning says so.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import fx

from inductor_quant._compat import inductor as compat
from inductor_quant.errors import InductorQuantError, OptionError, RequirementError
from inductor_quant.options import Options
from inductor_quant.report import events
from inductor_quant.spec.decisions import Match, Rejection, RejectionCode

T = TypeVar("T")
log = logging.getLogger(__name__)

SLOT = "post_grad_custom_pre_pass"
# Metadata of a canonical op: the name of the matrix product that it replaced.
ANCHOR = "inductor_quant_anchor"
MAX_DECLINED = 4


@dataclasses.dataclass
class Attempt:
    """One compilation. ``declined``: products to leave alone -> why; None: all. ``error`` and
    ``product``: what failed, at which product ("": unknown)."""

    declined: dict[str, str] | None
    error: Exception | None = None
    product: str = ""


_current: ContextVar[Attempt | None] = ContextVar("inductor_quant_attempt", default=None)


def active_options() -> Options | None:
    """The options of our pass in the compilation under way; None: it is not there."""
    return next(filter(None, map(_options_of, compat.active_passes(SLOT))), None)


def _options_of(item: Any) -> Options | None:
    options = getattr(item, "options", None)
    return options if isinstance(options, Options) else None


def is_inside() -> bool:
    return _current.get() is not None


def declined() -> dict[str, str]:
    """The products that the compilation under way leaves alone, and why."""
    attempt = _current.get()
    return (attempt and attempt.declined) or {}


@contextmanager
def at(product: str) -> Iterator[None]:
    """What the block raises has failed at this product."""
    try:
        yield
    except Exception as error:
        attempt = _current.get()
        if attempt is not None and attempt.error is None:
            attempt.error, attempt.product = error, product
        raise


def run(
    ours: Callable[[], T],
    stock: Callable[[], T],
    options: Options,
    module: fx.GraphModule | None = None,
) -> T:
    """``ours()``, which may raise, and may write to the graphs of ``module``; then without the
    products at which it failed; at last ``stock()``. The graphs are restored before each.

    Raises what ``stock`` does, OptionError and RequirementError; with ``on_error="raise"`` all.
    """
    modules = module.modules() if module is not None else ()
    parts = [part for part in modules if isinstance(part, fx.GraphModule)]
    saved = [copy.deepcopy(part.graph) for part in parts]
    failures: dict[str, Exception] = {}
    declined: dict[str, str] | None = {}
    while True:
        attempt = Attempt(declined)
        token = _current.set(attempt)
        try:
            with events.held() as seen, compat.unchanged_choices():
                result = ours() if declined is not None else stock()
            break
        except Exception as error:
            cause = attempt.error or _root(error)
            if declined is None or isinstance(cause, (OptionError, RequirementError)):
                raise
            if options.on_error == "raise":
                where = f" at {attempt.product}" if attempt.product else ""
                raise InductorQuantError(f"inductor_quant failed{where}: {cause!r}") from cause
            log.warning("failed at %s", attempt.product or "an unknown place", exc_info=True)
            is_new = attempt.product not in ("", *declined) and len(declined) < MAX_DECLINED
            failures[attempt.product if is_new else ""] = cause
            declined = declined | {attempt.product: repr(cause)} if is_new else None
            for part, graph in zip(parts, saved, strict=True):
                part.graph = copy.deepcopy(graph)
            if declined is None:
                _report_all_as_failed(seen, cause)
        finally:
            _current.reset(token)
    if failures:
        what = "a graph" if declined is None else " and ".join(failures)
        warn_once(f"inductor_quant failed on {what} and left it as it was: {cause!r}")
    return result


@contextmanager
def once() -> Iterator[None]:
    """Within, nothing is compiled again: what fails raises, and the caller has another result."""
    token = _current.set(Attempt({}))
    try:
        with events.held():
            yield
    finally:
        _current.reset(token)


def compile_graph(compile_: Callable[[], T], module: fx.GraphModule) -> T:
    """Inductor's compilation of ``module``, inside the boundary if our pass is in its slot."""
    options = active_options()
    if options is None or is_inside():
        return compile_()

    def stock() -> T:
        users = [item for item in compat.active_passes(SLOT) if _options_of(item) is None]
        # not cached: it may not fail again
        changes = {SLOT: compat.slot_value(users), "force_disable_caches": True}
        with compat.inductor_config().patch(changes):
            return compile_()

    return run(compile_, stock, options, module)


def lowering(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as Inductor's lowering of a canonical op."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def lowered(*args: Any, **kwargs: Any) -> Any:
            attempt = _current.get()
            if attempt is not None and attempt.declined is None:  # written before constant folding
                return compat.fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)
            node = compat.current_node()
            with at(node.meta.get(ANCHOR, "") if node is not None else ""):
                return function(*args, **kwargs)

        registered: Callable[..., Any] = compat.register_lowering(op, type_promotion_kind=None)(
            lowered
        )
        return registered

    return register


def _root(error: Exception) -> Exception:
    """What Inductor wrapped."""
    while isinstance(inner := getattr(error, "inner_exception", None), Exception):
        error = inner
    return error


def _report_all_as_failed(seen: list[Any], cause: Exception) -> None:
    for event in seen:
        if isinstance(event, Match):
            rest = (event.node, event.module, event.site)
            event = Rejection(RejectionCode.INTERNAL_ERROR, repr(cause), *rest)
        if isinstance(event, Rejection):
            events.add(event)


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)

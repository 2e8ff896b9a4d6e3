"""Makes functions of ours raise, one at a time, wherever they are held: their code is replaced."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

from inductor_quant import fallback

CACHES: list[Any] = []


def fail(*args: Any, **kwargs: Any) -> Any:
    # a bug of ours: what torch says of an op that is tried at compile time is a RuntimeError
    raise AssertionError("injected")


def functions(package: str) -> dict[str, FunctionType]:
    """Functions, methods and properties of the modules of a package, by their full names."""
    root = importlib.import_module(package)
    names = [package, *(m.name for m in pkgutil.walk_packages(root.__path__, f"{package}."))]
    found: dict[str, FunctionType] = {}
    for name in names:
        todo = list(vars(importlib.import_module(name)).values())
        while todo:
            item = _unwrapped(todo.pop())
            if getattr(item, "__module__", None) != name:
                continue
            if isinstance(item, type):
                todo += vars(item).values()
            elif isinstance(item, FunctionType) and _is_written(item.__code__):
                found[f"{name}.{item.__qualname__}"] = item
    return found


def _is_written(code: CodeType) -> bool:
    """Not by ``dataclasses``, and no closure, whose code another cannot replace."""
    return not code.co_freevars and code.co_filename.endswith(".py")


def _unwrapped(item: Any) -> Any:
    if isinstance(item, property):
        return item.fget
    if isinstance(item, functools.cached_property):
        return item.func
    while hasattr(item, "__wrapped__") or isinstance(item, (staticmethod, classmethod)):
        if hasattr(item, "cache_clear"):
            CACHES.append(item)
        item = getattr(item, "__wrapped__", None) or item.__func__
    return item


def called_by(run: Callable[[], Any], among: dict[str, FunctionType]) -> list[str]:
    """The names of the functions that ``run`` calls inside the boundary."""
    codes: set[CodeType] = set()
    within = fallback.run

    def profiled(*args: Any) -> Any:  # here: Dynamo turns an outer profile off
        outer = sys.getprofile()
        sys.setprofile(lambda frame, event, _: codes.add(frame.f_code))
        try:
            return within(*args)
        finally:
            sys.setprofile(outer)

    with mock.patch.object(fallback, "run", profiled):
        run()
    return [name for name, function in among.items() if function.__code__ in codes]


@contextmanager
def injected(function: FunctionType) -> Iterator[None]:
    """``function`` raises, inside the block."""
    parts = ("__code__", "__defaults__", "__kwdefaults__")
    for cache in CACHES:
        cache.cache_clear()
    before = [getattr(function, part) for part in parts]
    function.__code__, function.__defaults__, function.__kwdefaults__ = fail.__code__, None, None
    try:
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            setattr(function, part, value)

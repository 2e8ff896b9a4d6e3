"""Generate code for a virtual GPU, and run it in Triton's interpreter.

``generate`` is a whole torch.compile of fake CUDA inputs: Dynamo, AOTAutograd, the backend,
Inductor's CUDA path. ``interpret`` calls the compiled function with real CPU tensors: the generated
wrapper runs unchanged, and the kernels that it launches are interpreted.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.guards import _get_closure_vars
from torch._inductor import config as inductor_config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from . import interpreter
from .compile import load_autotuner
from .gpu import virtual_gpu
from .interpreter import signals

# The next call must generate the code again, in this process.
_CONFIG = {"force_disable_caches": True, "compile_threads": 1}


class GeneratedKernel:
    """A kernel of the generated wrapper: ignores fake tensors, is interpreted for real ones."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self._autotuner: CachingAutotuner | None = None

    def run(self, *args: Any, **kwargs: Any) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if all(isinstance(tensor, FakeTensor) for tensor in tensors):
            return
        args = tuple(getattr(arg, "real_values", arg) for arg in args)
        fake = [isinstance(arg, FakeTensor) for arg in args]
        if any(fake):
            raise RuntimeError(
                f"{self.name} was launched on both real and fake tensors: the wrapper holds a "
                "constant made for the virtual GPU; pass it as an input"
            )
        if self._autotuner is None:
            self._autotuner = load_autotuner(self.name, self.source)
        given = [*map(_as_kernels_see, args)]
        signals.run_grid(functools.partial(self._autotuner.run, *given, **kwargs))


@dataclasses.dataclass
class _Graph:
    """One compiled graph.

    inputs    of each graph input, the expression over ``L`` (arguments by name) of its value
    compiled  the backend's result: graph inputs -> graph outputs
    outputs   its result for the fake inputs
    """

    inputs: list[str]
    compiled: Callable[..., Any]
    outputs: Sequence[Any] = ()


class _RecordingBackend:
    """A torch.compile backend that calls another one and records its graphs."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend
        self.graphs: list[_Graph] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        inputs = [_source_expression(node) for node in gm.graph.find_nodes(op="placeholder")]
        graph = _Graph(inputs, self.backend(gm, example_inputs))
        self.graphs.append(graph)

        def run(*args: Any) -> Any:
            graph.outputs = graph.compiled(*args)
            return graph.outputs

        return run


@dataclasses.dataclass
class Generated:
    """Code that torch.compile generated for a virtual GPU.

    arch      compute capability, 90 for (9, 0)
    wrapper   text of the generated module; the last one, if the graph broke
    kernels   kernel name -> source text
    choices   per kernel selection, the ``ChoiceCaller`` objects on offer
    output    what ``fn`` returned, made of fake CUDA tensors
    """

    arch: int
    wrapper: str
    kernels: dict[str, str]
    choices: list[list[Any]]
    output: Any
    _fn: Callable[..., Any] = dataclasses.field(repr=False)
    _fake_args: tuple[Any, ...] = dataclasses.field(repr=False)
    _graphs: list[_Graph] = dataclasses.field(repr=False)


def generate(
    fn: Callable[..., Any],
    make_inputs: Callable[[str], tuple[Any, ...]],
    *,
    arch: int = 90,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    pick: Callable[[Any], float] | None = None,
) -> Generated:
    """Compile ``fn`` for a virtual GPU, under ``torch.no_grad``.

    A module is an input too, made on the given device (``Module.to`` does not move fake
    parameters)::

        def make_inputs(device):
            with torch.device(device):
                return Model().eval(), torch.randn(16, 64)

        generate(lambda model, x: model(x), make_inputs)

    Args:
        fn: a plain function. All its tensors must come in through its arguments.
        make_inputs: device -> positional arguments of ``fn``. Called with ``"cuda"`` under a
            ``FakeTensorMode``; it may call ``torch._dynamo.mark_dynamic``.
        arch: a key of ``simulate.GPUS``.
        backend, dynamic, options: as for ``torch.compile``.
        config: patches of ``torch._inductor.config``.
        pick: cost of an autotuning choice; the cheapest is taken. Default: the first on the list.
    """
    if isinstance(fn, torch.nn.Module):
        raise TypeError(
            "generate() takes a function; make the module an input: let make_inputs(device) build "
            "it under torch.device(device), and pass lambda model, x: model(x)"
        )
    torch._dynamo.reset()
    recorder = _RecordingBackend(_resolve_backend(backend, options, dynamic))
    try:
        with (
            virtual_gpu(arch, run_kernel=GeneratedKernel, pick=pick) as trace,
            FakeTensorMode(),
            inductor_config.patch({**_CONFIG, **(config or {})}),
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "dynamo_pgo force disabled")  # no cache, no profile
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            args = make_inputs("cuda")
            output = torch.compile(fn, backend=recorder, dynamic=dynamic)(*args)
    finally:
        # Drop the code cached for fn, which only holds while the virtual GPU is there.
        torch._dynamo.reset()
    return Generated(
        arch=arch,
        wrapper=trace.wrappers[-1] if trace.wrappers else "",
        kernels=trace.kernels,
        choices=trace.choices,
        output=output,
        _fn=fn,
        _fake_args=args,
        _graphs=recorder.graphs,
    )


def interpret(generated: Generated, args: Sequence[Any]) -> Any:
    """Run generated code on CPU tensors, with all kernels in Triton's interpreter.

    Returns what ``fn(*args)`` would, in the same structure. Sizes that are dynamic in the graph may
    differ from those at generation. Arguments that the graph mutates are mutated.

    Args:
        generated: the result of ``generate``; the graph must not have broken.
        args: arguments of ``fn``, as ``make_inputs("cpu")`` makes them.
    """
    interpreter.install()
    if len(generated._graphs) != 1:
        raise ValueError(f"need exactly one graph to interpret, got {len(generated._graphs)}")
    [graph] = generated._graphs
    values = _bind_inputs(generated._fn, graph.inputs, args)
    # a size that was not met yet may be compiled for itself
    with virtual_gpu(generated.arch, run_kernel=GeneratedKernel), torch.no_grad():
        outputs = graph.compiled(*values)
    return _like_output(generated, graph, outputs, args)


def _as_kernels_see(value: Any) -> Any:
    """Inductor's kernels take e8m0 tensors as bytes; the interpreter lacks the type. Other calls of
    the wrapper get them as they are."""
    is_e8m0 = isinstance(value, torch.Tensor) and value.dtype == torch.float8_e8m0fnu
    return value.view(torch.uint8) if is_e8m0 else value


def _resolve_backend(
    backend: str | Callable[..., Any], options: dict[str, Any] | None, dynamic: bool | None
) -> Callable[..., Any]:
    """The function that ``torch.compile`` would make of these arguments."""
    resolved: Callable[..., Any]
    if backend == "inductor":
        resolved = torch._TorchCompileInductorWrapper("default", options, dynamic)
    else:
        resolved = torch._TorchCompileWrapper(backend, "default", options, dynamic)
    return resolved


def _source_expression(placeholder: torch.fx.Node) -> str:
    """Dynamo's name for the origin of a graph input, such as ``L['x'].size()[0]``."""
    name = placeholder.meta["grapharg"].source.name
    return str(name() if callable(name) else name)  # 2.11: a method; later a property


def _bind_inputs(fn: Callable[..., Any], inputs: list[str], args: Sequence[Any]) -> list[Any]:
    arguments: dict[str, Any]
    if inspect.isfunction(fn):
        arguments = inspect.signature(fn).bind(*args).arguments
        global_names = fn.__globals__
    else:  # Dynamo wraps a built-in function into one of *args, **kwargs
        arguments, global_names = {"args": tuple(args), "kwargs": {}}, {}
    scope = {**_get_closure_vars(), "L": arguments, "G": global_names}
    values = []
    for expression in inputs:
        try:
            value = eval(expression, scope)
        except Exception as error:
            raise ValueError(
                f"graph input {expression} is not an argument of {fn.__name__}; all tensors must "
                "come in through make_inputs"
            ) from error
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise ValueError(f"graph input {expression} is on {value.device}, need a CPU tensor")
        values.append(value)
    return values


def _like_output(
    generated: Generated, graph: _Graph, outputs: Sequence[Any], args: Sequence[Any]
) -> Any:
    """``generated.output`` with each fake tensor replaced by its real counterpart: an output of the
    graph, or an argument that is returned. Identity tells which."""
    fake_leaves = (*pytree.tree_leaves(generated._fake_args), *graph.outputs)
    real_leaves = (*pytree.tree_leaves(tuple(args)), *outputs)
    real_by_id = {id(fake): real for fake, real in zip(fake_leaves, real_leaves, strict=True)}

    def to_real(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in real_by_id:
            raise RuntimeError("an output of fn is neither an output of the graph nor an argument")
        return real_by_id[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(to_real, generated.output)

"""Post-grad graphs before and after our pass, out of real ``compile_fx`` runs.

``capture`` stops before code generation and runs the compiled graph op by op, so a rewritten graph
gives values on any machine. On a CPU our pass would decline every match (``device``), so for its
call Triton is said to run there.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

from inductor_quant.options import Options
from inductor_quant.patterns.graph_pass import SLOT, for_options
from inductor_quant.report import events
from inductor_quant.report.events import Report
from inductor_quant.spec.gemm import dtype_name
from inductor_quant.tables import constant_buffers

INT_MM = torch.ops.aten._int_mm.default
W8A8 = torch.ops.inductor_quant.w8a8.default
CAST = torch.ops.prims.convert_element_type.default


@dataclasses.dataclass
class Rewrite:
    """One graph that the pass saw. ``inputs``: what the compiled graph was last called with."""

    before: fx.GraphModule
    after: fx.GraphModule
    report: Report
    is_backward: bool = False
    inputs: list[Any] = dataclasses.field(default_factory=list)

    @property
    def is_untouched(self) -> bool:
        return printed(self.before) == printed(self.after)

    @property
    def codes(self) -> list[str]:
        return [rejection.code.value for rejection in self.report.rejections]


class RewritingPass(CustomGraphPass):
    """Runs our pass, as for a device with Triton, between two copies of the graph."""

    def __init__(self, options: Options | None = None, *, as_if_triton: bool = True) -> None:
        self.options = options or Options(on_error="raise")
        self.as_if_triton = as_if_triton
        self.rewrites: list[Rewrite] = []

    def __call__(self, graph: fx.Graph) -> None:
        before = snapshot(graph)
        with events.collect() as found:
            rewrite_graph(graph, self.options, as_if_triton=self.as_if_triton)
        self.rewrites.append(Rewrite(before, snapshot(graph), found))

    def uuid(self) -> None:
        return None


def rewrite_graph(graph: fx.Graph, options: Options, *, as_if_triton: bool = True) -> None:
    """Run our pass on ``graph``; with ``as_if_triton`` also on a CPU device."""
    if not as_if_triton:
        for_options(options)(graph)
        return
    with mock.patch("inductor_quant._compat.inductor.runs_triton", return_value=True):
        for_options(options)(graph)


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    options: Options | None = None,
    dynamic: bool | None = None,
    read_tables: bool = False,
) -> tuple[Any, list[Rewrite]]:
    """The result of the rewritten graphs of ``fn(*args)``, and the graphs (one without breaks)."""
    backend = EagerBackend(options, read_tables=read_tables)
    result = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    return result, backend.rewrites


class EagerBackend:
    """``compile_fx`` up to and including its post-grad passes; the result of ours runs eagerly.

    ``read_tables``: with the values of constant buffers, as our backend; they are not guarded.
    """

    def __init__(
        self,
        options: Options | None = None,
        *,
        as_if_triton: bool = True,
        read_tables: bool = False,
    ) -> None:
        self.passes = RewritingPass(options, as_if_triton=as_if_triton)
        self.read_tables = read_tables

    @property
    def rewrites(self) -> list[Rewrite]:
        return self.passes.rewrites

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if self.read_tables:
            constant_buffers.make_constant(gm, constant_buffers.find(gm, inputs))
        return inductor.compile_fx(
            gm, inputs, inner_compile=self._compile, config_patches={SLOT: self.passes}
        )

    def _compile(
        self, gm: fx.GraphModule, inputs: list[Any], *, is_backward: bool = False, **kwargs: Any
    ) -> Callable[[list[Any]], Any]:
        inductor.view_to_reshape(gm)
        with torch.no_grad():
            fake_mode = inductor.fake_tensor_prop(gm, inputs)
        with V.set_fake_mode(fake_mode), config.patch(force_disable_caches=True):
            inductor._recursive_post_grad_passes(gm, is_inference=not is_backward)
        rewrite = self.rewrites[-1]  # of the outermost graph, which comes last
        rewrite.is_backward = is_backward

        def run(values: list[Any]) -> Any:
            rewrite.inputs = list(values)
            values.clear()
            with torch.no_grad():
                return rewrite.after(*rewrite.inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def snapshot(graph: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(graph.owning_module, copy.deepcopy(graph))


def count(gm: fx.GraphModule, target: Any) -> int:
    """How many nodes call ``target``."""
    return Counter(node.target for node in gm.graph.nodes)[target]


def calls(gm: fx.GraphModule, target: Any = W8A8) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target == target]


# ------------------------------------------------------------------------------------------
# printing


def printed(gm: fx.GraphModule) -> str:
    """The graph, one line for each node, with names that depend on the graph alone.

    Inputs are ``x0, x1, ...``, results ``v0, v1, ...``, symbols ``s0, s1, ...``.
    """
    names: dict[fx.Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            names[node] = f"x{sum(name.startswith('x') for name in names.values())}"
            lines.append(f"{names[node]}: {_value(node)}")
        elif node.op == "output":
            lines.append(f"return {_argument(node.args[0], names)}")
        else:
            names[node] = f"v{sum(name.startswith('v') for name in names.values())}"
            lines.append(f"{names[node]}: {_value(node)} = {_call(node, names)}")
    return _rename_symbols("\n".join(lines))


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    if node.op == "get_attr":
        return str(node.target)
    args = [_argument(arg, names) for arg in node.args]
    args += [f"{key}={_argument(value, names)}" for key, value in node.kwargs.items()]
    target = str(node.target).removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")
    return f"{target}({', '.join(args)})"


def _argument(arg: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(arg, fx.Node):
        return names[arg]
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_argument(item, names) for item in arg)}]"
    return dtype_name(arg) if isinstance(arg, torch.dtype) else str(arg)


def _value(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return str(value) if value is not None else "?"
    return f"{dtype_name(value.dtype)}{list(value.shape)}"


def _rename_symbols(text: str) -> str:
    found = dict.fromkeys(re.findall(r"\bs\d+\b", text))
    renamed = {symbol: f"s{number}" for number, symbol in enumerate(found)}
    return re.sub(r"\bs\d+\b", lambda match: renamed[match.group()], text)


# ------------------------------------------------------------------------------------------
# the same graph in fp64


class Float64Epilogue(fx.Interpreter):
    """Runs a graph with its integer GEMMs and everything after them in fp64.

    Casts between floats are skipped there, so the result is the formula without rounding.
    ``largest``: the largest absolute intermediate value.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.largest = 0.0
        self._exact: set[fx.Node] = set()

    def run_node(self, node: fx.Node) -> Any:
        depends = not self._exact.isdisjoint(node.all_input_nodes) and node.op != "output"
        if node.target != INT_MM and not depends:
            return super().run_node(node)
        self._exact.add(node)
        result = self._widened(node)
        if isinstance(result, torch.Tensor) and result.numel():
            self.largest = max(self.largest, result.double().abs().max().item())
        return result

    def _widened(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_aggregate(self.fetch_args_kwargs_from_env(node), _widen)
        if node.target == INT_MM:
            return args[0].double() @ args[1].double()
        if node.target == CAST and args[1].is_floating_point:
            return args[0]
        return node.target(*args, **kwargs)


def _widen(value: Any) -> Any:
    is_narrow = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_narrow else value

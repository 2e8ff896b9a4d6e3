"""Experts: each row of a float activation times the weight of a stack that it selects.

The rows are sorted by expert (``_grouped_mm``), a tensor of ids gathers a weight for each
(``bmm``), or each weight of a stack has as many rows (``bmm``, too). Whether the graph gathers
before or after it dequantizes makes no difference to the reader: it moves the position.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from inductor_quant.errors import SpecError
from inductor_quant.ops import experts as op
from inductor_quant.ops import weight_only
from inductor_quant.spec import row_ranges
from inductor_quant.spec.decisions import Rejection, RejectionCode
from inductor_quant.spec.exactness import Exactness
from inductor_quant.spec.weight_format import WeightFormat

from .. import fx_utils
from ..fx_utils import aten
from ..match import Constant, Derived, Operand, Pattern, RecognizedGemm
from ..matching.operands import reject_mutated, reject_operands
from ..matching.value_numbering import Numbering
from ..products import stock
from ..symbolic import Reader, attempt
from ..symbolic.expr import digits
from ..symbolic.index import CHOICE, ROW, SELECTING, Unsupported
from ..symbolic.reader import for_any, sizes
from ..weights.decode import Weight, decode

FAMILY = "experts"
FALLBACK = "transformers.grouped_mm_fallback.default"
# Rows of each weight of a stack up to which ``bmm`` is ours: there dequantizing the stack takes
# longer than multiplying it.
MAX_ROWS_OF_EACH = 256
MOST_COMPUTED = 8  # elements of a constant that Inductor writes into a kernel


@dataclasses.dataclass(frozen=True)
class _Product:
    """``out[s] = x[s // choices] @ W[e(s)]``, where ``offsets`` or ``ids`` say which expert a row
    has.

    is_of_all  whether s is (expert, row), as the first two dimensions of x are
    """

    x: fx.Node
    weight: Weight
    reader: Reader
    offsets: fx.Node | Derived | None = None
    ids: fx.Node | Derived | None = None
    choices: int = 1
    is_of_all: bool = False


def recognize(anchor: fx.Node) -> RecognizedGemm | Rejection | None:
    """``anchor``: ``_grouped_mm``, or ``bmm``; None if the rows of the latter select no weight, and
    its weights are no quantized stack."""
    try:
        with for_any(fx_utils.value(anchor).shape[0]):
            read = _batched if anchor.target == aten.bmm.default else _grouped
            found = _attempt(functools.partial(read, anchor), anchor)
    except RecursionError:
        return Rejection(RejectionCode.WEIGHT_FORM, "computed in too many steps", anchor.name)
    return _assemble(anchor, found) if isinstance(found, _Product) else found


def _attempt(
    read: Callable[[Reader], _Product | Rejection | None], anchor: fx.Node
) -> _Product | Rejection | None:
    def found(reader: Reader) -> _Product | Rejection | None:
        try:
            return read(reader)
        except Unsupported as reason:
            return Rejection(RejectionCode.WEIGHT_FORM, str(reason), anchor.name)

    return attempt(found, lambda found: isinstance(found, _Product))


def _grouped(anchor: fx.Node, reader: Reader) -> _Product | Rejection:
    """``_grouped_mm(x [S, K], w [E, K, N], offsets [E])``, or of x [E, T, K] without offsets."""
    names = (
        ("input", "weight", "offs") if str(anchor.target) == FALLBACK else ("self", "mat2", "offs")
    )
    x, w, offsets, bias = fx_utils.arguments(anchor, *names, "bias")
    if bias is not None:
        return Rejection(RejectionCode.BIAS, "", anchor.name)
    are_tensors = all(map(fx_utils.is_tensor_node, (x, w)))
    if are_tensors and offsets is None and fx_utils.value(x).dim() == 3:
        refused = Rejection(RejectionCode.BATCHED_WEIGHT, "no quantized stack", w.name)
        return _of_all(reader, x, w) or refused
    if not all(map(fx_utils.is_tensor_node, (x, w, offsets))):
        return Rejection(RejectionCode.DTYPE, "an operand is no tensor", anchor.name)
    if [fx_utils.value(node).dim() for node in (x, w, offsets)] != [2, 3, 1]:
        return Rejection(RejectionCode.WEIGHT_FORM, "it is no stack of matrices", w.name)
    axes = zip(("e", "k", "n"), sizes(w), strict=True)
    weight = decode(reader, reader.read(w, tuple(reader.space.variable(*a) for a in axes)), w)
    return _Product(x, weight, reader, offsets) if isinstance(weight, Weight) else weight


def _batched(anchor: fx.Node, reader: Reader) -> _Product | Rejection | None:
    """``bmm(x [S, T, K], w [S, K, N])``, or ``bmm(w [S, N, K], x [S, K, 1])``."""
    left, right = fx_utils.arguments(anchor, "self", "mat2")
    if not fx_utils.is_tensor_node(left) or not fx_utils.is_tensor_node(right):
        return None
    is_first = fx_utils.is_one(fx_utils.value(right).shape[2])  # the weight
    x, w = (right, left) if is_first else (left, right)
    if not is_first and not fx_utils.is_one(fx_utils.value(x).shape[1]):
        return _of_all(reader, x, w)
    found = _gathered(reader, x, w, is_first=is_first)
    if found is not None or not reader.has_codes():
        return found
    return _attempt(lambda reader: _of_all(reader, x, w, is_first=is_first), anchor)


def _gathered(
    reader: Reader, x: fx.Node, w: fx.Node, *, is_first: bool
) -> _Product | Rejection | None:
    """Each row has the weight that its id selects, or several: then N is that of all of them, one
    after the other."""
    rows, *others = sizes(w)
    k, n = reversed(others) if is_first else others
    choices = _choices(w, rows)
    choices = choices if n % choices == 0 else 1  # else these were indices of a table
    which = reader.space.variable(ROW, rows), reader.space.variable(CHOICE, choices)
    reader.row, reader.is_same = which[0] * choices + which[1], Numbering().equal
    row, column = reader.space.variable("k", k), reader.space.variable("n", n // choices)
    column = which[1] * (n // choices) + column
    expr = reader.read(w, (which[0], *((column, row) if is_first else (row, column))))
    if reader.ids is None:
        return None
    if any(digit.axis in SELECTING for digit in digits(expr, reader.space)):
        detail = "not by the expert of the row alone"
        return Rejection(RejectionCode.BATCHED_WEIGHT, detail, w.name)
    weight = decode(reader, expr, w)
    if not isinstance(weight, Weight):
        return weight
    return _Product(x, weight, reader, ids=reader.ids, choices=choices)


def _of_all(reader: Reader, x: fx.Node, w: fx.Node, *, is_first: bool = False) -> _Product | None:
    """T rows for each weight of a stack, in order."""
    experts, *others = fx_utils.value(w).shape
    if any(map(fx_utils.is_symbolic, (experts, *others))):
        return None
    k, n = reversed(others) if is_first else others
    expert, row, column = (
        reader.space.variable(axis, size) for axis, size in (("e", experts), ("k", k), ("n", n))
    )
    expr = reader.read(w, (expert, *((column, row) if is_first else (row, column))))
    weight = decode(reader, expr, w)
    if not isinstance(weight, Weight) or not _has_own_codes(weight.format):
        return None
    found = _Product(x, weight, reader, is_of_all=True)
    rows = 1 if is_first else fx_utils.value(x).shape[1]
    if fx_utils.is_one(rows):
        return dataclasses.replace(found, ids=_integers(range(experts)))
    if not fx_utils.is_symbolic(rows):
        if rows * experts >= 2**31:
            return None
        ends = range(rows, rows * (experts + 1), rows) if rows else [0] * experts
        return dataclasses.replace(found, offsets=_integers(ends))
    counted = (_integers(range(1, experts + 1)), Derived(aten.sym_size.int, (x, 1)))
    return dataclasses.replace(found, offsets=Derived(aten.mul.Tensor, counted))


def _has_own_codes(format: WeightFormat) -> bool:
    """Whether each expert has codes of its own, which no tensor selects."""
    terms = (term for index in format.code.index for term in (*index.linear, *index.tables))
    return {*format.digits("e")} <= {name for name, _ in terms} and format.experts > 1


def _integers(values: Iterable[int]) -> Derived:
    """A part of a longer constant, which is in memory: a kernel computes shorter ones."""
    held = array.array("i", values)
    count = len(held)
    held.extend([0] * (MOST_COMPUTED + 1 - count))
    constant = Constant(held.tobytes(), torch.int32)
    return Derived(aten.slice.Tensor, (constant, 0, 0, count), dtype=torch.int32, shape=(count,))


def _choices(w: fx.Node, rows: int) -> int:
    """How many weights each row selects, by the shortest tensor of ids from which ``w`` is made."""
    todo, seen = [w], {w}
    counts: list[int] = []
    while todo:
        node = todo.pop()
        if node.target == aten.index.Tensor:
            ids: Any = [item for item in node.args[1] if item is not None]  # type: ignore[union-attr]
            counts.append(math.prod(sizes(ids[0])))
        todo += [item for item in node.all_input_nodes if item not in seen]
        seen.update(node.all_input_nodes)
    least = min(counts, default=0)
    return least // rows if rows and least >= rows and least % rows == 0 else 1


def _assemble(anchor: fx.Node, product: _Product) -> RecognizedGemm | Rejection:
    x, weight = product.x, product.weight
    selected = [each for each in (product.offsets, product.ids) if isinstance(each, fx.Node)]
    own = {x, *selected}
    inside = {*product.reader.nodes(), *anchor.all_input_nodes} - own
    interior = sorted(node for node in inside if node.op == "call_function")
    stored = (node for node in weight.sources if isinstance(node, fx.Node))
    rejection = (
        reject_mutated(interior)
        or reject_operands((x, *selected, *stored), anchor)
        or _reject_if_kept(interior, anchor, weight)
    )
    if rejection is not None:
        return rejection
    x_dtype, out_dtype = fx_utils.value(x).dtype, fx_utils.value(anchor).dtype
    if x_dtype not in weight_only.X_DTYPES:
        return Rejection(RejectionCode.ACTIVATION, f"it is {x_dtype}", x.name)
    tensors = list(map(fx_utils.described, weight.sources))
    types = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    try:
        k, n = weight_only.check_format(weight.format, types)
    except SpecError as error:
        return Rejection(RejectionCode.WEIGHT_FORM, str(error), anchor.name)
    is_same = x_dtype in weight.same_for
    same = Exactness.SAME_WEIGHT_ROUNDING if is_same else Exactness.FEWER_ROUNDINGS
    first, *others = fx_utils.value(anchor).shape
    rows, shape = first, (-1, *others) if len(others) > 1 else None
    if product.is_of_all and product.ids is None:
        each, columns = others
        rows, shape = first * each, (first, -1 if fx_utils.is_symbolic(each) else each, columns)
    mean = op.max_mean_rows(
        *(weight.format, [tensor.dtype for tensor in tensors], x_dtype),
        is_sm90=stock.is_tuned(anchor),
    )
    return RecognizedGemm(
        family=FAMILY,
        spec=weight_only.make_spec(
            weight.format,
            [tensor.dtype for tensor in tensors],
            x_dtype=x_dtype,
            column_scale=None,
            out_dtype=out_dtype,
            bias=False,
        ),
        anchor=anchor,
        end=anchor,
        interior=tuple(interior),
        op=op.op,
        args=(
            _rows_of(product, k),
            list(weight.sources),
            product.offsets,
            Operand(product.ids, (-1,)) if isinstance(product.ids, fx.Node) else product.ids,
        ),
        kwargs={"format": weight.format.encode(), "out_dtype": out_dtype},
        m=fx_utils.size_name(rows * product.choices),
        n=n,
        k=k,
        shape=shape,
        too_many_rows=(anchor.target == aten._grouped_mm.default or product.is_of_all)
        and _may_have_too_many(
            rows, weight.format.experts, min(mean, MAX_ROWS_OF_EACH) if product.is_of_all else mean
        ),
        row_kind=row_ranges.kind_of(
            FAMILY, 0 if product.offsets is None else weight.format.experts
        ),
        weight_class=Exactness.REASSOCIATED if weight.is_reordered else same,
    )


def _may_have_too_many(rows: Any, experts: int, mean: int) -> bool:
    """Whether an expert may have more than ``mean`` rows in the mean in some call."""
    most = fx_utils.most(rows)
    if most is None and fx_utils.size_hint(rows) is None and mean == op.MAX_MEAN_ROWS_SM90:
        # The graph computes the number, so there are no ranges: few rows lose more without us than
        # very many with us.
        return False
    return most is None or most > mean * experts


def _reject_if_kept(interior: list[fx.Node], anchor: fx.Node, weight: Weight) -> Rejection | None:
    """Rejects a stack that is dequantized anyway, for another user: for the backward, say."""
    size = weight.format.experts * math.prod(weight.format.shape)
    for node in interior:
        shape = fx_utils.value(node).shape
        if any(map(fx_utils.is_symbolic, shape)) or math.prod(shape) < size:
            continue
        todo, seen = [node], {anchor}
        while todo:
            user = todo.pop()
            users = fx_utils.users(user)
            if user.op == "output" or not users:
                detail = f"{user.name} needs the dequantized stack too"
                return Rejection(RejectionCode.EXTRA_USER, detail, node.name)
            todo += [item for item in users if item not in seen]
            seen.update(users)
    return None


def _rows_of(product: _Product, k: int) -> Operand:
    """x [S, K], each row as often as it has experts."""
    if product.choices == 1:
        return Operand(product.x, (-1, k))
    row = Operand(product.x, (-1, 1, k))
    return Operand(Derived(aten.expand.default, (row, (-1, product.choices, k))), (-1, k))


PATTERN = Pattern(
    name="experts",
    family=FAMILY,
    anchors=(aten._grouped_mm.default, FALLBACK, aten.bmm.default),
    recognize=recognize,
)

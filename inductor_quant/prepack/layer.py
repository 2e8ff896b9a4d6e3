"""A module with a repacked weight: what ``prepack_`` leaves in the place of its own tensors."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from inductor_quant.ops.repack import CHUNK, Rows
from inductor_quant.spec.weight_format import Field, WeightFormat


class PrepackedLinear(nn.Module):
    """``x @ W + bias`` in ``dtype``, cast to the dtype of x.

    ``W[k, n] = (q[k, n] - z[g, n]) * scales[g, n]``, ``g = k // (K / groups)``, in fp32, rounded to
    ``dtype``, as in the canonical op. With ``order`` row i of W belongs to column order[i] of x:
    the groups of GPTQ's act-order are any rows, which then are neighbours.

    Buffers:
        qdata   4 bits: [K / 8, N] int32, q[8 * i + j] in bits 4 * j ... 4 * j + 3 of row i;
                8 bits: [N, K] int8 or uint8
        qzeros  [groups, N / 8] int32: z - ``zero``, packed along N as qdata along K; or None
        zeros   [groups, N]: z; or None. Without qzeros and zeros, z is ``zero``
        scales  [groups, N], or None: 1
        bias    [N], or None
        order   [K] int32, or None

    If ``stores_zero`` the state dict has ``zero`` too: it follows from the values of zero points,
    as does whether integers are qzeros or zeros, which loading changes as the state dict has them.
    """

    qdata: torch.Tensor
    qzeros: torch.Tensor | None
    zeros: torch.Tensor | None
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        zero: float,
        stores_zero: bool = False,
        **buffers: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.dtype, self.zero, self.stores_zero = dtype, zero, stores_zero
        for name in ("qdata", "qzeros", "zeros", "scales", "bias", "order"):
            self.register_buffer(name, buffers[name])

    @property
    def k(self) -> int:
        rows, columns = self.qdata.shape
        return 8 * rows if self.bits == 4 else columns

    @property
    def bits(self) -> int:
        return 4 if self.qdata.dtype == torch.int32 else 8

    @property
    def group_size(self) -> int:
        grouped = next((t for t in (self.scales, self.zeros, self.qzeros) if t is not None), None)
        return self.k if grouped is None else self.k // len(grouped)

    def group_numbers(self) -> torch.Tensor:
        """[groups, 1]."""
        return torch.arange(self.k // self.group_size, device=self.qdata.device)[:, None]

    @property
    def n(self) -> int:
        return self.qdata.shape[1 if self.bits == 4 else 0]

    def extra_repr(self) -> str:
        return f"in_features={self.k}, out_features={self.n}, bits={self.bits}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.stores_zero:
            zero = torch.tensor(self.zero, dtype=torch.float64, device="cpu")
            destination[f"{prefix}zero"] = zero

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = [name for name in ("qzeros", "zeros") if f"{prefix}{name}" in state_dict]
        held = self.qzeros if self.qzeros is not None else self.zeros
        if len(given) == 1 and held is not None and not held.is_floating_point():
            width = self.n // 8 if given == ["qzeros"] else self.n
            self.qzeros = self.zeros = None
            setattr(self, given[0], held.new_empty(len(held), width))
        if self.stores_zero and given:
            zero = state_dict.get(f"{prefix}zero")
            if zero is None and given == ["qzeros"]:
                error_msgs.append(
                    f"the state dict has {prefix}qzeros without {prefix}zero, the number that is "
                    "added to them: zero points of this layer are wider than 4 bits. Save it again "
                    "from a model that this version of prepack_ has repacked."
                )
                return
            self.zero = 0.0 if zero is None else float(zero)
        args = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *args)
        if self.stores_zero and f"{prefix}zero" in unexpected_keys:
            unexpected_keys.remove(f"{prefix}zero")

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q [K, N] and z [groups, N]."""
        shifts = torch.arange(0, 32, 4, device=self.qdata.device, dtype=torch.int32)
        if self.bits == 4:
            q = ((self.qdata[:, None] >> shifts[:, None]) & 15).flatten(0, 1)
        else:
            q = self.qdata.t()
        if self.qzeros is None:
            return q, self.zeros
        return q, ((self.qzeros[:, :, None] >> shifts) & 15).flatten(1) + int(self.zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, zeros = self.unpacked()
        w = q.to(torch.float32)
        grouped = self.scales if self.scales is not None else zeros
        if grouped is not None:
            w = w.reshape(len(grouped), -1, w.shape[1])
        if zeros is not None:
            w = w - zeros[:, None]
        elif self.zero:
            w = w - self.zero
        if self.scales is not None:
            w = w * self.scales[:, None]
        if self.order is not None:
            x = x.index_select(-1, self.order)
        out = x.to(self.dtype) @ w.reshape(q.shape).to(self.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype)


@dataclasses.dataclass(frozen=True)
class Source:
    """How a tensor that a module no longer holds is computed from its ``PrepackedLinear``: the
    buffer of this name in another shape; or the bits of ``field``, of the values ``part`` (0: q, 1:
    z, 2: scales, 3: the number of the group) ``+ low``. ``group``: the field that lists the group
    of each k, if there is one."""

    like: torch.Tensor  # on the meta device
    buffer: str = ""
    format: WeightFormat | None = None
    field: Field | None = None
    part: int = 0
    low: int = 0
    group: Field | None = None

    def restored(self, packed: PrepackedLinear) -> torch.Tensor:
        if self.buffer:
            is_zero = self.buffer == "zeros"  # which a state dict may have had as qzeros
            held = packed.unpacked()[1] if is_zero else getattr(packed, self.buffer)
            assert held is not None
            return held.view(self.like.shape).to(self.like.dtype)
        assert self.format is not None
        assert self.field is not None
        values = (*packed.unpacked(), packed.scales, packed.group_numbers())[self.part]
        assert values is not None
        (k, n), field, device = self.format.shape, self.field, packed.qdata.device
        size, positions = k // len(values), torch.arange(k, device=device)
        integer = torch.int64 if field.width else self.like.dtype
        out = torch.zeros(self.like.shape, dtype=integer, device=device)
        step = size * max(1, CHUNK // (size * n))
        for first in range(0, k, step):
            rows = Rows(self.format, (), device)
            last = min(k, first + step)
            rows.rows = slice(first, last) if packed.order is None else packed.order[first:last]
            if self.group is not None:
                rows.assume(self.group, positions[first:last, None] // packed.group_size)
            value = values[first // size : -(-last // size)] + self.low
            value = value.repeat_interleave(size, 0)
            index = [rows.index(each).expand(value.shape) for each in field.index]
            if not field.width:
                out.index_put_(tuple(index), value.to(out.dtype))
                continue
            value = (value.long() - field.add) & ((1 << field.width) - 1)
            shifts = rows.index(field.offset).expand(value.shape)
            for shift in shifts.unique().tolist():
                here = shifts == shift
                at = tuple(each[here] for each in index)
                out[at] = out[at] | (value[here] << shift)
        result = torch.empty_strided(
            self.like.shape, self.like.stride(), dtype=self.like.dtype, device=device
        )
        return result.copy_(out)


class Prepacked:
    """A module of which ``prepacked`` computes the calls that it was read for: one tensor of this
    dtype and number of dimensions, in this mode. Other calls, and those who read the tensors that
    it no longer holds, get these restored.

    The first base of a subclass of the module's own class, so that hooks, attributes and other
    owners of the module stay as they are.
    """

    prepacked: PrepackedLinear
    prepacked_for: tuple[torch.dtype, int, bool]
    prepacked_from: dict[str, Source]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(x := args[0], torch.Tensor):
            given = (x.dtype, x.dim(), self.training)  # type: ignore[attr-defined]
            is_autocast = torch.is_autocast_enabled(x.device.type)
            if given == self.prepacked_for and x.shape[-1] == self.prepacked.k and not is_autocast:
                return self.prepacked(x)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        kind = type(self)
        return _empty, (kind.__bases__[1], tuple(self.prepacked_from)), self.__dict__


@functools.cache
def prepacked_class(base: Any, names: tuple[str, ...]) -> type[nn.Module]:
    def reader(name: str) -> property:
        return property(lambda self: self.prepacked_from[name].restored(self.prepacked))

    return type(f"Prepacked{base.__name__}", (Prepacked, base), {n: reader(n) for n in names})


def _empty(base: Any, names: tuple[str, ...]) -> nn.Module:
    kind = prepacked_class(base, names)
    return kind.__new__(kind)

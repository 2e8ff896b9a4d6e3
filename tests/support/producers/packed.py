"""GPTQ, AWQ and the like: bit fields of int32, zero points packed too."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch

from tests.support.producers.base import (
    BY_INDEX,
    PackedLinear,
    Producer,
    Tensor,
    f16,
    field,
    scales,
    signed,
    words,
)


class Gptq(PackedLinear):
    """gptqmodel 7.7's torch path: shifts by a buffer, groups by an index, integers subtracted."""

    bits: ClassVar[int] = 4

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        per_word, groups = 32 // self.bits, k // self.group
        table = torch.arange(0, 32, self.bits, dtype=torch.int32)
        self.keep(
            qweight=words(k // per_word, n),
            qzeros=words(groups, n // per_word),
            scales=scales(groups, n, bits=self.bits, dtype=dtype),
            g_idx=self.groups_of_rows(k),
        )
        self.keep_table(table)

    def groups_of_rows(self, k: int) -> Tensor:
        return torch.arange(k, dtype=torch.int32) // self.group

    def keep_table(self, table: Tensor) -> None:
        self.keep(wf_column=table.reshape(1, -1, 1), wf_row=table.reshape(1, 1, -1))

    @property
    def integer(self) -> torch.dtype:
        return torch.int16 if self.bits == 8 else torch.int8

    def codes(self) -> Tensor:
        spread = self.qweight.unsqueeze(1).expand(-1, 32 // self.bits, -1)
        shifted = torch.bitwise_right_shift(spread, self.wf_column).to(self.integer)
        return torch.bitwise_and(shifted, (1 << self.bits) - 1).reshape(self.k, self.n)

    def zero_points(self) -> Tensor:
        spread = self.qzeros.unsqueeze(2).expand(-1, -1, 32 // self.bits)
        shifted = torch.bitwise_right_shift(spread, self.wf_row).to(self.integer)
        zeros = torch.bitwise_and(shifted, (1 << self.bits) - 1)
        return zeros.reshape(self.scales.shape[0], -1)

    def weight(self) -> Tensor:
        zeros, codes = self.zero_points(), self.codes()
        return self.scales[self.g_idx.long()] * (codes - zeros[self.g_idx.long()])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x.reshape(-1, self.k), self.weight())
        return self.add_bias(y.reshape(*x.shape[:-1], self.n))

    def stored_zero(self, group: Tensor, n: Tensor) -> Tensor:
        per_word = 32 // self.bits
        return field(self.qzeros[group, n // per_word], self.bits * (n % per_word), self.bits)

    def dense(self) -> Tensor:
        n, k = self.grid()
        per_word, group = 32 // self.bits, self.g_idx.long()[k]
        code = field(self.qweight[k // per_word, n], self.bits * (k % per_word), self.bits)
        return (code - self.stored_zero(group, n)) * self.scales[group, n].double()


class Gptq8(Gptq):
    bits = 8


class Gptq2(Gptq):
    bits = 2


class GptqActOrder(Gptq):
    """A group is any set of k."""

    def groups_of_rows(self, k: int) -> Tensor:
        return super().groups_of_rows(k)[torch.randperm(k)]


class GptqPlusOne(Gptq):
    """The first format: it stores the zero point minus one, and 16 is a zero point."""

    def zero_points(self) -> Tensor:
        return super().zero_points() + 1

    def stored_zero(self, group: Tensor, n: Tensor) -> Tensor:
        return super().stored_zero(group, n) + 1


class GptqPlusOneWrapped(GptqPlusOne):
    """As before, but 15 + 1 is 0."""

    def zero_points(self) -> Tensor:
        return torch.bitwise_and(super().zero_points(), 15)

    def stored_zero(self, group: Tensor, n: Tensor) -> Tensor:
        return super().stored_zero(group, n) % 16


class Gptq3(Gptq):
    """32 fields of three bits in three words, the 11th and the 22nd in two of them. They are
    unpacked as 12 of each word, of which 11, 11 and 10 remain."""

    bits = 3

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        groups = k // self.group
        starts = [*range(0, 31, 3), 0], [0, *range(1, 32, 3)], [0, *range(2, 30, 3), 0]
        table = torch.tensor(starts)
        self.keep(
            qweight=words(3 * k // 32, n),
            qzeros=words(groups, 3 * n // 32),
            scales=scales(groups, n, bits=3, dtype=dtype),
            g_idx=self.groups_of_rows(k),
        )
        self.keep_table(table.int())

    def keep_table(self, table: Tensor) -> None:
        self.keep(wf_column=table.reshape(1, 3, 12, 1), wf_row=table.reshape(1, 1, 3, 12))

    def codes(self) -> Tensor:
        spread = self.qweight.reshape(-1, 3, 1, self.n).expand(-1, -1, 12, -1)
        codes = (spread >> self.wf_column) & 7
        codes[:, 0, 10] = (codes[:, 0, 10] & 3) | ((codes[:, 1, 0] << 2) & 4)
        codes[:, 1, 11] = (codes[:, 1, 11] & 1) | ((codes[:, 2, 0] << 1) & 6)
        codes = codes & 7
        parts = [codes[:, 0, :11], codes[:, 1, 1:12], codes[:, 2, 1:11]]
        return torch.cat(parts, dim=1).reshape(self.k, self.n)

    def zero_points(self) -> Tensor:
        rows = self.qzeros.shape[0]
        zeros = self.qzeros.reshape(rows, -1, 3, 1).expand(-1, -1, -1, 12) >> self.wf_row
        zeros[:, :, 0, 10] = (zeros[:, :, 0, 10] & 3) | ((zeros[:, :, 1, 0] << 2) & 4)
        zeros[:, :, 1, 11] = (zeros[:, :, 1, 11] & 1) | ((zeros[:, :, 2, 0] << 1) & 6)
        zeros = zeros & 7
        parts = [zeros[:, :, 0, :11], zeros[:, :, 1, 1:12], zeros[:, :, 2, 1:11]]
        return torch.cat(parts, dim=2).reshape(rows, self.n)

    def stored_zero(self, group: Tensor, n: Tensor) -> Tensor:
        bits = [3 * (n % 32) + bit for bit in range(3)]
        parts = [field(self.qzeros[group, n // 32 * 3 + at // 32], at % 32, 1) for at in bits]
        return parts[0] | parts[1] << 1 | parts[2] << 2

    def dense(self) -> Tensor:
        n, k = self.grid()
        bits, group = [3 * (k % 32) + bit for bit in range(3)], self.g_idx.long()[k]
        parts = [field(self.qweight[k // 32 * 3 + at // 32, n], at % 32, 1) for at in bits]
        code = parts[0] | parts[1] << 1 | parts[2] << 2
        return (code - self.stored_zero(group, n)) * self.scales[group, n].double()


class GptqConstantZero(Gptq):
    """Symmetric, with the zero points gone from the checkpoint."""

    def weight(self) -> Tensor:
        return self.scales[self.g_idx.long()] * (self.codes() - 8)

    def stored_zero(self, group: Tensor, n: Tensor) -> Tensor:
        return torch.tensor(8)


class GptqPlainAttribute(Gptq):
    """The shifts are a plain tensor attribute of the module, no buffer."""

    def keep_table(self, table: Tensor) -> None:
        self.wf_column, self.wf_row = table.reshape(1, -1, 1), table.reshape(1, 1, -1)


class GptqList(Gptq):
    """The shifts are a list in the code, a graph constant; groups by reshaping."""

    def keep_table(self, table: Tensor) -> None:
        pass

    def weight(self) -> Tensor:
        table = torch.tensor(
            [0, 4, 8, 12, 16, 20, 24, 28], dtype=torch.int32, device=self.qweight.device
        )
        zeros = (self.qzeros.unsqueeze(2) >> table[None, None]) & 15
        zeros = zeros.reshape(-1, 1, self.n)
        codes = (self.qweight.unsqueeze(1) >> table[None, :, None]) & 15
        codes = codes.reshape(-1, self.group, self.n)
        weight = self.scales.reshape(-1, 1, self.n) * (codes - zeros)
        return weight.reshape(-1, self.n)


class AutoGptq(Gptq):
    """AutoGPTQ 0.4: one table, unsqueezed at each use; groups by reshaping; zero points plus 1."""

    def keep_table(self, table: Tensor) -> None:
        self.keep(wf=table.unsqueeze(0))

    def weight(self) -> Tensor:
        spread = self.qzeros.unsqueeze(2).expand(-1, -1, 8)
        zeros = torch.bitwise_right_shift(spread, self.wf.unsqueeze(0)).to(torch.int8)
        zeros = (torch.bitwise_and(zeros, 15) + 1).reshape(-1, 1, self.n)
        spread = self.qweight.unsqueeze(1).expand(-1, 8, -1)
        codes = torch.bitwise_right_shift(spread, self.wf.unsqueeze(-1)).to(torch.int8)
        codes = torch.bitwise_and(codes, 15).reshape(-1, self.group, self.n)
        return (self.scales.reshape(-1, 1, self.n) * (codes - zeros)).reshape(-1, self.n)

    def stored_zero(self, group: Tensor, n: Tensor) -> Tensor:
        return super().stored_zero(group, n) + 1


class GptqCat(Gptq):
    """Eight masks and a stack, without a shift table."""

    def keep_table(self, table: Tensor) -> None:
        pass

    def weight(self) -> Tensor:
        codes = torch.stack([(self.qweight >> 4 * i) & 15 for i in range(8)], dim=1)
        zeros = torch.stack([(self.qzeros >> 4 * i) & 15 for i in range(8)], dim=-1)
        zeros = zeros.reshape(-1, self.n).repeat_interleave(self.group, dim=0)
        scale = self.scales.repeat_interleave(self.group, dim=0)
        return (codes.reshape(self.k, self.n) - zeros).to(self.dtype) * scale


# ------------------------------------------------------------------------------------------

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


class Awq(PackedLinear):
    """autoawq 0.2.9's torch path: packed along N in an order of its own, always in fp16."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        groups = k // self.group
        self.keep(
            qweight=words(k, n // 8),
            qzeros=words(groups, n // 8),
            scales=scales(groups, n, bits=4, dtype=f16),
        )

    def unpacked(self, packed: Tensor, shifts: Tensor) -> Tensor:
        shifted = torch.bitwise_right_shift(packed[:, :, None], shifts[None, None, :])
        return shifted.to(torch.int8).view(packed.shape[0], -1)

    def weight(self) -> Tensor:
        shifts = torch.arange(0, 32, 4, device=self.qweight.device)
        codes = self.unpacked(self.qweight, shifts)
        zeros = self.unpacked(self.qzeros, shifts)
        order = (
            torch.arange(self.n, dtype=torch.int32, device=self.qweight.device)
            .view(-1, 8)[:, AWQ_ORDER]
            .view(-1)
        )
        codes = torch.bitwise_and(codes[:, order], 15)
        zeros = torch.bitwise_and(zeros[:, order], 15)
        scale = self.scales.repeat_interleave(self.group, dim=0)
        return (codes - zeros.repeat_interleave(self.group, dim=0)) * scale

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.half()
        y = torch.matmul(x.half(), self.weight())
        y = y if bias is None else y + bias
        y = y.unsqueeze(0) if y.dim() == 2 else y
        return y.reshape(*x.shape[:-1], self.n).to(x.dtype)

    def dense(self) -> Tensor:
        n, k = self.grid()
        shift = 4 * torch.tensor(AWQ_ORDER)[n % 8]
        code = field(self.qweight[k, n // 8], shift, 4)
        zero = field(self.qzeros[k // self.group, n // 8], shift, 4)
        return (code - zero) * self.scales[k // self.group, n].double()


class AwqShiftTable(Awq):
    """The shifts, a graph constant, encode the order."""

    def weight(self) -> Tensor:
        shifts = torch.tensor(
            [0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32, device=self.qweight.device
        )
        codes = (self.qweight.unsqueeze(-1) >> shifts) & 0xF
        zeros = (self.qzeros.unsqueeze(-1) >> shifts) & 0xF
        codes = codes.reshape(-1, self.group, self.n)
        zeros = zeros.reshape(-1, 1, self.n)
        weight = (codes - zeros).half() * self.scales.unsqueeze(1)
        return weight.reshape(self.k, self.n)


class AwqGemv(Awq):
    """The layout of its GEMV kernel: [N, K / 8], fields in order, scales [N, groups]."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        groups = k // self.group
        self.keep(
            qweight=words(n, k // 8),
            qzeros=words(n, -(-groups // 8)),
            scales=scales(n, groups, bits=4, dtype=f16),
        )

    def weight(self) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=self.qweight.device)
        codes = (self.qweight.unsqueeze(-1) >> shifts & 15).reshape(self.n, -1, self.group)
        zeros = (self.qzeros.unsqueeze(-1) >> shifts & 15).reshape(self.n, -1)
        zeros = zeros[:, : self.scales.shape[1]].unsqueeze(-1)
        weight = (codes - zeros) * self.scales.unsqueeze(-1)
        return weight.reshape(self.n, self.k).t()

    def dense(self) -> Tensor:
        n, k = self.grid()
        group = k // self.group
        code = field(self.qweight[n, k // 8], 4 * (k % 8), 4)
        zero = field(self.qzeros[n, group // 8], 4 * (group % 8), 4)
        return (code - zero) * self.scales[n, group].double()


class AlongN(Awq):
    """Signed fields in order along N, sign-extended by two shifts, in the activation's dtype."""

    def store(self, k: int, n: int, dtype: torch.dtype) -> None:
        self.keep(
            qweight=words(k, n // 8),
            scales=scales(k // self.group, n, bits=4, dtype=dtype),
        )

    def weight(self) -> Tensor:
        up = torch.arange(28, -1, -4, dtype=torch.int32, device=self.qweight.device)
        codes = ((self.qweight.unsqueeze(2) << up) >> 28).reshape(self.k, self.n)
        return codes.to(self.dtype) * self.scales.repeat_interleave(self.group, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.add_bias(x @ self.weight())

    def dense(self) -> Tensor:
        n, k = self.grid()
        code = signed(field(self.qweight[k, n // 8], 4 * (n % 8), 4), 4)
        return code * self.scales[k // self.group, n].double()


_gptq = functools.partial(
    Producer, bits=4, signed=False, group_size=64, zero="packed", bias="add", dtypes=(f16,)
)
_READS = ("wf_column", "wf_row", "g_idx")

WORDS = [
    _gptq("gptq_gm_4b_g64_base", Gptq, reads=_READS, given=True),
    _gptq("gptq_gm_8b_g64_base", Gptq8, bits=8, reads=_READS, given=True),
    _gptq("gptq_2b_g64", Gptq2, bits=2, reads=_READS),
    _gptq("gptq_3b_g64", Gptq3, bits=3, reads=_READS),
    _gptq("gptq_4b_act_order", GptqActOrder, group_size=BY_INDEX, reads=_READS),
    _gptq("gptq_4b_plus_one", GptqPlusOne, reads=_READS),
    _gptq("gptq_4b_plus_one_wrapped", GptqPlusOneWrapped, reads=_READS),
    _gptq("gptq_4b_sym", GptqConstantZero, zero="const", reads=_READS[::2]),
    _gptq("gptq_4b_attribute", GptqPlainAttribute, reads=_READS),
    _gptq("gptq_4b_autogptq", AutoGptq, reads=("wf",)),
    _gptq("gptq_4b_list", GptqList),
    _gptq("gptq_4b_stack", GptqCat, dtypes=Producer.dtypes),
    _gptq("awq_autoawq_g64", Awq, dtypes=(f16, torch.bfloat16), given=True),
    _gptq("awq_shift_table", AwqShiftTable, dtypes=(f16, torch.bfloat16)),
    _gptq("awq_gemv_g64", AwqGemv),
    Producer("int4_along_n", AlongN, bits=4, group_size=64, bias="add"),
]

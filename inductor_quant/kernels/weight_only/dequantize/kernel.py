"""``weight_only_dequantize``: writes W [K, N] in x's dtype, in Triton.

Chosen for weight-only GEMMs that no kernel takes, above all for M where dequantizing W once and
multiplying with cuBLAS is faster than dequantizing it for every tile (``preferred_rows``).

Each CTA reads one BLOCK_K x BLOCK_N tile of packed weights, applies all dequantization ops in fp32
and stores the result, rounded once; an int8 weight of ``w4a8`` in int32. If the packed weight lies
along K, so does W (``is_written_along_k``). Where scales change with every k, the columns of a tile
are those that share them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from inductor_quant.kernels.codegen.base import WeightTile
from inductor_quant.kernels.codegen.digits.order import Order, reordered
from inductor_quant.kernels.codegen.weight import IntegerCodegen, WholeCodegen
from inductor_quant.kernels.config import GemmConfig, reject_if_split
from inductor_quant.kernels.kernel import Kernel
from inductor_quant.kernels.problem import Device, Problem
from inductor_quant.kernels.weight_only import rules
from inductor_quant.kernels.weight_only.digit_tiles import n_order, varying
from inductor_quant.spec.decisions import Rejection
from inductor_quant.spec.gemm import OperandSpec, QuantGemmSpec


class WeightOnlyDequantize(Kernel):
    name = "weight_only_dequantize"
    family = "weight_only_dequantize"
    template = "weight_only/dequantize/template"

    @staticmethod
    def grid(*sizes: Any, cdiv: Any, min: Any = min) -> tuple[Any, Any, Any]:
        k, n, meta = sizes
        return (cdiv(k, meta["BLOCK_K"]) * cdiv(n, meta["BLOCK_N"]), 1, 1)

    def rejection(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> Rejection | None:
        if spec.a.dtype == torch.int8:  # the weight of a ``w4a8``
            spec = dataclasses.replace(spec, a=OperandSpec(torch.float16))
        return rules.rejection(spec, problem, device)

    def constants(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> dict[str, Any]:
        weight, dtype = rules.weight_of(problem), spec.a.dtype
        column = "idx_n"
        if varying(weight.format):
            order = n_order(weight.format)
            column = Order(weight.format, tuple(order)).place(column)
            weight = dataclasses.replace(weight, format=reordered(weight.format, "n", order))
        tile = WeightTile(weight, config, dtype, weight.format.dequant_ops)
        codegen = (IntegerCodegen if dtype == torch.int8 else WholeCodegen)(tile)
        codegen.column = column
        return {"CODEGEN": codegen, "ACC_TYPE": codegen.x_type}

    def config_rejection(
        self, spec: QuantGemmSpec, problem: Problem, config: GemmConfig, device: Device
    ) -> Rejection | None:
        return reject_if_split(config)

    def configs(self, spec: QuantGemmSpec, problem: Problem, device: Device) -> list[GemmConfig]:
        along_k = rules.is_written_along_k(rules.weight_of(problem))
        n, k = (8, 256) if along_k else (128, 32)
        return [GemmConfig(16, n, k, num_warps=4, num_stages=1)]


WEIGHT_ONLY_DEQUANTIZE = WeightOnlyDequantize()

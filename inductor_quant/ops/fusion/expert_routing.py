"""``torch.ops.inductor_quant.expert_places``, ``expert_order`` and ``expert_keys``, before experts,
and ``expert_sum``, after them."""

from __future__ import annotations

import torch

from inductor_quant.ops.registration import define

aten = torch.ops.aten
PLACES_SCHEMA = "expert_places(Tensor ids, int experts) -> Tensor"
ORDER_SCHEMA = "expert_order(Tensor place) -> Tensor"
KEYS_SCHEMA = "expert_keys(Tensor ids, int experts) -> Tensor"
SUM_SCHEMA = "expert_sum(Tensor x, bool keepdim, ScalarType? dtype) -> Tensor"
KEY_DTYPES = (torch.int8, torch.int16, torch.int32)
# Each id is compared with all: so many, or fewer. Beyond, a sort takes less time.
MAX_IDS = 4096
MAX_SUMMED = 16  # experts of a token, added by one thread


def places_reference(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Where each of the ``ids`` [S] comes when they are sorted, equal ones in their order, then for
    each expert e how many ids are from 0 to e: where its rows end, if no id is negative.

    ids: int32 or int64, any values. Returns int32 [S + experts].
    """
    order = aten.sort.stable(ids, stable=True)[1]
    count = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    place = torch.empty_like(count).scatter_(0, order, count)
    expert = torch.arange(experts, device=ids.device)
    is_within = (ids >= 0) & (ids <= expert[:, None])
    return torch.cat([place, is_within.sum(1, dtype=torch.int32)])


def places_fake(ids: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.empty(ids.shape[0] + experts, dtype=torch.int32, device=ids.device)


def order_reference(place: torch.Tensor) -> torch.Tensor:
    """The inverse of ``place`` [S], a permutation: which comes there. Returns int64 [S]."""
    count = torch.arange(len(place), device=place.device)
    return torch.empty_like(count).scatter_(0, place.long(), count)


def order_fake(place: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(place, dtype=torch.int64)


def keys_reference(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """``ids`` [S], of which those from ``experts`` on are one, in the narrowest of ``KEY_DTYPES``
    that has that number. Those below its range become its smallest."""
    return ids.clamp(*key_range(experts)).to(key_dtype(experts))


def keys_fake(ids: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.empty_like(ids, dtype=key_dtype(experts))


def key_dtype(experts: int) -> torch.dtype:
    return next(dtype for dtype in KEY_DTYPES if experts <= torch.iinfo(dtype).max)


def key_range(experts: int) -> tuple[int, int]:
    return torch.iinfo(key_dtype(experts)).min, experts


def sum_reference(x: torch.Tensor, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    """``x.sum(1, keepdim, dtype=dtype)`` of [T, k, N]: of the k experts of a token.

    A separate op tells the lowering that k is small and N is contiguous.
    """
    return x.sum(1, keepdim, dtype=dtype)


places_op = define(PLACES_SCHEMA, places_reference, places_fake)
order_op = define(ORDER_SCHEMA, order_reference, order_fake)
keys_op = define(KEYS_SCHEMA, keys_reference, keys_fake)
sum_op = define(SUM_SCHEMA, sum_reference)

"""What PTX instructions compute, for the interpreter: those that our kernels have inline."""

from __future__ import annotations

import numpy as np


def round_to_int8(x: np.ndarray) -> np.ndarray:
    return np.nan_to_num(np.clip(np.rint(x), -128, 127), nan=0.0).astype(np.int32)


EMULATIONS = {"cvt.rni.sat.s8.f32 $0, $1;": round_to_int8}

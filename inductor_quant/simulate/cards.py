"""The cards that exist only for the compiler: what Inductor and Triton ask of each."""

from __future__ import annotations

import dataclasses

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class GPU:
    """What the compiler may know of a card. Sizes are in bytes."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_memory_per_block_optin: int
    total_memory: int
    l2_cache: int
    threads_per_sm: int = 2048
    registers_per_sm: int = 65536
    warp_size: int = 32

    @property
    def arch(self) -> int:
        """The capability as one number: 90 for (9, 0)."""
        major, minor = self.capability
        return major * 10 + minor


GPUS: dict[int, GPU] = {
    80: GPU("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * KIB, 80 * GIB, 40 * MIB),
    86: GPU("NVIDIA A40", (8, 6), 84, 99 * KIB, 48 * GIB, 6 * MIB, threads_per_sm=1536),
    89: GPU("NVIDIA L40S", (8, 9), 142, 99 * KIB, 48 * GIB, 96 * MIB, threads_per_sm=1536),
    90: GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * KIB, 80 * GIB, 50 * MIB),
    100: GPU("NVIDIA B200", (10, 0), 148, 227 * KIB, 180 * GIB, 126 * MIB),
    120: GPU(
        *("NVIDIA GeForce RTX 5090", (12, 0), 170, 99 * KIB, 32 * GIB, 96 * MIB),
        threads_per_sm=1536,
    ),
}

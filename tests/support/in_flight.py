"""Registers of a product in flight, in machine code: wgmma reads its first operand from registers
after the instruction is issued, until a wait covers it. ptxas keeps them in straight code; where
the loop comes round before the wait it was seen to reuse them, and some results differed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas

from inductor_quant.simulate.compile import PTXAS_OPTIONS

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
Code = list[tuple[int, str]]
_STORES = ("ST", "BRA", "RED", "BAR", "SYNCS.ARR", "WARPGROUP", "DEPBAR")


def machine_code(ptx: str) -> Code:
    """(address, instruction) of each instruction for sm_90a, assembled as by Triton."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        assembler = get_ptxas(90).path  # Triton 3.9 has two, and writes PTX for the newer one
        command = [assembler, *PTXAS_OPTIONS, "-arch=sm_90a", source, "-o", cubin]
        subprocess.run(command, check=True)
        command = [BIN / "cuobjdump", "-sass", cubin]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", text)
    return [(int(address, 16), instruction.strip()) for address, instruction in found]


def products(code: Code) -> int:
    """How many take the first operand from registers."""
    return sum(_operand(instruction) is not None for _, instruction in code)


def spills(code: Code) -> list[str]:
    """The accesses to local memory between products, those where a result is stored left out."""
    found: list[str] = []
    waiting: list[str] | None = None  # None: no product yet
    for address, instruction in code:
        if "GMMA" in instruction:
            found, waiting = found + (waiting or []), []
        elif re.search(r"\bSTG\b", instruction):
            waiting = None
        elif waiting is not None and re.search(r"\b(LDL|STL)\b", instruction):
            waiting.append(f"{address:#x} {instruction}")
    return found


def spilled_in_loops(code: Code) -> list[str]:
    """The accesses to local memory in the shortest loop around each product, of any kind."""
    return _in_loops(code, re.compile(r"\b(LDL|STL)\b"))


def literals_in_loops(code: Code) -> list[str]:
    """The instructions there that do nothing but put a literal of 32 bits into a register."""
    return _in_loops(code, re.compile(r"\bMOV\S* R\d+,( RZ, RZ,)? 0x[0-9a-f]{6,8}$"))


def loop(code: Code, product: str = "GMMA") -> list[str]:
    """The shortest loop around as many products as any."""
    loops = _loops(code, product)

    def count(each: tuple[int, int]) -> int:
        return sum(product in text for _, text in code[each[0] : each[1] + 1])

    most = max(map(count, loops))
    around = [each for each in loops if count(each) == most]
    first, last = min(around, key=lambda each: each[1] - each[0])
    return [instruction for _, instruction in code[first : last + 1]]


def stored_as_loaded(code: Code, apart: int = 100) -> list[str]:
    """The stores to local memory of what a load from global memory wrote at most ``apart``
    instructions before: they wait for it."""
    found: list[str] = []
    loads: dict[int, int] = {}  # instruction by register
    for i, (address, instruction) in enumerate(code):
        stored = re.search(r"\bSTL\S* \[.*\], R(\d+)", instruction)
        if stored and i - loads.get(int(stored[1]), -apart - 1) <= apart:
            found.append(f"{address:#x} {instruction}")
        for register in _written(instruction):
            loads.pop(register, None)
            if "LDG" in instruction:
                loads[register] = i
    return found


def overwritten(code: Code) -> list[str]:
    """The instructions that write to a register of a product in flight, in two rounds of each loop
    with products."""
    loops = _loops(code, "GMMA")
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [each for first, last in inner for each in _overwritten(code[first : last + 1] * 2)]


def read_early(code: Code) -> list[str]:
    """The instructions that read a sum before the wait for the last product that adds to it."""
    found: list[str] = []
    sums: set[int] = set()
    for address, instruction in code:
        product = re.search(r"GMMA\.64x(\d+)\S* R(\d+),", instruction)
        if product:
            sums = set(range(int(product[2]), int(product[2]) + int(product[1]) // 2))
        elif re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x0|\bEXIT\b", instruction):
            sums = set()
        elif sums & _read(instruction):
            found.append(f"{address:#x} {instruction}")
    return found


def _in_loops(code: Code, pattern: re.Pattern[str]) -> list[str]:
    """What matches in the shortest loop around each product."""
    loops = _loops(code, "MMA")
    shortest = set()
    for i, (_, instruction) in enumerate(code):
        around = [loop for loop in loops if loop[0] <= i <= loop[1]]
        if "MMA" in instruction and around:
            shortest.add(min(around, key=lambda loop: loop[1] - loop[0]))
    return [
        f"{address:#x} {instruction}"
        for first, last in sorted(shortest)
        for address, instruction in code[first : last + 1]
        if pattern.search(instruction)
    ]


def _loops(code: Code, product: str) -> list[tuple[int, int]]:
    """First and last instruction of each loop with such products."""
    at = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (_, instruction) in enumerate(code):
        target = re.search(r"BRA 0x([0-9a-f]+)", instruction)
        first = at.get(int(target[1], 16), i) if target else i
        if first < i and any(product in each for _, each in code[first:i]):
            loops.append((first, i))
    return loops


def _read(instruction: str) -> set[int]:
    _, _, sources = instruction.partition(",")
    return {int(register) for register in re.findall(r"\bR(\d+)", sources)}


def _overwritten(code: Code) -> list[str]:
    found: list[str] = []
    flying: list[set[int]] = []  # by group
    group: set[int] = set()
    for address, instruction in code:
        if "GMMA" in instruction:
            group |= _operand(instruction) or set()
            if "gsb0" in instruction:
                flying, group = [*flying, group], set()
        elif wait := re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x(\w+)", instruction):
            left = int(wait[1], 16)
            flying = flying[-left:] if left else []
        elif _written(instruction) & set().union(group, *flying):
            found.append(f"{address:#x} {instruction}")
    return found


def _operand(instruction: str) -> set[int] | None:
    operand = re.search(r"GMMA\S*\s+R\d+,\s*R(\d+),", instruction)
    return set(range(int(operand[1]), int(operand[1]) + 4)) if operand else None


def _written(instruction: str) -> set[int]:
    parts = re.match(r"(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s+(?:P\w+,\s*)?R(\d+)", instruction)
    if not parts or parts[1].startswith(_STORES):
        return set()
    width = 4 if ".128" in parts[1] else 2 if re.search(r"\.64|WIDE", parts[1]) else 1
    return set(range(int(parts[2]), int(parts[2]) + width))

"""Which of racecheck's hazards are at a kernel's own lines.

    python -m tests.support.gpu.racecheck        # on a GPU: four plain kernels under racecheck

Reports of the warp-specialized kernels were all at two constructs of Triton.

- ``warp_specialize``: the first warps write what to run, and the captures, to shared memory; all
  warps meet at ``barrier.sync 1``; the others read. Reported at the kernel's ``def`` and the call,
  of kernels in which the first warps also meet at a barrier of their own: without that one
  instruction the same kernel has no report. So it is in CUDA (``CUDA``): its two kernels differ
  in that barrier alone, which orders nothing that others access, and racecheck reports the one that
  has it (compute-sanitizer of CUDA 13.0).
- ``make_tensor_descriptor``: one lane writes the descriptor (``tensormap.replace``), and the warp
  copies it to global memory by an instruction that waits for all its lanes (``.sync.aligned``).
  Reported at the call, as a warning and not in every run; never seen with ``bar.warp.sync`` put
  between the two.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CUDA = r"""
extern "C" __global__ void NAME(const int* in, int* out) {
    __shared__ int state;
    const int t = threadIdx.x;
    if (t < 128) {
        state = in[0];
        ALL ALL  // the others have read it
        OWN
        ALL state = 2; ALL
    } else {
        while (true) {
            ALL int now = *(volatile int*)&state;
            if (now == 2) break;
            ALL out[t] = now; ALL
        }
    }
}
"""
ALL, OWN = 'asm volatile("barrier.sync 1;");', 'asm volatile("bar.sync 2, 128;");'
_ACCESS = re.compile(r" at (\S+)\+(0x[0-9a-f]+)(?: in (\S+):(\d+))?")
_TRITONS = ("warp_specialize", "make_tensor_descriptor")


def own_hazards(output: str, folder: Path) -> tuple[int, list[str]]:
    """How many reports there are, and those with an access that is not of these constructs.
    ``folder``: the cache in which the kernels' files lie."""
    reports = list(_reports(output))
    known = {(name, at): line for each in reports for name, at, line in _accesses(each) if line}

    def is_tritons(report: str) -> bool:
        found = [(name, line or known.get((name, at), 0)) for name, at, line in _accesses(report)]
        return all(line and line in _lines(folder, name) for name, line in found)

    return len(reports), [report for report in reports if not is_tritons(report)]


def other_errors(output: str) -> list[str]:
    """The errors that are no hazards: an access out of bounds, a failure of the tool."""
    lines = (line for line in output.splitlines() if re.match(r"=+ (Error|Internal)", line))
    return [line for line in lines if "Race reported" not in line]


def _accesses(report: str) -> Iterator[tuple[str, str, int]]:
    """File, address in the kernel, and line of each access; 0: it is not known. Some runs exchange
    the names of the file and the kernel, and some reports have only the first of them."""
    for each in report.splitlines():
        found = _ACCESS.search(each)
        first, at, second, line = found.groups() if found else ("", "", "", "")
        name = first if first.endswith(".py") else second or ""
        yield Path(name).name, at, int(line or 0)


def _reports(output: str) -> Iterator[str]:
    lines: list[str] = []
    for line in output.splitlines():
        if re.match(r"=+ (Error|Warning): Race reported", line):
            lines = [line]
        elif lines and line.startswith("=") and line.strip("= "):
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


@functools.cache
def _lines(folder: Path, name: str) -> set[int]:
    """The lines of the constructs in a kernel's file."""
    lines: set[int] = set()
    for file in folder.rglob(name):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("triton_"):
                lines.add(node.lineno)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _TRITONS:
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _kernels() -> None:
    """Launches the kernels, in a process of their own."""
    import torch
    import triton

    from tests.support.gpu import racecheck_kernels as kernels

    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device="cuda"))
    tiles = 264
    x = torch.randn(tiles * 64, 64, device="cuda", dtype=torch.float16)
    copies = torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(2):
        kernels.copied_by_partitions[(tiles,)](x, copies[0], tiles, num_warps=4)
        kernels.copied[(tiles,)](x, copies[1], tiles, num_warps=4)
    ones, out = (torch.ones(256, dtype=torch.int32, device="cuda") for _ in range(2))
    for name, own in (("barriers_of_all", ""), ("a_barrier_of_some", OWN)):
        text = CUDA.replace("NAME", name).replace("ALL", ALL).replace("OWN", own)
        kernel = torch.cuda._compile_kernel(text, name)
        kernel(grid=(tiles, 1, 1), block=(256, 1, 1), args=[ones, out])
    torch.cuda.synchronize()
    print("right:", *(torch.equal(x, copy) for copy in copies))


def main() -> int:
    if sys.argv[1:] == ["--child"]:
        _kernels()
        return 0
    command = ["compute-sanitizer", "--tool", "racecheck", "--print-limit", "100", sys.executable]
    return subprocess.run([*command, "-m", "tests.support.gpu.racecheck", "--child"]).returncode


if __name__ == "__main__":
    sys.exit(main())

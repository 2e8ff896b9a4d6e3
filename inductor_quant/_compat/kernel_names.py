"""Names of the kernels that templates generate: of what they compute, not of the graph around them.

Inductor names a kernel after the ops of its graph and a counter, and Triton's cache tells kernels
apart by their text, name included. So the GEMM of a prompt and that of a token, or those of two
ranges of M, would be compiled twice though they are equal. Here the function of a template's kernel
gets a name of its own, and the module that holds it another one, Inductor's::

    @triton.jit
    def triton_tem_w8a8_mm_1f0a2b3c(...): ...

    triton_tem_fused__to_copy_mul_w8a8_7 = triton_tem_w8a8_mm_1f0a2b3c

Profiles of the GPU show the first one.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from inductor_quant._compat.symbols import symbol


def own_names(template: Any, name: str) -> Any:
    """``template``, whose kernels are named after ``name`` and their text."""
    _install()
    template.kernel_type = type("NamedKernel", (template.kernel_type,), {"own_name": name})
    return template


@functools.cache
def _install() -> None:
    """Let Inductor's code generation take these names, from now on in this process."""
    scheduling = symbol("torch._inductor.codegen.triton:TritonScheduling")
    ordinary = scheduling.define_kernel

    @functools.wraps(ordinary)
    def define_kernel(self: Any, src_code: str, node_schedule: Any, kernel: Any) -> Any:
        name = getattr(kernel, "own_name", "")
        return ordinary(self, named(src_code, name) if name else src_code, node_schedule, kernel)

    scheduling.define_kernel = define_kernel


def named(source: str, name: str) -> str:
    """The source of a kernel whose name is a placeholder, with a name of its function's own."""
    placeholder = str(symbol("torch._inductor.utils:Placeholder.KERNEL_NAME"))
    before, head, function = source.partition(f"def {placeholder}(")
    if not head:
        return source
    own = f"triton_tem_{name}_{hashlib.sha256(function.encode()).hexdigest()[:8]}"
    return f"{before}def {own}({function}\n\n{placeholder} = {own}\n"

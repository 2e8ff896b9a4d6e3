"""From canonical ops to kernels. Importing this package registers templates and lowerings, once."""

from inductor_quant.lowering import w8a8

__all__ = ["w8a8"]

"""``python -m inductor_quant doctor``, ``which`` and ``codes``."""

from __future__ import annotations

import argparse
import sys

from inductor_quant.report import codes, doctor, which


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m inductor_quant")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module, text in (
        (doctor, "whether inductor_quant can run on this machine, and why not"),
        (which, "which kernel runs a GEMM, and why the kernels before it do not"),
        (codes, "what each rejection code means"),
    ):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=module.add_arguments(command))
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())

"""``python -m inductor_quant doctor``."""

from __future__ import annotations

import argparse
import sys

from inductor_quant import doctor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m inductor_quant")
    parser.add_argument(
        "command", choices=["doctor"], help="what this machine can use, and why not"
    )
    parser.parse_args()
    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())

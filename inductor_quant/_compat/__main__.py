"""``python -m inductor_quant._compat``: what the installed torch and Triton lack."""

from inductor_quant._compat.symbols import main

raise SystemExit(main())

"""python -m bench NAME: one benchmark a module."""

from __future__ import annotations

import importlib
import os
import sys

BENCHMARKS = {
    "quick": "the main models in three minutes",
    "all": "every benchmark for the CPU in half an hour, with torch.compile",
    "columns": "RECom's models E and F, whole and up to the concat, against eager, torch.compile and AOTInductor",
    "bags": "one large table of pooled bags, against F.embedding_bag and fbgemm_gpu",
    "gpu": "embedding columns and bags on a CUDA device, called and as a graph",
    "dense": "attention, experts, interactions and DLRM, against eager and torch.compile; with a plot",
    "zoo": "third-party models against eager",
    "gpu_zoo": "third-party models on a CUDA device, as users call them",
    "sharded": "a training step of TorchRec's sharded DLRM, measured on one rank and calculated for 1 to 128",
    "growth": "optimize() and a call by the number of columns, 10 to 5000",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in BENCHMARKS:
        print("usage: python -m bench NAME [options]\n")
        print("\n".join(f"  {name:10s}{what}" for name, what in BENCHMARKS.items()))
        return 0 if argv in (["-h"], ["--help"]) else 2
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is loaded: its profiler narrates every start
    return importlib.import_module(f"bench.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

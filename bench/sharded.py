"""A training step of TorchRec's sharded DLRM: measured on one rank and calculated for 1 to 128, or measured on several.

    python -m bench sharded
    torchrun --nproc-per-node 2 -m bench sharded

On one rank, measured are the whole steps of eager and of fxopt, and the sharded collection that both have in common.
The rest is arithmetic. Each rank has the same batch at any number of ranks. Tables are spread evenly, so that a rank
looks up as many rows. Collectives add to the step without overlap. An all-to-all sends (W - 1) / W of the looked-up
rows and of their gradients, an all-reduce 2 (W - 1) / W of the dense gradients, each in W - 1 messages in a row.

On several ranks, steps in turns begin on all ranks at once; shown is the median of what rank 0 takes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn

from bench import options
from bench.machine import Neighbours
from bench.timing import measure

FEATURES, ROWS, DIM, DENSE = 26, 10_000, 64, 13
KEYS = [f"f{number}" for number in range(FEATURES)]
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
WARM_TURNS, TURNS = 10, 50  # among several ranks
EAGER, FXOPT, COLLECTION = "eager", "fxopt", "collection"


@dataclass(frozen=True)
class Network:
    """Of each rank: bytes a second in each direction, and seconds a message."""

    bandwidth: float
    latency: float

    def seconds(self, ranks: int, batch: int, parameters: int) -> float:
        """All collectives of a step among `ranks` ranks, one after the other."""
        rows = 4 * batch * FEATURES * DIM
        ids = 8 * batch * FEATURES * 2  # an id and a length each, as the batches here have 1.5 ids a bag
        traffic = (2 * rows + ids + 2 * 4 * parameters) * (ranks - 1) / ranks
        messages = (2 + 2 + 2) * (ranks - 1)  # rows and gradients, lengths and ids, both halves of the all-reduce
        return traffic / self.bandwidth + messages * self.latency


class Ranks(Neighbours):
    """The other ranks are processes, too."""

    def said(self) -> str:
        return f"other processes, the other ranks among them, used {self.share():.0%} of the machine meanwhile"


def sharded() -> tuple[nn.Module, nn.Module]:
    """A DistributedModelParallel of this rank, its tables table-wise with SGD in backward; and its collection."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    tables = [
        EmbeddingBagConfig(name=f"table_{key}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[key])
        for key in KEYS
    ]
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), DENSE, [512, 256, DIM], [512, 256, 1]))
    apply_optimizer_in_backward(torch.optim.SGD, model.model.sparse_arch.parameters(), {"lr": 0.05})
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    constraints = {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    made = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    return made, next(each for each in made.modules() if isinstance(each, ShardedEmbeddingBagCollection))


def batches(batch: int) -> Callable[[], Any]:
    from torchrec import KeyedJaggedTensor
    from torchrec.datasets.utils import Batch

    lengths = torch.randint(0, 4, (FEATURES * batch,), dtype=torch.int32)
    ids, dense = torch.randint(0, ROWS, (int(lengths.sum()),)), torch.randn(batch, DENSE)
    labels = torch.randint(0, 2, (batch,))
    return lambda: Batch(dense, KeyedJaggedTensor(KEYS, ids, lengths=lengths), labels)


def step_of(model: nn.Module, made: Callable[[], Any]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(_dense(model), lr=0.05)

    def step() -> None:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss, _ = model(made())
            loss.backward()
        optimizer.step()

    return step


def collection_of(collection: nn.Module, made: Callable[[], Any]) -> Callable[[], None]:
    def step() -> None:
        with torch.enable_grad():
            pooled = collection(made().sparse_features).wait().values()
            pooled.backward(torch.ones_like(pooled))

    return step


def _dense(model: nn.Module) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if "sparse_arch" not in name]


def measured(batch: int, seconds: float) -> tuple[dict[str, float], int]:
    """Seconds of each contender, the fastest of interleaved calls (among several ranks: the median), and the number of
    dense parameters."""
    import fxopt

    made = batches(batch)
    eager, collection = sharded()
    fast, _ = sharded()
    calls = {
        EAGER: step_of(eager, made),
        FXOPT: step_of(fxopt.optimize(fast), made),
        COLLECTION: collection_of(collection, made),
    }
    several = dist.get_world_size() > 1
    times = _together(calls) if several else {n: t.minimum for n, t in measure(calls, [()], seconds).items()}
    return times, sum(map(torch.numel, _dense(eager)))


def _together(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The median of each call in turns: as many on every rank, because each communicates."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_TURNS + TURNS):
        for name, call in calls.items():
            dist.barrier()
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(each[WARM_TURNS:]) for name, each in times.items()}


def table(parts: dict[str, float], parameters: int, batch: int, network: Network) -> Table:
    caption, measured = f"sharded collection alone: {1e3 * parts[COLLECTION]:.1f} ms", dist.get_world_size()
    shown = Table(title=f"a training step, batch {batch} a rank, measured on {measured}", caption=caption)
    for heading in ("ranks", "collectives ms", "eager ms", "fxopt ms", "ratio"):
        shown.add_column(heading, justify="right")
    added = {measured: None} if measured > 1 else {ranks: network.seconds(ranks, batch, parameters) for ranks in RANKS}
    for ranks, collectives in added.items():
        eager, fast = parts[EAGER] + (collectives or 0.0), parts[FXOPT] + (collectives or 0.0)
        first = "measured" if collectives is None else f"{1e3 * collectives:.1f}"
        shown.add_row(str(ranks), first, f"{1e3 * eager:.1f}", f"{1e3 * fast:.1f}", f"{eager / fast:.2f}x")
    return shown


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options.parser("sharded", __doc__, batches=(1024,), seconds=10.0)
    parser.add_argument("--gigabits", type=float, default=100.0, help="of each rank's network, a second; default: 100")
    parser.add_argument("--latency", type=float, default=10.0, help="of a message, in microseconds; default: 10")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    several = "WORLD_SIZE" in os.environ  # torchrun's
    alone: dict[str, Any] = {} if several else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    try:
        with contextlib.redirect_stdout(io.StringIO()) if dist.get_rank() else contextlib.nullcontext():
            console, neighbours = options.begin(args), Ranks() if several else Neighbours()
        network = Network(args.gigabits * 1e9 / 8, args.latency * 1e-6)
        found = {batch: measured(batch, args.seconds) for batch in args.batches}
        if dist.get_rank():
            return 0
        tables = [table(*parts, batch, network) for batch, parts in found.items()]
    finally:
        dist.destroy_process_group()
    return options.finish(
        args, console, "sharded", tables, [], neighbours, seconds={b: p for b, (p, _) in found.items()}
    )

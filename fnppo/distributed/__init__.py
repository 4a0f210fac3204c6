"""Many GPUs: the pure functions over torch's FSDP2, DTensor and collectives. What has state is `FSDPActor`.

The files, in the order in which to read them: `mesh` (which ranks do what), `sharding` (the readable version), `rows` and
`dealing` (who computes which rows), `ulysses` (who computes which tokens), `engine` (FSDP2 under a `Policy`), `reduce`,
`checkpoint`, `actor`.
"""

from fnppo.distributed.actor import FSDPActor
from fnppo.distributed.dealing import balanced, in_turn, share_of
from fnppo.distributed.mesh import Ranks, make_mesh, ranks_of, start
from fnppo.distributed.rows import AllRows, gather_rows, own_rows
from fnppo.distributed.sharding import gather_params, shard_params
from fnppo.distributed.ulysses import Ulysses, split_tokens

__all__ = [
    "AllRows",
    "FSDPActor",
    "Ranks",
    "Ulysses",
    "balanced",
    "gather_params",
    "gather_rows",
    "in_turn",
    "make_mesh",
    "own_rows",
    "ranks_of",
    "shard_params",
    "share_of",
    "split_tokens",
    "start",
]

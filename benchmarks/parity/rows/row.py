"""What a line of the table is."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from batches import Columns

import fnppo


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        theirs, ours: what a reader looks for, in Markdown.
        kind, options: the function of the peer's side that is called, and its arguments.
        compute: our side, columns -> results.
        prepare: what is done to a random batch before either side sees it.
        absent: versions that do not have it.
        differs: version -> name of the difference that is expected there.
        peer: verl or trl.
    """

    theirs: str
    ours: str
    kind: str
    options: dict[str, Any]
    compute: Callable[[Columns], Columns]
    prepare: Callable[[Columns], Columns] = lambda columns: columns
    absent: tuple[str, ...] = ()
    differs: dict[str, str] = {}
    peer: str = "verl"


OLD = ("0.7.0",)
BEFORE_091 = ("0.7.0", "0.8.0")
RECENT = ("0.8.0", "0.9.1")
norm_10 = partial(fnppo.constant_norm, horizon=10)

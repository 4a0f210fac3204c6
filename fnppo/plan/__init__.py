"""How many GPUs, and laid out how? `fnppo plan MODEL`: memory, traffic and arithmetic of an update, before it is run.

The files, in the order in which the numbers flow: `models` (a model without weights, from its configuration), `live` (a
count of the bytes that are alive), `count` (what a layer keeps, counted on tensors without data) and `shape` (the result),
`memory`, `traffic` and `arithmetic` (formulas), `search` (which layouts fit, and what would), `report`, `command`. Needs `pip install fnppo[cli]`.
"""

from fnppo.plan.arithmetic import Flops, flops_per_token
from fnppo.plan.count import shape_of
from fnppo.plan.memory import Layout, Memory, memory_of
from fnppo.plan.models import empty_model
from fnppo.plan.search import Plan, plan_update
from fnppo.plan.shape import Shape
from fnppo.plan.traffic import Traffic, traffic_of

__all__ = [
    "Flops",
    "Layout",
    "Memory",
    "Plan",
    "Shape",
    "Traffic",
    "empty_model",
    "flops_per_token",
    "memory_of",
    "plan_update",
    "shape_of",
    "traffic_of",
]

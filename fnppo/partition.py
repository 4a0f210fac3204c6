"""Parameters in two trees, of which one is trained. What is not among the arguments of a gradient is frozen.

    trained, frozen = partition(params, lambda name: "lora_" in name)
    loss_fn = lambda trained, batch: loss(combine(trained, frozen), batch)
    opt_state = optimizer.init(trained)

So frozen parameters have no gradient and no moments, and no function has to know which they are.
"""

from collections.abc import Callable

from fnppo.types import Params


def partition(params: Params, trained: Callable[[str], bool]) -> tuple[Params, Params]:
    """The parameters whose names `trained` accepts, and the others, each in their order.

    Args:
        params: name -> tensor.
        trained: says of a name whether it is trained.

    Raises:
        ValueError: it accepts no name.

    >>> import torch
    >>> params = {"embed": torch.zeros(3), "norm": torch.ones(2), "head": torch.zeros(3)}
    >>> partition(params, lambda name: "norm" in name)
    ({'norm': tensor([1., 1.])}, {'embed': tensor([0., 0., 0.]), 'head': tensor([0., 0., 0.])})
    """
    accepted = {name: bool(trained(name)) for name in params}
    if not any(accepted.values()):
        shown = ", ".join(list(params)[:3])
        raise ValueError(
            f"no name of {len(params)} is trained (they begin with {shown or 'nothing'}). Accept at least one of them."
        )
    return (
        {name: leaf for name, leaf in params.items() if accepted[name]},
        {name: leaf for name, leaf in params.items() if not accepted[name]},
    )


def combine(*parts: Params) -> Params:
    """The parameters of all parts in one tree: `combine(*partition(params, trained))` has those of `params`.

    Raises:
        ValueError: a name is in two parts.

    >>> import torch
    >>> combine({"norm": torch.ones(2)}, {"head": torch.zeros(3)})
    {'norm': tensor([1., 1.]), 'head': tensor([0., 0., 0.])}
    """
    params: Params = {}
    for number, part in enumerate(parts):
        if twice := params.keys() & part.keys():
            raise ValueError(
                f"{min(twice)} is in part {number} and in one before it. Leave out of one part what replaces it in another."
            )
        params |= part
    return params

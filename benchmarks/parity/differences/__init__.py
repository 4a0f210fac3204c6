"""Where fnppo differs from a peer: each on a batch that fits on a line, with both numbers and the reason.

`run.py` computes both sides. It fails if a version that is named agrees with fnppo, or one that is not named differs, or if
fnppo's number is not the one that is derived by hand.
"""

from differences import actor, advantages, corrections, losses, trl
from differences.difference import Difference

SECTIONS: dict[str, list[Difference]] = {
    "KL estimators": losses.KL,
    "Aggregation": losses.AGGREGATION,
    "Policy losses": losses.POLICY,
    "Advantages": advantages.ADVANTAGES,
    "Off-policy corrections": corrections.CORRECTIONS,
    "The actor": actor.ACTOR,
    "Vocabulary": losses.VOCABULARY,
    "TRL": trl.LOSSES,
}

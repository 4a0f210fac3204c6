"""What is compared on random batches: for each line of the table, the call of the peer and ours."""

from rows import advantages, corrections, losses, trl
from rows.row import Row

SECTIONS: dict[str, list[Row]] = {
    "KL estimators": losses.KL,
    "Aggregation": losses.AGGREGATION,
    "Policy losses": losses.POLICY,
    "In micro-batches": losses.SPLITS,
    "Value loss": losses.VALUE,
    "Advantages": advantages.ADVANTAGES,
    "Off-policy corrections": corrections.CORRECTIONS,
    "Vocabulary": losses.VOCABULARY,
    "TRL": trl.TRL,
}

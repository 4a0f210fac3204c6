"""One-digit sums and differences from reasoning-gym, asked in words and rewarded when the last number is right."""

import random
import re
from typing import NamedTuple


class Question(NamedTuple):
    """A question as it is asked, and its right answer."""

    text: str
    answer: int


def questions(*, held_out: bool, count: int, seed: int) -> list[Question]:
    """`count` questions drawn with `seed` (expressions may come twice).

    There are 200 expressions. A fixed quarter of them is held out: what is asked in training is never asked in evaluation.
    """
    import reasoning_gym

    source = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, seed=seed, size=64 + 16 * count
    )
    drawn = []
    for item in source:
        expression = item["metadata"]["expression"]
        if (random.Random(expression).random() < 0.25) == held_out:
            drawn.append(Question(f"What is {expression}? Answer with just a number.", int(item["answer"])))
        if len(drawn) == count:
            return drawn
    raise ValueError(f"chain_sum with seed {seed} gave {len(drawn)} of {count} questions. Use another seed.")


def reward(response: str, answer: int) -> float:
    """1 where the last number in the response is the answer, else 0.

    >>> reward("4 - 1 = 3.", 3), reward("It is 5-4", 4), reward("It is -4", 4), reward("three", 3)
    (1.0, 1.0, 0.0, 0.0)
    """
    numbers = re.findall(r"(?<!\d)-?\d+", response)
    return float(bool(numbers) and int(numbers[-1]) == answer)

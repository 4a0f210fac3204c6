"""What the demo's model has learned, by the kind of question: each held-out expression once, greedy.

    python benchmarks/demo_kinds.py [runs/demo/model] [--seed 0]

`--seed` is that of the demo's run: it decides which held-out expressions were drawn.
"""

import argparse

import fnppo
from fnppo.demo.chat import decode, encode
from fnppo.demo.task import Question, questions, reward
from fnppo.pretrained import load_model, load_tokenizer
from fnppo.rollout import generate


def kind(question: Question) -> str:
    if "+" in question.text:
        return "sums"
    return "differences from zero up" if question.answer >= 0 else "differences below zero"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="runs/demo/model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer, module = load_tokenizer(options.model), load_model(options.model)
    policy, params = fnppo.functional_policy(module)
    asked = sorted(set(questions(held_out=True, count=200, seed=options.seed)))
    prompts = [encode(tokenizer, question.text) for question in asked]
    end = tokenizer.eos_token_id
    batch = generate(params, prompts, policy=policy, max_new_tokens=16, seed=0, eos_token_id=end, greedy=True)
    right: dict[str, list[float]] = {}
    for question, answer in zip(asked, decode(tokenizer, batch), strict=True):
        right.setdefault(kind(question), []).append(reward(answer, question.answer))
    for name, values in right.items():
        print(f"{name}: {int(sum(values))} of {len(values)} right")


if __name__ == "__main__":
    main()

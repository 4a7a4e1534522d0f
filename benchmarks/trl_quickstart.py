"""TRL's GRPO trainer on the quickstart's task; started by ``benchmarks/against_trl.py`` in an environment that has TRL.

    python benchmarks/trl_quickstart.py SETTINGS.json STEPS.jsonl

Needs ``trl==1.16.0`` and nothing of this library; for tasks of reasoning-gym, ``reasoning-gym`` as well. SETTINGS has the model
folder, the prompts and all shared numbers. Writes one JSON object per optimizer step to STEPS: its seconds, mean reward and mean
response length in tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def positional_match(answer: str, target: str) -> float:
    longest = max(len(answer), len(target), 1)
    return sum(a == t for a, t in zip(answer, target, strict=False)) / longest


def scorer(settings: dict[str, Any]) -> Callable[[str, dict[str, Any], bool], float]:
    """Return the task's reward of an answer, its row, and whether the answer ended by itself."""
    library, _, task = settings["env_class"].rpartition(":")
    if library != "reasoning_gym":  # an answer that was cut off earns half
        return lambda text, row, ended: positional_match(text, row["answer"]) * (1.0 if ended else 0.5)
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=0, size=1, **settings["env_kwargs"])
    return lambda text, row, ended: dataset.score_answer(text.strip(), row["entry"])


class StepTimes(TrainerCallback):
    """Writes the seconds from the end of one optimizer step to the end of the next, with the step's reward."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous = 0.0
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.previous = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.seconds, self.previous = now - self.previous, now

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            row = {"seconds": self.seconds, "reward": logs["reward"], "tokens": logs["completions/mean_length"]}
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    max_tokens, samples = settings["max_tokens"], settings["samples"]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])

    score = scorer(settings)

    def reward(completions, completion_ids, row, **kwargs):
        ended = [ids[-1] == tokenizer.eos_token_id or len(ids) < max_tokens for ids in completion_ids]
        return [score(*each) for each in zip(completions, map(json.loads, row), ended, strict=True)]

    config = GRPOConfig(
        output_dir=settings["output"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["groups"] * samples,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=samples,
        num_iterations=1,
        max_completion_length=max_tokens,
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="linear",
        warmup_steps=settings["warmup_steps"],
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        max_grad_norm=1.0,
        weight_decay=0.0,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over all tokens of the batch
        scale_rewards="group",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype="float32"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(settings["prompts"]),
        processing_class=tokenizer,
        callbacks=[StepTimes(Path(sys.argv[2]))],
    )
    trainer.train()


if __name__ == "__main__":
    main()

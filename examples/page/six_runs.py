"""Trains six short runs. Each has one thing to see on the page; docs/tutorials/reading_a_run.md goes through them.

./uvw run examples/page/six_runs.py FOLDER [key=value ...]
./uvw run skyrl-train page FOLDER
"""

import os
import random
import sys
from pathlib import Path

import httpx

import skyrl_train

HERE = Path(__file__).resolve()
GUESS = HERE.parents[1] / "async" / "agents" / "guess.yaml"
HTTP = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))  # shared: creating one takes long

RUNS = {
    # An engine that is about as fast as training
    "healthy": (
        "quickstart",
        ["generator.inference_engine.max_num_seqs=32", "trainer.max_steps=120", "trainer.eval.interval=20"],
    ),
    # An engine that decodes few responses at once
    "generation_bound": ("quickstart", ["generator.inference_engine.max_num_seqs=4"]),
    # Forward and backward passes of few sequences each
    "training_bound": ("quickstart", ["trainer.micro_batch_tokens=256"]),
    "zero_signal": ("quickstart", [f"rollout.stages.reward.function={HERE}:exact_match"]),
    "diverging": ("quickstart", ["trainer.policy.optimizer_config.lr=0.05"]),
    "failing_agent": (
        GUESS,
        [
            f"generator.kwargs.agent={HERE}:guess",
            "generator.n_samples_per_prompt=4",
            "trainer.policy_mini_batch_size=4",
            "trainer.failures.max_failed_rollouts=1000",
        ],
    ),
}
SIZES = {number: "small" if number < 5 else "large" for number in range(9)}


def exact_match(group):
    """A reward function with a mistake: it compares with a line of a file, which ends with a newline."""
    line = f"{group.env_extras['answer']}\n"
    return [float(sample.text == line) for sample in group.samples]


async def guess(prompt, base_url, api_key, extras):
    """An agent with two mistakes: it expects that its tool always answers, and ``SIZES`` lacks the number 9."""
    url, headers = f"{base_url}/chat/completions", {"authorization": f"Bearer {api_key}"}
    messages, number, closeness = list(prompt), extras["number"], 0.0
    for _ in range(4):
        if random.random() < 0.005:
            raise TimeoutError("the tool has not answered within 10 s")
        answer = await HTTP.post(url, headers=headers, json={"model": "policy", "messages": messages})
        text = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
        said = int(text) if text in list("0123456789") else None
        if said == number:
            closeness = 2.0
            break
        closeness = 0.0 if said is None else 1 - abs(said - number) / 9
        hint = "!" if said is None else "+" if said < number else "-"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return {"reward": closeness / 2, "metrics": {SIZES[number]: closeness / 2}}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder, *overrides = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    for name, (recipe, settings) in RUNS.items():
        skyrl_train.train(recipe, overrides=["trainer.max_steps=50", *settings, f"trainer.run_dir={name}", *overrides])

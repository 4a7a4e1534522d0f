"""An agent on the plain ``openai`` client: a conversation of up to four guesses.

./uvw run examples/async/agents/guess_with_openai.py [key=value ...]
"""

import sys
from pathlib import Path

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

import skyrl_train

HTTP = DefaultAsyncHttpxClient()  # shared by all runs: creating one takes longer than a run


async def run(prompt, base_url, api_key, extras):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    messages, number, closeness = list(prompt), extras["number"], 0.0
    for _ in range(4):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        text = completion.choices[0].message.content or ""
        guess = int(text) if len(text) == 1 and text in "0123456789" else None
        if guess == number:
            return {"reward": 1.0, "metrics": {"hit": 1}}
        closeness = 0.0 if guess is None else 1 - abs(guess - number) / 9
        hint = "!" if guess is None else "+" if guess < number else "-"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return {"reward": closeness / 2, "metrics": {"hit": 0}}


if __name__ == "__main__":
    here = Path(__file__).resolve()
    settings = [f"generator.kwargs.agent={here}:run", f"trainer.run_name={here.stem}", *sys.argv[1:]]
    skyrl_train.train(here.parent / "guess.yaml", overrides=settings)

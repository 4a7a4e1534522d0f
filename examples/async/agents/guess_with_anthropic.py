"""An agent on the ``anthropic`` client: the loop of tool calls and tool results is written out.

./uvw run examples/async/agents/guess_with_anthropic.py [key=value ...]
"""

import sys
from pathlib import Path

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

import skyrl_train

HTTP = DefaultAsyncHttpxClient()  # shared by all runs: creating one takes longer than a run
COMPARE = {
    "name": "compare",
    "description": "Says where the number is.",
    "input_schema": {"type": "object", "properties": {"guess": {"type": "integer"}}, "required": ["guess"]},
}


async def run(prompt, base_url, api_key, extras):
    client = AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, http_client=HTTP)
    messages, number, guesses, said = list(prompt), extras["number"], [], ""
    for _ in range(4):
        answer = await client.messages.create(model="policy", max_tokens=6, tools=[COMPARE], messages=messages)
        said = "".join(block.text for block in answer.content if block.type == "text")
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls or number in guesses:
            break
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result(call, number, guesses) for call in calls]},
        ]
    return {"reward": score(number, guesses, said), "metrics": {"hit": number in guesses, "calls": len(guesses)}}


def result(call, number, guesses):
    guess = call.input.get("guess") if call.name == "compare" else None
    if not isinstance(guess, int):
        return {"type": "tool_result", "tool_use_id": call.id, "content": "!", "is_error": True}
    guesses.append(guess)
    hint = "=" if guess == number else "+" if guess < number else "-"
    return {"type": "tool_result", "tool_use_id": call.id, "content": hint}


def score(number, guesses, said):
    """Reward the format first, then the number."""
    if number in guesses:
        return 1.0
    if guesses:
        return 0.2 + 0.4 * max(0.0, 1 - abs(guesses[-1] - number) / 9)
    return 0.1 if said.startswith("<tool_call>") else 0.0


if __name__ == "__main__":
    here = Path(__file__).resolve()
    settings = [f"generator.kwargs.agent={here}:run", f"trainer.run_name={here.stem}", *sys.argv[1:]]
    skyrl_train.train(here.parent / "guess.yaml", overrides=settings)

"""An agent on the ``openai-agents`` SDK: the model calls a tool, as often as the SDK lets it.

./uvw run examples/async/agents/guess_with_openai_agents.py [key=value ...]
"""

import sys
from pathlib import Path

from agents import Agent, AgentsException, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

import skyrl_train

HTTP = DefaultAsyncHttpxClient()  # shared by all runs: creating one takes longer than a run


async def run(prompt, base_url, api_key, extras):
    number, guesses = extras["number"], []

    @function_tool
    def compare(guess: int) -> str:
        """Says where the number is."""
        guesses.append(guess)
        return "=" if guess == number else "+" if guess < number else "-"

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    agent = Agent("guesser", model=OpenAIChatCompletionsModel("policy", client), tools=[compare])
    said = ""
    try:
        result = await Runner.run(agent, list(prompt), max_turns=4, run_config=RunConfig(tracing_disabled=True))
        said = result.final_output
    except AgentsException:  # too many turns, a tool that does not exist, ...: the guesses count
        pass
    return {"reward": score(number, guesses, said), "metrics": {"hit": number in guesses, "calls": len(guesses)}}


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

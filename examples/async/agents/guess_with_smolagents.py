"""An agent on ``smolagents``: a synchronous framework that writes its own description of each step into the next prompt.

Each step therefore starts a new branch of the session, and a run becomes several training sequences.

./uvw run examples/async/agents/guess_with_smolagents.py [key=value ...]
"""

import sys
import threading
from pathlib import Path

from openai import DefaultHttpxClient
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

import skyrl_train

HTTP = DefaultHttpxClient()  # shared by all runs: creating one takes longer than a run
# ``tool`` parses the function's source, which fails now and then in Python 3.11 when two threads parse at once.
PARSING = threading.Lock()
# The framework's own instructions are longer than this model's context.
SHORT = {**EMPTY_PROMPT_TEMPLATES, "final_answer": {"pre_messages": "", "post_messages": "?"}}


def run(prompt, base_url, api_key, extras):
    number, guesses = extras["number"], []

    def compare(guess: int) -> str:
        """Says where the number is.

        Args:
            guess: a digit
        """
        guesses.append(guess)
        return "=" if guess == number else "+" if guess < number else "-"

    with PARSING:
        tools = [tool(compare)]
    model = OpenAIModel(
        "policy", api_base=base_url, api_key=api_key, client_kwargs={"http_client": HTTP}, tool_choice="auto"
    )
    agent = ToolCallingAgent(tools, model, prompt_templates=SHORT, verbosity_level=-1, max_steps=2)
    said = agent.run(prompt[0]["content"])
    return {"reward": score(number, guesses, str(said)), "metrics": {"hit": number in guesses, "calls": len(guesses)}}


def score(number, guesses, said):
    """Reward the format first, then the number."""
    if number in guesses:
        return 1.0
    if guesses:
        return 0.2 + 0.4 * max(0.0, 1 - abs(guesses[-1] - number) / 9)
    return 0.1 if said.startswith("<tool_call>") else 0.0


if __name__ == "__main__":
    here = Path(__file__).resolve()
    settings = [
        f"generator.kwargs.agent={here}:run",
        f"trainer.run_name={here.stem}",
        "trainer.policy.model.build.max_position_embeddings=1024",  # its error messages are long
        "generator.max_input_length=1000",
        "generator.inference_engine.max_num_seqs=64",
        *sys.argv[1:],
    ]
    skyrl_train.train(here.parent / "guess.yaml", overrides=settings)

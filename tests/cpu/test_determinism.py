"""SEMANTICS 4.8: two synchronous runs of the same command are equal bit for bit, with engines in threads, processes or actors.

The second run has a thread beside it that draws from the process's global generators, so code that draws from them makes the
runs differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from forked_runs import ForkedRuns
from recipe_worlds import retriever
from repeated_runs import BOUND_ZERO, RECIPES, SYNCHRONOUS, Outcome, assert_equal, command, outcome

from skyrl_train.environments.sandbox import why_unavailable

DRAWING = Path(__file__).with_name("drawing_run.py")
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def run(forked_runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a recipe, and gives a run that was made before again."""
    with retriever() as url:

        def make(recipe: str, *overrides: str, script: Path | None = None) -> Outcome:
            if recipe == "code" and why_unavailable("namespaces"):
                pytest.skip(str(why_unavailable("namespaces")))
            folder = tmp_path_factory.mktemp(recipe)
            search = [f"environment.kwargs.retriever_url={url}"] if recipe == "search" else []
            output = folder / "output.log"
            code = forked_runs.run(output, command(recipe, folder, *search, *overrides), script=script)
            assert code == 0, output.read_text()
            return outcome(folder)

        yield make


@pytest.fixture(scope="module")
def in_threads(run: Run) -> Callable[[str], Outcome]:
    """The run of a recipe with its engine in a thread, made once."""
    made: dict[str, Outcome] = {}

    def of(recipe: str) -> Outcome:
        if recipe not in made:
            made[recipe] = run(recipe, *SYNCHRONOUS, "generator.inference_engine.executor=thread")
        return made[recipe]

    return of


OWN_DRAWS = ("quickstart", "gsm8k_lora", "critic_ppo")  # the policy's first values, an adapter's, and a value head's


def recipes(*quick: str, slow: Sequence[str]) -> pytest.MarkDecorator:
    """By default, each kind of random draw and each placement once; as slow tests, the other recipes too."""
    return pytest.mark.parametrize("recipe", [*quick, *(pytest.param(r, marks=pytest.mark.slow) for r in slow)])


@recipes(*OWN_DRAWS, slow=[recipe for recipe in RECIPES if recipe not in OWN_DRAWS])
def test_a_recipe_repeats_itself_beside_a_thread_that_draws(
    run: Run, in_threads: Callable[[str], Outcome], recipe: str
) -> None:
    again = run(recipe, *SYNCHRONOUS, "generator.inference_engine.executor=thread", script=DRAWING)
    assert_equal(in_threads(recipe), again)


@recipes("dapo_math", slow=["gsm8k", "gsm8k_lora", "critic_ppo", "search"])
def test_an_asynchronous_run_with_bound_zero_repeats_the_synchronous_one(
    run: Run, in_threads: Callable[[str], Outcome], recipe: str
) -> None:
    again = run(recipe, *BOUND_ZERO, "generator.inference_engine.executor=thread", script=DRAWING)
    assert_equal(in_threads(recipe), again)


@recipes("quickstart", slow=["guess_number", "gsm8k_lora"])
def test_an_engine_in_a_process_gives_the_same_run(run: Run, in_threads: Callable[[str], Outcome], recipe: str) -> None:
    assert_equal(in_threads(recipe), run(recipe, *SYNCHRONOUS, "generator.inference_engine.executor=process"))


@recipes(slow=["guess_number", "gsm8k_lora"])  # sort_digits is in test_ray_engine.py, which has a cluster
def test_an_engine_in_an_actor_gives_the_same_run(run: Run, in_threads: Callable[[str], Outcome], recipe: str) -> None:
    pytest.importorskip("ray")
    assert_equal(in_threads(recipe), run(recipe, *SYNCHRONOUS, "generator.inference_engine.executor=ray"))


@pytest.mark.slow
def test_another_seed_makes_another_run(run: Run, in_threads: Callable[[str], Outcome]) -> None:
    other = run("gsm8k_lora", *SYNCHRONOUS, "generator.inference_engine.executor=thread", "trainer.seed=1")
    with pytest.raises(AssertionError):
        assert_equal(in_threads("gsm8k_lora"), other)

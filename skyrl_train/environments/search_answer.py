"""Questions answered with a search engine, over several turns, in the protocol of Search-R1 (arXiv 2503.09516).

policy ──<search>query</search>──> POST {"queries": [query], "topk": k} ──> retriever
   ^                                                                           │
   └──────────────── <information>Doc 1 ... </information> <───────────────────┘
policy ──<answer>text</answer>──> exact match, end
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.environments.registry import register_environment
from skyrl_train.errors import ConfigError, DataError, RolloutError

if TYPE_CHECKING:
    import httpx

_OPENING = re.compile("<(search|answer)>")
_HINT = "Neither <search>query</search> nor <answer>text</answer> was found. Write one of the two."


@register_environment("search_answer")
class SearchAnswer(Environment):
    """Reward 1 when ``<answer>`` is one of the data row's ``golden_answers`` (exact match after normalisation), else 0.

    The first complete tag of a turn counts. A turn without a tag gets a hint and counts as a turn. The episode ends with an
    answer or after ``max_turns``.

    Args:
        retriever_url: of Search-R1's server, or one with its protocol (``examples/recipes/search/retriever.py``).
        top_k: passages per search.
        timeout_s: of one search. A slower one fails the rollout, which is retried like any failed rollout.
        max_passage_characters: longer passages are cut.

    Raises:
        ConfigError: an impossible number.
        DataError: the row has no ``golden_answers``.
    """

    def __init__(
        self,
        extras: Mapping[str, Any],
        *,
        retriever_url: str = "http://127.0.0.1:8000/retrieve",
        top_k: int = 3,
        timeout_s: float = 30.0,
        max_turns: int = 4,
        max_passage_characters: int = 2000,
    ) -> None:
        super().__init__(extras)
        for name, value in (("top_k", top_k), ("max_turns", max_turns), ("timeout_s", timeout_s)):
            if value <= 0:
                raise ConfigError(f"environment.kwargs.{name} must be above 0, got {value}.")
        golden = extras.get("golden_answers")
        answers = list(golden) if isinstance(golden, list | tuple) else []
        if not answers or not all(isinstance(answer, str) for answer in answers):
            raise DataError(f"SearchAnswer needs a column 'golden_answers' with a list of texts, got {golden!r:.80}.")
        self._golden = {normalize_question_answer(answer) for answer in answers}
        self._url, self._top_k, self._timeout_s = retriever_url, top_k, timeout_s
        self._turns_left, self._max_characters = max_turns, max_passage_characters
        self._searches, self._right, self._answered = 0, False, False

    def step(self, action: str) -> EnvironmentStep:
        self._turns_left -= 1
        # The first tag counts: a policy may continue and invent the retriever's answer itself.
        kind, content = first_action(action)
        if kind == "answer":
            self._answered = True
            self._right = normalize_question_answer(content) in self._golden
        done = self._answered or self._turns_left == 0
        observations = [] if done else [{"role": "user", "content": self._observe(kind, content)}]
        return {"observations": observations, "reward": float(self._right), "done": done, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"right": float(self._right), "answered": float(self._answered), "searches": float(self._searches)}

    def _observe(self, kind: str | None, query: str) -> str:
        if kind is None or not query:
            return _HINT
        self._searches += 1
        passages = [passage[: self._max_characters] for passage in self._search(query)]
        numbered = "\n".join(f"Doc {number}: {passage}" for number, passage in enumerate(passages, 1))
        return f"<information>{numbered}</information>"

    def _search(self, query: str) -> list[str]:
        """Return the passages that the retriever finds, best first.

        Raises:
            RolloutError: the retriever does not answer in time, or not in the protocol.
        """
        import httpx  # takes a while, and every command imports this module

        request = {"queries": [query], "topk": self._top_k, "return_scores": True}
        try:
            response = _client().post(self._url, json=request, timeout=self._timeout_s)
            response.raise_for_status()
            # With scores, the document is one level down.
            return [str(hit.get("document", hit)["contents"]) for hit in response.json()["result"][0]]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RolloutError(
                f"The retriever at {self._url} failed: {error!r}. Start it, set environment.kwargs.retriever_url, or give it "
                "more time with environment.kwargs.timeout_s."
            ) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RolloutError(
                f'The retriever at {self._url} did not answer {{"result": [[{{"document": {{"contents": text}}, "score": ...}}, '
                f"...]]}}: {error!r}. Name another one with environment.kwargs.retriever_url."
            ) from error


@functools.cache
def _client() -> httpx.Client:
    """Return the client of all episodes. It keeps connections open, and threads may share it."""
    import httpx

    # Without the proxies of the environment: a retriever runs on this machine or next to it.
    return httpx.Client(trust_env=False)


def first_action(text: str) -> tuple[str | None, str]:
    """Return kind and content of the first complete tag; None and an empty text if there is none."""
    unclosed: set[str] = set()  # a policy may repeat an opening tag to the end of its response
    for opening in _OPENING.finditer(text):
        kind, start = opening[1], opening.end()
        if kind in unclosed:
            continue
        end = text.find(f"</{kind}>", start)
        if end >= 0:
            return kind, text[start:end].strip()
        unclosed.add(kind)
    return None, ""


def normalize_question_answer(text: str) -> str:
    """Lower the case; remove punctuation, articles and extra spaces, as the exact match of SQuAD does."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", plain).split())

"""A small search engine over a file of passages: BM25 behind the HTTP protocol of Search-R1's retrieval server.

./uvw run examples/recipes/search/retriever.py --corpus passages.jsonl [--port 8000]

Each line of the corpus is ``{"id": ..., "contents": text}``, as in ``wiki-18.jsonl``. The index is a dictionary in
memory, for thousands of passages. For all of Wikipedia, start Search-R1's server, which has the same protocol.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

K1, B = 1.2, 0.75  # saturation of repeated words, weight of a passage's length (Robertson and Zaragoza 2009)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class BM25:
    """Ranks passages by the words that they share with a query."""

    def __init__(self, passages: Sequence[str]) -> None:
        self.passages = passages
        self.postings: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word -> (passage, occurrences)
        self.lengths: list[int] = []
        for number, passage in enumerate(passages):
            found = words(passage)
            self.lengths.append(len(found))
            for word, count in Counter(found).items():
                self.postings[word].append((number, count))
        self.mean_length = max(sum(self.lengths) / max(len(self.lengths), 1), 1.0)

    def search(self, query: str, top_k: int) -> list[tuple[str, float]]:
        """Up to ``top_k`` passages with a word of ``query``, best first, each with its score."""
        scores: Counter[int] = Counter()
        for word in set(words(query)):
            postings = self.postings.get(word, [])
            rarity = math.log(1 + (len(self.passages) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, count in postings:
                length = 1 - B + B * self.lengths[number] / self.mean_length
                scores[number] += rarity * count * (K1 + 1) / (count + K1 * length)
        best = heapq.nsmallest(top_k, scores, key=lambda number: (-scores[number], number))
        return [(self.passages[number], scores[number]) for number in best]


def answer(index: BM25, request: dict[str, Any]) -> dict[str, Any]:
    """``{"queries": [...], "topk": k, "return_scores": bool}`` -> ``{"result": [[passage, ...] per query]}``."""
    scored = bool(request.get("return_scores"))

    def hits(query: str) -> Iterable[dict[str, Any]]:
        for contents, score in index.search(query, int(request.get("topk") or 3)):
            yield {"document": {"contents": contents}, "score": score} if scored else {"contents": contents}

    return {"result": [list(hits(query)) for query in request["queries"]]}


def serve(passages: Sequence[str], port: int) -> ThreadingHTTPServer:
    """A server on this machine, bound and not yet serving; port 0 takes a free one."""
    index = BM25(passages)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = 200, answer(index, request)
            except (ValueError, KeyError, TypeError) as error:
                status, body = 400, {"error": repr(error)}
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """One line per search would be all that one sees."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    with options.corpus.open(encoding="utf-8") as lines:
        passages = [json.loads(line)["contents"] for line in lines]
    server = serve(passages, options.port)
    print(f"{len(passages):,} passages at http://127.0.0.1:{server.server_port}/retrieve", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

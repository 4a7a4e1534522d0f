"""A stage's own process: ``python -m skyrl_train.rollout.placement.child FD``.

``FD`` is a socket to the parent: the first message is a :class:`Work`, each further one an argument for it, and every
message has one answer.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from skyrl_train.child_process import ParentChannel, connected_to_parent
from skyrl_train.rollout.placement.base import Function, Outcome, Raised, Returned, outcome_of


def main(descriptor: int) -> None:
    """Serves until the parent is gone."""
    with connected_to_parent(descriptor) as connection, suppress(EOFError):
        channel = ParentChannel(connection)
        built = outcome_of(lambda: channel.read().build())
        _answer(channel, built if isinstance(built, Raised) else Returned(None))
        while isinstance(built, Returned):
            _answer(channel, outcome_of(_next_call, built.value, channel))


def _next_call(function: Function, channel: ParentChannel) -> Any:
    return function(channel.read())


def _answer(channel: ParentChannel, outcome: Outcome) -> None:
    """
    Raises:
        EOFError: the parent is gone, which may also be why there is no better ``outcome``.
    """
    try:
        channel.write(outcome)
    except EOFError:
        raise
    except Exception as error:  # whatever somebody's object does when it is pickled
        channel.write(Raised.of(error))


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Environment variables for processes that a library starts: there while it starts them, gone afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_changed = threading.Condition()
_settings: dict[str, str] = {}
_previous: dict[str, str | None] = {}
_users = 0


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Holds ``settings`` in ``os.environ``, then puts back what was there.

    The environment belongs to the whole process: who wants the same settings shares them, who wants others waits until
    nobody holds these any more. May block; call it off the event loop.
    """
    global _users
    with _changed:
        _changed.wait_for(lambda: _users == 0 or _settings == dict(settings))
        if _users == 0:
            _settings.update(settings)
            _previous.update({name: os.environ.get(name) for name in settings})
            os.environ.update(settings)
        _users += 1
    try:
        yield
    finally:
        with _changed:
            _users -= 1
            if _users == 0:
                for name, value in _previous.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value
                _settings.clear()
                _previous.clear()
                _changed.notify_all()

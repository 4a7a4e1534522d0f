"""The endpoint's routes, a file per family."""

from skyrl_train.inference.server.routes import (
    anthropic_messages,
    chat,
    completions,
    openai_responses,
    service,
    sessions,
)

ROUTERS = tuple(
    module.router for module in (chat, completions, openai_responses, anthropic_messages, service, sessions)
)

"""Messages to tokens and back: rendering, extension of a conversation, parsing of what was sampled."""

from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.chat.requests import (
    AssistantMessage,
    ChatChoice,
    ChatEvent,
    ChatRequest,
    ChatResult,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
)

__all__ = [
    "AssistantMessage",
    "ChatChoice",
    "ChatEvent",
    "ChatRenderer",
    "ChatRequest",
    "ChatResult",
    "MessageDelta",
    "ToolCall",
    "ToolCallDelta",
]

"""How each field of a request body is treated, as the tables of the docs show it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from skyrl_train.inference.openai.body import RequestBody, Unsupported


class Support(StrEnum):
    """How a request field is treated."""

    SUPPORTED = "supported"
    IGNORED = "ignored"  # any value is accepted and has no effect
    NEUTRAL = "default only"  # accepted with the value that changes nothing, rejected with any other
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class FieldNote:
    """A row of the docs' table of request fields."""

    name: str
    support: Support
    note: str
    required: bool


def field_table(model: type[RequestBody]) -> list[FieldNote]:
    """Return how each field of ``model`` is treated, required fields first."""
    rows = []
    for name, field in model.model_fields.items():
        marker = next((entry for entry in field.metadata if isinstance(entry, Unsupported)), None)
        if marker is not None:
            support = Support.NEUTRAL if marker.neutral else Support.REJECTED
            rows.append(FieldNote(name, support, marker.note, False))
        else:
            support = Support.IGNORED if field.exclude else Support.SUPPORTED
            rows.append(FieldNote(name, support, field.description or "", field.is_required()))
    return sorted(rows, key=lambda row: not row.required)

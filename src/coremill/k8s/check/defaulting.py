"""What the API server does to an object before it validates it: empty fields go, defaults of the schema come in."""

from __future__ import annotations

import copy
from typing import Any

from coremill.k8s.check.structure import Schema


def with_defaults(value: Any, schema: Schema) -> Any:
    """A copy with defaults. A null where none is allowed counts as left out."""
    if isinstance(value, dict):
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties")
        inner = extra if isinstance(extra, dict) else {}
        parts = {key: properties.get(key, inner) for key in value}
        filled = {key: one for key, one in value.items() if one is not None or _keeps_null(parts[key])}
        for key, part in properties.items():
            if key not in filled and part.get("default") is not None:
                filled[key] = copy.deepcopy(part["default"])
        return {key: with_defaults(one, properties.get(key, inner)) for key, one in filled.items()}
    if isinstance(value, list):
        return [with_defaults(one, schema.get("items", {})) for one in value]
    return value


def _keeps_null(schema: Schema) -> bool:
    """A field that may be null, or of which the schema knows nothing."""
    return not schema or bool(schema.get("nullable"))

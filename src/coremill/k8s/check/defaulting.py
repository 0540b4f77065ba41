"""What the API server does to an object before it validates it: defaults of the schema are filled in."""

from __future__ import annotations

import copy
from typing import Any

from coremill.k8s.check.structure import Schema


def with_defaults(value: Any, schema: Schema) -> Any:
    """A copy with defaults. A null where none is allowed counts as left out if the field has a default."""
    if isinstance(value, dict):
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties")
        filled = {
            key: one
            for key, one in value.items()
            if one is not None or not _has_default(properties.get(key)) or properties[key].get("nullable")
        }
        for key, part in properties.items():
            if key not in filled and _has_default(part):
                filled[key] = copy.deepcopy(part["default"])
        inner = extra if isinstance(extra, dict) else {}
        return {key: with_defaults(one, properties.get(key, inner)) for key, one in filled.items()}
    if isinstance(value, list):
        return [with_defaults(one, schema.get("items", {})) for one in value]
    return value


def _has_default(schema: Schema | None) -> bool:
    return schema is not None and schema.get("default") is not None

"""CEL rules of a schema (x-kubernetes-validations), evaluated as the API server does at a create.

Rules that compare with an earlier version (`oldSelf`) have nothing to compare with and are skipped, unless they say
they can (`optionalOldSelf`). Evaluated by cel-expr-python, Google's own runtime (docs/decisions/k8s-commands.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from coremill.k8s.check.findings import Problem, joined
from coremill.k8s.check.structure import Schema, go_pattern

_STRINGS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
# Names a property may have and an identifier of CEL may not.
_RESERVED = frozenset(
    (
        "true",
        "false",
        "null",
        "in",
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
    )
    + ("loop", "package", "namespace", "return", "var", "void", "while")
)
_ESCAPES = {".": "__dot__", "-": "__dash__", "/": "__slash__", "__": "__underscores__"}
# The runtime takes no Python datetime inside an object: a rule that needs one cannot be judged.
_OTHER_FORMATS = frozenset({"date-time", "date", "duration", "byte"})


class Unchecked(Exception):
    """A rule that this runtime cannot judge: the reason."""


def rule_problems(value: dict[str, Any], schema: Schema, unchecked: set[str]) -> Iterator[Problem]:
    """Of an object with its defaults; rules that could not be judged are added to `unchecked`."""
    metadata = {key: one for key, one in value["metadata"].items() if key in ("name", "generateName")}
    if not metadata.get("name"):  # made before rules are evaluated
        metadata["name"] = f"{metadata['generateName']}xxxxx"
    properties = {**schema.get("properties", {})}
    properties["metadata"] = {"properties": {"name": {}, "generateName": {}}}
    whole = {**schema, "properties": {**properties, "apiVersion": {}, "kind": {}}}
    yield from _walk({**value, "metadata": metadata}, whole, "", unchecked)


def _walk(value: Any, schema: Schema, path: str, unchecked: set[str]) -> Iterator[Problem]:
    if value is None:
        return
    for rule in schema.get("x-kubernetes-validations", ()):
        try:
            problem = _judge(rule, value, schema, path)
        except Unchecked as reason:
            unchecked.add(f"rule {rule['rule']!r} at {path or 'the object'}: {reason}")
            continue
        if problem is not None:
            yield problem
    if isinstance(value, dict):
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties")
        for key, one in value.items():
            part = properties.get(key, extra if isinstance(extra, dict) else None)
            if part is not None:
                yield from _walk(one, part, joined(path, key), unchecked)
    elif isinstance(value, list) and "items" in schema:
        for index, one in enumerate(value):
            yield from _walk(one, schema["items"], joined(path, index), unchecked)


def _judge(rule: Schema, value: Any, schema: Schema, path: str) -> Problem | None:
    text: str = rule["rule"]
    if re.search(r"\boldSelf\b", _STRINGS.sub("''", text)):
        if not rule.get("optionalOldSelf"):
            return None
        text = f"cel.bind(oldSelf, optional.none(), {text})"
    subject = _as_cel(value, schema)
    kind, outcome = _evaluate(text, subject)
    if outcome is True:
        return None
    if kind == "ERROR" and "overload" in str(outcome) and _has_other_formats(schema):
        raise Unchecked(f"it may need a date or duration ({outcome})")
    message = rule.get("message") or f"failed rule: {rule['rule']}"
    if "messageExpression" in rule:
        message_kind, made = _evaluate(rule["messageExpression"], subject)
        message = made if message_kind == "STRING" and str(made).strip() else message
    if kind == "ERROR":
        message = f"{message} (the rule could not be evaluated: {outcome})"
    where = f"{path}{rule['fieldPath']}".lstrip(".") if "fieldPath" in rule else path
    return Problem(where, "cel", " ".join(str(message).split()), f"the rule is: {' '.join(rule['rule'].split())}")


def _evaluate(text: str, subject: Any) -> tuple[str, Any]:
    result = _compiled(text).eval(data={"self": subject})
    return str(result.type().name()), result.value()


@cache
def _environment() -> Any:
    from cel_expr_python import cel
    from cel_expr_python.ext import ext_bindings, ext_optional, ext_strings

    text, texts = cel.Type.STRING, cel.Type.List(cel.Type.STRING)

    def member(name: str, result: Any, parameters: list[Any], work: Any) -> Any:
        identity = f"{name}_{len(parameters)}"
        return cel.FunctionDecl(name, [cel.Overload(identity, result, parameters, True, work)])

    # Of the API server's own functions those that the CRDs we know use; CEL and its strings extension have the rest.
    own = [member("find", text, [text, text], _find), member("findAll", texts, [text, text], _find_all)]
    extensions = [ext_strings.ExtStrings(), ext_optional.ExtOptional(), ext_bindings.ExtBindings()]
    variables = {"self": cel.Type.DYN}
    return cel.NewEnv(variables=variables, extensions=[*extensions, cel.CelExtension("kubernetes", own)])


def _find(text: str, pattern: str) -> str:
    found = go_pattern(pattern).search(text)
    return found.group(0) if found else ""


def _find_all(text: str, pattern: str) -> list[str]:
    return [found.group(0) for found in go_pattern(pattern).finditer(text)]


@cache
def _compiled(text: str) -> Any:
    try:
        return _environment().compile(text)
    except RuntimeError as error:
        reason = next((line for line in str(error).splitlines() if "ERROR" in line), str(error))
        raise Unchecked(f"it does not compile here: {reason.strip()}") from error


def _as_cel(value: Any, schema: Schema) -> Any:
    """A value as rules see it: fields under names that CEL can read, what the schema does not name left out."""
    if isinstance(value, dict):
        properties, extra = schema.get("properties"), schema.get("additionalProperties")
        if properties is None:
            inner = extra if isinstance(extra, dict) else {}
            return {key: _as_cel(one, inner) for key, one in value.items()}
        fields = {}
        for key, one in value.items():
            if key in properties and one is not None:
                fields[_escaped(key)] = fields[key] = _as_cel(one, properties[key])
        return fields
    if isinstance(value, list):
        return [_as_cel(one, schema.get("items", {})) for one in value]
    if isinstance(value, int) and not isinstance(value, bool) and schema.get("type") == "number":
        return float(value)
    if isinstance(value, float) and schema.get("type") == "integer":
        return int(value)
    return value


def _escaped(name: str) -> str:
    if name in _RESERVED:
        return f"__{name}__"
    return re.sub(r"__|[./-]", lambda found: _ESCAPES[found.group(0)], name)


def _has_other_formats(schema: Any) -> bool:
    if isinstance(schema, dict):
        return schema.get("format") in _OTHER_FORMATS or any(map(_has_other_formats, schema.values()))
    return isinstance(schema, list) and any(map(_has_other_formats, schema))

"""Manifests of Kubernetes, checked against the fields that Kubeflow Trainer's objects have.

tests/train/kubeflow-trainer-2.3.0.json has names and types of the fields of each object that
launch/kubernetes.yaml uses, as JSON Schema writes them. An object has no other fields: Kubernetes
refuses them, or drops them in silence.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.support.processes import ROOT

TYPES = json.loads((ROOT / "tests/train/kubeflow-trainer-2.3.0.json").read_text())["types"]
KINDS = ("TrainJob", "TrainingRuntime")

_PYTHON = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a manifest. Raises AssertionError, with all problems, if one is not right."""
    found = list(yaml.safe_load_all(path.read_text()))
    wrong = [problem for document in found for problem in problems(document)]
    assert not wrong, "\n".join(wrong)
    return found


def problems(document: Any) -> list[str]:
    """What is wrong with an object of Kubeflow Trainer: each problem with the path of its field."""
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind not in KINDS:
        return [f"kind must be one of {', '.join(KINDS)}, got {kind!r}"]
    return _object(document, TYPES[kind], kind)


def _object(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{path} must be of type object, got {value!r}"]
    known = schema["properties"]
    found = [f"{path} has no field {name}" for name in value if name not in known]
    found += [f"{path} lacks {name}" for name in schema.get("required", ()) if name not in value]
    for name in value.keys() & known.keys():
        found += _value(value[name], known[name], f"{path}.{name}")
    return found


def _value(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    if "$ref" in schema:
        return _object(value, TYPES[schema["$ref"]], path)
    if not _is(value, schema.get("type", ())):
        return [f"{path} must be of type {schema['type']}, got {value!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{path} must be one of {', '.join(schema['enum'])}, got {value!r}"]
    found = []
    if isinstance(value, list) and "items" in schema:
        for n, item in enumerate(value):
            found += _value(item, schema["items"], f"{path}[{n}]")
    if isinstance(value, dict) and "additionalProperties" in schema:
        for name, item in value.items():
            found += _value(item, schema["additionalProperties"], f"{path}[{name}]")
    return found


def _is(value: Any, types: str | list[str]) -> bool:
    """Whether a value has one of these types of JSON; any value has, if there is none."""
    names = [types] if isinstance(types, str) else types
    if isinstance(value, bool):  # Python counts it as an integer
        return not names or "boolean" in names
    return not names or any(isinstance(value, _PYTHON[name]) for name in names)

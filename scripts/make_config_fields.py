"""Write the fields that transformers' config classes declare, with their defaults.

    python scripts/make_config_fields.py

The file `src/spile/models/families/config_fields.json` tells spile which fields of a config.json can change a model's
numbers and what a missing field means. Run this script after an update of transformers, and after adding a family.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent.parent / "src/spile/models/families/config_fields.json"
_READ_IN_INIT = re.compile(r'kwargs\.(?:get|pop|setdefault)\(\s*"(\w+)"')
_READ_IN_MODEL = re.compile(r'getattr\((?:self\.)?config, "(\w+)"')
_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")


def describe(model_type: str) -> dict[str, Any]:
    """Return the declared fields of one config class.

    Args:
        model_type: The ``model_type`` of a config.json, such as ``llama``.

    Returns:
        ``fields``: each declared field with its default. ``names``: other spellings of declared fields. ``also``:
        fields that the class or the model reads although they are not declared. ``rope``: the rotary parameters of a
        config that gives none.

    """
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    base = {field.name for field in dataclasses.fields(PretrainedConfig)}
    fields = {field.name: _default(field) for field in dataclasses.fields(cls) if field.name not in base}
    modeling = Path(inspect.getfile(cls).replace("configuration_", "modeling_"))
    found = set(_READ_IN_INIT.findall(inspect.getsource(cls))) | set(_READ_IN_MODEL.findall(modeling.read_text()))
    also = found | (set(_ROPE) if "rope_parameters" in fields else set())
    pairs = (pair if pair[1] in fields else pair[::-1] for pair in cls.attribute_map.items())
    names = {name: own for name, own in pairs if own in fields}
    bare = cls().to_dict().get("rope_parameters")
    about = {"fields": fields, "names": names, "also": sorted(also - set(fields)), "rope": bare}
    return {key: value for key, value in about.items() if value}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def table() -> dict[str, Any]:
    """Return the whole table, for the config classes of all families."""
    from spile.models.families import FAMILIES

    types = sorted({family.model_types[0] for family in FAMILIES.values()})
    return {"transformers": version("transformers"), "classes": {name: describe(name) for name in types}}


def main() -> None:
    """Write the file, one class per line."""
    made = table()
    lines = [f" {json.dumps(name)}: {json.dumps(about)}" for name, about in made["classes"].items()]
    head = f'{{"transformers": {json.dumps(made["transformers"])}, "classes": {{\n'
    OUTPUT.write_text(head + ",\n".join(lines) + "\n}}\n")
    print(f"{OUTPUT.name}: {len(lines)} classes, {OUTPUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

"""Sources of data in axolotl's configs: `datasets`, a list of sections with a `type`.

A `type` says how axolotl writes prompts, and so what records look like; `field_…` keys name their columns.
"""

from __future__ import annotations

from typing import Any

from kubetune.data.reading.messages import SWITCHES
from kubetune.plugins.importers.common.source_keys import read_source, take_sources
from kubetune.plugins.importers.common.training_keys import template, template_file
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Table,
    carried,
    dropped,
    near,
    unneeded,
)
from kubetune.plugins.importers.writing import inline

# How axolotl's messages may be written, as the names of role and content.
_OPENAI = ("role", "content")
_SHAREGPT = ("from", "value")
# Our shape of records for each `type`, and the column of its turns.
_SHAPES = {
    "completion": "text",
    "pretrain": "text",
    "chat_template": "messages",
    "columns": "prompt_completion",
}
_TURNS = {"messages": "messages", "sharegpt": "conversations"}
_TEMPLATES = {"chat_template": template, "chat_template_jinja": template_file}


def take_data(draft: Draft) -> None:
    """Take the sources; those of `pretraining_dataset` are plain texts."""
    keys = {"datasets": "data.train", "test_datasets": "data.eval"}
    if draft.get("datasets") is None:
        keys["pretraining_dataset"] = "data.train"
    take_sources(draft, keys, _source)


def _source(draft: Draft, place: str, item: Any) -> list[Any]:
    """Return our source for one of theirs, which is a path or a section."""
    if isinstance(item, str):
        item = {"path": item}
    # `type` may be a section with the columns in it.
    if isinstance(item.get("type"), dict):
        item = {**item, **item["type"], "type": "columns"}
    section = draft.section(place, item)
    for key, rule in _TEMPLATES.items():
        value = section.take(key)
        if value is not None:
            draft.write(f"{place}.{key}", rule(value, section), "model.chat_template")
    table = _RECORDS
    if draft.ours("task") in ("preference", "reward_model"):
        table = _ANSWERS
    elif item.get("type") == "chat_template" and _names(section) == _SHAREGPT:
        # Its turns are in the column `messages`, unless `field_messages` names another.
        section.settings["columns.conversations"] = "messages"
    source = read_source(draft, section, table)
    if place.startswith("pretraining_dataset"):
        source = {"format": "text"} | source
    return [source]


def _names(section: Draft) -> tuple[str, str]:
    """Return the names of role and content in each message."""
    properties = section.get("message_property_mappings") or {}
    role = section.get("message_field_role") or properties.get("role") or "role"
    return role, section.get("message_field_content") or properties.get("content") or "content"


def _shape(value: Any, section: Draft) -> Outcome:
    """Take the shape of a source's records from how axolotl writes their prompts."""
    if value == "sharegpt" or (value == "chat_template" and _names(section) == _SHAREGPT):
        return carried("sharegpt")
    if value == "alpaca":
        why = "the model's chat template is used, not Alpaca's `### Instruction` text"
        return near("alpaca", why)
    if value in _SHAPES:
        return carried(_SHAPES[value])
    return dropped(f"{value}: kubetune looks at the records and recognises their shape, or says so")


def _shape_of_answers(value: Any, _: Draft) -> Outcome:
    """Take answers to be compared or judged, with prompts in the model's own chat template."""
    if value in ("columns", "passthrough", "user_defined.default"):
        return unneeded("the shape of records is seen from their columns")
    if str(value).startswith(("chat_template", "bradley_terry")):
        return carried("messages")
    why = "the model's chat template is used; `kubetune data check` shows what it writes"
    return near("messages", why)


def _column(value: Any, section: Draft) -> Outcome:
    """Take the column of the messages or of the text, if records of this type have it."""
    kind = section.get("type")
    if section.at != "field_messages" and kind in ("completion", "pretrain"):
        return carried(value, path="columns.text")
    if section.at == "field_messages" and kind in ("chat_template", "sharegpt"):
        shape = _shape(kind, section).value
        return carried(value, path=f"columns.{_TURNS[shape]}")
    return dropped(f"does not apply to type: {kind}; name the column in the source's columns")


def _properties(value: Any, section: Draft) -> Outcome:
    """Take the names of what a message has, of which role and content alone may be others."""
    names = _names(section)
    if names not in (_OPENAI, _SHAREGPT):
        why = f"messages need `role` and `content`, or `from` and `value`; found {' and '.join(names)}"
        return dropped(why)
    others = {ours: theirs for ours, theirs in dict(value).items() if theirs not in (ours, *names)}
    if others:
        why = "properties of messages keep their names; rename in the data"
        return dropped(f"{why}: {inline(others)}")
    return unneeded("they say the shape of records")


def _switch_of_a_message(value: Any, section: Draft) -> Outcome:
    """Take the key by which each message says whether it is trained, if data are read by it here too."""
    if value not in SWITCHES:
        section.refuse(
            section.at,
            f"messages of the data say under `{value}` what is trained, and kubetune reads it under `train`; rename "
            "the key in the data",
        )
    return unneeded(f"kubetune reads `{value}` in a message too")


# Keys of a source of any kind.
_DROPPED = {
    "revision": "data come from the hub's main branch; download the revision and name its files",
    "roles_to_train": "answers of the assistant are trained, or everything (data.train_on)",
    "train_on_eos train_on_eot": "an answer is trained with the end that its chat template writes",
    "skip": "write range: [first, end), which counts shuffled rows",
    "roles": "roles are known by their usual names: user, human, assistant, gpt, system, tool",
    "format prompt_format no_input_format system_format system_prompt":
        "prompts are the chat template's, or the data's own",
}  # fmt: skip
_UNNEEDED = {
    "ds_type": "the kind of a file is seen from its name",
    "trust_remote_code": "no code comes with data sets any more",
    "preprocess_shards": "data are read in pieces by themselves",
    "message_field_role message_field_content": "they say the shape of records",
}
_TRAINED = Row("message_field_training message_field_training_detail", other=_switch_of_a_message)
_RECORDS = Table(
    same={"columns.prompt": "field_instruction", "columns.completion": "field_output"},
    rows=[
        Row("type", "format", other=_shape),
        Row("message_property_mappings", other=_properties),
        Row("field_messages field text_column", other=_column),
        _TRAINED,
    ],
    dropped=_DROPPED,
    unneeded=_UNNEEDED,
)
_ANSWERS = Table(
    same={
        f"columns.{name}": f"field_{name}"
        for name in ("messages", "prompt", "system", "chosen", "rejected", "completion", "label")
    },
    rows=[Row("type", "format", other=_shape_of_answers), _TRAINED],
    dropped=_DROPPED
    | {"field text_column": "of type: completion, which a source of answers is not"},
    unneeded=_UNNEEDED,
)

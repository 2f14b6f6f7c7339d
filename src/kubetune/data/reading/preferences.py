"""Answers to be compared, or judged, in every spelling: one prompt, which is read once, and each answer to it.

    {"prompt": "2+2?", "chosen": "4", "rejected": "5", "source": "forum"}
    →  prompt "2+2?", answers ("chosen", "4") and ("rejected", "5"), and what is beside them: {"source": "forum"}
    →  Preference(Pair("2+2?", "4"), Pair("2+2?", "5")), where `source` decides nothing

The spellings are TRL's, LLaMA-Factory's, ms-swift's and axolotl's, and Anthropic's texts of "\n\nHuman: …".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kubetune.config.schema import RecordKind
from kubetune.data.column_names import COMPLETIONS, PROMPTS, TALKS, words_of_name
from kubetune.data.reading.conversations import Beginning
from kubetune.data.reading.examples import Chat, Judged, Pair, Preference
from kubetune.data.reading.fields import NOTHING, Empty, Fields, keys, listed, quoted, show
from kubetune.data.reading.labelled import has_texts
from kubetune.data.reading.messages import SPEAKERS, read_history
from kubetune.data.reading.refusals import VERDICTS, require_readable
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.record_values import RecordValue, is_number, joined_texts, key_of

_CHOSEN: Final = ("chosen", "chosen_response", "chosen_messages", "preferred_output")
_REJECTED: Final = ("rejected", "rejected_response", "rejected_messages", "non_preferred_output")
# Keys that say that a prompt goes through the chat template, plain text though it is.
_OF_CHATS: Final = (
    "system",
    "system_prompt",
    "tools",
    "functions",
    "images",
    "image",
    "history",
)
# Keys that ms-swift may have a second time for the rejected answer, as `rejected_images`.
_OF_REJECTED: Final = ("images", "image", "videos", "audios", "tools", "objects")

_VERDICTS: Final = ("true", "false", "1", "0")
# Words of names of numbers of which the greater one is that of the better answer: `score_chosen`, `chosen-rating`.
_SCORES: Final = frozenset(("score", "rating", "reward", "grade", "quality"))
_SPOKEN: Final = re.compile(r"(?:^|\n\n)(Human|Assistant):")


class Unusable(ValueError):
    """A pair without a difference to train on."""


class _Compared(NamedTuple):
    """A prompt with two answers to it, each as a text or as messages."""

    prompt: Any
    chosen: Any
    rejected: Any


def likely_kind(value: RecordValue) -> RecordKind:
    """Return the kind of a record whose task is not known: with answers to compare, one that is judged, or a text."""
    if any(value.get(key) for key in (*_CHOSEN, *_REJECTED)):
        return "pair"
    if isinstance(value.get("output"), list):
        return "pair"
    verdicts = [value.get(key) for key in VERDICTS]
    is_answer = key_of((*COMPLETIONS, *TALKS), value, {})
    # Without an answer it is the class of a text, such as spam or not.
    is_class = not is_answer and has_texts(value)
    if not is_class and any(isinstance(verdict, bool) for verdict in verdicts):
        return "judged"
    # Tables write 0 and 1; without an answer they are classes.
    if is_answer and any(str(verdict).lower() in _VERDICTS for verdict in verdicts):
        return "judged"
    return "text"


def read_answers(
    value: RecordValue,
    shape: str,
    kind: RecordKind,
) -> tuple[Preference | Judged, tuple[str, ...]]:
    """Return answers to be compared or judged, and the keys that hold something and decide nothing."""
    if shape in ("text", "labelled"):
        raise ValueError(
            f"is read as {shape} by `data.train.format`, which has no answers to compare; expected auto"
        )
    if kind == "judged":
        rest = dict(value)
        is_good = _verdict(rest)
        prompt, name, answer = _judged(rest, value)
        (example,), unused = _read(rest, shape, prompt, [(name, answer)])
        return Judged(example, is_good), unused

    whole = value
    margin = None
    if kind == "graded":
        value = dict(value)
        margin = _margin(value.pop("margin", None))
    rest = _without_input_object(value)
    (chosen_name, chosen), (rejected_name, rejected) = _named_answers(rest, value)
    prompt, chosen, rejected = _compared(rest, chosen, rejected)
    answers = [(chosen_name, chosen), (rejected_name, rejected)]
    (better, worse), unused = _read(rest, shape, prompt, answers)
    if better == worse:
        raise Unusable("has the same answer as chosen and as rejected; expected two that differ")
    return Preference(better, worse, margin, _is_scored_otherwise(whole)), unused


def _is_scored_otherwise(value: RecordValue) -> bool:
    """True if the numbers of a record say that its rejected answer is the better one.

    {"score_chosen": 2.0, "score_rejected": 8.0}, or {"margin": -2.0}
    """
    for name, score in value.items():
        if name == "margin":
            other: Any = 0.0
        elif "chosen" in name and not _SCORES.isdisjoint(words_of_name(name)):
            other = value.get(name.replace("chosen", "rejected"))
        else:
            continue
        if is_number(score) and is_number(other) and float(score) < float(other):
            return True
    return False


def _margin(margin: Any) -> float | None:
    if margin is None:
        return None
    # True and False are numbers to Python.
    is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin):
        raise ValueError(
            f"margin is {show(margin)}; expected a number: by how much the chosen answer is better"
        )
    return float(margin)


def _read(
    rest: JsonObject,
    shape: str,
    prompt: Any,
    answers: Sequence[tuple[str, Any]],
) -> tuple[list[Chat | Pair], tuple[str, ...]]:
    """Return each answer with the prompt, which they have in common, and the keys of the rest that decide nothing.

    `rest`: what is beside prompt and answers. `answers`: each with what the record calls it.
    """
    for key in ("prompt", "completion"):
        if rest.get(key) not in NOTHING:
            raise ValueError(f"has `{key}` besides a prompt and two answers; leave it out")

    # Texts are plain texts, unless something beside them says that they go through the chat template.
    if isinstance(prompt, str):
        is_of_chat = shape not in ("auto", "prompt_completion")
        if shape == "auto":
            is_of_chat = any(key in rest for key in _OF_CHATS)
        if is_of_chat or not all(isinstance(answer, str) for _, answer in answers):
            prompt = _asked(rest, prompt)

    record = Fields(rest)
    require_readable(record)
    beginning = Beginning(record, prompt)
    examples = []
    for name, answer in answers:
        if answer is None:
            raise ValueError(f"`{name}` is null; {keys({**rest, 'prompt': prompt, name: answer})}")
        try:
            example = beginning.answered(answer, name)
        except Empty as error:
            raise Unusable(str(error)) from None
        # A list of messages may end with the user's.
        if isinstance(example, Chat):
            roles = {message["role"] for message in example.messages[example.context :]}
            if "assistant" not in roles:
                raise ValueError(f"{name} holds no message of the assistant; expected the answer")
        examples.append(example)
    return examples, record.unused


def ranked_answers(value: RecordValue) -> str:
    """Return what is said of ranked answers, which are more than a pair can hold; empty for a record without any."""
    answers = value.get("answers")
    if not isinstance(answers, list) or len(answers) < 2:
        return ""
    is_ranking = isinstance(answers[0], Mapping) and "rank" in answers[0]
    return _ranking_in_words(answers) if is_ranking else ""


def _ranking_in_words(answers: Sequence[Any]) -> str:
    return (
        f"has {len(answers)} `answers` to one prompt; expected two, `chosen` and `rejected`: make a record of the best with "
        "one that is worse, or several such"
    )


def _named_answers(
    rest: JsonObject,
    value: RecordValue,
) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """Take out the chosen answer, None where it ends the conversation, and the rejected one, each with its name.

    `value`: the whole record. Raise ValueError for one that can be read in two ways.
    """
    _require_one_context(rest)

    chosen = _take(rest, _CHOSEN)
    rejected = _take(rest, _REJECTED)
    has_talk = any(rest.get(key) for key in TALKS)

    # LLaMA-Factory's older files have both answers in `output`, the better one first.
    output = rest.get("output")
    if chosen is None and rejected is None and isinstance(output, list) and len(output) == 2:
        del rest["output"]
        return ("output[0]", output[0]), ("output[1]", output[1])
    if chosen is None and not has_talk:
        chosen = _take(rest, COMPLETIONS)

    if chosen is None and rejected is None and isinstance(rest.get("answers"), list):
        raise ValueError(_ranking_in_words(rest["answers"]))

    if rejected is None or (chosen is None and not has_talk):
        raise ValueError(
            f"{keys(value)}; expected two answers, `chosen` and `rejected`, with their prompt"
        )
    # Without a key for the chosen answer, it is the end of the conversation.
    return chosen or ("messages", None), rejected


def _without_input_object(value: RecordValue) -> JsonObject:
    """Return a record whose prompt is beside its answers; OpenAI's format has it one level below, in `input`."""
    rest = dict(value)
    request = rest.get("input")
    if isinstance(request, Mapping) and "messages" in request:
        del rest["input"]
        # Settings of the API say nothing about the texts.
        for key in ("messages", "tools"):
            if request.get(key):
                rest[key] = request[key]
    return rest


def _judged(rest: JsonObject, value: RecordValue) -> tuple[Any, str, Any]:
    """Take out the prompt of an answer, what the record calls the answer, and the answer. `value`: the whole record."""
    if any(rest.get(key) for key in (*_CHOSEN, *_REJECTED)):
        raise ValueError(
            "has two answers, and `preference.loss: kto` takes one at a time; `kubetune data convert --to judged` "
            "makes two records of each"
        )

    # The answer is the end of a conversation …
    talk = _taken_talk(rest)
    if talk is not None:
        prompt, answer = _last_answer(talk)
        _take_repeated_prompts(rest, talk)
        return prompt, "messages", answer

    # … or is under a key, with its prompt before it there or beside it.
    named_answer = _take(rest, COMPLETIONS)
    if named_answer is None:
        raise ValueError(f"{keys(value)}; expected `completion` or `messages`, with `label`")
    name, answer = named_answer
    if _is_conversation(answer):
        prompt, answer = _last_answer(answer)
        _take_repeated_prompts(rest, prompt)
        return prompt, name, answer
    return _question(rest), name, answer


def _compared(
    rest: JsonObject,
    chosen: Any,
    rejected: Any,
) -> _Compared:
    """Return the prompt of two answers, and both without it. Takes the prompt out of `rest`.

    messages: [user "2+2?", assistant "4"], rejected: "5"
    chosen: [user "2+2?", assistant "4"], rejected: [user "2+2?", assistant "5"]
    prompt: "2+2?", chosen: "4", rejected: "5"
    chosen: "\\n\\nHuman: 2+2?\\n\\nAssistant: 4", rejected: "\\n\\nHuman: 2+2?\\n\\nAssistant: 5"
    """
    # A conversation that ends with the good answer, and a bad one.
    if chosen is None:
        whole = _taken_talk(rest) or []
        if _is_conversation(rejected):
            return _shared(whole, rejected)
        prompt, answer = _last_answer(whole)
        return _Compared(prompt, answer, rejected)

    # Two conversations that are the same up to the answer.
    if _is_conversation(chosen) or _is_conversation(rejected):
        if not (_is_conversation(chosen) and _is_conversation(rejected)):
            raise ValueError(
                "has one answer with its prompt and one without; expected both as whole conversations"
            )
        compared = _shared(chosen, rejected)
        _take_repeated_prompts(rest, [*compared.prompt, *compared.chosen])
        return compared

    # A conversation, or a question, and two answers to it.
    talk = _taken_talk(rest)
    if talk is not None:
        _take_repeated_prompts(rest, talk)
        return _Compared(talk, chosen, rejected)
    if any(rest.get(key) is not None for key in PROMPTS):
        was_text = isinstance(rest.get("prompt"), str)
        prompt = _question(rest)
        if was_text and isinstance(prompt, list):
            # HH-RLHF's texts: their answers begin with the space after "Assistant:".
            return _Compared(prompt, _stripped(chosen), _stripped(rejected))
        return _Compared(prompt, chosen, rejected)

    # Two texts that begin alike, such as Anthropic's dialogues.
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        raise ValueError(
            f"has no prompt: {keys(rest)} beside the answers; expected `prompt` or `messages`"
        )

    chosen_talk = _dialogue(chosen)
    rejected_talk = _dialogue(rejected)
    if chosen_talk and rejected_talk:
        return _shared(chosen_talk, rejected_talk)
    return _shared_text(chosen, rejected)


def _stripped(answer: Any) -> Any:
    return answer.strip() if isinstance(answer, str) else answer


def _take(rest: JsonObject, names: Sequence[str]) -> tuple[str, Any] | None:
    """Take out the one key of these that holds something. Raise ValueError where several do."""
    taken = []
    for name in names:
        value = rest.pop(name, None)
        if value not in (None, [], {}):
            taken.append((name, value))

    if len(taken) > 1:
        places = quoted(name for name, _ in taken)
        raise ValueError(
            f"has {places}; expected one of them, or `data.train.columns` that say which"
        )

    return taken[0] if taken else None


def _taken_talk(rest: JsonObject) -> list[Any] | None:
    """Take the conversation out; None where there is none."""
    taken = _take(rest, TALKS)
    if taken is None:
        return None
    key, talk = taken
    return _turns(listed({key: talk}, key))


def _turns(talk: list[Any]) -> list[Any]:
    """Return the messages of a conversation.

    ms-swift has those of the user and of the assistant in one, by their names: `{"user": "Hi", "assistant": "Hello"}`.
    """
    turns = []
    for turn in talk:
        if not isinstance(turn, dict) or len(turn) != 2:
            return talk
        texts = {SPEAKERS.get(key): text for key, text in turn.items()}
        if texts.keys() != {"user", "assistant"}:
            return talk
        for role in ("user", "assistant"):
            turns.append({"role": role, "content": texts[role]})

    return turns


def _question(rest: JsonObject) -> Any:
    """Take out the prompt, in messages or as text. Alpaca's has two parts."""
    questions = {}
    for key in PROMPTS:
        if rest.get(key) not in (None, []):
            questions[key] = rest.pop(key)
    if len(questions) == 2 and "input" in questions and "prompt" not in questions:
        # A question, and what it is about.
        subject = joined_texts(questions["input"])
        (question,) = (text for key, text in questions.items() if key != "input")
        parts = (question, subject)
        if all(isinstance(part, str) for part in parts):
            return _asked(rest, "\n".join(filter(None, parts)))

    if len(questions) != 1:
        names = quoted(questions) or "no prompt"
        raise ValueError(
            f"has {names}; expected one prompt, or `data.train.columns` that say which it is"
        )

    key, prompt = questions.popitem()
    if isinstance(prompt, str):
        dialogue = _dialogue(prompt, opens=True)
        # A question is always somebody's; a prompt may be any text.
        if dialogue or key == "prompt":
            return dialogue or prompt
        return _asked(rest, prompt)

    if not isinstance(prompt, list):
        raise ValueError(f"{key} is {show(prompt)}; expected a text or messages")
    return prompt


def _asked(rest: JsonObject, question: str) -> list[JsonObject]:
    """Return a question as messages, after those of `history`, which is taken out."""
    earlier = read_history(rest.pop("history", None))
    return [*earlier, {"role": "user", "content": question}]


def _speaker(message: Any) -> str | None:
    if not isinstance(message, dict):
        return None
    role = message.get("role", message.get("from"))
    return SPEAKERS.get(role) if isinstance(role, str) else None


def _is_conversation(answer: Any) -> bool:
    """True if an answer begins with its prompt."""
    if not isinstance(answer, list) or not answer:
        return False
    return _speaker(answer[0]) in ("user", "system")


def _last_answer(talk: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return a conversation up to the last message of the user, and what follows. Without one, all is the answer."""

    # Of system, user, assistant, user, assistant, the last message is the answer.
    end = 0
    for i, message in enumerate(talk):
        is_system = i == 0 and _speaker(message) == "system"
        if is_system or _speaker(message) == "user":
            end = i + 1
    if not talk[end:]:
        raise ValueError("ends with a message of the user; expected the answer to it")
    return list(talk[:end]), list(talk[end:])


def _shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> _Compared:
    """Return the beginning that two conversations share, and the rest of each.

        chosen    [system, user "2+2?", assistant "4"]
        rejected  [system, user "2+2?", assistant "5"]    share their first two messages

    Raise ValueError where the rest is no answer.
    """
    same = 0  # messages
    for ours, theirs in zip(chosen, rejected, strict=False):
        # Tables give all messages the same keys, of which some are null.
        if _without_nulls(ours) != _without_nulls(theirs):
            break
        same += 1

    if same == len(chosen) == len(rejected):
        raise Unusable("has the same answer as chosen and as rejected; expected two that differ")
    for name, talk in (("chosen", chosen), ("rejected", rejected)):
        if same == len(talk):
            raise Unusable(f"has no {name} answer: that conversation ends where the other goes on")
        if _speaker(talk[same]) not in ("assistant", None):
            raise Unusable(
                f"has prompts that differ: message {same + 1} of {name} is the {_speaker(talk[same])}'s; expected two "
                "conversations that differ from an answer of the assistant on"
            )

    return _Compared(list(chosen[:same]), list(chosen[same:]), list(rejected[same:]))


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if value is not None}


def _shared_text(chosen: str, rejected: str) -> _Compared:
    """Return the beginning that two texts share, up to the end of a word, and the rest of each.

    "One is red." and "One is right." share "One is".
    """
    if chosen == rejected:
        raise Unusable(
            "has the same answer as chosen and as rejected; expected two that differ, and a `prompt`"
        )

    same = 0  # characters
    for ours, theirs in zip(chosen, rejected, strict=False):
        if ours != theirs:
            break
        same += 1

    if same in (len(chosen), len(rejected)):
        raise Unusable(
            "has an answer that the other begins with; expected two that differ, and a `prompt`"
        )

    # Neither a word, nor the space before it, which tokenizers take with it, is cut off from the rest.
    prompt = re.sub(r"\s*\S*$", "", chosen[:same])
    if not prompt:
        raise ValueError("has no `prompt`, and its answers share no beginning that could be it")
    return _Compared(prompt, chosen[len(prompt) :], rejected[len(prompt) :])


def _dialogue(text: str, *, opens: bool = False) -> list[dict[str, str]]:
    """Return the messages of a text such as HH-RLHF's; none for another text.

        "\\n\\nHuman: Hi\\n\\nAssistant: Hello"    →    user "Hi", assistant "Hello"

    `opens`: the text is a prompt, so it must end with "Assistant:", which is left out.
    """
    # The split gives what is before the first speaker, then each speaker and what it says.
    parts = _SPOKEN.split(text)
    if len(parts) < 5 or parts[0].strip() or parts[1] != "Human":
        return []
    turns = []
    for speaker, content in zip(parts[1::2], parts[2::2], strict=True):
        role = "user" if speaker == "Human" else "assistant"
        turns.append({"role": role, "content": content.strip()})
    if not opens:
        return turns
    is_open = turns[-1] == {"role": "assistant", "content": ""}
    return turns[:-1] if is_open else []


def _take_repeated_prompts(rest: JsonObject, talk: Sequence[Any]) -> None:
    """Take out prompts that a conversation repeats, as UltraFeedback has them. Raise ValueError for another."""
    # OpenAI's messages have `content`, ShareGPT's `value`.
    contents = []
    for message in talk:
        if isinstance(message, dict):
            contents.append(message.get("content", message.get("value")))

    for key in (*TALKS, *PROMPTS):
        prompt = rest.get(key)
        if prompt in (None, "", []):
            continue
        if isinstance(prompt, list):
            beginning = [_without_nulls(message) for message in talk[: len(prompt)]]
            is_held = [_without_nulls(message) for message in prompt] == beginning
        else:
            is_held = prompt in contents
        if not is_held:
            raise ValueError(f"has `{key}` that its conversations do not hold; expected one prompt")
        del rest[key]


def _require_one_context(rest: JsonObject) -> None:
    """Take out what ms-swift has a second time. Raise ValueError where it is another than the first."""
    for key in _OF_REJECTED:
        context = rest.pop(f"rejected_{key}", None)
        if context not in (None, [], "") and context != rest.get(key):
            raise ValueError(
                f"has `rejected_{key}` other than `{key}`; expected two answers to the same prompt"
            )


def _verdict(rest: JsonObject) -> bool:
    """Take out the verdict on an answer, true for a good one. Raise ValueError for none, and for two that differ."""
    verdicts = set()
    for key in VERDICTS:
        value = rest.pop(key, None)
        if value is None:
            continue
        # A score between 0 and 1 is no verdict, and 1.0 may be one such.
        text = str(value).lower()
        if isinstance(value, float) or text not in _VERDICTS:
            raise ValueError(
                f"{key} is {show(value)}; expected true for a good answer, false for a bad one"
            )
        verdicts.add(text in ("true", "1"))

    if not verdicts:
        raise ValueError(
            f"{keys(rest)}; expected a `label`, true for a good answer and false for a bad one"
        )
    if len(verdicts) > 1:
        raise ValueError("has `label` and `kto_tag`, which say different things")
    return verdicts.pop()

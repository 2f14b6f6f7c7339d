"""Chat templates of every family in use: each answer found exactly, and nothing left out without a word."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kubetune.data.text.turns.template import ChatTemplate
from tests.chat_templates import FAMILIES, TOKENS
from tests.tiny import CHATML

Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN = [
    user("One?"),
    answer("First."),
    user(" Two? "),
    answer(" <b>Second</b> \n"),
    user("Three?"),
    answer("Third."),
]
THOUGHTFUL = [
    user("One?"),
    answer("First.", reasoning_content="Think once."),
    user("Two?"),
    answer("Second.", reasoning_content="Think twice."),
]
INLINE = [
    user("One?"),
    answer("<think>\nThink once.\n</think>\n\nFirst."),
    user("Two?"),
    answer("<think>\nThink twice.\n</think>\n\nSecond."),
]
FINAL = "<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Think twice.<|end|><|start|>assistant"
CALLED = '<|call|>weather {"city": "Ås", "days": 3}<|/call|><|eos|>'
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Ås", "days": 3}},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Foretells.", "parameters": {}},
    }
]
CALLING = [
    user("One?"),
    answer("", tool_calls=[CALL]),
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "Rain."},
    answer("First."),
    user("Two?"),
    answer("Second."),
]


def answers_in(messages: Messages) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def spans(
    template: ChatTemplate, messages: Messages, tools: Sequence[Any] | None = None
) -> list[str]:
    rendered = template.render_answers(messages, tools, trained=answers_in(messages))
    return [rendered.text[start:end] for start, end in rendered.spans]


def theirs(source: str, messages: Messages, tools: Sequence[Any] | None = None) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    tools = list(tools) if tools else None
    return str(render_jinja_template([messages], tools=tools, chat_template=source, **TOKENS)[0][0])


def theirs_if_taken(source: str, messages: Messages) -> list[str]:
    """Return nothing where the template takes contents in another form only."""
    try:
        return [theirs(source, messages)]
    except (TemplateError, TypeError, AttributeError):
        return []


EXPECTED: list[tuple[str, Messages, Any, list[str]]] = [
    ("phi", PLAIN, None, ["First.<|end|>", " <b>Second</b> \n<|end|>", "Third.<|end|>"]),
    ("phi", [SYSTEM, *PLAIN[:4]], None, ["First.<|end|>", " <b>Second</b> \n<|end|>"]),
    ("llama2", [SYSTEM, *PLAIN], None, [" First. </s>", " <b>Second</b> </s>", " Third. </s>"]),
    ("mistral", [SYSTEM, *PLAIN], None, [" First.</s>", "  <b>Second</b> \n</s>", " Third.</s>"]),
    (
        "gemma",
        PLAIN,
        None,
        ["First.<end_of_turn>", "<b>Second</b><end_of_turn>", "Third.<end_of_turn>"],
    ),
    ("r1", PLAIN, None, ["First.<|eos|>", " <b>Second</b> \n<|eos|>", "Third.<|eos|>"]),
    ("r1", INLINE, None, ["\n\nFirst.<|eos|>", "\n\nSecond.<|eos|>"]),
    (
        "r1",
        CALLING,
        None,
        [CALLED, "First.<|eos|>", "Second.<|eos|>"],
    ),
    (
        "prompted",
        PLAIN,
        None,
        ["First.<|im_end|>", "<b>Second</b><|im_end|>", "\n</think>\n\nThird.<|im_end|>"],
    ),
    (
        "prompted",
        THOUGHTFUL,
        None,
        ["First.<|im_end|>", "Think twice.\n</think>\n\nSecond.<|im_end|>"],
    ),
    ("prompted", INLINE, None, ["First.<|im_end|>", "Think twice.\n</think>\n\nSecond.<|im_end|>"]),
    ("glm", PLAIN, None, ["\nFirst.", "\n <b>Second</b> \n", "\nThird."]),
    (
        "channels",
        PLAIN,
        None,
        [FINAL + "First.<|end|>", FINAL + " <b>Second</b> \n<|end|>", FINAL + "Third.<|return|>"],
    ),
    (
        "channels",
        THOUGHTFUL,
        None,
        [FINAL + "First.<|end|>", THOUGHT + FINAL + "Second.<|return|>"],
    ),
    (
        "channels",
        CALLING,
        TOOLS,
        [
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Ås", "days": 3}<|call|>',
            FINAL + "First.<|end|>",
            FINAL + "Second.<|return|>",
        ],
    ),
    (
        "marked",
        CALLING,
        None,
        ["[weather: Ås 3]<|im_end|>", "First.<|im_end|>", "Second.<|im_end|>"],
    ),
    ("marked", [answer("Hi."), *PLAIN[:2]], None, ["Hi.<|im_end|>", "First.<|im_end|>"]),
    ("modes", PLAIN, None, ["First.<|im_end|>", " <b>Second</b> \n<|im_end|>", "Third.<|im_end|>"]),
]


@pytest.mark.parametrize(("family", "messages", "tools", "expected"), EXPECTED)
def test_each_answer_is_found_exactly(
    family: str, messages: Messages, tools: Any, expected: list[str]
) -> None:
    template = ChatTemplate(FAMILIES[family], TOKENS)
    assert spans(template, messages, tools) == expected
    assert spans(template, messages, tools) == expected  # by what was remembered
    if "tool_calls" not in str(messages) or family != "r1":  # which wants them in a form of its own
        assert template.render(messages, tools) == theirs(FAMILIES[family], messages, tools)


@pytest.mark.parametrize(
    ("family", "closing"),
    [
        ("phi", "<|end|>"),
        ("channels", "<|return|>"),
        ("glm", ""),
        ("llama2", "</s>"),
        ("marked", "<|im_end|>"),
    ],
)
def test_what_ends_an_answer(family: str, closing: str) -> None:
    assert ChatTemplate(FAMILIES[family], TOKENS).closing == closing


def test_an_answer_that_nothing_precedes_is_found() -> None:
    assert spans(ChatTemplate(CHATML, {}), [answer("Hi."), *PLAIN[:2]]) == [
        "Hi.<|im_end|>",
        "First.<|im_end|>",
    ]
    thoughtful = [answer("Hi.", reasoning_content="Greet."), *PLAIN[:1]]
    assert spans(ChatTemplate(FAMILIES["channels"], TOKENS), thoughtful) == [
        "<|channel|>final<|message|>Hi.<|end|>"
    ]


def test_a_generation_block_may_begin_right_behind_the_question() -> None:
    """As in templates without a token that ends a question; what only ends a turn may be a block of its own."""
    source = (
        "{%- for message in messages %}{%- if message.role == 'user' %}<user>{{ message.content }}{%- else %}"
        "{%- generation %}<assistant>{{ message.content }}{%- endgeneration %}"
        "{%- generation %}<eos>{%- endgeneration %}{%- endif %}{%- endfor %}"
    )
    template = ChatTemplate(source, TOKENS)
    rendered = template.render_answers(PLAIN, trained=[1, 5])
    trained = sorted({i for span in rendered.spans for i in range(*span)})
    assert (
        "".join(rendered.text[i] for i in trained) == "<assistant>First.<eos><assistant>Third.<eos>"
    )


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_message_that_is_only_a_tag_is_missed_too(role: str) -> None:
    template = ChatTemplate(FAMILIES["wordless"].replace("'user', ", ""), TOKENS)
    with pytest.raises(
        ValueError, match=f"leaves out the content of messages.0., by the {role} .'</think>'"
    ):
        template.render_answers([{"role": role, "content": "</think>"}, *PLAIN], trained=[])


def test_only_the_messages_asked_for_are_trained() -> None:
    for family in ("phi", "marked"):
        rendered = ChatTemplate(FAMILIES[family], TOKENS).render_answers(PLAIN, trained=[3])
        assert ["Second" in rendered.text[start:end] for start, end in rendered.spans] == [True]


LEFT_OUT = [
    ("phi", CALLING, None, r"leaves out a tool call in messages\[1\] \('Ås'\)"),
    ("phi", PLAIN, TOOLS, r"leaves out the tools \('Foretells.'\)"),
    (
        "phi",
        [*PLAIN, {"role": "tool", "content": "Rain."}, answer("Wet.")],
        None,
        "by the tool",
    ),
    (
        "wordless",
        [SYSTEM, *PLAIN],
        None,
        r"leaves out the content of messages\[0\], by the system \('Be brief.'\)",
    ),
    (
        "gemma",
        [SYSTEM, *PLAIN],
        None,
        r"take messages by the system \(messages\[0\]\) \(it says 'no system'\)",
    ),
    (
        "shouting",
        PLAIN,
        None,
        r"the answer in messages\[1\] cannot be found exactly: .* changes the texts",
    ),
]


@pytest.mark.parametrize(("family", "messages", "tools", "message"), LEFT_OUT)
def test_what_a_template_leaves_out_is_refused(
    family: str, messages: Messages, tools: Any, message: str
) -> None:
    template = ChatTemplate(FAMILIES[family], TOKENS)
    with pytest.raises(ValueError, match=message):
        spans(template, messages, tools)
    if family != "shouting":
        with pytest.raises(ValueError, match=message):
            template.render_answers(messages, tools)  # when everything is trained too


STRICT = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% if m.thinking %}{{ m.thinking.first.words }}{% endif %}"
    "\n{{ m.role }}: {{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}\nassistant: {% endif %}"
)
NEEDY = STRICT + "{% for tool in tools %}{{ tool }}{% endfor %}"
ALTERNATE = r"\(it says 'must alternate'\); choose one that does .*, or take that out of the data"
REFUSED = [
    (
        NEEDY.replace("{{ tool }}", "{{ tool.name.strip() }}"),
        PLAIN,
        TOOLS,
        "does not take tools of this form",
    ),
    (STRICT, [SYSTEM, *PLAIN], None, r"messages by the system \(messages\[0\]\) " + ALTERNATE),
    (STRICT, CALLING, TOOLS, r"tool calls and results \(messages\[1\]\) " + ALTERNATE),
    (
        STRICT,
        THOUGHTFUL,
        None,
        r"reasoning \(messages\[1\]\) \(it fails in its line 1: .* no attribute 'first'\)",
    ),
    (
        STRICT,
        [*PLAIN[:2], answer("More.")],
        None,
        r"messages in a row by the same role \(messages\[2\]\)",
    ),
    (
        STRICT,
        [answer("Hi."), *PLAIN[:2]],
        None,
        r"answers that no question precedes \(messages\[0\]\)",
    ),
    (
        STRICT,
        [SYSTEM, *CALLING],
        None,
        r"messages by the system \(messages\[0\]\) together with tool calls",
    ),
    (
        NEEDY,
        PLAIN,
        None,
        r"takes only conversations with tools \(it fails in its line 4: 'NoneType' object",
    ),
    (
        "{{ documents[0].text }}",
        PLAIN,
        None,
        "takes only conversations with documents to answer from",
    ),
    ("{{ messages.text.words }}", PLAIN, None, "does not even write a question with its answer"),
    (
        STRICT.replace("m.content", "[m][m.content | length - 1].content"),
        PLAIN,
        None,
        "whatever part of it is left out",
    ),
]


@pytest.mark.parametrize(("source", "messages", "tools", "message"), REFUSED)
def test_a_refusal_names_the_part_that_is_not_taken(
    source: str, messages: Messages, tools: Any, message: str
) -> None:
    """In the user's words, beside those of the template or of Jinja."""
    template = ChatTemplate(source.replace("{% for tool", "\n{% for tool"), TOKENS, "t.jinja")
    for write in (spans, ChatTemplate.render):
        with pytest.raises(ValueError, match=f"^t.jinja chat template .*{message}"):
            write(template, messages, tools)


def test_reasoning_may_be_left_out_and_is_noticed() -> None:
    for family, messages, drops in (
        ("channels", THOUGHTFUL, True),
        ("channels", THOUGHTFUL[2:], False),
        ("prompted", INLINE, True),
        ("prompted", INLINE[2:], False),
        ("r1", [user("One?"), answer("Hm.</think>First.")], True),
        ("phi", THOUGHTFUL, True),
    ):
        template = ChatTemplate(FAMILIES[family], TOKENS)
        rendered = template.render_answers(messages, trained=answers_in(messages))
        assert ("reasoning_dropped" in rendered.notes) is drops


def prompted(family: str, extra: str = "") -> str:
    return FAMILIES[family].replace("assistant\\n' if add", f"assistant\\n{extra}' if add")


TOOL_PROMPT = (
    FAMILIES["r1"]
    .replace("if add_generation_prompt", "if add_generation_prompt and messages[-1].role == 'user'")
    .replace(
        "'<|Assistant|>' + message",
        "('<|Assistant|>' if loop.previtem.role == 'user' else '') + message",
    )
)
MARKED_HEADER = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}{% generation %}<assistant>"
    "{{ m.content }}<eos>{% endgeneration %}{% endif %}{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("source", "messages", "turns", "unlike"),
    [
        (FAMILIES["r1"], PLAIN, [1, 3, 5], True),
        (FAMILIES["r1"], INLINE, [1, 3], True),  # the template leaves the thoughts out
        (FAMILIES["prompted"], PLAIN, [1, 3, 5], True),
        (
            FAMILIES["prompted"],
            PLAIN,
            [5],
            False,
        ),  # it writes an empty thought behind the last question
        (FAMILIES["prompted"], INLINE, [3], False),
        (TOOL_PROMPT, CALLING[:4], [3], False),  # it opens no thought behind what a tool returned
        (TOOL_PROMPT, CALLING[:4], [1], True),
        (prompted("marked", "<think>\\n"), PLAIN, [1], True),
        (prompted("marked"), PLAIN, [1], False),
        (MARKED_HEADER, PLAIN, [1, 3, 5], False),
        *(
            (FAMILIES[family], PLAIN, [1, 3, 5], False)
            for family in sorted({*FAMILIES} - {"r1", "prompted", "shouting"})
        ),
        (FAMILIES["channels"], CALLING, [1, 3, 5], False),
        (FAMILIES["mistral"], [SYSTEM, *PLAIN], [2, 4, 6], False),
    ],
)
def test_answers_that_do_not_begin_where_the_prompt_ends_are_noticed(
    source: str, messages: Messages, turns: list[int], unlike: bool
) -> None:
    rendered = ChatTemplate(source, TOKENS).render_answers(messages, trained=turns)
    assert ("unlike_prompt" in rendered.notes) is unlike


def test_a_template_that_writes_an_answer_twice_is_refused_and_one_that_rewrites_it_said() -> None:
    messages = [{"role": "user", "content": "Ping"}, {"role": "assistant", "content": "a foo"}]
    twice = CHATML + "{{- 'Last: ' + messages[-1].content }}"
    with pytest.raises(
        ValueError, match=r"messages\[1\] cannot be found exactly: .* more than once"
    ):
        ChatTemplate(twice, TOKENS).render_answers(messages, trained=[1])
    rewriting = CHATML.replace("message.content", "message.content | replace('foo', 'bar')")
    for source, rewrites in ((CHATML, False), (rewriting, True)):
        rendered = ChatTemplate(source, TOKENS).render_answers(messages, trained=[1])
        assert ("rewrites_answer" in rendered.notes) is rewrites


SOME = st.text(st.characters(exclude_categories=["Cs", "Co"]), min_size=1, max_size=12).filter(
    str.strip
)


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    messages: Messages = [{"role": "system", "content": draw(SOME)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(SOME)))
        if draw(st.booleans()):
            arguments = {"city": draw(SOME)}
            messages.append(
                answer(
                    "",
                    tool_calls=[{**CALL, "function": {"name": "weather", "arguments": arguments}}],
                )
            )
            messages.append({"role": "tool", "content": draw(SOME)})
        thought = {"reasoning_content": draw(SOME)} if draw(st.booleans()) else {}
        messages.append(answer(draw(SOME), **thought))
    return messages


def texts_of(message: dict[str, Any]) -> list[str]:
    calls = [call["function"]["arguments"]["city"] for call in message.get("tool_calls", ())]
    return [
        text.strip() for text in (message["content"], message.get("reasoning_content", ""), *calls)
    ]


COMPLETE = FAMILIES["complete"]
WITHOUT = [COMPLETE.replace(f"'{role}'", "'nobody'") for role in ("system", "tool", "user")]


@pytest.mark.parametrize("source", [COMPLETE, *WITHOUT, COMPLETE.replace("calls", "no")])
@given(messages=conversations())
def test_nothing_is_lost_without_a_word(source: str, messages: Messages) -> None:
    """Whatever a template has no branch for: each text is in the rendering, or counted, or the record is refused."""
    template = ChatTemplate(source, TOKENS)
    try:
        rendered = template.render_answers(messages, trained=answers_in(messages))
    except ValueError as error:
        if source == COMPLETE or "leaves out" not in str(error):
            raise
        return
    lost = [text for message in messages for text in texts_of(message) if text not in rendered.text]
    assert all(text in [m.get("reasoning_content", "").strip() for m in messages] for text in lost)
    assert "reasoning_dropped" in rendered.notes or not lost
    for i, (start, end) in zip(answers_in(messages), rendered.spans, strict=True):
        content = messages[i]["content"]
        assert rendered.text[start:end].endswith(content + "<|im_end|>") or not content


@pytest.mark.parametrize("key", ["content", "items", "nothing", "__class__", "__init__"])
def test_keys_are_read_as_jinja_reads_them(key: str) -> None:
    source = f"{{{{ m.{key} is defined }}}}{{{{ m.{key} is callable }}}}{{{{ m.{key} is string }}}}"
    source = f"{{% for m in messages %}}{{{{ m.content }}}}{source}{{% endfor %}}"
    messages = [{"role": "user", "content": "Ping", "items": "some", "__class__": "a key"}]
    theirs = ImmutableSandboxedEnvironment().from_string(source).render(messages=messages)
    assert ChatTemplate(source, TOKENS).render(messages) == theirs


def test_a_system_that_is_read_as_parts_only_is_given_so() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content[0].text }}"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content if m.content is string else m.content[0].text }}<end>{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}"
    )
    template = ChatTemplate(source, TOKENS)
    assert spans(template, [SYSTEM, *PLAIN[:2]]) == spans(template, PLAIN[:2]) == ["First.<end>"]


def published() -> list[Path]:
    folders = os.environ.get("KUBETUNE_CHAT_TEMPLATES", "")
    return sorted(
        file
        for folder in folders.split(os.pathsep)
        if folder
        for file in Path(folder).glob("*.jinja")
    )


WORDS = (
    "leaves out",
    "does not take",
    "takes only",
    "does not even write",
    "cannot be found exactly",
)


@pytest.mark.parametrize("file", published(), ids=lambda file: file.stem)
def test_published_templates(file: Path) -> None:
    """Conversations are written as transformers writes them and each answer is found, or the user is told why not."""
    source = file.read_text(encoding="utf-8")
    template = ChatTemplate(source, TOKENS)
    for messages, tools in (
        (PLAIN, None),
        ([SYSTEM, *PLAIN], None),
        (INLINE, None),
        (CALLING, TOOLS),
    ):
        try:
            rendered = template.render_answers(messages, tools, trained=answers_in(messages))
        except ValueError as error:
            if not any(word in str(error) for word in WORDS):
                raise
            continue
        if tools is None:
            parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
            assert rendered.text in [
                written for form in (messages, parts) for written in theirs_if_taken(source, form)
            ]
        if "generation %}" not in source:
            for i, (start, end) in zip(answers_in(messages), rendered.spans, strict=True):
                inside = rendered.text[start:end]
                contents = [
                    message["content"].rpartition("</think>")[2].strip() for message in messages
                ]
                assert [j for j, text in enumerate(contents) if text and text in inside] in (
                    [i],
                    [],
                )


ESSAY = (
    "# Ode\n\n1. `x = {'a': [1]}`\n\n| a | b |\n|---|---|\n\n<p>“Ärger” 🙂</p>"
    " {{ no }} {% tag %} [INST] \\frac{1}{2}\n\n  – the end –"
)
CHATS = [
    PLAIN[:2],
    PLAIN,
    [user(ESSAY), answer(ESSAY)],
    [user(ESSAY), answer("No."), user(ESSAY), answer(ESSAY + " ")],
]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "shouting"])
def test_no_plain_chat_is_refused(family: str) -> None:
    """By a template of any family, nor one with a system but where there is no place for that."""
    template = ChatTemplate(FAMILIES[family], TOKENS)
    for chat in CHATS:
        assert all(spans(template, chat))
        if family not in ("gemma", "r1", "wordless"):
            assert all(spans(template, [SYSTEM, *chat]))


def test_results_in_another_order_than_their_calls_are_refused_where_no_id_is_written() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
    )
    calls = [{**CALL, "id": letter} for letter in "ab"]
    results = [
        {"role": "tool", "tool_call_id": letter, "content": f"of {letter}."} for letter in "ab"
    ]
    for turns in (
        [user("?"), answer("", tool_calls=calls)],
        [*CALLING, user("?"), answer("", tool_calls=calls)],
    ):
        ChatTemplate(source, TOKENS).render_answers([*turns, *results])
        with pytest.raises(
            ValueError, match=rf"another order than their calls \(messages\[{len(turns) + 1}\]\)"
        ):
            ChatTemplate(source, TOKENS).render_answers([*turns, *results[::-1]])
        ChatTemplate(source.replace("m.role", "m.tool_call_id"), TOKENS).render_answers(
            [*turns, *results[::-1]]
        )

"""Chat templates with the traits of the families in use, each as short as its traits allow."""

from __future__ import annotations

from typing import Final

TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}

# Ends every rendering with EOS, and knows no tools.
_PHI = """\
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'assistant') and message.content %}
        {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}
"""

# Knows no generation prompt, and puts the system's text into the first question.
_LLAMA2 = """\
{%- set head = messages[0].content if messages[0].role == 'system' else none %}
{%- for message in (messages[1:] if head else messages) %}
    {%- set content = message.content %}
    {%- if head and loop.first %}{% set content = '<<SYS>>\\n' + head + '\\n<</SYS>>\\n\\n' + content %}{% endif %}
    {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' if message.role == 'user' }}
    {{- ' ' + content.strip() + ' ' + eos_token if message.role == 'assistant' }}
{%- endfor %}
"""

# Puts the system's text into the last question, so that no earlier prompt is a prefix of the whole.
_MISTRAL = """\
{%- set head = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if head else messages %}
{%- set last = rest | selectattr('role', 'equalto', 'user') | list | last %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (head + '\\n\\n' if head and message is sameas last else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}
"""

_GEMMA = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{{- bos_token }}
{%- for message in messages %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt else '' }}
"""

# Opens the thought in the prompt and never writes one; wants calls beside null, with arguments as text.
_R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}{% endif %}
    {%- if message.role == 'tool' %}{{- '<|result|>' + message.content }}{% endif %}
    {%- if message.role == 'assistant' and message.content is none %}
        {{- '<|Assistant|>' }}
        {%- for call in message.tool_calls %}
            {{- '<|call|>' + call.function.name + ' ' + call.function.arguments + '<|/call|>' }}
        {%- endfor %}
        {{- '<|eos|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' + message.content.split('</think>')[-1] + '<|eos|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|Assistant|><think>\\n' if add_generation_prompt else '' }}
"""

# Opens the thought in the prompt, and keeps thoughts only behind the last question.
_PROMPTED = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- set thought = message.reasoning_content or '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n' + thought.strip() + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n<think>\\n' if add_generation_prompt else '' }}
"""

# Ends no turn: the next one's token does.
_GLM = """\
{{- '[gMASK]<sop>' }}
{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + message.content }}{% endfor %}
{{- '<|assistant|>' if add_generation_prompt else '' }}
"""

# Ends the last turn unlike others, and writes the name of a tool again with its result.
_CHANNELS = """\
{%- if tools %}{{- '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- set ns = namespace(called='') %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>functions.' + ns.called + ' to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
    {%- elif message.role != 'assistant' %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- elif message.tool_calls %}
        {%- set ns.called = message.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + ns.called + '<|channel|>commentary json<|message|>' }}
        {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- else %}
        {%- if loop.last and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt else '' }}
"""

# Says itself what is generated, but for the end of the turn.
_MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- for call in message.tool_calls %}
                {{- '[' + call.function.name + ': ' + call.function.arguments.values() | join(' ') + ']' }}
            {%- endfor %}
            {{- message.content }}
        {%- endgeneration %}
    {%- else %}{{- message.content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}
"""

# Adds to a question what depends on where it stands.
_MODES = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {{- (' /last' if loop.index0 >= messages | length - 2 else ' /earlier') if message.role == 'user' else '' }}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}
"""

_COMPLETE = """\
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'tool', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content and loop.last %}{{- '(' + message.reasoning_content + ')' }}{% endif %}
        {%- for call in message.tool_calls %}
            {{- '[' + call.function.name + call.function.arguments.city + ']' }}
        {%- endfor %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}
"""

FAMILIES: Final = {
    "phi": _PHI,
    "llama2": _LLAMA2,
    "mistral": _MISTRAL,
    "gemma": _GEMMA,
    "r1": _R1,
    "prompted": _PROMPTED,
    "glm": _GLM,
    "channels": _CHANNELS,
    "marked": _MARKED,
    "modes": _MODES,
    "complete": _COMPLETE,
    "wordless": _COMPLETE.replace("'system', ", ""),
    "shouting": _COMPLETE.replace("message.content +", "message.content | upper +"),
}

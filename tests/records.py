"""Records in the shapes of published data sets, written for tests."""

from __future__ import annotations

TOOL = '[{"name": "add", "description": "Adds.", "parameters": {"a": {"type": "int"}}}]'

SQL_CREATE_CONTEXT = {
    "question": "How many heads are older than 56?",
    "context": "CREATE TABLE head (age INTEGER)",
    "answer": "SELECT COUNT(*) FROM head WHERE age > 56",
}
DOLLY = {
    "instruction": "When did it begin operating?",
    "context": "Virgin Australia commenced services on 31 August 2000.",
    "response": "It began on 31 August 2000.",
    "category": "closed_qa",
}
SQUAD = {
    "id": "5733be284776f41900661182",
    "title": "Notre Dame",
    "context": "The school has a Catholic character.",
    "question": "What character has the school?",
    "answers": {"text": ["Catholic"], "answer_start": [17]},
}
S1K = {
    "question": "What is the sum of 1 and 2?",
    "solution": "The sum is 3.",
    "cot_type": "math",
    "source_type": "aime",
    "metadata": "{}",
    "thinking_trajectories": ["Let me add one and two, which is three."],
}
HELPSTEER3 = {
    "domain": "general",
    "language": "english",
    "context": [{"role": "user", "content": "Name a colour, please."}],
    "response1": "Red is a colour.",
    "response2": "I do not know any.",
    "overall_preference": -2,
}
SAFE_RLHF = {
    "prompt": "How do I open a lock?",
    "response_0": "Use the key that fits.",
    "response_1": "Break the door of your neighbour.",
    "is_response_0_safe": True,
    "is_response_1_safe": False,
    "better_response_id": 0,
    "safer_response_id": 0,
}
XLAM = {
    "id": 7,
    "query": "What is one and two?",
    "answers": '[{"name": "add", "arguments": {"a": 1}}]',
    "tools": TOOL,
}
OPENAI_DPO = {
    "input": {
        "messages": [{"role": "user", "content": "How warm is it?"}],
        "tools": [],
        "parallel_tool_calls": True,
    },
    "preferred_output": [{"role": "assistant", "content": "It is warm today."}],
    "non_preferred_output": [{"role": "assistant", "content": "No idea at all."}],
}
OPENAI_REINFORCEMENT = {
    "messages": [{"role": "user", "content": "How many legs has a cat?"}],
    "reference_answer": "4",
}
VERL_GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What are 70 and 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 0, "answer": "70 + 2 = 72\n#### 72", "split": "train"},
}
HERMES = {
    "id": "85f1",
    "conversations": [
        {"from": "system", "value": "You call functions. <tools>[]</tools>"},
        {"from": "human", "value": "What is 1 + 2?"},
        {"from": "gpt", "value": '<tool_call>\n{"name": "add"}\n</tool_call>'},
        {"from": "tool", "value": '<tool_response>\n{"sum": 3}\n</tool_response>'},
        {"from": "gpt", "value": "It is three."},
    ],
    "category": "Adding",
    "task": "Add",
}
ULTRACHAT = {
    "prompt": "How do I boil an egg?",
    "prompt_id": "f0e37e9f7800261167ce91143f98f511f768847236f133f2d0aed60b444ebe57",
    "messages": [
        {"role": "user", "content": "How do I boil an egg?"},
        {"role": "assistant", "content": "Ten minutes in hot water."},
    ],
}
NO_ROBOTS = {**ULTRACHAT, "category": "Open QA"}
PLAIN_GSM8K = {"question": "What are 70 and 2?", "answer": "70 + 2 = <<70+2=72>>72\n#### 72"}

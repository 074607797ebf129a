"""Chat templates beside transformers: each family's, over conversations of all kinds; and the small ones of the language."""
import json
from itertools import product

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

import record_jinja_cases
from support import DATA

TEMPLATES = sorted((DATA / "chat_templates").glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

SYSTEM = {"role": "system", "content": "Be <kind> & \"terse\".\n"}
USER = {"role": "user", "content": "  Hi there? é漢👍 "}
ASSISTANT = {"role": "assistant", "content": "Hello!\n<think>\nhm\n</think>\n\nYes. "}
REASONED = {**ASSISTANT, "content": "So.", "reasoning_content": "\nbecause\n"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "x": [1, None, True, 1e-7, {}]}}}
TEXT_CALL = {"id": "abcdefghj", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Bern\"}"}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
NONE_CALLS = {"role": "assistant", "content": None, "tool_calls": [TEXT_CALL, TEXT_CALL]}
RESULT = {"role": "tool", "name": "weather", "content": "{\"t\": 21.5}", "tool_call_id": "abcdefghi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": " What is "}, {"type": "image"}, {"type": "text", "text": "this?"}]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The \"weather\" <b> é", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "where"}, "days": {"type": "integer", "enum": [1, 2], "default": 1.5}},
    "required": ["city"]}, "return": {"type": "number"}}}

CONVERSATIONS = [
    [USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT, USER, ASSISTANT], [USER, CALLS, RESULT, ASSISTANT, USER],
    [SYSTEM, USER, CALLS, RESULT, RESULT, ASSISTANT], [USER, NONE_CALLS, RESULT, RESULT], [USER, NONE_CALLS, RESULT, ASSISTANT], [PARTS],
    [SYSTEM, PARTS, ASSISTANT], [USER, REASONED, USER], [USER, CALLS, RESULT, REASONED], [USER, USER], [SYSTEM], [ASSISTANT], [],
    [{"role": "stranger", "content": "x"}], [SYSTEM, USER, SYSTEM], [USER, {"role": "assistant"}],
    [{"role": "user", "content": "<tool_response>x</tool_response>"}, ASSISTANT],
]


def chats():
    for messages, tools, prompt, more in product(CONVERSATIONS, (None, [TOOL], [TOOL, TOOL]), (False, True),
                                                 ({}, {"enable_thinking": False, "date_string": "1 May 2025", "tools_in_user_message": False,
                                                       "builtin_tools": ["weather", "code_interpreter"]})):
        yield {"messages": messages, "tools": tools, "add_generation_prompt": prompt, "variables": TOKENS | more}
    for messages in CONVERSATIONS:
        yield {"messages": messages, "continue_final_message": True, "variables": TOKENS}


def theirs(template, chat):
    options = {key: value for key, value in chat.items() if key not in ("messages", "variables")}
    try:
        return render_jinja_template([chat["messages"]], chat_template=template, **options, **chat["variables"])[0][0]
    except Exception as error:  # of jinja2, of Python, of the template
        return {"error": f"{type(error).__name__}: {error}"}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_families_render_as_transformers_does(tool, path):
    template = path.read_text()
    all_chats = json.loads(json.dumps(list(chats())))  # nothing is shared between messages
    ours = tool(op="render", template=template, chats=all_chats)["texts"]
    texts = 0
    for chat, our in zip(all_chats, ours, strict=True):
        their = theirs(template, chat)
        if isinstance(their, str):
            texts += 1
            assert our == their, chat
        else:
            assert isinstance(our, dict) and "is not supported" not in our["error"], (chat, our, their)
            if their["error"].startswith("TemplateError"):  # the template's own words
                assert our["error"].endswith(their["error"].removeprefix("TemplateError: ")), chat
    assert texts > 30


def test_the_recorded_cases_are_what_jinja2_says():
    recorded = json.loads((DATA / "chat_templates/cases.json").read_text())
    assert recorded["cases"] == list(map(record_jinja_cases.outcome, record_jinja_cases.templates()))

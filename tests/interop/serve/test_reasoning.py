"""Thoughts in front of an answer, as OpenAI's client sees them under the names of vLLM."""
import json

import openai
import pytest
import transformers

from served import NAME, make_talker, serve, teach

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}},
                                                                            "required": ["city"], "additionalProperties": False}}}]
USER = {"role": "user", "content": "Is it cold?"}
TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}\n"
            "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>"
            "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' if starts else '' }}{% endif %}")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"cold": {"type": "boolean"}}, "required": ["cold"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "cold", "schema": SCHEMA}}


@pytest.fixture(scope="module", params=["text", "tokens"])
def thinker(request, tmp_path_factory):
    """Thinks of a call, and makes one. Its markers are special tokens or text."""
    markers = ["<think>", "</think>"] if request.param == "tokens" else []
    folder = make_talker(tmp_path_factory.mktemp("thinker"), markers)
    teach(folder, TEMPLATE, f"<think>\nA {CALL}?\n</think>\n\nWell.{CALL}<|end|>", [USER], TOOLS)
    with serve(folder, "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes") as server:
        yield folder, server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


ASK = {"model": NAME, "messages": [USER], "tools": TOOLS, "temperature": 0, "max_tokens": 400}
THOUGHT = f"\nA {CALL}?\n"


def test_thoughts_are_reasoning_and_calls_follow_them(thinker):
    folder, server, client = thinker
    (choice,) = client.chat.completions.create(**ASK).choices
    message = choice.message
    assert (message.reasoning, message.reasoning_content, message.content) == (THOUGHT, THOUGHT, "\n\nWell.")
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"city": "Bern"}] and choice.finish_reason == "tool_calls"

    parts = [part.choices[0].delta for part in client.chat.completions.create(**ASK, stream=True)]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(part, name, None) or "" for part in parts) == THOUGHT
    assert sum("reasoning" in part.model_dump() for part in parts) > 3  # as they are written
    assert "".join(part.content or "" for part in parts) == "\n\nWell."
    assert [call.function.name for part in parts for call in part.tool_calls or []] == ["weather"]

    hidden = client.chat.completions.create(**ASK, extra_body={"include_reasoning": False}).choices[0].message
    assert (hidden.model_dump().get("reasoning"), hidden.content) == (None, "\n\nWell.")
    short = client.chat.completions.create(**ASK | {"max_tokens": 8}).choices[0]
    assert short.finish_reason == "length" and short.message.content == "" and THOUGHT.startswith(short.message.reasoning)

    # The next turn has them where the template wants them, whatever name the client knows them by.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    turn = [USER, {"role": "assistant", "content": "Well.", "reasoning_content": "Hm."}, USER]
    expected = tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    turn[1]["reasoning"] = turn[1].pop("reasoning_content")
    assert server.post("/tokenize", messages=turn)["tokens"] == expected


def test_formats_are_those_of_what_follows_the_thoughts(thinker):
    _, _, client = thinker
    (choice,) = client.chat.completions.create(**ASK, response_format=FORMAT).choices
    assert choice.message.reasoning == THOUGHT and list(json.loads(choice.message.content)) == ["cold"] and choice.finish_reason == "stop"
    (choice,) = client.chat.completions.create(**ASK, tool_choice="required", parallel_tool_calls=False).choices
    assert (choice.message.reasoning, choice.message.content, len(choice.message.tool_calls)) == (THOUGHT, None, 1)

    # A prompt that ends the thoughts has an answer without.
    never = {"chat_template_kwargs": {"enable_thinking": False}}
    (choice,) = client.chat.completions.create(**ASK, response_format=FORMAT, extra_body=never).choices
    assert "reasoning" not in choice.message.model_dump() and list(json.loads(choice.message.content)) == ["cold"]
    # One that begins them, an answer that goes on with them.
    (choice,) = client.chat.completions.create(**ASK, extra_body={"chat_template_kwargs": {"starts": True}}).choices
    assert choice.message.reasoning


def test_a_parser_is_one_of_the_model_s(thinker, tmp_path):
    folder, _, _ = thinker
    with pytest.raises(AssertionError, match="answers of the model are not on channels"), serve(folder, "--reasoning-parser", "openai_gptoss"):
        pass
    with serve(folder, "--tool-call-parser", "hermes") as server:  # without one they are content
        said = server.post("/v1/chat/completions", **ASK | {"tools": []})["choices"][0]["message"]
        assert "reasoning" not in said

"""Calls of tools: what the families' own templates write is read back, and a model that calls a tool is heard by OpenAI's client."""
import json
import subprocess

import jsonschema
import openai
import pytest
import torch
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from served import NAME, make_talker, serve
from support import DATA, FERRY

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}]
USER = {"role": "user", "content": "Is it cold?"}
CALLS = [{"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}} for i, (name, arguments) in enumerate([
    ("weather", {"city": "Zürich \"x\"; <b>", "days": 3}), ("weather", {"city": "Bern", "more": [1, None, {"a": "}"}]})])]
HERMES = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n"
          "{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}"
          "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
SAID = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'


@pytest.mark.parametrize("family, parser, count, arguments", [
    ("qwen2.5", "hermes", 2, dict), ("qwen3", "hermes", 2, dict), ("llama3.1", "llama3_json", 1, dict), ("deepseek_v3", "deepseek_v3", 2, str),
    ("deepseek_r1", "deepseek_v3", 2, str)])
def test_calls_are_read_as_the_template_writes_them(family, parser, count, arguments):
    template = (DATA / f"chat_templates/{family}.jinja").read_text()
    calls = json.loads(json.dumps(CALLS[:count]))
    if arguments is str:
        for call in calls:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])

    def render(messages, **options):
        return render_jinja_template([messages], chat_template=template, bos_token="<s>", eos_token="</s>", **options)[0][0]

    before = render([USER])
    whole = render([USER, {"role": "assistant", "content": None if arguments is str else "", "tool_calls": calls}])
    assert whole.startswith(before)
    said = whole[len(before):]
    for token in ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|im_start|>assistant", "<|start_header_id|>assistant<|end_header_id|>",
                  "<｜Assistant｜>", "<think>\n\n</think>"):
        said = said.replace(token, "")
    line = json.dumps({"format": parser, "text": said, "tools": TOOLS})
    done = subprocess.run([FERRY.parent.parent / "tests/tool_call_tool"], input=line + "\n", stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["content"].strip() == ""
    assert answer["calls"] == [call["function"] for call in CALLS[:count]]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A model that was taught to answer one question by one call."""
    folder = make_talker(tmp_path_factory.mktemp("caller"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = HERMES
    tokenizer.save_pretrained(folder)
    prompt = tokenizer.apply_chat_template([USER], tools=TOOLS, add_generation_prompt=True)["input_ids"]
    answer = tokenizer(SAID)["input_ids"] + [tokenizer.eos_token_id]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ids = torch.tensor([prompt + answer])
    for _ in range(400):
        logits = model(ids).logits[0, len(prompt) - 1:-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, len(prompt):])
        if loss.item() < 0.002:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_openais_client_hears_a_call_and_says_its_result(caller):
    tokenizer = transformers.AutoTokenizer.from_pretrained(caller)
    with serve(caller) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        ask = {"model": NAME, "messages": [USER], "tools": TOOLS, "temperature": 0}
        (choice,) = client.chat.completions.create(**ask).choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, call.type) == ("tool_calls", None, "function")
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern", "days": 2})

        parts = [part.choices[0] for part in client.chat.completions.create(**ask, stream=True)]
        (streamed,) = [one for part in parts for one in part.delta.tool_calls or []]
        assert (streamed.index, streamed.function) == (0, type(streamed.function)(**call.function.model_dump()))
        assert parts[-1].finish_reason == "tool_calls" and not any(part.delta.content for part in parts)

        (plain,) = client.chat.completions.create(**ask, tool_choice="none").choices
        assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == (SAID, None, "stop")

        # The next turn is the template's own, with the arguments as an object.
        turn = [USER, choice.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "3 degrees"}]
        said = json.loads(json.dumps(turn))
        said[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Bern", "days": 2}
        expected = tokenizer.apply_chat_template(said, tools=TOOLS, add_generation_prompt=True)["input_ids"]
        assert server.post("/tokenize", messages=turn, tools=TOOLS)["tokens"] == expected
        assert client.chat.completions.create(**ask | {"messages": turn}, max_tokens=3).choices

        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ask, tool_choice={"type": "function", "function": {"name": "time"}})
        assert caught.value.param == "tool_choice"


BOOK = {"type": "object", "required": ["city", "nights", "room"], "additionalProperties": False, "properties": {
    "city": {"type": "string"}, "nights": {"type": "integer", "minimum": 1, "maximum": 30}, "room": {"type": "string", "enum": ["single", "double"]},
    "guests": {"type": "array", "items": {"enum": ["Ann", "Bob"]}, "maxItems": 2}, "late": {"type": ["boolean", "null"]}}}
FORCED = [{"type": "function", "function": {"name": "book", "parameters": BOOK}}, {"type": "function", "function": {"name": "time"}}]
MARKERS = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "glm45", "llama3_json", "deepseek_v3", "deepseek_v31"])
def test_a_call_that_has_to_be_made_is_made_and_valid(tmp_path, parser):
    folder = make_talker(tmp_path, MARKERS if parser.startswith("deepseek") else ["<tool_call>", "</tool_call>"])
    with serve(folder, "--tool-call-parser", parser) as server:
        tools = json.loads(json.dumps(FORCED))
        if parser in ("qwen3_coder", "glm45"):  # text without quotes: this model would never write its end
            tools[0]["function"]["parameters"]["properties"]["city"]["enum"] = ["Zürich", "New York"]
        ask = {"model": NAME, "messages": [USER], "tools": tools, "n": 8, "max_tokens": 1500, "skip_special_tokens": False}
        names = set()
        for tool_choice in ("required", {"type": "function", "function": {"name": "book"}}):
            for seed in range(2):
                choices = server.post("/v1/chat/completions", **ask, seed=seed, tool_choice=tool_choice)["choices"]
                for choice in choices:
                    if choice["finish_reason"] == "length":
                        continue
                    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"], choice
                    for call in choice["message"]["tool_calls"]:
                        names.add((str(tool_choice)[:8], call["function"]["name"]))
                        arguments = json.loads(call["function"]["arguments"])
                        jsonschema.validate(arguments, BOOK if call["function"]["name"] == "book" else {"maxProperties": 0})
        assert names == {("required", "book"), ("required", "time"), ("{'type':", "book")}
        one = server.post("/v1/chat/completions", **ask, seed=1, tool_choice="required", parallel_tool_calls=False)["choices"]
        assert {len(choice["message"]["tool_calls"]) for choice in one if choice["finish_reason"] != "length"} == {1}

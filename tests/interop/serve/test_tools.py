"""Calls of tools: what the families' own templates write is read back, and a model that calls a tool is heard by OpenAI's client."""
import concurrent.futures
import json
import random
import subprocess

import jsonschema
import openai
import pytest
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from served import NAME, make_talker, serve, teach
from support import DATA, FERRY

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "array"}}, "required": ["city"]}}}]
USER = {"role": "user", "content": "Is it cold?"}
CALLS = [{"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}} for i, (name, arguments) in enumerate([
    ("weather", {"city": "Zürich \"x\"; <b>", "days": 3}), ("weather", {"city": "Bern", "more": [1, None, {"a": "}"}]})])]
HERMES = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n"
          "{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}"
          "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
SAID = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'


@pytest.mark.parametrize("family, parser, count, arguments", [
    ("qwen2.5", "hermes", 2, dict), ("qwen3", "hermes", 2, dict), ("llama3.1", "llama3_json", 1, dict), ("deepseek_v3", "deepseek_v3", 2, str),
    ("deepseek_r1", "deepseek_v3", 2, str), ("kimi_k2", "kimi_k2", 2, dict), ("minimax_m2", "minimax_m2", 2, dict), ("seed_oss", "seed_oss", 2, dict),
    ("gpt_oss", "openai", 1, dict)])
def test_calls_are_read_as_the_template_writes_them(family, parser, count, arguments):
    template = (DATA / f"chat_templates/{family}.jinja").read_text()
    calls = json.loads(json.dumps(CALLS[:count]))
    if family == "kimi_k2":  # the id says the name
        for i, call in enumerate(calls):
            call["id"] = f"functions.{call['function']['name']}:{i}"
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
                  "<｜Assistant｜>", "<think>\n\n</think>", "]~b]ai\n", "[e~[\n", "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>",
                  "<seed:bos>assistant\n", "<seed:eos>"):
        said = said.replace(token, "")
    (answer,) = read_calls({"format": parser, "text": said, "tools": TOOLS})
    assert answer["content"].strip() == ""
    assert answer["calls"] == [call["function"] for call in CALLS[:count]]


def test_lists_and_objects_may_be_pythons():
    """The template of Seed-OSS writes those by str(); ast.literal_eval() reads them, in vLLM, too."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "x": {"type": ["array", "object"]}, "s": {"type": "string"}}}}}]
    draw = random.Random(4)

    def value(depth):
        kind = draw.randrange(8 if depth < 3 else 5)
        if kind < 5:
            return [None, draw.random() < .5, draw.randint(-10**25, 10**25) // 10**draw.choice((0, 13)), draw.uniform(-1, 1) * 10.0**draw.randint(-9, 9),
                    "".join(draw.choice("ab'\"\\\n\t{}[],: é漢👍\x07") for _ in range(draw.randrange(9)))][kind]
        items = [value(depth + 1) for _ in range(draw.randrange(4))]
        return items if kind < 7 else {f"{i}'": item for i, item in enumerate(items)}

    values = [[value(0) for _ in range(3)] if i % 2 else {"a": value(0)} for i in range(300)]
    for form in ("seed_oss", "qwen3_coder"):
        ask = [{"format": form, "tools": tools, "text": f"<{'seed:' if form == 'seed_oss' else ''}tool_call>\n<function=f>\n<parameter=x>{one}</parameter>\n"
                f"<parameter=s>{one}</parameter>\n</function>\n</{'seed:' if form == 'seed_oss' else ''}tool_call>"} for one in values]
        for one, answer in zip(values, read_calls(*ask), strict=True):
            assert answer["calls"] == [{"name": "f", "arguments": {"x": one, "s": str(one)}}]


def read_calls(*asked):
    lines = "".join(json.dumps(one) + "\n" for one in asked)
    done = subprocess.run([FERRY.parent.parent / "tests/tool_call_tool"], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return list(map(json.loads, done.stdout.splitlines()))


def test_channels_are_read_as_openais_package_reads_them():
    cases = json.loads((DATA / "harmony/cases.json").read_text())["cases"]
    answers = read_calls(*({"format": "openai", "text": case["text"], "tools": TOOLS} for case in cases))
    for case, answer in zip(cases, answers, strict=True):
        messages = case["messages"]
        texts = {name: "\n".join(one["content"] for one in messages if not one["recipient"] and one["channel"] in channels and one["content"])
                 for name, channels in (("content", ("final", "commentary")), ("reasoning", ("analysis",)))}
        calls = [{"name": one["recipient"].removeprefix("functions."), "arguments": json.loads(one["content"])} for one in messages if one["recipient"]]
        assert answer == {**texts, "calls": calls}, case
    assert sum(bool(answer["calls"]) for answer in answers) > 5


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    return teach(make_talker(tmp_path_factory.mktemp("caller")), HERMES, SAID + "<|end|>", [USER], TOOLS)


def test_gpt_oss_reasons_and_calls_on_its_channels(tmp_path):
    folder = make_talker(tmp_path, CHANNEL_MARKERS, eos_token="<|return|>")
    said = ("<|channel|>analysis<|message|>Is it?<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            '{"city": "Bern", "days": 2}<|call|>')
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "generation_config.json").read_text())
    eos = {"eos_token_id": tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])}
    teach(folder, (DATA / "chat_templates/gpt_oss.jinja").read_text(), said, [USER], TOOLS)
    (folder / "generation_config.json").write_text(json.dumps(config | eos))
    with serve(folder) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        ask = {"model": NAME, "messages": [USER], "tools": TOOLS, "temperature": 0}
        (choice,) = client.chat.completions.create(**ask).choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, choice.message.reasoning_content) == ("tool_calls", None, "Is it?")
        assert choice.message.reasoning == "Is it?"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern", "days": 2})

        parts = [part.choices[0] for part in client.chat.completions.create(**ask, stream=True)]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(getattr(part.delta, name, None) or "" for part in parts) == "Is it?"
        assert sum("reasoning_content" in part.delta.model_dump() for part in parts) > 1  # as it is written
        assert [one.function.name for part in parts for one in part.delta.tool_calls or []] == ["weather"]
        assert not any(part.delta.content for part in parts)

        assert not hasattr(client.chat.completions.create(**ask, extra_body={"include_reasoning": False}).choices[0].message, "reasoning")

        # A format is that of the channel final.
        schema = {"type": "object", "properties": {"cold": {"type": "boolean"}}, "required": ["cold"]}
        (held,) = client.chat.completions.create(**ask, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}).choices
        assert (held.message.reasoning, list(json.loads(held.message.content)), held.finish_reason) == ("Is it?", ["cold"], "stop")

        # The next turn has the reasoning where the template wants it.
        turn = [USER, choice.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "3 degrees"}]
        said = json.loads(json.dumps(turn))
        said[1] |= {"thinking": "Is it?"}
        said[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Bern", "days": 2}
        expected = tokenizer.apply_chat_template(said, chat_template=(folder / "chat_template.jinja").read_text(), tools=TOOLS, add_generation_prompt=True)
        for name in ("reasoning", "reasoning_content"):
            given = json.loads(json.dumps(turn))
            del given[1]["reasoning"], given[1]["reasoning_content"]
            given[1][name] = "Is it?"
            assert server.post("/tokenize", messages=given, tools=TOOLS)["tokens"] == expected["input_ids"]


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

        wide = json.loads(json.dumps(TOOLS))  # integers keep their digits, as Python's do
        wide[0]["function"]["parameters"]["properties"]["days"]["maximum"] = 2**64
        said[1]["tool_calls"][0]["function"]["arguments"] = {"days": -10**30}
        turn[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"days": -10**30})
        expected = tokenizer.apply_chat_template(said, tools=wide, add_generation_prompt=True)["input_ids"]
        assert server.post("/tokenize", messages=turn, tools=wide)["tokens"] == expected
        assert client.chat.completions.create(**ask | {"messages": turn, "tools": wide}, max_tokens=3).choices

        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**ask, tool_choice={"type": "function", "function": {"name": "time"}})
        assert caught.value.param == "tool_choice"


# A short city: this model would write a string for thousands of tokens.
BOOK = {"type": "object", "required": ["city", "nights", "room"], "additionalProperties": False, "properties": {
    "city": {"type": "string", "maxLength": 8}, "nights": {"type": "integer", "minimum": 1, "maximum": 30},
    "room": {"type": "string", "enum": ["single", "double"]},
    "guests": {"type": "array", "items": {"enum": ["Ann", "Bob"]}, "maxItems": 2}, "late": {"type": ["boolean", "null"]}}}
FORCED = [{"type": "function", "function": {"name": "book", "parameters": BOOK}}, {"type": "function", "function": {"name": "time"}}]
CHANNEL_MARKERS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]
MARKERS = {"deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
           "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"],
           "deepseek_v32": ["｜DSML｜"], "deepseek_v4": ["｜DSML｜"], "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>"], "openai": CHANNEL_MARKERS}
MARKERS["deepseek_v31"] = MARKERS["deepseek_v3"]


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "glm45", "llama3_json", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2",
                                    "minimax_m2", "seed_oss", "openai"])
def test_a_call_that_has_to_be_made_is_made_and_valid(tmp_path, parser):
    eos_token = "<|return|>" if parser == "openai" else "<|end|>"
    folder = make_talker(tmp_path, MARKERS.get(parser, ["<tool_call>", "</tool_call>"]), eos_token)
    with serve(folder, "--tool-call-parser", parser) as server:
        tools = json.loads(json.dumps(FORCED))
        if parser in ("qwen3_coder", "glm45", "deepseek_v32", "deepseek_v4", "minimax_m2", "seed_oss"):  # no quotes: this model would never write its end
            tools[0]["function"]["parameters"]["properties"]["city"] = {"type": "string", "enum": ["Zürich", "New York"]}
        ask = {"model": NAME, "messages": [USER], "tools": tools, "n": 8, "max_tokens": 400}
        forced = {"tool_choice": {"type": "function", "function": {"name": "book"}}}
        asked = [{"seed": 0, "tool_choice": "required"}, {"seed": 1, "tool_choice": "required"}, {"seed": 0} | forced,
                 {"seed": 1, "tool_choice": "required", "parallel_tool_calls": False}]
        with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:  # steps of the model are shared
            answers = list(pool.map(lambda more: server.post("/v1/chat/completions", **ask, **more)["choices"], asked))
        names = set()
        for more, choices in zip(asked, answers, strict=True):
            for choice in choices:
                if choice["finish_reason"] == "length":
                    continue
                assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"], choice
                for call in choice["message"]["tool_calls"]:
                    names.add((str(more["tool_choice"])[:8], call["function"]["name"]))
                    arguments = json.loads(call["function"]["arguments"])
                    jsonschema.validate(arguments, BOOK if call["function"]["name"] == "book" else {"maxProperties": 0})
        assert names == {("required", "book"), ("required", "time"), ("{'type':", "book")}
        assert {len(choice["message"]["tool_calls"]) for choice in answers[-1] if choice["finish_reason"] != "length"} == {1}


@pytest.mark.parametrize("skips", [None, True, False])
@pytest.mark.parametrize("special", [True, False])
def test_markers_of_a_call_that_are_tokens_or_special_tokens_are_read_alike(tmp_path, special, skips):
    markers = ["<tool_call>", "</tool_call>"]
    folder = make_talker(tmp_path, markers)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = special or token["content"] not in markers
    file.write_text(json.dumps(tokenizer))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    with serve(folder, "--tool-call-parser", "hermes") as server:
        ask = {"model": NAME, "messages": [USER], "tools": FORCED, "tool_choice": {"type": "function", "function": {"name": "time"}}, "seed": 3, "max_tokens": 200,
               "parallel_tool_calls": False, "return_token_ids": True} | ({} if skips is None else {"skip_special_tokens": skips})
        (choice,) = server.post("/v1/chat/completions", **ask)["choices"]
        assert [token for token in choice["token_ids"] if token in ids.values()] == [ids[marker] for marker in [*markers, "<|end|>"]]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"], choice["message"]["content"]) == ({"name": "time", "arguments": "{}"}, None)
        body = server.ask("POST", "/v1/chat/completions", ask | {"stream": True})[2].decode()
        parts = [json.loads(line[6:])["choices"][0] for line in body.splitlines() if line.startswith("data: {")]
        (streamed,) = [one for part in parts for one in part["delta"].get("tool_calls", [])]
        assert streamed["function"] == call["function"] and not any(part["delta"].get("content") for part in parts)
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "tool_calls"

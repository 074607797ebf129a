"""Answers of a model that knows nothing are valid by the schemas that they are held to: jsonschema is the judge."""
import json
import random
import re
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest

from served import NAME, serve

CHAT = [{"role": "user", "content": "Go on."}]


def random_schema(draw, depth=0):
    """A schema of all that is supported, whose answers have an end."""
    kinds = ["string", "integer", "number", "multiple", "enum", "const", "pattern", "format", "null", "set"]
    kinds += ["object", "array", "anyOf", "map", "names", "tuple"] * (depth < 3)
    kind = draw.choice(kinds)

    def inner():
        return random_schema(draw, depth + 1)

    if kind == "string":
        low = draw.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 12)}
    if kind == "integer":
        low = draw.randint(-2000, 2000)
        return {"type": draw.choice(["integer", ["integer", "null"]]), draw.choice(["minimum", "exclusiveMinimum"]): low,
                draw.choice(["maximum", "exclusiveMaximum"]): low + draw.randint(3, 5000)}
    if kind == "number":
        low = round(draw.uniform(-30, 30), draw.randint(0, 3))
        return {"type": "number", "minimum": low, "exclusiveMaximum": round(low + draw.uniform(0.1, 100), 3)}
    if kind == "multiple":
        low = draw.choice([draw.randint(-10**4, 10**4), -2**63, 2**63 - 1 - 10**6])
        return {"type": draw.choice(["integer", "number"]), "multipleOf": draw.choice([1, 2, 7, 25, 100, 3.0]), "minimum": low, "maximum": low + 10**6}
    if kind == "set":
        low = draw.randint(0, 2)
        return {"type": "array", "items": {"enum": draw.sample([1, "1", True, None, [2], {"a": 1}, 2.5, ""], draw.randint(3, 8))}, "uniqueItems": True,
                "minItems": low, "maxItems": low + draw.randint(0, 3)}
    if kind == "names":
        names = draw.choice([{"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": inner()}, {"patternProperties": {"^[a-z]_[0-9]$": inner()}},
                             {"patternProperties": {"^[a-z]$": inner()}, "additionalProperties": False}])
        return {"type": "object", "minProperties": draw.randint(0, 1), "maxProperties": 3} | names
    if kind == "enum":
        return {"enum": draw.sample(["a", "b\"", "é", 1, 2.5, None, True, {"x": [1]}, ["y"]], 4)}
    if kind == "const":
        return {"const": draw.choice(["fixed", 17, {"k": None}])}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice([r"^[A-Z]{2}\d{3}$", r"^(ab|c)+\s?\w{1,4}$", r"^[^a-z\"]{1,5}$", "^x?y{2,}z$", r"^\"\\n\\[ab]$"])}
    if kind == "format":
        return {"type": "string", "format": draw.choice(["date", "date-time", "time", "uuid", "ipv4", "ipv6", "email"])}
    if kind == "null":
        return {"type": draw.choice(["null", "boolean"])}
    if kind == "array":
        low = draw.randint(0, 2)
        return {"type": "array", "items": inner(), "minItems": low, "maxItems": low + draw.randint(0, 2)}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": draw.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [inner(), inner()]}
    if kind == "map":
        return {"type": "object", "additionalProperties": inner(), "maxProperties": 2, "minProperties": draw.randint(0, 1)}
    names = draw.sample(["name", "na", "id", "größe", "a\"b", "list", "x y"], draw.randint(1, 4))
    schema = {"type": "object", "properties": {name: inner() for name in names}, "required": draw.sample(names, draw.randint(0, len(names)))}
    schema["additionalProperties"] = draw.choice([False, False, {"type": "integer", "minimum": 0, "maximum": 9}])
    if draw.random() < 0.5:
        low = draw.randint(0, len(names))
        schema |= {"minProperties": low, "maxProperties": max(low, len(schema["required"])) + draw.randint(0, 2)}
    return schema


def schemas():
    draw = random.Random(5)
    made = [random_schema(draw) for _ in range(97)]
    tree = {"type": "object", "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 9}, "left": {"$ref": "#/$defs/leaf"}},
            "required": ["value", "left"], "additionalProperties": False}
    made.append({"$defs": {"leaf": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}, "tree": tree}, "$ref": "#/$defs/tree"})
    made.append({"allOf": [{"properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}, {"properties": {"a": {"maximum": 40}}}]})
    made.append({"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"], "additionalProperties": False} for kind in "xy"]})
    return made


def test_every_answer_is_valid(server):
    complete = 0
    for number, schema in enumerate(schemas()):
        jsonschema.Draft202012Validator.check_schema(schema)
        answer = server.post("/v1/chat/completions", model=NAME, messages=CHAT, temperature=1, seed=number, n=2, max_tokens=700, response_format={
            "type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}})
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                complete += 1
                jsonschema.validate(json.loads(choice["message"]["content"]), schema, cls=jsonschema.Draft202012Validator)
    assert complete > 180


def test_an_answer_is_a_function_of_its_seed_whoever_else_asks(server):
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}, "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
              "required": ["a", "b"]}
    ask = {"model": NAME, "messages": CHAT, "seed": 3, "logprobs": True, "max_tokens": 200,
           "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    alone = server.post("/v1/chat/completions", **ask)["choices"]
    both = server.post("/v1/chat/completions", **ask | {"n": 2})["choices"]
    assert both[0] == alone[0]
    assert both[1]["message"] != both[0]["message"]
    free = server.post("/v1/chat/completions", **ask | {"response_format": {"type": "text"}})["choices"][0]
    # Log-probabilities are the model's, with or without a format: those of the same first token agree.
    first = alone[0]["logprobs"]["content"][0]
    top = server.post("/v1/chat/completions", **ask | {"response_format": None, "max_tokens": 1, "top_logprobs": 20})["choices"][0]
    known = {one["token"]: one["logprob"] for one in top["logprobs"]["content"][0]["top_logprobs"]}
    assert first["token"] == "{" and known.get("{", first["logprob"]) == first["logprob"]
    assert free["message"]["content"] != alone[0]["message"]["content"]


def test_json_object_is_any_object(server):
    for seed in range(5):
        (choice,) = server.post("/v1/chat/completions", model=NAME, messages=CHAT, seed=seed, max_tokens=1500, temperature=0.7,
                                response_format={"type": "json_object"})["choices"]
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("fields, check", [
    ({"structured_outputs": {"choice": ["positive", "negative", "größer"]}}, lambda text: text in ("positive", "negative", "größer")),
    ({"guided_choice": ["a", "ab"]}, lambda text: text in ("a", "ab")),
    ({"guided_regex": r"\d{3}-[a-f]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
    ({"structured_outputs": {"regex": "(x|y){4}"}}, lambda text: len(text) == 4 and set(text) <= set("xy")),
    ({"guided_json": json.dumps({"type": "integer", "minimum": 7, "maximum": 9})}, lambda text: int(text) in (7, 8, 9)),
    ({"structured_outputs": {"json": {"type": "boolean"}}}, lambda text: text in ("true", "false"))])
def test_vllms_fields_constrain_completions(server, fields, check):
    for choice in server.complete("Say", seed=1, n=4, max_tokens=50, **fields)["choices"]:
        assert choice["finish_reason"] == "stop" and check(choice["text"]), choice


class Guest(pydantic.BaseModel):
    name: Literal["Ann", "Bob"]
    age: int = pydantic.Field(ge=0, le=120)


class Booking(pydantic.BaseModel):
    room: Literal["single", "double"]
    guests: list[Guest] = pydantic.Field(max_length=2)
    late: bool | None


def test_the_client_parses_answers_as_classes(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.chat.completions.parse(model=NAME, messages=CHAT, response_format=Booking, temperature=1, seed=2, n=16, max_tokens=300)
    parsed = [choice.message.parsed for choice in found.choices]
    assert all(isinstance(one, Booking) for one in parsed) and any(one.guests for one in parsed), parsed
    assert [json.loads(choice.message.content) for choice in found.choices] == [one.model_dump() for one in parsed]


@pytest.mark.parametrize("schema, keyword", [
    ({"type": "number", "multipleOf": 0.1}, "multipleOf"), ({"not": {"type": "null"}}, "not"), ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "patternProperties": {"^a": {}}, "required": ["b"]}, "patternProperties"), ({"if": {}, "then": {}}, "if"),
    ({"enum": [1, 10**20]}, "enum"), ({"const": {"a": [-2**63 - 1]}}, "const"), ({"maximum": 2**64}, "maximum"), ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "string", "pattern": "(?=a)b"}, "pattern"), ({"type": "string", "format": "iri"}, "format"),
    ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf"), ({"$ref": "https://example.org/x"}, "$ref")])
def test_what_is_not_supported_is_refused_by_name(server, schema, keyword):
    with pytest.raises(openai.BadRequestError) as caught:
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).chat.completions.create(
            model=NAME, messages=CHAT, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert f"{keyword} at #" in str(caught.value) and caught.value.param == "response_format"


def test_an_answer_that_ignores_the_end_of_sequence_ends_whole_with_its_grammar(server):
    choice, = server.complete("Go on.", ignore_eos=True, max_tokens=50, structured_outputs={"regex": "[0-9]{5}-[a-f]{3}"})["choices"]
    assert re.fullmatch("[0-9]{5}-[a-f]{3}", choice["text"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


CALL = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
JSON = {"response_format": {"type": "json_object"}}
CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}


def test_what_would_cut_an_answer_or_leave_it_no_token_is_refused_beside_a_format(talker):
    fields = {"bad_words": ["{"], "allowed_token_ids": [1, 2], "min_tokens": 3, "stop": ["a", ":"], "stop_token_ids": [1], "include_stop_str_in_output": True}
    with serve(talker, "--tool-call-parser", "hermes") as server:
        for form in JSON, CHOICE, CALL:
            for field, value in fields.items():
                error = server.post("/v1/chat/completions", 400, model=NAME, messages=CHAT, **form, **{field: value})["error"]
                assert error["param"] == field and "is not supported beside" in error["message"], error


def test_biases_and_stop_tokens_that_no_format_needs_leave_answers_valid(server):
    for bias in ({"0": 100}, {str(token): -100 for token in range(1, 200)}):
        choice, = server.post("/v1/chat/completions", model=NAME, messages=CHAT, seed=4, max_tokens=500, logit_bias=bias, stop_token_ids=[0],
                              response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "items": {"enum": [1, "a"]}, "maxItems": 3}}})["choices"]
        assert choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) <= {1, "a"}


def test_a_match_of_a_pattern_ends_before_a_stop_string(server):
    choice, = server.complete("Say", seed=1, max_tokens=50, stop=["\n"], structured_outputs={"regex": r"[a-c]{4}\n"})["choices"]
    assert re.fullmatch("[a-c]{4}", choice["text"]) and (choice["finish_reason"], choice["stop_reason"]) == ("stop", "\n")


def test_an_answer_that_no_token_continues_ends_as_an_error(server):
    choice, = server.complete("Say", max_tokens=50, structured_outputs={"choice": ["ab<|end|>c"]})["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "error")


def test_two_constraints_are_refused(server):
    error = server.complete("x", 400, guided_choice=["a"], guided_regex="b")["error"]
    assert error["param"] == "guided_choice" and "guided_regex" in error["message"]

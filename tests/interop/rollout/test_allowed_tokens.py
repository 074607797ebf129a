"""Sets of tokens that formats allow, held against xgrammar's along texts that fit."""
import json
import re
import subprocess

import pytest
import transformers
import xgrammar
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from support import FERRY, ROOT

VOCAB = 1000
CASES = [
    ({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
      "required": ["name", "age"], "additionalProperties": False},
     ['{"name": "Zürich \\n x", "age": 12, "tags": ["a", "bc"]}', '{"name":"","age":-7}', '{ "name": "\\u00e9", "age": 0 }']),
    ({"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "boolean"}, "c": {"type": "null"}}, "additionalProperties": False},
     ['{"a": -1.5e+3, "b": true, "c": null}', '{"b": false}', "{}"]),
    ({"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 1, "maxItems": 3}, ['["red", 3, null]', '["green"]']),
    ({"anyOf": [{"type": "object", "properties": {"kind": {"const": "x"}}, "required": ["kind"], "additionalProperties": False}, {"type": "integer"}]},
     ['{"kind": "x"}', "41"]),
    ({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                                                 "required": ["next"], "additionalProperties": False}}},
     ['{"next": {"next": null}}']),
]
REGEXES = [("(Yes|No), [a-z]{2,5}[.!]", "No, abc."), ("[0-9]{3}-[0-9]{2}", "123-45")]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator([p.read_text() for p in sorted(ROOT.glob("docs/*.md"))], trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.save_pretrained(folder)
    return folder, fast, xgrammar.TokenizerInfo.from_huggingface(fast, vocab_size=VOCAB, stop_token_ids=[0])


def ours(folder, jobs):
    lines = "".join(json.dumps({"format": form, "tokens": ids}) + "\n" for form, ids in jobs)
    done = subprocess.run([FERRY.parent.parent / "tests/grammar_tool", folder, str(VOCAB), "0"], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line)["allowed"] for line in done.stdout.splitlines()]


def theirs(compiled, ids):
    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = xgrammar.allocate_token_bitmask(1, VOCAB)
    sets = []
    for token in [*ids, None]:
        bitmask.fill_(-1)
        matcher.fill_next_token_bitmask(bitmask)
        words = [word & 0xFFFFFFFF for word in bitmask[0].tolist()]
        sets.append([i for i in range(VOCAB) if words[i // 32] >> i % 32 & 1])
        if token is not None:
            assert matcher.accept_token(token), token
    return sets


def test_allowed_tokens_are_xgrammars(vocabulary):
    folder, tokenizer, info = vocabulary
    compiler = xgrammar.GrammarCompiler(info)
    jobs, expected, names = [], [], []
    for schema, texts in CASES:
        compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=True)
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            jobs.append(({"type": "json_schema", "json_schema": schema}, ids))
            expected.append(theirs(compiled, ids))
            names.append(text)
    for pattern, text in REGEXES:
        ids = tokenizer(text)["input_ids"]
        jobs.append(({"type": "regex", "pattern": pattern}, ids))
        expected.append(theirs(compiler.compile_regex(pattern), ids))
        names.append(text)
    for name, job, mine, other in zip(names, jobs, ours(folder, jobs), expected, strict=True):
        for at, (one, two) in enumerate(zip(mine, other, strict=True)):
            begun = tokenizer.decode(job[1][:at])
            # xgrammar has no bounds of white space and digits, and it has halves of surrogate pairs.
            differ = [tokenizer.decode([token]) for token in set(one) ^ set(two)]
            beyond = re.compile(r"\s{25}|\\u[dD][89a-fA-F]|[eE][+-]?\d{3}|\d{19}")
            assert all(beyond.search(begun + text) for text in differ), (name, begun, differ)

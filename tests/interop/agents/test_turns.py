"""The tokens that a session appends behind an answer, beside transformers: with those before, the tokens of the whole conversation."""
import json
import subprocess

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ranks import TORCH_PROGRAM
from support import DATA, FERRY

pytestmark = pytest.mark.skipif(not TORCH_PROGRAM.exists(), reason="this build has no models: configure it with -Dtorch_root")

ENDS = {"llama3": "<|eot_id|>", "llama3.1": "<|eot_id|>", "qwen2": "<|im_end|>", "qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>",
        "moonlight": "<|im_end|>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>", "llama2": "</s>", "mistral": "</s>", "mixtral": "</s>",
        "deepseek_v2": "<｜end▁of▁sentence｜>", "deepseek_v3": "<｜end▁of▁sentence｜>", "deepseek_r1": "<｜end▁of▁sentence｜>"}
WITH_TOOLS = {"llama3.1", "qwen2.5", "qwen3", "deepseek_v3"}
# The token that ends an answer before a user's message, and before a tool's. That of GPT-OSS's messages ends no text: the model draws <|return|> there.
FORMATS = {"gpt_oss": ("<|end|>", "<|call|>"), "kimi_k2": ("<|im_end|>",) * 2, "minimax_m2": ("[e~[",) * 2, "seed_oss": ("<seed:eos>",) * 2,
           "glm4_5": ("<|user|>", "<|observation|>")}
OTHERS = {"gpt_oss": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>"], "kimi_k2": ["<|im_user|>", "<|im_assistant|>", "<|im_system|>"],
          "minimax_m2": ["]~b]"], "seed_oss": ["<seed:bos>"], "glm4_5": ["<|endoftext|>", "<|assistant|>"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "where"}}, "required": ["city"]}}}
USER = {"role": "user", "content": "Hi <there>? é漢👍 "}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00100", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}]}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00100", "content": "{\"t\": 21.5} "}
SAID, MORE = {"role": "assistant", "content": "Hello there."}, {"role": "user", "content": "And  now? "}
CONVERSATIONS = [([USER, SAID, MORE], 1), ([USER, SAID, MORE, SAID, MORE], 1)]
TOOL_CONVERSATIONS = [([USER, CALL, RESULT], 1), ([USER, CALL, RESULT, CALL, RESULT], 1)]
AFTER_TOOLS = [([USER, CALL, RESULT, SAID, MORE], 1), ([USER, CALL, RESULT, SAID, MORE, SAID, MORE, MORE], 2)]


def write_files(folder, name, ends=None, others=()):
    """The template with a tokenizer of bytes, or of characters that mark the beginning of a text as Llama 2's does."""
    if name in ("llama2", "mistral", "mixtral"):
        bytes_ = {f"<0x{i:02X}>": i + 1 for i in range(256)}
        tokenizer = Tokenizer(models.BPE(vocab={"<unk>": 0, **bytes_, "▁": 257, **{chr(c): 258 + c - 33 for c in range(33, 127)}}, merges=[],
                                         unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    ends = ends or [ENDS[name]]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*ends, "<s>", *others)])
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(end) for end in ends]}))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text((DATA / f"chat_templates/{name}.jinja").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": ends[0], "tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture(scope="module")
def tool():
    process = subprocess.Popen([FERRY.parent.parent / "tests/turn_tool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.stdin.close()
    assert process.wait(timeout=30) == 0


def turn(tool, folder, messages, count, tools=None):
    tool.stdin.write(json.dumps({"folder": str(folder), "tools": tools, "messages": messages, "count": count}) + "\n")
    tool.stdin.flush()
    return json.loads(tool.stdout.readline())


@pytest.mark.parametrize("name", ENDS)
def test_the_prefix_stays_and_the_whole_is_the_template_s(name, tool, tmp_path):
    import transformers
    folder = tmp_path / name
    write_files(folder, name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    cases = [(*case, None) for case in CONVERSATIONS] + [(*case, [TOOL]) for case in TOOL_CONVERSATIONS if name in WITH_TOOLS]
    for messages, count, tools in cases:
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        whole = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
        ids = turn(tool, folder, messages, count, tools)["turn"]
        assert ids and whole[-len(ids):] == ids
        assert whole[-len(ids) - 1] == end and end not in ids[:1]
        said = tokenizer.decode(ids).replace(" ", "")
        assert ("21.5" if tools else "now?") in said and "Hello" not in said and "Bern" not in said


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_calls_go_on_behind_the_model_s_own_tokens(name, tool, tmp_path):
    """The end that the model has drawn stays its own; what follows is the template's, and none of the answer is in it."""
    import transformers
    folder = tmp_path / name
    ends = ["<|return|>", "<|call|>"] if name == "gpt_oss" else sorted(set(FORMATS[name]))
    write_files(folder, name, ends, OTHERS[name])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for cases, tools, end in ((CONVERSATIONS, None, FORMATS[name][0]), (AFTER_TOOLS, [TOOL], FORMATS[name][0]), (TOOL_CONVERSATIONS, [TOOL], FORMATS[name][1])):
        for messages, count in cases:
            answer = turn(tool, folder, messages, count, tools)
            text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            whole = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
            ids = answer["turn"]
            assert whole[-len(ids):] == ids and whole[-len(ids) - 1] == tokenizer.convert_tokens_to_ids(end)
            said = tokenizer.decode(ids)
            assert ("21.5" if cases is TOOL_CONVERSATIONS else "now?") in said and "Hello" not in said and "Bern" not in said and said.count(end) <= count


def test_a_template_without_ends_is_refused(tool, tmp_path):
    write_files(tmp_path / "qwen2", "qwen2")
    (tmp_path / "qwen2/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "no token that ends an answer" in turn(tool, tmp_path / "qwen2", *CONVERSATIONS[0])["error"]

"""A tiktoken.model, as Kimi's checkpoints have it, beside tiktoken itself, transformers' conversion of such files, and a class that transformers loads."""
import base64
import json
import os
import random
import shutil

import pytest
import tiktoken
import torch
import transformers
from tiktoken._educational import bpe_train
from transformers.convert_slow_tokenizer import TikTokenConverter

from support import ROOT, refuse, run_ok
from tokenizer_families import KIMI, SCRIPTS, random_texts

CHAT = "{% for m in messages %}<|im_{{ m['role'] }}|>{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
RESERVED = 256
# Names by their places behind the ranks; the tokens of tools and of thoughts are no special ones.
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>", 17: "<|im_middle|>",
         11: "<|tool_calls_section_begin|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]"}
# Moonshot's class by its rules, of a file with the pattern of these tests.
CLASS = '''import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    pat_str = "|".join([PATTERN])

    def __init__(self, vocab_file, additional_special_tokens=None, added_tokens_decoder=None, **named):
        ranks = load_tiktoken_bpe(vocab_file)
        words = {i: token.content for i, token in added_tokens_decoder.items()}
        special = {words.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + 256)}
        self.model = tiktoken.Encoding("kimi", pat_str=self.pat_str, mergeable_ranks=ranks, special_tokens=special)
        self.character = bytes_to_unicode()
        self.byte = {character: byte for byte, character in self.character.items()}
        self.words = ["".join(self.character[b] for b in self.model.decode_single_token_bytes(i)) for i in range(self.model.n_vocab)]
        self.ids = {word: i for i, word in enumerate(self.words)}
        if additional_special_tokens is None:
            additional_special_tokens = ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]
        super().__init__(additional_special_tokens=additional_special_tokens, added_tokens_decoder=added_tokens_decoder, **named)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return self.ids

    def _tokenize(self, text, **named):
        return [self.words[i] for i in self.model.encode(text, allowed_special="all")]

    def _convert_token_to_id(self, token):
        return self.ids[token]

    def _convert_id_to_token(self, index):
        return self.words[index]

    def convert_tokens_to_string(self, tokens):
        return bytes(self.byte[c] for c in "".join(tokens)).decode("utf-8", "replace")
'''


@pytest.fixture(scope="module", autouse=True)
def no_cache():
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # else a file that changes is read as it was


def write(folder, ranks, **config):
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    added = {str(len(ranks) + i): {"content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
             for i, name in NAMES.items()}
    config = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
              "tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
              "chat_template": CHAT, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    parts = ",\n        ".join(f'r"""{part}"""' for part in KIMI.replace("|[^\\r", "\0[^\\r").replace("|\\p", "\0\\p").replace("| ?", "\0 ?")
                               .replace("|\\s", "\0\\s").split("\0"))
    (folder / "tokenization_kimi.py").write_text(CLASS.replace("PATTERN", parts))
    return folder


def encoding_of(ranks):
    special = {NAMES.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(RESERVED)}
    return tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture(scope="module")
def ranks():
    """Merges that tiktoken's own trainer learns."""
    texts = SCRIPTS + (ROOT / "docs/style.md").read_text()[:4000]
    return bpe_train(data=texts, vocab_size=700, pat_str="(?V1)" + KIMI, visualise=None)  # by the package regex, whose && is of version 1


@pytest.fixture(scope="module")
def kimi(ranks, tmp_path_factory):
    return write(tmp_path_factory.mktemp("kimi") / "kimi", ranks)


def texts_of(ranks):
    names = list(NAMES.values()) + [f"<|reserved_token_{len(ranks) + 5}|>", f"<|reserved_token_{len(ranks) + 999}|>", "<|im_", "[PAD", "\x1c\x1c a"]
    words = [" ", "中文々〇⺀ー", "あい中う", "HTMLParser's", "it'ſ", "12345"]
    generator = random.Random(11)
    mixed = ["".join(generator.choice([generator.choice(names), text[:9], *words]) for _ in range(8)) for text in random_texts(300, seed=12)]
    long = ["a" * 5000, "的" * 1000, "=" * 999, " " * 900, "".join(generator.choices("eratnis", k=20_000))]
    return [SCRIPTS, *SCRIPTS.splitlines(), "", " ", "\n", *names, *random_texts(1500, seed=10), *mixed, *long]


def test_ids_and_texts_are_those_of_tiktoken(tool, kimi, ranks):
    theirs, texts = encoding_of(ranks), texts_of(ranks)
    ours = tool(op="encode", tokenizer=str(kimi), texts=texts)
    for text, ids in zip(texts, ours["ids"], strict=True):
        assert ids == theirs.encode(text, allowed_special="all"), text
    assert ours["plain"] == ours["ids"]
    generator = random.Random(13)
    wild = [[generator.randrange(theirs.n_vocab) for _ in range(generator.randrange(40))] for _ in range(500)]
    decoded = tool(op="decode", tokenizer=str(kimi), ids=ours["ids"] + wild)
    for ids, text in zip(ours["ids"] + wild, decoded["kept"], strict=True):
        assert text == theirs.decode(ids), ids
    assert ["".join(parts) for parts in decoded["streamed"]] == decoded["texts"]


def test_ids_are_those_that_transformers_converts(tool, kimi, ranks):
    special = list(encoding_of(ranks)._special_tokens)
    theirs = TikTokenConverter(vocab_file=str(kimi / "tiktoken.model"), pattern=KIMI, extra_special_tokens=special).converted()
    texts = texts_of(ranks)
    ours = tool(op="encode", tokenizer=str(kimi), texts=texts)["ids"]
    assert ours == [e.ids for e in theirs.encode_batch_fast(texts)]


def test_ranks_in_any_order_merge_as_tiktoken_merges_them(tool, work):
    """Tokens whose halves have higher ranks, or are no tokens: no trainer makes them, and equal ranks of a token's many pairs meet."""
    generator = random.Random(14)
    words = [bytes(generator.choices(b"ab", k=k)) for k in range(2, 8) for _ in range(12)]
    tokens = list(dict.fromkeys([bytes([b]) for b in range(256)] + words))
    generator.shuffle(tokens)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    texts = ["".join(generator.choices("ab", k=generator.randrange(1, 160))) for _ in range(2000)]
    ours = tool(op="encode", tokenizer=str(write(work / "wild", ranks)), texts=texts)["ids"]
    theirs = encoding_of(ranks)
    for text, ids in zip(texts, ours, strict=True):
        assert ids == theirs.encode(text), text


@pytest.mark.parametrize("config", [{}, {"additional_special_tokens": ["<|im_end|>", "<|im_user|>"]}, {"pad_token": "[EOS]"},
                                    {"extra_special_tokens": ["<think>"], "additional_special_tokens": []}], ids=str)
def test_special_tokens_are_those_of_the_class(tool, ranks, config, work):
    """Tokens that have a role and tokens of the lists are skipped, whatever their entries say."""
    folder = write(work / "kimi", ranks, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    texts = ["[BOS]<|im_user|>x<|im_end|><think> y</think>[PAD][EOS]<|tool_calls_section_begin|>" + f"<|reserved_token_{len(ranks) + 7}|>"]
    ids = tool(op="encode", tokenizer=str(folder), texts=texts)["ids"]
    assert ids == theirs(texts)["input_ids"]
    decoded = tool(op="decode", tokenizer=str(folder), ids=ids)
    assert decoded["kept"] == texts and decoded["texts"] == theirs.batch_decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": "Hello 世界"}]
    text = tool(op="render", template=CHAT, chats=[{"messages": chat, "add_generation_prompt": True, "variables": {}}])["texts"][0]
    assert tool(op="encode", tokenizer=str(folder), texts=[text])["ids"][0] == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]


def break_file(folder, case):
    path = folder / "tiktoken.model"
    lines, config = path.read_text().splitlines(), json.loads((folder / "tokenizer_config.json").read_text())
    match case:
        case "base64":
            lines[4] = "a*b 4"
        case "no rank":
            lines[4] = lines[4].split()[0]
        case "words":
            lines[4] += " 7"
        case "missing":
            lines[4] = lines[4].split()[0] + f" {len(lines)}"
        case "twice":
            lines[4] = lines[4].split()[0] + " 5"
        case "token twice":
            lines[300] = f"{lines[4].split()[0]} 300"
        case "byte":
            lines[65] = base64.b64encode(b"no byte").decode() + " 65"
        case "empty":
            lines = []
        case "class":
            config["auto_map"]["AutoTokenizer"] = "tokenization_other.OtherTokenizer"
        case "id":
            config["added_tokens_decoder"]["7"] = {"content": "seven"}
        case "pattern":
            (folder / "tokenization_kimi.py").write_text("pat_str = r'''\\s+'''")
    path.write_text("\n".join(lines) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if case == "config":
        (folder / "tokenizer_config.json").unlink()
    if case == "nothing":
        path.unlink()


@pytest.mark.parametrize("case, words", [
    ("base64", ["tiktoken.model: line 5", "a*b", "base64"]), ("no rank", ["line 5", "rank"]), ("words", ["line 5", "rank"]),
    ("missing", ["no token has the rank 4"]), ("twice", ["two tokens have the rank 5"]), ("token twice", ["ranks 4 and 300"]),
    ("byte", ["byte 0x"]), ("empty", ["no tokens"]), ("class", ["OtherTokenizer", "TikTokenTokenizer"]), ("id", ["added_tokens_decoder", "id 7"]),
    ("pattern", ["tokenization_kimi.py", "pat_str"]), ("config", ["tokenizer_config.json", "special tokens"]),
    ("nothing", ["neither a tokenizer.json nor a tiktoken.model"])])
def test_defects_are_named(tool, kimi, case, words, work):
    shutil.copytree(kimi, work / "bad")
    break_file(work / "bad", case)
    message = tool.error(op="encode", tokenizer=str(work / "bad"), texts=["x"])
    assert all(word in message for word in words), message


def test_commands_read_it(kimi, ranks, work):
    """The checkpoint's folder has it, one that travelled through Megatron's form, or a folder of its own."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(vocab_size=len(ranks) + RESERVED, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                      intermediate_size=48, max_position_embeddings=256, eos_token_id=len(ranks) + 1, bos_token_id=None)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(work / "hf")
    shutil.copytree(work / "hf", work / "bare")
    shutil.copytree(kimi, work / "hf", dirs_exist_ok=True)
    run_ok("convert", work / "hf", work / "megatron", "--tp", 2)
    run_ok("convert", work / "megatron", work / "back")
    assert (work / "back/tiktoken.model").read_bytes() == (kimi / "tiktoken.model").read_bytes()
    prompt = "Straße 敏捷的<|im_end|>"
    theirs = encoding_of(ranks)
    skipped = [len(ranks) + i for i, name in NAMES.items() if "think" not in name and "tool" not in name]
    for arguments in ([work / "hf"], [work / "megatron"], [work / "bare", "--tokenizer", kimi]):
        answer = json.loads(run_ok("generate", *arguments, prompt, "--json", "-q", "--max-tokens", 6, "--temperature", 0).stdout)
        assert answer["prompt_token_ids"] == theirs.encode(prompt, allowed_special="all")
        assert answer["outputs"][0]["text"] == theirs.decode([i for i in answer["outputs"][0]["token_ids"] if i not in skipped])
    refuse("generate", work / "bare", prompt, "--tokenizer", work / "bare", words=["neither a tokenizer.json nor a tiktoken.model"])
    (work / "back/tokenization_kimi.py").unlink()  # of no conversion of a checkpoint without it
    run_ok("convert", work / "bare", work / "back", "--to", "hf", "--overwrite")

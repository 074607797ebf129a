"""Ferry's tokenizer beside the tokenizers package: the same ids, the same text back, for every family's set-up."""
import json
import random

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.decoders import DecodeStream

from tokenizer_families import DEEPSEEK_V2, DEEPSEEK_V3, GPT2, KIMI, LLAMA3, QWEN2, SCRIPTS, TEKKEN, families, files, random_texts

CODE = files({".py", ".h", ".cpp"}, 400_000)
TRAINING = CODE[: len(CODE) // 2] + [SCRIPTS] * 3


def first_difference(texts, ours, theirs):
    for text, a, b in zip(texts, ours, theirs, strict=True):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            return f"{text[:2000]!r}: at {at}: {a[max(0, at - 5):at + 10]!r}, not {b[max(0, at - 5):at + 10]!r}"
    return None


def compare(tool, path, theirs, texts):
    """Ids with and without special tokens; and texts of those ids, and of others that no text has."""
    ours = tool(op="encode", tokenizer=str(path), texts=texts)
    ids = [e.ids for e in theirs.encode_batch_fast(texts)]
    assert first_difference(texts, ours["ids"], ids) is None
    plain = [e.ids for e in theirs.encode_batch_fast(texts, add_special_tokens=False)]
    assert first_difference(texts, ours["plain"], plain) is None
    generator = random.Random(5)
    size = theirs.get_vocab_size()
    wild = [[generator.randrange(size + 3) for _ in range(generator.randrange(40))] for _ in range(300)]
    few = [generator.choices(range(size), k=8) + list(range(3, 40)) for _ in range(1)]
    wild += [generator.choices(few[0], k=30) for _ in range(200)]
    decoded = tool(op="decode", tokenizer=str(path), ids=ids + wild)
    assert first_difference(ids + wild, decoded["texts"], theirs.decode_batch(ids + wild)) is None
    assert first_difference(ids + wild, decoded["kept"], theirs.decode_batch(ids + wild, skip_special_tokens=False)) is None
    assert ["".join(parts) for parts in decoded["streamed"]] == decoded["texts"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains each family's tokenizer once."""
    folder, known, makers = tmp_path_factory.mktemp("tokenizers"), {}, families(TRAINING)

    def get(family):
        if family not in known:
            known[family] = makers[family](), folder / f"{family}.json"
            known[family][0].save(str(known[family][1]))
        return known[family]

    return get


@pytest.mark.parametrize("family", families([]))
def test_ids_and_texts_are_those_of_the_package(tool, trained, family):
    theirs, path = trained(family)
    texts = CODE[len(CODE) // 2:][:8] + [SCRIPTS, *SCRIPTS.splitlines(), "", " ", "a", "\n", "<s>", "hello</s>", " <s> x"]
    texts += random_texts(400, seed=1)
    compare(tool, path, Tokenizer.from_file(str(path)), texts)


def test_long_words(tool, trained):
    """Beyond what is remembered and what is merged by looking at all pairs."""
    generator = random.Random(2)
    texts = ["a" * 5000, "ab" * 3000, "=" * 999, " " * 2000, "é" * 700, "".join(generator.choices("eratnis", k=20_000)),
             "".join(generator.choices("ab", k=300)), "的" * 1000, "\u4e00" * 49, "=" * 48, "=" * 50, "\n" * 500]
    for family in ("llama2", "qwen2", "deepseek_v3", "gemma"):
        theirs, path = trained(family)
        compare(tool, path, theirs, texts)


def test_broken_bytes_count_as_python_replaces_them(tool, trained):
    theirs, path = trained("qwen2")
    generator = random.Random(3)
    broken = [b"\xff", b"a\xc3", b"\xe2\x82", b"\xe2\x82x", b"\xed\xa0\x80", b"\xf0\x9f\x92", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\x80\x80a"]
    alphabet = [0x41, 0x20, 0x80, 0xBF, 0xC2, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xFF, 0x9F, 0xA0]
    broken += [bytes(generator.choices(alphabet, k=12)) for _ in range(300)]
    for data in broken:
        ours = tool(op="encode_bytes", tokenizer=str(path), hex=data.hex())["ids"]
        assert ours == theirs.encode(data.decode(errors="replace")).ids, data


ALL = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
CHUNKS = [ALL[i:i + 50_000] for i in range(0, len(ALL), 50_000)]


@pytest.mark.parametrize("name", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase"])
def test_normalizers_agree_on_every_character(tool, name):
    theirs = getattr(normalizers, name)()
    generator = random.Random(4)
    marks = [c for c in ALL[:0x20000] if normalizers.NFKD().normalize_str(c) != c or 0x300 <= ord(c) < 0x370]
    texts = CHUNKS + ["".join(generator.choices(marks, k=30)) for _ in range(2000)]
    texts += ["\u1100\u1161\u11a8", "\uac00\u11a8", "\uac01\u11a8", "\u1100\u1161\u11a7", "a\u0301\u0301\u0327", "\u0344", "\u0958"]
    ours = tool(op="normalize", normalizer=json.loads(theirs.__getstate__()), texts=texts)["texts"]
    assert first_difference(texts, ours, [theirs.normalize_str(t) for t in texts]) is None


PRE_TOKENIZERS = {
    **{name: pre_tokenizers.Split(Regex(pattern), "isolated") for name, pattern in {
        "gpt2": GPT2, "llama3": LLAMA3, "qwen2": QWEN2, "deepseek_v3": DEEPSEEK_V3, "kimi": KIMI, "tekken": TEKKEN,
        **{f"deepseek_v2_{i}": pattern for i, pattern in enumerate(DEEPSEEK_V2)},
        "possessive": r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{2,}|\s*[\r\n]|\s++", "lazy": r"[a-z]+?[aeiou]|\p{Lu}*?\d|x{2,3}?y",
        "atomic": r"(?>a+|b)c|\w(?=\d)|\W(?!\s)", "groups": r"(?:ab|a)(c|bcd)*|(?:\d{3})+(?=\D|$)", "lines": r"^\s*#.*$|^.",
        "ends": r"\A.|.\z", "empty": r"\s*", "nothing": r"(?=\d)", "set": r"[\p{L}&&[^a-y\p{Lu}]]+|[\]\[\-a]|[x[yz]-]",
        "escapes": r"\x{1F600}|\u00e9|\x7a|\t|\p{^L}\P{N}|[\x41-\x43]", "fold": r"(?i:[a-ks]+|ME|k)", "count": r"a{,2}b|{x}|a{2|c{1}",
        "scripts": r"\p{Han}+|\p{Hiragana}+|\p{Katakana}+|\p{Hangul}+|\p{Latin}+|\p{Greek}+|\p{Cyrillic}+|\p{Arabic}+|\p{Hebrew}+"
                   r"|\p{Thai}+|\p{Devanagari}+",
        "categories": "|".join(rf"\p{{{c}}}{{2}}" for c in "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Cc Cf Co".split()),
        "words": r"\w+|\d|\S", "not_words": r"\W+|\D", }.items()},
    **{f"{behavior}_{invert}": pre_tokenizers.Split(Regex(r"\s|[aeiou]{2}"), behavior, invert)
       for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous") for invert in (False, True)},
    "literal": pre_tokenizers.Split("aa", "merged_with_previous"), "digits": pre_tokenizers.Digits(False),
    "single_digits": pre_tokenizers.Digits(True), "punctuation": pre_tokenizers.Punctuation("contiguous"),
    "whitespace": pre_tokenizers.Whitespace(), "whitespace_split": pre_tokenizers.WhitespaceSplit(),
    "metaspace": pre_tokenizers.Metaspace("▁", "always"), "metaspace_never": pre_tokenizers.Metaspace("_", "never"),
    "metaspace_first": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", "first")]),
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizers_cut_alike(tool, name):
    theirs = PRE_TOKENIZERS[name]
    texts = [SCRIPTS, *SCRIPTS.splitlines(), *CODE[0:4], "abcbcdaabcc aabbc\n#x\n # y\n\n", "x\n", "\n", "aaaa aaa", *random_texts(300, seed=6)]
    if name in ("words", "not_words", "categories", "scripts", "digits", "punctuation", "whitespace"):
        texts += CHUNKS
    ours = tool(op="pieces", pre_tokenizer=json.loads(theirs.__getstate__()), texts=texts)["pieces"]
    assert first_difference(texts, ours, [[piece for piece, _ in theirs.pre_tokenize_str(t)] for t in texts]) is None


def test_sizes_and_the_token_that_ends(tool, trained, work):
    theirs, path = trained("llama3")
    (work / "tokenizer.json").write_bytes(path.read_bytes())
    (work / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>", "lstrip": False}, "pad_token": None}))
    assert tool(op="tokenizer", folder=str(work)) == {
        "vocab_size": theirs.get_vocab_size(), "eos": theirs.token_to_id("<|eot_id|>")}


def test_what_is_not_supported_is_named(tool, trained, work):
    _, path = trained("qwen2")
    whole = json.loads(path.read_text())

    def error(**changes):
        (work / "t.json").write_text(json.dumps(whole | changes))
        return tool.error(op="encode", tokenizer=str(work / "t.json"), texts=[])

    assert "normalizer: the type Precompiled is not supported" in error(normalizer={"type": "Precompiled"})
    assert "the type BertPreTokenizer is not supported" in error(pre_tokenizer={"type": "BertPreTokenizer"})
    assert "the type WordPiece is not supported" in error(decoder={"type": "WordPiece"})
    assert "the type RobertaProcessing is not supported" in error(post_processor={"type": "RobertaProcessing"})
    assert "model: the type Unigram is not supported" in error(model={**whole["model"], "type": "Unigram"})
    assert "a look-behind at byte 4 is not supported" in error(pre_tokenizer={
        "type": "Split", "pattern": {"Regex": r"x(?<=a)b"}, "behavior": "Isolated", "invert": False}).replace("byte 3", "byte 4")
    assert "this property at byte 3 is not supported" in error(pre_tokenizer={
        "type": "Split", "pattern": {"Regex": r"\p{Klingon}"}, "behavior": "Isolated", "invert": False})


def streamed(theirs, prompt, ids):
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    return [stream.step(theirs, i) or "" for i in ids]


@pytest.mark.parametrize("family", families([]))
def test_streamed_text_is_that_of_the_packages_stream(tool, trained, family):
    """The text that follows a prompt. Where a character is cut, the package's stream waits for ever, and ours ends as decode does."""
    theirs, path = trained(family)
    generator = random.Random(7)
    texts = [t for t in random_texts(150, seed=8) + SCRIPTS.splitlines() if t]
    cases = []
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False).ids
        cut = generator.randrange(1, max(2, len(ids)))
        if "\ufffd" not in theirs.decode(ids[:cut]) and ids[cut:]:
            cases.append({"prompt": ids[:cut], "ids": ids[cut:]})
    assert len(cases) > 20
    for case, ours in zip(cases, tool(op="detokenize", tokenizer=str(path), cases=cases)["cases"], strict=True):
        assert ours["stop"] is None
        mine, expected = "".join(ours["parts"]), "".join(streamed(theirs, case["prompt"], case["ids"]))
        assert mine.startswith(expected), case
        whole, before = theirs.decode(case["prompt"] + case["ids"]), theirs.decode(case["prompt"])
        if whole.startswith(before):
            assert mine == whole[len(before):], case
        assert not any("\ufffd" in part for part in ours["parts"]) or "\ufffd" in whole


def held_back(text, stops):
    """The longest end of the text that may become a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@pytest.mark.parametrize("family", ["llama2", "qwen2"])
def test_stop_strings_end_the_text_before_them(tool, trained, family):
    theirs, path = trained(family)
    generator = random.Random(9)
    cases = []
    for text in [t for t in random_texts(300, seed=10) if len(t) > 12]:
        ids = theirs.encode("x" + text, add_special_tokens=False).ids
        begin = generator.randrange(len(text) - 8)
        stops = [text[begin:begin + generator.randrange(1, 8)], generator.choice(["\n\n", "zzz", text[5:7]]), text[begin + 1:begin + 3]]
        cases.append({"prompt": ids[:1], "ids": ids[1:], "stop": [s for s in stops if s], "min_tokens": generator.choice([0, 0, 3])})
    stopped = 0
    plain = tool(op="detokenize", tokenizer=str(path), cases=[{"prompt": c["prompt"], "ids": c["ids"]} for c in cases])["cases"]
    for case, without, ours in zip(cases, plain, tool(op="detokenize", tokenizer=str(path), cases=cases)["cases"], strict=True):
        pending, expected, stop = "", [], None
        for count, part in enumerate(without["parts"], 1):
            pending += part
            found = [(pending.find(s), i) for i, s in enumerate(case["stop"]) if s in pending]
            last = count == len(without["parts"])
            if found and min(count, len(case["ids"])) > case["min_tokens"]:
                at, index = min(found)
                stop = case["stop"][index]
                expected.append(pending[:at])
                break
            hold = 0 if last else held_back(pending, case["stop"])
            expected.append(pending[:len(pending) - hold])
            pending = pending[len(pending) - hold:]
        assert ours["stop"] == stop, case
        assert ours["parts"][:len(expected)] == expected and not any(ours["parts"][len(expected):]), case
        stopped += stop is not None
    assert stopped > len(cases) / 2

"""Tokenizers with the exact components of each family, trained by the tokenizers package on a small text, and the corpus on
which they are compared with Ferry's tokenizer."""
import random
import sysconfig
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
DEEPSEEK_V3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
               r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
DEEPSEEK_V2 = ["[\r\n]",
               "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
               "\\s?[!-/:-~！-／：-～‘-‟　-。]+", "\\s+$", "[一-龥ࠀ-一가-퟿]+"]
KIMI = "|".join([r"[\p{Han}]+",
                 r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                 r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                 r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level_after(*steps):
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def special(*contents):
    return [AddedToken(c, special=True, normalized=False) for c in contents]


def template(tokenizer, before):
    return processors.TemplateProcessing(single=f"{before} $A", pair=f"{before} $A {before} $B:1",
                                         special_tokens=[(before, tokenizer.token_to_id(before))])


def byte_level(pre_tokenizer, tokens, size, texts, normalizer=None, ignore_merges=False, before=None, alphabet=True, **model):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges, **model))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False))
    tokenizer.add_tokens(tokens)
    if before:
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template(tokenizer, before)])
    return tokenizer


def sentencepiece(normalizer, pre_tokenizer, decoder, size, texts, tokens, train_on=None, fuse_unk=True, byte_fallback=True):
    """A BPE of characters as conversions of SentencePiece models have it: <0x00> to <0xFF> are in the vocabulary. Trained with
    words cut at spaces, as SentencePiece does it, and used without."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=byte_fallback))
    trained.normalizer = normalizer
    trained.pre_tokenizer = train_on or pre_tokenizers.Split("▁", "merged_with_next")
    first = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=first, show_progress=False,
                                                           limit_alphabet=400))
    import json
    model = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], unk_token="<unk>",
                                     fuse_unk=fuse_unk, byte_fallback=byte_fallback))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.add_tokens(special("<unk>", "<s>", "</s>") + tokens)
    tokenizer.post_processor = template(tokenizer, "<s>")
    return tokenizer


def llama2_decoder():
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def llama2_normalizer():
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def families(texts, size=3000):
    """{family: function that trains its tokenizer}"""
    def first(scheme):
        return pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)

    metaspace_decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return {
        "gpt2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), special("<|endoftext|>"), size, texts),
        "llama2": lambda: sentencepiece(llama2_normalizer(), None, llama2_decoder(), size, texts, []),
        "llama2_metaspace": lambda: sentencepiece(None, first("first"), llama2_decoder(), size, texts, [], train_on=
                                                  pre_tokenizers.Metaspace("▁", "first")),
        "llama3": lambda: byte_level(byte_level_after(split(LLAMA3)),
                                     special("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
                                     size, texts, ignore_merges=True, before="<|begin_of_text|>"),
        "qwen2": lambda: byte_level(byte_level_after(split(QWEN2)), special("<|endoftext|>", "<|im_start|>", "<|im_end|>"), size,
                                    texts, normalizer=normalizers.NFC()),
        "qwen3": lambda: byte_level(byte_level_after(split(QWEN2)), special("<|endoftext|>", "<|im_start|>", "<|im_end|>") +
                                    [AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>", "<tool_call>")],
                                    size, texts, normalizer=normalizers.NFC()),
        "mistral": lambda: sentencepiece(None, first("first"), llama2_decoder(), size, texts,
                                         [AddedToken(t, special=True) for t in ("[INST]", "[/INST]")],
                                         train_on=pre_tokenizers.Metaspace("▁", "first"), fuse_unk=True),
        "mistral_tekken": lambda: byte_level(byte_level_after(split(TEKKEN)), special("<s>", "[INST]", "[/INST]"), size, texts,
                                             ignore_merges=True, before="<s>"),
        "mixtral": lambda: sentencepiece(llama2_normalizer(), None, llama2_decoder(), size, texts,
                                         [AddedToken("[INST]", normalized=True), AddedToken("[/INST]", rstrip=True)]),
        "deepseek_v2": lambda: byte_level(byte_level_after(*map(split, DEEPSEEK_V2), pre_tokenizers.Digits(individual_digits=True)),
                                          special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), size, texts,
                                          before="<｜begin▁of▁sentence｜>"),
        "deepseek_v3": lambda: byte_level(byte_level_after(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3)),
                                          special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>") +
                                          [AddedToken("<｜User｜>", special=False, normalized=False)], size, texts,
                                          before="<｜begin▁of▁sentence｜>"),
        "moonlight": lambda: byte_level(byte_level_after(split(KIMI)), special("[BOS]", "[EOS]", "<|im_end|>"), size, texts),
        "gemma": lambda: sentencepiece(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"),
                                       metaspace_decoder, size, texts,
                                       [AddedToken(t, normalized=False) for t in ("\n\n", "▁▁▁", "<start_of_turn>", "[@BOS@]")]),
        # and what no family has, but files may
        "words": lambda: byte_level(pre_tokenizers.Sequence([
            pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("merged_with_previous"),
            pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)]),
            [AddedToken("the", single_word=True), AddedToken("IMPORT", normalized=True), AddedToken("<mask>", lstrip=True),
             AddedToken("<sep>", rstrip=True, lstrip=True, special=True)], size, texts, alphabet=False, unk_token="e",
            normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])),
        "metaspace": lambda: sentencepiece(normalizers.NFD(), pre_tokenizers.Sequence([
            pre_tokenizers.Whitespace(), pre_tokenizers.Metaspace("▁", "always")]), decoders.Metaspace("▁", "always"), size, texts,
            [], fuse_unk=False, byte_fallback=False),
    }


SCRIPTS = """Die Straße, œuvre, naïve café, Übergröße, ĳsland — „Zitat“ ‚so‘ …
Быстрая коричневая лиса перепрыгивает через ленивую собаку 12345 раз.
敏捷的棕色狐狸跳过了懒狗。今天是2024年11月21日，天气很好！𠮷野家。
素早い茶色の狐がのろまな犬を飛び越える。カタカナとひらがなと漢字。ｶﾀｶﾅ
빠른 갈색 여우가 게으른 개를 뛰어넘는다. 각 가
الثعلب البني السريع يقفز فوق الكلب الكسول ١٢٣٤
השועל החום המהיר קופץ מעל הכלב העצלן
तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है १२३
สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ
👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ☃️ ❤️‍🔥 🧑🏿‍🚀 e\u0301 a\u0308\u0304 \u1E9B\u0323 ﬁ ﬅ Ⅷ ② ½ ㎏
I'll we'RE he'D don'T it'ſ I'M they'vE\u00a0\u2003\u3000\u200b\u2028x\u0085y
\t\t  x   \r\n \r\n\n   y  \n\n\n   \x0b\x0c end   
<|endoftext|><s> </s>[INST] hi [/INST]   x <｜begin▁of▁sentence｜> ▁▁▁ <0x41> the IMPORT theme <mask>  <sep>   y <think></think>
"""


def files(suffixes, most_bytes):
    """Text of installed packages, so many bytes of it."""
    found, size = [], 0
    paths = sorted(p for p in Path(sysconfig.get_path("purelib")).rglob("*") if p.suffix in suffixes and p.is_file())
    random.Random(0).shuffle(paths)
    for path in paths:
        data = path.read_bytes()[:100_000]
        found.append(data.decode(errors="replace"))
        size += len(data)
        if size > most_bytes:
            break
    return found


def random_texts(count, seed):
    """Strings of characters of all kinds: letters, marks, spaces, unassigned ones, others' special tokens."""
    generator = random.Random(seed)
    planes = [(0x20, 0x7F), (0x20, 0x7F), (0x09, 0x0E), (0x80, 0x250), (0x300, 0x370), (0x370, 0x700), (0x900, 0xE80), (0x1100, 0x1200),
              (0x1E00, 0x2100), (0x2000, 0x2070), (0x3000, 0x3100), (0x4E00, 0xA000), (0xAC00, 0xD7A4), (0xF900, 0x10000),
              (0x10000, 0x20000), (0x1D400, 0x1D800), (0x1F300, 0x1FAFF), (0x20000, 0x32000), (0xE0000, 0x110000)]
    pieces = ["'s", "'LL", "\n", "\r\n", "  ", "<s>", "<|endoftext|>", "▁", "▁▁▁", "[INST]", "\u0301", "\u0327", "<0xE2>", "123", "the "]

    def character():
        if generator.random() < 0.2:
            return generator.choice(pieces)
        c = generator.randrange(*generator.choice(planes))
        return "" if 0xD800 <= c < 0xE000 else chr(c)

    return ["".join(character() for _ in range(generator.randrange(60))) for _ in range(count)]

#!/usr/bin/env python3
"""Writes rollout/text/unicode/unicode_data.txt: what the `tokenizers` package knows of every character, asked of the package itself.

    source build/peers/env.sh && build/peers/bin/python tests/interop/rollout/make_unicode_tables.py >rollout/text/unicode/unicode_data.txt

Its parts were built from different versions of Unicode: the regular expressions (Oniguruma) from 16.0, what Rust's `char` does
(digits, white space, lower case) from 17.0, the normal forms from 9.0 and Punctuation from 8.0. Ferry has to agree with each.
rollout/text/unicode/unicode_tables.h describes the notation.
"""
import itertools
import string
import sys
import unicodedata

from tokenizers import Regex, normalizers, pre_tokenizers

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
TEXT = "".join(map(chr, CODE_POINTS))
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
SCRIPTS = "Arabic Cyrillic Devanagari Greek Han Hangul Hebrew Hiragana Katakana Latin Thai".split()
HANGUL = range(0xAC00, 0xD7A4)


def matches(pattern):
    """The characters that a regular expression of the package matches."""
    return set(CODE_POINTS) - set(map(ord, normalizers.Replace(Regex(pattern), "").normalize_str(TEXT)))


def split_apart(pre_tokenizer):
    """The characters that a pre-tokenizer parts from letters beside them."""
    pieces = pre_tokenizer.pre_tokenize_str("".join(f"a{c}a" for c in TEXT))
    return {CODE_POINTS[begin // 3] for _, (begin, end) in pieces if begin % 3 == 1 and end == begin + 1}


def joined(pre_tokenizer):
    """The characters that a pre-tokenizer joins with letters beside them."""
    pieces = pre_tokenizer.pre_tokenize_str("".join(f" a{c}a" for c in TEXT))
    return {CODE_POINTS[begin // 4] for _, (begin, end) in pieces if begin % 4 == 1 and end == begin + 3}


def mapping(normalizer):
    """{character: characters} where they differ, without the syllables of Hangul, which a formula decomposes."""
    pairs = ((c, normalizer.normalize_str(chr(c))) for c in CODE_POINTS if c not in HANGUL)
    return {c: tuple(map(ord, to)) for c, to in pairs if to != chr(c)}


def combining_classes():
    """-> the characters that move before U+0345, whose class, 240, is the highest"""
    moves = lambda c: normalizers.NFD().normalize_str("\u0345" + chr(c)) == chr(c) + "\u0345"
    return {c: unicodedata.combining(chr(c)) for c in CODE_POINTS if unicodedata.combining(chr(c)) and (c == 0x345 or moves(c))}


def one_step(canonical):
    """{character: (characters, whether NFC joins them)}: canonical decompositions into at most two, whose first may decompose again."""
    found = {}
    for c, whole in canonical.items():
        parts = tuple(int(part, 16) for part in unicodedata.decomposition(chr(c)).split())
        assert tuple(x for part in parts for x in canonical.get(part, (part,))) == whole, hex(c)
        found[c] = parts, normalizers.NFC().normalize_str("".join(map(chr, whole))) == chr(c)
    return found


def ranges(code_points):
    found = []
    for c in sorted(code_points):
        if found and found[-1][1] == c - 1:
            found[-1][1] = c
        else:
            found.append([c, c])
    return found


def range_items(code_points):
    return [f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in ranges(code_points)]


def run_items(of_category):
    """Categories of all code points from zero, in runs: a letter and how often it comes."""
    letters = dict(zip(CATEGORIES, string.ascii_letters))
    of_character = {c: letters[name] for name, characters in of_category.items() for c in characters}
    for letter, run in itertools.groupby(of_character.get(c, ".") for c in range(0x110000)):
        count = len(list(run))
        yield letter + (str(count) if count > 1 else "")


def mapping_items(table):
    """C=X.Y of each character, or A-B=X and A-B/2=X of some that go to as many others, one apart or two: to X, X + 1 or X + 2, ...
    A character behind the one before, which no run takes along, has its = alone."""
    characters, at, previous = sorted(table), 0, None
    while at < len(characters):
        c, to = characters[at], table[characters[at]]
        end, step = at, 0
        while isinstance(to, int) and end + 1 < len(characters):
            gap = characters[end + 1] - characters[end]
            if gap > 2 or (step or gap) != gap or table[characters[end + 1]] != to + characters[end + 1] - c:
                break
            end, step = end + 1, gap
        if end == at:
            yield ("" if c - 1 == previous else f"{c:X}") + "=" + (f"{to:X}" if isinstance(to, int) else to)
        else:
            yield f"{c:X}-{characters[end]:X}" + ("/2" if step == 2 else "") + f"={to:X}"
        previous, at = characters[end], end + 1


def parts_text(parts):
    return parts[0] if len(parts) == 1 else ".".join(f"{part:X}" for part in parts)


def write(head, items, separator=" "):
    print(head + "\t" + "".join(item + separator for item in items))


def main():
    of_category = {name: matches(rf"\p{{{name}}}") for name in CATEGORIES}
    write("CategoryNames", CATEGORIES)
    write("CategoryRuns", run_items(of_category), "")
    others = {script: ("", matches(rf"\p{{{script}}}")) for script in SCRIPTS} | {
        "WhiteSpace": ("", matches(r"\s")),
        "Word": ("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl Pc", matches(r"\w")),
        "RustWord": ("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl Pc", joined(pre_tokenizers.Whitespace())),
        "RustNumeric": ("Nd Nl No", split_apart(pre_tokenizers.Digits(individual_digits=True))),
        "Punctuation": ("Pc Pd Ps Pe Pi Pf Po", split_apart(pre_tokenizers.Punctuation("isolated"))),
    }
    for name, (like, characters) in others.items():
        differing = characters ^ set().union(*(of_category[category] for category in like.split()))
        write(f"set\t{name}\t{like}", range_items(differing))
    canonical, compatible = mapping(normalizers.NFD()), mapping(normalizers.NFKD())
    write("Canonical", mapping_items(
        {c: parts[0] if len(parts) == 1 else parts_text(parts) + ("" if joined_again else "!")
         for c, (parts, joined_again) in one_step(canonical).items()}))
    write("Compatibility", mapping_items(
        {c: parts_text(to) for c, to in compatible.items() if to != canonical.get(c)}))
    write("Lowercase", mapping_items(
        {c: parts_text(to) for c, to in mapping(normalizers.Lowercase()).items()}))
    of_character = combining_classes()
    write("CombiningClasses", itertools.chain.from_iterable(
        (f"{value}:", *range_items(c for c in of_character if of_character[c] == value)) for value in sorted(set(of_character.values()))))


if __name__ == "__main__":
    sys.exit(main())

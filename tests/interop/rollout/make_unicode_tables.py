#!/usr/bin/env python3
"""Writes rollout/text/unicode/unicode_tables.cc: what the `tokenizers` package knows of every character, asked of the package itself.

    source build/peers/env.sh && build/peers/bin/python tests/interop/rollout/make_unicode_tables.py >rollout/text/unicode/unicode_tables.cc

Its parts were built from different versions of Unicode: the regular expressions (Oniguruma) from 16.0, what Rust's `char` does
(digits, white space, lower case) from 17.0, the normal forms from 9.0 and Punctuation from 8.0. Ferry has to agree with each.
"""
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
    """What moves before U+0345, whose class, 240, is the highest."""
    moves = lambda c: normalizers.NFD().normalize_str("\u0345" + chr(c)) == chr(c) + "\u0345"
    return {c: unicodedata.combining(chr(c)) for c in CODE_POINTS if unicodedata.combining(chr(c)) and (c == 0x345 or moves(c))}


def compositions(canonical):
    """((first, second), composed) of all pairs that NFC joins."""
    for c in sorted(canonical):
        parts = unicodedata.decomposition(chr(c)).split()
        if len(parts) == 2 and normalizers.NFC().normalize_str("".join(map(chr, canonical[c]))) == chr(c):
            yield int(parts[0], 16), int(parts[1], 16), c


def ranges(code_points):
    found = []
    for c in sorted(code_points):
        if found and found[-1][1] == c - 1:
            found[-1][1] = c
        else:
            found.append([c, c])
    return found


def write(head, items):
    print(f"\n{head} = {{")
    line = "   "
    for item in items:
        if len(line) + len(item) + 2 > 100:
            print(line)
            line = "   "
        line += f" {item},"
    print(line + "\n};")


def write_ranges(name, code_points):
    write(f"constexpr CodePointRange {name}[]", (f"{{0x{a:X}, 0x{b:X}}}" for a, b in ranges(code_points)))


def write_mapping(name, table):
    write(f"constexpr char32_t {name}[]", ("{}".format(", ".join(f"0x{x:X}" for x in (c, len(to), *to))) for c, to in sorted(table.items())))


def main():
    print("""// clang-format off
// Written by tests/interop/rollout/make_unicode_tables.py: what the tokenizers package 0.23.3 knows of every
// character.
#include "rollout/text/unicode/unicode_tables.h"

namespace ferry::rollout::text {
namespace {""")
    of_category = {name: matches(rf"\p{{{name}}}") for name in CATEGORIES}
    for name in CATEGORIES:
        write_ranges("k" + name, of_category[name])
    word = matches(r"\w")
    for script in SCRIPTS:
        write_ranges("k" + script, matches(rf"\p{{{script}}}"))
    write_ranges("kWhiteSpace", matches(r"\s"))
    write_ranges("kWord", word)
    write_ranges("kRustWord", joined(pre_tokenizers.Whitespace()))
    write_ranges("kRustNumeric", split_apart(pre_tokenizers.Digits(individual_digits=True)))
    write_ranges("kPunctuation", split_apart(pre_tokenizers.Punctuation("isolated")))
    names = CATEGORIES + SCRIPTS + ["WhiteSpace", "Word", "RustWord", "RustNumeric", "Punctuation"]
    write("constexpr NamedRanges kSets[]", (f'{{"{name}", k{name}}}' for name in names))
    canonical, compatible = mapping(normalizers.NFD()), mapping(normalizers.NFKD())
    write_mapping("kCanonical", canonical)
    write_mapping("kCompatibility", {c: to for c, to in compatible.items() if to != canonical.get(c)})
    write_mapping("kLowercase", mapping(normalizers.Lowercase()))
    write("constexpr Composition kCompositions[]",
          (f"{{0x{a:X}, 0x{b:X}, 0x{c:X}}}" for a, b, c in sorted(compositions(canonical))))
    classes = combining_classes()
    write("constexpr CombiningRange kCombining[]",
          (f"{{0x{a:X}, 0x{b:X}, {value}}}" for value in sorted(set(classes.values()))
           for a, b in ranges(c for c in classes if classes[c] == value)))
    print("""
}  // namespace

const UnicodeTables& unicode_tables() {
  static const UnicodeTables tables{.sets = kSets,
                                    .canonical = kCanonical,
                                    .compatibility = kCompatibility,
                                    .lowercase = kLowercase,
                                    .compositions = kCompositions,
                                    .combining = kCombining};
  return tables;
}

}  // namespace ferry::rollout::text""")


if __name__ == "__main__":
    sys.exit(main())

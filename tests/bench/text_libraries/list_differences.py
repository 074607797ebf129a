#!/usr/bin/env python3
"""The code points of which a library says something else than the `tokenizers` package: general categories, scripts, normal forms,
lower case.

    source build/peers/env.sh && build/peers/bin/python tests/bench/text_libraries/list_differences.py [--ranges] LIBRARY.so...

LIBRARY.so is a libpcre2-8, libonig, libicuuc or libutf8proc. --ranges lists the code points, not only how many they are.
"""
import argparse
import ctypes
import re
import subprocess
import sys
from pathlib import Path

from tokenizers import Regex, normalizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "interop/rollout"))
from make_unicode_tables import CATEGORIES, CODE_POINTS, SCRIPTS, TEXT, matches, ranges  # noqa: E402

PROPERTIES = [rf"\p{{{name}}}" for name in CATEGORIES + SCRIPTS] + [r"\s", r"\w", r"\d"]
FORMS = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase"]


class Pcre2:
    def __init__(self, library):
        self.library = library
        library.pcre2_compile_8.restype = library.pcre2_match_data_create_8.restype = ctypes.c_void_p
        library.pcre2_get_ovector_pointer_8.restype = ctypes.POINTER(ctypes.c_size_t)
        self.found = ctypes.c_void_p(library.pcre2_match_data_create_8(4, None))

    def matches(self, pattern):
        error, place, data = ctypes.c_int(), ctypes.c_size_t(), pattern.encode()
        utf, ucp = 0x00080000, 0x00020000
        code = self.library.pcre2_compile_8(data, ctypes.c_size_t(len(data)), utf | ucp, ctypes.byref(error), ctypes.byref(place), None)
        return {c for c in CODE_POINTS if self.library.pcre2_match_8(
            ctypes.c_void_p(code), (text := chr(c).encode()), ctypes.c_size_t(len(text)), ctypes.c_size_t(0), 0, self.found, None) > 0}


class Oniguruma:
    def __init__(self, library):
        self.library = library
        self.utf8 = ctypes.byref(ctypes.c_byte.in_dll(library, "OnigEncodingUTF8"))
        self.ruby = ctypes.byref(ctypes.c_byte.in_dll(library, "OnigSyntaxRuby"))
        library.onig_initialize((ctypes.c_void_p * 1)(ctypes.addressof(self.utf8._obj)), 1)

    def matches(self, pattern):
        code, error, data = ctypes.c_void_p(), ctypes.create_string_buffer(64), ctypes.create_string_buffer(pattern.encode())
        begin = ctypes.addressof(data)
        assert self.library.onig_new(ctypes.byref(code), ctypes.c_void_p(begin), ctypes.c_void_p(begin + len(data) - 1), 0, self.utf8,
                                     self.ruby, error) == 0

        def fits(c):
            text = ctypes.create_string_buffer(chr(c).encode())
            begin = ctypes.addressof(text)
            end = ctypes.c_void_p(begin + len(chr(c).encode()))
            return self.library.onig_match(code, ctypes.c_void_p(begin), end, ctypes.c_void_p(begin), None, 0) > 0

        return set(filter(fits, CODE_POINTS))


class Utf8proc:
    ORDER = "Cn Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co".split()

    def __init__(self, library):
        self.library = library
        categories = {c: self.ORDER[library.utf8proc_category(c)] for c in CODE_POINTS}
        self.matches = {rf"\p{{{name}}}": {c for c in CODE_POINTS if categories[c] == name} for name in CATEGORIES}.get

    def form(self, name, c):
        if name == "Lowercase":
            return chr(self.library.utf8proc_tolower(c))
        found, data = ctypes.c_char_p(), chr(c).encode()
        stable, compat, compose, decompose = 2, 4, 8, 16
        options = stable | (compose if name.endswith("C") else decompose) | (compat if "K" in name else 0)
        self.library.utf8proc_map(data, ctypes.c_ssize_t(len(data)), ctypes.byref(found), options)
        return found.value.decode() if c else "\0"


class Icu(Utf8proc):
    ORDER = "Cn Lu Ll Lt Lm Lo Mn Me Mc Nd Nl No Zs Zl Zp Cc Cf Co Cs Pd Ps Pe Pc Po Sm Sc Sk So Pi Pf".split()

    def __init__(self, library):
        symbols = subprocess.run(["nm", "-D", library._name], stdout=subprocess.PIPE, text=True).stdout
        self.version = re.search(r" u_charType(_\d+)", symbols)[1]
        library.utf8proc_category = getattr(library, "u_charType" + self.version)
        super().__init__(library)
        self.normalizers = {}
        for name in FORMS[:4]:
            get = getattr(library, f"unorm2_get{name}Instance{self.version}")
            get.restype = ctypes.c_void_p
            self.normalizers[name] = ctypes.c_void_p(get(ctypes.byref(ctypes.c_int())))

    def form(self, name, c):
        if name == "Lowercase":
            return chr(getattr(self.library, "u_tolower" + self.version)(c))
        data, into = chr(c).encode("utf-16-le"), ctypes.create_string_buffer(200)
        size = getattr(self.library, "unorm2_normalize" + self.version)(self.normalizers[name], data, len(data) // 2, into, 100,
                                                                         ctypes.byref(ctypes.c_int()))
        return into.raw[:2 * size].decode("utf-16-le")


def report(what, code_points, with_ranges):
    if not code_points:
        return
    listed = " ".join(f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in ranges(code_points)) if with_ranges else ""
    print(f"  {what:14} {len(code_points):6} {listed}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+")
    parser.add_argument("--ranges", action="store_true")
    options = parser.parse_args()
    known = {"pcre2": Pcre2, "onig": Oniguruma, "icu": Icu, "utf8proc": Utf8proc}
    theirs = {pattern: matches(pattern) for pattern in PROPERTIES}
    for path in options.libraries:
        ours = next(kind for name, kind in known.items() if name in Path(path).name)(ctypes.CDLL(path))
        print(path)
        everywhere = set()
        for pattern in PROPERTIES:
            found = ours.matches(pattern)
            if found is not None:
                differing = found ^ theirs[pattern]
                everywhere |= differing
                report(pattern, differing, options.ranges)
        report("in any of these", everywhere, options.ranges)
        for name in FORMS if hasattr(ours, "form") else []:
            package = getattr(normalizers, name)()
            report(name, {c for c in CODE_POINTS if ours.form(name, c) != package.normalize_str(chr(c))}, options.ranges)


if __name__ == "__main__":
    sys.exit(main())

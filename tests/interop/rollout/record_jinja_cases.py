#!/usr/bin/env python3
"""Writes tests/data/chat_templates/cases.json: what jinja2, set up as transformers does it, makes of small templates.

    source build/peers/env.sh && build/peers/bin/python tests/interop/rollout/record_jinja_cases.py >tests/data/chat_templates/cases.json
"""
import json
import sys

from transformers.utils.chat_template_utils import _compile_jinja_template

VARIABLES = {
    "s": "Hello, World", "e": "", "u": "né漢😀", "n": 7, "f": 2.5, "t": True, "z": None, "l": [3, 1, 2], "w": ["b", "A", "c"],
    "d": {"a": 1, "b": "x", "items": "key", "n": None}, "m": [{"r": "user", "c": " hi ", "k": {"v": 1}}, {"r": "bot", "c": "yo"}],
    "deep": {"x": [1, {"y": [True, None, 1.5, "q\"'\\\n\t\u0007é"]}]}, "big": 1e22, "small": 1.5e-7, "html": "<a href='x'>&</a>",
}

CASES = r"""
{{ s }}|{{ e }}|{{ u }}|{{ n }}|{{ f }}|{{ t }}|{{ z }}|{{ l }}|{{ d }}|{{ nothing }}|
{{ deep }} {{ [u, 'it\'s', "a\"b", "both'\""] }} {{ (1,) }} {{ () }} {{ (1, 2) }} {{ {} }} {{ '\x41\u00e9\n\\d' }}
{{ big }} {{ small }} {{ 1.0 }} {{ 100000.0 * 10 }} {{ 1e15 }} {{ 1e16 }} {{ 0.1 + 0.2 }} {{ 3.0e-5 }} {{ 7 / 2 }} {{ 6 / 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }}
{{ 1 + 2 * 3 - 4 }} {{ (1 + 2) * 3 }} {{ -n }} {{ +n }} {{ - n ** 2 }} {{ 2 ** 3 ** 2 }} {{ n ~ 'x' ~ z ~ t }} {{ 'a' * 3 }} {{ [1] * 2 }} {{ [1] + [2] }} {{ 'a' 'b' }} {{ t + 1 }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 1 == 1.0 }} {{ true == 1 }} {{ '1' == 1 }} {{ z == none }} {{ nothing == nothing2 }} {{ l == [3, 1, 2] }} {{ (1,) == [1] }} {{ d == {'a': 1} }}
{{ 1 in l }} {{ 9 not in l }} {{ 'a' in d }} {{ 'ell' in s }} {{ 'x' in nothing }} {{ not 1 in l }} {{ not t }} {{ 1 and 0 }} {{ 0 or 'x' }} {{ e or z }} {{ n and s }}
{{ 'yes' if t else 'no' }} {{ 'yes' if e }} {{ 'a' if e else 'b' if z else 'c' }} {{ (1 if t else 2) + 1 }}
{{ s[0] }} {{ s[-1] }} {{ s[1:4] }} {{ s[::-1] }} {{ s[:-3] }} {{ s[20:] }} {{ u[2:] }} {{ u[-1] }} {{ l[1:] }} {{ l[::2] }} {{ l[5:] }} {{ l[-2:] }} {{ l[::-1] }} {{ l[2:0:-1] }} {{ (1,2,3)[1:] }}
{{ l[10] }}|{{ d.a }} {{ d['b'] }} {{ d.missing }}|{{ d['missing'] }}|{{ m[0].r }} {{ m[0]['k'].v }} {{ m.0.r }} {{ m[-1].r }} {{ d['items'] }} {{ s.nope }}|{{ s['upper']() }}
{{ d.items() | list }} {{ d | items | list }} {{ d.keys() | list }} {{ d.values() | list }} {{ d.get('a') }} {{ d.get('q') }} {{ d.get('q', 5) }} {% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ x }};{% endfor %}
{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{{ loop.changed(x > 1) }};{% endfor %}
{% for x in [] %}x{% else %}none{% endfor %} {% for x in l if x > 1 %}{{ x }}{{ loop.last }}{% endfor %} {% for x in l if x > 9 %}{% else %}none{% endfor %} {% for x in nothing %}x{% else %}none{% endfor %} {% for c in u %}{{ c }}.{% endfor %} {% for k in d %}{{ k }}{% endfor %}
{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% for i in range(2) %}{% for j in range(2) %}{{ loop.index }}{{ i }}{{ j }};{% endfor %}{{ loop.index }}{% endfor %} {{ range(3) | list }} {{ range(1, 4) | list }} {{ range(5, 0, -2) | list }}
{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{% endfor %} {% for (a, b) in [[1, 2]] %}{{ a }}{{ b }}{% endfor %} {% for a in 1, 2 %}{{ a }}{% endfor %}
{% set x = 1 %}{% for i in l %}{% set x = i %}{{ x }}{% endfor %}{{ x }} {% if t %}{% set x = 5 %}{% endif %}{{ x }} {% set a, b = 1, 2 %}{{ a }}{{ b }} {% set q = 1, 2 %}{{ q }}
{% set ns = namespace(x=1, y='a') %}{% for i in l %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.y }}{{ ns.nope }}| {% set ns2 = namespace({'a': 1}, b=2) %}{{ ns2.a }}{{ ns2.b }}
{% set block %}a{{ n }}b{% endset %}{{ block }} {% set up | upper %}abc{% endset %}{{ up }} {% set two | trim | length %}  abc {% endset %}{{ two }} {{ dict(a=1, b=2) }}
{% macro f(a, b=2, c='x') %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}{{ f(1) }} {{ f(1, 3) }} {{ f(1, c='z') }} {{ f(b=1, a=0) }} {{ f() }} {% macro g() %}{{ n }}{{ later }}{% endmacro %}{% set later = 4 %}{{ g() }} {% macro r(i) %}{{ i }}{% if i > 0 %}{{ r(i - 1) }}{% endif %}{% endmacro %}{{ r(3) }} {{ f(1)|length }}
{% if nothing %}a{% elif z %}b{% elif n == 7 %}c{% else %}d{% endif %}{% if e %}a{% elif e %}b{% else %}d{% endif %} {% if not nothing is defined %}u{% endif %} {% if l %}l{% endif %}{% if {} %}d{% endif %}
{{ nothing is defined }} {{ n is defined }} {{ nothing is undefined }} {{ z is none }} {{ z is not none }} {{ nothing is none }} {{ s is string }} {{ n is string }} {{ d is mapping }} {{ l is mapping }} {{ l is iterable }} {{ s is iterable }} {{ n is iterable }} {{ nothing is iterable }} {{ l is sequence }} {{ d is sequence }} {{ n is sequence }} {{ nothing is sequence }}
{{ n is number }} {{ f is number }} {{ t is number }} {{ s is number }} {{ n is integer }} {{ t is integer }} {{ f is integer }} {{ f is float }} {{ t is boolean }} {{ n is boolean }} {{ t is true }} {{ t is false }} {{ 1 is true }} {{ 0 is false }} {{ n is odd }} {{ n is even }} {{ n is divisibleby 7 }} {{ n is divisibleby(3) }}
{{ n is equalto 7 }} {{ n is eq(7) }} {{ n is ne 7 }} {{ n is lt 8 }} {{ n is gt 8 }} {{ n is ge 7 }} {{ n is le 6 }} {{ 1 is in l }} {{ 1 is in([2]) }}
{{ range is callable }} {{ s is callable }} {{ 'abc' is lower }} {{ 'ABC' is upper }} {{ 'aB' is lower }} {{ 'x' is not equalto 'y' }} {{ d.nope is defined }} {{ d.a is defined and d.a == 1 }} {{ l[9] is defined }} {{ 'upper' is filter }} {{ 'odd' is test }}
{{ s | upper }} {{ s | lower }} {{ 'hello wORLD foo-bar' | title }} {{ 'hELLO' | capitalize }} {{ '  x ' | trim }}| {{ 'xxaxx' | trim('x') }} {{ 'äöü straße ÀÉ' | upper }} {{ 'ÄÖÜ' | lower }}
{{ l | length }} {{ s | count }} {{ u | length }} {{ d | length }} {{ l | first }} {{ l | last }} {{ [] | first }}| {{ s | first }} {{ s | last }} {{ l | sum }} {{ l | max }} {{ l | min }} {{ w | max }} {{ [1.5, 2] | sum }}
{{ l | join }} {{ l | join(', ') }} {{ m | join('/', attribute='r') }} {{ s | list }} {{ l | sort }} {{ l | sort(reverse=true) }} {{ w | sort }} {{ w | sort(case_sensitive=true) }} {{ m | sort(attribute='r') | map(attribute='r') | list }} {{ l | reverse | list }} {{ s | reverse }} {{ [1, 1, 'a', 'A'] | unique | list }}
{{ m | map(attribute='r') | list }} {{ m[:1] | map(attribute='k.v') | list | length }} {{ m | map(attribute='q', default='-') | list }} {{ w | map('upper') | list }} {{ w | map('replace', 'b', 'z') | join }} {{ m | selectattr('r', 'equalto', 'user') | list | length }} {{ m | selectattr('k') | list | length }} {{ m | rejectattr('r', 'in', ['user']) | map(attribute='c') | list }} {{ l | select('odd') | list }} {{ l | reject('equalto', 1) | list }} {{ [0, 1, '', 'a'] | select | list }}
{{ nothing | default('x') }} {{ e | default('x') }}| {{ e | default('x', true) }} {{ z | d('x') }} {{ z | default('x', boolean=True) }} {{ d.q | default(n) }} {{ nothing | default }}|
{{ s | replace('l', 'L') }} {{ s | replace('l', 'L', 1) }} {{ 'aaa' | replace('a', '') }}| {{ 'abc' | replace('', '-') }} {{ 12 | replace('1', 'x') }} {{ n | string + '1' }} {{ '12' | int }} {{ ' 12 ' | int }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ 3.9 | int }} {{ '3.9' | int }} {{ '2.5' | float }} {{ 'x' | float }} {{ -3 | abs }} {{ 2.567 | round(2) }} {{ 2.5 | round }} {{ html | e }} {{ html | safe }} {{ '1' | int + 1 }}
{{ 'a\nb\n\nc' | indent }} {{ 'a\nb' | indent(2, true) }} {{ 'a\n\nb' | indent(1, blank=true) }} {{ d | dictsort }} {{ {'b': 1, 'A': 2} | dictsort(true) }} {{ {'b': 1, 'a': 2} | dictsort(by='value') }}
{{ deep | tojson }} {{ deep | tojson(indent=2) }} {{ d | tojson(sort_keys=true) }} {{ u | tojson(ensure_ascii=true) }} {{ u | tojson }} {{ html | tojson }} {{ [] | tojson(indent=4) }} {{ {} | tojson(indent=4) }} {{ [1, [2]] | tojson(indent=1) }} {{ l | tojson(separators=(',', ':')) }} {{ big | tojson }} {{ small | tojson }} {{ (1, 2) | tojson }} {{ z | tojson }}{{ t | tojson }} {{ d | tojson(indent=none) }}
{{ s.upper() }} {{ s.lower() }} {{ ' a '.strip() }}| {{ 'xay'.strip('xy') }} {{ ' a '.lstrip() }}| {{ ' a '.rstrip() }}| {{ 'a,b,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ 'a b  c '.split() }} {{ ' a b  c '.split(none, 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a b c '.rsplit(none, 1) }} {{ 'x</think>y'.split('</think>')[-1] }}
{{ s.startswith('Hell') }} {{ s.endswith('x') }} {{ s.startswith(('a', 'H')) }} {{ s.replace('l', '1', 2) }} {{ ', '.join(w) }} {{ s.find('o') }} {{ s.rfind('o') }} {{ s.find('q') }} {{ u.find('漢') }} {{ s.count('l') }} {{ s.index('W') }} {{ 'ab'.title() }} {{ "they're x1y".title() }} {{ 'ABC'.capitalize() }} {{ '12'.isdigit() }} {{ 'a1'.isalnum() }} {{ 'ab'.isalpha() }} {{ ' '.isspace() }} {{ 'a\nb\r\nc'.splitlines() }} {{ 'a\n'.splitlines(true) }} {{ 'abc'.removeprefix('a').removesuffix('c') }} {{ l.index(1) }} {{ l.count(3) }} {{ d.copy() }}
{{ 'a' if nothing is defined else 'b' }}{{ nothing.x if nothing is defined }}|{{ [nothing is defined, 1 if z else 2] }} {{ {'a': 1, 'b': {'c': 2}}['b']['c'] }} {{ {'x': l}['x'][0] }} {{ [[1, 2], [3]][0][1] }} {{ ({'a': 1}).a }} {{ "}}" }} {{ '%}' }} {{ {'a': {'b': 1}} }}
{# comment #}a{#- b -#} c {# multi
line #}d{{ 'x' -}}   y  {{- 'z' }}
  {% if t %}
    inner
  {% endif %}
end
a
  {%- if t -%}
    b
  {%- endif -%}
c
  {%+ if t %}x{% endif +%}
y
a {% if t %} b {% endif %} c
x  {#- c #}
y
   {# whole line #}
z {{- n -}} w
{% raw %}{{ not }} {% if %}{% endraw %}| {%- raw -%}  {{ x }}  {%- endraw -%} y
{% for x in l -%}
  {{ x }}
{%- endfor %}
.
	 {% set x = 1 %}	tab {{ x }}{% set y = 2 -%}   z
{% generation %}inside {{ n }}{% endgeneration %} after
{{ "a
b" }}{{ 'é' ~ u }}{{ 'a' ~ 1 ~ 2.0 }}
{{ 'x' is string and 1 is number or false }} {{ not 1 == 2 }} {{ 1 if not z else 2 }} {{ -1 | abs }} {{ 'a' ~ 'b' | upper }} {{ 'a' + 'b' | upper }} {{ 1 + 2 | string | length }} {{ l | length > 2 }} {{ (l | length) - 1 }} {{ 3 - l | length }} {{ not l | length == 3 }}
{{ m[0].c.strip() + '!' }} {{ m[-1]['r'] == 'bot' }} {{ (m | map(attribute='c') | join('')).strip() }} {{ m | length - 1 }} {{ m[1:] | map(attribute='r') | first }} {{ (s | lower).split(', ')[1] }} {{ s.split(', ') | map('trim') | map('length') | list }}
{{ namespace(a=1).a }} {% set ns = namespace() %}{% set ns.list = [] %}{% set ns.list = ns.list + [1] %}{{ ns.list }} {% set o = {'a': 1} %}{{ o }}
{% macro m1(x) -%} [{{ x }}] {%- endmacro %}{% for i in l %}{{ m1(i) }}{% endfor %} {% for i in l %}{% macro loc() %}{{ i }}{% endmacro %}{{ loc() }}{% endfor %}
{% set loop_messages = m %}{% for message in loop_messages %}{% set content = message['c'] | trim %}{% if loop.index0 == 0 %}{% set content = '<s>' + content %}{% endif %}{{ content }}{% endfor %}
{% set k = {0: 'a', 512: 'b', -1: 'c', 1.5: 'd', none: 'e', (1, 2): 'f', 'g': 7} %}{{ k }} {{ k[512] }} {{ k[0] }} {{ k[true] }}|{{ k[1.5] }} {{ k[none] }} {{ k[(1, 2)] }} {{ k['g'] }} {{ k[7] }}|{{ 512 in k }} {{ '512' in k }} {{ 1 in k }} {{ k.get(-1) }} {{ k.get(4, 'q') }} {{ k | length }} {{ k.keys() | list }}
{% for a, b in {512: 1, 16: 2} | dictsort %}{{ a + 1 }}{{ b }};{% endfor %} {{ {2: 1, true: [none], none: {1.5: 2}} | tojson }} {{ {2: 1, 1: 2} | tojson(sort_keys=true) }} {{ {1: 'a', true: 'b', 1.0: 'c'} }} {{ {1: 2} == {true: 2} }}
{{ {(1, 2): 3} | tojson }}
{{ {[1]: 2} }}
{{ {({},): 2} }}
{{ [] in d }}
{{ d[[]] }}|
{{ '<{}>'.format(s) }} {{ '{0}{1}{0} {a}{{}}'.format(1, none, a='x') }} {{ ''.format() }} {{ '{}{}'.format(1.0, [1, 'b']) }}|{{ '{}'.format(nothing) }}|{{ '{x}'.format(x=u) }}
{{ '{}{}'.format(1) }}
{{ '{a}'.format(1) }}
{{ '{'.format(1) }}
{{ '}'.format(1) }}
{% filter upper %}a{{ n }}b{% endfilter %} {% filter trim | replace('a', 'x') %}  abc {% set n = 9 %}{{ n }} {% endfilter %}{{ n }}{% for x in l %}{% filter indent(2, true) %}{{ x }}{% endfilter %}{% endfor %}
{% filter %}{% endfilter %}
{% filter upper %}
{{ z | selectattr('r') | list }} {{ z | select | list }} {{ z | reject('odd') | list }} {{ 0 | rejectattr('r', 'x') | list }} {{ z | map('upper') | list }} {{ false | map(attribute='x') | list | length }}
{{ n | select | list }}
{{ 1_000 }} {{ 10 // 3 }} {{ 'a' < 'B' }} {{ none is none }} {{ True }} {{ False }} {{ None }} {{ true }}{{ "\"" }}{{ '\'' }} {{ '\q' }} {{ '\u6f22' }}
{{ nothing.x }}
{{ nothing() }}
{{ s() }}
{{ 1 + 'a' }}
{{ 'a' + 1 }}
{{ z.x.y }}
{{ nothing + 1 }}
{{ 1 / 0 }}
{{ 1 < 'a' }}
{{ z | length }}
{% for x in n %}{% endfor %}
{{ l.append(1) }}
{{ d.update({'a': 2}) }}
{{ raise_exception('no ' ~ s) }}
{{ nothing | tojson }}
{{ 'abc' in n }}
{{ 1 in s }}
{% set d.x = 1 %}
{% for a, b in [(1, 2, 3)] %}{% endfor %}
{% macro h(a) %}{% endmacro %}{{ h(1, 2) }}
{% macro h(a) %}{% endmacro %}{{ h(b=2) }}
{{ range(1000000) }}
{{ s | nofilter }}
{{ s is notest }}
{% nostatement %}
{% if t %}
{% for x in l %}
{{ s
{{ s }
{{ (1 }}
{{ 1 +  }}
{{ s..x }}
{% endif %}
{# no end
{% raw %} no end
{{ 'no end }}
{% break %}
{{ a b }}
{{ 1 = 2 }}
{% set %}
{% for in l %}{% endfor %}
{{ ] }}
{{ $ }}
{% if %}{% endif %}
{{ f(**d) if false }}{{ nothing2(a=1, 2) }}
""".strip("\n")

# Several lines that are one template begin at these.
TOGETHER = {"{# comment #}": 2, "  {% if t %}": 4, "a": 5, "  {%+ if t %}": 2, "x  {#- c #}": 4, "{% for x in l -%}": 4, '{{ "a': 2}


def templates():
    lines, at = CASES.split("\n"), 0
    while at < len(lines):
        count = next((n for first, n in TOGETHER.items() if lines[at] == first or (len(first) > 3 and lines[at].startswith(first))), 1)
        yield "\n".join(lines[at:at + count])
        at += count
    yield from ("", "\n", "a\n", "a\n\n", "a\r\nb\rc\r\n", "{{ 'a\r\nb' }}", "{% if t %}\r\nx\r\n{% endif %}\r\n", "\n\n  {% if t %}x{% endif %}",
                "{{ s }}\n", "{", "{{", "{%", "%}", "}}", "{ {n} }", "{{ '{{' }}", "a{{ n }}\n\n", "\u00a0{%- set x = 1 %}b", "x\u3000{{- n -}}\u2003y")


def outcome(template):
    try:
        return {"template": template, "text": _compile_jinja_template(template).render(**VARIABLES)}
    except Exception as error:
        return {"template": template, "error": f"{type(error).__name__}: {error}"}


def main():
    cases = list(map(outcome, templates()))
    print(json.dumps({"variables": VARIABLES, "cases": cases}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())

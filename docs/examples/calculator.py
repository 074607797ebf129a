#!/usr/bin/env python3
"""A tool for models in training: computes what calls of "calculator" ask for, {"expression": "17*3"}, a line of JSON each."""

import ast
import json
import operator
import sys


def power(base, exponent):
    """Sessions share the program: 9**9**9 would keep all of them waiting."""
    if abs(base) > 1e100 or abs(exponent) > 1000: raise ValueError("the power is too large")
    return base ** exponent


OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: power,
              ast.USub: operator.neg}


def value(node):
    if isinstance(node, ast.Expression): return value(node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)): return node.value
    if isinstance(node, ast.UnaryOp): return OPERATIONS[type(node.op)](value(node.operand))
    if isinstance(node, ast.BinOp): return OPERATIONS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("numbers and + - * / ** alone")


for line in sys.stdin:
    asked = json.loads(line)
    try:
        answer = {"content": str(value(ast.parse(asked["arguments"]["expression"], mode="eval")))}
    except Exception as error:  # the model is told
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": asked["id"], **answer}), flush=True)

"""One small fault at a time in the text of a module: what `make mutation` tries the tests with.

Covers: which faults there are. Left alone are asserts (they watch for our own mistakes), what is
inside of f-strings, decorators and annotations. Does not cover: running tests, which is
`scenarios/mutation.py`.

    a < b   <=        a + b   -        a and b   or       3      4        f(x)       pass
    a == b  !=        a // b  *        not a     a        True   False    continue   break
    a in b  not in    a & b   |        if a      if not a                 a += b     -=
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

_COMPARE: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_LEFT_ALONE: Final = (ast.Assert, ast.JoinedStr)
_FIELDS_LEFT_ALONE: Final = ("annotation", "returns", "decorator_list")
_OF_THEIR_OWN: Final = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)
"""Conditions that are changed as what they are, not turned round."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """The bytes from `begin` to `end` of a file, replaced."""

    path: str
    line: int
    was: str
    now: str
    begin: int
    end: int

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + self.now.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every fault of this module, in the order of its text."""
    lines = list(accumulate((len(line) for line in source.splitlines(keepends=True)), initial=0))
    found = []
    for node, now in _faults(ast.parse(source)):
        begin = lines[node.lineno - 1] + node.col_offset
        end = lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        found.append(Mutant(path, node.lineno, source[begin:end].decode(), now, begin, end))
    return sorted(found, key=lambda mutant: (mutant.begin, mutant.end, mutant.now))


def _faults(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    if isinstance(node, _LEFT_ALONE):
        return
    if isinstance(node, ast.stmt) and (statement := _other_statement(node)) is not None:
        yield node, statement
    if isinstance(node, ast.expr) and (expression := _other_expression(node)) is not None:
        yield node, f"({ast.unparse(expression)})"
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(
        node.test, _OF_THEIR_OWN
    ):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    for name, field in ast.iter_fields(node):
        if name not in _FIELDS_LEFT_ALONE:
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from _faults(child)


def _other_statement(node: ast.stmt) -> str | None:
    match node:
        case ast.Expr(ast.Call()):
            return "pass"
        case ast.Continue():
            return "break"
        case ast.AugAssign(target, op, value) if type(op) in _ARITHMETIC:
            return ast.unparse(ast.AugAssign(target, _ARITHMETIC[type(op)](), value))
    return None


def _other_expression(node: ast.expr) -> ast.expr | None:
    match node:
        case ast.Compare(left, [op], right):
            return ast.Compare(left, [_COMPARE[type(op)]()], right)
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            return ast.BinOp(left, _ARITHMETIC[type(op)](), right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value)):
            return ast.Constant(value + 1)
    return None

"""One small fault at a time in the text of a module: what `make mutation` tries the tests with.

Covers: which faults there are. Does not cover: running tests, which is `scenarios/mutation.py`.
Left alone, since no test of behaviour can or should notice:

- asserts and `strict=` of `zip`: they watch for our own mistakes and promise nothing;
- text: what is inside of f-strings (other strings have no faults anyway);
- decorators, annotations, `if TYPE_CHECKING` and the flags `frozen`, `gc`, `kw_only`, `slots` of
  a class: mypy holds them, or they only make it faster;
- one more in the number of a constant or default whose name ends in a unit of time: 251 ms.

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
_FIELDS_LEFT_ALONE: Final = ("annotation", "returns", "decorator_list")
_KEYWORDS_LEFT_ALONE: Final = ("frozen", "gc", "kw_only", "slots", "strict")
_UNITS_OF_TIME: Final = ("_ns", "_ms", "_s")
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
    statement: int = 0
    """Where the innermost statement begins; 0: it runs when the module is imported."""

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + self.now.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every fault of this module, in the order of its text."""
    lines = list(accumulate((len(line) for line in source.splitlines(keepends=True)), initial=0))
    found = []
    for node, now, statement in _faults(ast.parse(source), None):
        begin = lines[node.lineno - 1] + node.col_offset
        end = lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        was = source[begin:end].decode()
        found.append(Mutant(path, node.lineno, was, now, begin, end, statement or 0))
    return sorted(found, key=lambda mutant: (mutant.begin, mutant.end, mutant.now))


def _faults(
    node: ast.AST, statement: int | None
) -> Iterator[tuple[ast.expr | ast.stmt, str, int | None]]:
    """What to replace by what, and the statement around it, if that is one of a function."""
    if _is_left_alone(node):
        return
    if isinstance(node, ast.stmt):
        if statement is not None:
            statement = node.lineno
        if (other := _other_statement(node)) is not None:
            yield node, other, statement
    if isinstance(node, ast.expr) and (expression := _other_expression(node)) is not None:
        yield node, f"({ast.unparse(expression)})", statement
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(
        node.test, _OF_THEIR_OWN
    ):
        yield node.test, f"(not ({ast.unparse(node.test)}))", statement
    for name, field in ast.iter_fields(node):
        if name not in _FIELDS_LEFT_ALONE:
            is_body = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body"
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from _faults(child, 0 if is_body else statement)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.If(ast.Name("TYPE_CHECKING")):
            return True
        case ast.keyword(name):
            return name in _KEYWORDS_LEFT_ALONE
        case ast.AnnAssign(ast.Name(name), value=ast.Constant(value)) if value:
            return name.lower().endswith(_UNITS_OF_TIME)
    return False


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

"""Expressions of family files, e.g. `num_key_value_heads or num_attention_heads`.

Python's syntax, parsed into a tree and walked here: nothing is executed, and what is not listed below does not exist.
There are names, constants, arithmetic, comparisons, `and`, `or`, `not`, `x if c else y`, lists, objects, `a[b]`, `a.b`,
and calls of the functions that the caller hands over.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from tiers.reference.errors import ConfigError, TiersError

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip

_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip

Lookup = Callable[[str], Any]

_CONSTANTS = (int, float, str, bool, type(None))

# Characters of an expression; the walk through its tree goes as deep as it is long.
_MAX_LENGTH = 500


def parse(text: str) -> ast.expr:
    """Raises:
    ConfigError: not an expression, or one with something that is not listed above.
    """
    if len(text) > _MAX_LENGTH:
        raise ConfigError(f"expression {_short(text)} has {len(text)} characters; expected at most {_MAX_LENGTH}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"expression {_short(text)} cannot be read ({error})") from None
    allowed = (
        ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.Not, ast.USub, ast.BoolOp, ast.And, ast.Or, ast.Compare,
        ast.IfExp, ast.List, ast.Dict, ast.Subscript, ast.Attribute, ast.Call, ast.keyword, *_ARITHMETIC, *_COMPARISONS,
    )  # fmt: skip
    if any(isinstance(node, ast.Dict) and None in node.keys for node in ast.walk(tree)):
        raise ConfigError(f"expression {_short(text)}: ** is not part of the language of families")
    if any(isinstance(node, ast.Constant) and not isinstance(node.value, _CONSTANTS) for node in ast.walk(tree)):
        raise ConfigError(f"expression {_short(text)}: expected numbers, text, True, False and None as constants")
    for node in ast.walk(tree):
        if not isinstance(node, allowed) or (isinstance(node, ast.Call) and not isinstance(node.func, ast.Name)):
            raise ConfigError(
                f"expression {_short(text)}: {type(node).__name__} is not part of the language of families"
            )
    return tree


def names(tree: ast.expr) -> set[str]:
    """The names that an expression looks up, dotted ones whole; functions that it calls are not among them."""
    inner = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    dotted = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner |= {id(node.value) for node in dotted}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner]
    return {ast.unparse(node) for node in found}


def evaluate(text: str, lookup: Lookup, functions: Mapping[str, Callable[..., Any]]) -> Any:
    """The value of an expression.

    Args:
        text: the expression.
        lookup: gives the value of a name; a dotted path such as rope_scaling.factor arrives whole.
        functions: what may be called.

    Raises:
        ConfigError: the text is no expression; a value has the wrong type; a key is not there.
    """

    def walk(node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return lookup(node.id)
            case ast.Attribute():
                return lookup(_path(node, text))
            case ast.List():
                return [walk(item) for item in node.elts]
            case ast.Dict():
                return {walk(key): walk(value) for key, value in zip(node.keys, node.values, strict=True) if key}
            case ast.IfExp():
                return walk(node.body) if walk(node.test) else walk(node.orelse)
            case ast.BoolOp():
                value = None
                for item in node.values:
                    value = walk(item)
                    if bool(value) == isinstance(node.op, ast.Or):
                        break
                return value
            case ast.UnaryOp():
                value = walk(node.operand)
                return not value if isinstance(node.op, ast.Not) else -_number(value, node.operand)
            case ast.BinOp():
                left, right = _number(walk(node.left), node.left), _number(walk(node.right), node.right)
                return _ARITHMETIC[type(node.op)](left, right)
            case ast.Compare():
                left = walk(node.left)
                for op, item in zip(node.ops, node.comparators, strict=True):
                    right = walk(item)
                    if not _COMPARISONS[type(op)](left, right):
                        return False
                    left = right
                return True
            case ast.Subscript():
                container, key = walk(node.value), walk(node.slice)
                try:
                    return container[key]
                except (KeyError, IndexError):
                    known = _short(list(container)) if isinstance(container, dict) else f"0 to {len(container) - 1}"
                    raise ConfigError(f"{ast.unparse(node.slice)} is {_short(key)}; expected one of {known}") from None
            case ast.Call():
                assert isinstance(node.func, ast.Name)
                if node.func.id not in functions:
                    raise ConfigError(
                        f"expression {_short(text)}: no function {node.func.id}; there are {sorted(functions)}"
                    )
                keywords = {item.arg: walk(item.value) for item in node.keywords if item.arg}
                return functions[node.func.id](*(walk(item) for item in node.args), **keywords)
        raise ConfigError(f"expression {_short(text)}: {type(node).__name__} is not part of the language of families")

    try:
        return walk(parse(text))
    except TiersError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ConfigError(f"expression {_short(text)} has no value here ({error})") from None


def _number(value: Any, node: ast.expr) -> int | float:
    # Text times a number, or numbers of any length, could take all memory.
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 2.0**63:
        raise ConfigError(f"{ast.unparse(node)} is {_short(value)}; expected a number")
    return value


def _path(node: ast.expr, text: str) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_path(node.value, text)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ConfigError(f"expression {_short(text)}: a dot may follow names only")


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python writes
        text = f"a {type(value).__name__}"
    return text if len(text) <= 160 else text[:157] + "..."

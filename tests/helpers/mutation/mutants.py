"""Find the conditions of the passes, and disable one at a time.

[Note: What counts as a precondition]
In every function of a module of passes/:

* `if c` whose body only refuses (return, continue, raise, break) never refuses: `c` is False
* `if c` whose body acts, and the `if` of a comprehension, always let through: `c` is True
* a choice, `if c ... else ...` or `x if c else y`, always goes the same way: `c` is True, and `c` is False
* an operand of `and` is True, an operand of `or` is False, in any expression
* the return value of a function annotated with `-> bool` is True, and is False
* a fault in a table, `{Kept.REASON: c}`, and a fact, `x.fact |= c`, never applies: `c` is False
* a comparison, `any(...)` or `all(...)` that is assigned to a name is True, and is False

A condition that assigns a name (`:=`) is still evaluated. An assertion states a guarantee of our own code, and a
constant is a default: neither is a precondition.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

_REFUSALS = (ast.Return, ast.Continue, ast.Raise, ast.Break)

_Place = tuple[int, int, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One condition, and the constant that replaces it."""

    function: str  # module name and qualified name of the function with the condition
    source: str  # of the condition
    value: bool  # of the condition in the mutant
    place: _Place  # position in the module: first line and column, last line and column

    @property
    def key(self) -> str:
        return f"{self.function}: {self.source} -> {self.value}"


def find_mutants(module: ModuleType) -> list[Mutant]:
    """All mutants of a module, in the order of its source."""
    source = inspect.getsource(module)
    finder = _Finder(module.__name__.split(".")[-1], source)
    finder.visit(ast.parse(source))
    return sorted(dict.fromkeys(finder.found), key=lambda mutant: (mutant.place, mutant.value))


def apply(mutant: Mutant, module: ModuleType) -> None:
    """Replace the code of the module's functions in place, also for their importers."""

    def disabled(condition: ast.expr) -> ast.expr:
        value = ast.Constant(mutant.value)
        if not any(isinstance(each, ast.NamedExpr) for each in ast.walk(condition)):
            return value
        evaluated = ast.Tuple([condition, value], ast.Load())
        return ast.Subscript(evaluated, ast.Constant(1), ast.Load())

    _rewrite(module, {mutant.place: disabled})


def watch(module: ModuleType, see: Callable[[Mutant], None]) -> None:
    """Call `see` with each mutant whose condition evaluates to a different value."""
    by_place: dict[_Place, list[Mutant]] = {}
    for mutant in find_mutants(module):
        by_place.setdefault(mutant.place, []).append(mutant)

    def watched(place: _Place, value: object) -> object:
        for mutant in by_place[place]:
            if value is not mutant.value:
                see(mutant)
        return value

    def reported(condition: ast.expr) -> ast.expr:
        place = ast.Constant(_place(condition))
        return ast.Call(ast.Name("_watched", ast.Load()), [place, condition], [])

    vars(module)["_watched"] = watched
    _rewrite(module, dict.fromkeys(by_place, reported))


def restore(module: ModuleType) -> None:
    """Restore the original code of the module's functions."""
    _rewrite(module, {})


_Replacements = Mapping[_Place, Callable[[ast.expr], ast.expr]]


def _rewrite(module: ModuleType, replacements: _Replacements) -> None:
    tree = ast.fix_missing_locations(_Replacer(replacements).visit(ast.parse(inspect.getsource(module))))
    rewritten = {_code_key(code): code for code in _nested(compile(tree, str(module.__file__), "exec"))}
    for function in _functions(vars(module), module.__name__):
        function.__code__ = rewritten[_code_key(function.__code__)]


class _Replacer(ast.NodeTransformer):
    def __init__(self, replacements: _Replacements) -> None:
        self._replacements = replacements

    def generic_visit(self, node: ast.AST) -> ast.AST:
        place = _place(node) if isinstance(node, ast.expr) else None
        node = super().generic_visit(node)
        if place is None or place not in self._replacements:
            return node
        assert isinstance(node, ast.expr)
        return ast.copy_location(self._replacements[place](node), node)


class _Finder(ast.NodeVisitor):
    def __init__(self, module: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._source = source
        self._scopes = [module]
        self._returns_bool = [False]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scopes.append(node.name)
        self._returns_bool.append(isinstance(node.returns, ast.Name) and node.returns.id == "bool")
        self.generic_visit(node)
        self._returns_bool.pop()
        self._scopes.pop()

    def visit_If(self, node: ast.If) -> None:
        if len(node.body) == 1 and isinstance(node.body[0], _REFUSALS):
            self._add(node.test, False)
        elif node.orelse:
            self._add(node.test, True, False)
        else:
            self._add(node.test, True)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add(node.test, True, False)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._add(test, True)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for operand in node.values:
            if not isinstance(operand, ast.Constant):
                self._add(operand, isinstance(node.op, ast.And))
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if self._returns_bool[-1] and node.value is not None and not isinstance(node.value, ast.Constant):
            self._add(node.value, True, False)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Attribute) and isinstance(key.value, ast.Name) and key.value.id == "Kept":
                self._add(value, False)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.BitOr) and isinstance(node.target, ast.Attribute):
            self._add(node.value, False)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.value, ast.Compare) or _is_quantifier(node.value):
            self._add(node.value, True, False)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def _add(self, condition: ast.expr, *values: bool) -> None:
        text = " ".join((ast.get_source_segment(self._source, condition) or "").split())
        self.found += [Mutant(".".join(self._scopes), text, value, _place(condition)) for value in values]


def _place(node: ast.expr) -> _Place:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _is_quantifier(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("any", "all")


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _code_key(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _functions(namespace: dict[str, object], module: str) -> Iterator[FunctionType]:
    """Yield the functions and methods that the module itself defines."""
    for value in list(namespace.values()):
        value = value.fget if isinstance(value, property) else inspect.unwrap(value) if callable(value) else value
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, type):
            yield from _functions(dict(vars(value)), module)
        elif isinstance(value, FunctionType) and value.__code__.co_filename != "<string>":
            yield value

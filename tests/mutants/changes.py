"""One small change to the package's code, many times over: what a change is, and a module that holds some of them, each
asleep until its number is called. Within functions nothing is imported anew for a mutant: a switch is turned. What runs at
import, as tables do, is awake from the start in a Python of its own; there a table also loses its last row.

Words of messages and annotations are left out.
"""

import ast
import builtins
import sys
from copy import copy
from dataclasses import dataclass
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

import numpy as np

PACKAGE = "collate_npu"
ROOT = Path(__file__).parents[2]
SWITCH = "__mutant__"
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
WORDS = frozenset(("explain", "explain_rows", "refuse_rows", "say", "warn", "printable", "echo"))
"""Calls whose arguments are told to a reader."""
TOLD = frozenset(("got", "says", "rule", "remedy"))
"""Names of what is told to a reader."""


@dataclass(frozen=True)
class Change:
    """`n`-th of its module."""

    module: str
    n: int
    line: int
    where: str
    """The function."""
    statement: str
    """The first line of the one it stands in."""
    was: str
    becomes: str
    at_import: bool = False

    @property
    def place(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line}"

    def __str__(self) -> str:
        inside = "" if self.statement.startswith(self.was) else f"   in: {self.statement}"
        return f"{self.module}.{self.where}: {self.was} -> {self.becomes}{inside}"


def other(node: ast.AST) -> ast.AST | None:
    """What such a node becomes, if anything."""
    made = copy(node)
    if any(_is_text(child) for child in ast.iter_child_nodes(node)):
        return None
    if isinstance(made, ast.Compare) and len(made.ops) == 1 and type(made.ops[0]) in OTHER:
        made.ops = [OTHER[type(made.ops[0])]()]
    elif isinstance(made, (ast.BoolOp, ast.BinOp)) and type(made.op) in OTHER:
        made.op = OTHER[type(made.op)]()
    elif isinstance(made, ast.UnaryOp) and isinstance(made.op, ast.Not):
        return made.operand
    elif isinstance(made, ast.Constant) and type(made.value) in (bool, int):
        made.value = not made.value if type(made.value) is bool else made.value + 1
    elif isinstance(made, ast.IfExp):
        made.body, made.orelse = made.orelse, made.body
    elif isinstance(made, (ast.Raise, ast.AugAssign, ast.Continue, ast.Break)) or _is_call(made):
        return ast.Pass()
    else:
        return None
    return made


def shorter(node: ast.AST) -> ast.AST | None:
    """A table without its last row; None for what is none, or has but one."""
    made = copy(node)
    if not isinstance(getattr(made, "ctx", ast.Load()), ast.Load):
        return None  # names, not values
    if isinstance(made, ast.Dict) and len(made.keys) > 1:
        made.keys, made.values = made.keys[:-1], made.values[:-1]
    elif isinstance(made, (ast.List, ast.Tuple, ast.Set)) and len(made.elts) > 1:
        made.elts = made.elts[:-1]
    else:
        return None
    return made


def _first_line(node: ast.stmt) -> str:
    alone = copy(node)
    for inside in {"body", "orelse", "handlers", "finalbody", "cases"} & {*node._fields}:
        setattr(alone, inside, [])
    return ast.unparse(alone).partition("\n")[0][:100]


def _is_text(node: ast.AST) -> bool:
    """Words for a reader, which no test should know by heart."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and " " in str(node.value))


def _is_told(node: ast.AST) -> bool:
    """A line that only words such a text."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    names = {getattr(one, "id", "") for target in targets for one in getattr(target, "elts", [target])}
    return bool(names) and names <= TOLD


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


class Changer(ast.NodeTransformer):
    """Numbers the changes of a module, and puts those that are asked for into it, behind the switch."""

    def __init__(self, module: str, numbers: dict[int, int] | None = None) -> None:
        self.module, self.numbers = module, numbers or {}
        self.found: list[Change] = []
        self.names: list[str] = []
        self.inside, self.statement = 0, ""
        """Functions around, and the first line of the statement."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.names.append(node.name)
        node.body = [self.visit(each) for each in node.body]
        self.names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.names.append(node.name)
        self.inside += 1
        node.body = [self.visit(each) for each in node.body]
        self.inside -= 1
        self.names.pop()
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return self.generic_visit(node) if self.inside else node  # at import that is a type

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        named = getattr(node.func, "id", getattr(node.func, "attr", ""))
        return node if named in WORDS else self.generic_visit(node)

    def visit(self, node: ast.AST) -> ast.AST:
        if _is_told(node):
            return node
        if isinstance(node, ast.stmt):
            self.statement = _first_line(node)
        changed = other(node) if self.inside or isinstance(node, ast.expr) else None
        less = changed is None and not self.inside
        changed = shorter(node) if less else changed
        if changed is None:
            return super().visit(node)
        n = len(self.found)
        was, becomes = ast.unparse(node), ast.unparse(changed)
        where = ".".join(self.names)
        was, becomes = (f"{was[:60]} [{len(was)}]", "a row less") if less else (was, becomes)
        self.found.append(Change(self.module, n, node.lineno, where, self.statement, was, becomes, not self.inside))
        node = super().visit(node)
        return _switched(node, changed, self.numbers[n]) if n in self.numbers else node


def _switched(node: ast.AST, changed: ast.AST, number: int) -> ast.AST:
    asked = ast.parse(f"{SWITCH}({number})", mode="eval").body
    if isinstance(node, ast.stmt):
        body, orelse = ([changed], [node])
        return ast.copy_location(ast.If(asked, body, orelse), node)
    return ast.copy_location(ast.IfExp(asked, changed, node), node)


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def changes_of(path: Path) -> list[Change]:
    changer = Changer(_module_of(path))
    changer.visit(ast.parse(path.read_text("utf-8")))
    return changer.found


def all_changes(name: str = "") -> list[Change]:
    """Those of the package, or of the modules in which one of this name can stand."""
    paths = sorted({*(ROOT / PACKAGE).rglob("*.py")} - {*(ROOT / PACKAGE).glob("guide/**/*.py")})
    return [change for path in paths if name.startswith(_module_of(path)) or not name for change in changes_of(path)]


def drawn(count: int, seed: int, among: list[Change]) -> list[Change]:
    taken = np.random.default_rng(seed).choice(len(among), min(count, len(among)), replace=False)
    return [among[n] for n in sorted(taken.tolist())]


# --- a package whose modules hold them

ASLEEP = -1


class Switch:
    """Which of the changes is awake, and which were come by."""

    def __init__(self) -> None:
        self.awake, self.seen = ASLEEP, set[int]()

    def __call__(self, number: int) -> bool:
        self.seen.add(number)
        return number == self.awake


class Loader(SourceFileLoader):
    numbers: dict[int, int]

    def get_code(self, fullname: str) -> object:
        path = self.get_filename(fullname)
        tree = Changer(fullname, self.numbers).visit(ast.parse(self.get_data(path)))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class Finder(PathFinder):
    numbers: dict[str, dict[int, int]] = {}

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target) if fullname in cls.numbers else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(fullname, spec.origin)
            spec.loader.numbers = cls.numbers[fullname]
        return spec


def installed(changes: list[Change]) -> Switch:
    """The switch of these changes, whose modules hold them when they are imported from now on."""
    switch = Switch()
    setattr(builtins, SWITCH, switch)
    for number, change in enumerate(changes):
        Finder.numbers.setdefault(change.module, {})[change.n] = number
    sys.meta_path.insert(0, Finder)
    return switch

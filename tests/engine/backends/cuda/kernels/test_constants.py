"""What is passed on inside of kernels: Triton before 3.7 takes no object that is a field of another object."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path("engine/backends/cuda/kernels")
PLAIN = {"int", "float", "bool", "str", "Tensor"}


def object_fields(trees: list[ast.Module]) -> set[str]:
    """Fields of dataclasses, which constants are, whose type is another class: neither a number nor a text."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef) and "dataclass" in "".join(map(ast.unparse, node.decorator_list)):
            fields = (one for one in node.body if isinstance(one, ast.AnnAssign))
            found |= {one.target.id for one in fields if ast.unparse(one.annotation) not in PLAIN}  # type: ignore[union-attr]
    return found


def passed_on(tree: ast.Module, fields: set[str]) -> list[int]:
    """Lines of kernels that pass such a field of a constant straight to a call."""
    lines = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if not any("triton.jit" in ast.unparse(one) for one in function.decorator_list):
            continue
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            for given in (*call.args, *(one.value for one in call.keywords)):
                of_constant = isinstance(given, ast.Attribute) and isinstance(given.value, ast.Name)
                if of_constant and given.value.id.isupper() and given.attr in fields:
                    lines.append(given.lineno)
    return lines


def test_no_field_that_is_an_object_is_passed_on() -> None:
    """Kernels give such a field a name first; so they compile with all versions of Triton that are supported."""
    trees = {path: ast.parse(path.read_text()) for path in KERNELS.glob("*.py")}
    fields = object_fields(list(trees.values()))
    assert {"reach", "launch"} <= fields
    assert {path.name: lines for path, tree in trees.items() if (lines := passed_on(tree, fields))} == {}


@pytest.mark.parametrize(("given", "refused"), [("FORM.reach", True), ("FORM.group", False), ("REACH", False)])
def test_one_that_is_would_be_noticed(given: str, refused: bool) -> None:
    """Positive control: a field whose type is a class is found, a number and a name are not."""
    constants = "@dataclass\nclass F:\n    reach: Reach\n    group: int\n"
    tree = ast.parse(f"{constants}\n@triton.jit\ndef k(x):\n    first_seen(x, {given})\n")
    assert passed_on(tree, object_fields([tree])) == ([8] if refused else [])

"""Checks the source files against the rules for the package's structure."""

from __future__ import annotations

import ast
import re
from collections import Counter

from tests.house.house import (
    FACE,
    LEAVES,
    PAGE,
    ROOMS,
    ROOT,
    imports,
    in_order,
    is_leaf,
    modules,
    rooms_in_order,
    with_table,
)

MOST_LINES_OF_CLASS, MOST_ATTRIBUTES = 350, 15
MOST_LINES_OF_FUNCTION, MOST_ARGUMENTS = 60, 8
LARGER = {
    "shard.shard": "the public call: 10 arguments, one for each choice",
    "planner.plan_memory": "the public call: 17 arguments, which become one record each for ranks and optimizer",
    "commands.export": "one argument for each option of the command line",
    "commands.import_": "one argument for each option of the command line",
    "lars.__init__": "the hyper-parameters of LARS",
}
"""Functions that may exceed these limits, and why."""


def test_files_import_downwards_only() -> None:
    wrong = []
    for module in modules().values():
        for name in imports(module):
            target = modules()[name]
            public = module.name in (FACE, f"{FACE}.__main__") or is_leaf(target)
            if not public and ROOMS.index(target.room) > ROOMS.index(module.room):
                wrong.append(f"{module.path.relative_to(ROOT)} imports {target.path.relative_to(ROOT)}")
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert set(in_order()) == set(modules())


def test_leaves_are_leaves() -> None:
    leaves = [module for module in modules().values() if is_leaf(module)]
    assert len(leaves) == len(LEAVES)
    assert all(is_leaf(modules()[name]) for module in leaves for name in imports(module))


def _lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _attributes(node: ast.ClassDef) -> set[str]:
    """The attributes of `self` that the methods of the class assign."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def _tails() -> dict[str, str]:
    """Name of each class or function over the limits -> its sizes."""
    found = {}
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                lines, attributes = _lines(node), len(_attributes(node))
                if lines > MOST_LINES_OF_CLASS or attributes > MOST_ATTRIBUTES:
                    found[f"{module.path.stem}.{node.name}"] = f"{lines} lines, {attributes} attributes"
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines, arguments = _lines(node), len(node.args.args + node.args.posonlyargs + node.args.kwonlyargs)
                if lines > MOST_LINES_OF_FUNCTION or arguments > MOST_ARGUMENTS:
                    found[f"{module.path.stem}.{node.name}"] = f"{lines} lines, {arguments} arguments"
    return found


def test_nothing_is_larger_than_it_has_to_be() -> None:
    """Limits: 350 lines or 15 attributes for a class, 60 lines or 8 arguments for a function. Exceptions are in
    `LARGER`."""
    found = _tails()
    new = {name: size for name, size in found.items() if name not in LARGER}
    assert not new, f"split it, or say in LARGER why it cannot be: {new}"
    assert not LARGER.keys() - found.keys(), "these have become smaller: take them out of LARGER"


def test_the_table_of_files_is_that_of_the_files() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "run `python -m tests.house.house`"
    assert with_table(page.replace("`collectives.py`", "`collective.py`")) == page  # a control: it is restored


def test_each_file_says_what_it_is_for() -> None:
    long = [f"{name}: {module.purpose!r}" for name, module in modules().items() if not 0 < len(module.purpose) < 170]
    assert not long, "\n".join(long)


def _defined() -> dict[str, set[str]]:
    """File (without suffix, from the package) -> functions, classes, and methods as `Class.method`."""
    found: dict[str, set[str]] = {}
    for module in modules().values():
        names = found.setdefault(module.path.relative_to(ROOT / "zeroshard").with_suffix("").as_posix(), set())
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
                names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
    return found


def _missing(walks: str) -> list[str]:
    defined = _defined()
    return [
        f"{file}.py:{name}"
        for file, name in re.findall(r"`([\w/]+)\.py:([\w.]+)`", walks)
        if name not in defined.get(file, set())
    ]


PLAIN = {
    "AssertionError": "our own invariants",
    "AttributeError": "what Python says of any object",
    "KeyError": "what Python says of a mapping",
    "OSError": "caught where it is raised, and told as a CheckpointError",
    "_NeedsValues": "caught in its file",
    "Damaged": "click's: a status of the command line",
}
"""Exceptions that are no `zeroshard.Error` and may be raised all the same, and why."""


def _raised(tree: ast.AST) -> set[str]:
    """Names of the classes in statements of the form `raise Class(...)`."""
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def test_what_is_raised_is_an_error_of_ours() -> None:
    """`except zeroshard.Error` catches every error that the package raises."""
    ours, bases = {"Error"}, dict[str, set[str]]()
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    while new := {name for name, of in bases.items() if of & ours} - ours:
        ours |= new
    wrong = [f"{m.name} raises {name}" for m in modules().values() for name in _raised(m.tree) - ours - PLAIN.keys()]
    assert not wrong, "\n".join(["use InvalidValue, InvalidType, InvalidState, ... of zeroshard/errors.py:", *wrong])
    assert _raised(ast.parse("raise ValueError('no')")) == {"ValueError"}
    assert len(ours) > 10


MAKERS = {
    "arange",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
} | {
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "tensor",
    "zeros",
}
ON_THE_DEFAULT_DEVICE = {
    "train": "models and batches of the trainer's own, whose processes set no default",
    "cli": "inputs that are traced without values, on the CPU",
    "planning.activations": "the same",
}
"""Modules that may make tensors on the default device, and why."""


def _without_device(node: ast.AST) -> list[int]:
    """Lines of calls that make a tensor on the default device (outside of `with torch.device(...)`)."""
    match node:
        case ast.With(items=items) if any(ast.unparse(i.context_expr).startswith("torch.device(") for i in items):
            return []
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr), keywords=keywords):
            named = {keyword.arg for keyword in keywords}
            found = [node.lineno] if attr in MAKERS and not named & {"device", None} else []
        case _:
            found = []
    return found + [line for child in ast.iter_child_nodes(node) for line in _without_device(child)]


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """After `torch.set_default_device("cuda")` what is meant for the host would be made on the GPU."""
    wrong = [
        f"{module.name}:{line}"
        for module in modules().values()
        if not any(f"{module.name}.".startswith(f"zeroshard.{one}.") for one in ON_THE_DEFAULT_DEVICE)
        for line in _without_device(module.tree)
    ]
    assert not wrong, f"name the device: {', '.join(wrong)}"
    code = "x = f(torch.empty(1), torch.zeros(1, device=d))\nwith torch.device('cpu'):\n    y = torch.ones(2)"
    assert _without_device(ast.parse(code)) == [1]


def test_the_walks_name_what_exists() -> None:
    _, _, rest = PAGE.read_text().partition("## Four walks\n")
    walks, _, _ = rest.partition("\n## ")
    assert len(re.findall(r"`[\w/]+\.py:", walks)) > 20
    assert not _missing(walks)
    assert _missing("`runtime/hooks.py:Schedule.on_gradients`") == ["runtime/hooks.py:Schedule.on_gradients"]
    for title in ("A gradient", "A step", "A save", "A load"):
        assert f"### {title}" in walks
        assert len(walks.partition(f"### {title}")[2].partition("\n### ")[0].splitlines()) <= 50, "one screen each"


def test_rooms_are_all_there_and_import_each_other_in_no_circle() -> None:
    assert set(rooms_in_order()) == set(ROOMS)


def test_tests_stand_in_folders_of_the_rooms_and_have_names_of_their_own() -> None:
    """File names of tests are unique, as the documents cite tests by file name without the folder."""
    paths = list((ROOT / "tests").rglob("test_*.py"))
    names = Counter(path.name for path in paths)
    assert [name for name, times in names.items() if times > 1] == []
    across = {"parity", "real_models", "failures", "outside", "house", "documents", "apart", "gpu", "hosts", "tests"}
    assert {path.parent.name for path in paths} - across <= set(ROOMS)

"""Checks the architecture: each module imports only from lower layers."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfcluster
from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras import patches as keras_patches
from tfcluster.runtime.partition import tf_datasets, tf_functions
from tfcluster.runtime.tf1 import patches as tf1_patches

ROOT = Path(tfcluster.__file__).parent

# The layers, lowest first, one per line. Members may import from lower layers and from
# their own package.
LAYERS = [
    "base",
    "protocol",
    "documents",
    "plan",
    "agent",
    "schedulers",
    "config record",
    "verify trace",
    "lifecycle console",
    "report",
    "launcher",
    "submit",
    "doctor",
    "commands",
    "api",
    "cli_completion",
    "cli",
    "__main__",
]

# The layers within the runtime. An entry is a module of tfcluster.runtime, or a package
# with all of its modules except those that have their own entry.
RUNTIME_LAYERS = [
    "errors",
    "lazy_names",
    "tensor_types",
    "tf1_types",
    "process_identity",
    "context",
    "telemetry",
    "tf_server",
    "scripts",
    "files",
    "signals",
    "contract",
    "tf_patches",
    "tf_internals",
    "keras.types",
    "keras.patches",
    "keras.internals",
    "tf1.patches",
    "net",
    "collective",
    "tensors",
    "recording_files",
    "collective.transports.tensorflow",
    "parameter_server",
    "process_group",
    "process_sets",
    "exchange",
    "data_service",
    "partition",
    "keras.tf_variables",
    "keras.training_session",
    "keras.data",
    "keras.train",
    "keras.strategies",
    "keras",
    "tf1",
    "horovod",
    "callbacks elastic",
    "task",
    "warm",
    "",
    "horovod.keras_module",
    "site",
]
# Dependencies that are slow to import or that few modules should depend on -> the only
# modules that may import them.
ONLY = {
    "click": {"cli", "cli_completion"},
    "yaml": {"config"},
    "paramiko": {"schedulers.ssh"},
    "tensorflow": {"runtime"},
    "keras": {"runtime"},
    "numpy": {"runtime", "verify", "base.plain_data"},
    "h5py": {"verify"},
    "matplotlib": {"report"},
    "mpi4py": {"runtime.collective.transports.mpi"},
}

# The runtime is started with -m or imported by the user's script; no other part of
# tfcluster imports it.
RUNTIME_MAY_IMPORT = {"runtime", "base", "protocol", "plan.model"}
# The agent is shipped to hosts that have only Python.
AGENT_MAY_IMPORT = {"agent", "base", "protocol"}


@functools.cache
def _modules() -> list[str]:
    names = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(part for part in parts if part != "__init__"))
    return [name for name in names if name]


@functools.cache
def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    source = path.with_suffix(".py")
    if not source.exists():
        source = path / "__init__.py"
    return ast.parse(source.read_text())


@functools.cache
def _import_statements(module: str) -> list[ast.Import | ast.ImportFrom]:
    """Those at any place in the source of a module."""
    nodes = ast.walk(_tree(module))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def _imports(module: str) -> Iterator[str]:
    """Every name that the module imports."""
    for node in _import_statements(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _modules_imported(module: str) -> Iterator[str]:
    """The imported modules; for ``from PACKAGE import MODULE`` only the latter."""
    known = set(_modules())
    for node in _import_statements(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = name.removeprefix("tfcluster.") in known
                yield name if is_module else node.module


def _own_imports(module: str) -> set[str]:
    """The top-level members of tfcluster that a module imports."""
    known = {name.split(".")[0] for name in _modules()}
    return {
        name.split(".")[1]
        for name in _imports(module)
        if name.startswith("tfcluster.") and name.split(".")[1] in known
    }


def _foreign(module: str, allowed: set[str]) -> set[str]:
    """The imported modules of tfcluster that are not in the allowed packages."""
    known = set(_modules())
    imported = {
        name.removeprefix("tfcluster.") for name in _modules_imported(module)
    } & known
    return {
        name
        for name in imported
        if not any(f"{name}.".startswith(f"{package}.") for package in allowed)
    }


def _level(member: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if member in layer.split())


def test_every_module_has_its_layer() -> None:
    placed = {name for layer in LAYERS for name in layer.split()}
    members = {name.split(".")[0] for name in _modules()}
    assert members == placed | {"runtime"}


def test_a_module_imports_only_from_below() -> None:
    wrong = []
    for module in _modules():
        own = module.split(".")[0]
        if own in ("runtime", "agent"):
            continue
        wrong += [
            f"{module} imports {member}"
            for member in _own_imports(module) - {own}
            if member == "runtime" or _level(member) >= _level(own)
        ]
    assert not wrong


def test_the_agent_can_be_shipped_alone() -> None:
    shipped = ("agent", "protocol")
    agent = [module for module in _modules() if module.startswith(shipped)]
    assert agent
    for module in agent:
        assert not _foreign(module, AGENT_MAY_IMPORT), module
        foreign = {
            name.split(".")[0]
            for name in _imports(module)
            if not name.startswith("tfcluster")
        }
        assert foreign <= set(sys.stdlib_module_names), module


def test_the_runtime_stands_alone() -> None:
    wrong = {
        module: foreign
        for module in _modules()
        if module.startswith("runtime")
        and (foreign := _foreign(module, RUNTIME_MAY_IMPORT))
    }
    assert not wrong


def _runtime_level(module: str) -> int:
    """The index of the layer that has the longest prefix of ``module``."""
    while module not in _RUNTIME_LEVELS:
        module = module.rpartition(".")[0]
    return _RUNTIME_LEVELS[module]


_RUNTIME_LEVELS = {
    name: level
    for level, line in enumerate(RUNTIME_LAYERS)
    for name in line.split() or [""]
}


@functools.cache
def _runtime_imports(module: str) -> set[str]:
    """The runtime modules that a module imports, relative to ``tfcluster.runtime``."""
    known = set(_modules())
    return {
        name.removeprefix("tfcluster.runtime").lstrip(".")
        for name in _modules_imported(module)
        if name.startswith("tfcluster.runtime")
        and name.removeprefix("tfcluster.") in known
    }


def test_the_runtime_has_layers_of_its_own() -> None:
    wrong = []
    for module in _modules():
        if not module.startswith("runtime"):
            continue
        own = module.removeprefix("runtime").lstrip(".")
        wrong += [
            f"{own} imports {imported}"
            for imported in _runtime_imports(module) - {own}
            if _runtime_level(imported) > _runtime_level(own)
        ]
    assert not wrong


def test_there_are_no_import_cycles() -> None:
    """There are no circular imports, including imports within functions."""
    known = set(_modules())
    needs = {
        module: {name.removeprefix("tfcluster.") for name in _modules_imported(module)}
        & known
        for module in known
    }
    done: set[str] = set()

    def follow(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for needed in needs[module] - {module}:
                follow(needed, (*path, module))
            done.add(module)

    for module in needs:
        follow(module, ())


def test_heavy_packages_are_imported_in_one_package_only() -> None:
    wrong = []
    for module in _modules():
        for name in _imports(module):
            packages = ONLY.get(name.split(".")[0])
            if packages is not None and not any(
                module == package or module.startswith(f"{package}.")
                for package in packages
            ):
                wrong.append(f"{module} imports {name}")
    assert not wrong


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        (
            "tfcluster",
            "typing click yaml psutil tensorflow numpy tfcluster.api",
        ),
        ("tfcluster.api", "click yaml paramiko psutil tensorflow numpy"),
        ("tfcluster.cli", "yaml paramiko psutil tensorflow tfcluster.config"),
        ("tfcluster.commands.status_logs", "yaml paramiko psutil tensorflow"),
        ("tfcluster.commands.report_trace", "yaml paramiko psutil matplotlib"),
        ("tfcluster.schedulers", "importlib.metadata tfcluster.plan"),
        ("tfcluster.config.sections", "yaml paramiko psutil"),
        ("tfcluster.config", "yaml paramiko psutil tensorflow"),
        ("tfcluster.agent.supervisor", "yaml psutil click subprocess.run"),
        ("tfcluster.runtime", "tensorflow numpy psutil click yaml"),
    ],
)
def test_importing_is_cheap(module: str, forbidden: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not set(forbidden.split()) & set(done.stdout.split())


def test_a_plain_launch_imports_little(tmp_path: Path) -> None:
    """A launch of programs that do nothing is all start: imports are most of it."""
    forbidden = (
        "concurrent.futures decimal hashlib logging paramiko pydantic secrets "
        "statistics tarfile tensorflow tomllib xml yaml tfcluster.config.explain "
        "tfcluster.config.parse tfcluster.schedulers.slurm tfcluster.schedulers.ssh "
        "tfcluster.submit.job"
    )
    program = (
        "import sys\nfrom tfcluster.cli import main\ntry: main()\n"
        "finally: print('modules:', *sys.modules, file=sys.stderr)"
    )
    words = ["launch", "-n", "2", "--set", "runtime.strategy=none", "--", "true"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TFCLUSTER_STATE_DIR": str(tmp_path / "state")},
        check=True,
    )
    modules = done.stderr.partition("modules:")[2].split()
    assert "tfcluster.launcher.driver" in modules
    assert not set(forbidden.split()) & set(modules)


# The only modules that may use private names of Keras and TensorFlow.
INTERNALS = {
    "runtime.keras.internals",
    "runtime.partition.tf_datasets",
    "runtime.partition.tf_functions",
    "runtime.tf_internals",
}
TABLES_OF_PATCHES = {
    "runtime.keras.patches",
    "runtime.tf_patches",
    "runtime.tf1.patches",
}
PRIVATE_OF_OTHERS = {
    # Uses the group of a ProcessSet, a class of this module.
    "runtime.process_sets",
    # Uses Python's runpy.
    "runtime.scripts.run_script",
}
SETS_ATTRIBUTES = {
    # Applies the tables of patches.
    "runtime.contract",
    # Public names of packages of our own.
    "runtime.lazy_names",
    # Attributes of its own object, with names chosen by the user's program.
    "runtime.elastic",
    # The start of a command's process, of which Python has no audit event.
    "runtime.files.private_files",
    # Methods of its own class.
    "runtime.horovod.tf1_optimizer",
    # Its own modules, which are named horovod.
    "runtime.horovod.module_names",
    # A mark on its own function.
    "runtime.keras.metrics.metrics",
    "runtime.keras.train.sharded_steps",
    # Attributes of an optimizer that this module created: all plain values (numbers,
    # strings, None) of the program's optimizer, whose class may be the program's own.
    # Those of Keras's private attributes are among them, but none is used by its name.
    "runtime.keras.strategies.optimizer_replica",
    # Its own threading.local.
    "runtime.keras.session",
    # Loaders in Python's import system.
    "runtime.site.sitecustomize",
    "runtime.task.import_hook",
}
RUNTIME = [module for module in _modules() if module.startswith("runtime")]
TABLES = {
    "keras.": keras_patches.PATCHES,
    "tensorflow.": tf_patches.PATCHES,
    "tensorflow.compat.v1.": tf1_patches.PATCHES,
}
"""The patches of each library, by the beginning of their paths."""
PATCHED = {patch.attribute for table in TABLES.values() for patch in table}


NAMES = (
    *internals.NAMES,
    *tf_datasets.NAMES,
    *tf_functions.NAMES,
    *tf_internals.NAMES,
    *tf_internals.NAMES_OF_TF1,
    *tf_internals.NAMES_OF_OPTIMIZER_1,
)
PUBLIC_OF_PRIVATE = {"data_adapter", "num_batches", "steps_per_epoch"}
"""Attributes without an underscore, but of private classes."""


@pytest.mark.parametrize("module", RUNTIME)
def test_private_names_of_libraries_are_used_in_two_modules_only(module: str) -> None:
    if module in INTERNALS:
        return
    for name in _imports(module):
        assert not f"{name}.".startswith(("keras.src.", "tensorflow.python.")), name
    if module not in PRIVATE_OF_OTHERS:
        assert not list(_private_names(_tree(module)))
    if module not in TABLES_OF_PATCHES:
        assert not list(_private_strings(_tree(module)))


@pytest.mark.parametrize("module", RUNTIME)
def test_private_methods_are_overridden_by_the_tables_alone(module: str) -> None:
    own = module.removeprefix("runtime").lstrip(".")
    known = {each.name for each in NAMES if own and each.overridden_in == own}
    found = dict(_overridden(_tree(module)))
    if module not in INTERNALS:
        assert not {name: line for name, line in found.items() if name not in known}
    assert known <= {*found}


def test_what_needs_no_hooks_is_checked_without_them() -> None:
    """Modules outside of ``keras`` use only names that ``tf_internals.check`` finds."""
    names = [
        *tf_internals.NAMES_WITHOUT_KERAS,
        *tf_internals.NAMES_OF_TF1,
        *tf_internals.NAMES_OF_OPTIMIZER_1,
    ]
    bodies = {
        node.name: node
        for node in _tree("runtime.tf_internals").body
        if isinstance(node, ast.FunctionDef)
    }
    # It asks whether the name is there.
    del bodies["could_record"]
    used = {
        node.attr
        for module in RUNTIME
        if not module.startswith("runtime.keras.")
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) == "tf_internals"
        and node.attr in bodies
    }
    assert {"context", "is_eager", "share_server"} <= used
    checked = {each.path for each in names} | {each.name for each in names}
    others = {each.name for each in tf_internals.NAMES} - checked
    for body in map(bodies.__getitem__, used):
        nodes = list(ast.walk(body))
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in nodes:
            if isinstance(node, ast.Attribute):
                of = ast.unparse(node.value)
                if of in imported:
                    assert f"{imported[of]}.{node.attr}" in checked, body.name
                elif node.attr != "__internal__" and (
                    _is_private(node.attr) or of.endswith("__internal__")
                ):
                    assert node.attr in checked, body.name
            elif isinstance(node, ast.Constant):
                assert node.value not in others, body.name


@pytest.mark.parametrize("module", RUNTIME)
def test_libraries_are_patched_by_the_tables_alone(module: str) -> None:
    if module not in SETS_ATTRIBUTES:
        assert not list(_set_on_others(_tree(module)))


@pytest.mark.parametrize("library", TABLES)
def test_each_table_has_the_attributes_of_its_library(library: str) -> None:
    """So each attribute is in one table, and is wrapped once."""
    for patch in TABLES[library]:
        assert patch.path.startswith(library)
    paths = [(patch.path, patch.how) for patch in TABLES[library]]
    others = {
        (patch.path, patch.how)
        for name, table in TABLES.items()
        for patch in table
        if name != library
    }
    assert not others & {*paths}


def test_what_is_below_keras_imports_nothing_of_it() -> None:
    first = _RUNTIME_LEVELS["keras.tf_variables"]
    wrong = [
        f"{module} imports {name}"
        for module in RUNTIME
        if _runtime_level(own := module.removeprefix("runtime").lstrip(".")) < first
        and not own.startswith("keras.")
        for name in _runtime_imports(module)
        if name.startswith("keras.")
    ]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "optimizer._iterations",
        "getattr(metric, '_fn', None)",
        "hasattr(super(), '_moments')",
        "tf.__internal__.EagerTensor",
        "iterator.data_adapter.num_batches",
    ],
)
def test_private_names_are_seen(source: str) -> None:
    assert list(_private_names(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    ["x = 'seed_generator_state'", "'seed_generator' in path", "'_num_batches'"],
)
def test_private_names_in_strings_are_seen(source: str) -> None:
    assert list(_private_strings(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import keras\nclass A(keras.Layer):\n def _moments(self): pass",
        "import keras\nclass A(keras.Layer):\n _moments = 1",
        "import keras\nclass A(keras.Layer): pass\nclass B(A):\n def _x(self): pass",
        "from keras import Layer\nclass A(B, Layer):\n async def _x(self): pass",
        "kind = type('A', (tf.data.Dataset,), {'_inputs': 1})",
        "kind = type('A', (tf.data.Dataset,), {internals.NAME: 1})",
        "kind = type('A', (tf.data.Dataset,), body)",
    ],
)
def test_overridden_private_methods_are_seen(source: str) -> None:
    assert dict(_overridden(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import keras\nkeras.Model.anything = 1",
        "import tensorflow as tf\ntf1 = tf.compat.v1\ntf1.train.Server.join = 1",
        "from keras import Model\nModel.anything = 1",
        "kind.__call__ = call",
        "iterator.__class__ = kind",
        "setattr(owner, name, 1)",
        "vars(model)['train_step'] = step",
        "del module.get_file",
    ],
)
def test_patches_are_seen(source: str) -> None:
    assert list(_set_on_others(ast.parse(source)))


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Uses of private attributes of objects other than ``self`` and ``cls``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            asked, name = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            asked, name = node.args[0], str(node.args[1].value)
        else:
            continue
        own = isinstance(asked, ast.Name) and asked.id in ("self", "cls", "os", "sys")
        if not own and (_is_private(name) or name in PUBLIC_OF_PRIVATE):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _is_private(name: str) -> bool:
    """Whether an attribute is a library's own business."""
    # The _fields of named tuples are documented.
    known = name.startswith(("__", "_tfcluster_")) or name == "_fields"
    return name == "__internal__" or (name.startswith("_") and not known)


def _private_strings(tree: ast.Module) -> Iterator[str]:
    """Strings that are, or begin, a name in the tables of names."""
    private = {each.name for each in NAMES if each.name.startswith("_")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            begins = len(text) > 1 and internals.SEED_STATE.startswith(text)
            if text in private or (begins and "_" in text):
                yield f"{node.lineno}: {text!r}"


def _overridden(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Private attributes in classes that are derived from a library's, with lines.

    A class need not override a method of its base: a later version may have one of
    that name. So methods of our own begin with ``_tfcluster_``.
    """
    foreign = _foreign_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if not foreign & {
                ast.unparse(base).partition(".")[0] for base in node.bases
            }:
                continue
            foreign.add(node.name)
            for each in node.body:
                yield from (
                    (name, each.lineno) for name in _defined(each) if _is_private(name)
                )
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "type"
            and len(node.args) > 1
        ):
            body = node.args[2]
            keys = body.keys if isinstance(body, ast.Dict) else [None]
            for key in keys:
                name = key.value if isinstance(key, ast.Constant) else "a computed name"
                if not isinstance(key, ast.Constant) or _is_private(str(name)):
                    yield str(name), node.lineno


def _defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement in the body of a class defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (each.id for each in node.targets if isinstance(each, ast.Name))
    elif (
        isinstance(node, ast.AnnAssign)
        and node.value is not None
        and isinstance(node.target, ast.Name)
    ):
        yield node.target.id


def _set_on_others(tree: ast.Module) -> Iterator[str]:
    """Statements that set attributes of libraries, or attributes by computed names."""
    foreign = _foreign_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found = node.func.id in ("setattr", "delattr")
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found = ast.unparse(node.value).startswith("vars(")
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            name = root.id if isinstance(root, ast.Name) else ""
            patched = name != "self" and node.attr in PATCHED | {"__class__"}
            found = name in foreign or patched
        else:
            continue
        if found:
            yield f"{node.lineno}: {ast.unparse(node)}"


def _foreign_names(tree: ast.Module) -> set[str]:
    """The names in a module, including aliases, that refer to Keras or TensorFlow."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = getattr(node, "module", None)
            for alias in node.names:
                package = (home or alias.name).partition(".")[0]
                if package in ("keras", "tensorflow"):
                    found.add(alias.asname or alias.name.partition(".")[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in found:
                found |= {
                    each.id for each in node.targets if isinstance(each, ast.Name)
                }
    return found


def test_the_name_of_a_class_has_one_meaning() -> None:
    modules: dict[str, set[str]] = {}
    for module in _modules():
        for node in ast.walk(_tree(module)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, set()).add(module)
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}

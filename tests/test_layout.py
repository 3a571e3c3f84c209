"""The house's rules, read from the source: the direction of imports, the only reader of the environment, the modules that `import svod`
loads, and the places that docs/layout.md names."""
from __future__ import annotations

import ast
import gc
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from operator import gt
from pathlib import Path

import pytest

import svod

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "svod"
FILES = sorted(p.relative_to(ROOT) for p in PACKAGE.rglob("*.py"))

# parts that every other part may import; "svod" is the root package with the version and lazy names
COMMON = {"svod", "errors", "config", "system"}
ALLOWED = {
    "system": {"errors"},
    "core": {"errors", "system"},
    "tensor": {"core", "errors", "system"},
    "nn": {"core", "tensor", "errors", "system"},
    "compile": {"core", *COMMON},
    "bench": {"core", "compile", *COMMON},
    "steps": {"core", "compile", *COMMON},
    "tune": {"core", "compile", "bench", "steps", *COMMON},
}
# modules of higher layers that a file imports by name when it first needs them, with the reason
UPWARD = {
    ("svod/tensor/realize.py", "svod.prepare"): "the pipeline that computes tensors is made of everything that stands above them",
    ("svod/tensor/realize.py", "svod.tracing.graphs"): "it keeps plans of graphs, and stands above the pipeline",
    ("svod/bench/peers/alone.py", "svod.cli.bench.alone"): "a process of its own runs it, where svod's front doors are a contestant",
    ("svod/compile/plan/execution_plan.py", "svod.bench.analyze"): "plan.analyze() is a method; the analysis reads plans and ceilings",
    ("svod/compile/plan/plan_parts.py", "svod.steps.notebook"): "plans and kernels are shown in notebooks by what reads their passes",
    ("svod/compile/cpu/backend.py", "svod.bench.ceiling_loops"): "a backend names what measures its ceilings; that "
                                                                 "runs plans, and is imported when it is asked for",
    ("svod/compile/webgpu/backend.py", "svod.bench.device_ceilings"): "the same",
    ("svod/compile/cuda/backend.py", "svod.bench.device_ceilings"): "the same",
}
HEAVY = ("ray", "rich", "click", "sqlite_utils", "sqlite3", "llvmlite", "multiprocessing", "platformdirs", "pycuda", "optuna",
         "sklearn")


@pytest.fixture(scope="module", autouse=True)
def _without_collector() -> Iterator[None]:
    """Turns off the garbage collector, which would go over the nodes again and again, and drops them at the end."""
    gc.disable()
    yield
    for cached in (tree_of, nodes_of):
        cached.cache_clear()
    gc.enable()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file, which most rules walk over."""
    nodes: list[ast.AST] = [tree_of(path)]
    for node in nodes:      # the list grows; twice as fast as ast.walk
        for value in vars(node).values():
            if isinstance(value, list):
                nodes += [v for v in value if isinstance(v, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:
                nodes.append(value)
    return nodes


def imports_of(path: Path) -> Iterator[str]:
    """Modules of svod that a file imports anywhere in it; `from svod import prepare` counts as svod.prepare."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "svod")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            module = node.module or ""
            if module.split(".")[0] == "svod":
                folder = ROOT / module.replace(".", "/")
                yield from {f"{module}.{a.name}" if (folder / f"{a.name}.py").exists() or (folder / a.name).is_dir() else module
                            for a in node.names}


def test_modules_imported_by_name_are_declared() -> None:
    """A string that names a module of another part is in `UPWARD`; names of loggers are not modules."""
    found = set()
    for path in FILES:
        own = path.parts[1] if len(path.parts) > 2 else path.stem
        loggers = {id(a) for n in nodes_of(path) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
                   and n.func.attr == "getLogger" for a in n.args}
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"svod(\.\w+)+", node.value) \
                    and id(node) not in loggers and (ROOT / f"{node.value.replace('.', '/')}.py").exists() \
                    and own in ALLOWED and part_of(node.value) not in {own, *ALLOWED[own]}:
                found.add((path.as_posix(), node.value))
    assert found == set(UPWARD)


def part_of(module: str) -> str:
    """svod.core.ir.uop → core; svod.config → config; svod → svod."""
    return module.split(".")[1] if "." in module else "svod"


# allowed imports of parts that have no entry in `ALLOWED`
BELOW = {"errors": set[str](), "config": {"errors", "system"}}


def test_imports_point_one_way() -> None:
    astray = []
    for path in FILES:
        own = path.parts[1] if len(path.parts) > 2 else path.stem
        allowed = ALLOWED.get(own, BELOW.get(own))
        for module in imports_of(path):
            part = part_of(module)
            if part != own and path.as_posix() != "svod/__main__.py" and (part == "cli" if allowed is None else part not in allowed):
                astray.append(f"{path} imports {module}: {own} may import {sorted(allowed) if allowed is not None else 'all but cli'}")
    assert not astray


# -- the shape of the house ---------------------------------------------------------------------------

TOP = {"__init__", "__main__", "config", "errors", "prepare", "explaining", "by_hand"}     # explain.py would hide svod.explain
MOST_FILES = 16             # most files in a folder
MOST_OF_ONE_CONCEPT = 18    # most files in a folder about a single concept
# folders about a single concept, with that concept
ONE_CONCEPT = {"svod/core/graph": "the graph of nodes over buffers", "svod/cli/tune": "the steps of one command",
               "svod/core/tree": "the loop tree and its passes"}
MOST_LINES = 80             # most lines of a function
MOST_BRANCHES = 25          # largest cyclomatic complexity of a function
MOST_METHODS = 30           # most methods of a class, including properties
MOST_ATTRIBUTES = 24        # most attributes of a mutable object; fields of records are not limited
# classes that exceed these limits, with their allowed numbers of methods and attributes
LARGE_CLASSES = {
    # a method per operation
    "tensor/tensor.py:Tensor": (60, 2), "tensor/operations/elementwise.py:Elementwise": (116, 0),
    "tensor/operations/movement.py:Movement": (40, 0), "tensor/operations/functions.py:Functions": (35, 0),
    "tensor/operations/nn.py:NeuralNetwork": (34, 0),
    # a method per call of the driver, per kind of instruction, per operation whose error is bounded
    "compile/cuda/driver.py:Driver": (44, 1), "compile/lower/interpreter.py:PhaseInterpreter": (32, 20),
    "tune/measure/bounds.py:_Analysis": (33, 7),
    # a method per question or wish of a person
    "tune/hand_kernel.py:HandKernel": (33, 4), "compile/plan/execution_plan.py:ExecutionPlan": (35, 21),
    # several concepts in one class
    "compile/webgpu/device.py:WebGpuDevice": (20, 27),
}


def test_few_modules_stand_at_the_top() -> None:
    assert {p.stem for p in FILES if len(p.parts) == 2} == TOP


def test_no_folder_is_crowded() -> None:
    counts = Counter(p.parent.as_posix() for p in FILES if p.name not in ("__init__.py", "__main__.py"))
    assert not {folder: n for folder, n in counts.items() if n > (MOST_OF_ONE_CONCEPT if folder in ONE_CONCEPT else MOST_FILES)}
    assert not [folder for folder in ONE_CONCEPT if counts[folder] <= MOST_FILES]


def test_each_file_says_what_it_is_for() -> None:
    missing = [p.as_posix() for p in FILES
               if not (ast.get_docstring(tree_of(p)) or "").split("\n\n")[0].rstrip().endswith((".", ":"))]
    assert not missing, f"these files do not begin with a sentence: {missing}"


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and under TYPE_CHECKING count: a circle is one wherever it closes. The package's root does not count: it
    holds the version, and names that are looked up when they are first used."""
    modules = {module_of(p): p for p in FILES}
    below = {m: {x if x in modules else x.rpartition(".")[0] for x in imports_of(p)} & modules.keys() - {m, "svod"}
             for m, p in modules.items() if m != "svod"}
    while below:
        free = {m for m, needs in below.items() if not needs & below.keys()}
        if not free:
            break
        for m in free:
            del below[m]
    while below:    # a module that only imports members of a cycle is not in it
        outer = {m for m in below if not any(m in needs for needs in below.values())}
        if not outer:
            break
        for m in outer:
            del below[m]
    assert not below, {m: sorted(needs & below.keys()) for m, needs in below.items()}


Function = ast.FunctionDef | ast.AsyncFunctionDef


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    todo: list[ast.AST] = list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, Function):
            todo += ast.iter_child_nodes(node)


def complexity(function: Function) -> int:
    """McCabe's complexity of a function: one, plus one for each branch, loop, handler, comprehension, condition in one, and operand of a
    Boolean expression after the first."""
    total = 1
    for node in own_nodes(function):
        if isinstance(node, (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.match_case)):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
    return total


def test_functions_can_be_read() -> None:
    functions = [(path, f) for path in FILES for f in nodes_of(path) if isinstance(f, Function)]
    long = [f"{path}:{f.lineno}: {f.name} has {n} lines" for path, f in functions
            if (n := (f.end_lineno or f.lineno) - f.lineno + 1) > MOST_LINES]
    branched = [f"{path}:{f.lineno}: {f.name} has a complexity of {n}" for path, f in functions if (n := complexity(f)) > MOST_BRANCHES]
    assert functions and not long + branched


RECORDS = {"NamedTuple", "Enum", "IntEnum", "StrEnum", "Protocol", "TypedDict", "Struct"}


def is_record(c: ast.ClassDef) -> bool:
    """Whether a class is a record: a frozen dataclass, a tuple, or an enumeration."""
    return any("frozen=True" in ast.unparse(d) for d in c.decorator_list) or any(ast.unparse(b).split(".")[-1] in RECORDS for b in c.bases)


def attributes_of(c: ast.ClassDef, methods: list[Function]) -> set[str]:
    """The names of an object's attributes: fields that the class declares, and attributes that methods set on their first parameter."""
    names = {n.target.id for n in c.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for f in methods:
        own = f.args.args[0].arg if f.args.args else ""
        names |= {n.attr for n in ast.walk(f) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                  and isinstance(n.value, ast.Name) and n.value.id == own}
    return names - {f.name for f in methods}


def test_classes_can_be_read() -> None:
    large = dict[str, tuple[int, int]]()
    for path in FILES:
        for c in nodes_of(path):
            if isinstance(c, ast.ClassDef):
                methods = [f for f in c.body if isinstance(f, Function)]
                count, attributes = len({f.name for f in methods}), 0 if is_record(c) else len(attributes_of(c, methods))
                if count > MOST_METHODS or attributes > MOST_ATTRIBUTES:
                    large[f"{path.relative_to('svod').as_posix()}:{c.name}"] = count, attributes
    assert large.keys() == LARGE_CLASSES.keys(), "one that has shrunk leaves the table"
    assert not {name: size for name, size in large.items() if any(map(gt, size, LARGE_CLASSES[name]))}


MOST_SHARED_CLASS_NAMES = 10        # names that classes of several modules have
MOST_SHARED_CONSTANT_NAMES = 34     # names of constants that have several values


def test_names_have_one_meaning() -> None:
    """The bounds may fall. What is left are the holes of templates, and tables that have one role in sister modules."""
    classes, constants = dict[str, set[str]](), dict[str, set[str]]()
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).add(path.as_posix())
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and target.id.isupper() and node.value:
                constants.setdefault(target.id, set()).add(ast.dump(node.value))
    shared = [sorted(name for name, places in names.items() if len(places) > 1) for names in (classes, constants)]
    assert len(shared[0]) <= MOST_SHARED_CLASS_NAMES, shared[0]
    assert len(shared[1]) <= MOST_SHARED_CONSTANT_NAMES, shared[1]


def test_only_config_reads_the_environment() -> None:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    astray = [f"{path}:{node.lineno}" for path in FILES if path.as_posix() != "svod/config.py" for node in nodes_of(path)
              if (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in names)
              or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names})]
    assert not astray


PROCESS = Path("svod/system/process")
# by module: names that read state which a process inherits or gets from its parent
INHERITED = {
    "os": {"cpu_count", "process_cpu_count", "sched_getaffinity", "umask", "getcwd", "getcwdb", "sysconf", "getlogin"},
    "sys": {"argv", "orig_argv", "executable", "frozen"},
    "signal": {"signal", "getsignal", "pthread_sigmask"},
    "path": {"expanduser"}, "Path": {"cwd", "home"},
}
INHERITED_MODULES = {"getpass", "tempfile", "platformdirs", "psutil", "pwd"}
# files that may read one of these, with the reason
READERS = {
    ("svod/bench/load.py", "os.sysconf"): "the unit of the counters that it compares",
    ("svod/bench/load.py", "/proc"): "counters of load are compared before and after; they say nothing about the process",
    ("svod/bench/placing.py", "/proc"): "the times of threads, compared in the same way",
    ("svod/compile/plan/observe.py", "/tmp"): "where perf looks",
}


def inherited_reads(path: Path) -> Iterator[str]:
    """The attributes and paths by which a file reads the process: `os.cpu_count`, `/proc`, `.isatty`."""
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in INHERITED.get(owner, ()):
                yield f"{owner}.{node.attr}"
            elif node.attr in ("isatty", "expanduser"):
                yield f".{node.attr}"
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in INHERITED_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{a.name}" for a in node.names
                        if node.module.split(".")[0] in INHERITED_MODULES or a.name in INHERITED.get(node.module, ()))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^/(?:proc|sys|tmp|dev/shm)\b", node.value)


def test_only_system_reads_what_a_process_inherits() -> None:
    found = {(p.as_posix(), read) for p in FILES if PROCESS not in p.parents for read in inherited_reads(p)}
    assert found == set(READERS)


def loaded_by(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


# modules of the cost models that may be imported outside of backends: they describe devices, not prices
NO_MODELS = {"svod.core.cost.groups.device"}
PRICED_BY = ("svod/core/cost/", "svod/compile/cpu/backend.py", "svod/compile/group_backend.py")


def test_states_are_priced_by_their_backend() -> None:
    """States are priced by `backend.cost` only: a cost model for processors gives meaningless numbers for a state of a group device, and
    vice versa."""
    models = {module_of(p) for p in FILES if p.as_posix().startswith("svod/core/cost/groups/")} | {"svod.core.cost.cpu"}
    astray = [f"{path}: {name}" for path in FILES if not path.as_posix().startswith(PRICED_BY) for name in imports_of(path)
              if name in models - NO_MODELS]
    assert not astray


def test_import_svod_loads_nothing_heavy() -> None:
    loaded = loaded_by("import svod")
    assert not loaded & {*HEAVY, "numpy"}


def test_tensors_load_no_compiler() -> None:
    loaded = loaded_by("from svod import Tensor; (Tensor([1.0, 2.0]) + 1).sum()")
    assert not loaded & {*HEAVY, "svod.compile", "svod.tune"}


def test_prepare_loads_no_search() -> None:
    """A process that only runs models imports neither Ray nor what the command lines need."""
    loaded = loaded_by("from svod import Tensor; (Tensor([1.0, 2.0]) + 1).numpy()")
    assert not loaded & {"ray", "rich", "click", "svod.tune.session", "svod.tune.workers.executor"}


# -- docs/layout.md ---------------------------------------------------------------------------------

def functions_of(path: Path) -> set[str]:
    return {n.name for n in nodes_of(path) if isinstance(n, ast.FunctionDef)}


def test_places_that_the_page_names_are_there() -> None:
    page = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8").split("## Where is…")[1].split("\n## ")[0]
    named = re.findall(r"^\| [^|`]+ \| `([^`]+)`, `(\w+)` \|$", page, re.M)
    assert len(named) == len(re.findall(r"^\| ", page, re.M)) - 2 >= 15, "a row of the table is not a question, a file and a function"
    assert not [(file, name) for file, name in named if name not in functions_of(ROOT / file)]


def test_functions_on_the_way_to_the_machine_are_there() -> None:
    """Each line of the diagram names a function and the file that defines it."""
    page = (ROOT / "docs" / "from_tensor_to_machine.md").read_text(encoding="utf-8").split("```")[1]
    named = re.findall(r"^ +(\w+) +(svod/[\w/]+\.py)", page, re.M)
    assert len(named) >= 10
    assert not [(file, name) for name, file in named if name not in functions_of(ROOT / file)]


def test_folders_beside_the_package_are_there() -> None:
    page = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8").split("## Beside the package")[1]
    folders = re.findall(r"^\| `([^`]+)/` \|", page, re.M)
    assert folders and all((ROOT / f).is_dir() for f in folders)


def test_links_lead_somewhere() -> None:
    pages = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
    dead = [f"{page.relative_to(ROOT)} links to {target}" for page in pages
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
            if "://" not in target and not (page.parent / target).exists()]
    assert pages and not dead


# -- the project file ---------------------------------------------------------------------------------

def test_installed_commands_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["scripts"]) == {"svod-tune", "svod-db", "svod-bench"}
    for entry in project["scripts"].values():
        module, function = entry.split(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert project["version"] == svod.__version__

"""Dependencies point downwards only (docs/architecture.md), and the library core needs no server, Spark or Airflow."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ringsync

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "include" / "ringsync"

LAYERS = [
    {"compiled", "installed"},
    {"cql"},
    {"avro"},
    {"schema", "ring"},
    {"changes"},
    {"formats"},
    {"images", "scylla"},
    {"storage"},
    {"config"},
    {"cluster", "streams"},
    {"wiring"},
    {"sources", "replica", "state", "ledger"},
    {"progress", "status", "metrics", "terminal"},
    {"warm"},
    {"steps", "spark_daemon"},
    {"orchestration", "airflow_client", "inspect"},
    {"service"},
    {"cli"},
]
"""From the bottom; a module may import its own room and rooms below its own."""

CORE = {"compiled", "cql", "avro", "schema", "ring", "changes", "formats", "scylla", "images"}
CORE_LIBRARIES = {"numpy", "numba", "llvmlite", "pyarrow", "fastavro", "isal", "cryptography"}


def imports(path: Path, at_top_level_only: bool = False) -> set[str]:
    """Full names of the modules that a file imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    level = {name: index for index, names in enumerate(LAYERS) for name in names}
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in level, f"{own} is in no layer: add it to LAYERS"
    for module in imports(path):
        if module.startswith("ringsync.") and (other := room(module)) in level:
            assert other == own or level[other] < level[own], f"{path.name} imports {module}, which is not below it"


def name_of(path: Path) -> str:
    return ".".join(("ringsync", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {name_of(path): path for path in files()}
    circles = TopologicalSorter({name: imports(path) & names.keys() for name, path in names.items()})
    circles.prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("path", [p for p in files() if p.relative_to(PACKAGE).parts[0] in CORE], ids=str)
def test_the_core_needs_few_libraries(path: Path) -> None:
    foreign = {module.split(".")[0] for module in imports(path)} - {"ringsync"}
    standard = foreign & set(__import__("sys").stdlib_module_names)
    assert foreign - standard <= CORE_LIBRARIES


def test_kernels_are_compiled_anew_where_those_change_that_they_contain() -> None:
    with_kernels = {room(name_of(path)) for path in files() if "njit" in path.read_text()}
    assert with_kernels == set(ringsync._ROOMS_WITH_KERNELS)


def test_no_airflow_inside_the_package() -> None:
    for path in files():
        assert not any(module.split(".")[0] == "airflow" for module in imports(path)), path


def test_files_are_short() -> None:
    code = [*PACKAGE.rglob("*.py"), *(ROOT / "dags").glob("*.py"), *(ROOT / "spark_apps").glob("*.py")]
    code += [*(ROOT / "servers").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    too_long = {str(p.relative_to(ROOT)): n for p in code if (n := len(p.read_text().splitlines())) > 500}
    assert not too_long

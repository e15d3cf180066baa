"""Imports of the package without TorchRec, before torch or TorchRec or after them, and from any folder.

Type checkers read user_types.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from interpreter_exits import Interpreters

import rec_sdk_torch as rst

ROOT = Path(rst.__file__).resolve().parents[1]

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONWARNINGS": "ignore"}
"""The environment of the processes, in which torch does not load an installed torch_npu."""


def run(code: str, *blocked: str, folder: Path = ROOT) -> str:
    """Runs `code` in a fresh interpreter that cannot import `blocked`; returns its output."""
    command = [sys.executable, "-c", (BLOCK.format(blocked=blocked) if blocked else "") + code]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


Run = Callable[..., str]


@pytest.fixture(scope="module")
def after_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Returns a function like `run` that forks its processes from a process that has only imported torch."""
    interpreters = Interpreters("torch", **ENVIRONMENT)

    def run_after_torch(code: str, *blocked: str) -> str:
        prefix = "import os\nos.chdir(folder)\n" + (BLOCK.format(blocked=blocked) if blocked else "")
        (end,) = interpreters.run(prefix + code, 1, tmp_path_factory.mktemp("after_torch"))
        assert end.status == 0, end.printed
        return end.printed

    yield run_after_torch
    interpreters.close()


def test_every_public_name_exists() -> None:
    pytest.importorskip("torchrec")
    assert set(rst.__all__) <= set(dir(rst))
    for name in rst.__all__:
        assert getattr(rst, name).__name__ == name
    assert {"TableBatchedEmbedding", "TableConfig", "TableOptimizer", "Pooling"} <= set(rst.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        rst.no_such_name  # noqa: B018


PACKAGES = """
import sys
import rec_sdk_torch
assert not {"torch", "torchrec"} & {name.partition(".")[0] for name in sys.modules}
print("compat" in dir(rec_sdk_torch), "export" in dir(rec_sdk_torch))
for name in ("checkpoint", "export", "fbgemm", "ops", "serving", "tbe", "compat"):
    module = getattr(rec_sdk_torch, name)
    assert module is sys.modules[f"rec_sdk_torch.{name}"], name
    assert module.__doc__, name
    assert getattr(rec_sdk_torch, name) is module
    print(name, name in dir(rec_sdk_torch), name in rec_sdk_torch.__all__)
from rec_sdk_torch.checkpoint.validation import open_file
assert sys.modules["rec_sdk_torch.checkpoint.contents"].open_file is open_file
from rec_sdk_torch.checkpoint.errors import CheckpointError
from rec_sdk_torch.checkpoint.folders import chain_of, latest_save
from rec_sdk_torch.checkpoint.manifest import read_manifest
from rec_sdk_torch.formulas import SPECS
from rec_sdk_torch.record import RecordLayout
assert CheckpointError is rec_sdk_torch.CheckpointError
"""


def test_packages_are_attributes(tmp_path: Path) -> None:
    """Subpackages are attributes without an import; `import *` does not import compat, which changes torch and
    TorchRec.
    """
    pytest.importorskip("torchrec")
    lines = run(PACKAGES, folder=tmp_path).splitlines()
    assert lines[0] == "False True"
    assert lines[1:-1] == [f"{n} True False" for n in ("checkpoint", "export", "fbgemm", "ops", "serving", "tbe")]
    assert lines[-1].startswith("compat ")


def test_former_names_warn() -> None:
    with pytest.warns(FutureWarning, match="TableLife is now named TableLifecycle"):
        assert rst.TableLife is rst.TableLifecycle
    rules = rst.TableLifecycle(admission=rst.rules.Count(2))
    with pytest.warns(FutureWarning, match="life is now named lifecycle"):
        table = rst.TableConfig("t", 10, 4, life=rules)  # type: ignore[call-arg]
    assert table == rst.TableConfig("t", 10, 4, lifecycle=rules)
    with pytest.warns(FutureWarning, match="life is now named lifecycle"):
        assert table.life is rules  # type: ignore[attr-defined]


def test_former_names_of_members_warn() -> None:
    sgd = rst.TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
    table = rst.TableConfig("t", 10, 4)
    view = rst.TableBatchedEmbedding([table], optimizer=sgd, cache=4).view("t")
    former = [
        (table, "range_of_parts", "shard_init_range"),
        (rst.TableLifecycle(), "of_engine", "to_engine"),
        (sgd, "check_step", "check_deferrable"),
        (sgd, "acts_after_next", "has_table_pass_after_next"),
        (view, "begin_anew", "reset"),
        (view, "evicted_waiting", "pending_evicted_rows"),
    ]
    for owner, name, present in former:
        with pytest.warns(FutureWarning, match=f"{name} is now named {present}"):
            assert getattr(owner, name) == getattr(owner, present)


WITHOUT_TORCHREC = """
import torch
import rec_sdk_torch
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig, TableOptimizer
embedding = TableBatchedEmbedding(
    [TableConfig("t", 10, 4, init_min=1.0, init_max=1.0)], optimizer=TableOptimizer.create(torch.optim.SGD, {"lr": 0.5})
)
ids, offsets = torch.tensor([3, 3]), torch.tensor([0, 2])
embedding(ids, offsets).sum().backward()
print(embedding.eval()(ids, offsets).tolist())
print(rec_sdk_torch.AccumulateSGD.__name__, rec_sdk_torch.TableBatchedEmbedding is TableBatchedEmbedding)
for name in ("EmbCacheEmbeddingCollection", "HashEmbeddingBagConfig"):
    try:
        getattr(rec_sdk_torch, name)
    except ImportError as error:
        print(error)
try:
    from rec_sdk_torch import EmbCacheEmbeddingBagCollection
except ImportError as error:
    print(error)
rec_sdk_torch.fbgemm, rec_sdk_torch.serving
try:
    rec_sdk_torch.export
except ImportError as error:
    print(error)
"""


def test_without_torchrec(after_torch: Run) -> None:
    lines = after_torch(WITHOUT_TORCHREC, "torchrec", "fbgemm_gpu").splitlines()
    assert lines[:2] == ["[[0.0, 0.0, 0.0, 0.0]]", "AccumulateSGD True"]
    names = ("EmbCacheEmbeddingCollection", "HashEmbeddingBagConfig", "EmbCacheEmbeddingBagCollection", "export")
    refused = [line.partition(" needs ")[0] for line in lines[2:] if "torchrec, which is not installed" in line]
    assert refused == [f"rec_sdk_torch.{name}" for name in names]


def test_without_torch() -> None:
    code = """
import rec_sdk_torch
print(rec_sdk_torch.__version__, "EmbCacheEmbeddingCollection" in dir(rec_sdk_torch))
try:
    rec_sdk_torch.TableBatchedEmbedding
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run(code, "torch", "torchrec").split() == [rst.__version__, "True", "torch"]


WITHOUT_TORCH_NPU = """
import sys
sys.modules["torch_npu"] = None  # neither imported nor found
import rec_sdk_torch
from rec_sdk_torch.tbe import TableBatchedEmbedding, TableConfig
try:
    TableBatchedEmbedding([TableConfig("t", 10, 4)], device="npu")
except ImportError as error:
    print(error)
print(TableBatchedEmbedding([TableConfig("t", 10, 4)], device="cpu").device)
"""


def test_without_torch_npu(after_torch: Run) -> None:
    """The message recommends torch_npu only if CANN is installed; without CANN, torch_npu would break `import
    torch`.
    """
    variables = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH")
    without = f"[os.environ.pop(name, None) for name in {variables}]\n"
    error, device = after_torch(without + WITHOUT_TORCH_NPU).splitlines()
    assert "'npu' needs the package torch_npu" in error
    assert "pip install" not in error
    assert f"make -C {ROOT} build-npu && {ROOT}/.venv-npu/bin/python -m rec_sdk_torch.emulate program.py" in error
    assert device == "cpu"
    there = 'os.environ["ASCEND_HOME_PATH"] = "/usr/local/Ascend"\n'
    error, _ = after_torch(without + there + WITHOUT_TORCH_NPU).splitlines()
    assert f"{sys.executable} -m pip install --no-deps torch-npu==" in error
    assert "emulate" not in error


IN_TORCHREC = """
for name in ("AccumulateSGD", "AccumulateAdagrad", "AccumulateAdam"):
    assert getattr(torchrec.optim, name) is getattr(rec_sdk_torch, name)
from torchrec.optim import AccumulateAdam
assert isinstance(AccumulateAdam, type)
from rec_sdk_torch.formulas import spec_for
import torch
for cls in (torch.optim.SGD, torchrec.optim.RowWiseAdagrad, torchrec.optim.Adam, AccumulateAdam):
    assert spec_for(cls)
from torchrec.optim import GradientClipping, GradientClippingOptimizer
from torchrec.optim.clipping import GradientClippingOptimizer as Other
assert GradientClippingOptimizer is Other
collection = rec_sdk_torch.HashEmbeddingBagCollection([rec_sdk_torch.HashEmbeddingBagConfig(9, 4, "t")])
rec_sdk_torch.apply_optimizer_in_backward(torchrec.optim.AccumulateSGD, collection.parameters(), {"lr": 0.1})
try:
    GradientClippingOptimizer(collection.fused_optimizer, GradientClipping.NORM)
except ValueError as error:
    print("refused")
"""


TORCHREC_FIRST = """
import sys
import torchrec.optim
construct = torchrec.optim.GradientClippingOptimizer.__init__
before = set(sys.modules)
import rec_sdk_torch
for name in rec_sdk_torch.__all__:
    getattr(rec_sdk_torch, name)
print(*{name.partition(".")[0] for name in sys.modules.keys() - before} - {"rec_sdk_torch"})
print(*[name for name in sys.modules.keys() - before if name.startswith("torch")])
assert torchrec.optim.GradientClippingOptimizer.__init__ is construct
config = rec_sdk_torch.HashEmbeddingBagConfig(9, 4, "t")
for _ in range(2):
    collection = rec_sdk_torch.HashEmbeddingBagCollection([config])
    rec_sdk_torch.apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    collection.fused_optimizer
    assert torchrec.optim.GradientClippingOptimizer.__init__.__wrapped__ is construct, "once, by the first"
"""


PROCESS_GROUP = """
import os, torch
import torch.distributed as dist
{first}
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
import torchrec.optim.keyed, torchrec, torch.distributed.fsdp.sharded_grad_scaler
{then}
dist.barrier()
dist.destroy_process_group()
threads = [open(f"/proc/self/task/{{thread}}/comm").read().strip() for thread in os.listdir("/proc/self/task")]
print(*[name for name in threads if "gloo" in name])
"""


def test_importing_torchrec_first_changes_nothing_yet(after_torch: Run) -> None:
    """Importing torch modules is slow: `torch.distributed.optim` compiles eight optimizers, so it must not be imported.

    No class of TorchRec is changed before a fused optimizer is made. No thread outlives its process group, since it
    could abort the process at interpreter exit.
    """
    pytest.importorskip("torchrec")
    code = PROCESS_GROUP.format(first="", then=TORCHREC_FIRST + IN_TORCHREC)
    packages, of_torch, extended, threads = after_torch(code).splitlines()
    assert not set(packages.split()) - {"numpy", "filecmp"}
    assert (of_torch, extended, threads) == ("", "refused", "")


def test_torchrec_is_extended_when_it_comes_later(after_torch: Run) -> None:
    """No thread outlives its process group."""
    pytest.importorskip("torchrec")
    code = PROCESS_GROUP.format(first="import rec_sdk_torch", then=IN_TORCHREC)
    assert after_torch(code).splitlines() == ["refused", ""]


def test_importing_again_changes_nothing() -> None:
    torchrec = pytest.importorskip("torchrec")
    from rec_sdk_torch.optim import torchrec_hooks

    accumulate, finders = torchrec.optim.AccumulateSGD, list(sys.meta_path)
    torchrec_hooks.install()
    assert torchrec.optim.AccumulateSGD is accumulate
    assert sys.meta_path == finders

"""Import names of Rec SDK and dynamicemb: modules without files, which provide objects of `rec_sdk_torch`."""

from __future__ import annotations

import dis
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

from ..runtime.warn import ConfigurationWarning, warn

_CONFIGS = "EmbCacheEmbeddingConfig EmbCacheEmbeddingBagConfig AdmitAndEvictConfig InitializerType"
_SEQUENCES, _BAGS = "EmbCacheEmbeddingCollection", "EmbCacheEmbeddingBagCollection"
_HASH = "HashEmbeddingBagCollection HashEmbeddingBagConfig"
_PIPELINE, _HYBRID = "EmbCacheTrainPipelineSparseDist", "HybridTrainPipelineSparseDist"
_CONSTANTS = "compat.constants"
_LIMITS = (
    "MAX_NUM_EMBEDDINGS MAX_EMBEDDINGS_DIM EMBEDDINGS_DIM_ALIGNMENT MAX_NUM_TABLES MAX_MULTI_HOT_SIZE MAX_WORLD_SIZE "
    "MAX_BATCH_SIZE MAX_CACHINE_MEM_SIZE MAX_LOCAL_UNIQUE_PARALLEL_BATCH_NUM"
)
_SAVER = {"": "Saver", _CONSTANTS: "SAVE_PATH_MAX_LEN TIMESTAMP_FORMAT"}
_UTILS = {"compat.paths": "safe_makedirs check_path"}

_MODULES_OF_REC_SDK: dict[str, dict[str, str]] = {
    "torchrec_embcache": {},
    "torchrec_embcache.distributed": {"": f"{_CONFIGS} {_SEQUENCES} {_BAGS} {_PIPELINE}"},
    "torchrec_embcache.distributed.configs": {"": f"{_CONFIGS} ShowClickParams AdmitAndEvictPolicyType"},
    "torchrec_embcache.distributed.embedding": {"": f"{_SEQUENCES} EmbCacheEmbeddingConfig"},
    "torchrec_embcache.distributed.embedding_bag": {"": f"{_BAGS} EmbCacheEmbeddingBagConfig"},
    "torchrec_embcache.distributed.sharding": {},
    "torchrec_embcache.distributed.sharding.embedding_sharder": {"": f"{_SEQUENCES}Sharder {_BAGS}Sharder"},
    "torchrec_embcache.distributed.train_pipeline": {
        "": _PIPELINE,
        "distributed.train_pipeline": "EmbCacheTrainPipelineContext",
        _CONSTANTS: "MIN_EVICT_STEP_INTERVAL",
    },
    "torchrec_embcache.saver": _SAVER,
    "torchrec_embcache.sparse": {},
    "torchrec_embcache.sparse.jagged_tensor_with_timestamp": {
        "": "JaggedTensorWithTimestamp KeyedJaggedTensorWithTimestamp"
    },
    "torchrec_embcache.utils": _UTILS,
    "hybrid_torchrec": {"": _HASH, _CONSTANTS: "IS_TORCH_REC_120 IS_TORCH_REC_150"},
    "hybrid_torchrec.constants": {_CONSTANTS: _LIMITS},
    "hybrid_torchrec.distributed": {"": f"{_HYBRID} get_default_hybrid_sharders"},
    "hybrid_torchrec.distributed.hybrid_train_pipeline": {"": _HYBRID, _CONSTANTS: "MAX_PIPE_N_BATCH"},
    "hybrid_torchrec.distributed.sharding_plan": {"": "get_default_hybrid_sharders"},
    "hybrid_torchrec.modules": {},
    "hybrid_torchrec.modules.hash_embeddingbag": {"": _HASH},
    "hybrid_torchrec.saver": _SAVER,
    "hybrid_torchrec.utils": _UTILS,
}
"""Modules of Rec SDK. Each maps modules under `rec_sdk_torch` to the names taken from them."""

_MODULES_OF_DYNAMICEMB: dict[str, dict[str, str]] = {
    "": {
        "admission": "AdmissionStrategy Counter FrequencyAdmissionStrategy KVCounter",
        "dump_load": "DynamicEmbDump DynamicEmbLoad",
        "enums": (
            "BATCH_SIZE_PER_DUMP BUCKET_ALIGNMENT DEMB_TABLE_ALIGN_SIZE MAX_BUCKET_CAPACITY DynamicEmbCheckMode "
            "DynamicEmbEvictStrategy DynamicEmbInitializerArgs DynamicEmbInitializerMode DynamicEmbPoolingMode "
            "DynamicEmbScoreStrategy ScoreStrategy data_type_to_dtype data_type_to_dyn_emb dyn_emb_to_torch "
            "string_to_evict_strategy torch_to_dyn_emb"
        ),
        "options": (
            "DynamicEmbTableOptions EmbOptimType align_to_table_size get_sharded_table_capacity get_table_value_bytes"
        ),
    },
    ".batched_dynamicemb_tables": {"tables": "BatchedDynamicEmbeddingTablesV2"},
    ".dump_load": {"dump_load": "DynamicEmbDump DynamicEmbLoad find_sharded_modules get_dynamic_emb_module"},
    ".dynamicemb_config": {
        "enums": (
            "BATCH_SIZE_PER_DUMP DEFAULT_BUCKET_CAPACITY DEFAULT_INDEX_TYPE DYNAMICEMB_CSTM_SCORE_CHECK "
            "SUPPORTED_DIST_TYPES DynamicEmbCheckMode DynamicEmbEvictStrategy DynamicEmbInitializerArgs "
            "DynamicEmbInitializerMode DynamicEmbKernel DynamicEmbPoolingMode DynamicEmbScoreStrategy ScoreStrategy "
            "data_type_to_dtype data_type_to_dyn_emb dyn_emb_to_torch normalize_score_strategy "
            "string_to_evict_strategy BUCKET_ALIGNMENT DEMB_TABLE_ALIGN_SIZE MAX_BUCKET_CAPACITY"
        ),
        "options": (
            "DynamicEmbTableOptions align_to_table_size complete_initializer_args get_optimizer_state_dim "
            "get_sharded_table_capacity get_table_value_bytes"
        ),
    },
    ".embedding_admission": {"admission": "FrequencyAdmissionStrategy KVCounter"},
    ".incremental_dump": {"incremental_dump": "get_score incremental_dump set_score"},
    ".optimizer": {"options": "EmbOptimType get_optimizer_state_dim"},
    ".planner": {
        "planner": (
            "DynamicEmbParameterConstraints DynamicEmbParameterSharding DynamicEmbeddingEnumerator "
            "DynamicEmbeddingShardingPlanner"
        )
    },
    ".shard": {
        "shard": (
            "DynamicEmbeddingBagCollectionSharder DynamicEmbeddingCollectionSharder "
            "ShardedDynamicEmbeddingBagCollection ShardedDynamicEmbeddingCollection"
        )
    },
    ".types": {
        "admission": "AdmissionStrategy Counter",
        "enums": (
            "BUCKET_ALIGNMENT COUNTER_TYPE DEMB_TABLE_ALIGN_SIZE DynamicEmbInitializerArgs DynamicEmbInitializerMode "
            "EMBEDDING_TYPE KEY_TYPE MAX_BUCKET_CAPACITY OPT_STATE_TYPE SCORE_TYPE"
        ),
    },
    ".utils": {"enums": "DTYPE_NUM_BYTES torch_to_dyn_emb"},
}
"""Modules of dynamicemb. Each maps the modules of `rec_sdk_torch.compat.dynamicemb` to the names taken from them."""
_NAMES = _MODULES_OF_REC_SDK | {
    f"{package}{module}": {f"compat.dynamicemb.{source}": names for source, names in sources.items()}
    for package in ("dynamicemb", "dynamic_emb")  # Rec SDK 2 uses the second name
    for module, sources in _MODULES_OF_DYNAMICEMB.items()
}
MODULES = {module: " ".join(sources.values()).split() for module, sources in _NAMES.items()}
"""Names that each module provides."""
_SOURCES = {
    (module, name): f"rec_sdk_torch.{source}".rstrip(".")
    for module, sources in _NAMES.items()
    for source, names in sources.items()
    for name in names.split()
}
_PACKAGES = sorted({name.partition(".")[0] for name in MODULES})
_IMPORT = "_find_and_load_unlocked"
"""The importlib function that runs for import statements, but not for calls that only search for a module."""


def _is_from_import(frame: types.FrameType) -> bool:
    """Returns whether a frame is executing the import of `x` in `from module import x`.

    Such a statement replaces an AttributeError with its own ImportError, whose text is "unknown location".
    """
    return bool(frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"])


class _Module(types.ModuleType):
    """A module of Rec SDK or dynamicemb, which looks up a name at its first use, as `rec_sdk_torch` does."""

    def __getattr__(self, name: str) -> Any:
        names = MODULES[self.__name__]
        if name not in names:
            offered = f"it has {', '.join(names)}" if names else "it has submodules only"
            message = f"module {self.__name__!r} of rec_sdk_torch.compat has no {name!r}; {offered}"
            if not name.startswith("__") and _is_from_import(sys._getframe(1)):
                raise ImportError(message, name=self.__name__)
            raise AttributeError(message)
        value = getattr(importlib.import_module(_SOURCES[self.__name__, name]), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES[self.__name__]})


def _missing_module_message(module: str) -> str:
    """Returns the error message for a missing module, which lists the modules that its parent package provides."""
    parent = module.rpartition(".")[0]
    beside = [name for name in MODULES if name.rpartition(".")[0] == parent]
    offered = f"it has {', '.join(beside)}" if beside else "it has no submodules"
    return f"No module named {module!r}: rec_sdk_torch.compat takes the name of {parent!r}, and {offered}"


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name, f"{spec.name}, as rec_sdk_torch has it.")
        module.__all__ = MODULES[spec.name]  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing, since names are looked up at their first use; for `dynamicemb`, installs the CUDA names."""
        if module.__name__ == "dynamicemb":
            importlib.import_module("rec_sdk_torch.compat.dynamicemb.cuda_names").install()


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of the modules in `MODULES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            # Only import statements raise here; functions that search for a module, such as find_spec, expect None.
            if fullname.partition(".")[0] in _PACKAGES and sys._getframe(2).f_code.co_name == _IMPORT:
                raise ModuleNotFoundError(_missing_module_message(fullname), name=fullname)
            return None
        package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return importlib.machinery.ModuleSpec(fullname, _Loader(), origin="rec_sdk_torch.compat", is_package=package)


def install() -> None:
    """Makes the modules importable; warns if packages of the same names are installed, which are then not used.

    Raises:
        ImportError: one of the packages was imported before, so a script would mix it with this package.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for package in _PACKAGES:
        if package in sys.modules:
            raise ImportError(
                f"{package} was imported from {getattr(sys.modules[package], '__file__', None)} before "
                "rec_sdk_torch.compat: import rec_sdk_torch.compat first, or start the script with "
                "python -m rec_sdk_torch.compat",
                name=package,
            )
        installed = importlib.util.find_spec(package)
        if installed is not None:
            location = installed.origin or ", ".join(installed.submodule_search_locations or ())
            warn(
                f"{package} is installed ({location}), and is not used: rec_sdk_torch.compat takes its name",
                ConfigurationWarning,
            )
    sys.meta_path.insert(0, _Finder())

# All names that other packages may import from `tbe` (tests/test_layers.py checks it). __init__.py reads this file.
# isort: skip_file

# The tables of one module, and the public methods of every module with tables.
from .embedding import TableBatchedEmbedding as TableBatchedEmbedding
from .rows.layout import Layout as Layout
from .cache.device_cache import Group as Group
from .table_methods import TableMethods as TableMethods
from .rows.state_dict import TablesModule as TablesModule
from .._engine import CacheTooSmallError as CacheTooSmallError
from .._engine import CapacityError as CapacityError

# Configuration of a table: rules of admission and eviction, optimizer, cache size.
from .config.table import TableConfig as TableConfig
from .config.table import DIVIDED as DIVIDED
from .config.table import MAX_NAME_LENGTH as MAX_NAME_LENGTH
from .config.table import BoundsCheckMode as BoundsCheckMode
from .config.table import Home as Home
from .config.table import InitFn as InitFn
from .config.table import InitializerType as InitializerType
from .config.table import Pooling as Pooling
from .cache.group_spec import draw_initial_weights as draw_initial_weights
from .cache.group_spec import record_layout as record_layout
from .config.lifecycle import TableLifecycle as TableLifecycle
from .config.lifecycle import EvictReason as EvictReason
from .config.lifecycle import NEVER as NEVER
from .config.optimizer import TableOptimizer as TableOptimizer
from .config.optimizer import check_window as check_window
from .config.optimizer import use_defaults as use_defaults
from .options import EmbeddingOptions as EmbeddingOptions
from .options import Device as Device
from .options import Folder as Folder
from .config.cache_size import BatchHint as BatchHint
from .config.cache_size import CacheOption as CacheOption

# Batches and prefetched batches.
from .cache.batch import Batch as Batch
from .cache.batch import Int64Array as Int64Array
from .cache.batch import meta_error as meta_error
from .config.lifecycle import IdSignals as IdSignals
from .config.lifecycle import IdSignalArrays as IdSignalArrays
from .cache.batch import padded_offset_indices as padded_offset_indices
from .cache.padding_ids import PaddingIds as PaddingIds
from .cache.padding_ids import restore_padding_rows as restore_padding_rows
from .step.outputs import split_apart as split_apart
from .cache.transfers import Transfers as Transfers
from .cache.transfers import stream_context as stream_context
from .step.prefetch_queue import Prefetched as Prefetched
from .step.prefetch_queue import MAX_PREFETCHED as MAX_PREFETCHED
from .step.prefetch_queue import MAX_DEPTH as MAX_DEPTH

# Rows of a table: reading, atomic writing, evicted rows.
from .rows.table_view import TableView as TableView
from .rows.row_parts import WEIGHT as WEIGHT
from .rows.table_view import TableWrite as TableWrite
from .rows.table_view import load as load
from .cache.evicted import EvictedRows as EvictedRows
from .cache.evicted import next_serial as next_serial
from .rows.user_tensors import check_evicted_rows as check_evicted_rows

# State dicts of tables and of optimizers.
from .rows.state_dict import load_tables as load_tables
from .rows.state_dict import save_table as save_table
from .rows.state_dict import row_numbers as row_numbers
from .rows.state_dict import warn_of_rows as warn_of_rows
from .rows.user_tensors import hash_ids_problem as hash_ids_problem
from .rows.user_tensors import step_problem as step_problem
from .rows.user_tensors import tensor_problem as tensor_problem

# Saves: one moment of tables and what changed since another; the replacement of tables by what was saved.
from .rows.snapshot import CopyOnWriteBuffer as CopyOnWriteBuffer
from .rows.snapshot import Snapshot as Snapshot
from .rows.snapshot import SnapshotRows as SnapshotRows
from .cache.cache_warming import CachedRows as CachedRows
from .rows.table_chunks import forget_changes as forget_changes
from .rows.table_chunks import start_versions as start_versions
from .rows.replacement import Replacement as Replacement
from .rows.replacement import TableSource as TableSource
from .rows.replacement import SavedRows as SavedRows
from .rows.replacement import RemovedIds as RemovedIds
from .rows.replacement import LifecycleState as LifecycleState

__all__: list[str]

// Python module rec_sdk_torch._engine: the host engine with NumPy arrays. cmake/write_stub.py generates
// rec_sdk_torch/_engine.pyi from the signatures and docstrings below.
#include "torch_npu_ext/engine/api/bindings.h"

#include <map>

#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 24;  // small enough that the byte size of a record cannot overflow

BoundsCheck parse_bounds_check(const std::string& mode) {
  if (mode == "fatal") return BoundsCheck::kFatal;
  if (mode == "warning") return BoundsCheck::kWarning;
  if (mode == "ignore") return BoundsCheck::kIgnore;
  if (mode == "none") return BoundsCheck::kNone;
  throw py::value_error("bounds_check '" + mode +
                        "' is not known; use 'fatal', 'warning', 'ignore' or 'none'");
}

ColumnSet parse_columns(const std::vector<std::string>& names) {
  static const std::map<std::string, Column> known = {
      {"count", Column::kCount}, {"last_use", Column::kLastUse}, {"version", Column::kVersion},
      {"score", Column::kScore}, {"clicks", Column::kClicks},    {"timestamp", Column::kTimestamp}};
  ColumnSet columns;
  for (const std::string& name : names) {
    const auto found = known.find(name);
    if (found == known.end()) {
      throw py::value_error(
          "column '" + name +
          "' is not known; use 'count', 'last_use', 'version', 'score', 'clicks' or 'timestamp'");
    }
    columns.add(found->second);
  }
  return columns;
}

DType weight_type(const std::string& argument, int dtype) {
  if (dtype >= 0 && dtype <= 2) return static_cast<DType>(dtype);
  throw py::value_error(argument + " must be 0 (fp32), 1 (fp16) or 2 (bf16), got " + std::to_string(dtype));
}

RecordLayout make_layout(int64_t dim, int weight_dtype, const std::vector<int64_t>& state_elements,
                         const std::vector<int>& state_dtypes) {
  if (dim < 1 || dim > kMaxDim) {
    throw py::value_error("dim must be between 1 and " + std::to_string(kMaxDim) + ", got " +
                          std::to_string(dim));
  }
  if (state_elements.size() > static_cast<size_t>(kMaxStates)) {
    throw py::value_error("at most " + std::to_string(kMaxStates) + " state blocks, got " +
                          std::to_string(state_elements.size()));
  }
  for (const int64_t elements : state_elements) {
    if (elements != 1 && elements != dim) {
      throw py::value_error("a state block has dim or 1 elements, got " + std::to_string(elements));
    }
  }
  if (!state_dtypes.empty() && state_dtypes.size() != state_elements.size()) {
    throw py::value_error("state_dtypes must be empty or have one entry per state block, " +
                          std::to_string(state_elements.size()) + ", got " +
                          std::to_string(state_dtypes.size()));
  }
  DType types[kMaxStates] = {};
  for (size_t s = 0; s < state_dtypes.size(); ++s) types[s] = weight_type("state_dtypes", state_dtypes[s]);
  return make_record_layout(dim, weight_type("weight_dtype", weight_dtype), state_elements.data(),
                            static_cast<int64_t>(state_elements.size()), types);
}

std::unique_ptr<Engine> make_engine(std::vector<TableSpec> tables, int64_t dim, int weight_dtype,
                                    const std::vector<int64_t>& state_elements,
                                    const std::vector<int32_t>& feature_tables,
                                    const std::vector<int64_t>& feature_columns,
                                    const std::vector<bool>& feature_means, const std::string& policy,
                                    uint64_t serial, bool row_ids, const std::vector<int>& state_dtypes,
                                    bool origins) {
  return std::make_unique<Engine>(GroupSpec{std::move(tables),
                                            make_layout(dim, weight_dtype, state_elements, state_dtypes),
                                            make_features(feature_tables, feature_columns, feature_means),
                                            !feature_columns.empty(), policy, serial, row_ids, origins});
}

void bind_specs(py::module_& m) {
  py::class_<Initializer>(m, "Initializer",
                          R"(The distribution of the initial weights of a row.

          kind: "linear" (minimum + i / (D - 1) * (maximum - minimum)), "uniform" ([minimum, maximum)),
          "truncated_normal" (mean and stddev, cut off at two sigma) or "bounded_normal" (the same, cut off
          at minimum and maximum). Values that the kind does not use are ignored.
          Raises ValueError if the values do not define a distribution.)")
      .def(py::init<const std::string&, double, double, double, double>(), py::arg("kind"),
           py::arg("minimum"), py::arg("maximum"), py::arg("mean"), py::arg("stddev"));
  py::class_<TableSpec>(m, "TableSpec",
                        R"(The configuration of one table. A hash table accepts any int64 id; in an index
          table the id is the row number.)")
      .def(py::init([](std::string name, bool hashed, int64_t num_embeddings, int64_t slots, int64_t capacity,
                       const Initializer& initializer, const py::int_& seed, std::vector<float> state_init,
                       const std::string& bounds_check, const std::vector<std::string>& columns,
                       const std::optional<Rules>& rules, std::string store_path,
                       std::optional<int> stored_dtype) {
             // Any Python int is a valid seed: torch seeds may be negative or use all 64 bits.
             const uint64_t bits = (seed.attr("__and__")(py::int_(UINT64_MAX))).cast<uint64_t>();
             return TableSpec{
                 std::move(name),
                 hashed,
                 num_embeddings,
                 slots,
                 capacity,
                 initializer,
                 bits,
                 std::move(state_init),
                 parse_bounds_check(bounds_check),
                 parse_columns(columns),
                 rules && rules->admission() != nullptr,
                 rules.value_or(Rules()),
                 std::move(store_path),
                 stored_dtype ? std::optional(weight_type("stored_dtype", *stored_dtype)) : std::nullopt};
           }),
           R"(Creates the configuration; every argument is passed by keyword.

          slots: the number of the table's rows that fit into the device cache.
          capacity: the maximum number of ids of a hash table; 0 means unlimited.
          columns: the values kept per row in addition to its record: "count", "last_use", "version",
          "score", "clicks", "timestamp".
          lifecycle: the rules of admission and eviction. A table with an admission rule gets one additional
          slot, the default slot, which lookups of ids without a row read.
          store_path: the file of the host store. It must not exist yet and is removed with the engine;
          empty means in memory. The engine raises OSError if the file cannot be created or the disk is
          full, before any row changes.
          state_init: the initial value of each block of optimizer state.
          bounds_check (index tables): "fatal" raises IndexError for an id out of range. With "warning",
          "ignore" and "none" such an id reads row 0; "warning" also reports it in take_bounds_warnings.
          stored_dtype: the weight dtype in the host store, 0 (fp32), 1 (fp16) or 2 (bf16); None means
          weight_dtype.)",
           py::kw_only(), py::arg("name"), py::arg("hashed"), py::arg("num_embeddings"), py::arg("slots"),
           py::arg("capacity"), py::arg("initializer"), py::arg("seed"), py::arg("state_init"),
           py::arg("bounds_check"), py::arg("columns") = std::vector<std::string>(),
           py::arg("lifecycle") = py::none(), py::arg("store_path") = "",
           py::arg("stored_dtype") = py::none());
}

}  // namespace

std::vector<Feature> make_features(const std::vector<int32_t>& tables, const std::vector<int64_t>& columns,
                                   const std::vector<bool>& means) {
  const bool pooled = !columns.empty();
  if (pooled && (columns.size() != tables.size() || means.size() != tables.size())) {
    throw py::value_error("feature_columns and feature_means must have one entry per feature, " +
                          std::to_string(tables.size()) + ", got " + std::to_string(columns.size()) +
                          " and " + std::to_string(means.size()));
  }
  std::vector<Feature> features;
  for (size_t f = 0; f < tables.size(); ++f) {
    features.push_back({tables[f], pooled ? columns[f] : 0, pooled && means[f]});
  }
  return features;
}

// Translates DiskError to OSError(errno, message, path); Python picks the subclass, such as FileExistsError,
// by errno.
void translate_disk_error(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const DiskError& error) {
    const py::tuple arguments = py::make_tuple(error.error(), error.what(), error.path());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

PYBIND11_MODULE(_engine, m) {
  m.doc() = R"(The host engine: id maps, host stores, device cache bookkeeping and swap plans.

          Letters in shapes: K keys of the batch, F features, B samples, T tables, O rows out (victims), I
          rows in (misses). P and Q are the rows out and rows in that have pending sums in the accumulation
          window. Slots are numbered per group: table t owns a contiguous range of slots, in the order of
          the tables.

          After an exception the engine is in its state before the call. Methods may be called from several
          threads.)";
  py::register_exception<CacheTooSmallError>(m, "CacheTooSmallError", PyExc_RuntimeError).doc() =
      R"(Raised when a batch needs more distinct rows than its table has unpinned slots in the device cache.

          The message names the table, the number of rows needed, the slots, and how many of them are pinned
          by batches in flight. No row has changed and the model remains usable: enlarge `cache=` or use a
          smaller batch.)";
  py::register_exception<CapacityError>(m, "CapacityError", PyExc_RuntimeError).doc() =
      R"(Raised when a hash table would hold more ids than its capacity.

          The message names the table, its capacity and the id. No row has changed: raise `num_embeddings`,
          or let rules evict ids.)";
  py::register_exception_translator(&translate_disk_error);
  m.def("available_memory", &available_memory,
        R"(Returns the available host memory in bytes: MemAvailable, or less if a cgroup (v1 or v2) limits
          it.)");
  m.def("cache_policies", &cache_policy_names,
        R"(Returns the names of the cache replacement policies, the default first.)");
  m.def(
      "policy_looks_ahead",
      [](const std::string& name) { return make_cache_policy(name, 0, 0)->looks_ahead(); }, py::arg("name"),
      R"(Returns whether the policy uses announced batches to choose victims. Raises ValueError for an
          unknown name.)");
  // `runner` and `threads` are passed as integers: they are addresses of functions in another shared library.
  m.def(
      "set_parallel_runner",
      [](uintptr_t runner, uintptr_t threads, int64_t from_lookups) {
        set_parallel_runner(reinterpret_cast<ParallelRunner>(runner),
                            reinterpret_cast<int64_t (*)()>(threads), from_lookups);
      },
      R"(Sets the thread pool of all engines.

          runner: address of a C function `void (int64_t count, void (*piece)(void* context, int64_t i),
          void* context)` that calls `piece(context, i)` for every i in [0, count); 0 means one thread.
          threads: address of a function `int64_t (void)` that returns the current number of threads.
          from_lookups: batches with fewer lookups are planned on one thread.

          Results do not depend on the thread pool. Must not be called while an engine is in use.)",
      py::arg("runner"), py::arg("threads"), py::arg("from_lookups") = kParallelLookups);
  bind_rules(m);
  bind_specs(m);
  bind_plan(m);
  bind_tables(m);
  bind_saves(m);
  bind_lifecycle(m);
  EngineClass engine(
      m, "Engine",
      R"(The host engine of one group: tables of one record layout that share a device cache and swap plans.

          The calls for a batch, in order: plan; read_sums and read_in, once the write-backs of the plan's
          sources are complete; start_plans; the caller writes the cache; applied; complete_write_back, once
          the victims' records have been copied to the host. Plans are applied in the order in which they
          were made.

          `records` arguments are C-contiguous uint8 [rows, record_bytes], `sums` arguments float32 [rows, 2
          * dim] (sum, compensation). A wrong shape or dtype, or a plan of another engine, raises
          ValueError; an unknown table raises IndexError.

          Unless stated otherwise, `window_rows`, read_spilled, write_spilled, close_window and the methods
          of `tables` and `saves` raise RuntimeError while a plan is not applied or a write-back is pending.)");
  engine.def(py::init(&make_engine),
             R"(Creates the engine of one group.

          dim, weight_dtype: the number of weights of a row and their dtype: 0 (fp32), 1 (fp16), 2 (bf16).
          state_elements: the number of elements of each block of optimizer state in a row: dim or 1.
          feature_tables: the table of each feature, ascending.
          feature_columns: the first output column of each feature; [] for sequences.
          feature_means: whether each feature is MEAN-pooled.
          policy: the cache replacement policy.
          serial: the number before the first plan: plans and versions are numbered from serial + 1.
          row_ids: whether plans contain the ids of their rows, as an array for the device.
          state_dtypes: the dtype of each state block, 0 (fp32), 1 (fp16) or 2 (bf16); empty means all fp32.
          origins: whether plans with rows in contain `origins`, an array for the device: the location of each
          lookup's row before the swap.)",
             py::arg("tables"), py::arg("dim"), py::arg("weight_dtype"), py::arg("state_elements"),
             py::arg("feature_tables"), py::arg("feature_columns"), py::arg("feature_means"),
             py::arg("policy") = "lru", py::arg("serial") = 0, py::arg("row_ids") = false,
             py::arg("state_dtypes") = std::vector<int>{}, py::arg("origins") = false);
  engine.def_readonly("tables", &Engine::tables, R"(Whole-table access to rows.)")
      .def_readonly("saves", &Engine::saves, R"(Versions, snapshots and loading of rows.)")
      .def_readonly("lifecycle", &Engine::lifecycle, R"(Admission and eviction of ids.)")
      .def_property_readonly("record_bytes", [](const Engine& e) { return e.layout().bytes; });
  bind_batches(engine);
  m.def("start_plans", &Engine::start_plans,
        R"(Starts plans of several engines, either all of them or none. The caller then writes the caches.

          A started plan can only be completed, not cancelled. Raises RuntimeError unless each plan is the
          oldest unapplied plan of its engine.)",
        py::arg("plans"), py::call_guard<WithoutLock>());
  m.def("apply_without_swap", &Engine::apply_without_swap,
        R"(Starts and applies plans of several engines if none of them has rows in; returns whether it did.

          Returns False, and changes no plan, unless every plan has no rows in, is not started and is the
          oldest unapplied plan of its engine.)",
        py::arg("plans"), py::call_guard<WithoutLock>());
  bind_checksums(m);
  bind_unique(m);
  bind_serving(m);
  bind_simulation(m);
}

}  // namespace rec_sdk

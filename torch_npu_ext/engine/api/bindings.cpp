// rec_sdk_torch._engine: the engine with numpy arrays. cmake/write_stub.py writes rec_sdk_torch/_engine.pyi
// from the signatures and texts here.
#include "torch_npu_ext/engine/api/bindings.h"

#include <map>

#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 24;  // far from any overflow of a record's bytes

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
                          R"(The way in which new weights are made; ValueError when the values make no sense.

          kind: "linear" (minimum + i / (D - 1) * (maximum - minimum)), "uniform" ([minimum, maximum)),
          "truncated_normal" (mean, stddev; cut at two sigma) or "bounded_normal" (the same, cut at minimum
          and maximum). The values that the kind does not use are ignored.)")
      .def(py::init<const std::string&, double, double, double, double>(), py::arg("kind"),
           py::arg("minimum"), py::arg("maximum"), py::arg("mean"), py::arg("stddev"));
  py::class_<TableSpec>(m, "TableSpec",
                        "One table. A hash table takes any int64 as id; in an index table the id is the row.")
      .def(py::init([](std::string name, bool hashed, int64_t num_embeddings, int64_t slots, int64_t capacity,
                       const Initializer& initializer, const py::int_& seed, std::vector<float> state_init,
                       const std::string& bounds_check, const std::vector<std::string>& columns,
                       const std::optional<Rules>& rules, std::string store_path,
                       std::optional<int> stored_dtype) {
             // Any Python int is a seed; torch's may be negative or use all 64 bits.
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
           R"(slots: rows in the device cache. capacity: most ids of a hash table, 0 = unlimited.

          columns: what is kept of each row beside its record: "count", "last_use", "version", "score",
          "clicks", "timestamp".

          lifecycle: a table that admits ids has one more slot, behind those for rows: lookups of ids without a row
          read it.

          store_path: a file for the host store, which must not be there; it is removed with the engine.
          OSError from the engine where it cannot be made or has no room on the disk, before rows change.
          Empty: in memory.

          state_init: the initial value of each state block. bounds_check, for index tables: "fatal"
          (IndexError), or "warning", "ignore", "none" (such ids become 0; under "warning" they are reported
          by take_bounds_warnings).)",
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

// OSError(errno, message, path), which is FileExistsError and the like by its errno.
void translate_disk_error(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const DiskError& error) {
    const py::tuple arguments = py::make_tuple(error.error(), error.what(), error.path());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

PYBIND11_MODULE(_engine, m) {
  m.doc() = R"(The host engine: id maps, host stores, the device cache's contents, swap plans.

          Letters in shapes: K keys of the batch, F features, B samples, T tables, O rows out, I rows in, P
          and Q those of them that have gradients in the open window. Slot numbers are the group's: table t
          owns a contiguous range of them, tables in order.

          After any exception the engine is as it was before the call. Methods are safe to call from several
          threads.)";
  py::register_exception<CacheTooSmallError>(m, "CacheTooSmallError", PyExc_RuntimeError).doc() =
      R"(A batch needs more distinct rows than the table's device cache has slots that are not pinned.

          The message names the table, the rows that are needed, the slots, and how many of them batches in
          flight pin. No row has changed, and the model can be used on: enlarge `cache=`, or use a smaller
          batch.)";
  py::register_exception<CapacityError>(m, "CapacityError", PyExc_RuntimeError).doc() =
      R"(A hash table would hold more ids than its capacity.

          The message names the table, its capacity and the id. No row has changed: raise `num_embeddings`, or
          let rules evict ids.)";
  py::register_exception_translator(&translate_disk_error);
  m.def("available_memory", &available_memory,
        R"(Bytes of host memory that can still be taken: MemAvailable, or less where a cgroup (v1 or v2) says
          so.)");
  m.def("cache_policies", &cache_policy_names,
        "Names of the policies that say which rows leave the cache, the default first.");
  m.def(
      "policy_looks_ahead",
      [](const std::string& name) { return make_cache_policy(name, 0, 0)->looks_ahead(); }, py::arg("name"),
      "Whether the policy asks which announced batches need a row. ValueError: there is no such policy.");
  // Addresses of functions of another library.
  m.def(
      "set_parallel_runner",
      [](uintptr_t runner, uintptr_t threads, int64_t from_lookups) {
        set_parallel_runner(reinterpret_cast<ParallelRunner>(runner),
                            reinterpret_cast<int64_t (*)()>(threads), from_lookups);
      },
      R"(Lets all engines work on several threads: `runner` is the address of a C function `void (int64_t
          count, void (*piece)(void* context, int64_t i), void* context)` that calls `piece(context, i)` for
          every i in [0, count), or 0: on one thread; `threads` is that of an `int64_t (void)` that says how
          many there are at the moment. Batches of less than `from_lookups` are planned on one thread anyway.
          Results do not depend on any of this. Not while an engine is at work.)",
      py::arg("runner"), py::arg("threads"), py::arg("from_lookups") = kParallelLookups);
  bind_rules(m);
  bind_specs(m);
  bind_plan(m);
  bind_tables(m);
  bind_saves(m);
  bind_lifecycle(m);
  EngineClass engine(
      m, "Engine",
      R"(The tables of one record layout, which share a device cache and a plan: the calls of a batch.

          A batch: plan; read_sums and read_in, for which the rows of the plan's sources must have landed;
          begin; the cache is written to; applied; land, when the copy of the rows that left has arrived.
          Plans are applied in their order.

          `records` arguments are C-contiguous uint8 [rows, record_bytes], `sums` float32 [rows, 2 * dim]
          (sum, compensation); a wrong shape or dtype is a ValueError, and so is a plan of another engine. A
          table that is not there is an IndexError.

          `window_rows`, the calls on its rows, and those of `tables` and `saves` need all plans applied and
          all rows landed, else RuntimeError, unless they say otherwise.)");
  engine.def(py::init(&make_engine),
             R"(weight_dtype: 0 fp32, 1 fp16, 2 bf16. state_elements: dim or 1 for each state block.

          feature_tables: the table of each feature, ascending. feature_columns: the first output column of
          each feature, or [] for a sequence. feature_means: whether it is MEAN-pooled. serial: plans and
          versions are numbered behind it. row_ids: plans have the ids of their rows for the device.
          state_dtypes: of each state block, 0 (fp32), 1 (fp16) or 2 (bf16); empty: all fp32. origins: plans
          that bring rows in have the origins of their lookups for the device.)",
             py::arg("tables"), py::arg("dim"), py::arg("weight_dtype"), py::arg("state_elements"),
             py::arg("feature_tables"), py::arg("feature_columns"), py::arg("feature_means"),
             py::arg("policy") = "lru", py::arg("serial") = 0, py::arg("row_ids") = false,
             py::arg("state_dtypes") = std::vector<int>{}, py::arg("origins") = false);
  engine.def_readonly("tables", &Engine::tables, "Rows of whole tables.")
      .def_readonly("saves", &Engine::saves, "Versions, snapshots and loads of rows.")
      .def_readonly("lifecycle", &Engine::lifecycle, "Admission and eviction of ids.")
      .def_property_readonly("record_bytes", [](const Engine& e) { return e.layout().bytes; });
  bind_batches(engine);
  m.def("start_plans", &Engine::start_plans,
        R"(The caches will be written to: the plans, of several engines, can only be completed from now on.
          All or none.

          RuntimeError unless each is the oldest of its engine that is not applied.)",
        py::arg("plans"), py::call_guard<WithoutLock>());
  m.def("apply_without_swap", &Engine::apply_without_swap,
        R"(Begins the plans and says that they are applied, as far as they bring no row in and each is the
          oldest of its engine.

          All or none; false for none.)",
        py::arg("plans"), py::call_guard<WithoutLock>());
  bind_checksums(m);
  bind_unique(m);
  bind_serving(m);
  bind_simulation(m);
}

}  // namespace rec_sdk

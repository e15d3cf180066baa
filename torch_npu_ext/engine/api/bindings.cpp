// rec_sdk_torch._engine: the engine with numpy arrays. Shapes and errors are documented in one place,
// rec_sdk_torch/_engine.pyi; a test compares the two.
#include "torch_npu_ext/engine/api/bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 24;  // far from any overflow of a record's bytes

// One number of each lookup, or null.
template <class Array>
auto of_lookups(const std::optional<Array>& array, const char* name, const BatchArguments& batch) {
  if (array && (array->ndim() != 1 || array->size() != batch.input.values.size)) {
    throw py::value_error(std::string(name) + " must have one entry per id, " +
                          std::to_string(batch.input.values.size) + ", got " + std::to_string(array->size()));
  }
  return array ? array->data() : nullptr;
}

// One number of each key, or null.
const int64_t* of_keys(const std::optional<Dense>& array, const BatchArguments& batch) {
  const int64_t size = batch.input.batch_size;
  const int64_t keys = size > 0 ? (batch.input.offsets.size - 1) / size : 0;
  if (array && size > 0 && (array->ndim() != 1 || array->size() != keys)) {
    throw py::value_error("latest must have one entry per key, " + std::to_string(keys) + ", got " +
                          std::to_string(array->size()));
  }
  return array ? array->data() : nullptr;
}

// A view into the plan's buffers, which it keeps alive.
template <class T>
py::array_t<T> plan_view(const Plan& plan, const T* data, int64_t size) {
  auto* owner = new std::shared_ptr<PlanBuffers>(plan.buffers());
  py::capsule base(owner, [](void* data) { delete static_cast<std::shared_ptr<PlanBuffers>*>(data); });
  return py::array_t<T>(static_cast<py::ssize_t>(size), data, base);
}

// Keeps the array until the last use of the plan's arrays, which may end on any thread.
ExternalArena external_arena(Bytes& array) {
  auto* owner = new py::object(array);
  const auto drop = [](void* data) {
    const auto lock = take_lock([] { return std::make_unique<py::gil_scoped_acquire>(); });
    delete static_cast<py::object*>(data);
  };
  return {reinterpret_cast<char*>(array.mutable_data()), static_cast<size_t>(array.size()),
          std::shared_ptr<void>(owner, drop)};
}

// Runs `read` without the GIL; (places, tables) of the records it filled with initial values.
template <class Read>
py::tuple initial_rows(const Read& read) {
  InitialRows initial;
  {
    const WithoutLock nogil;
    read(&initial);
  }
  return py::make_tuple(to_numpy(std::move(initial.places)), to_numpy(std::move(initial.tables)));
}

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

std::shared_ptr<Engine> make_engine(std::vector<TableSpec> tables, int64_t dim, int weight_dtype,
                                    const std::vector<int64_t>& state_elements,
                                    const std::vector<int32_t>& feature_tables,
                                    const std::vector<int64_t>& feature_columns,
                                    const std::vector<bool>& feature_means, const std::string& policy,
                                    uint64_t serial, bool row_ids, const std::vector<int>& state_dtypes) {
  const bool pooled = !feature_columns.empty();
  if (pooled &&
      (feature_columns.size() != feature_tables.size() || feature_means.size() != feature_tables.size())) {
    throw py::value_error("feature_columns and feature_means must have one entry per feature, " +
                          std::to_string(feature_tables.size()) + ", got " +
                          std::to_string(feature_columns.size()) + " and " +
                          std::to_string(feature_means.size()));
  }
  std::vector<Feature> features;
  for (size_t f = 0; f < feature_tables.size(); ++f) {
    features.push_back({feature_tables[f], pooled ? feature_columns[f] : 0, pooled && feature_means[f]});
  }
  const RecordLayout layout = make_layout(dim, weight_dtype, state_elements, state_dtypes);
  return std::make_shared<Engine>(
      GroupSpec{std::move(tables), layout, std::move(features), pooled, policy, serial, row_ids});
}

void bind_specs(py::module_& m) {
  py::class_<Initializer>(m, "Initializer")
      .def(py::init<const std::string&, double, double, double, double>(), py::arg("kind"),
           py::arg("minimum"), py::arg("maximum"), py::arg("mean"), py::arg("stddev"));
  py::class_<TableSpec>(m, "TableSpec")
      .def(py::init([](std::string name, bool hashed, int64_t num_embeddings, int64_t slots, int64_t capacity,
                       const Initializer& initializer, const py::int_& seed, std::vector<float> state_init,
                       const std::string& bounds_check, const std::vector<std::string>& columns,
                       const std::optional<LifeSpec>& life, std::string store_path,
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
                 life && life->admits,
                 life.value_or(LifeSpec()),
                 std::move(store_path),
                 stored_dtype ? std::optional(weight_type("stored_dtype", *stored_dtype)) : std::nullopt};
           }),
           py::kw_only(), py::arg("name"), py::arg("hashed"), py::arg("num_embeddings"), py::arg("slots"),
           py::arg("capacity"), py::arg("initializer"), py::arg("seed"), py::arg("state_init"),
           py::arg("bounds_check"), py::arg("columns") = std::vector<std::string>(),
           py::arg("life") = py::none(), py::arg("store_path") = "", py::arg("stored_dtype") = py::none());
}

void bind_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan")
      .def_property_readonly("arena",
                             [](const Plan& p) {
                               const auto* bytes = reinterpret_cast<const uint8_t*>(p->arena());
                               return plan_view(p, bytes, static_cast<int64_t>(p->device_bytes()));
                             })
      .def_property_readonly(
          "fields",
          [](const Plan& p) {
            const std::vector<PlanBuffers::Field> fields = p->device_fields();
            py::tuple result(fields.size());
            for (size_t i = 0; i < fields.size(); ++i) {
              result[i] = fields[i].begin < 0 ? py::object(py::none())
                                              : py::object(py::make_tuple(fields[i].begin, fields[i].words));
            }
            return result;
          })
      .def_property_readonly("views",
                             [](const Plan& p) {
                               const std::vector<PlanBuffers::Field> fields = p->device_fields();
                               const auto* words = reinterpret_cast<const int32_t*>(p->arena());
                               py::tuple result(fields.size());
                               for (size_t i = 0; i < fields.size(); ++i) {
                                 const auto [begin, count] = fields[i];
                                 result[i] = begin < 0 ? py::object(py::none())
                                                       : py::object(plan_view(p, words + begin, count));
                               }
                               return result;
                             })
      .def_property_readonly("serial", [](const Plan& p) { return p->serial; })
      .def_property_readonly("sources", [](const Plan& p) { return p->sources; })
      .def_property_readonly("rows_out", [](const Plan& p) { return p->rows_out; })
      .def_property_readonly("rows_in", [](const Plan& p) { return p->rows_in; })
      .def_property_readonly("segment_lookups", [](const Plan& p) { return p->segment_offsets[p->uniques]; })
      .def_property_readonly("window_out", [](const Plan& p) { return p->window_out; })
      .def_property_readonly("window_in", [](const Plan& p) { return p->window_in; })
      .def_property_readonly("begun",
                             [](const Plan& p) {
                               const PlanState state = p->state;
                               return state == PlanState::kApplying || state == PlanState::kApplied;
                             })
      .def_property_readonly("applied", [](const Plan& p) { return p->state == PlanState::kApplied; })
      .def_property_readonly("bounds_warnings",
                             [](const Plan& p) { return warnings_to_python(p.engine()->bounds_warnings(p)); })
      .def_property_readonly("set_aside",
                             [](const Plan& p) {
                               std::vector<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>> found;
                               for (Engine::SetAside& each : p.engine()->set_aside(p)) {
                                 found.emplace_back(std::move(each.table), each.count, each.id,
                                                    each.timestamp, each.latest);
                               }
                               return found;
                             })
      .def_property_readonly("released", &Plan::released)
      .def("release", &Plan::release);
}

void bind_announcement(py::module_& m) {
  py::class_<Announcement>(m, "Announcement").def("forget", &Announcement::forget);
}

void bind_read_plan(py::module_& m) {
  const auto view = [](auto member) {
    return [member](const py::object& self) {
      const auto& values = self.cast<const ReadPlan&>().*member;
      using Item = typename std::decay_t<decltype(values)>::value_type;
      return py::array_t<Item>(static_cast<py::ssize_t>(values.size()), values.data(), self);
    };
  };
  py::class_<ReadPlan>(m, "ReadPlan")
      .def_property_readonly("offsets", view(&ReadPlan::offsets))
      .def_property_readonly("index", view(&ReadPlan::index))
      .def_property_readonly("resident_slots", view(&ReadPlan::resident_slots))
      .def_property_readonly("host_count", [](const ReadPlan& p) { return p.host_rows.size(); })
      .def_readonly("sources", &ReadPlan::sources)
      .def_readonly("all_resident", &ReadPlan::all_resident);
}

void bind_batches(EngineClass& engine) {
  engine
      .def(
          "plan",
          [](Engine& e, const py::array& values, const py::array& offsets, const py::array& feature_keys,
             int64_t batch_size, bool weighted, bool joined, std::optional<Bytes> arena,
             const Announcement* announced, const std::optional<Slots>& shows,
             const std::optional<Slots>& clicks, const std::optional<Dense>& timestamps,
             const std::optional<Dense>& latest) {
            BatchArguments batch(values, offsets, feature_keys, batch_size);
            batch.input.weighted = weighted;
            batch.input.joined = joined;
            batch.input.shows = of_lookups(shows, "shows", batch);
            batch.input.clicks = of_lookups(clicks, "clicks", batch);
            batch.input.timestamps = of_lookups(timestamps, "timestamps", batch);
            batch.input.latest = of_keys(latest, batch);
            ExternalArena memory = arena ? external_arena(*arena) : ExternalArena();
            std::unique_ptr<Plan> plan;
            {
              const WithoutLock nogil;
              plan = e.plan(batch.input, std::move(memory), announced);
            }
            return plan;
          },
          py::arg("values"), py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"),
          py::arg("weighted") = false, py::arg("joined") = false, py::arg("arena").noconvert() = py::none(),
          py::arg("announced").none(true) = py::none(), py::arg("shows").noconvert() = py::none(),
          py::arg("clicks").noconvert() = py::none(), py::arg("timestamps").noconvert() = py::none(),
          py::arg("latest").noconvert() = py::none())
      .def(
          "announce",
          [](Engine& e, const py::array& values, const py::array& offsets, const py::array& feature_keys,
             int64_t batch_size) {
            const BatchArguments batch(values, offsets, feature_keys, batch_size);
            const WithoutLock nogil;
            return e.announce(batch.input);
          },
          py::arg("values"), py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"))
      .def(
          "arena_bytes",
          [](Engine& e, const py::array& values, const py::array& offsets, const py::array& feature_keys,
             int64_t batch_size, bool weighted, bool joined) {
            BatchArguments batch(values, offsets, feature_keys, batch_size);
            batch.input.weighted = weighted;
            batch.input.joined = joined;
            const WithoutLock nogil;
            return e.arena_bytes(batch.input);
          },
          py::arg("values"), py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"),
          py::arg("weighted") = false, py::arg("joined") = false)
      .def("unapplied", &Engine::unapplied, py::arg("upto").none(true) = py::none(),
           py::call_guard<WithoutLock>())
      .def("applied", &Engine::applied, py::arg("plan"), py::call_guard<WithoutLock>())
      .def("in_flight", &Engine::in_flight, py::call_guard<WithoutLock>())
      .def("landed", &Engine::landed, py::arg("plan"), py::call_guard<WithoutLock>())
      .def(
          "cancel",
          [](Engine& e, Plan& plan) {
            const WithoutLock nogil;
            e.cancel(&plan);
          },
          py::arg("plan"))
      .def(
          "find",
          [](Engine& e, const py::array& values, const py::array& offsets, const py::array& feature_keys,
             int64_t batch_size, int64_t bag_begin, int64_t bag_end) {
            const BatchArguments batch(values, offsets, feature_keys, batch_size);
            const WithoutLock nogil;
            return e.find(batch.input, bag_begin, bag_end);
          },
          py::arg("values"), py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"),
          py::arg("bag_begin"), py::arg("bag_end"))
      .def(
          "bag_ranges",
          [](Engine& e, const py::array& offsets, const py::array& feature_keys, int64_t batch_size,
             int64_t max_lookups) {
            const BatchArguments batch(Dense(0), offsets, feature_keys, batch_size);
            check_batch(batch.input, e.feature_count(), false);
            return to_numpy(bag_ranges(batch.input, e.feature_count(), max_lookups));
          },
          py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"), py::arg("max_lookups"))
      .def(
          "read",
          [](Engine& e, const ReadPlan& plan, py::array records) {
            char* out = records_out(records, e, static_cast<int64_t>(plan.host_rows.size()));
            return initial_rows([&](InitialRows* initial) { e.read(plan, out, initial); });
          },
          py::arg("read_plan"), py::arg("records"))
      .def(
          "land",
          [](Engine& e, const Plan& plan, py::array records, std::optional<py::array> sums) {
            const char* in = records_in(records, e, plan->rows_out);
            if (plan->window_out > 0 && !sums)
              throw py::value_error("the plan has sums that leave: pass them");
            const float* in_sums =
                sums ? matrix<float, false>(*sums, "sums", plan->window_out, 2 * e.layout().dim) : nullptr;
            const WithoutLock nogil;
            e.land(plan, in, in_sums);
          },
          py::arg("plan"), py::arg("records"), py::arg("sums") = py::none())
      .def(
          "read_sums",
          [](Engine& e, const Plan& plan, py::array sums) {
            float* out = matrix<float, true>(sums, "sums", plan->window_in, 2 * e.layout().dim);
            const WithoutLock nogil;
            e.read_sums(plan, out);
          },
          py::arg("plan"), py::arg("sums"))
      .def(
          "read_in",
          [](Engine& e, const Plan& plan, py::array records, bool initial) {
            char* out = records_out(records, e, plan->rows_in);
            return initial_rows([&](InitialRows* rows) { e.read_in(plan, out, initial ? rows : nullptr); });
          },
          py::arg("plan"), py::arg("records"), py::arg("initial") = false)
      .def(
          "read_ahead",
          [](Engine& e, const Plan& plan, py::array records) {
            char* out = records_out(records, e, plan->rows_in);
            std::vector<int32_t> late;
            {
              const WithoutLock nogil;
              late = e.read_ahead(plan, out);
            }
            return to_numpy(std::move(late));
          },
          py::arg("plan"), py::arg("records"))
      .def(
          "read_late",
          [](Engine& e, const Plan& plan, const Slots& places, py::array records) {
            char* out = records_out(records, e, places.size());
            const WithoutLock nogil;
            e.read_late(plan, places.data(), places.size(), out);
          },
          py::arg("plan"), py::arg("places"), py::arg("records"));
}

}  // namespace

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
  m.doc() = "The host engine: id maps, host stores, the device cache's contents, swap plans.";
  py::register_exception<CacheTooSmallError>(m, "CacheTooSmallError", PyExc_RuntimeError).doc() =
      "A batch needs more distinct rows than the table's device cache has slots that are not pinned.";
  py::register_exception<CapacityError>(m, "CapacityError", PyExc_RuntimeError).doc() =
      "A hash table would hold more ids than its capacity.";
  py::register_exception_translator(&translate_disk_error);
  m.def("available_memory", &available_memory);
  m.def("cache_policies", &cache_policy_names);
  // Addresses of functions of another library.
  m.def(
      "set_parallel_runner",
      [](uintptr_t runner, uintptr_t threads, int64_t from_lookups) {
        set_parallel_runner(reinterpret_cast<ParallelRunner>(runner),
                            reinterpret_cast<int64_t (*)()>(threads), from_lookups);
      },
      py::arg("runner"), py::arg("threads"), py::arg("from_lookups") = kParallelLookups);
  bind_life_spec(m);
  bind_specs(m);
  bind_plan(m);
  bind_announcement(m);
  bind_read_plan(m);
  EngineClass engine(m, "Engine");
  engine.def(py::init(&make_engine), py::arg("tables"), py::arg("dim"), py::arg("weight_dtype"),
             py::arg("state_elements"), py::arg("feature_tables"), py::arg("feature_columns"),
             py::arg("feature_means"), py::arg("policy") = "lru", py::arg("serial") = 0,
             py::arg("row_ids") = false, py::arg("state_dtypes") = std::vector<int>{});
  m.def("begin", &Engine::begin, py::arg("plans"), py::call_guard<WithoutLock>());
  bind_batches(engine);
  bind_window(engine);
  bind_tables(engine);
  bind_saves(engine);
  bind_reports(engine);
  bind_unique(m);
  bind_life(engine);
  bind_snapshots(engine);
  bind_serving(m);
}

}  // namespace rec_sdk

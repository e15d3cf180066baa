// rec_sdk_torch._engine: the engine with numpy arrays. Shapes and errors are documented in
// rec_sdk_torch/_engine.pyi.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_npu_ext/host/engine.h"
#include "torch_npu_ext/host/errors.h"
#include "torch_npu_ext/host/parallel.h"

namespace py = pybind11;

namespace rec_sdk {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 24;  // far from any overflow of a record's bytes

using Dense = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// A caller's int32 or int64 array. Only a strided one is copied.
struct IntArgument {
  IntArgument(const py::array& given, const char* name)
      : array(py::array::ensure(given, py::array::c_style)) {
    const py::dtype dtype = given.dtype();
    const bool native = dtype.kind() == 'i' && dtype.byteorder() != '>';
    if (!native || (dtype.itemsize() != 4 && dtype.itemsize() != 8)) {
      throw py::type_error(std::string(name) + " must be int32 or int64, got " + std::string(py::str(dtype)));
    }
    if (given.ndim() != 1) {
      throw py::value_error(std::string(name) + " must have one dimension, got " +
                            std::to_string(given.ndim()));
    }
    view = {array.data(), dtype.itemsize() == 8, array.size()};
  }
  py::array array;
  IntArray view;
};

struct BatchArguments {
  BatchArguments(const py::array& values, const py::array& offset_array, const py::array& key_array,
                 int64_t batch_size)
      : ids(values, "ids"), offsets(offset_array, "offsets"), keys(key_array, "feature_keys") {
    input = {ids.view, offsets.view, keys.view, batch_size};
  }
  IntArgument ids, offsets, keys;
  BatchInput input;
};

// A C-contiguous [rows, columns] array of T; written to when kWritable.
template <class T, bool kWritable>
auto matrix(py::array& array, const char* name, int64_t rows, int64_t columns) {
  const bool layout =
      py::isinstance<py::array_t<T>>(array) && array.ndim() == 2 && (array.flags() & py::array::c_style) != 0;
  if (!layout || array.shape(0) != rows || array.shape(1) != columns) {
    std::string shape;
    for (py::ssize_t d = 0; d < array.ndim(); ++d) {
      shape += (d > 0 ? ", " : "") + std::to_string(array.shape(d));
    }
    throw py::value_error(std::string(name) + " must be a contiguous " +
                          std::string(py::str(py::dtype::of<T>())) + " array of shape [" +
                          std::to_string(rows) + ", " + std::to_string(columns) + "], got " +
                          std::string(py::str(array.dtype())) + " [" + shape + "]");
  }
  if constexpr (kWritable) {
    return static_cast<T*>(array.mutable_data());  // raises ValueError when it is read-only
  } else {
    return static_cast<const T*>(array.data());
  }
}

char* records_out(py::array& array, const Engine& engine, int64_t rows) {
  return reinterpret_cast<char*>(matrix<uint8_t, true>(array, "records", rows, engine.layout().bytes));
}
const char* records_in(py::array& array, const Engine& engine, int64_t rows) {
  return reinterpret_cast<const char*>(matrix<uint8_t, false>(array, "records", rows, engine.layout().bytes));
}

template <class T>
py::array_t<T> to_numpy(std::vector<T> values) {
  auto* owner = new std::vector<T>(std::move(values));
  py::capsule base(owner, [](void* data) { delete static_cast<std::vector<T>*>(data); });
  return py::array_t<T>(static_cast<py::ssize_t>(owner->size()), owner->data(), base);
}

// A view into the plan's buffers, which it keeps alive.
template <class T>
py::array_t<T> plan_view(const SwapPlan& plan, const T* data, int64_t size) {
  auto* owner = new std::shared_ptr<PlanBuffers>(plan.buffers());
  py::capsule base(owner, [](void* data) { delete static_cast<std::shared_ptr<PlanBuffers>*>(data); });
  return py::array_t<T>(static_cast<py::ssize_t>(size), data, base);
}

template <class T>
py::object optional_plan_view(const SwapPlan& plan, const T* data, int64_t size) {
  if (data == nullptr) return py::none();
  return plan_view(plan, data, size);
}

// Runs `read` without the GIL; (places, tables) of the records it filled with initial values.
template <class Read>
py::tuple initial_rows(const Read& read) {
  InitialRows initial;
  {
    const py::gil_scoped_release nogil;
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

RecordLayout make_layout(int64_t dim, int weight_dtype, const std::vector<int64_t>& state_elements) {
  if (dim < 1 || dim > kMaxDim) {
    throw py::value_error("dim must be between 1 and " + std::to_string(kMaxDim) + ", got " +
                          std::to_string(dim));
  }
  if (weight_dtype < 0 || weight_dtype > 2) {
    throw py::value_error("weight_dtype must be 0 (fp32), 1 (fp16) or 2 (bf16), got " +
                          std::to_string(weight_dtype));
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
  return make_record_layout(dim, static_cast<DType>(weight_dtype), state_elements.data(),
                            static_cast<int64_t>(state_elements.size()));
}

std::shared_ptr<Engine> make_engine(std::vector<TableSpec> tables, int64_t dim, int weight_dtype,
                                    const std::vector<int64_t>& state_elements,
                                    const std::vector<int32_t>& feature_tables,
                                    const std::vector<int64_t>& feature_columns,
                                    const std::vector<bool>& feature_means, const std::string& policy) {
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
  const RecordLayout layout = make_layout(dim, weight_dtype, state_elements);
  return std::make_shared<Engine>(GroupSpec{std::move(tables), layout, std::move(features), pooled, policy});
}

void bind_specs(py::module_& m) {
  py::class_<Initializer>(m, "Initializer")
      .def(py::init<const std::string&, double, double, double, double>(), py::arg("kind"),
           py::arg("minimum"), py::arg("maximum"), py::arg("mean"), py::arg("stddev"));
  py::class_<TableSpec>(m, "TableSpec")
      .def(py::init([](std::string name, bool hashed, int64_t num_embeddings, int64_t slots, int64_t capacity,
                       const Initializer& initializer, const py::int_& seed, std::vector<float> state_init,
                       const std::string& bounds_check) {
             // Any Python int is a seed; torch's may be negative or use all 64 bits.
             const uint64_t bits = (seed.attr("__and__")(py::int_(UINT64_MAX))).cast<uint64_t>();
             return TableSpec{std::move(name),
                              hashed,
                              num_embeddings,
                              slots,
                              capacity,
                              initializer,
                              bits,
                              std::move(state_init),
                              parse_bounds_check(bounds_check)};
           }),
           py::kw_only(), py::arg("name"), py::arg("hashed"), py::arg("num_embeddings"), py::arg("slots"),
           py::arg("capacity"), py::arg("initializer"), py::arg("seed"), py::arg("state_init"),
           py::arg("bounds_check"));
}

void bind_swap_plan(py::module_& m) {
  py::class_<SwapPlan>(m, "SwapPlan")
      .def_property_readonly("slots", [](const SwapPlan& p) { return plan_view(p, p->slots, p->lookups); })
      .def_property_readonly("offsets",
                             [](const SwapPlan& p) { return optional_plan_view(p, p->offsets, p->bags + 1); })
      .def_property_readonly("unique_slots",
                             [](const SwapPlan& p) { return plan_view(p, p->unique_slots, p->uniques); })
      .def_property_readonly(
          "table_offsets",
          [](const SwapPlan& p) { return plan_view(p, p->table_offsets.data(), p->table_offsets.size()); })
      .def_property_readonly(
          "segment_offsets",
          [](const SwapPlan& p) { return plan_view(p, p->segment_offsets, p->uniques + 1); })
      .def_property_readonly(
          "positions", [](const SwapPlan& p) { return optional_plan_view(p, p->positions, p->lookups); })
      .def_property_readonly("grad_row",
                             [](const SwapPlan& p) { return plan_view(p, p->grad_row, p->lookups); })
      .def_property_readonly(
          "grad_column", [](const SwapPlan& p) { return optional_plan_view(p, p->grad_column, p->lookups); })
      .def_property_readonly("scale",
                             [](const SwapPlan& p) { return optional_plan_view(p, p->scale, p->lookups); })
      .def_property_readonly("swap_out_slots",
                             [](const SwapPlan& p) { return plan_view(p, p->swap_out_slots, p->rows_out); })
      .def_property_readonly("swap_in_slots",
                             [](const SwapPlan& p) { return plan_view(p, p->swap_in_slots, p->rows_in); })
      .def_property_readonly(
          "pending_out",
          [](const SwapPlan& p) { return plan_view(p, p->pending_out.data(), p->pending_out.size()); })
      .def_property_readonly(
          "pending_in",
          [](const SwapPlan& p) { return plan_view(p, p->pending_in.data(), p->pending_in.size()); })
      .def_property_readonly("rows_out", [](const SwapPlan& p) { return p->rows_out; })
      .def_property_readonly("rows_in", [](const SwapPlan& p) { return p->rows_in; })
      .def_property_readonly("released", &SwapPlan::released)
      .def("release", &SwapPlan::release);
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
      .def_readonly("all_resident", &ReadPlan::all_resident);
}

void bind_batches(py::class_<Engine, std::shared_ptr<Engine>>& engine) {
  engine
      .def(
          "plan",
          [](Engine& e, const py::array& values, const py::array& offsets, const py::array& feature_keys,
             int64_t batch_size, bool weighted) {
            BatchArguments batch(values, offsets, feature_keys, batch_size);
            batch.input.weighted = weighted;
            const py::gil_scoped_release nogil;
            return e.plan(batch.input);
          },
          py::arg("values"), py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"),
          py::arg("weighted") = false)
      .def(
          "cancel",
          [](Engine& e, SwapPlan& plan) {
            const py::gil_scoped_release nogil;
            e.cancel(&plan);
          },
          py::arg("plan"))
      .def(
          "find",
          [](Engine& e, const py::array& values, const py::array& offsets, const py::array& feature_keys,
             int64_t batch_size, int64_t bag_begin, int64_t bag_end) {
            const BatchArguments batch(values, offsets, feature_keys, batch_size);
            const py::gil_scoped_release nogil;
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
          "write_back",
          [](Engine& e, const SwapPlan& plan, py::array records) {
            const char* in = records_in(records, e, plan->rows_out);
            const py::gil_scoped_release nogil;
            e.write_back(plan, in);
          },
          py::arg("plan"), py::arg("records"))
      .def(
          "read_in",
          [](Engine& e, const SwapPlan& plan, py::array records) {
            char* out = records_out(records, e, plan->rows_in);
            return initial_rows([&](InitialRows* initial) { e.read_in(plan, out, initial); });
          },
          py::arg("plan"), py::arg("records"));
}

void bind_pending(py::class_<Engine, std::shared_ptr<Engine>>& engine) {
  engine
      .def(
          "write_pending",
          [](Engine& e, const SwapPlan& plan, py::array sums) {
            const int64_t rows = static_cast<int64_t>(plan->pending_out.size());
            const float* in = matrix<float, false>(sums, "sums", rows, 2 * e.layout().dim);
            const py::gil_scoped_release nogil;
            e.write_pending(plan, in);
          },
          py::arg("plan"), py::arg("sums"))
      .def(
          "read_pending",
          [](Engine& e, const SwapPlan& plan, py::array sums) {
            const int64_t rows = static_cast<int64_t>(plan->pending_in.size());
            float* out = matrix<float, true>(sums, "sums", rows, 2 * e.layout().dim);
            const py::gil_scoped_release nogil;
            e.read_pending(plan, out);
          },
          py::arg("plan"), py::arg("sums"))
      .def("mark_pending", &Engine::mark_pending, py::arg("plan"), py::call_guard<py::gil_scoped_release>())
      .def("pending_slots",
           [](Engine& e) {
             std::vector<int32_t> slots, table_offsets;
             {
               const py::gil_scoped_release nogil;
               e.pending_slots(&slots, &table_offsets);
             }
             return std::make_pair(to_numpy(std::move(slots)), to_numpy(std::move(table_offsets)));
           })
      .def("pending_away",
           [](Engine& e) {
             std::vector<int64_t> rows;
             std::vector<int32_t> table_offsets;
             {
               const py::gil_scoped_release nogil;
               e.pending_away(&rows, &table_offsets);
             }
             return std::make_pair(to_numpy(std::move(rows)), to_numpy(std::move(table_offsets)));
           })
      .def(
          "read_away",
          [](Engine& e, int64_t begin, int64_t end, py::array records, py::array sums) {
            if (begin < 0 || end < begin) {  // the engine checks the upper end
              throw py::index_error("rows [" + std::to_string(begin) + ", " + std::to_string(end) +
                                    ") are no range of rows with pending gradients");
            }
            char* out = records_out(records, e, end - begin);
            float* out_sums = matrix<float, true>(sums, "sums", end - begin, 2 * e.layout().dim);
            const py::gil_scoped_release nogil;
            e.read_away(begin, end, out, out_sums);
          },
          py::arg("begin"), py::arg("end"), py::arg("records"), py::arg("sums"))
      .def("clear_pending", &Engine::clear_pending, py::call_guard<py::gil_scoped_release>());
}

void bind_tables(py::class_<Engine, std::shared_ptr<Engine>>& engine) {
  engine.def("row_count", &Engine::row_count, py::arg("table"), py::call_guard<py::gil_scoped_release>())
      .def(
          "table_rows",
          [](Engine& e, int32_t table) {
            std::vector<int64_t> ids;
            std::vector<int32_t> slots;
            {
              const py::gil_scoped_release nogil;
              e.table_rows(table, &ids, &slots);
            }
            return std::make_pair(to_numpy(std::move(ids)), to_numpy(std::move(slots)));
          },
          py::arg("table"))
      .def(
          "read_rows",
          [](Engine& e, int32_t table, const Dense& ids, const Dense& rows, py::array records) {
            if (ids.size() != rows.size()) {
              throw py::value_error("read_rows needs an id for every row, got " + std::to_string(ids.size()) +
                                    " ids and " + std::to_string(rows.size()) + " rows");
            }
            char* out = records_out(records, e, rows.size());
            const py::gil_scoped_release nogil;
            e.read_rows(table, ids.data(), rows.data(), rows.size(), out);
          },
          py::arg("table"), py::arg("ids"), py::arg("rows"), py::arg("records"))
      .def(
          "insert",
          [](Engine& e, int32_t table, const Dense& ids) {
            std::vector<int64_t> rows(static_cast<size_t>(ids.size()));
            std::vector<int32_t> slots(rows.size());
            {
              const py::gil_scoped_release nogil;
              e.insert(table, ids.data(), ids.size(), rows.data(), slots.data());
            }
            return std::make_pair(to_numpy(std::move(rows)), to_numpy(std::move(slots)));
          },
          py::arg("table"), py::arg("ids"))
      .def(
          "kept_rows", [](Engine& e, int32_t table) { return to_numpy(e.kept_rows(table)); },
          py::arg("table"))
      .def(
          "write_rows",
          [](Engine& e, int32_t table, const Dense& rows, py::array records) {
            const char* in = records_in(records, e, rows.size());
            const py::gil_scoped_release nogil;
            e.write_rows(table, rows.data(), rows.size(), in);
          },
          py::arg("table"), py::arg("rows"), py::arg("records"))
      .def("clear_table", &Engine::clear_table, py::arg("table"), py::call_guard<py::gil_scoped_release>())
      .def(
          "initial_records",
          [](Engine& e, int32_t table, const Dense& ids, py::array records) {
            char* out = records_out(records, e, ids.size());
            const py::gil_scoped_release nogil;
            e.initial_records(table, ids.data(), ids.size(), out);
          },
          py::arg("table"), py::arg("ids"), py::arg("records"));
}

void bind_reports(py::class_<Engine, std::shared_ptr<Engine>>& engine) {
  engine.def_property_readonly("record_bytes", [](const Engine& e) { return e.layout().bytes; })
      .def("stats",
           [](Engine& e) {
             const Stats s = e.stats();
             return std::map<std::string, int64_t>{
                 {"batches", s.batches},         {"lookups", s.lookups},
                 {"unique_rows", s.unique_rows}, {"new_rows", s.new_rows},
                 {"rows_in", s.rows_in},         {"unique_misses", s.unique_misses},
                 {"rows_out", s.rows_out},       {"bytes_in", s.bytes_in},
                 {"bytes_out", s.bytes_out},     {"bounds_errors", s.bounds_errors}};
           })
      .def("reset_stats", &Engine::reset_stats)
      .def("memory",
           [](Engine& e) {
             const Engine::Memory memory = e.memory();
             return std::map<std::string, int64_t>{{"id_map_bytes", memory.index_bytes},
                                                   {"store_bytes", memory.store_bytes},
                                                   {"rows", memory.rows}};
           })
      .def("set_memory_limit", &Engine::set_memory_limit, py::arg("bytes"))
      .def("take_bounds_warnings", [](Engine& e) {
        std::vector<std::tuple<std::string, int64_t, int64_t>> result;
        for (Engine::BoundsWarning& w : e.take_bounds_warnings()) {
          result.emplace_back(std::move(w.table), w.count, w.example);
        }
        return result;
      });
}

}  // namespace

PYBIND11_MODULE(_engine, m) {
  m.doc() = "The host engine: id maps, host stores, the device cache's contents, swap plans.";
  py::register_exception<CacheTooSmallError>(m, "CacheTooSmallError", PyExc_RuntimeError);
  py::register_exception<CapacityError>(m, "CapacityError", PyExc_RuntimeError);
  m.def("available_memory", &available_memory);
  // Addresses of functions of another library.
  m.def(
      "set_parallel_runner",
      [](uintptr_t runner, uintptr_t threads, int64_t from_lookups) {
        set_parallel_runner(reinterpret_cast<ParallelRunner>(runner),
                            reinterpret_cast<int64_t (*)()>(threads), from_lookups);
      },
      py::arg("runner"), py::arg("threads"), py::arg("from_lookups") = kParallelLookups);
  bind_specs(m);
  bind_swap_plan(m);
  bind_read_plan(m);
  py::class_<Engine, std::shared_ptr<Engine>> engine(m, "Engine");
  engine.def(py::init(&make_engine), py::arg("tables"), py::arg("dim"), py::arg("weight_dtype"),
             py::arg("state_elements"), py::arg("feature_tables"), py::arg("feature_columns"),
             py::arg("feature_means"), py::arg("policy") = "lru");
  bind_batches(engine);
  bind_pending(engine);
  bind_tables(engine);
  bind_reports(engine);
}

}  // namespace rec_sdk

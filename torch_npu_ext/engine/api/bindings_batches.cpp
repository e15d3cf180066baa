// rec_sdk_torch._engine: batches and their plans.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/api/bindings.h"

namespace rec_sdk {
namespace {

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

// Keeps the plan's buffers alive, for views into them.
py::capsule owner_of(const Plan& plan) {
  auto* owner = new std::shared_ptr<PlanBuffers>(plan.buffers());
  return py::capsule(owner, [](void* data) { delete static_cast<std::shared_ptr<PlanBuffers>*>(data); });
}

// The binary interface of DLPack before versions, https://dmlc.github.io/dlpack/latest/c_api.html.
struct DLDevice {
  static constexpr int32_t kCpu = 1;
  int32_t type, id;
};
struct DLDataType {
  static constexpr uint8_t kInt = 0, kFloat = 2;
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // null: without gaps
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};
constexpr const char* kDlpackName = "dltensor";

struct ExportedField {
  DLManagedTensor managed{};
  int64_t elements;
  std::shared_ptr<PlanBuffers> owner;
};

using View = py::typing::Optional<py::array>;
using Views = py::typing::Tuple<View, py::ellipsis>;
using Capsules = py::typing::Tuple<py::typing::Optional<py::object>, py::ellipsis>;

// An array of the plan as its type is; None if the batch does not need it.
py::object view_of(const PlanBuffers::Field& field, const char* arena, const py::capsule& owner) {
  using Field = PlanBuffers::Field;
  if (field.begin < 0) return py::none();
  const char* data = arena + 4 * field.begin;
  const py::ssize_t words = field.words;
  switch (field.type) {
    case Field::kInt64:
      return py::array_t<int64_t>(words / 2, reinterpret_cast<const int64_t*>(data), owner);
    case Field::kFloat32:
      return py::array_t<float>(words, reinterpret_cast<const float*>(data), owner);
    case Field::kHotSegment:
      return py::array_t<int32_t>({words / 4, py::ssize_t{4}}, reinterpret_cast<const int32_t*>(data), owner);
    case Field::kInt32:
      break;
  }
  return py::array_t<int32_t>(words, reinterpret_cast<const int32_t*>(data), owner);
}

// A part of the plan for torch.from_dlpack, or None. Such a tensor costs less than one of a NumPy array,
// above all at its end, which takes no lock.
py::object capsule_of(const PlanBuffers::Field& field, const Plan& plan) {
  using Field = PlanBuffers::Field;
  // Kernels on the host find hot rows themselves.
  if (field.begin < 0 || field.type == Field::kHotSegment) return py::none();
  auto exported = std::make_unique<ExportedField>();
  const uint8_t bits = field.type == Field::kInt64 ? 64 : 32;
  exported->elements = 32 * field.words / bits;
  exported->owner = plan.buffers();
  DLTensor& tensor = exported->managed.dl_tensor;
  tensor.data = const_cast<char*>(plan->arena() + 4 * field.begin);
  tensor.device = {DLDevice::kCpu, 0};
  tensor.ndim = 1;
  tensor.dtype = {field.type == Field::kFloat32 ? DLDataType::kFloat : DLDataType::kInt, bits, 1};
  tensor.shape = &exported->elements;
  exported->managed.manager_ctx = exported.get();
  exported->managed.deleter = [](DLManagedTensor* managed) {
    delete static_cast<ExportedField*>(managed->manager_ctx);
  };
  PyObject* const capsule = PyCapsule_New(&exported->managed, kDlpackName, [](PyObject* unused) {
    if (!PyCapsule_IsValid(unused, kDlpackName)) return;  // a tensor has it, and has renamed the capsule
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(unused, kDlpackName));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(exported.release());
  return py::reinterpret_steal<py::object>(capsule);
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
auto initial_rows(const Read& read) {
  InitialRows initial;
  {
    const WithoutLock nogil;
    read(&initial);
  }
  return std::make_pair(to_numpy(std::move(initial.places)), to_numpy(std::move(initial.tables)));
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan",
                   R"(The plan of one batch: what it needs of the cache. Its slots are pinned until it is
          released or deleted.

          It is planned, then applying (from `begin` on the cache may have been written to, and the plan can
          only be completed), then applied; or it is cancelled. One that has ended before it began, with no
          later plan, is cancelled.)")
      .def_property_readonly(
          "arena",
          [](const Plan& p) {
            const auto* bytes = reinterpret_cast<const uint8_t*>(p->arena());
            return py::array_t<uint8_t>(static_cast<py::ssize_t>(p->device_bytes()), bytes, owner_of(p));
          },
          R"(The arrays that go to the device, a view that keeps their memory alive, also after
          release().)")
      .def_property_readonly(
          "fields", [](const Plan& p) { return to_places(p->device_fields()); },
          R"((begin, words) of each array in `arena`, in units of 4 bytes, in the order of
          tbe.cache.plan.PlanArrays; None for an array that the batch does not need.)")
      .def_property_readonly(
          "views",
          [](const Plan& p) {
            const std::vector<PlanBuffers::Field> fields = p->device_fields();
            const py::capsule owner = owner_of(p);
            py::tuple result(fields.size());
            for (size_t i = 0; i < fields.size(); ++i) result[i] = view_of(fields[i], p->arena(), owner);
            return Views(result);
          },
          "The fields as arrays of their types, `hot_segments` [H, 4], that keep the arena.")
      .def_property_readonly(
          "capsules",
          [](const Plan& p) {
            const std::vector<PlanBuffers::Field> fields = p->device_fields();
            py::tuple result(fields.size());
            for (size_t i = 0; i < fields.size(); ++i) result[i] = capsule_of(fields[i], p);
            return Capsules(result);
          },
          "The same for torch.from_dlpack, without `hot_segments`: kernels on the host find hot rows "
          "themselves.")
      .def_property_readonly(
          "serial", [](const Plan& p) { return p->serial; },
          "The number of the plan; later plans have larger ones.")
      .def_property_readonly(
          "sources", [](const Plan& p) { return p->sources; },
          R"(Serials of the plans that took out rows which this one brings in: they land before
          Engine.read_in.)")
      .def_property_readonly(
          "rows_out", [](const Plan& p) { return p->rows_out; }, "O.")
      .def_property_readonly(
          "rows_in", [](const Plan& p) { return p->rows_in; }, "I.")
      .def_property_readonly(
          "segment_lookups", [](const Plan& p) { return p->segment_offsets[p->uniques]; },
          "Lookups that read a row; the others are behind these in segment order.")
      .def_property_readonly(
          "window_out", [](const Plan& p) { return p->window_out; }, "P.")
      .def_property_readonly(
          "window_in", [](const Plan& p) { return p->window_in; }, "Q.")
      .def_property_readonly(
          "begun",
          [](const Plan& p) {
            const PlanState state = p->state;
            return state == PlanState::kApplying || state == PlanState::kApplied;
          },
          "Whether the cache may have been written to: such a plan can only be completed.")
      .def_property_readonly(
          "applied", [](const Plan& p) { return p->state == PlanState::kApplied; },
          "Whether the cache has the plan's rows.")
      .def_property_readonly(
          "bounds_warnings", [](const Plan& p) { return warnings_to_python(p.engine()->bounds_warnings(p)); },
          R"((table name, count, an example) of ids that were out of range, under "warning".)")
      .def_property_readonly(
          "set_aside",
          [](const Plan& p) {
            std::vector<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>> found;
            for (Engine::SetAside& each : p.engine()->set_aside(p)) {
              found.emplace_back(std::move(each.table), each.count, each.id, each.timestamp, each.latest);
            }
            return found;
          },
          R"((table name, count, an id, its timestamp, the table's latest) of lookups with timestamps
          too far ahead.)")
      .def_property_readonly("released", &Plan::released)
      .def_property_readonly(
          "next",
          py::cpp_function(
              [](const Plan& p) -> std::optional<std::unique_ptr<Plan>> {
                std::unique_ptr<Plan> next = p.engine()->next(p);
                if (next == nullptr) return std::nullopt;
                return next;
              },
              py::call_guard<WithoutLock>()),
          R"(A handle that does not pin, as Engine.unapplied gives them, if the plan is the oldest that is
          not applied; else None.)")
      .def("release", &Plan::release,
           "Ends the pins of the plan's slots. Idempotent; deleting the plan releases it too.");
}

void bind_announcement(py::module_& m) {
  py::class_<Announcement>(m, "Announcement", "A batch that will be planned later. Deleting it forgets it.")
      .def("forget", &Announcement::forget,
           "The batch will not come. Idempotent, and nothing after the batch was planned.");
}

void bind_read_plan(py::module_& m) {
  const auto view = [](auto member) {
    return [member](const py::object& self) {
      const auto& values = self.cast<const ReadPlan&>().*member;
      using Item = typename std::decay_t<decltype(values)>::value_type;
      return py::array_t<Item>(static_cast<py::ssize_t>(values.size()), values.data(), self);
    };
  };
  py::class_<ReadPlan>(m, "ReadPlan",
                       R"(The places of the rows of some bags. When all_resident, `index` holds cache slots.
          Otherwise it points into [the rows of resident_slots ; the host_count rows that Engine.read
          fills].)")
      .def_property_readonly("offsets", view(&ReadPlan::offsets), "[bags + 1] from 0.")
      .def_property_readonly("index", view(&ReadPlan::index), "[lookups].")
      .def_property_readonly("resident_slots", view(&ReadPlan::resident_slots),
                             "[R] distinct; empty when all_resident.")
      .def_property_readonly("host_count", [](const ReadPlan& p) { return p.host_rows.size(); })
      .def_readonly("sources", &ReadPlan::sources,
                    "Serials of the plans whose rows must land before Engine.read.")
      .def_readonly("all_resident", &ReadPlan::all_resident);
}

void bind_batches(EngineClass& engine) {
  engine
      .def(
          "plan",
          [](Engine& e, const Ints& values, const Ints& offsets, const Ints& feature_keys, int64_t batch_size,
             bool weighted, bool joined, std::optional<Bytes> arena, const Announcement* announced,
             const std::optional<Slots>& shows, const std::optional<Slots>& clicks,
             const std::optional<Dense>& timestamps, const std::optional<Dense>& latest) {
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
          R"(Plans a batch and pins its slots. Waits for no copy.

          values: [*] ids of all keys. offsets: [K*B + 1]. feature_keys: [F] which key each feature reads.
          weighted: the lookups of bags have weights. joined: the features of a sequence have one gradient,
          one after another. arena: memory for the plan's arrays, of arena_bytes() at least, which it keeps;
          None for memory of its own. announced: what announce() gave for the batch, which then no longer
          counts; after an exception it still does. shows, clicks, timestamps: of each of `values`, for
          tables that admit or evict ids; shows is 1 each if None. latest: [K] the latest timestamp of each
          key, where others than those of `values` count too. Raises CacheTooSmallError, CapacityError,
          IndexError (ids out of range), MemoryError, TypeError, ValueError.)",
          py::arg("values"), py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"),
          py::arg("weighted") = false, py::arg("joined") = false, py::arg("arena").noconvert() = py::none(),
          py::arg("announced").none(true) = py::none(), py::arg("shows").noconvert() = py::none(),
          py::arg("clicks").noconvert() = py::none(), py::arg("timestamps").noconvert() = py::none(),
          py::arg("latest").noconvert() = py::none())
      .def(
          "announce",
          [](Engine& e, const Ints& values, const Ints& offsets, const Ints& feature_keys,
             int64_t batch_size) {
            const BatchArguments batch(values, offsets, feature_keys, batch_size);
            const WithoutLock nogil;
            return e.announce(batch.input);
          },
          R"(Says that the batch will be planned, after those announced before: a policy that looks
          ahead keeps its rows.

          It counts until it is planned or forgotten. Changes no row; other policies ignore it. RuntimeError
          when 16 were announced from the oldest on that still counts; TypeError, ValueError as from plan().)",
          py::arg("values"), py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"))
      .def(
          "arena_bytes",
          [](Engine& e, const Ints& values, const Ints& offsets, const Ints& feature_keys, int64_t batch_size,
             bool weighted, bool joined) {
            BatchArguments batch(values, offsets, feature_keys, batch_size);
            batch.input.weighted = weighted;
            batch.input.joined = joined;
            const WithoutLock nogil;
            return e.arena_bytes(batch.input);
          },
          "Bytes that the arrays of the batch's plan take at the most.", py::arg("values"),
          py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"), py::arg("weighted") = false,
          py::arg("joined") = false)
      .def("unapplied", &Engine::unapplied,
           R"(The plans to be applied before and with `upto`, or all, oldest first. Holding these does
          not pin.

          RuntimeError when `upto` was cancelled.)",
           py::arg("upto").none(true) = py::none(), py::call_guard<WithoutLock>())
      .def("applied", &Engine::applied,
           R"(The cache holds what the plan brings in. RuntimeError unless it is the oldest, and has
          begun.)",
           py::arg("plan"), py::call_guard<WithoutLock>())
      .def("in_flight", &Engine::in_flight, "Plans whose pins have not ended.", py::call_guard<WithoutLock>())
      .def("landed", &Engine::landed, "Whether no row that the plan took out is on its way to the store.",
           py::arg("plan"), py::call_guard<WithoutLock>())
      .def(
          "cancel",
          [](Engine& e, Plan& plan) {
            const WithoutLock nogil;
            e.cancel(&plan);
          },
          R"(Undoes the newest plan and ends its pins, before it begins; so any suffix of the plans,
          newest first.

          Only the order in which rows will be evicted may differ from before. RuntimeError for any other
          plan.)",
          py::arg("plan"))
      .def(
          "find",
          [](Engine& e, const Ints& values, const Ints& offsets, const Ints& feature_keys, int64_t batch_size,
             int64_t bag_begin, int64_t bag_end) {
            const BatchArguments batch(values, offsets, feature_keys, batch_size);
            const WithoutLock nogil;
            return e.find(batch.input, bag_begin, bag_end);
          },
          R"(Finds the rows of the group's bags [bag_begin, bag_end). Changes nothing, apart from
          bounds warnings.

          RuntimeError before all plans are applied.)",
          py::arg("values"), py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"),
          py::arg("bag_begin"), py::arg("bag_end"))
      .def(
          "bag_ranges",
          [](Engine& e, const Ints& offsets, const Ints& feature_keys, int64_t batch_size,
             int64_t max_lookups) {
            const BatchArguments batch(Dense(0), offsets, feature_keys, batch_size);
            check_batch(batch.input, e.feature_count(), false);
            return to_numpy(bag_ranges(batch.input, e.feature_count(), max_lookups));
          },
          R"(Boundaries 0 = b0 < b1 < ... = F*B of runs of bags with at most max_lookups lookups each,
          or one bag.)",
          py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"), py::arg("max_lookups"))
      .def(
          "read",
          [](Engine& e, const ReadPlan& plan, Records records) {
            char* out = records_out(records, e, static_cast<int64_t>(plan.host_rows.size()));
            return initial_rows([&](InitialRows* initial) { e.read(plan, out, initial); });
          },
          R"(Fills the [host_count] host rows. Returns (places [m], their tables [m]) of those with
          initial values.

          RuntimeError before its sources have landed.)",
          py::arg("read_plan"), py::arg("records"))
      .def(
          "land",
          [](Engine& e, const Plan& plan, Records records, std::optional<Sums> sums) {
            const char* in = records_in(records, e, plan->rows_out);
            if (plan->window_out > 0 && !sums)
              throw py::value_error("the plan has sums that leave: pass them");
            const float* in_sums =
                sums ? matrix<float, false>(*sums, "sums", plan->window_out, 2 * e.layout().dim) : nullptr;
            const WithoutLock nogil;
            e.land(plan, in, in_sums);
          },
          R"(Stores the [O] records of the rows that the plan took out, and their [P] sums, needed when
          P > 0.

          The plan may be released already; landing twice does nothing. RuntimeError before the plan has
          begun.)",
          py::arg("plan"), py::arg("records"), py::arg("sums") = py::none())
      .def(
          "read_sums",
          [](Engine& e, const Plan& plan, Sums sums) {
            float* out = matrix<float, true>(sums, "sums", plan->window_in, 2 * e.layout().dim);
            const WithoutLock nogil;
            e.read_sums(plan, out);
          },
          R"(Fills the [Q] sums of rows that come back. RuntimeError once the plan is applied or
          cancelled.)",
          py::arg("plan"), py::arg("sums"))
      .def(
          "read_in",
          [](Engine& e, const Plan& plan, Records records, bool initial) {
            char* out = records_out(records, e, plan->rows_in);
            return initial_rows([&](InitialRows* rows) { e.read_in(plan, out, initial ? rows : nullptr); });
          },
          R"(Fills the [I] records for the slots that the plan fills.

          Returns (places [m], their tables [m]) of those with initial values, if `initial`. RuntimeError
          before the plan's sources have landed.)",
          py::arg("plan"), py::arg("records"), py::arg("initial") = false)
      .def(
          "read_ahead",
          [](Engine& e, const Plan& plan, Records records) {
            char* out = records_out(records, e, plan->rows_in);
            std::vector<int32_t> late;
            {
              const WithoutLock nogil;
              late = e.read_ahead(plan, out);
            }
            return to_numpy(std::move(late));
          },
          R"(Fills the records before the plan's sources have landed, but for the rows that they take
          out.

          Returns the places [m] of those, ascending. RuntimeError once the plan has begun or was cancelled.)",
          py::arg("plan"), py::arg("records"))
      .def(
          "read_late",
          [](Engine& e, const Plan& plan, const Slots& places, Records records) {
            char* out = records_out(records, e, places.size());
            const WithoutLock nogil;
            e.read_late(plan, places.data(), places.size(), out);
          },
          R"(Fills the [m] records of the rows at `places`, ascending. RuntimeError before the sources
          have landed.)",
          py::arg("plan"), py::arg("places"), py::arg("records"));
}

}  // namespace rec_sdk

// rec_sdk_torch._engine.Plan, Announcement and ReadPlan.
#include "torch_npu_ext/engine/api/bindings.h"

namespace rec_sdk {
namespace {

// Returns a capsule that keeps the plan's buffers alive, as the base object of views into them.
py::capsule owner_of(const Plan& plan) {
  auto* owner = new std::shared_ptr<PlanBuffers>(plan.buffers());
  return py::capsule(owner, [](void* data) { delete static_cast<std::shared_ptr<PlanBuffers>*>(data); });
}

// The unversioned binary interface of DLPack, https://dmlc.github.io/dlpack/latest/c_api.html.
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
  int64_t* strides;  // null for a contiguous tensor
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

// Returns a NumPy view of one of the plan's arrays, or None if the batch does not need the array.
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

// Returns one of the plan's arrays as a DLPack capsule for torch.from_dlpack, or None. A tensor from a
// capsule is cheaper to create and destroy than one from a NumPy array, because its deleter does not take the
// GIL.
py::object capsule_of(const PlanBuffers::Field& field, const Plan& plan) {
  using Field = PlanBuffers::Field;
  // Only kernels for the host use these tensors, and they compute hot segments themselves.
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
    if (!PyCapsule_IsValid(unused, kDlpackName)) return;  // a tensor took ownership and renamed the capsule
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(unused, kDlpackName));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(exported.release());
  return py::reinterpret_steal<py::object>(capsule);
}

template <class Convert>
py::tuple map_fields(const Plan& plan, const Convert& convert) {
  const std::vector<PlanBuffers::Field> fields = plan->device_fields();
  py::tuple result(fields.size());
  for (size_t i = 0; i < fields.size(); ++i) result[i] = convert(fields[i]);
  return result;
}

}  // namespace

void bind_plan(py::module_& m) {
  const auto field = [](auto member) { return [member](const Plan& p) { return (*p).*member; }; };
  py::class_<Plan>(m, "Plan",
                   R"(The plan of one batch: the rows to swap into and out of the cache. Its slots are pinned
          until it is released or deleted.

          A plan is first planned, then started, and finally applied. Once it is started, the cache may have
          been written, and the plan can only be completed. A plan that is not started can be cancelled;
          releasing it also cancels it, as soon as no later plan exists.)")
      .def_property_readonly(
          "arena",
          [](const Plan& p) {
            const auto* bytes = reinterpret_cast<const uint8_t*>(p->arena());
            return py::array_t<uint8_t>(static_cast<py::ssize_t>(p->device_bytes()), bytes, owner_of(p));
          },
          R"(The device arrays of the plan as one view, which keeps their memory alive even after release().)")
      .def_property_readonly(
          "fields", [](const Plan& p) { return to_places(p->device_fields()); },
          R"(The location of each array in `arena`: (first word, words) in units of 4 bytes, in the order of
          tbe.cache.plan.PlanArrays; None for an array that the batch does not need.)")
      .def_property_readonly(
          "views",
          [](const Plan& p) {
            const py::capsule owner = owner_of(p);
            return Views(map_fields(p, [&](const auto& field) { return view_of(field, p->arena(), owner); }));
          },
          R"(The arrays of `fields` as NumPy views with their dtypes, which keep the arena alive;
          `hot_segments` is [H, 4].)")
      .def_property_readonly(
          "capsules",
          [](const Plan& p) {
            return Capsules(map_fields(p, [&](const auto& field) { return capsule_of(field, p); }));
          },
          "The arrays of `fields` for torch.from_dlpack, without `hot_segments`, which host kernels compute "
          "themselves.")
      .def_property_readonly("serial", field(&PlanBuffers::serial),
                             R"(The number of the plan; later plans have larger numbers.)")
      .def_property_readonly(
          "sources", field(&PlanBuffers::sources),
          R"(The serials of plans with pending write-backs of rows that this plan swaps in. These write-backs
          must be complete before Engine.read_in.)")
      .def_property_readonly("rows_out", field(&PlanBuffers::rows_out), R"(The number of rows out (victims),
          O.)")
      .def_property_readonly("rows_in", field(&PlanBuffers::rows_in), R"(The number of rows in (misses), I.)")
      .def_property_readonly(
          "segment_lookups", [](const Plan& p) { return p->segment_offsets[p->uniques]; },
          R"(The number of lookups of the batch, not counting lookups of default rows. The latter come last in
          segment order.)")
      .def_property_readonly("window_out", field(&PlanBuffers::window_out), R"(The number of rows out with
          sums, P.)")
      .def_property_readonly("window_in", field(&PlanBuffers::window_in), R"(The number of rows in with
          sums, Q.)")
      .def_property_readonly(
          "started",
          [](const Plan& p) {
            const PlanState state = p->state;
            return state == PlanState::kApplying || state == PlanState::kApplied;
          },
          R"(Whether the cache may have been written: a started plan can only be completed.)")
      .def_property_readonly(
          "applied", [](const Plan& p) { return p->state == PlanState::kApplied; },
          R"(Whether the cache holds the plan's rows.)")
      .def_property_readonly(
          "bounds_warnings", &Plan::bounds_warnings,
          R"(The ids out of range in tables with bounds_check "warning": (table name, number of ids, an
          example) per table.)")
      .def_property_readonly("rejected_timestamps", &Plan::rejected_timestamps,
                             R"(The timestamps that were rejected as too far in the future: (table name,
          number of timestamps, an example id, its timestamp, the table's latest timestamp) per table.)")
      .def_property_readonly("written_back",
                             py::cpp_function(&Plan::written_back, py::call_guard<WithoutLock>()),
                             R"(Whether no write-back of the plan is pending.)")
      .def_property_readonly("released", &Plan::released)
      .def_property_readonly(
          "next",
          py::cpp_function(
              [](const Plan& p) {
                std::unique_ptr<Plan> next = p.next();
                return next ? std::optional(std::move(next)) : std::nullopt;
              },
              py::call_guard<WithoutLock>()),
          R"(Another handle of the plan, as returned by Engine.unapplied, which does not pin slots. None
          unless the plan is the oldest unapplied one.)")
      .def("release", &Plan::release,
           R"(Unpins the plan's slots. Idempotent; deleting the plan releases it too.)");
  py::class_<Announcement>(m, "Announcement", R"(The announcement of a batch that will be planned later.
          Deleting the object calls forget().)")
      .def("forget", &Announcement::forget,
           R"(Withdraws the announcement. Idempotent; has no effect after the batch was planned.)");
  const auto view = [](auto member) {
    return [member](const py::object& self) {
      const auto& values = self.cast<const ReadPlan&>().*member;
      using Item = typename std::decay_t<decltype(values)>::value_type;
      return py::array_t<Item>(static_cast<py::ssize_t>(values.size()), values.data(), self);
    };
  };
  py::class_<ReadPlan>(m, "ReadPlan",
                       R"(The locations of the rows of some bags, for reading without a swap.

          If all_resident, `index` contains cache slots. Otherwise it contains positions in the concatenation
          of two arrays: the rows in resident_slots, and the host_count rows that Engine.read fills.)")
      .def_property_readonly("offsets", view(&ReadPlan::offsets), R"(The offsets of the bags in `index`, [bags
          + 1], starting at 0.)")
      .def_property_readonly("index", view(&ReadPlan::index), R"(The location of the row of each lookup,
          [lookups].)")
      .def_property_readonly("resident_slots", view(&ReadPlan::resident_slots),
                             R"(The distinct cache slots of the lookups, [R]; empty if all_resident.)")
      .def_property_readonly("host_count", [](const ReadPlan& p) { return p.host_rows.size(); })
      .def_readonly("sources", &ReadPlan::sources,
                    R"(Serials of the plans whose write-backs must be complete before Engine.read.)")
      .def_readonly("all_resident", &ReadPlan::all_resident);
}

}  // namespace rec_sdk

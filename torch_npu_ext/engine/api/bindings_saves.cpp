// rec_sdk_torch._engine: saves.
#include "torch_npu_ext/engine/api/bindings.h"
#include "torch_npu_ext/engine/api/bindings_columns.h"
#include "torch_npu_ext/engine/base/crc32.h"

namespace rec_sdk {

// Ids, slots, records and columns.
using Taken = std::tuple<py::array_t<int64_t>, py::array_t<int32_t>, py::array_t<uint8_t>, Columns>;

static Taken to_python(TakenRows taken) {
  const py::ssize_t rows = static_cast<py::ssize_t>(taken.records.size()) / taken.record_bytes;
  auto* const owner = new UnsetBytes(std::move(taken.records));
  const py::capsule base(owner, [](void* data) { delete static_cast<UnsetBytes*>(data); });
  const py::array_t<uint8_t> records({rows, taken.record_bytes},
                                     reinterpret_cast<const uint8_t*>(owner->data()), base);
  return {to_python(std::move(taken.ids)), to_python(std::move(taken.slots)), records,
          to_arrays(taken.columns, taken.kept)};
}

namespace {

uint32_t checksum(const py::object& data, uint32_t before) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(data.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  const auto release = [](Py_buffer* held) { PyBuffer_Release(held); };
  const std::unique_ptr<Py_buffer, decltype(release)> held(&buffer, release);
  const WithoutLock nogil;
  return crc32(buffer.buf, static_cast<size_t>(buffer.len), before);
}

}  // namespace

void bind_checksums(py::module_& m) {
  m.def("has_carryless_multiplication", &has_carryless_multiplication,
        "Whether this machine has the instructions with which crc32 is fast; it is slow without.");
  m.def("crc32", &checksum, py::arg("data"), py::arg("before") = 0,
        R"(As zlib.crc32: the CRC-32 of contiguous bytes that follow those whose CRC-32 is `before`.

          BufferError, TypeError for what has no such bytes.)");
}

void bind_saves(py::module_& m) {
  const py::arg table("table"), ids("ids"), rows("rows"), since("since"), begin("begin"), least("least");
  py::class_<Saves>(
      m, "Saves",
      R"(Versions and changes of rows, loads, and snapshots. All plans must be applied and all rows landed,
          else RuntimeError, unless a call says otherwise.)")
      .def("ids_with_records", unlocked(&Saves::ids_with_records), table,
           R"(Ids [n], by ascending row, of rows with more than their initial record: in the cache, or in the
          store.)")
      .def("unlisted_ids", unlocked(&Saves::unlisted_ids), table, ids,
           "Ids [n] that the table has beside these, by ascending row.")
      .def("version", unlocked(&Saves::version),
           R"(The present version: changes from now on are of a later one. Needs nothing applied or landed.)")
      .def("changed_ids", unlocked(&Saves::changed_ids), table, since,
           R"(Ids [n], by ascending row, of rows that changed after version `since`; how many rows were looked
          at for it.

          Rows are looked at that changed since the `next_version` before `since`, or all where those are
          many. ValueError for a table without the column "version".)")
      .def("scan_ids", unlocked(&Saves::scan_ids), table, begin, least,
           R"(Ids of a hash table from bucket `begin` on, `least` or somewhat more, in no order; where to go
          on, -1 at the end. ValueError for an index table.)")
      .def("reserve_ids", unlocked(&Saves::reserve_ids), table, py::arg("extra"),
           R"(Room for so many more ids of a hash table, which may then come in the order of scan_ids.
          MemoryError.)")
      .def("removed_ids", unlocked(&Saves::removed_ids), table, since,
           R"(Ids [n], ascending, that were removed after version `since`, with those that came back; whether
          that is all.

          ValueError for a table without the column "version".)")
      .def("forget_changes", unlocked(&Saves::forget_changes), table, py::arg("upto"),
           "Forgets what was removed before this version. Needs nothing applied or landed.")
      .def("next_version", unlocked(&Saves::next_version),
           "As version(); where no batch is in flight, no row is of a later version yet.")
      .def("window_ids", unlocked(&Saves::window_ids), table,
           R"(Ids [n] of the table's rows with sums: those of window_rows, resident ones first, in their
          order.)")
      .def(
          "put_spilled",
          [](Saves& e, int32_t table, Span<int64_t> rows, Sums sums) {
            const float* in = sums_of<false>(sums, e, rows.size());
            const WithoutLock nogil;
            e.put_spilled(table, rows, in);
          },
          table, rows, py::arg("sums"),
          R"(Gives rows [n] that are not in the cache sums [n, 2 * dim]. IndexError for others, or those with
          sums.)")
      .def(
          "load_rows",
          [](Saves& e, int32_t table, Span<int64_t> ids, const std::vector<std::pair<Bytes, int64_t>>& parts,
             bool whole) {
            std::vector<Saves::RecordPart> of_records;
            for (const auto& [values, begin] : parts) {
              const bool fits = values.ndim() == 2 && values.shape(0) == ids.size() && begin >= 0 &&
                                begin + values.shape(1) <= e.layout().bytes;
              if (!fits) throw py::value_error("load_rows needs parts of records, [n, bytes]");
              of_records.push_back({reinterpret_cast<const char*>(values.data()), begin, values.shape(1)});
            }
            return run_unlocked([&] { return e.load_rows(table, ids, of_records, whole); });
          },
          table, ids, py::arg("parts"), py::arg("whole"),
          R"(Rows [n] of the ids, as insert() gives them, none of which is in the cache. Stores parts of their
          records: uint8 [n, bytes], and where they begin in a record. whole: other bytes are zero; else they
          stay.

          Errors as of insert() and write_rows().)")
      .def(
          "open_snapshot",
          [](Saves& e, int32_t table, const std::optional<Dense>& ids) {
            const WithoutLock nogil;
            return ids ? e.open_snapshot(table, {ids->data(), ids->size()}) : e.open_snapshot(table);
          },
          table, py::arg("ids") = py::none(),
          R"(Rows of `ids` [n], or all, are pending as they are now; how many. All must be settled.

          A pending row is taken before it is changed; where plans count it, the engine keeps its old columns.
          RuntimeError for a table that has one.)")
      .def("open_snapshot_since", unlocked(&Saves::open_snapshot_since), table, since,
           R"(The same of the rows that changed after version `since`: those of changed_ids, which take_next
          takes, by ascending row.

          ValueError for a table without the column "version".)")
      .def("close_snapshot", unlocked(&Saves::close_snapshot), table,
           "Nothing is pending; also where there is no snapshot.")
      .def("snapshot_pending", unlocked(&Saves::snapshot_pending), table,
           R"(Rows not taken yet. RuntimeError without a snapshot, here and in the calls that take.)")
      .def("take_ids", unlocked(&Saves::take_ids), table, ids,
           R"(Takes those of `ids` [n] that are pending, and that no plan moves: ids, slots or -1, records,
          columns.

          Records are uint8 [m, record_bytes], unset for rows with a slot, and [0, record_bytes] where all
          have one: the caller reads the cache before others do anything with it.)")
      .def("take_slots", unlocked(&Saves::take_slots), table, py::arg("slots"),
           R"(The same of rows in these slots [n] of the group, which plans in flight hold; those of other
          tables stay.)")
      .def("take_next", unlocked(&Saves::take_next), table, begin, least,
           R"(The same from a place on, 0 at first, at least so many rows; and the place to go on from, or -1.

          To be called from 0 on again until no row is pending: those that moved meanwhile may be left.)");
}

}  // namespace rec_sdk

// rec_sdk_torch._engine.Saves: the engine's methods for saves.
#include "torch_npu_ext/engine/api/bindings.h"
#include "torch_npu_ext/engine/api/bindings_columns.h"
#include "torch_npu_ext/engine/base/crc32.h"

namespace rec_sdk {

// The result of taking rows from a snapshot: their ids, slots, records and columns.
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

uint32_t buffer_crc32(const py::object& data, uint32_t before) {
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
        R"(Returns whether this CPU has the carry-less multiplication that makes crc32 fast.)");
  m.def("crc32", &buffer_crc32, py::arg("data"), py::arg("before") = 0,
        R"(Returns the CRC-32 of contiguous bytes, like zlib.crc32. To continue a checksum, pass the CRC-32 of
          the preceding bytes as `before`.

          Raises BufferError or TypeError if `data` does not provide such bytes.)");
}

void bind_saves(py::module_& m) {
  const py::arg table("table"), ids("ids"), rows("rows"), since("since"), begin("begin"), least("least");
  py::class_<Saves>(m, "Saves",
                    R"(Versions and changes of rows, loading, and snapshots.

          Unless stated otherwise, methods raise RuntimeError while a plan is not applied or a write-back is
          pending.)")
      .def("ids_with_records", unlocked(&Saves::ids_with_records), table,
           R"(Returns the ids [n], by ascending row, of the rows that are in the cache or the host store. All
          other rows still have their initial records.)")
      .def("unlisted_ids", unlocked(&Saves::unlisted_ids), table, ids,
           R"(Returns the ids [n] of the table that are not in `ids`, by ascending row.)")
      .def("version", unlocked(&Saves::version),
           R"(Returns the present version. Changes made from now on get a higher version. May be called at any
          time.)")
      .def("changed_ids", unlocked(&Saves::changed_ids), table, since,
           R"(Returns the ids [n], by ascending row, of rows that changed after version `since`, and the
          number of rows examined.

          Examines only the rows that the change log lists after `since`, or all rows if the log does not
          reach back that far. Raises ValueError for a table without the column "version".)")
      .def("scan_ids", unlocked(&Saves::scan_ids), table, begin, least,
           R"(Returns at least `least` ids of a hash table, in no order, from bucket `begin` on, and the
          bucket to continue with. At the end of the table there may be fewer ids, and the bucket is -1.
          Raises ValueError for an index table.)")
      .def("reserve_ids", unlocked(&Saves::reserve_ids), table, py::arg("extra"),
           R"(Reserves space for `extra` more ids of a hash table. Call this before ids are inserted in the
          order of scan_ids. Raises MemoryError.)")
      .def("removed_ids", unlocked(&Saves::removed_ids), table, since,
           R"(Returns the ids [n], ascending, that were removed after version `since`, and whether the list is
          complete. Ids that were added again are included.

          Raises ValueError for a table without the column "version".)")
      .def("forget_changes", unlocked(&Saves::forget_changes), table, py::arg("upto"),
           R"(Drops the entries of the logs of changes and removals up to version `upto`. May be called at any
          time.)")
      .def("next_version", unlocked(&Saves::next_version),
           R"(Advances the version past all changes made so far and returns version(). If no batch is in
          flight, no row has a later version.)")
      .def("window_ids", unlocked(&Saves::window_ids), table,
           R"(Returns the ids [n] of the table's rows that have sums, in the order of window_rows: cached rows
          by slot, then the other rows by row.)")
      .def(
          "put_spilled",
          [](Saves& e, int32_t table, Span<int64_t> rows, Sums sums) {
            const float* in = sums_of<false>(sums, e, rows.size());
            const WithoutLock nogil;
            e.put_spilled(table, rows, in);
          },
          table, rows, py::arg("sums"),
          R"(Adds sums [n, 2 * dim] for rows [n], none of which may be in the cache. Raises IndexError for
          rows that have no record in the host store or already have sums.)")
      .def(
          "load_rows",
          [](Saves& e, int32_t table, Span<int64_t> ids, const std::vector<std::pair<Bytes, int64_t>>& parts,
             bool whole) {
            std::vector<Saves::RecordPart> record_parts;
            for (const auto& [values, begin] : parts) {
              const bool fits = values.ndim() == 2 && values.shape(0) == ids.size() && begin >= 0 &&
                                begin + values.shape(1) <= e.layout().bytes;
              if (!fits) throw py::value_error("load_rows: parts must be [n, bytes] and lie within a record");
              record_parts.push_back({reinterpret_cast<const char*>(values.data()), begin, values.shape(1)});
            }
            return run_unlocked([&] { return e.load_rows(table, ids, record_parts, whole); });
          },
          table, ids, py::arg("parts"), py::arg("whole"),
          R"(Inserts ids and stores parts of their records; returns the rows [n], as insert() does.

          None of the rows may be in the cache.
          parts: pairs of uint8 [n, bytes] and the offset of these bytes in a record.
          whole: if true, sets the remaining bytes of the records to zero; otherwise these bytes keep their
          values.
          Raises the errors of insert() and write_rows().)")
      .def(
          "open_snapshot",
          [](Saves& e, int32_t table, const std::optional<Dense>& ids) {
            const WithoutLock nogil;
            return ids ? e.open_snapshot(table, {ids->data(), ids->size()}) : e.open_snapshot(table);
          },
          table, py::arg("ids") = py::none(),
          R"(Opens a snapshot of the rows of `ids` [n], or of all rows, and returns their number. All of them
          are now pending.

          The caller must take a pending row before it changes. If a plan updates the columns of a pending
          row, the engine keeps the old values for the snapshot. Raises RuntimeError while a plan is not
          applied or a write-back is pending, and for a table with an open snapshot.)")
      .def("open_snapshot_since", unlocked(&Saves::open_snapshot_since), table, since,
           R"(Opens a snapshot of the rows that changed after version `since`; see changed_ids and
          open_snapshot. take_next returns them by ascending row.

          Raises ValueError for a table without the column "version".)")
      .def("close_snapshot", unlocked(&Saves::close_snapshot), table,
           R"(Closes the table's snapshot, if there is one: no row is pending afterwards. May be called at
          any time.)")
      .def("snapshot_pending", unlocked(&Saves::snapshot_pending), table,
           R"(Returns the number of pending rows. Raises RuntimeError without a snapshot, like the take
          methods.)")
      .def("take_ids", unlocked(&Saves::take_ids), table, ids,
           R"(Takes the pending rows of `ids` [n], except rows that a plan or a write-back is moving. Returns
          the ids, slots, records and columns of the rows it took; the slot is -1 for a row outside the cache.

          Records are uint8 [m, record_bytes], uninitialized for rows with a slot, or [0, record_bytes] if all
          rows have a slot. The caller must read rows with a slot from the cache before the cache changes. May
          be called while batches are in flight.)")
      .def("take_slots", unlocked(&Saves::take_slots), table, py::arg("slots"),
           R"(Takes the pending rows in `slots` [n], which plans in flight must pin, and skips slots of other
          tables. Returns the rows like take_ids.)")
      .def("take_next", unlocked(&Saves::take_next), table, begin, least,
           R"(Takes at least `least` pending rows from position `begin` on, or all rows up to the end. Returns
          the rows like take_ids, and the position to continue with, or -1 at the end.

          Skips rows that a plan or a write-back is moving. The caller must therefore start again at position
          0 until no row is pending.)");
}

}  // namespace rec_sdk

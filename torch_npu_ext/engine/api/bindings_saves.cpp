// rec_sdk_torch._engine: saves.
#include <memory>

#include "torch_npu_ext/engine/api/bindings.h"
#include "torch_npu_ext/engine/base/crc32.h"

namespace rec_sdk {

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
  m.def("crc32", &checksum,
        R"(As zlib.crc32: the CRC-32 of contiguous bytes that follow those whose CRC-32 is `before`.

          BufferError, TypeError for what has no such bytes.)",
        py::arg("data"), py::arg("before") = 0);
}

void bind_saves(EngineClass& engine) {
  engine
      .def(
          "scan_ids",
          [](Engine& e, int32_t table, int64_t begin, int64_t least) {
            std::vector<int64_t> ids;
            int64_t next = -1;
            {
              const WithoutLock nogil;
              next = e.scan_ids(table, begin, least, &ids);
            }
            return std::make_pair(to_numpy(std::move(ids)), next);
          },
          R"(Ids of a hash table from bucket `begin` on, `least` or somewhat more, in no order; where
          to go on, -1 at the end. ValueError for an index table.)",
          py::arg("table"), py::arg("begin"), py::arg("least"))
      .def("reserve_ids", &Engine::reserve_ids,
           R"(Room for so many more ids of a hash table, which may then come in the order of scan_ids.
          MemoryError.)",
           py::arg("table"), py::arg("extra"), py::call_guard<WithoutLock>())
      .def(
          "removed_ids",
          [](Engine& e, int32_t table, uint64_t since) {
            std::vector<int64_t> ids;
            bool complete = false;
            {
              const WithoutLock nogil;
              complete = e.removed_ids(table, since, &ids);
            }
            return std::make_pair(to_numpy(std::move(ids)), complete);
          },
          R"(Ids [n], ascending, that were removed after version `since`, with those that came back;
          whether that is all.

          ValueError for a table without the column "version".)",
          py::arg("table"), py::arg("since"))
      .def("forget_changes", &Engine::forget_changes,
           "Forgets what was removed before this version. Needs nothing applied or landed.", py::arg("table"),
           py::arg("upto"), py::call_guard<WithoutLock>())
      .def("next_version", &Engine::next_version,
           "As version(); where no batch is in flight, no row is of a later version yet.",
           py::call_guard<WithoutLock>())
      .def(
          "window_ids",
          [](Engine& e, int32_t table) {
            std::vector<int64_t> ids;
            {
              const WithoutLock nogil;
              ids = e.window_ids(table);
            }
            return to_numpy(std::move(ids));
          },
          R"(Ids [n] of the table's rows with sums: those of window_slots, then those of window_away,
          in their order.)",
          py::arg("table"))
      .def(
          "put_away",
          [](Engine& e, int32_t table, const Dense& rows, Sums sums) {
            const float* in = matrix<float, false>(sums, "sums", rows.size(), 2 * e.layout().dim);
            const WithoutLock nogil;
            e.put_away(table, rows.data(), rows.size(), in);
          },
          R"(Gives rows [n] that are not in the cache sums [n, 2 * dim]. IndexError for others, or
          those with sums.)",
          py::arg("table"), py::arg("rows"), py::arg("sums"))
      .def(
          "cached_rows",
          [](Engine& e, int32_t table) {
            Engine::CachedRows cached;
            {
              const WithoutLock nogil;
              e.cached_rows(table, &cached);
            }
            return std::make_tuple(to_numpy(std::move(cached.ids)), to_numpy(std::move(cached.heats)),
                                   to_numpy(std::move(cached.last_batches)));
          },
          R"(Rows in the cache, by slot: ids [n], float32 [n] in how many batches they were used, of which
          those of long ago count less (0 where the policy counts none), uint32 [n] numbers of the batches
          that used them last.)",
          py::arg("table"))
      .def(
          "choose_warm",
          [](Engine& e, int32_t table, const Dense& ids) {
            Engine::WarmRows chosen;
            {
              const WithoutLock nogil;
              e.choose_warm(table, ids.data(), ids.size(), &chosen);
            }
            return std::make_tuple(to_numpy(std::move(chosen.places)), to_numpy(std::move(chosen.rows)),
                                   to_numpy(std::move(chosen.slots)));
          },
          R"(Free slots for the first of these ids that have rows outside the cache, hottest first: their
          places among the ids [n], rows [n] and slots [n].

          RuntimeError while batches are in flight; IndexError for ids that an index table lacks.)",
          py::arg("table"), py::arg("ids"))
      .def(
          "warm",
          [](Engine& e, int32_t table, const Dense& ids, const Slots& slots, const Heats& heats) {
            if (ids.size() != slots.size() || ids.size() != heats.size()) {
              throw py::value_error("warm needs a slot and a heat for every id");
            }
            const WithoutLock nogil;
            e.warm(table, ids.data(), slots.data(), heats.data(), ids.size());
          },
          R"(The rows of these ids [n] are in these slots [n] from now on, with heats [n] as cached_rows has
          them: what choose_warm gave, whose records are there.)",
          py::arg("table"), py::arg("ids"), py::arg("slots"), py::arg("heats"));
}

}  // namespace rec_sdk

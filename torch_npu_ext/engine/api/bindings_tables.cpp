// rec_sdk_torch._engine: windows and whole tables.
#include <map>
#include <optional>

#include "torch_npu_ext/engine/api/bindings.h"

namespace rec_sdk {

void bind_window(EngineClass& engine) {
  engine
      .def(
          "mark",
          [](Engine& e, const Plan& plan, std::optional<Slots> slots) {
            const WithoutLock nogil;
            slots ? e.mark(plan, slots->data(), slots->size()) : e.mark(plan);
          },
          R"(The plan's rows, or those in `slots`, which are some of them, have sums from now on.

          RuntimeError after the plan's release.)",
          py::arg("plan"), py::arg("slots").noconvert() = py::none())
      .def("window_open", &Engine::window_open, "Whether any row has a sum.", py::call_guard<WithoutLock>())
      .def(
          "window_slots",
          [](Engine& e) {
            std::vector<int32_t> slots, table_offsets;
            {
              const WithoutLock nogil;
              e.window_slots(&slots, &table_offsets);
            }
            return std::make_pair(to_numpy(std::move(slots)), to_numpy(std::move(table_offsets)));
          },
          "Resident rows with sums: slots [n], ascending, and table_offsets [T + 1].")
      .def(
          "window_away",
          [](Engine& e) {
            std::vector<int64_t> rows;
            std::vector<int32_t> table_offsets;
            {
              const WithoutLock nogil;
              e.window_away(&rows, &table_offsets);
            }
            return std::make_pair(to_numpy(std::move(rows)), to_numpy(std::move(table_offsets)));
          },
          R"(Rows with sums that left the cache: rows [n], ascending within a table; table_offsets [T +
          1].)")
      .def(
          "read_away",
          [](Engine& e, int64_t begin, int64_t end, Records records, Sums sums) {
            if (begin < 0 || end < begin) throw py::index_error("read_away: begin <= end, both from 0 on");
            const int64_t rows = end - begin;
            char* out = records_out(records, e, rows);
            float* out_sums = matrix<float, true>(sums, "sums", rows, 2 * e.layout().dim);
            const WithoutLock nogil;
            e.read_away(begin, end, out, out_sums);
          },
          R"(Fills records and sums of the begin-th to end-th row of window_away. IndexError beyond
          them.)",
          py::arg("begin"), py::arg("end"), py::arg("records"), py::arg("sums"))
      .def(
          "write_away",
          [](Engine& e, int64_t begin, int64_t end, Records records) {
            if (begin < 0 || end < begin) throw py::index_error("write_away: begin <= end, both from 0 on");
            const char* in = records_in(records, e, end - begin);
            const WithoutLock nogil;
            e.write_away(begin, end, in);
          },
          R"(Stores the records of the begin-th to end-th row of window_away. IndexError beyond them.)",
          py::arg("begin"), py::arg("end"), py::arg("records"))
      .def("close_window", &Engine::close_window, "Ends the window: no row has a sum.",
           py::call_guard<WithoutLock>());
}

void check_ids_of_rows(const char* call, const Dense& ids, const Dense& rows) {
  if (ids.size() == rows.size()) return;
  throw py::value_error(std::string(call) + " needs an id for every row, got " + std::to_string(ids.size()) +
                        " ids and " + std::to_string(rows.size()) + " rows");
}

void bind_tables(EngineClass& engine) {
  engine
      .def("row_count", &Engine::row_count,
           R"(Ids known (hash table) or num_embeddings (index table). Needs nothing applied or landed.)",
           py::arg("table"), py::call_guard<WithoutLock>())
      .def(
          "table_rows",
          [](Engine& e, int32_t table) {
            std::vector<int64_t> ids;
            std::vector<int32_t> slots;
            {
              const WithoutLock nogil;
              e.table_rows(table, &ids, &slots);
            }
            return std::make_pair(to_numpy(std::move(ids)), to_numpy(std::move(slots)));
          },
          R"(Ids [n] by ascending row, and slots [n], -1 = not resident. Rows have gaps once ids were
          removed.)",
          py::arg("table"))
      .def(
          "read_rows",
          [](Engine& e, int32_t table, const Dense& ids, const Dense& rows, Records records) {
            check_ids_of_rows("read_rows", ids, rows);
            char* out = records_out(records, e, rows.size());
            const WithoutLock nogil;
            e.read_rows(table, ids.data(), rows.data(), rows.size(), out);
          },
          R"(Fills host records of rows [n] and their ids. Resident rows are stale: overlay those of
          the cache.)",
          py::arg("table"), py::arg("ids"), py::arg("rows"), py::arg("records"))
      .def(
          "insert",
          [](Engine& e, int32_t table, const Dense& ids) {
            std::vector<int64_t> rows(static_cast<size_t>(ids.size()));
            std::vector<int32_t> slots(rows.size());
            {
              const WithoutLock nogil;
              e.insert(table, ids.data(), ids.size(), rows.data(), slots.data());
            }
            return std::make_pair(to_numpy(std::move(rows)), to_numpy(std::move(slots)));
          },
          R"(Rows [n] and slots [n] (-1 = not resident) of the ids; a hash table adds those it does not
          know.

          CapacityError, MemoryError; IndexError for ids that an index table lacks.)",
          py::arg("table"), py::arg("ids"))
      .def(
          "others",
          [](Engine& e, int32_t table, const Dense& ids) {
            std::vector<int64_t> others;
            {
              const WithoutLock nogil;
              others = e.others(table, ids.data(), ids.size());
            }
            return to_numpy(std::move(others));
          },
          "Ids [n] that the table has beside these, by ascending row.", py::arg("table"), py::arg("ids"))
      .def(
          "find_rows",
          [](Engine& e, int32_t table, const Dense& ids) {
            std::vector<int64_t> rows(static_cast<size_t>(ids.size()));
            std::vector<int32_t> slots(rows.size());
            {
              const WithoutLock nogil;
              e.find_rows(table, ids.data(), ids.size(), rows.data(), slots.data());
            }
            return std::make_pair(to_numpy(std::move(rows)), to_numpy(std::move(slots)));
          },
          R"(Rows [n], -1 = not known, and slots [n], -1 = not resident. IndexError for ids that an
          index table lacks.)",
          py::arg("table"), py::arg("ids"))
      .def(
          "kept_ids",
          [](Engine& e, int32_t table) {
            std::vector<int64_t> ids;
            {
              const WithoutLock nogil;
              ids = e.kept_ids(table);
            }
            return to_numpy(std::move(ids));
          },
          R"(Ids [n], by ascending row, of rows with more than their initial record: in the cache, or
          in the store.)",
          py::arg("table"))
      .def(
          "changed_ids",
          [](Engine& e, int32_t table, uint64_t since) {
            std::vector<int64_t> ids;
            int64_t looked_at = 0;
            {
              const WithoutLock nogil;
              ids = e.changed_ids(table, since, &looked_at);
            }
            return std::make_pair(to_numpy(std::move(ids)), looked_at);
          },
          R"(Ids [n], by ascending row, of rows that changed after version `since`; how many rows were
          looked at for it.

          Rows are looked at that changed since the `next_version` before `since`, or all where those are many.
          ValueError for a table without the column "version".)",
          py::arg("table"), py::arg("since"))
      .def("version", &Engine::version,
           R"(The present version: changes from now on are of a later one. Needs nothing applied or
          landed.)",
           py::call_guard<WithoutLock>())
      .def(
          "remove",
          [](Engine& e, int32_t table, const Dense& ids, bool candidates) {
            const WithoutLock nogil;
            return e.remove(table, ids.data(), ids.size(), candidates);
          },
          R"(Takes ids out of a hash table, or makes rows of an index table initial; how many it knew.

          candidates: what was counted of them before they had a row is forgotten as well. RuntimeError,
          with nothing removed, while batches in flight use one of the rows, or one has a sum of the window;
          IndexError for ids that an index table lacks.)",
          py::arg("table"), py::arg("ids"), py::arg("candidates") = true)
      .def(
          "reserve_rows",
          [](Engine& e, int32_t table, const Dense& rows) {
            const WithoutLock nogil;
            e.reserve_rows(table, rows.data(), rows.size());
          },
          R"(Takes the memory of rows [n], so that write_rows cannot fail. MemoryError, IndexError.)",
          py::arg("table"), py::arg("rows"))
      .def(
          "write_rows",
          [](Engine& e, int32_t table, const Dense& ids, const Dense& rows, Records records) {
            check_ids_of_rows("write_rows", ids, rows);
            const char* in = records_in(records, e, rows.size());
            const WithoutLock nogil;
            e.write_rows(table, ids.data(), rows.data(), rows.size(), in);
          },
          R"(Stores host records of rows [n] and their ids. Resident rows must be written to the cache
          as well.)",
          py::arg("table"), py::arg("ids"), py::arg("rows"), py::arg("records"))
      .def(
          "load_rows",
          [](Engine& e, int32_t table, const Dense& ids, const std::vector<std::pair<Bytes, int64_t>>& parts,
             bool whole) {
            std::vector<Engine::RecordPart> of_records;
            for (const auto& [values, begin] : parts) {
              const bool fits = values.ndim() == 2 && values.shape(0) == ids.size() && begin >= 0 &&
                                begin + values.shape(1) <= e.layout().bytes;
              if (!fits) throw py::value_error("load_rows needs parts of records, [n, bytes]");
              of_records.push_back({reinterpret_cast<const char*>(values.data()), begin, values.shape(1)});
            }
            std::vector<int64_t> rows(static_cast<size_t>(ids.size()));
            {
              const WithoutLock nogil;
              e.load_rows(table, ids.data(), ids.size(), of_records, whole, rows.data());
            }
            return to_numpy(std::move(rows));
          },
          R"(Rows [n] of the ids, as insert() gives them, none of which is in the cache. Stores parts of their records:
          uint8 [n, bytes], and where they begin in a record. whole: other bytes are zero; else they stay.

          Errors as of insert() and write_rows().)",
          py::arg("table"), py::arg("ids"), py::arg("parts"), py::arg("whole"))
      .def("clear_table", &Engine::clear_table,
           "Forgets all rows, with their sums. RuntimeError while a batch in flight uses one.",
           py::arg("table"), py::call_guard<WithoutLock>())
      .def(
          "initial_records",
          [](Engine& e, int32_t table, const Dense& ids, Records records) {
            char* out = records_out(records, e, ids.size());
            const WithoutLock nogil;
            e.initial_records(table, ids.data(), ids.size(), out);
          },
          "Fills the [n] records that the ids start from. Needs nothing applied or landed.", py::arg("table"),
          py::arg("ids"), py::arg("records"));
}

void bind_reports(EngineClass& engine) {
  engine.def_property_readonly("record_bytes", [](const Engine& e) { return e.layout().bytes; })
      .def(
          "stats",
          [](Engine& e, std::optional<int32_t> table) {
            Stats s;
            {
              const WithoutLock nogil;
              s = e.stats(table.value_or(Engine::kAllTables));
            }
            return std::map<std::string, int64_t>{{"batches", s.batches},
                                                  {"lookups", s.lookups},
                                                  {"unique_rows", s.unique_rows},
                                                  {"new_rows", s.new_rows},
                                                  {"rows_in", s.rows_in},
                                                  {"unique_misses", s.unique_misses},
                                                  {"rows_out", s.rows_out},
                                                  {"bytes_in", s.bytes_in},
                                                  {"bytes_out", s.bytes_out},
                                                  {"bounds_errors", s.bounds_errors},
                                                  {"largest_batch", s.largest_batch},
                                                  {"warmed_rows", s.warmed_rows},
                                                  {"admitted", s.admitted},
                                                  {"not_admitted_lookups", s.default_lookups},
                                                  {"evicted", s.evicted}};
          },
          R"(Counts of a table, or of all: batches, lookups, unique_rows, unique_misses, new_rows,
          rows_in, rows_out, bytes_in, bytes_out, bounds_errors, largest_batch (the most unique rows that a
          batch had of one table), warmed_rows (which came to the cache for no batch), admitted (ids that got
          a row where not all do), not_admitted_lookups, and evicted (ids).)",
          py::arg("table") = py::none())
      .def(
          "pinned",
          [](Engine& e, std::optional<int32_t> table) {
            const WithoutLock nogil;
            return e.pinned(table.value_or(Engine::kAllTables));
          },
          "Slots that batches in flight hold.", py::arg("table") = py::none())
      .def("reset_stats", &Engine::reset_stats, py::call_guard<WithoutLock>())
      .def(
          "memory",
          [](Engine& e, std::optional<int32_t> table) {
            Engine::Memory memory{};
            {
              const WithoutLock nogil;
              memory = e.memory(table.value_or(Engine::kAllTables));
            }
            return std::map<std::string, int64_t>{{"id_map_bytes", memory.index_bytes},
                                                  {"store_bytes", memory.store_bytes},
                                                  {"disk_bytes", memory.disk_bytes},
                                                  {"column_bytes", memory.column_bytes},
                                                  {"rows", memory.rows},
                                                  {"candidates", memory.candidates},
                                                  {"candidate_bytes", memory.candidate_bytes}};
          },
          R"(Sizes of a table, or of all: id_map_bytes, store_bytes (of memory), disk_bytes,
          column_bytes (of what options keep per row, with the logs of what changed and left), rows,
          candidates, candidate_bytes.)",
          py::arg("table") = py::none())
      .def("set_memory_limit", &Engine::set_memory_limit,
           R"(Caps what the host stores may commit, below what the machine and its cgroup have free.)",
           py::arg("bytes"), py::call_guard<WithoutLock>())
      .def(
          "take_bounds_warnings",
          [](Engine& e) {
            std::vector<Engine::BoundsWarning> warnings;
            {
              const WithoutLock nogil;
              warnings = e.take_bounds_warnings();
            }
            return warnings_to_python(std::move(warnings));
          },
          R"((table name, count, an example) of ids that reads found out of range since the last call,
          under "warning".)");
}

}  // namespace rec_sdk

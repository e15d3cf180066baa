// rec_sdk_torch._engine.Tables: whole tables, and reports.
#include <map>

#include "torch_npu_ext/engine/api/bindings.h"

namespace rec_sdk {

void bind_tables(py::module_& m) {
  const py::arg table("table"), ids("ids"), rows("rows"), records("records");
  py::class_<Tables>(
      m, "Tables",
      R"(Rows of whole tables. All plans must be applied and all rows landed, else RuntimeError, unless a call
          says otherwise.)")
      .def("row_count", unlocked(&Tables::row_count), table,
           R"(Ids known (hash table) or num_embeddings (index table). Needs nothing applied or landed.)")
      .def(
          "rows", unlocked(&Tables::rows), table,
          R"(Ids [n] by ascending row, slots [n], -1 = not resident, and the rows [n], which have gaps once ids
          were removed.)")
      .def(
          "read_rows",
          [](Tables& e, int32_t table, Span<int64_t> ids, Span<int64_t> rows, Records records) {
            char* out = records_out(records, e, rows.size());
            const WithoutLock nogil;
            e.read_rows(table, ids, rows, out);
          },
          table, ids, rows, records,
          R"(Fills host records of rows [n] and their ids. Resident rows are stale: overlay those of the
          cache.)")
      .def("insert", unlocked(&Tables::insert), table, ids,
           R"(Rows [n] and slots [n] (-1 = not resident) of the ids; a hash table adds those it does not know.

          CapacityError, MemoryError; IndexError for ids that an index table lacks.)")
      .def("find_rows", unlocked(&Tables::find_rows), table, ids,
           R"(Rows [n], -1 = not known, and slots [n], -1 = not resident. IndexError for ids that an index
          table lacks.)")
      .def("remove", unlocked(&Tables::remove), table, ids, py::arg("candidates") = true,
           R"(Takes ids out of a hash table, or makes rows of an index table initial; how many it knew.

          candidates: what was counted of them before they had a row is forgotten as well. RuntimeError, with
          nothing removed, while batches in flight use one of the rows, or one has a sum of the window;
          IndexError for ids that an index table lacks.)")
      .def("reserve_rows", unlocked(&Tables::reserve_rows), table, rows,
           R"(Takes the memory of rows [n], so that write_rows cannot fail. MemoryError, IndexError.)")
      .def(
          "write_rows",
          [](Tables& e, int32_t table, Span<int64_t> ids, Span<int64_t> rows, Records records) {
            const char* in = records_in(records, e, rows.size());
            const WithoutLock nogil;
            e.write_rows(table, ids, rows, in);
          },
          table, ids, rows, records,
          R"(Stores host records of rows [n] and their ids. Resident rows must be written to the cache as
          well.)")
      .def("clear", unlocked(&Tables::clear), table,
           "Forgets all rows, with their sums. RuntimeError while a batch in flight uses one.")
      .def(
          "initial_records",
          [](Tables& e, int32_t table, Span<int64_t> ids, Records records) {
            char* out = records_out(records, e, ids.size());
            const WithoutLock nogil;
            e.initial_records(table, ids, out);
          },
          table, ids, records,
          "Fills the [n] records that the ids start from. Needs nothing applied or landed.")
      .def("cached_rows", unlocked(&Tables::cached_rows), table,
           R"(Rows in the cache, by slot: ids [n], float32 [n] in how many batches they were used, of which
          those of long ago count less (0 where the policy counts none), uint32 [n] numbers of the batches
          that used them last.)")
      .def("choose_warm", unlocked(&Tables::choose_warm), table, ids,
           R"(Free slots for the first of these ids that have rows outside the cache, hottest first: their
          places among the ids [n], rows [n] and slots [n].

          RuntimeError while batches are in flight; IndexError for ids that an index table lacks.)")
      .def("warm", unlocked(&Tables::warm), table, ids, py::arg("slots"), py::arg("heats"),
           R"(The rows of these ids [n] are in these slots [n] from now on, with heats [n] as cached_rows has
          them: what choose_warm gave, whose records are there.)")
      .def(
          "stats",
          [](Tables& e, std::optional<int32_t> table) {
            Stats stats;
            run_unlocked([&] { stats = e.stats(table.value_or(Tables::kAllTables)); });
            std::map<std::string, int64_t> named = {{"batches", stats.batches},
                                                    {"largest_batch", stats.largest_batch}};
            for_each_sum([&](const char* name, auto member) { named[name] = stats.*member; });
            return named;
          },
          py::arg("table") = py::none(),
          R"(Counts of a table, or of all: batches, lookups, unique_rows, unique_misses, new_rows, rows_in,
          rows_out, bytes_in, bytes_out, bounds_errors, largest_batch (the most unique rows that a batch had
          of one table), warmed_rows (which came to the cache for no batch), admitted (ids that got a row
          where not all do), not_admitted_lookups, and evicted (ids).)")
      .def(
          "pinned",
          [](Tables& e, std::optional<int32_t> table) {
            const WithoutLock nogil;
            return e.pinned(table.value_or(Tables::kAllTables));
          },
          py::arg("table") = py::none(), "Slots that batches in flight hold.")
      .def("reset_stats", unlocked(&Tables::reset_stats))
      .def(
          "memory",
          [](Tables& e, std::optional<int32_t> table) {
            Tables::Memory memory{};
            run_unlocked([&] { memory = e.memory(table.value_or(Tables::kAllTables)); });
            return std::map<std::string, int64_t>{{"id_map_bytes", memory.index_bytes},
                                                  {"store_bytes", memory.store_bytes},
                                                  {"disk_bytes", memory.disk_bytes},
                                                  {"column_bytes", memory.column_bytes},
                                                  {"rows", memory.rows},
                                                  {"candidates", memory.candidates},
                                                  {"candidate_bytes", memory.candidate_bytes}};
          },
          py::arg("table") = py::none(),
          R"(Sizes of a table, or of all: id_map_bytes, store_bytes (of memory), disk_bytes, column_bytes (of
          what options keep per row, with the logs of what changed and left), rows, candidates,
          candidate_bytes.)")
      .def("set_memory_limit", unlocked(&Tables::set_memory_limit), py::arg("bytes"),
           R"(Caps what the host stores may commit, below what the machine and its cgroup have free.)")
      .def("take_bounds_warnings", &Tables::take_bounds_warnings, py::call_guard<WithoutLock>(),
           R"((table name, count, an example) of ids that reads found out of range since the last call, under
          "warning".)");
}

}  // namespace rec_sdk

// rec_sdk_torch._engine.Tables: whole-table access and statistics.
#include <map>

#include "torch_npu_ext/engine/api/bindings.h"

namespace rec_sdk {

void bind_tables(py::module_& m) {
  const py::arg table("table"), ids("ids"), rows("rows"), records("records");
  py::class_<Tables>(m, "Tables",
                     R"(Whole-table access to rows.

          Unless stated otherwise, methods raise RuntimeError while a plan is not applied or a write-back is
          pending.)")
      .def("row_count", unlocked(&Tables::row_count), table,
           R"(Returns the number of ids in a hash table, or num_embeddings of an index table. May be called
          at any time.)")
      .def("rows", unlocked(&Tables::rows), table,
           R"(Returns the ids [n] by ascending row, their slots [n] (-1 if not cached) and their rows [n].
          After removals, the row numbers have gaps.)")
      .def(
          "read_rows",
          [](Tables& e, int32_t table, Span<int64_t> ids, Span<int64_t> rows, Records records) {
            char* out = records_out(records, e, rows.size());
            const WithoutLock nogil;
            e.read_rows(table, ids, rows, out);
          },
          table, ids, rows, records,
          R"(Fills `records` with the host store's records of rows [n], whose ids are `ids`. The host records
          of cached rows are stale: the caller must replace them by the cache's records.)")
      .def("insert", unlocked(&Tables::insert), table, ids,
           R"(Inserts the ids that a hash table does not have; returns the rows [n] and slots [n] (-1 if not
          cached) of all ids [n].

          Raises CapacityError, MemoryError, or IndexError for ids that an index table lacks.)")
      .def("find_rows", unlocked(&Tables::find_rows), table, ids,
           R"(Returns the rows [n] (-1 for an unknown id) and slots [n] (-1 if not cached) of ids [n]. Raises
          IndexError for ids that an index table lacks.)")
      .def("remove", unlocked(&Tables::remove), table, ids, py::arg("candidates") = true,
           R"(Removes ids from a hash table, or resets rows of an index table to initial values; returns the
          number of removed ids.

          candidates: if true, also drops the counts of ids that have no row yet.
          Raises RuntimeError, and removes nothing, if a batch in flight uses one of the rows or one of the
          rows has a sum in the accumulation window; IndexError for ids that an index table lacks.)")
      .def("reserve_rows", unlocked(&Tables::reserve_rows), table, rows,
           R"(Allocates the memory of rows [n] in the host store, so that write_rows cannot fail. Raises
          MemoryError, IndexError.)")
      .def(
          "write_rows",
          [](Tables& e, int32_t table, Span<int64_t> ids, Span<int64_t> rows, Records records) {
            const char* in = records_in(records, e, rows.size());
            const WithoutLock nogil;
            e.write_rows(table, ids, rows, in);
          },
          table, ids, rows, records,
          R"(Stores `records` of rows [n], whose ids are `ids`, in the host store. The caller must also write
          cached rows to the cache.)")
      .def("clear", unlocked(&Tables::clear), table,
           R"(Removes all rows and their sums. Raises RuntimeError while a batch in flight uses a row.)")
      .def(
          "initial_records",
          [](Tables& e, int32_t table, Span<int64_t> ids, Records records) {
            char* out = records_out(records, e, ids.size());
            const WithoutLock nogil;
            e.initial_records(table, ids, out);
          },
          table, ids, records, R"(Fills `records` with the initial records of ids [n]. May be called at any
          time.)")
      .def("cached_rows", unlocked(&Tables::cached_rows), table,
           R"(Returns the rows in the cache, by ascending slot: their ids [n], heats float32 [n] and last uses
          uint32 [n].

          The heat of a row is the number of batches that used it, older batches counting less; it is 0 if the
          policy does not count uses. The last use is the number of the latest batch that used the row.
          Rows of ids that were added after the table's open snapshot are left out. May be called at any time.)")
      .def("choose_warm", unlocked(&Tables::choose_warm), table, ids,
           R"(Chooses free slots for rows outside the cache. The ids must be sorted, hottest first. Returns,
          for each chosen row, its position in `ids`, its row and its slot.

          Raises RuntimeError while batches are in flight; IndexError for ids that an index table lacks.)")
      .def("warm", unlocked(&Tables::warm), table, ids, py::arg("slots"), py::arg("heats"),
           R"(Assigns ids [n] to the slots [n] that choose_warm chose, with heats [n] as in cached_rows. The
          caller must have copied their records to the cache.)")
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
          R"(Returns the counters of a table, or of all tables: batches, lookups, unique_rows,
          unique_misses, new_rows, rows_in, rows_out, bytes_in, bytes_out, bounds_errors, largest_batch (the
          most unique rows of one batch in one table), warmed_rows (rows that `warm` brought into the cache),
          admitted (ids that got a row in a table with an admission rule), not_admitted_lookups, and evicted
          (ids).)")
      .def(
          "pinned",
          [](Tables& e, std::optional<int32_t> table) {
            const WithoutLock nogil;
            return e.pinned(table.value_or(Tables::kAllTables));
          },
          py::arg("table") = py::none(), R"(Returns the number of slots that batches in flight pin.)")
      .def("reset_stats", unlocked(&Tables::reset_stats), "Sets all counters to 0.")
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
          R"(Returns the sizes of a table, or their sums over all tables: id_map_bytes, store_bytes (in
          memory), disk_bytes, column_bytes (per-row columns and the logs of changes and removals), rows,
          candidates, candidate_bytes.)")
      .def("set_memory_limit", unlocked(&Tables::set_memory_limit), py::arg("bytes"),
           R"(Limits the memory that the host stores may commit, in addition to the free memory of the
          machine and its cgroup.)")
      .def("take_bounds_warnings", &Tables::take_bounds_warnings, py::call_guard<WithoutLock>(),
           R"(Returns and clears (table name, count, an example) of ids out of range in reads since the last
          call, for tables with bounds_check "warning".)");
}

}  // namespace rec_sdk

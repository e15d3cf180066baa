// rec_sdk_torch._engine.Lifecycle: admission and eviction of ids.
#include <map>

#include "torch_npu_ext/engine/api/bindings_columns.h"

namespace rec_sdk {

static auto to_python(EvictableIds evictable) {
  return std::make_pair(to_python(std::move(evictable.ids)), to_python(std::move(evictable.reasons)));
}

namespace {

// Copies the columns in `arrays` into `values`. Raises KeyError for a column that the table does not keep.
template <class Values>
void from_arrays(const Columns& arrays, ColumnSet kept, std::vector<Values>* values) {
  size_t known = 0;
  for_each_field<Values>([&](auto field) {
    if (!arrays.contains(field.name)) return;
    if (!kept.has(field.column))
      throw py::key_error(std::string("the table does not keep the column ") + field.name);
    ++known;
    using T = std::decay_t<decltype((*values)[0].*(field.member))>;
    const auto array =
        py::array_t<Item<T>, py::array::c_style | py::array::forcecast>::ensure(arrays[field.name]);
    if (!array || array.ndim() != 1 || static_cast<size_t>(array.size()) != values->size()) {
      throw py::value_error(std::string(field.name) + " must be [" + std::to_string(values->size()) + "]");
    }
    for (size_t i = 0; i < values->size(); ++i) {
      const Item<T> value = array.data()[i];
      if constexpr (std::is_same_v<T, uint32_t>) {
        if (value < 0 || value > UINT32_MAX) {
          throw py::value_error(std::string(field.name) + " must be from 0 to 2^32 - 1, got " +
                                std::to_string(value));
        }
      }
      (*values)[i].*(field.member) = static_cast<T>(value);
    }
  });
  if (known < arrays.size()) throw py::key_error("columns: unknown column name");
}

ColumnSet candidate_columns(const Rules& rules) {
  ColumnSet kept = {Column::kCount, Column::kLastUse};
  if (rules.needs_clicks()) kept.add(Column::kClicks);
  if (rules.needs_timestamps()) kept.add(Column::kTimestamp);
  return kept;
}

}  // namespace

void bind_rules(py::module_& m) {
  using Number = py::typing::Union<py::int_, py::float_>;
  py::class_<Rules>(
      m, "Rules",
      R"(The rules of admission and eviction of a hash table's ids; see docs/admission_eviction.md.)")
      .def(py::init([](const std::vector<std::pair<std::string, std::map<std::string, Number>>>& rules) {
             std::vector<std::pair<std::string, RuleNumbers::Values>> parsed;
             for (const auto& [rule, numbers] : rules) {
               RuleNumbers::Values& values = parsed.emplace_back(rule, RuleNumbers::Values()).second;
               for (const auto& [name, number] : numbers) {
                 if (PyIndex_Check(number.ptr()) != 0) {
                   values[name] = number.cast<int64_t>();
                 } else {
                   values[name] = number.cast<double>();
                 }
               }
             }
             return Rules(parsed);
           }),
           R"(Creates the rules from (name, parameters) pairs; torch_npu_ext/engine/rules has one file per
          rule.

          Raises ValueError, which names the unknown rule or the invalid parameter.)",
           py::kw_only(), py::arg("rules"));
  m.def("rules", &rule_names, R"(Returns the names of all rules.)");
}

void bind_lifecycle(py::module_& m) {
  const py::arg table("table"), ids("ids"), rows("rows"), columns("columns"), intervals("intervals");
  py::class_<Lifecycle>(m, "Lifecycle",
                        R"(Admission and eviction of ids, and the statistics that a table keeps for them.

          `evictable_ids`, `evict`, `candidates`, the sketch methods and methods that write raise
          RuntimeError while a plan is not applied or a write-back is pending.)")
      .def("freeze", unlocked(&Lifecycle::freeze), py::arg("frozen"),
           R"(Sets for each table whether it is frozen.

          Batches planned afterwards do not train a frozen table. Its clock stands still, and end_step evicts
          none of its ids. Raises RuntimeError while a plan is not applied or a write-back is pending.)")
      .def("evicts", unlocked(&Lifecycle::evicts), intervals,
           R"(Returns whether end_step may now evict ids or halve the counts of a sketch. The effects of plans
          that are not started are ignored.)")
      .def("end_step", unlocked(&Lifecycle::end_step), intervals,
           R"(Ends a training step and returns the number of evicted ids.

          The rules of table t evict ids every intervals[t] steps (0: never), and whenever the table exceeds
          its bound. Raises RuntimeError if evicts() is true while a plan is not applied or a write-back is
          pending.)")
      .def("evict", unlocked(&Lifecycle::evict), table,
           R"(Evicts ids by the table's rules now and returns their number. Rows of batches in flight and rows
          with sums in the accumulation window are kept.)")
      .def(
          "evictable_ids",
          [](Lifecycle& e, int32_t table, const std::optional<std::vector<int64_t>>& intervals) {
            return run_unlocked([&] {
              return intervals ? e.evictable_ids(table, *intervals) : e.evictable_ids(table, true);
            });
          },
          table, py::arg("intervals") = py::none(),
          R"(Returns the ids [n], ascending, that evict would evict now, and for each id the rule that chose
          it.

          intervals: if set, returns the ids that end_step would evict with these intervals. The rules are
          uint8 [n]: 1 age, 2 idleness, 3 score, 4 bound, 6 norm. Raises RuntimeError while a plan is not
          applied or a write-back is pending.)")
      .def("measured_tables", &Lifecycle::measured_tables, intervals, py::call_guard<WithoutLock>(),
           R"(Returns the tables for which the next end_step evicts rows by the norm of their weights.
          mark_small must be called for these tables first.)")
      .def("mark_small", unlocked(&Lifecycle::mark_small), table, rows,
           R"(Marks the rows [n] whose weights have a small norm; at the next eviction, the norm rule evicts
          exactly these rows. Raises RuntimeError while a plan is not applied or a write-back is pending.)")
      .def("take_large_evictions", &Lifecycle::take_large_evictions, py::call_guard<WithoutLock>(),
           R"(Returns and clears the latest large eviction of each table: (table name, evicted rows, rows
          before, latest timestamp).

          An eviction is large if rules that may evict any number of ids, such as age, took more than half
          of the table. Only the rows that these rules evicted are counted.)")
      .def(
          "read_columns",
          [](Lifecycle& e, int32_t table, Span<int64_t> rows) {
            const ColumnSet kept = call_unlocked([&] { return e.columns(table); });
            return to_arrays(call_unlocked([&] { return e.read_columns(table, rows); }), kept);
          },
          table, rows,
          R"(Returns the columns of rows [n] that the table keeps, out of count, last_use, clicks, timestamp
          (int64 [n]) and score (float64 [n]).)")
      .def(
          "write_columns",
          [](Lifecycle& e, int32_t table, Span<int64_t> rows, const Columns& columns) {
            const ColumnSet kept = call_unlocked([&] { return e.columns(table); });
            std::vector<RowColumnValues> values = call_unlocked([&] { return e.read_columns(table, rows); });
            from_arrays(columns, kept, &values);
            call_unlocked([&] { e.write_columns(table, rows, values); });
          },
          table, rows, columns,
          R"(Writes columns of rows [n]. Raises KeyError for a column that the table does not keep,
          ValueError for a wrong length or range.)")
      .def(
          "candidates",
          [](Lifecycle& e, int32_t table) {
            std::vector<int64_t> ids;
            std::vector<Candidates::Values> values;
            for (const Lifecycle::Candidate& candidate : call_unlocked([&] { return e.candidates(table); })) {
              ids.push_back(candidate.id);
              values.push_back(candidate.values);
            }
            return std::make_pair(
                to_python(std::move(ids)),
                to_arrays(values, call_unlocked([&] { return candidate_columns(e.rules(table)); })));
          },
          table, R"(Returns the candidates of a table and their columns [n]. Candidates are the ids [n],
          ascending, that were looked up but have no row.)")
      .def(
          "set_candidates",
          [](Lifecycle& e, int32_t table, Span<int64_t> ids, const Columns& columns) {
            const TableClock now = call_unlocked([&] { return e.clock(table); });
            const Candidates::Values first = {0, static_cast<uint32_t>(now.batches), 0, now.timestamp};
            std::vector<Candidates::Values> values(static_cast<size_t>(ids.size()), first);
            from_arrays(columns, call_unlocked([&] { return candidate_columns(e.rules(table)); }), &values);
            std::vector<Lifecycle::Candidate> candidates;
            for (size_t i = 0; i < values.size(); ++i) candidates.push_back({ids[i], values[i]});
            call_unlocked([&] { e.set_candidates(table, candidates); });
          },
          table, ids, columns,
          R"(Replaces all candidates of a table; a sketch is rebuilt from their counts.

          A missing last_use or timestamp column is set to the present clock. Raises KeyError and ValueError
          like write_columns, and ValueError if the table has no admission rule that counts lookups.)")
      .def("sketch", unlocked(&Lifecycle::sketch), table,
           R"(Returns the state of the table's sketch for a save, uint8 [n]; n is 0 for a table without a
          sketch.)")
      .def(
          "set_sketch",
          [](Lifecycle& e, int32_t table, const std::vector<Bytes>& states) {
            std::vector<std::vector<uint8_t>> copies;
            for (const Bytes& state : states) copies.emplace_back(state.data(), state.data() + state.size());
            const WithoutLock nogil;
            e.set_sketch(table, copies);
          },
          table, py::arg("states"),
          R"(Restores the sketch from one or several saved states. Each id must have been counted by at most
          one of the saved sketches.

          The shapes of the saved sketches may differ. A restored count may be higher than the saved count,
          but never lower.
          Raises ValueError for an invalid state or a table without a sketch.)")
      .def(
          "clock",
          [](Lifecycle& e, int32_t table) {
            const TableClock clock = call_unlocked([&] { return e.clock(table); });
            return std::make_tuple(clock.batches, clock.steps, clock.timestamp);
          },
          table, R"(Returns the clock of a table: (batches planned, steps ended, latest timestamp).)")
      .def(
          "set_clock",
          [](Lifecycle& e, int32_t table, uint64_t batches, uint64_t steps, int64_t timestamp) {
            call_unlocked([&] { e.set_clock(table, {batches, steps, timestamp}); });
          },
          table, py::arg("batches"), py::arg("steps"), py::arg("timestamp"),
          "Sets the clock of a table: batches planned, steps ended, latest timestamp.");
}

}  // namespace rec_sdk

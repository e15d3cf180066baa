// rec_sdk_torch._engine.Lifecycle: admission and eviction of ids.
#include <map>

#include "torch_npu_ext/engine/api/bindings_columns.h"

namespace rec_sdk {

static auto to_python(EvictableIds leaving) {
  return std::make_pair(to_python(std::move(leaving.ids)), to_python(std::move(leaving.reasons)));
}

namespace {

// Sets those of `given`; columns that are not kept are refused.
template <class Values>
void from_arrays(const Columns& given, ColumnSet kept, std::vector<Values>* values) {
  size_t known = 0;
  for_each_field<Values>([&](auto field) {
    if (!given.contains(field.name)) return;
    if (!kept.has(field.column)) throw py::key_error(std::string("the table keeps no ") + field.name);
    ++known;
    using T = std::decay_t<decltype((*values)[0].*(field.member))>;
    const auto array =
        py::array_t<Item<T>, py::array::c_style | py::array::forcecast>::ensure(given[field.name]);
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
  if (known < given.size()) throw py::key_error("columns: a name that is none of a table's");
}

ColumnSet of_candidates(const Rules& rules) {
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
      "The rules by which an id of a hash table gets a row and loses it; docs/admission_eviction.md.")
      .def(py::init([](const std::vector<std::pair<std::string, std::map<std::string, Number>>>& rules) {
             std::vector<std::pair<std::string, RuleNumbers::Values>> given;
             for (const auto& [rule, numbers] : rules) {
               RuleNumbers::Values& values = given.emplace_back(rule, RuleNumbers::Values()).second;
               for (const auto& [name, number] : numbers) {
                 if (PyIndex_Check(number.ptr()) != 0) {
                   values[name] = number.cast<int64_t>();
                 } else {
                   values[name] = number.cast<double>();
                 }
               }
             }
             return Rules(given);
           }),
           R"(rules: of each rule its name and its numbers, by name: torch_npu_ext/engine/rules has a file of
          each. ValueError names a rule or a number that is not known, or that cannot be.)",
           py::kw_only(), py::arg("rules"));
  m.def("rules", &rule_names, "Names of the rules of a table.");
}

void bind_lifecycle(py::module_& m) {
  const py::arg table("table"), ids("ids"), rows("rows"), columns("columns"), intervals("intervals");
  py::class_<Lifecycle>(
      m, "Lifecycle",
      R"(Admission and eviction of ids, and what a table counts of them. `evictable_ids`, `evict`, `candidates`,
          sketches and calls that write need all plans applied and all rows landed, else RuntimeError.)")
      .def("freeze", unlocked(&Lifecycle::freeze), py::arg("frozen"),
           R"(Says of each table whether it is frozen: the batches that are planned from now on do not train
          it, its clock stands still, and end_step takes none of its ids out. RuntimeError if not all plans
          are applied and all rows landed.)")
      .def("evicts", unlocked(&Lifecycle::evicts), intervals,
           R"(Whether end_step would look for ids that leave. Plans that have not begun do not count.)")
      .def("end_step", unlocked(&Lifecycle::end_step), intervals,
           R"(A training step has ended; how many ids left: every intervals[t] steps (0: never) by the table's
          rules, and those beyond its bound. RuntimeError if evicts() and not all plans are applied and all
          rows landed.)")
      .def("evict", unlocked(&Lifecycle::evict), table,
           "Takes out ids by the table's rules now. Rows in flight or in the window stay.")
      .def(
          "evictable_ids",
          [](Lifecycle& e, int32_t table, const std::optional<std::vector<int64_t>>& intervals) {
            return run_unlocked([&] {
              return intervals ? e.evictable_ids(table, *intervals) : e.evictable_ids(table, true);
            });
          },
          table, py::arg("intervals") = py::none(),
          R"(Ids [n] that evict would take out now, or end_step with these intervals, ascending, and by which
          rule: uint8 [n], 1 age, 2 idleness, 3 score, 4 bound, 6 norm. All must be settled.)")
      .def("measured_tables", &Lifecycle::measured_tables, intervals, py::call_guard<WithoutLock>(),
           R"(Tables of which end_step takes out the rows that mark_small has named, by the norms of their
          weights.)")
      .def("mark_small", unlocked(&Lifecycle::mark_small), table, rows,
           R"(Rows [n] leave with the next eviction of the table at an interval, or when asked, and no others
          by their weights. All must be settled.)")
      .def("take_large_evictions", &Lifecycle::take_large_evictions, py::call_guard<WithoutLock>(),
           R"((table name, rows that left, of so many, latest timestamp) of the latest eviction of each table
          since the last call that took more than half of it, and more than its share.)")
      .def(
          "read_columns",
          [](Lifecycle& e, int32_t table, Span<int64_t> rows) {
            const ColumnSet kept = call_unlocked([&] { return e.columns(table); });
            return to_arrays(call_unlocked([&] { return e.read_columns(table, rows); }), kept);
          },
          table, rows,
          R"(Columns of rows [n], those that the table keeps: count, last_use, clicks, timestamp (int64 [n]),
          score (float64 [n]).)")
      .def(
          "write_columns",
          [](Lifecycle& e, int32_t table, Span<int64_t> rows, const Columns& columns) {
            const ColumnSet kept = call_unlocked([&] { return e.columns(table); });
            std::vector<RowColumnValues> values = call_unlocked([&] { return e.read_columns(table, rows); });
            from_arrays(columns, kept, &values);
            call_unlocked([&] { e.write_columns(table, rows, values); });
          },
          table, rows, columns,
          R"(Sets these. KeyError for a column that is not kept, ValueError for a wrong length or range.)")
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
                to_arrays(values, call_unlocked([&] { return of_candidates(e.rules(table)); })));
          },
          table, "Ids [n], ascending, that were seen and have no row, and columns [n] as of rows.")
      .def(
          "set_candidates",
          [](Lifecycle& e, int32_t table, Span<int64_t> ids, const Columns& columns) {
            const TableClock now = call_unlocked([&] { return e.clock(table); });
            const Candidates::Values first = {0, static_cast<uint32_t>(now.batches), 0, now.timestamp};
            std::vector<Candidates::Values> values(static_cast<size_t>(ids.size()), first);
            from_arrays(columns, call_unlocked([&] { return of_candidates(e.rules(table)); }), &values);
            std::vector<Lifecycle::Candidate> candidates;
            for (size_t i = 0; i < values.size(); ++i) candidates.push_back({ids[i], values[i]});
            call_unlocked([&] { e.set_candidates(table, candidates); });
          },
          table, ids, columns,
          R"(These and no others; a sketch begins anew with their counts. A last_use or a timestamp that is
          not given is that of the clock now. KeyError and ValueError as write_columns; ValueError for a table
          without admission.)")
      .def("sketch", unlocked(&Lifecycle::sketch), table,
           "The state of the sketch of a table, uint8 [n]; n is 0 without one.")
      .def(
          "set_sketch",
          [](Lifecycle& e, int32_t table, const std::vector<Bytes>& states) {
            std::vector<std::vector<uint8_t>> copies;
            for (const Bytes& state : states) copies.emplace_back(state.data(), state.data() + state.size());
            const WithoutLock nogil;
            e.set_sketch(table, copies);
          },
          table, py::arg("states"),
          R"(The sketch counts at least what each of the sketches did that these are the states of, which may
          have had other shapes, and which counted each id in one of them. ValueError for what is no state, or
          a table without a sketch.)")
      .def(
          "clock",
          [](Lifecycle& e, int32_t table) {
            const TableClock clock = call_unlocked([&] { return e.clock(table); });
            return std::make_tuple(clock.batches, clock.steps, clock.timestamp);
          },
          table, "(batches planned, steps ended, latest timestamp).")
      .def(
          "set_clock",
          [](Lifecycle& e, int32_t table, uint64_t batches, uint64_t steps, int64_t timestamp) {
            call_unlocked([&] { e.set_clock(table, {batches, steps, timestamp}); });
          },
          table, py::arg("batches"), py::arg("steps"), py::arg("timestamp"));
}

}  // namespace rec_sdk

// rec_sdk_torch._engine: admission and eviction of ids, and snapshots.
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_npu_ext/engine/api/bindings.h"

namespace rec_sdk {
namespace {

template <class Values, class T>
struct Field {
  const char* name;
  Column column;
  T Values::* member;
};

// visit(field) of what is kept of rows and of candidates; both have the same names.
template <class Values, class Visit>
void for_each_field(const Visit& visit) {
  visit(Field<Values, uint32_t>{"count", Column::kCount, &Values::count});
  visit(Field<Values, uint32_t>{"last_use", Column::kLastUse, &Values::last_use});
  visit(Field<Values, uint32_t>{"clicks", Column::kClicks, &Values::clicks});
  visit(Field<Values, int64_t>{"timestamp", Column::kTimestamp, &Values::timestamp});
  if constexpr (std::is_same_v<Values, RowColumnValues>) {
    visit(Field<Values, double>{"score", Column::kScore, &Values::score});
  }
}

// Integers are int64 for Python: torch has few operators of uint32.
template <class T>
using Item = std::conditional_t<std::is_integral_v<T>, int64_t, double>;

template <class Values>
Columns to_arrays(const std::vector<Values>& values, ColumnSet kept) {
  Columns result;
  for_each_field<Values>([&](auto field) {
    if (!kept.has(field.column)) return;
    using T = Item<std::decay_t<decltype(values[0].*(field.member))>>;
    std::vector<T> array;
    array.reserve(values.size());
    for (const Values& one : values) array.push_back(static_cast<T>(one.*(field.member)));
    result[field.name] = to_numpy(std::move(array));
  });
  return result;
}

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

// Ids, slots, records and columns.
using Taken = std::tuple<py::array_t<int64_t>, py::array_t<int32_t>, py::array_t<uint8_t>, Columns>;

Taken to_python(Engine& engine, Engine::TakenRows taken, ColumnSet kept) {
  const py::ssize_t bytes = engine.layout().bytes,
                    rows = static_cast<py::ssize_t>(taken.records.size()) / bytes;
  auto* const owner = new UnsetBytes(std::move(taken.records));
  const py::capsule base(owner, [](void* data) { delete static_cast<UnsetBytes*>(data); });
  const py::array_t<uint8_t> records({rows, bytes}, reinterpret_cast<const uint8_t*>(owner->data()), base);
  return {to_numpy(std::move(taken.ids)), to_numpy(std::move(taken.slots)), records,
          to_arrays(taken.columns, kept)};
}

// take(&rows), which fills them, without the interpreter's lock.
template <class Take>
Taken taken_rows(Engine& engine, int32_t table, const Take& take) {
  Engine::TakenRows taken;
  ColumnSet kept;
  {
    const WithoutLock nogil;
    kept = engine.columns(table);
    take(&taken);
  }
  return to_python(engine, std::move(taken), kept);
}

}  // namespace

void bind_snapshots(EngineClass& engine) {
  engine
      .def(
          "open_snapshot",
          [](Engine& e, int32_t table, const std::optional<Dense>& ids) {
            const WithoutLock nogil;
            return ids ? e.open_snapshot(table, ids->data(), ids->size())
                       : e.open_snapshot(table, nullptr, 0);
          },
          R"(Rows of `ids` [n], or all, are pending as they are now; how many. All must be settled.

          A pending row is taken before it is changed; where plans count it, the engine keeps its old
          columns. RuntimeError for a table that has one.)",
          py::arg("table"), py::arg("ids") = py::none())
      .def("open_snapshot_since", &Engine::open_snapshot_since,
           R"(The same of the rows that changed after version `since`: those of changed_ids, which
          take_next takes, by ascending row.

          ValueError for a table without the column "version".)",
           py::arg("table"), py::arg("since"), py::call_guard<WithoutLock>())
      .def("close_snapshot", &Engine::close_snapshot, "Nothing is pending; also where there is no snapshot.",
           py::arg("table"), py::call_guard<WithoutLock>())
      .def("snapshot_pending", &Engine::snapshot_pending,
           R"(Rows not taken yet. RuntimeError without a snapshot, here and in the calls that take.)",
           py::arg("table"), py::call_guard<WithoutLock>())
      .def(
          "take_ids",
          [](Engine& e, int32_t table, const Dense& ids) {
            return taken_rows(e, table, [&](Engine::TakenRows* taken) {
              e.take_ids(table, ids.data(), ids.size(), taken);
            });
          },
          R"(Takes those of `ids` [n] that are pending, and that no plan moves: ids, slots or -1,
          records, columns.

          Records are uint8 [m, record_bytes], unset for rows with a slot, and [0, record_bytes] where all
          have one: the caller reads the cache before others do anything with it.)",
          py::arg("table"), py::arg("ids"))
      .def(
          "take_slots",
          [](Engine& e, int32_t table, const Slots& slots) {
            return taken_rows(e, table, [&](Engine::TakenRows* taken) {
              e.take_slots(table, slots.data(), slots.size(), taken);
            });
          },
          R"(The same of rows in these slots [n] of the group, which plans in flight hold; those of
          other tables stay.)",
          py::arg("table"), py::arg("slots"))
      .def(
          "take_next",
          [](Engine& e, int32_t table, int64_t begin, int64_t least) {
            int64_t next = -1;
            Taken taken = taken_rows(
                e, table, [&](Engine::TakenRows* rows) { next = e.take_next(table, begin, least, rows); });
            return std::make_pair(std::move(taken), next);
          },
          R"(The same from a place on, 0 at first, at least so many rows; and the place to go on from,
          or -1.

          To be called from 0 on again until no row is pending: those that moved meanwhile may be left.)",
          py::arg("table"), py::arg("begin"), py::arg("least"))
      .def(
          "leaving_ids",
          [](Engine& e, int32_t table, const std::optional<std::vector<int64_t>>& intervals) {
            LeavingIds leaving;
            {
              const WithoutLock nogil;
              leaving = intervals ? e.leaving_ids(table, *intervals) : e.leaving_ids(table, true);
            }
            return std::make_pair(to_numpy(std::move(leaving.ids)), to_numpy(std::move(leaving.reasons)));
          },
          R"(Ids [n] that evict would take out now, or end_step with these intervals, ascending, and by
          which rule: uint8 [n], 1 age, 2 idleness, 3 score, 4 bound, 6 norm. All must be settled.)",
          py::arg("table"), py::arg("intervals") = py::none());
}

void bind_rules(py::module_& m) {
  using Number = py::typing::Union<py::int_, py::float_>;
  py::class_<Rules>(m, "Life",
                    "The rules by which an id of a hash table gets a row and loses it; docs/life.md.")
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

void bind_life(EngineClass& engine) {
  engine
      .def("freeze", &Engine::freeze,
           R"(Says of each table whether it is frozen: the batches that are planned from now on do not train
          it, its clock stands still, and end_step takes none of its ids out. RuntimeError if not all plans
          are applied and all rows landed.)",
           py::arg("frozen"), py::call_guard<WithoutLock>())
      .def("evicts", &Engine::evicts,
           R"(Whether end_step would look for ids that leave. Plans that have not begun do not count.)",
           py::arg("intervals"), py::call_guard<WithoutLock>())
      .def("end_step", &Engine::end_step,
           R"(A training step has ended; how many ids left: every intervals[t] steps (0: never) by the
          table's rules, and those beyond its bound. RuntimeError if evicts() and not all plans are applied
          and all rows landed.)",
           py::arg("intervals"), py::call_guard<WithoutLock>())
      .def("evict", &Engine::evict,
           "Takes out ids by the table's rules now. Rows in flight or in the window stay.", py::arg("table"),
           py::call_guard<WithoutLock>())
      .def("measured_tables", &Engine::measured_tables,
           R"(Tables of which end_step takes out the rows that mark_small has named, by the norms of their
          weights.)",
           py::arg("intervals"), py::call_guard<WithoutLock>())
      .def(
          "mark_small",
          [](Engine& e, int32_t table, const Dense& rows) {
            const WithoutLock nogil;
            e.mark_small(table, rows.data(), rows.size());
          },
          R"(Rows [n] leave with the next eviction of the table at an interval, or when asked, and no others
          by their weights. All must be settled.)",
          py::arg("table"), py::arg("rows"))
      .def(
          "take_large_evictions",
          [](Engine& e) {
            std::vector<std::tuple<std::string, int64_t, int64_t, int64_t>> found;
            for (Engine::LargeEviction& each : e.take_large_evictions()) {
              found.emplace_back(std::move(each.table), each.evicted, each.rows, each.timestamp);
            }
            return found;
          },
          R"((table name, rows that left, of so many, latest timestamp) of the latest eviction of each
          table since the last call that took more than half of it, and more than its share.)")
      .def(
          "read_columns",
          [](Engine& e, int32_t table, const Dense& rows) {
            std::vector<RowColumnValues> values(static_cast<size_t>(rows.size()));
            const ColumnSet kept = e.columns(table);
            e.read_columns(table, rows.data(), rows.size(), values.data());
            return to_arrays(values, kept);
          },
          R"(Columns of rows [n], those that the table keeps: count, last_use, clicks, timestamp (int64
          [n]), score (float64 [n]).)",
          py::arg("table"), py::arg("rows"))
      .def(
          "write_columns",
          [](Engine& e, int32_t table, const Dense& rows, const Columns& columns) {
            std::vector<RowColumnValues> values(static_cast<size_t>(rows.size()));
            e.read_columns(table, rows.data(), rows.size(), values.data());
            from_arrays(columns, e.columns(table), &values);
            e.write_columns(table, rows.data(), rows.size(), values.data());
          },
          R"(Sets these. KeyError for a column that is not kept, ValueError for a wrong length or
          range.)",
          py::arg("table"), py::arg("rows"), py::arg("columns"))
      .def(
          "candidates",
          [](Engine& e, int32_t table) {
            std::vector<int64_t> ids;
            std::vector<Candidates::Values> values;
            for (const Engine::Candidate& candidate : e.candidates(table)) {
              ids.push_back(candidate.id);
              values.push_back(candidate.values);
            }
            return std::make_pair(to_numpy(std::move(ids)), to_arrays(values, of_candidates(e.rules(table))));
          },
          "Ids [n], ascending, that were seen and have no row, and columns [n] as of rows.", py::arg("table"))
      .def(
          "set_candidates",
          [](Engine& e, int32_t table, const Dense& ids, const Columns& columns) {
            const LifeClock now = e.clock(table);
            const Candidates::Values first = {0, static_cast<uint32_t>(now.batches), 0, now.timestamp};
            std::vector<Candidates::Values> values(static_cast<size_t>(ids.size()), first);
            from_arrays(columns, of_candidates(e.rules(table)), &values);
            std::vector<Engine::Candidate> candidates;
            for (size_t i = 0; i < values.size(); ++i) candidates.push_back({ids.data()[i], values[i]});
            e.set_candidates(table, candidates);
          },
          R"(These and no others; a sketch begins anew with their counts. A last_use or a timestamp that is not given is that of the
          clock now. KeyError and ValueError as write_columns; ValueError for a table without admission.)",
          py::arg("table"), py::arg("ids"), py::arg("columns"))
      .def(
          "sketch",
          [](Engine& e, int32_t table) {
            std::vector<uint8_t> state;
            {
              const WithoutLock nogil;
              state = e.sketch(table);
            }
            return to_numpy(std::move(state));
          },
          "The state of the sketch of a table, uint8 [n]; n is 0 without one.", py::arg("table"))
      .def(
          "set_sketch",
          [](Engine& e, int32_t table, const std::vector<Bytes>& states) {
            std::vector<std::vector<uint8_t>> copies;
            for (const Bytes& state : states) copies.emplace_back(state.data(), state.data() + state.size());
            const WithoutLock nogil;
            e.set_sketch(table, copies);
          },
          R"(The sketch counts at least what each of the sketches did that these are the states of, which
          may have had other shapes, and which counted each id in one of them. ValueError for what is no
          state, or a table without a sketch.)",
          py::arg("table"), py::arg("states"))
      .def(
          "clock",
          [](Engine& e, int32_t table) {
            const LifeClock clock = e.clock(table);
            return std::make_tuple(clock.batches, clock.steps, clock.timestamp);
          },
          "(batches planned, steps ended, latest timestamp).", py::arg("table"))
      .def(
          "set_clock",
          [](Engine& e, int32_t table, uint64_t batches, uint64_t steps, int64_t timestamp) {
            e.set_clock(table, {batches, steps, timestamp});
          },
          py::arg("table"), py::arg("batches"), py::arg("steps"), py::arg("timestamp"));
}

}  // namespace rec_sdk

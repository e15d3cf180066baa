// rec_sdk_torch._engine: deduplication of the batches of sharded collections.
#include <algorithm>

#include "torch_npu_ext/engine/api/bindings.h"
#include "torch_npu_ext/engine/plan/unique.h"

namespace rec_sdk {
namespace {

// Returns a NumPy view of memory that `owner` owns; the view keeps `owner` alive.
template <class T>
py::array_t<T> view_of(const T* data, std::vector<py::ssize_t> shape, const py::object& owner) {
  return py::array_t<T>(std::move(shape), data, owner);
}

std::pair<py::array_t<int32_t>, Places> arena_with_fields(const WordArena& arena,
                                                          const std::vector<WordArena::Field>& fields,
                                                          const py::object& owner) {
  return {view_of(arena.words(), {static_cast<py::ssize_t>(arena.size())}, owner), to_places(fields)};
}

std::shared_ptr<Deduplicator> make_deduplicator(const std::vector<int64_t>& num_embeddings,
                                                const std::vector<std::pair<int32_t, int64_t>>& homes,
                                                const std::vector<int32_t>& groups,
                                                const std::vector<int32_t>& feature_tables,
                                                const std::vector<int64_t>& feature_columns,
                                                const std::vector<bool>& feature_means, int64_t world_size,
                                                const std::optional<std::vector<int32_t>>& signals) {
  if (homes.size() != num_embeddings.size() || groups.size() != num_embeddings.size()) {
    throw py::value_error("homes and groups must have one entry per table, " +
                          std::to_string(num_embeddings.size()));
  }
  if (signals && signals->size() != num_embeddings.size()) {
    throw py::value_error("signals must have one entry per table, " + std::to_string(num_embeddings.size()));
  }
  std::vector<SharedTable> tables;
  int32_t count = 0;
  for (size_t t = 0; t < homes.size(); ++t) {
    const int32_t kinds = signals ? (*signals)[t] : 0;
    tables.push_back({num_embeddings[t],
                      {homes[t].first, homes[t].second},
                      groups[t],
                      {(kinds & 1) != 0, (kinds & 2) != 0, (kinds & 4) != 0}});
    count = std::max(count, groups[t] + 1);
  }
  return std::make_shared<Deduplicator>(std::make_shared<SharedTables>(
      std::move(tables), make_features(feature_tables, feature_columns, feature_means), count, world_size,
      !feature_columns.empty()));
}

// Returns the data of an optional array with one entry per lookup. Throws if a table requires the array and
// the batch has none.
template <class Array>
auto required_values(bool required, const std::optional<Array>& array, const char* name,
                     const BatchArguments& batch) {
  if (required && !array)
    throw py::value_error(std::string("a table requires ") + name + ", and the batch has none");
  return per_lookup(array, name, batch);
}

template <class T>
std::optional<py::array_t<T>> array_or_none(const std::vector<T>& values, bool present) {
  if (!present) return std::nullopt;
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

auto received_signals(const Deduplicator& self, const Dense& counts, const Dense& ids, const Slots& signals) {
  const SharedTables& shared = self.shared();
  const int64_t tables = static_cast<int64_t>(shared.tables.size());
  if (counts.ndim() != 2 || counts.shape(0) != shared.ranks || counts.shape(1) != tables) {
    throw py::value_error("counts must have shape [" + std::to_string(shared.ranks) + ", " +
                          std::to_string(tables) + "]");
  }
  ReceivedSignals read;
  {
    const WithoutLock nogil;
    read = read_signals(shared, counts.data(), ids.data(), ids.size(), signals.data(), signals.size());
  }
  const SignalKinds any = shared.any_signals();
  return std::make_tuple(array_or_none(read.shows, any.shows), array_or_none(read.clicks, any.clicks),
                         array_or_none(read.timestamps, any.timestamp));
}

const UniqueGroup& group_of(const UniqueBatch& batch, int64_t group) {
  return batch.groups.at(static_cast<size_t>(group));  // throws std::out_of_range
}

py::array_t<int64_t> owner_ranks_of_ids(const Dense& ids, const std::pair<int32_t, int64_t>& home,
                                        int64_t world_size) {
  const OwnerRule rule{home.first, home.second};
  const std::string error = owner_rule_error(rule, world_size);
  if (!error.empty()) throw py::value_error(error);
  if (ids.ndim() != 1) throw py::value_error("ids must have one dimension");
  py::array_t<int64_t> result(ids.size());
  const int64_t* const input = ids.data();
  int64_t* const output = result.mutable_data();
  const WithoutLock nogil;
  owner_ranks(rule, world_size, input, ids.size(), output);
  return result;
}

}  // namespace

void bind_unique(py::module_& m) {
  m.def("owner_ranks", &owner_ranks_of_ids, py::arg("ids"), py::arg("home"), py::arg("world_size"),
        R"(Returns the owner rank of each of ids [n], out of world_size ranks.

          home: the ownership rule of the table: (rank, 0) if one rank owns all ids; (-1, 0) for id mod
          world_size, by floor; (-2, 0) for a hash of the id; (-3, block) for id / block, or id mod world_size
          for ids outside of the ranks' blocks. Raises ValueError for an invalid rule.)");
  const auto table = [](auto member) {
    return [member](const py::object& self) {
      const auto& batch = self.cast<const UniqueBatch&>();
      return view_of((batch.*member).data(),
                     {static_cast<py::ssize_t>(batch.shared->ranks),
                      static_cast<py::ssize_t>(batch.shared->tables.size())},
                     self);
    };
  };
  const auto list = [](auto member) {
    return [member](const py::object& self) {
      const auto& values = self.cast<const UniqueBatch&>().*member;
      return view_of(values.data(), {static_cast<py::ssize_t>(values.size())}, self);
    };
  };
  py::class_<UniqueBatch>(
      m, "UniqueBatch",
      R"(The batch of one rank, deduplicated per table and grouped by owner rank. There are W ranks and T
          tables.

          The rank receives rows in the order of `ids`, in one tensor for the tables of a group.)")
      .def_property_readonly("ids", list(&UniqueBatch::ids),
                             R"(The distinct ids [U], ordered by owner rank, then table, then first
          occurrence.)")
      .def_property_readonly("repeats", list(&UniqueBatch::repeats), R"(The number of lookups of each entry of
          `ids`, [U].)")
      .def_property_readonly(
          "signals", list(&UniqueBatch::signals),
          R"(The signals to send with `ids`, as int32 words in the order of `ids`. `received_signals` of the
          receiving rank decodes them.)")
      .def_property_readonly(
          "latest", list(&UniqueBatch::latest),
          R"(The latest timestamp of each table in the batch, [T]; -2**63 if there is none or if `run` was
          called without `signals`.)")
      .def_property_readonly("counts", table(&UniqueBatch::counts), R"(The number of ids per owner rank and
          table, [W, T].)")
      .def_property_readonly("lookups", table(&UniqueBatch::lookups), R"(The number of lookups of ids per
          owner rank and table, [W, T].)")
      .def_property_readonly(
          "out_of_range",
          [](const UniqueBatch& batch) {
            std::vector<std::tuple<int64_t, int64_t, int64_t>> result;
            for (const UniqueBatch::OutOfRange& each : batch.out_of_range) {
              result.emplace_back(each.table, each.count, each.example);
            }
            return result;
          },
          R"(The ids out of range in index tables: (table, number of ids, an example) per table. Such ids read
          row 0.)")
      .def(
          "rows", [](const UniqueBatch& batch, int64_t group) { return group_of(batch, group).rows; },
          py::arg("group"), R"(Returns the number of rows that the tables of a group receive. Raises
          IndexError for an unknown group.)")
      .def(
          "feature_lookups",
          [](const UniqueBatch& batch, int64_t group) {
            const std::vector<int64_t>& first = group_of(batch, group).first_lookup;
            std::vector<int64_t> result;
            for (size_t f = 0; f + 1 < first.size(); ++f) result.push_back(first[f + 1] - first[f]);
            return result;
          },
          py::arg("group"), R"(Returns the number of lookups of each feature of a group.)")
      .def(
          "slots",
          [](const py::object& self, int64_t group) {
            const UniqueGroup& own = group_of(self.cast<const UniqueBatch&>(), group);
            return arena_with_fields(own.lookups, {own.slots, own.offsets, own.source}, self);
          },
          py::arg("group"),
          R"(Returns an arena of int32 words, and for each array in it the location (first word, words) or
          None. The arrays describe the N lookups of a group, feature by feature:

          slots: int32 [N], the received row of each lookup.
          offsets: int64 [F * B + 1], the offsets of the bags; pooled groups only.
          source: int64 [N], the position of each lookup in the batch's values; None if all values are used in
          order.)")
      .def(
          "segments",
          [](const py::object& self, int64_t group) {
            UniqueBatch& batch = self.cast<UniqueBatch&>();
            const UniqueGroup& own = group_of(batch, group);
            {
              const WithoutLock nogil;
              batch.sort(group);
            }
            return arena_with_fields(own.segments,
                                     {own.segment_offsets, own.grad_row, own.grad_column, own.scale,
                                      own.positions, own.hot_segments},
                                     self);
          },
          py::arg("group"),
          R"(Returns an arena and the locations of arrays in it, like `slots`. The arrays describe the lookups
          sorted by received row, for U rows:

          segment_offsets: int32 [U + 1].
          grad_row: int32 [N], the lookup; in pooled groups, the sample.
          grad_column: int32 [N], pooled groups only.
          scale: float32 [N], the factor of the gradient; only with a MEAN feature.
          positions: int32 [N], the lookup; only for weighted bags.
          hot_segments: int32 [H, 4], None if H is 0.
          Two threads must not call this at the same time.)");
  py::class_<Deduplicator, std::shared_ptr<Deduplicator>>(
      m, "Deduplicator",
      R"(Deduplicator of the batches of a sharded collection. Several threads may use it.)")
      .def(py::init(&make_deduplicator), py::arg("num_embeddings"), py::arg("homes"), py::arg("groups"),
           py::arg("feature_tables"), py::arg("feature_columns"), py::arg("feature_means"),
           py::arg("world_size"), py::arg("signals") = py::none(),
           R"(Creates the deduplicator of a collection.

          num_embeddings: the number of rows of each index table; 0 for a hash table.
          homes: the ownership rule of each table; see `owner_ranks`.
          groups: the group of each table; one tensor receives the rows of all tables of a group.
          feature_tables, feature_columns, feature_means: for each feature, ordered by table: its table, its
          first output column and whether it is MEAN-pooled. The last two are empty for sequences.
          signals: the signals that are sent with each table's ids: the sum of 1 (shows on this rank), 2
          (clicks) and 4 (last timestamp). None means no signals.)")
      .def_property_readonly(
          "signal_words",
          [](const Deduplicator& self) {
            std::vector<int64_t> words;
            for (const SharedTable& table : self.shared().tables) {
              words.push_back(table.signals.words());
            }
            return py::array_t<int64_t>(static_cast<py::ssize_t>(words.size()), words.data());
          },
          R"(The number of int32 words per id in `UniqueBatch.signals`, for each table, [T].)")
      .def("received_signals", &received_signals, py::arg("counts"), py::arg("ids"),
           py::arg("signals").noconvert(),
           R"(Decodes the signals that all ranks sent with ids [n]. Returns shows, clicks and timestamps [n],
          or None for a signal that no table uses.

          counts: [W, T] the number of ids per sending rank and table.
          ids: [n] ordered by sending rank, then table.
          signals: the received words.

          An id that several ranks sent gets the timestamp of its last lookup in the joint batch of all ranks,
          which is ordered by feature, then rank. Raises ValueError for sizes that do not match.)")
      .def(
          "run",
          [](Deduplicator& self, const Ints& values, const Ints& offsets, const Ints& feature_keys,
             int64_t batch_size, bool weighted, bool segments, bool with_signals,
             const std::optional<Slots>& clicks, const std::optional<Dense>& timestamps) {
            BatchArguments batch(values, offsets, feature_keys, batch_size);
            batch.input.weighted = weighted;
            if (with_signals) {
              const SignalKinds any = self.shared().any_signals();
              batch.input.clicks = required_values(any.clicks, clicks, "clicks", batch);
              batch.input.timestamps = required_values(any.timestamp, timestamps, "timestamps", batch);
            }
            const WithoutLock nogil;
            return self.run(batch.input, segments, with_signals);
          },
          py::arg("values"), py::arg("offsets"), py::arg("feature_keys"), py::arg("batch_size"),
          py::arg("weighted") = false, py::arg("segments") = true, py::arg("signals") = false,
          py::arg("clicks").noconvert() = py::none(), py::arg("timestamps").noconvert() = py::none(),
          R"(Deduplicates a batch; see Engine.plan for the batch's arguments.

          segments: computes the result of `UniqueBatch.segments` now instead of on its first call.
          signals: collects the signals that the tables use.
          Raises ValueError if a table uses clicks or timestamps and the batch has none.)");
}

}  // namespace rec_sdk

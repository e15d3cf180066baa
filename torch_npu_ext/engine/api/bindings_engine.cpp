// rec_sdk_torch._engine.Engine: batches, and the window of their sums.
#include "torch_npu_ext/engine/api/bindings.h"

namespace rec_sdk {

// (places, tables) of records with initial values.
static auto to_python(InitialRows initial) {
  return std::make_pair(to_python(std::move(initial.places)), to_python(std::move(initial.tables)));
}

static auto to_python(Engine::WindowRows found) {
  return std::make_tuple(to_python(std::move(found.slots)), to_python(std::move(found.slot_offsets)),
                         to_python(std::move(found.rows)), to_python(std::move(found.row_offsets)));
}

namespace {

// One number of each key, or null.
const int64_t* of_keys(const std::optional<Dense>& array, const BatchArguments& batch) {
  const int64_t size = batch.input.batch_size;
  const int64_t keys = size > 0 ? (batch.input.offsets.size - 1) / size : 0;
  if (array && size > 0 && (array->ndim() != 1 || array->size() != keys)) {
    throw py::value_error("latest must have one entry per key, " + std::to_string(keys) + ", got " +
                          std::to_string(array->size()));
  }
  return array ? array->data() : nullptr;
}

// Keeps the array until the last use of the plan's arrays, which may end on any thread.
ExternalArena external_arena(Bytes& array) {
  auto* owner = new py::object(array);
  const auto drop = [](void* data) {
    const auto lock = take_lock([] { return std::make_unique<py::gil_scoped_acquire>(); });
    delete static_cast<py::object*>(data);
  };
  return {reinterpret_cast<char*>(array.mutable_data()), static_cast<size_t>(array.size()),
          std::shared_ptr<void>(owner, drop)};
}

}  // namespace

void bind_batches(EngineClass& engine) {
  const py::arg values("values"), offsets("offsets"), feature_keys("feature_keys"), batch_size("batch_size");
  const py::arg plan("plan"), records("records"), sums("sums");
  engine
      .def(
          "plan",
          [](Engine& e, const Ints& values, const Ints& offsets, const Ints& feature_keys, int64_t batch_size,
             bool weighted, bool joined, std::optional<Bytes> arena, const Announcement* announced,
             const std::optional<Slots>& shows, const std::optional<Slots>& clicks,
             const std::optional<Dense>& timestamps, const std::optional<Dense>& latest) {
            BatchArguments batch(values, offsets, feature_keys, batch_size);
            batch.input.weighted = weighted;
            batch.input.joined = joined;
            batch.input.shows = of_lookups(shows, "shows", batch);
            batch.input.clicks = of_lookups(clicks, "clicks", batch);
            batch.input.timestamps = of_lookups(timestamps, "timestamps", batch);
            batch.input.latest = of_keys(latest, batch);
            ExternalArena memory = arena ? external_arena(*arena) : ExternalArena();
            const WithoutLock nogil;
            return e.plan(batch.input, std::move(memory), announced);
          },
          values, offsets, feature_keys, batch_size, py::arg("weighted") = false, py::arg("joined") = false,
          py::arg("arena").noconvert() = py::none(), py::arg("announced").none(true) = py::none(),
          py::arg("shows").noconvert() = py::none(), py::arg("clicks").noconvert() = py::none(),
          py::arg("timestamps").noconvert() = py::none(), py::arg("latest").noconvert() = py::none(),
          R"(Plans a batch and pins its slots. Waits for no copy.

          values: [*] ids of all keys. offsets: [K*B + 1]. feature_keys: [F] which key each feature reads.
          weighted: the lookups of bags have weights. joined: the features of a sequence have one gradient,
          one after another. arena: memory for the plan's arrays, of arena_bytes() at least, which it keeps;
          None for memory of its own. announced: what announce() gave for the batch, which then no longer
          counts; after an exception it still does. shows, clicks, timestamps: of each of `values`, for tables
          that admit or evict ids; shows is 1 each if None. latest: [K] the latest timestamp of each key,
          where others than those of `values` count too. Raises CacheTooSmallError, CapacityError, IndexError
          (ids out of range), MemoryError, TypeError, ValueError.)")
      .def(
          "announce",
          [](Engine& e, const Ints& values, const Ints& offsets, const Ints& feature_keys,
             int64_t batch_size) {
            const BatchArguments batch(values, offsets, feature_keys, batch_size);
            const WithoutLock nogil;
            return e.announce(batch.input);
          },
          values, offsets, feature_keys, batch_size,
          R"(Says that the batch will be planned, after those announced before: a policy that looks ahead
          keeps its rows.

          It counts until it is planned or forgotten. Changes no row; other policies ignore it. RuntimeError
          when 16 were announced from the oldest on that still counts; TypeError, ValueError as from
          plan().)")
      .def(
          "arena_bytes",
          [](Engine& e, const Ints& values, const Ints& offsets, const Ints& feature_keys, int64_t batch_size,
             bool weighted, bool joined) {
            BatchArguments batch(values, offsets, feature_keys, batch_size);
            batch.input.weighted = weighted;
            batch.input.joined = joined;
            const WithoutLock nogil;
            return e.arena_bytes(batch.input);
          },
          values, offsets, feature_keys, batch_size, py::arg("weighted") = false, py::arg("joined") = false,
          "Bytes that the arrays of the batch's plan take at the most.")
      .def("unapplied", &Engine::unapplied, py::arg("upto").none(true) = py::none(),
           py::call_guard<WithoutLock>(),
           R"(The plans to be applied before and with `upto`, or all, oldest first. Holding these does not
          pin.

          RuntimeError when `upto` was cancelled.)")
      .def("applied", unlocked(&Engine::applied), plan,
           R"(The cache holds what the plan brings in. RuntimeError unless it is the oldest, and has begun.)")
      .def("in_flight", unlocked(&Engine::in_flight), "Plans whose pins have not ended.")
      .def("cancel", unlocked(&Engine::cancel), plan,
           R"(Undoes the newest plan and ends its pins, before it begins; so any suffix of the plans, newest
          first.

          Only the order in which rows will be evicted may differ from before. RuntimeError for any other
          plan.)")
      .def(
          "find",
          [](Engine& e, const Ints& values, const Ints& offsets, const Ints& feature_keys, int64_t batch_size,
             int64_t bag_begin, int64_t bag_end) {
            const BatchArguments batch(values, offsets, feature_keys, batch_size);
            const WithoutLock nogil;
            return e.find(batch.input, bag_begin, bag_end);
          },
          values, offsets, feature_keys, batch_size, py::arg("bag_begin"), py::arg("bag_end"),
          R"(Finds the rows of the group's bags [bag_begin, bag_end). Changes nothing, apart from bounds
          warnings.

          RuntimeError before all plans are applied.)")
      .def(
          "bag_ranges",
          [](Engine& e, const Ints& offsets, const Ints& feature_keys, int64_t batch_size,
             int64_t max_lookups) {
            const BatchArguments batch(Dense(0), offsets, feature_keys, batch_size);
            return to_python(e.bag_ranges(batch.input, max_lookups));
          },
          offsets, feature_keys, batch_size, py::arg("max_lookups"),
          R"(Boundaries 0 = b0 < b1 < ... = F*B of runs of bags with at most max_lookups lookups each, or one
          bag.)")
      .def(
          "read",
          [](Engine& e, const ReadPlan& plan, Records records) {
            char* out = records_out(records, e, static_cast<int64_t>(plan.host_rows.size()));
            return run_unlocked([&] { return e.read(plan, out); });
          },
          py::arg("read_plan"), records,
          R"(Fills the [host_count] host rows. Returns (places [m], their tables [m]) of those with initial
          values.

          RuntimeError before its sources have landed.)")
      .def(
          "complete_write_back",
          [](Engine& e, const Plan& plan, Records records, std::optional<Sums> sums) {
            const char* in = records_in(records, e, plan->rows_out);
            if (plan->window_out > 0 && !sums)
              throw py::value_error("the plan has sums that leave: pass them");
            const float* in_sums = sums ? sums_of<false>(*sums, e, plan->window_out) : nullptr;
            const WithoutLock nogil;
            e.complete_write_back(plan, in, in_sums);
          },
          plan, records, py::arg("sums") = py::none(),
          R"(Stores the [O] records of the rows that the plan took out, and their [P] sums, needed when P > 0.

          The plan may be released already; landing twice does nothing. RuntimeError before the plan has
          begun.)")
      .def(
          "read_sums",
          [](Engine& e, const Plan& plan, Sums sums) {
            float* out = sums_of<true>(sums, e, plan->window_in);
            const WithoutLock nogil;
            e.read_sums(plan, out);
          },
          plan, sums,
          R"(Fills the [Q] sums of rows that come back. RuntimeError once the plan is applied or cancelled.)")
      .def(
          "read_in",
          [](Engine& e, const Plan& plan, Records records, bool initial) {
            char* out = records_out(records, e, plan->rows_in);
            return run_unlocked([&] { return e.read_in(plan, out, initial); });
          },
          plan, records, py::arg("initial") = false,
          R"(Fills the [I] records for the slots that the plan fills.

          Returns (places [m], their tables [m]) of those with initial values, if `initial`. RuntimeError
          before the plan's sources have landed.)")
      .def(
          "read_ahead",
          [](Engine& e, const Plan& plan, Records records) {
            char* out = records_out(records, e, plan->rows_in);
            return run_unlocked([&] { return e.read_ahead(plan, out); });
          },
          plan, records,
          R"(Fills the records before the plan's sources have landed, but for the rows that they take out.

          Returns the places [m] of those, ascending. RuntimeError once the plan has begun or was
          cancelled.)")
      .def(
          "read_late",
          [](Engine& e, const Plan& plan, Span<int32_t> places, Records records) {
            char* out = records_out(records, e, places.size());
            const WithoutLock nogil;
            e.read_late(plan, places, out);
          },
          plan, py::arg("places"), records,
          R"(Fills the [m] records of the rows at `places`, ascending. RuntimeError before the sources have
          landed.)")
      .def(
          "mark",
          [](Engine& e, const Plan& plan, std::optional<Slots> slots) {
            const WithoutLock nogil;
            slots ? e.mark(plan, {slots->data(), slots->size()}) : e.mark(plan);
          },
          plan, py::arg("slots").noconvert() = py::none(),
          R"(The plan's rows, or those in `slots`, which are some of them, have sums from now on.

          RuntimeError after the plan's release.)")
      .def("window_open", unlocked(&Engine::window_open), "Whether any row has a sum.")
      .def("window_rows", unlocked(&Engine::window_rows),
           R"(Rows with sums, by ascending table: slots [n] of resident ones, ascending, and slot_offsets [T +
          1]; rows [m] of those that left the cache, ascending within a table, and row_offsets [T + 1].)")
      .def(
          "read_spilled",
          [](Engine& e, int64_t begin, int64_t end, Records records, Sums sums) {
            if (begin < 0 || end < begin) throw py::index_error("read_spilled: begin <= end, both from 0 on");
            const int64_t rows = end - begin;
            char* out = records_out(records, e, rows);
            float* out_sums = sums_of<true>(sums, e, rows);
            const WithoutLock nogil;
            e.read_spilled(begin, end, out, out_sums);
          },
          py::arg("begin"), py::arg("end"), records, sums,
          R"(Fills records and sums of the begin-th to end-th of `rows` of window_rows. IndexError beyond
          them.)")
      .def(
          "write_spilled",
          [](Engine& e, int64_t begin, int64_t end, Records records) {
            if (begin < 0 || end < begin)
              throw py::index_error("write_spilled: begin <= end, both from 0 on");
            const char* in = records_in(records, e, end - begin);
            const WithoutLock nogil;
            e.write_spilled(begin, end, in);
          },
          py::arg("begin"), py::arg("end"), records,
          R"(Stores the records of the begin-th to end-th of `rows` of window_rows. IndexError beyond them.)")
      .def("close_window", unlocked(&Engine::close_window), "Ends the window: no row has a sum.");
}

}  // namespace rec_sdk

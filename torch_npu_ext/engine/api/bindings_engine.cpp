// rec_sdk_torch._engine.Engine: batches and the accumulation window.
#include "torch_npu_ext/engine/api/bindings.h"

namespace rec_sdk {

// Converts InitialRows to the tuple (places, tables).
static auto to_python(InitialRows initial) {
  return std::make_pair(to_python(std::move(initial.places)), to_python(std::move(initial.tables)));
}

static auto to_python(Engine::WindowRows window) {
  return std::make_tuple(to_python(std::move(window.slots)), to_python(std::move(window.slot_offsets)),
                         to_python(std::move(window.rows)), to_python(std::move(window.row_offsets)));
}

namespace {

// Returns the data of an optional array with one entry per key; null if there is no array.
const int64_t* per_key(const std::optional<Dense>& array, const BatchArguments& batch) {
  const int64_t size = batch.input.batch_size;
  const int64_t keys = size > 0 ? (batch.input.offsets.size - 1) / size : 0;
  if (array && size > 0 && (array->ndim() != 1 || array->size() != keys)) {
    throw py::value_error("latest must have one entry per key, " + std::to_string(keys) + ", got " +
                          std::to_string(array->size()));
  }
  return array ? array->data() : nullptr;
}

// Wraps memory of the caller as a plan's arena. The plan keeps the array alive and may release it on any
// thread, so the release takes the GIL.
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
            batch.input.shows = per_lookup(shows, "shows", batch);
            batch.input.clicks = per_lookup(clicks, "clicks", batch);
            batch.input.timestamps = per_lookup(timestamps, "timestamps", batch);
            batch.input.latest = per_key(latest, batch);
            ExternalArena memory = arena ? external_arena(*arena) : ExternalArena();
            const WithoutLock nogil;
            return e.plan(batch.input, std::move(memory), announced);
          },
          values, offsets, feature_keys, batch_size, py::arg("weighted") = false, py::arg("joined") = false,
          py::arg("arena").noconvert() = py::none(), py::arg("announced").none(true) = py::none(),
          py::arg("shows").noconvert() = py::none(), py::arg("clicks").noconvert() = py::none(),
          py::arg("timestamps").noconvert() = py::none(), py::arg("latest").noconvert() = py::none(),
          R"(Plans a batch and pins its slots. Does not wait for any copy.

          values: [*] the ids of all keys.
          offsets: [K*B + 1] the offsets of the bags in `values`.
          feature_keys: [F] the key that each feature reads.
          weighted: whether the lookups of the bags have weights.
          joined: whether the features of a sequence share one gradient tensor, one feature after another.
          arena: memory for the plan's arrays, of at least arena_bytes() bytes; the plan keeps it alive. With
          None, the plan allocates memory.
          announced: the result of announce() for this batch. A successful call ends the announcement.
          shows, clicks, timestamps: one entry per entry of `values`, for tables that admit or evict ids.
          Without `shows`, every lookup counts as one show.
          latest: [K] the latest timestamp of each key, if it must include ids that `values` does not contain,
          such as ids of other ranks.

          Raises CacheTooSmallError, CapacityError, IndexError (ids out of range), MemoryError, TypeError,
          ValueError.)")
      .def(
          "announce",
          [](Engine& e, const Ints& values, const Ints& offsets, const Ints& feature_keys,
             int64_t batch_size) {
            const BatchArguments batch(values, offsets, feature_keys, batch_size);
            const WithoutLock nogil;
            return e.announce(batch.input);
          },
          values, offsets, feature_keys, batch_size,
          R"(Announces that a batch will be planned after the batches announced before it.

          A look-ahead policy keeps the rows of announced batches in the cache; other policies ignore
          announcements. An announcement is valid until its batch is planned or it is forgotten. No row
          changes. Raises RuntimeError if 16 batches have been announced since the oldest valid announcement,
          and TypeError and ValueError like plan().)")
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
          R"(Returns an upper bound of the size of the batch's plan in bytes.)")
      .def("unapplied", &Engine::unapplied, py::arg("upto").none(true) = py::none(),
           py::call_guard<WithoutLock>(),
           R"(Returns the unapplied plans up to and including `upto`, or all of them, oldest first.

          The returned plans do not pin slots. Raises RuntimeError if `upto` was cancelled.)")
      .def("applied", unlocked(&Engine::applied), plan,
           R"(Marks a plan as applied: the cache holds its rows. Raises RuntimeError unless the plan is
          started and is the oldest unapplied one.)")
      .def("in_flight", unlocked(&Engine::in_flight), R"(Returns the number of plans whose slots are still
          pinned.)")
      .def("cancel", unlocked(&Engine::cancel), plan,
           R"(Cancels the newest plan, which must not be started, and unpins its slots.

          Several plans can be cancelled one by one, newest first. The group is then as before the plan,
          except that later evictions may choose other victims. Raises RuntimeError for any other plan.)")
      .def(
          "find",
          [](Engine& e, const Ints& values, const Ints& offsets, const Ints& feature_keys, int64_t batch_size,
             int64_t bag_begin, int64_t bag_end) {
            const BatchArguments batch(values, offsets, feature_keys, batch_size);
            const WithoutLock nogil;
            return e.find(batch.input, bag_begin, bag_end);
          },
          values, offsets, feature_keys, batch_size, py::arg("bag_begin"), py::arg("bag_end"),
          R"(Finds the rows of the group's bags [bag_begin, bag_end) for reading. Changes nothing except the
          recorded bounds warnings.

          Raises RuntimeError while a plan is not applied.)")
      .def(
          "bag_ranges",
          [](Engine& e, const Ints& offsets, const Ints& feature_keys, int64_t batch_size,
             int64_t max_lookups) {
            const BatchArguments batch(Dense(0), offsets, feature_keys, batch_size);
            return to_python(e.bag_ranges(batch.input, max_lookups));
          },
          offsets, feature_keys, batch_size, py::arg("max_lookups"),
          R"(Returns boundaries 0 = b0 < b1 < ... = F*B that split the bags into runs. A run has at most
          max_lookups lookups, unless it is a single bag.)")
      .def(
          "read",
          [](Engine& e, const ReadPlan& plan, Records records) {
            char* out = records_out(records, e, static_cast<int64_t>(plan.host_rows.size()));
            return run_unlocked([&] { return e.read(plan, out); });
          },
          py::arg("read_plan"), records,
          R"(Fills the records [host_count] of the plan's host rows. Returns (places [m], tables [m]): of each
          record with initial values, the position in `records` and the table.

          Raises RuntimeError while a write-back of the plan's sources is pending.)")
      .def(
          "complete_write_back",
          [](Engine& e, const Plan& plan, Records records, std::optional<Sums> sums) {
            const char* in = records_in(records, e, plan->rows_out);
            if (plan->window_out > 0 && !sums)
              throw py::value_error("the plan writes back sums: pass `sums`");
            const float* in_sums = sums ? sums_of<false>(*sums, e, plan->window_out) : nullptr;
            const WithoutLock nogil;
            e.complete_write_back(plan, in, in_sums);
          },
          plan, records, py::arg("sums") = py::none(),
          R"(Stores the records [O] of the plan's victims in the host store, and their sums [P], which are
          required if P > 0.

          The plan may be released already. A second call does nothing. Raises RuntimeError before the plan
          is started.)")
      .def(
          "read_sums",
          [](Engine& e, const Plan& plan, Sums sums) {
            float* out = sums_of<true>(sums, e, plan->window_in);
            const WithoutLock nogil;
            e.read_sums(plan, out);
          },
          plan, sums,
          R"(Fills the sums [Q] of the incoming rows (rows in) that have spilled sums. Raises RuntimeError
          once the plan is applied or cancelled.)")
      .def(
          "read_in",
          [](Engine& e, const Plan& plan, Records records, bool initial) {
            char* out = records_out(records, e, plan->rows_in);
            return run_unlocked([&] { return e.read_in(plan, out, initial); });
          },
          plan, records, py::arg("initial") = false,
          R"(Fills the records [I] of the incoming rows (rows in), from the host store or with initial values.

          initial: also returns (places [m], tables [m]): of each record with initial values, the position in
          `records` and the table. Otherwise both arrays are empty.
          Raises RuntimeError while a write-back of the plan's sources is pending.)")
      .def(
          "read_ahead",
          [](Engine& e, const Plan& plan, Records records) {
            char* out = records_out(records, e, plan->rows_in);
            return run_unlocked([&] { return e.read_ahead(plan, out); });
          },
          plan, records,
          R"(Fills the records of the incoming rows (rows in), but skips rows whose write-back is pending.
          Never waits for a write-back.

          Returns the places [m] of the skipped rows, ascending: their positions among the rows in. read_late
          reads them. Raises RuntimeError once the plan is started or cancelled.)")
      .def(
          "read_late",
          [](Engine& e, const Plan& plan, Span<int32_t> places, Records records) {
            char* out = records_out(records, e, places.size());
            const WithoutLock nogil;
            e.read_late(plan, places, out);
          },
          plan, py::arg("places"), records,
          R"(Fills the records [m] of the rows in at `places` [m], ascending, which read_ahead skipped. Raises
          RuntimeError while a write-back of the plan's sources is pending.)")
      .def(
          "mark",
          [](Engine& e, const Plan& plan, std::optional<Slots> slots) {
            const WithoutLock nogil;
            slots ? e.mark(plan, {slots->data(), slots->size()}) : e.mark(plan);
          },
          plan, py::arg("slots").noconvert() = py::none(),
          R"(Marks the plan's rows, or only the rows in `slots`, as having sums in the accumulation window.

          Raises RuntimeError after the plan was released.)")
      .def("window_open", unlocked(&Engine::window_open), R"(Returns whether any row has a sum in the
          accumulation window.)")
      .def("window_rows", unlocked(&Engine::window_rows),
           R"(Returns the rows that have sums, ordered by table: the slots [n] of cached rows, ascending, and
          slot_offsets [T + 1]; the other rows [m], ascending within a table, and row_offsets [T + 1].)")
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
          R"(Fills the records and sums of entries [begin, end) of the array `rows` that window_rows returns.
          Raises IndexError outside of the array.)")
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
          R"(Stores the records of entries [begin, end) of the array `rows` that window_rows returns. Raises
          IndexError outside of the array.)")
      .def("close_window", unlocked(&Engine::close_window), R"(Closes the accumulation window: no row has a
          sum afterwards.)");
}

}  // namespace rec_sdk

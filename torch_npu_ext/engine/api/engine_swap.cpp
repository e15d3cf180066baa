// The engine's calls for a swap: copies of records between the host store and staging buffers.
#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <stdexcept>

#include "torch_npu_ext/engine/api/engine.h"
#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {

// A range of rows of one table, as indices into the rows in or rows out of a plan. `to` is the position of
// its first row in the staging buffer.
struct RowRange {
  int32_t table, begin, end, to;
};

namespace {

// The most rows that a thread copies as one piece of work, and how many rows ahead of its copy a record is
// prefetched.
constexpr int32_t kRowsPerPiece = 1024;
constexpr int32_t kRowsAhead = 8;
// The cost of copying a record, in lookups, for the decision whether several threads are worth it.
constexpr int64_t kLookupsPerRecord = 4;

// Splits the rows [offsets[t], offsets[t + 1]) of every table t into pieces of at most kRowsPerPiece rows.
std::vector<RowRange> split_rows(const std::vector<int32_t>& offsets) {
  std::vector<RowRange> pieces;
  for (size_t t = 0; t + 1 < offsets.size(); ++t) {
    for (int32_t begin = offsets[t]; begin < offsets[t + 1]; begin += kRowsPerPiece) {
      const int32_t end = std::min(begin + kRowsPerPiece, offsets[t + 1]);
      pieces.push_back({static_cast<int32_t>(t), begin, end, begin});
    }
  }
  return pieces;
}

// Returns the pieces without the rows at `places`, which must be ascending.
std::vector<RowRange> without(const std::vector<RowRange>& pieces, const std::vector<int32_t>& places) {
  std::vector<RowRange> kept;
  auto next = places.begin();
  for (const RowRange& piece : pieces) {
    int32_t begin = piece.begin;
    for (; next != places.end() && *next < piece.end; ++next) {
      if (begin < *next) kept.push_back({piece.table, begin, *next, begin});
      begin = *next + 1;
    }
    if (begin < piece.end) kept.push_back({piece.table, begin, piece.end, begin});
  }
  return kept;
}

// Runs copy(piece) for all pieces on several threads.
template <class Copy>
void for_each_piece(const std::vector<RowRange>& pieces, int64_t rows, const Copy& copy) {
  const auto at = [&](int64_t p) noexcept { copy(pieces[static_cast<size_t>(p)]); };
  for_each_part(static_cast<int64_t>(pieces.size()), rows * kLookupsPerRecord, at);
}

// Announces all pieces to the host stores before the first copy, because a disk serves many requests at once
// faster.
void will_need(const Group& group, const std::vector<RowRange>& pieces, const uint32_t* rows) {
  for (const RowRange& piece : pieces) {
    group.tables[piece.table].store.will_need(rows + piece.begin, piece.end - piece.begin);
  }
}

}  // namespace

void Engine::check_written_back(const std::vector<uint64_t>& sources) const {
  for (const uint64_t serial : sources) {
    if (group_.write_backs.find(serial) == nullptr) continue;
    throw std::runtime_error(
        "the batch needs rows whose write-back is pending: complete the write-back of plan " +
        std::to_string(serial) + " first");
  }
}

// The caller holds records_mutex_ shared.
void Engine::copy_in(const Plan& plan, const std::vector<RowRange>& pieces, char* records) const {
  const size_t bytes = static_cast<size_t>(group_.layout.bytes);
  const uint32_t* const rows = plan->swap_in_rows;
  will_need(group_, pieces, rows);
  for_each_piece(pieces, plan->rows_in, [&](const RowRange& piece) {
    const Table& table = group_.tables[piece.table];
    char* record = records + static_cast<size_t>(piece.to) * bytes;
    for (int32_t i = piece.begin; i < piece.end; ++i, record += bytes) {
      if (i + kRowsAhead < piece.end) table.store.prefetch(rows[i + kRowsAhead]);
      if (!table.store.read(rows[i], record)) table.initializer.write(plan->swap_in_ids[i], record);
    }
  });
}

InitialRows Engine::read_in(const Plan& plan, char* records, bool initial) {
  check_own(plan);
  auto guard = lock();
  check_written_back(plan->sources);
  const std::shared_lock<std::shared_mutex> reading(records_mutex_);
  guard.unlock();
  const std::vector<RowRange> pieces = split_rows(plan->in_offsets);
  copy_in(plan, pieces, records);
  InitialRows found;
  if (!initial) return found;
  for (const RowRange& piece : pieces) {
    const HostStore& store = group_.tables[piece.table].store;
    for (int32_t i = piece.begin; i < piece.end; ++i) {
      if (!store.has(plan->swap_in_rows[i])) found.add(i, piece.table);
    }
  }
  return found;
}

std::vector<int32_t> Engine::read_ahead(const Plan& plan, char* records) {
  check_own(plan);
  auto guard = lock();
  if (plan->state != PlanState::kPlanned) {
    throw std::runtime_error("rows are read ahead before their plan begins or is cancelled");
  }
  std::vector<int32_t> late = group_.write_backs.late_rows(*plan);
  const std::shared_lock<std::shared_mutex> reading(records_mutex_);
  guard.unlock();
  copy_in(plan, without(split_rows(plan->in_offsets), late), records);
  return late;
}

void Engine::read_late(const Plan& plan, Span<int32_t> places, char* records) {
  check_own(plan);
  check_written_back(plan->sources);
  std::vector<RowRange> pieces;
  int32_t table = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(places.size()); ++i) {
    if (places[i] < (i == 0 ? 0 : places[i - 1] + 1) || places[i] >= plan->rows_in) {
      throw std::invalid_argument("places are ascending, of rows that the plan brings in");
    }
    while (plan->in_offsets[table + 1] <= places[i]) ++table;
    pieces.push_back({table, places[i], places[i] + 1, i});
  }
  const std::shared_lock<std::shared_mutex> reading(records_mutex_);
  copy_in(plan, pieces, records);
}

void Engine::read_sums(const Plan& plan, float* sums) {
  check_own(plan);
  const auto guard = lock();
  if (plan->state == PlanState::kApplied || plan->state == PlanState::kCancelled) {
    throw std::runtime_error("the sums of a plan are read before it is applied");
  }
  check_written_back(plan->sources);
  group_.window.read(*plan, sums);
}

// The write-back stays pending until all records are written, so that no other call reads them earlier.
void Engine::complete_write_back(const Plan& plan, const char* records, const float* sums) {
  check_own(plan);
  auto guard = lock();
  if (group_.write_backs.find(plan->serial) != plan.buffers())
    return;  // already completed, or the plan has no rows out
  if (plan->state != PlanState::kApplied && plan->state != PlanState::kApplying) {
    throw std::runtime_error("a write-back must be completed after its plan was started");
  }
  const size_t bytes = static_cast<size_t>(group_.layout.bytes);
  const std::vector<RowRange> pieces = split_rows(plan->out_offsets);
  const uint32_t* const rows = plan->swap_out_rows;
  std::vector<RowRange> unwritten;
  for (const RowRange& piece : pieces) {
    HostStore& store = group_.tables[piece.table].store;
    int32_t found = 0;
    for (int32_t i = piece.begin; i < piece.end; ++i) {
      if (store.has(rows[i])) continue;
      store.map(rows[i]);
      ++found;
    }
    if (found > 0) unwritten.push_back(piece);
  }
  for (const RowRange& piece : unwritten) {
    HostStore& store = group_.tables[piece.table].store;
    for (int32_t i = piece.begin; i < piece.end; ++i) store.mark(rows[i]);
  }
  if (sums != nullptr) group_.window.write(*plan, sums);
  {
    const std::shared_lock<std::shared_mutex> writing(records_mutex_);
    guard.unlock();
    will_need(group_, pieces, rows);
    for_each_piece(pieces, plan->rows_out, [&](const RowRange& piece) {
      const HostStore& store = group_.tables[piece.table].store;
      for (int32_t i = piece.begin; i < piece.end; ++i) {
        store.copy(rows[i], records + static_cast<size_t>(i) * bytes);
      }
    });
  }
  guard.lock();
  group_.write_backs.remove(*plan);
}

}  // namespace rec_sdk

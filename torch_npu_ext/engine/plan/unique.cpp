#include "torch_npu_ext/engine/plan/unique.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "torch_npu_ext/engine/base/parallel.h"
#include "torch_npu_ext/engine/directory/id_map.h"
#include "torch_npu_ext/engine/lifecycle/timestamps.h"

namespace rec_sdk {
namespace {

constexpr int64_t kDistance = 24;  // number of lookups between hashing an id and reading its cell
constexpr int64_t kRing = 32;      // at least kDistance; a power of two

}  // namespace

SharedTables::SharedTables(std::vector<SharedTable> tables_, std::vector<Feature> features_, int64_t groups_,
                           int64_t ranks_, bool pooled_)
    : tables(std::move(tables_)),
      features(std::move(features_)),
      groups(groups_),
      ranks(ranks_),
      pooled(pooled_) {
  if (ranks < 1) throw std::invalid_argument("world_size must be at least 1, got " + std::to_string(ranks));
  for (size_t t = 0; t < tables.size(); ++t) {
    const SharedTable& table = tables[t];
    const std::string error = owner_rule_error(table.owner, ranks);
    if (!error.empty()) throw std::invalid_argument("table " + std::to_string(t) + ": " + error);
    if (table.group < 0 || table.group >= groups || table.num_embeddings < 0) {
      throw std::invalid_argument("table " + std::to_string(t) + ": group " + std::to_string(table.group) +
                                  " or " + std::to_string(table.num_embeddings) + " rows are not valid");
    }
  }
  int32_t before = 0;
  std::vector<int64_t> features_of(tables.size());
  for (const Feature& feature : features) {
    if (feature.table < before || feature.table >= static_cast<int32_t>(tables.size())) {
      throw std::invalid_argument("features must be ordered by table, of which there are " +
                                  std::to_string(tables.size()));
    }
    before = feature.table;
    ++features_of[static_cast<size_t>(before)];
  }
  for (size_t t = 0; t < tables.size(); ++t) {
    tables[t].signals.feature = tables[t].signals.timestamp && features_of[t] > 1;
  }
}

SignalKinds SharedTables::any_signals() const {
  SignalKinds any;
  for (const SharedTable& table : tables) {
    any.shows |= table.signals.shows;
    any.clicks |= table.signals.clicks;
    any.timestamp |= table.signals.timestamp;
  }
  return any;
}

WordArena::Field WordArena::add(int64_t count, int64_t words_each) {
  size_ += size_ % 2;
  const Field field{size_, count * words_each};
  size_ += field.words;
  return field;
}

Deduplicator::Deduplicator(std::shared_ptr<const SharedTables> shared)
    : shared_(std::move(shared)), tables_(shared_->tables.size()) {}

std::unique_ptr<UniqueBatch> Deduplicator::run(const BatchInput& input, bool segments, bool with_signals) {
  const std::lock_guard<std::mutex> guard(mutex_);
  with_signals_ = with_signals;
  auto result = std::make_unique<UniqueBatch>();
  result->shared = shared_;
  lay_out(input, result.get());
  const int64_t tables = static_cast<int64_t>(tables_.size());
  for_each_part(tables, batch_.lookups, [&](int64_t t) noexcept {
    number(static_cast<int32_t>(t));
    if (with_signals_) find_signals(static_cast<int32_t>(t));
    find_owners(static_cast<int32_t>(t), result.get());
  });
  for (int64_t t = 0; t < tables; ++t) {
    const TableRun& run = tables_[t];
    if (run.wrong > 0) result->out_of_range.push_back({static_cast<int32_t>(t), run.wrong, run.example});
    result->latest[t] = run.latest;
  }
  find_starts(result.get());
  for_each_part(tables, batch_.lookups,
                [&](int64_t t) noexcept { place(static_cast<int32_t>(t), result.get()); });
  for (size_t g = 0; segments && g < result->groups.size(); ++g) result->sort(static_cast<int64_t>(g));
  return result;
}

void Deduplicator::lay_out(const BatchInput& input, UniqueBatch* result) {
  const int64_t features = static_cast<int64_t>(shared_->features.size());
  check_batch(input, features, true);
  slice_batch(input, features, 0, features * input.batch_size, &batch_);
  if (++epoch_ == 0) {  // after an overflow, old stamps would look new
    for (TableRun& run : tables_) run.cells = HugeArray<Cell>();
    epoch_ = 1;
  }
  local_.ensure(static_cast<size_t>(batch_.lookups));
  rows_.ensure(static_cast<size_t>(batch_.lookups));
  if (with_signals_) signals_.ensure(static_cast<size_t>(batch_.lookups));
  result->latest.resize(tables_.size());
  result->batch_size = input.batch_size;
  result->weighted = input.weighted;
  result->counts.assign(static_cast<size_t>(shared_->ranks) * tables_.size(), 0);
  result->lookups = result->counts;
  result->groups.resize(static_cast<size_t>(shared_->groups));
  std::vector<Batch> of_groups(result->groups.size());
  for (UniqueGroup& group : result->groups) group.first_lookup = group.first_bag = {0};
  size_t piece = 0;
  for (size_t t = 0, f = 0; t < tables_.size(); ++t) {
    TableRun& run = tables_[t];
    const size_t g = static_cast<size_t>(shared_->tables[t].group);
    UniqueGroup& group = result->groups[g];
    group.tables.push_back(static_cast<int32_t>(t));
    run.first = piece < batch_.pieces.size() ? batch_.pieces[piece].begin : batch_.lookups;
    run.first_in_group = group.first_lookup.back();
    run.count = run.rows = run.wrong = 0;
    run.latest = TableClock::kNever;
    run.next.resize(static_cast<size_t>(shared_->ranks));
    run.first_piece = piece;
    for (; f < shared_->features.size() && shared_->features[f].table == static_cast<int32_t>(t); ++f) {
      group.features.push_back(static_cast<int32_t>(f));
      int64_t lookups = 0;
      if (piece <
          batch_.pieces.size()) {  // a batch has no pieces if it is empty, and otherwise one per feature
        Batch::Piece own = batch_.pieces[piece++];
        lookups = own.end - own.begin;
        own.begin = group.first_lookup.back();
        own.end = own.begin + lookups;
        own.first_bag = group.first_bag.back();
        of_groups[g].pieces.push_back(own);
      }
      run.count += lookups;
      group.first_lookup.push_back(group.first_lookup.back() + lookups);
      group.first_bag.push_back(group.first_bag.back() + input.batch_size);
    }
    run.end_piece = piece;
    run.bits = 6;
    while (int64_t{1} << run.bits < 2 * run.count) ++run.bits;
    run.cells.ensure(size_t{1} << run.bits);
  }
  for (size_t g = 0; g < result->groups.size(); ++g) {
    UniqueGroup& group = result->groups[g];
    const int64_t lookups = group.lookup_count();
    bool in_order = lookups == input.values.size;
    for (const Batch::Piece& own : of_groups[g].pieces) in_order &= own.source == own.begin;
    if (shared_->pooled) group.offsets = group.lookups.add(group.first_bag.back() + 1, 2);
    if (!in_order) group.source = group.lookups.add(lookups, 2);
    group.slots = group.lookups.add(lookups);
    group.lookups.allocate();
    if (shared_->pooled) write_offsets(input, of_groups[g], group.lookups.at<int64_t>(group.offsets));
  }
}

template <class Id>
void Deduplicator::number_piece(int32_t t, const Id* ids, int64_t count, uint32_t* local) {
  TableRun& run = tables_[t];
  const uint64_t rows = static_cast<uint64_t>(shared_->tables[t].num_embeddings);
  const uint64_t mask = (uint64_t{1} << run.bits) - 1;
  Cell* const cells = run.cells.data();
  Row* const table_rows = rows_.data() + run.first;
  uint64_t homes[kRing];
  uint32_t next = static_cast<uint32_t>(run.rows);
  const auto read = [&](int64_t i) {
    const int64_t id = static_cast<int64_t>(ids[i]);
    return rows != 0 && static_cast<uint64_t>(id) >= rows ? int64_t{0} : id;
  };
  const auto prepare = [&](int64_t i) {
    homes[i % kRing] = home(read(i), run.bits);
    prefetch_near(&cells[homes[i % kRing]]);
  };
  for (int64_t i = 0; i < std::min(count, kDistance); ++i) prepare(i);
  for (int64_t i = 0; i < count; ++i) {
    if (i + kDistance < count) prepare(i + kDistance);
    const int64_t id = read(i);
    if (id != static_cast<int64_t>(ids[i]) && run.wrong++ == 0) run.example = static_cast<int64_t>(ids[i]);
    uint64_t c = homes[i % kRing];
    while (cells[c].epoch == epoch_ && cells[c].id != id) c = (c + 1) & mask;
    if (cells[c].epoch != epoch_) {
      cells[c] = {id, epoch_, next};
      table_rows[next++] = {id, 0, 0};
    }
    local[i] = cells[c].number;
    ++table_rows[local[i]].count;
  }
  run.rows = next;
}

void Deduplicator::number(int32_t t) noexcept {
  for (size_t p = tables_[t].first_piece; p < tables_[t].end_piece; ++p) {
    const Batch::Piece& piece = batch_.pieces[p];
    const int64_t count = piece.end - piece.begin;
    if (batch_.values.wide) {
      number_piece(t, static_cast<const int64_t*>(batch_.values.data) + piece.source, count,
                   local_.data() + piece.begin);
    } else {
      number_piece(t, static_cast<const int32_t*>(batch_.values.data) + piece.source, count,
                   local_.data() + piece.begin);
    }
  }
}

void Deduplicator::find_owners(int32_t t, UniqueBatch* result) noexcept {
  const size_t tables = tables_.size();
  Row* const rows = rows_.data() + tables_[t].first;
  with_owner_rule(shared_->tables[t].owner, shared_->ranks, [&](const auto& rank_of) {
    for (int64_t r = 0; r < tables_[t].rows; ++r) {
      const int64_t rank = rank_of(rows[r].id);
      rows[r].slot = static_cast<uint32_t>(rank);
      ++result->counts[static_cast<size_t>(rank) * tables + t];
      result->lookups[static_cast<size_t>(rank) * tables + t] += rows[r].count;
    }
  });
}

// Collects the clicks and timestamps of each row. Shows are counted when the rows are numbered.
void Deduplicator::find_signals(int32_t t) noexcept {
  TableRun& run = tables_[t];
  const SignalKinds kinds = shared_->tables[t].signals;
  if (!kinds.clicks && !kinds.timestamp) return;
  IdSignals* const found = signals_.data() + run.first;
  std::fill(found, found + run.rows, IdSignals());
  int64_t earliest = std::numeric_limits<int64_t>::max();
  for (size_t p = run.first_piece; p < run.end_piece; ++p) {
    const Batch::Piece& piece = batch_.pieces[p];
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      IdSignals& one = found[local_[i]];
      const int64_t source = piece.source + i - piece.begin;
      if (kinds.clicks) one.clicks = saturated_sum(one.clicks, batch_.clicks_of(source));
      if (!kinds.timestamp) continue;
      one.timestamp = batch_.timestamps[source];
      one.feature = static_cast<int32_t>(p - run.first_piece);
      run.latest = std::max(run.latest, one.timestamp);
      earliest = std::min(earliest, one.timestamp);
    }
  }
  if (!kinds.timestamp || run.latest <= most_ahead_of(earliest)) return;
  const auto for_each_time = [&](const auto& visit) {
    for (size_t p = run.first_piece; p < run.end_piece; ++p) {
      const Batch::Piece& piece = batch_.pieces[p];
      const int64_t* const times = batch_.timestamps + piece.source;
      for (int64_t i = 0; i < piece.end - piece.begin; ++i) visit(times[i]);
    }
  };
  run.latest = latest_up_to(most_at_first(for_each_time),
                            for_each_time);  // owner ranks also reject timestamps that are too late
}

// Computes where the ids, received rows and signals of each rank and table begin.
void Deduplicator::find_starts(UniqueBatch* result) {
  int64_t ids = 0, words = 0;
  for (int64_t rank = 0; rank < shared_->ranks; ++rank) {
    for (size_t t = 0; t < tables_.size(); ++t) {
      const int64_t count = result->counts[static_cast<size_t>(rank) * tables_.size() + t];
      int64_t& slots = result->groups[shared_->tables[t].group].rows;
      tables_[t].next[rank] = {ids, slots, words};
      ids += count;
      if (with_signals_) words += count * shared_->tables[t].signals.words();
      slots += count;
    }
  }
  result->ids.resize(static_cast<size_t>(ids));
  result->repeats.resize(static_cast<size_t>(ids));
  result->signals.resize(static_cast<size_t>(words));
  for (UniqueGroup& group : result->groups) {
    group.counts.reset(new uint32_t[static_cast<size_t>(group.rows) + 1]);
  }
}

void Deduplicator::place(int32_t t, UniqueBatch* result) noexcept {
  TableRun& run = tables_[t];
  const UniqueGroup& group = result->groups[shared_->tables[t].group];
  const SignalKinds kinds = shared_->tables[t].signals;
  Row* const rows = rows_.data() + run.first;
  for (int64_t r = 0; r < run.rows; ++r) {
    auto& [id_at, slot_at, word_at] = run.next[rows[r].slot];
    if (with_signals_ && kinds.words() > 0) {
      IdSignals one = kinds.clicks || kinds.timestamp ? signals_.data()[run.first + r] : IdSignals();
      one.shows = rows[r].count;
      word_at += write_signals(kinds, one, result->signals.data() + word_at);
    }
    result->ids[id_at] = rows[r].id;
    result->repeats[id_at++] = static_cast<int32_t>(rows[r].count);
    group.counts[slot_at] = rows[r].count;
    rows[r].slot = static_cast<uint32_t>(slot_at++);
  }
  int32_t* slots = group.lookups.at<int32_t>(group.slots) + run.first_in_group;
  int64_t* source = group.lookups.at<int64_t>(group.source);
  if (source != nullptr) source += run.first_in_group;
  for (size_t p = run.first_piece; p < run.end_piece; ++p) {
    const Batch::Piece& piece = batch_.pieces[p];
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      *slots++ = static_cast<int32_t>(rows[local_[i]].slot);
      if (source != nullptr) *source++ = piece.source + i - piece.begin;
    }
  }
}

void UniqueBatch::sort(int64_t g) {
  UniqueGroup& group = groups[static_cast<size_t>(g)];
  if (group.sorted) return;
  const int64_t lookups = group.lookup_count();
  bool scaled = false;
  for (const int32_t f : group.features) scaled |= shared->features[f].mean;
  group.segment_offsets = group.segments.add(group.rows + 1);
  group.grad_row = group.segments.add(lookups);
  if (shared->pooled) group.grad_column = group.segments.add(lookups);
  if (shared->pooled && scaled) group.scale = group.segments.add(lookups);
  if (shared->pooled && weighted) group.positions = group.segments.add(lookups);
  constexpr int64_t kHotWords = sizeof(HotSegment) / 4;
  group.hot_segments = group.segments.add(hot_segment_places(lookups), kHotWords);
  group.segments.allocate();
  int32_t* const borders = group.segments.at<int32_t>(group.segment_offsets);
  HotSegment* const hot = group.segments.at<HotSegment>(group.hot_segments);
  clear_hot_segments(hot, lookups);
  uint32_t position = 0;
  for (int64_t row = 0; row <= group.rows; ++row) {
    const uint32_t count = row < group.rows ? group.counts[row] : 0;
    record_hot_segment(hot, row, position, count);
    borders[row] = static_cast<int32_t>(position);
    group.counts[row] = position;  // from now on, the position of the row's next lookup
    position += count;
  }
  group.hot_segments.words = collect_hot_segments(hot, lookups) * kHotWords;
  if (group.hot_segments.words == 0) group.hot_segments.begin = -1;
  // Tables are sorted in parallel, because all lookups of a row belong to one table.
  for_each_part(static_cast<int64_t>(group.tables.size()), lookups, [&](int64_t place) noexcept {
    for (size_t f = 0; f < group.features.size(); ++f) {
      if (shared->features[group.features[f]].table == group.tables[place]) sort_feature(&group, f);
    }
  });
  group.sorted = true;
}

void UniqueBatch::sort_feature(UniqueGroup* group, size_t f) noexcept {
  const int32_t* const slots = group->lookups.at<int32_t>(group->slots);
  int32_t* const grad_row = group->segments.at<int32_t>(group->grad_row);
  uint32_t* const next = group->counts.get();
  if (!shared->pooled) {
    for (int64_t i = group->first_lookup[f]; i < group->first_lookup[f + 1]; ++i) {
      grad_row[next[slots[i]]++] = static_cast<int32_t>(i);
    }
    return;
  }
  const Feature& feature = shared->features[group->features[f]];
  const int64_t* const offsets = group->lookups.at<int64_t>(group->offsets) + group->first_bag[f];
  int32_t* const grad_column = group->segments.at<int32_t>(group->grad_column);
  float* const scale = group->segments.at<float>(group->scale);
  int32_t* const positions = group->segments.at<int32_t>(group->positions);
  for (int64_t sample = 0; sample < batch_size; ++sample) {
    const int64_t length = offsets[sample + 1] - offsets[sample];
    const float factor = feature.mean && length > 0 ? 1.0f / static_cast<float>(length) : 1.0f;
    for (int64_t i = offsets[sample]; i < offsets[sample + 1]; ++i) {
      const uint32_t position = next[slots[i]]++;
      grad_row[position] = static_cast<int32_t>(sample);
      grad_column[position] = static_cast<int32_t>(feature.column);
      if (scale != nullptr) scale[position] = factor;
      if (positions != nullptr) positions[position] = static_cast<int32_t>(i);
    }
  }
}

}  // namespace rec_sdk

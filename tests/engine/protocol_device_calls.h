// The device operations of the protocol. They model cache/transfers.py, and the kernels that cache/swap.py
// and cache/device_cache.py launch. protocol.h includes this file. Operations access only device memory; for
// example, they read slots from the plan's arena there.
#pragma once

#include "tests/engine/protocol.h"

namespace rec_sdk {

namespace protocol {
inline constexpr size_t kSlotBytes = 64;  // bytes for slots, in front of the records of late rows

inline size_t place_of(const PlanBuffers& p, const int32_t* array) {
  return static_cast<size_t>(reinterpret_cast<const char*>(array) - p.arena());
}
inline float value_of(const char* record) {
  float value;
  std::memcpy(&value, record, sizeof value);
  return value;
}
inline uint64_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline uint64_t content_of(const Block& block) {
  Hash hash;
  hash.add_bytes(block.bytes.data(), block.bytes.size());
  return hash.word();
}
}  // namespace protocol

// Models Transfers.follow_previous_stream.
inline void Protocol::follow() {
  if (has(Bug::kDoesNotFollow)) return;
  if (last_stream_ >= 0 && last_stream_ != stream_) device_.wait(stream_, device_.tail(last_stream_));
  last_stream_ = stream_;
}

// Models Upload.wait.
inline void Protocol::wait(const Arrival& arrival) {
  if (arrival.event.stream < 0) return;
  device_.wait(stream_, arrival.event);
  std::vector<int>& recorded = arrival.memory->recorded;
  const bool known = std::find(recorded.begin(), recorded.end(), stream_) != recorded.end();
  if (!known && !has(Bug::kReusesMemory)) recorded.push_back(stream_);
}

// Models Transfers.upload. torch's allocator gets an event of the copy, and keeps the staging buffer until
// then.
inline Protocol::Arrival Protocol::send(const Buffer& staging) {
  Arrival arrival{device_.take(kInward, Hash{staging->name, 7}.word(), staging->bytes.size()), {}};
  Block* const to = arrival.memory.get();
  Block* const from = staging.get();
  device_.launch(kInward, "a copy to the device", {}, {reads(from), writes(to)}, [=] {
    to->bytes = from->bytes;
    to->content = from->content;
  });
  arrival.event = device_.tail(kInward);
  from->until.push_back(arrival.event);
  return arrival;
}

// Models Transfers.hold_until_used.
inline void Protocol::used(const Buffer& staging) {
  end_uses();
  if (!has(Bug::kReusesStaging)) in_use_.emplace_back(staging, device_.tail(stream_));
}

inline void Protocol::end_uses() {
  const auto over = [this](const std::pair<Buffer, Event>& use) {
    if (!device_.done(use.second)) return false;
    device_.waited(use.second);
    return true;
  };
  in_use_.erase(std::remove_if(in_use_.begin(), in_use_.end(), over), in_use_.end());
}

// Returns an element of an array of the plan; -1 if the array is not on the device yet, which is an error of
// the protocol.
inline int32_t Protocol::number_at(const Block& arena, size_t offset, int64_t i) {
  int32_t number = -1;
  const size_t at = offset + static_cast<size_t>(i) * sizeof number;
  if (at + sizeof number <= arena.bytes.size()) std::memcpy(&number, arena.bytes.data() + at, sizeof number);
  return number;
}

inline float* Protocol::slot_at(const Block& arena, size_t offset, int64_t i) {
  static float nowhere;
  const int32_t slot = number_at(arena, offset, i);
  if (slot >= 0 && slot < kSlots) return &device_.cache[static_cast<size_t>(slot)];
  violation("a kernel reads a plan's slots before they have arrived");
  return &nowhere;
}

// Models Swap._allocate_victim_buffers.
inline void Protocol::make_room(const PlanBuffers& p, Staged* staged) {
  const size_t size = static_cast<size_t>(p.rows_out) * bytes_;
  staged->leaving = device_.take(-1, Hash{6, p.serial}.word(), size);
  staged->rows = scenario_.direct ? staged->leaving : device_.take(stream_, Hash{8, p.serial}.word(), size);
}

// Models ops.swap_rows. `to` [rows_out, bytes] receives the victims.
inline void Protocol::swap(const PlanBuffers& p, const Block* arena, const Block* rows, Block* to) {
  const size_t slots = protocol::place_of(p, p.swap_in_slots), out = protocol::place_of(p, p.swap_out_places);
  const int64_t count = p.rows_in;
  std::vector<Touch> touches = {reads(arena), reads(rows), writes(to)};
  for (int64_t i = 0; i < count; ++i) touches.push_back(writes_slot(p.swap_in_slots[i]));
  const bool overwrites = has(Bug::kWritesFirst);
  device_.launch(stream_, "a swap", {}, std::move(touches), [=] {
    for (int64_t i = 0; i < count; ++i) {
      float* const cached = slot_at(*arena, slots, i);
      const float came = protocol::value_of(&rows->bytes[static_cast<size_t>(i) * bytes_]);
      if (overwrites) *cached = came;
      const int32_t place = number_at(*arena, out, i);
      if (place >= 0) std::memcpy(&to->bytes[static_cast<size_t>(place) * bytes_], cached, sizeof *cached);
      *cached = came;
    }
    to->content = protocol::content_of(*to);
  });
}

// Models Swap._download_victims.
inline Protocol::Departure Protocol::send_out(const Handle& host, const Staged& staged) {
  if (scenario_.direct) {
    used(staged.leaving);
    return {host, staged.leaving, device_.tail(stream_)};
  }
  // The rest models Transfers.download.
  if (!has(Bug::kFetchesEarly)) device_.wait(kOutward, device_.tail(stream_));
  Block* const from = staged.rows.get();
  Block* const to = staged.leaving.get();
  device_.launch(kOutward, "a copy to the host", {}, {reads(from), writes(to)}, [=] {
    to->bytes = from->bytes;
    to->content = from->content;
  });
  const Event event = device_.tail(kOutward);
  to->until.push_back(event);
  if (!has(Bug::kReusesMemory)) from->recorded.push_back(kOutward);
  return {host, staged.leaving, event};
}

// Models ops.scatter_rows. The slots begin at byte `offset` of `slots`, and the records at byte `first` of
// `rows`.
inline void Protocol::scatter(const Block* slots, size_t offset, const Block* rows, size_t first,
                              const std::vector<int32_t>& to) {
  std::vector<Touch> touches = {reads(slots), reads(rows)};
  for (const int32_t slot : to) touches.push_back(writes_slot(slot));
  const int64_t count = static_cast<int64_t>(to.size());
  device_.launch(stream_, "a scatter", {}, std::move(touches), [=] {
    for (int64_t i = 0; i < count; ++i) {
      *slot_at(*slots, offset, i) = protocol::value_of(&rows->bytes[first + static_cast<size_t>(i) * bytes_]);
    }
  });
}

// Models Swap._launch_swap.
inline void Protocol::write(const PlanBuffers& p, const Staged& staged) {
  if (staged.records.memory == nullptr) return;
  std::vector<int32_t> slots(p.swap_in_slots, p.swap_in_slots + p.rows_in);
  if (!has(Bug::kScattersEarly)) wait(staged.records);
  const Block* const arena = staged.arena.memory.get();
  const Block* const records = staged.records.memory.get();
  if (staged.leaving == nullptr) {
    scatter(arena, protocol::place_of(p, p.swap_in_slots), records, 0, slots);
  } else {
    swap(p, arena, records, staged.rows.get());
  }
  if (staged.late_rows.memory != nullptr) {
    slots.clear();
    for (const int32_t place : staged.late) slots.push_back(p.swap_in_slots[place]);
    wait(staged.late_rows);
    const Block* const late = staged.late_rows.memory.get();
    scatter(late, 0, late, protocol::kSlotBytes, slots);
  }
  if (scenario_.direct) used(staged.records.memory);
}

// Models Group.lookup, and checks that each row has the weight that a run on one thread would read.
inline void Protocol::launch_lookup(const Made& made) {
  const PlanBuffers& p = **made.host;
  const Block* const arena = made.arena.memory.get();
  const size_t offset = protocol::place_of(p, p.slots), batch = made.batch;
  const std::vector<int64_t> ids = scenario_.batches[batch].ids;
  std::vector<float> expected;
  Hash hash;
  std::vector<Touch> touches = {reads(arena)};
  for (size_t i = 0; i < ids.size(); ++i) {
    expected.push_back(weight(ids[i]));
    hash.add(protocol::bits_of(expected.back()));
    touches.push_back(reads_slot(p.slots[i]));
  }
  device_.launch(stream_, "a lookup", {hash.word(), batch}, std::move(touches), [=] {
    for (size_t i = 0; i < expected.size(); ++i) {
      const float found = *slot_at(*arena, offset, static_cast<int64_t>(i));
      if (protocol::bits_of(found) == protocol::bits_of(expected[i])) continue;
      violation("batch " + std::to_string(batch) + " reads " + std::to_string(found) + " for id " +
                std::to_string(ids[i]) + ", which is " + std::to_string(expected[i]));
    }
  });
}

// Models Group.update. It adds a number to each distinct row of the batch; every batch adds a different
// number.
inline void Protocol::launch_update(const Made& made) {
  const PlanBuffers& p = **made.host;
  const Block* const arena = made.arena.memory.get();
  const size_t offset = protocol::place_of(p, p.unique_slots);
  const float change = static_cast<float>(1 << (made.batch + 2));
  const int64_t count = p.uniques;
  std::vector<Touch> touches = {reads(arena)};
  for (int64_t i = 0; i < count; ++i) touches.push_back(writes_slot(p.unique_slots[i]));
  device_.launch(stream_, "an update", {made.batch}, std::move(touches), [=] {
    for (int64_t i = 0; i < count; ++i) *slot_at(*arena, offset, i) += change;
  });
  const std::vector<int64_t>& ids = scenario_.batches[made.batch].ids;
  for (const int64_t id : std::set<int64_t>(ids.begin(), ids.end())) weight(id) += change;
}

}  // namespace rec_sdk

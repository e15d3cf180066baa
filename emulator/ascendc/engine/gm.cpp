#include "emulator/ascendc/engine/gm.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>

#include "emulator/ascendc/engine/text.h"

namespace rec_sdk::emulator {
namespace {

uint64_t address_of(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

}  // namespace

void GlobalMemory::begin_launch(const std::vector<Buffer>& buffers, int32_t time) {
  launch_ = limit_of(time);
  begin_phase(time);
  begin_segment(time);
  latest_ = nullptr;
  ranges_.clear();
  for (const Buffer& buffer : buffers) {
    if (buffer.bytes == 0 || buffer.device == nullptr) {
      continue;
    }
    const uint64_t begin = address_of(buffer.device), end = begin + buffer.bytes;
    const uint64_t first = begin / kCacheLine, last = (end - 1) / kCacheLine;
    Range range{buffer, begin, end, first, {}};
    range.buffer.host = buffer.host != nullptr ? buffer.host : const_cast<void*>(buffer.device);
    if (buffer.access != Access::kRead) {
      range.chunks.resize((last - first) / kChunkLines + 1);
    }
    if (buffer.access == Access::kWrite) {
      std::memset(range.buffer.host, 0xff, buffer.bytes);
    }
    ranges_.push_back(std::move(range));
  }
  // Writable buffers come first: an access to a read-only buffer inside of a writable buffer counts as an
  // access to the latter.
  std::stable_partition(ranges_.begin(), ranges_.end(),
                        [](const Range& range) { return range.buffer.access != Access::kRead; });
}

void GlobalMemory::end_launch() {
  ranges_.clear();
  used_chunks_ = 0;
  lines_.clear();
  others_.clear();
}

uint64_t GlobalMemory::first_missing(const Range& range) const {
  if (range.buffer.access != Access::kWrite) {
    return UINT64_MAX;
  }
  for (uint64_t address = range.begin; address < range.end; address += kCacheLine - address % kCacheLine) {
    const uint64_t number = address / kCacheLine, offset = number - range.first_line;
    const uint64_t left = range.end - number * kCacheLine;
    const uint64_t bytes = mask_between(address % kCacheLine, left < kCacheLine ? left : kCacheLine);
    const GmChunk* chunk = range.chunks[offset / kChunkLines];
    const uint64_t missed =
        chunk == nullptr ? bytes : bytes & ~filled(number, (*chunk)[offset % kChunkLines]);
    if (missed != 0) {
      return byte_of(range, number, missed);
    }
  }
  return UINT64_MAX;
}

uint64_t GlobalMemory::filled(uint64_t number, const GmRecord& record) const {
  if (is_long(number, record)) {
    return filled(lines_[static_cast<uint32_t>(record.write)]);
  }
  return record.read != GmRecord::kLong && record.write > launch_ ? UINT64_MAX : 0;
}

std::string GlobalMemory::unwritten_output() const {
  for (const Range& range : ranges_) {
    const uint64_t byte = first_missing(range);
    if (byte != UINT64_MAX) {
      return text("byte %lu of '%s', an output of %lu bytes", byte, range.buffer.name,
                  range.end - range.begin);
    }
  }
  return "";
}

void GlobalMemory::forget_times() {
  for (const auto& chunk : chunks_) {
    std::memset(chunk.get(), 0, sizeof(GmChunk));
  }
}

std::pair<uint8_t*, GlobalMemory::Range*> GlobalMemory::resolve(Core& core, uint64_t address,
                                                                uint64_t bytes) {
  const auto holds = [&](const Range& range) {
    return address >= range.begin && address <= range.end && bytes <= range.end - address;
  };
  if (latest_ == nullptr || !holds(*latest_)) {
    latest_ = nullptr;
    for (Range& range : ranges_) {
      if (holds(range)) {
        latest_ = &range;
        break;
      }
    }
    if (latest_ == nullptr) {
      out_of_bounds(core, address, bytes);
    }
  }
  return {static_cast<uint8_t*>(latest_->buffer.host) + (address - latest_->begin), latest_};
}

void GlobalMemory::out_of_bounds(Core& core, uint64_t address, uint64_t bytes) const {
  std::string known;
  for (const Range& range : ranges_) {
    known +=
        text("%s'%s' [%#lx, %#lx)", known.empty() ? "" : ", ", range.buffer.name, range.begin, range.end);
    if (address >= range.begin && address < range.end) {
      core.fail(text("touches bytes %lu to %lu of '%s', which has %lu", address - range.begin,
                     address - range.begin + bytes, range.buffer.name, range.end - range.begin));
    }
  }
  core.fail(text("touches global memory [%#lx, %#lx), which is in no buffer of this launch: %s", address,
                 address + bytes, known.c_str()));
}

GmRecord& GlobalMemory::record(Range& range, uint64_t number) {
  const uint64_t offset = number - range.first_line;
  GmChunk*& chunk = range.chunks[offset / kChunkLines];
  if (chunk == nullptr) {
    if (used_chunks_ == chunks_.size()) {
      chunks_.push_back(std::unique_ptr<GmChunk>(new GmChunk[1]()));
    }
    chunk = chunks_[used_chunks_++].get();
  }
  return (*chunk)[offset % kChunkLines];
}

// Prefetches the lines of a row. Rows are scattered in memory, so without prefetches their lines would be
// loaded one after another.
void GlobalMemory::prefetch(Range& range, uint64_t address, uint64_t bytes, const uint8_t* host) {
  constexpr uint64_t kMostLines = 32;
  const uint64_t first = address / kCacheLine, lines = (address + bytes - 1) / kCacheLine - first;
  __builtin_prefetch(&record(range, first), 1);
  for (uint64_t i = 0; i <= lines && i < kMostLines; ++i) {
    __builtin_prefetch(host + i * kCacheLine);
  }
}

uint8_t* GlobalMemory::writable(Core& core, uint64_t address, uint64_t bytes, Range*& range) {
  uint8_t* host;
  std::tie(host, range) = resolve(core, address, bytes);
  if (range->buffer.access == Access::kRead) {
    latest_ = nullptr;  // the range was found without a comparison with the other ranges
    std::tie(host, range) = resolve(core, address, bytes);
  }
  if (range->buffer.access == Access::kRead) {
    core.fail(text("writes to '%s', which this launch may only read", range->buffer.name));
  }
  return host;
}

}  // namespace rec_sdk::emulator

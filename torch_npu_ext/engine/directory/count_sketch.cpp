#include "torch_npu_ext/engine/directory/count_sketch.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace rec_sdk {
namespace {

// The header of a saved state, followed by the cells: four little-endian int64.
struct StateHeader {
  int64_t width, depth, cell_bytes, counted;
};

// The two functions below copy a cell whose size is known at compile time. With any other size, memcpy would
// be a function call.
template <class Cell>
uint32_t read_as(const uint8_t* bytes) {
  Cell value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}
template <class Cell>
void write_as(uint8_t* bytes, uint32_t value) {
  const Cell cell = static_cast<Cell>(value);
  std::memcpy(bytes, &cell, sizeof(cell));
}

uint32_t read_cell(const uint8_t* bytes, int64_t cell_bytes) {
  if (cell_bytes == 1) return *bytes;
  return cell_bytes == 2 ? read_as<uint16_t>(bytes) : read_as<uint32_t>(bytes);
}

void write_cell(uint8_t* bytes, int64_t cell_bytes, uint32_t value) {
  if (cell_bytes == 1) {
    *bytes = static_cast<uint8_t>(value);
  } else if (cell_bytes == 2) {
    write_as<uint16_t>(bytes, value);
  } else {
    write_as<uint32_t>(bytes, value);
  }
}

StateHeader header_of(const std::vector<uint8_t>& state) {
  StateHeader header{};
  if (state.size() >= sizeof(header)) std::memcpy(&header, state.data(), sizeof(header));
  const auto within = [](int64_t value, int64_t most) { return value >= 1 && value <= most; };
  const int64_t most = static_cast<int64_t>(state.size());
  const bool valid =
      within(header.width, most) && within(header.depth, most / std::max<int64_t>(1, header.width)) &&
      (header.cell_bytes == 1 || header.cell_bytes == 2 || header.cell_bytes == 4) && header.counted >= 0;
  const SketchShape shape{header.width, header.depth, header.cell_bytes};
  if (!valid || shape.bytes() + static_cast<int64_t>(sizeof(header)) != most) {
    throw std::invalid_argument("not the state of a sketch: its " + std::to_string(state.size()) +
                                " bytes do not fit its shape");
  }
  return header;
}

// Returns value * to / from, rounded down, or rounded up with more = from - 1.
int64_t scaled(int64_t value, int64_t to, int64_t from, int64_t more = 0) {
  return static_cast<int64_t>((static_cast<__int128>(value) * to + more) / from);
}

}  // namespace

SketchShape SketchShape::of(int64_t bytes, int64_t depth, uint32_t enough) {
  const int64_t cell_bytes = enough < 256 ? 1 : enough < 65536 ? 2 : 4;
  return {std::max<int64_t>(1, bytes / (depth * cell_bytes)), depth, cell_bytes};
}

CountSketch::CountSketch(const SketchShape& shape)
    : shape_(shape),
      bytes_(static_cast<size_t>(shape.bytes()), pages_of_array(static_cast<size_t>(shape.bytes()))) {
  for (int64_t r = 0; r < shape.depth; ++r) seeds_.push_back(seed(r));
}

uint32_t CountSketch::get(uint64_t cell) const {
  return read_cell(&bytes_[cell * cell_bytes()], shape_.cell_bytes);
}

void CountSketch::set(uint64_t cell, uint32_t value) noexcept {
  write_cell(&bytes_[cell * cell_bytes()], shape_.cell_bytes, value);
}

size_t CountSketch::extend(int64_t ids, Log* log) const {
  const size_t first = log->cells.size(), size = first + static_cast<size_t>(ids) * seeds_.size();
  log->before.resize(
      size);  // resized before `cells`, over which undo() iterates, in case that resizing `cells` throws
  log->cells.resize(size);
  return first;
}

// Members are copied to local variables, because the compiler must assume that the written bytes alias
// members.
template <class Cell>
uint32_t CountSketch::least(const uint64_t* cells) const {
  const uint8_t* const bytes = bytes_.data();
  const size_t depth = seeds_.size();
  uint32_t least = std::numeric_limits<uint32_t>::max();
  for (size_t r = 0; r < depth; ++r) least = std::min(least, read_as<Cell>(bytes + cells[r] * sizeof(Cell)));
  return least;
}

template <class Cell>
void CountSketch::raise(const uint64_t* cells, uint32_t shows, uint32_t* before) noexcept {
  uint8_t* const bytes = bytes_.data();
  const size_t depth = seeds_.size();
  uint32_t least = std::numeric_limits<uint32_t>::max();
  for (size_t r = 0; r < depth; ++r) {
    before[r] = read_as<Cell>(bytes + cells[r] * sizeof(Cell));
    least = std::min(least, before[r]);
  }
  constexpr uint32_t kMost = std::numeric_limits<Cell>::max();
  const uint32_t now = shows < kMost - least ? least + shows : kMost;
  for (size_t r = 0; r < depth; ++r) {
    write_as<Cell>(bytes + cells[r] * sizeof(Cell), std::max(before[r], now));
  }
}

uint32_t CountSketch::estimate(const uint64_t* cells) const {
  if (shape_.cell_bytes == 1) return least<uint8_t>(cells);
  return shape_.cell_bytes == 2 ? least<uint16_t>(cells) : least<uint32_t>(cells);
}

void CountSketch::add(const uint64_t* cells, uint32_t shows, uint32_t* before) noexcept {
  counted_ += shows;
  if (shape_.cell_bytes == 1) {
    raise<uint8_t>(cells, shows, before);
  } else if (shape_.cell_bytes == 2) {
    raise<uint16_t>(cells, shows, before);
  } else {
    raise<uint32_t>(cells, shows, before);
  }
}

uint32_t CountSketch::estimate(int64_t id) const {
  std::vector<uint64_t> cells(seeds_.size());
  find(id, cells.data());
  return estimate(cells.data());
}

void CountSketch::add(int64_t id, uint32_t shows, Log* log) {
  const size_t first = extend(1, log);
  find(id, &log->cells[first]);
  add(&log->cells[first], shows, &log->before[first]);
}

void CountSketch::undo(const Log& log, int64_t shows) noexcept {
  for (size_t c = log.cells.size(); c-- > 0;) set(log.cells[c], log.before[c]);
  counted_ -= shows;
}

// The count of a saturated cell may be higher than its value. Halving the value is harmless, because the ids
// of the cell were admitted before it saturated.
void CountSketch::halve() noexcept {
  for (uint64_t c = 0; c < static_cast<uint64_t>(shape_.cells()); ++c) set(c, get(c) / 2);
  counted_ /= 2;
}

void CountSketch::clear() noexcept {
  std::memset(bytes_.data(), 0, static_cast<size_t>(bytes()));
  counted_ = 0;
}

std::vector<uint8_t> CountSketch::state() const {
  const StateHeader header{shape_.width, shape_.depth, shape_.cell_bytes, counted_};
  std::vector<uint8_t> state(sizeof(header) + static_cast<size_t>(bytes()));
  std::memcpy(state.data(), &header, sizeof(header));
  std::memcpy(state.data() + sizeof(header), bytes_.data(), static_cast<size_t>(bytes()));
  return state;
}

void CountSketch::set_states(const std::vector<std::vector<uint8_t>>& states) {
  for (const std::vector<uint8_t>& state : states) header_of(state);
  clear();
  for (const std::vector<uint8_t>& state : states) {
    const StateHeader header = header_of(state);
    const SketchShape other{header.width, header.depth, header.cell_bytes};
    const uint8_t* const cells = state.data() + sizeof(header);
    counted_ = std::max(counted_, scaled(header.counted, shape_.width, other.width));
    // The true count of a saturated cell is unknown, and so are the counts in rows that the saved sketch does
    // not have; both are overestimated.
    const auto value_of = [&](int64_t place) {
      const uint32_t value = read_cell(cells + place * other.cell_bytes, other.cell_bytes);
      return value == other.full() ? shape_.full() : std::min(value, shape_.full());
    };
    uint32_t most = 0;
    for (int64_t c = 0; c < other.cells(); ++c) most = std::max(most, value_of(c));
    for (int64_t r = 0; r < shape_.depth; ++r) {
      for (int64_t j = 0; j < shape_.width; ++j) {
        const uint64_t place = static_cast<uint64_t>(r * shape_.width + j);
        uint32_t value = get(place);
        if (r >= other.depth) {
          value = std::max(value, most);
        } else {  // examine the saved cells that may share an id with this cell
          const int64_t end = scaled(j + 1, other.width, shape_.width, shape_.width - 1);
          for (int64_t k = scaled(j, other.width, shape_.width); k < end; ++k) {
            value = std::max(value, value_of(r * other.width + k));
          }
        }
        set(place, value);
      }
    }
  }
}

}  // namespace rec_sdk

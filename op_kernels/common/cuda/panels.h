// Rows wider than a team can hold are cut into panels of columns; each panel has its own team. So a few wide
// rows keep as many threads busy as many narrow rows.
#pragma once

#include <cstdint>

#include "op_kernels/common/cuda/launch.h"

namespace rec_sdk {
namespace cuda {

struct Panels {
  int width;      // threads of a team
  int64_t count;  // panels of each row
};

// Returns the panels of rows of `columns` columns, for teams of `width` threads with `elements` columns each.
constexpr Panels panels_of(int64_t columns, int elements, int width) {
  const int64_t panel = static_cast<int64_t>(width) * elements;
  return {width, (columns + panel - 1) / panel};
}

constexpr Panels panels_of(int64_t columns, int elements) {
  return panels_of(columns, elements, team_width(columns, elements));
}

// A thread's position in item `index`. The items are the panels of row 0, then the panels of row 1, ...
struct PanelPlace {
  int64_t row, column;

  __device__ __forceinline__ PanelPlace(const Panels& panels, int64_t index, int lane, int elements)
      : row(panels.count == 1 ? index : index / panels.count),
        column(((index - row * panels.count) * panels.width + lane) * elements) {}
};

}  // namespace cuda
}  // namespace rec_sdk

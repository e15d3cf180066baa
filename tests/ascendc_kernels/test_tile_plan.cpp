// Checks that the planned tiles of an update fit into UB at any width of rows, and that wider tiles would
// not.
#include <initializer_list>

#include "op_kernels/common/ascendc/tile_plan.h"
#include "tests/engine/check.h"

using rec_sdk::ascendc::BesideTile;
using rec_sdk::ascendc::plan_tiles;
using rec_sdk::ascendc::RecordShape;
using rec_sdk::ascendc::RowNeeds;
using rec_sdk::ascendc::TilePlan;

namespace {

constexpr int64_t kOtherBytes = 24576;  // the maximum size of index windows

int64_t bytes_of(const RecordShape& shape, RowNeeds needs, const BesideTile& beside, const TilePlan& plan) {
  const int64_t of_rows =
      needs.sums > 0 ? rec_sdk::ascendc::row_value_bytes(shape, needs, plan.rows, plan.pitch) : 0;
  return rec_sdk::ascendc::tile_bytes(shape, beside.planes, plan.rows, plan.pitch) + of_rows +
         rec_sdk::ascendc::sum_bytes(plan.pitch, plan.levels) + 4 * beside.shared * plan.pitch + beside.bytes;
}

void check(const RecordShape& shape, RowNeeds needs, const BesideTile& beside, int64_t lookups) {
  const TilePlan plan = plan_tiles(shape, needs, beside, lookups, 1000);
  CHECK(plan.rows >= 1 && plan.width >= 1 && plan.width <= plan.pitch);
  CHECK(bytes_of(shape, needs, beside, plan) <= rec_sdk::ascendc::kUbBytes);
  if (plan.width >= shape.dim) return;
  using rec_sdk::ascendc::kLanes;
  CHECK(plan.width % kLanes == 0);
  const int64_t tiles = rec_sdk::ascendc::ceil_div(shape.dim, plan.width);
  // A plan that covers all columns with one tile less. Its pitch avoids bank conflicts between rows.
  TilePlan wider = plan;
  wider.rows = 1;
  wider.pitch = rec_sdk::ascendc::align_up(rec_sdk::ascendc::ceil_div(shape.dim, tiles - 1), kLanes) + kLanes;
  CHECK(bytes_of(shape, needs, beside, wider) > rec_sdk::ascendc::kUbBytes);
}

// Checks narrowest_tile_bytes, which UpdateTiles uses at compile time: the bytes grow with the needs of a
// tile, and for wide rows they are the size of the narrowest plan.
void check_narrowest() {
  using rec_sdk::ascendc::narrowest_tile_bytes;
  const RecordShape wide{1 << 24, 0, 4, 3, 2, 0, 0, true};
  const BesideTile beside{4, 1, kOtherBytes}, huge{4000, 1, kOtherBytes};
  CHECK(narrowest_tile_bytes(wide, {2, 6}, beside, INT32_MAX) <= rec_sdk::ascendc::kUbBytes);
  CHECK(narrowest_tile_bytes(wide, {2, 6}, huge, INT32_MAX) > rec_sdk::ascendc::kUbBytes);
  const TilePlan narrowest{1, rec_sdk::ascendc::kLanes,
                           rec_sdk::ascendc::tile_pitch(wide, {2, 6}, rec_sdk::ascendc::kLanes), 0,
                           rec_sdk::ascendc::sum_levels(INT32_MAX)};
  CHECK(narrowest_tile_bytes(wide, {2, 6}, beside, INT32_MAX) == bytes_of(wide, {2, 6}, beside, narrowest));
}

}  // namespace

int main() {
  check_narrowest();
  for (const int64_t dim : {1, 16, 100, 1000, 4096, 5000, 20000, 42000, 45000, 100000, 1 << 20, 1 << 24}) {
    for (const int64_t weight_bytes : {2, 4}) {
      for (int64_t states = 0; states < 4; ++states) {
        for (const int64_t sums : {0, 2}) {
          const RecordShape shape{dim, 0, weight_bytes, states, sums};
          for (const int64_t shared : {0, 1}) {
            check(shape, {sums, 3 * sums}, {4, shared, kOtherBytes}, 1 << 20);
          }
        }
      }
    }
  }
  return check_result();
}

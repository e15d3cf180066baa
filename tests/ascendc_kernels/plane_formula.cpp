// An update whose formula has REC_SDK_RESULTS intermediate results at once: compiles as long as there are
// planes.
#include "op_kernels/common/ascendc/update_tiles.h"

namespace {

struct Nested : rec_sdk::REC_SDK_ISA::ElementwiseOptimizer {
  static constexpr int kElementStates = 0;
  explicit constexpr Nested(const float*) {}

  template <class T>
  constexpr void element(T& w, T*, const T& g, rec_sdk::REC_SDK_ISA::NoValues) const {
    nest<REC_SDK_RESULTS>(w, g);
  }

 private:
  template <int kLeft, class T>
  constexpr void nest(T& w, const T& g) const {
    if constexpr (kLeft > 0) {
      const T result = g + 1.0f;
      nest<kLeft - 1>(w, result);
      w -= result;
    }
  }
};

}  // namespace

void update(AscendC::TPipe* pipe, const rec_sdk::ascendc::RowsToUpdate& rows) {
  rec_sdk::ascendc::UpdateTiles<Nested, rec_sdk::ascendc::FloatWeights> tiles;
  tiles.run(pipe, rows);
}

#include "op_kernels/common/cuda/kernels.h"
#include "op_kernels/common/cuda/move_rows.h"

namespace rec_sdk {
namespace cuda {

cudaError_t scatter_rows(const CopyRows& a, cudaStream_t stream) {
  return launch_moves(GatherOrScatter<false>(a), stream);
}

}  // namespace cuda
}  // namespace rec_sdk

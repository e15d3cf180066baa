// The emulator's cost, per core, copy and instruction. This fails only when something is slow by an order of
// magnitude.
#include <ctime>

#include "support.h"

namespace {

// Seconds of the processor, not of the clock on the wall: other work on the machine counts less.
double seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <class Work>
double nanoseconds(int64_t repetitions, Work work) {
  double best = 1e30;
  for (int i = 0; i < 3; ++i) {
    const double start = seconds();
    work();
    const double took = (seconds() - start) * 1e9 / static_cast<double>(repetitions);
    best = took < best ? took : best;
  }
  return best;
}

void report(const char* what, double measured, double allowed) {
  std::printf("%-44s %9.1f ns\n", what, measured);
  if (measured > allowed) {
    ++check_failures;
    std::fprintf(stderr, "%s: more than %.0f ns\n", what, allowed);
  }
}

void measure_launches() {
  constexpr int kLaunches = 1000;
  const auto launches = [](const std::function<void()>& kernel) {
    return nanoseconds(kLaunches * 48, [&] {
      for (int i = 0; i < kLaunches; ++i) rec_sdk::emulator::run_kernel("launch", 48, {}, kernel);
    });
  };
  report("a core that does nothing", launches([] {}), 2000);
  report("a core with a TPipe and a queue", launches([] {
           TPipe pipe;
           TQue<TPosition::VECIN, 1> queue;
           pipe.InitBuffer(queue, 2, 1024);
         }),
         5000);
  report("a core with a SyncAll", launches([] { SyncAll(); }), 20000);
}

struct Rows {
  Global<float>& in;
  Global<float>& out;
  int64_t rows, dim;
};

// Rows in a scattered order through a queue, packed into copies out.
void gather_rows(const Rows& a) {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
  constexpr uint32_t kTile = 16384;
  pipe.InitBuffer(queue, 2, kTile);
  const auto bytes = static_cast<uint32_t>(a.dim * 4);
  const int64_t pitch = (a.dim + 7) / 8 * 8, tile = kTile / 4 / pitch;
  const int64_t begin = a.rows * GetBlockIdx() / GetBlockNum(),
                end = a.rows * (GetBlockIdx() + 1) / GetBlockNum();
  const auto in = a.in.tensor(), out = a.out.tensor();
  for (int64_t row = begin; row < end; row += tile) {
    const int64_t count = end - row < tile ? end - row : tile;
    auto tensor = queue.AllocTensor<float>();
    for (int64_t i = 0; i < count; ++i) {
      const auto from = static_cast<uint64_t>((row + i) * 7919 % a.rows * a.dim);
      DataCopyPad(tensor[static_cast<uint32_t>(i * pitch)], in[from], {1, bytes, 0, 0, 0},
                  {false, 0, 0, 0.0f});
    }
    queue.EnQue(tensor);
    tensor = queue.DeQue<float>();
    DataCopyPad(out[static_cast<uint64_t>(row * a.dim)], tensor,
                {static_cast<uint16_t>(count), bytes, 0, 0, 0});
    queue.FreeTensor(tensor);
  }
}

// As gather_rows, with rows of a buffer that may be written, in place.
void rewrite_rows(const Rows& a) {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
  pipe.InitBuffer(queue, 2, static_cast<uint32_t>(a.dim * 4));
  const auto bytes = static_cast<uint32_t>(a.dim * 4);
  const auto out = a.out.tensor();
  for (int64_t row = GetBlockIdx(); row < a.rows; row += GetBlockNum()) {
    const auto at = static_cast<uint64_t>(row * 7919 % a.rows * a.dim);
    auto tensor = queue.AllocTensor<float>();
    DataCopyPad(tensor, out[at], {1, bytes, 0, 0, 0}, {false, 0, 0, 0.0f});
    queue.EnQue(tensor);
    tensor = queue.DeQue<float>();
    DataCopyPad(out[at], tensor, {1, bytes, 0, 0, 0});
    queue.FreeTensor(tensor);
  }
}

void measure_copies() {
  constexpr int64_t kRows = 50000;
  for (const int64_t dim : {1, 8, 64, 128}) {
    Global<float> in("in", kRows * dim, Access::kRead, 1.0f), out("out", kRows * dim, Access::kReadWrite);
    const Rows rows{in, out, kRows, dim};
    const std::string of = " rows of " + std::to_string(dim) + " floats";
    report(
        ("gather," + of).c_str(),
        nanoseconds(kRows,
                    [&] { CHECK_PASSES(run([&] { gather_rows(rows); }, {in.buffer(), out.buffer()}, 48)); }),
        3000);
    report(("read and write back," + of).c_str(),
           nanoseconds(kRows, [&] { CHECK_PASSES(run([&] { rewrite_rows(rows); }, {out.buffer()}, 48)); }),
           6000);
  }
}

void measure_vector() {
  constexpr int64_t kRepetitions = 20000;
  for (const int32_t count : {8, 64, 128, 1024, 8192}) {
    report(("Axpy and a barrier, " + std::to_string(count) + " floats").c_str(),
           nanoseconds(kRepetitions,
                       [&] {
                         CHECK_PASSES(run([&] {
                           LocalMemAllocator<> allocator;
                           const auto x = allocator.Alloc<float>(static_cast<uint32_t>(count));
                           const auto sum = allocator.Alloc<float>(static_cast<uint32_t>(count));
                           Duplicate(x, 1.0f, count);
                           Duplicate(sum, 0.0f, count);
                           for (int64_t i = 0; i < kRepetitions; ++i) {
                             PipeBarrier<PIPE_V>();
                             Axpy(sum, x, 0.5f, count);
                           }
                         }));
                       }),
           30000);
  }
  report("GetValue of local memory",
         nanoseconds(kRepetitions,
                     [&] {
                       CHECK_PASSES(run([&] {
                         LocalMemAllocator<> allocator;
                         const auto x = allocator.Alloc<float, 8>();
                         x.SetValue(3, 1.0f);
                         float sum = 0;
                         for (int64_t i = 0; i < kRepetitions; ++i) sum += x.GetValue(3);
                         CHECK(sum == kRepetitions);
                       }));
                     }),
         1000);
}

}  // namespace

int main() {
  measure_launches();
  measure_copies();
  measure_vector();
  return check_result();
}

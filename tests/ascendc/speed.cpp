// Measures the emulator's time per core, copy and instruction. The limits are so high that the program fails
// only if something is slower than expected by an order of magnitude.
#include <algorithm>
#include <ctime>

#include "support.h"

namespace {

// Returns processor time in seconds, which other work on the machine affects less than wall-clock time.
double seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Prints the time of one repetition, from the fastest of three launches, and reports a failure above
// `allowed` nanoseconds.
template <class Kernel>
void measure(const std::string& what, double allowed, int64_t repetitions, const Launch& launch,
             const Kernel& kernel) {
  double best = 1e30;
  for (int i = 0; i < 3; ++i) {
    const double start = seconds();
    passes(launch, kernel);
    best = std::min(best, (seconds() - start) * 1e9 / static_cast<double>(repetitions));
  }
  std::printf("%-44s %9.1f ns\n", what.c_str(), best);
  if (best <= allowed) return;
  ++check_failures;
  std::fprintf(stderr, "%s: more than %.0f ns\n", what.c_str(), allowed);
}

void measure_cores() {
  constexpr int64_t kCores = 48000;
  measure("a core that does nothing", 2000, kCores, {{}, kCores}, [] {});
  measure("a core with a TPipe and a queue", 5000, kCores, {{}, kCores}, [](TPipe& pipe) {
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 2, 1024);
  });
  measure("a SyncAll of a core", 20000, 48 * 1000, {{}, 48}, [] {
    for (int i = 0; i < 1000; ++i) SyncAll();
  });
}

struct Rows {
  Global<float>& in;
  Global<float>& out;
  int64_t rows, dim;
};

// Reads rows in scattered order through a queue, and writes each tile of them with one copy.
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

// Like gather_rows, but reads each row from a writable buffer and writes it back in place.
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
    measure("gather," + of, 3000, kRows, {{in.buffer(), out.buffer()}, 48}, [&] { gather_rows(rows); });
    measure("read and write back," + of, 6000, kRows, {{out.buffer()}, 48}, [&] { rewrite_rows(rows); });
  }
}

void measure_vector() {
  constexpr int64_t kRepetitions = 20000;
  for (const uint32_t count : {8u, 64u, 128u, 1024u, 8192u}) {
    const std::string what = "Axpy and a barrier, " + std::to_string(count) + " floats";
    measure(what, 30000, kRepetitions, {}, [&](Ub& ub) {
      const auto x = ub.Alloc<float>(count), sum = ub.Alloc<float>(count);
      Duplicate(x, 1.0f, static_cast<int32_t>(count));
      Duplicate(sum, 0.0f, static_cast<int32_t>(count));
      for (int64_t i = 0; i < kRepetitions; ++i) {
        PipeBarrier<PIPE_V>();
        Axpy(sum, x, 0.5f, static_cast<int32_t>(count));
      }
    });
  }
  measure("GetValue of local memory", 1000, kRepetitions, {}, [](Ub& ub) {
    const auto x = ub.Alloc<float, 8>();
    x.SetValue(3, 1.0f);
    float sum = 0;
    for (int64_t i = 0; i < kRepetitions; ++i) sum += x.GetValue(3);
    CHECK(sum == kRepetitions);
  });
}

}  // namespace

int main() {
  measure_cores();
  measure_copies();
  measure_vector();
  return check_result();
}

// Admission by a sketch: the shows of ids without a row are counted in a count-min sketch of `bytes` bytes.
// Its counts may be too high, but never too low. An id gets a row in the batch in which alpha * shows reaches
// the threshold, or earlier. All cells are halved whenever the sketch has counted `halve_after` shows (0:
// never).
#include <algorithm>
#include <cmath>
#include <limits>

#include "torch_npu_ext/engine/rules/admission.h"

namespace rec_sdk {
namespace {

class SketchAdmission final : public Admission {
 public:
  SketchAdmission(const SketchShape& shape, double threshold, double alpha, int64_t halve_after)
      : sketch_(shape), threshold_(threshold), alpha_(alpha), halve_after_(halve_after) {}

  // Sets `place` of each lookup to the index of its first cell in the log.
  void count(const Batch& batch, const Batch::Piece& piece, const TableClock&, size_t first,
             std::vector<UnknownLookup>* lookups, LifecycleLog* log) override {
    const int64_t depth = sketch_.shape().depth, shift = piece.source - piece.begin;
    UnknownLookup* const begin = lookups->data() + first;
    UnknownLookup* const end = lookups->data() + lookups->size();
    const int64_t unknown = std::count_if(begin, end, [](const UnknownLookup& one) { return !one.known(); });
    int64_t next = static_cast<int64_t>(sketch_.extend(unknown, &log->sketch));
    uint64_t* const cells = log->sketch.cells.data();
    uint32_t* const before = log->sketch.before.data();
    const auto prepare = [&](UnknownLookup* one) __attribute__((always_inline)) {
      one->place = next;
      sketch_.find(one->id, cells + next);
      sketch_.prefetch(cells + next);
      next += depth;
    };
    const auto add = [&](UnknownLookup* one) __attribute__((always_inline)) {
      const uint32_t shows = batch.shows_of(one->lookup + shift);
      sketch_.add(cells + one->place, shows, before + one->place);
      log->sketched += shows;
    };
    for_each_unknown(begin, end, prepare, add);
  }
  size_t accept(const LifecycleLog& log, uint32_t slot, std::vector<UnknownLookup>* lookups,
                uint32_t* local) const noexcept override {
    const uint64_t* const cells = log.sketch.cells.data();
    const double threshold = threshold_, alpha = alpha_;
    const auto fetch = [&](const UnknownLookup& one) { sketch_.prefetch(cells + one.place); };
    return accept_if(slot, lookups, local, fetch, [&](const UnknownLookup& one) {
      return alpha * sketch_.estimate(cells + one.place) >= threshold;
    });
  }
  void admit(LifecycleLog* log) noexcept
      override {  // the counts are estimates, because other ids may share the cells
    for (LifecycleLog::Admitted& one : log->admitted) {
      one.values.count = sketch_.estimate(log->sketch.cells.data() + one.place);
    }
  }
  void undo(const LifecycleLog& log) noexcept override { sketch_.undo(log.sketch, log.sketched); }

  bool set_candidates(const std::vector<LifecycleLog::Counted>& wanted) override {
    sketch_.clear();
    CountSketch::Log log;
    for (const LifecycleLog::Counted& one : wanted) {
      log.clear();
      sketch_.add(one.id, one.values.count, &log);
    }
    return true;
  }
  int64_t bytes() const override { return sketch_.bytes(); }
  void clear() override { sketch_.clear(); }
  bool halves(int64_t planned) const override {
    return halve_after_ > 0 && sketch_.counted() - planned >= halve_after_;
  }
  void halve() noexcept override { sketch_.halve(); }
  std::vector<uint8_t> state() const override { return sketch_.state(); }
  bool set_states(const std::vector<std::vector<uint8_t>>& states) override {
    sketch_.set_states(states);
    return true;
  }

 private:
  CountSketch sketch_;
  double threshold_, alpha_;
  int64_t halve_after_;
};

// Returns the smallest count that admits an id, but at most 2^32 - 1.
uint32_t enough(double threshold, double alpha) {
  constexpr double kMost = std::numeric_limits<uint32_t>::max();
  uint32_t count = static_cast<uint32_t>(std::clamp(std::floor(threshold / alpha), 0.0, kMost));
  while (count > 0 && alpha * (count - 1) >= threshold) --count;
  while (count < std::numeric_limits<uint32_t>::max() && alpha * count < threshold) ++count;
  return count;
}

}  // namespace

std::unique_ptr<Rule> make_sketch_rule(RuleNumbers* numbers) {
  const double threshold = numbers->real("threshold"), alpha = numbers->real("alpha", 1.0);
  const int64_t bytes = numbers->whole("bytes", 1), depth = numbers->whole("depth", 1, 4);
  const int64_t halve_after = numbers->whole("halve_after", 0, 0);
  numbers->check(alpha > 0, "'alpha' must be above 0");
  return std::make_unique<AdmissionRule>([=](const AdmissionTable& table) {
    const SketchShape shape = SketchShape::of(bytes, depth, enough(threshold, alpha));
    table.memory->require(shape.bytes(), table.name, "sketch");
    return std::make_unique<SketchAdmission>(shape, threshold, alpha, halve_after);
  });
}

}  // namespace rec_sdk

// Admission by probability: each batch that contains an id admits it with a fixed probability. Nothing is
// counted. The random number is a function of the table, the id and the number of the batch, so planning a
// batch again gives the same result.
#include "torch_npu_ext/engine/base/id_hash.h"
#include "torch_npu_ext/engine/base/philox.h"
#include "torch_npu_ext/engine/rules/admission.h"

namespace rec_sdk {
namespace {

constexpr double kNumbers = uint64_t{1} << 53;

uint32_t low(uint64_t bits) { return static_cast<uint32_t>(bits); }
uint32_t high(uint64_t bits) { return static_cast<uint32_t>(bits >> 32); }

class CoinAdmission final : public Admission {
 public:
  CoinAdmission(const AdmissionTable& table, double probability) : probability_(probability) {
    uint64_t name = 0xCBF29CE484222325ull;  // FNV-1a
    for (const char byte : table.name) name = (name ^ static_cast<uint8_t>(byte)) * 0x100000001B3ull;
    key_ = IdSeed::fold(table.seed ^ name, 0x9E3779B97F4A7C15ull);
  }

  // Sets `place` of each lookup to 1 if its id is admitted, otherwise to 0.
  void count(const Batch&, const Batch::Piece&, const TableClock& clock, size_t first,
             std::vector<UnknownLookup>* lookups, LifecycleLog*) override {
    const uint64_t key = key_, batch = clock.batches;
    const double most = probability_ * kNumbers;
    for (size_t i = first; i < lookups->size(); ++i) {
      UnknownLookup& one = (*lookups)[i];
      if (one.known()) continue;
      const uint64_t bits = static_cast<uint64_t>(one.id);
      const auto drawn = philox4x32({low(bits), high(bits), low(batch), high(batch)}, {low(key), high(key)});
      const int64_t number = static_cast<int64_t>((static_cast<uint64_t>(drawn[0]) << 32 | drawn[1]) >> 11);
      one.place = static_cast<double>(number) < most
                      ? 1
                      : 0;  // the comparison is exact, because both numbers have at most 53 bits
    }
  }
  size_t accept(const LifecycleLog&, uint32_t slot, std::vector<UnknownLookup>* lookups,
                uint32_t* local) const noexcept override {
    return accept_if(
        slot, lookups, local, [](const UnknownLookup&) {},
        [](const UnknownLookup& one) { return one.place != 0; });
  }

 private:
  uint64_t key_;
  double probability_;
};

}  // namespace

std::unique_ptr<Rule> make_probability_rule(RuleNumbers* numbers) {
  const double probability = numbers->real("probability");
  numbers->check(probability > 0 && probability <= 1, "'probability' must be above 0 and at most 1");
  return std::make_unique<AdmissionRule>(
      [=](const AdmissionTable& table) { return std::make_unique<CoinAdmission>(table, probability); });
}

}  // namespace rec_sdk

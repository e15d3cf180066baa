// An id gets a row in the batch with which it was looked up so often.
#include "torch_npu_ext/engine/rules/candidate_admission.h"

namespace rec_sdk {
namespace {

class Count final : public AdmissionRule {
 public:
  explicit Count(RuleNumbers* numbers) : threshold_(numbers->real("threshold")) {}

  std::unique_ptr<Admission> make(const AdmissionTable& table) const override {
    return std::make_unique<CandidateAdmission>(table, threshold_, 1, 0);
  }

 private:
  double threshold_;
};

}  // namespace

std::unique_ptr<Rule> make_count_rule(RuleNumbers* numbers) { return std::make_unique<Count>(numbers); }

}  // namespace rec_sdk

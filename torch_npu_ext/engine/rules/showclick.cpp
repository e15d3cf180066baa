// An id gets a row in the batch with which its score, of lookups and clicks, reaches the threshold.
#include "torch_npu_ext/engine/rules/candidate_admission.h"

namespace rec_sdk {
namespace {

class ShowClick final : public AdmissionRule {
 public:
  explicit ShowClick(RuleNumbers* numbers)
      : threshold_(numbers->real("threshold")),
        alpha_(numbers->real("alpha", 1.0)),
        beta_(numbers->real("beta", 0.0)) {}

  bool needs_clicks() const override { return beta_ != 0; }
  std::unique_ptr<Admission> make(const AdmissionTable& table) const override {
    return std::make_unique<CandidateAdmission>(table, threshold_, alpha_, beta_);
  }

 private:
  double threshold_, alpha_, beta_;
};

}  // namespace

std::unique_ptr<Rule> make_showclick_rule(RuleNumbers* numbers) {
  return std::make_unique<ShowClick>(numbers);
}

}  // namespace rec_sdk

// Rules without an engine: the ids that they choose, and the arguments that they reject.
#include <map>
#include <numeric>
#include <random>

#include "tests/engine/rule_cases.h"

namespace rec_sdk {
namespace {

// Eviction by age: seconds are exact at both ends of their range.
TEST(age_rule) {
  const Rules rules({{"age", {{"seconds", 10}}}});
  CHECK(rules.needs_timestamps() && rules.evicts_at_intervals() && !rules.has_bound());
  TableClock clock;
  clock.timestamp = 100;
  const std::vector<Evictable> known = {
      {1, 0, 89, 0}, {2, 0, 90, 0}, {3, 0, 200, 0}, {4, 0, INT64_MIN + 1, 0}, {5, 0, 100, 0}};
  CHECK((chosen(rules, known, clock) == std::vector<int64_t>{1, 4}));
  CHECK(rules.evicts_by(EvictReason::kAge) && rules.evictions()[0]->takes_any_number());
  refuses("age", {{"seconds", 0}});
  refuses("age", {{"seconds", 2.5}});
  refuses("age", {});
}

// Admission by count: all lookups of a batch are counted before any id is decided, and an undone batch does
// not count.
TEST(count_rule) {
  AdmissionCase one({{"count", {{"threshold", 3}}}});
  for (const bool dropped : {true, false}) {
    CHECK((one.admitted({8, 9, 8, 8, 5}, dropped) == std::vector<int64_t>{8, 8, 8}));
    CHECK((one.counts == std::vector<uint32_t>{3}));
    CHECK(one.admission->candidates.size() == (dropped ? 0 : 2) && one.admission->counts_each());
  }
  CHECK((one.admitted({5, 9, 9, 8}) == std::vector<int64_t>{9, 9}));
  CHECK(one.admission->set_candidates({{70, {2, 0, 0, 0}}}));
  CHECK((one.admitted({70, 5}) == std::vector<int64_t>{70}));
  // The map of candidates grows during the batch of many ids. The next batch contains each of these ids
  // twice.
  std::vector<int64_t> many, twice;
  for (int64_t id = 0; id < 5000; ++id) many.push_back(id * 977);
  CHECK(one.admitted(many).empty());
  twice.insert(twice.end(), many.begin(), many.end());
  twice.insert(twice.end(), many.begin(), many.end());
  CHECK(one.admitted(twice) == twice);
  refuses("count", {});
  refuses("count", {{"threshold", 3}, {"alpha", 1}});
  CHECK_THROWS(Rules({{"count", {{"threshold", 3}}}, {"probability", {{"probability", 1}}}}),
               std::invalid_argument);
  CHECK_THROWS(Rules({{"count", {{"threshold", 3}}}, {"count", {{"threshold", 4}}}}), std::invalid_argument);
}

// Eviction by idleness: the number of batches without the id.
TEST(idle_rule) {
  const Rules rules({{"idle", {{"batches", 3}}}});
  CHECK(rules.columns().has(Column::kLastUse) && rules.evicts_at_intervals());
  const std::vector<Evictable> known = {{1, 0, 0, 2}, {2, 0, 0, 3}, {3, 0, 0, UINT32_MAX}};
  CHECK((chosen(rules, known) == std::vector<int64_t>{2, 3}));
  // The reason is the first matching rule in the list of rules.cpp, independent of the order in which rules
  // are passed.
  const Rules both({{"idle", {{"batches", 3}}}, {"age", {{"seconds", 1}}}});
  CHECK(both.evictions()[0]->reason() == EvictReason::kAge);
  std::vector<Evictable> old = {{1, 0, 0, 3}};
  TableClock clock;
  clock.timestamp = 5;
  for (const EvictionRule* rule : both.evictions()) rule->choose(clock, &old);
  CHECK(old[0].reason == EvictReason::kAge);
  refuses("idle", {{"batches", 0}});
  refuses("idle", {{"batches", 3}, {"seconds", 3}});
}

// Eviction by norm: of the rows that the caller has marked.
TEST(norm_rule) {
  const Rules rules({{"norm", {{"least", 0.5}}}});
  CHECK(rules.columns().empty() && rules.evicts_by(EvictReason::kNorm));
  std::vector<Evictable> known = {{1, 0, 0, 0}, {2, 0, 0, 0}};
  known[1].small = true;
  CHECK((chosen(rules, known) == std::vector<int64_t>{2}));
  refuses("norm", {{"least", 0}});
}

// Admission by probability: one random number for each id and batch.
TEST(probability_rule) {
  std::vector<int64_t> ids(4000);
  std::iota(ids.begin(), ids.end(), -2000);
  AdmissionCase half({{"probability", {{"probability", 0.5}}}}),
      other({{"probability", {{"probability", 0.5}}}}, "u");
  const std::vector<int64_t> dropped = half.admitted(ids, true);
  CHECK(half.admitted(ids) == dropped);  // planning the batch again gives the same random numbers
  CHECK(dropped.size() > 1900 && dropped.size() < 2100);
  CHECK(half.admitted(ids) != dropped && other.admitted(ids) != dropped);
  CHECK((half.counts.size() > 1900 && half.counts[0] == 0 && half.admission->bytes() == 0));
  CHECK(!half.admission->set_candidates({{1, {2, 0, 0, 0}}}));
  AdmissionCase every({{"probability", {{"probability", 1}}}});
  CHECK(every.admitted(ids) == ids);
  refuses("probability", {{"probability", 0}});
  refuses("probability", {{"probability", 1.5}});
}

// Eviction by a bound on the number of rows, which also applies to candidates.
TEST(rows_rule) {
  const Rules rules({{"rows", {{"most", 8}}}});
  CHECK(rules.has_bound() && !rules.evicts_at_intervals());
  const EvictionRule& rule = *rules.evictions()[0];
  CHECK(!rule.due(8, 8) && rule.due(9, 0) && rule.due(0, 9));
  CHECK(rule.evicts_candidates() && !rule.takes_any_number());
  std::vector<Evictable> known;
  for (int64_t id = 0; id < 8; ++id) known.push_back({id, 5, 0, static_cast<uint32_t>(id)});
  CHECK(chosen(rules, known).empty());
  known.push_back({8, 4, 0, 0});  // 7 rows are left; lowest scores are evicted first, then longest idle ids
  CHECK((chosen(rules, known) == std::vector<int64_t>{7, 8}));
  known[8].held = true;  // a row in use counts for the bound, and stays
  CHECK((chosen(rules, known) == std::vector<int64_t>{6, 7}));
  known[7].reason = EvictReason::kIdle;  // another rule evicts this row already
  CHECK(chosen(rules, known).empty());
  refuses("rows", {{"most", 0}});
}

// Scores of rows: what a batch adds to a score, and how earlier scores decay.
TEST(score_rule) {
  TableClock clock;
  clock.batches = 30;
  const Rules by_factor({{"score", {{"alpha", 2}, {"beta", 0.5}, {"decay", 0.75}}}});
  CHECK(by_factor.needs_clicks() &&
        by_factor.columns().has({Column::kCount, Column::kScore, Column::kClicks}));
  const ScoreRule& factor = *by_factor.score();
  CHECK(factor.after({0, 0, 0}, {3, 2}, {1, 0}, clock) == 7);  // the first score does not decay
  CHECK(factor.after({7, 2, 9}, {3, 2}, {1, 0}, clock) == (7 + 7) * 0.75);
  CHECK(factor.now(7, 20) == 7);
  const Rules by_time({{"score", {{"half_life", 10}}}});
  CHECK(!by_time.needs_clicks() && by_time.columns().has({Column::kCount, Column::kScore, Column::kLastUse}));
  const ScoreRule& time = *by_time.score();
  CHECK(time.after({0, 0, 0}, {3, 2}, {1, 0}, clock) == 1);
  CHECK(time.after({8, 2, 10}, {3, 2}, {1, 0}, clock) == 8 * 0.25 + 1);
  CHECK(time.now(8, 10) == 4 && time.now(8, 0) == 8);
  refuses("score", {{"decay", 1.5}});
  refuses("score", {{"decay", 0.5}, {"half_life", 3}});
  refuses("score", {{"half_life", -1}});
}

// Eviction by score: of a share of the rows, which have the lowest scores.
TEST(share_rule) {
  const auto share = [](double value) { return Rules({{"share", {{"share", value}}}, {"score", {}}}); };
  const std::vector<Evictable> known = {{5, 2, 0, 0}, {4, 1, 0, 0}, {3, 1, 0, 0}, {2, 9, 0, 0}, {1, 9, 0, 0}};
  CHECK((chosen(share(0.4), known) == std::vector<int64_t>{4, 3}));
  CHECK((chosen(share(0.39), known) == std::vector<int64_t>{3}));  // for equal scores, the lower id
  CHECK((chosen(share(0.01), known) == std::vector<int64_t>{3}));  // at least one
  CHECK(chosen(share(1), known).size() == 5 && chosen(share(1), {}).empty());
  // A row that another rule evicts counts for the share, and keeps the reason of that rule.
  std::vector<Evictable> some = known;
  some[2].reason = EvictReason::kIdle;
  CHECK((chosen(share(0.4), some) == std::vector<int64_t>{4}));
  const Rules rules = share(0.4);
  const EvictionRule& rule = *rules.evictions()[0];
  CHECK(!rule.evicts_candidates() && !rule.takes_any_number() && rule.at_intervals());
  refuses("share", {{"share", 0.4}});  // the rule "share" needs scores
  CHECK_THROWS(share(0), std::invalid_argument);
  CHECK_THROWS(share(1.5), std::invalid_argument);
}

// Admission by shows and clicks.
TEST(showclick_rule) {
  AdmissionCase one({{"showclick", {{"threshold", 2}, {"alpha", 0.5}, {"beta", 1}}}});
  CHECK(Rules({{"showclick", {{"threshold", 2}, {"beta", 1}}}}).needs_clicks());
  CHECK(!Rules({{"showclick", {{"threshold", 2}}}}).needs_clicks());
  CHECK((one.admitted({1, 2, 2, 3}, false, {1, 1, 0, 0}) == std::vector<int64_t>{2, 2}));
  CHECK((one.admitted({1, 3, 3}, false, {0, 0, 0}) == std::vector<int64_t>{1}));
  CHECK((one.admitted({3}, false, {0}) == std::vector<int64_t>{3}));
  CHECK(one.admission->worth({3, 0, 2, 0}) == 3.5);
  refuses("showclick", {{"alpha", 1}});
}

// Admission by a sketch: ids are never admitted too late, undoing is exact, and counts are halved when
// necessary.
TEST(sketch_rule) {
  AdmissionCase one({{"sketch", {{"threshold", 4}, {"bytes", 400}, {"halve_after", 40}}}});
  CHECK(one.admission->bytes() == 400 && !one.admission->counts_each());
  std::mt19937_64 random(3);
  std::map<int64_t, int> counts;
  for (int batch = 0; batch < 20; ++batch) {
    std::vector<int64_t> ids;
    for (int i = 0; i < 6; ++i) ids.push_back(static_cast<int64_t>(random() % 40));
    const std::vector<uint8_t> before = one.admission->state();
    const std::vector<int64_t> dropped = one.admitted(ids, true);
    CHECK(one.admission->state() == before);
    CHECK(one.admitted(ids) == dropped);
    for (const int64_t id : ids) ++counts[id];
    for (const int64_t id : ids) {
      const auto times = std::count(dropped.begin(), dropped.end(), id);
      CHECK(counts[id] < 4 || times == std::count(ids.begin(), ids.end(), id));
    }
    for (const uint32_t count : one.counts) CHECK(count >= 4);
  }
  CHECK(one.admission->halves(0) && !one.admission->halves(81));
  one.admission->halve();
  CHECK(one.admission->halves(20) && !one.admission->halves(21));
  AdmissionCase other({{"sketch", {{"threshold", 4}, {"bytes", 400}}}});
  CHECK(other.admission->set_states({one.admission->state()}));
  CHECK(other.admission->state() == one.admission->state() && !other.admission->halves(0));
  refuses("sketch", {{"threshold", 4}});
  refuses("sketch", {{"threshold", 4}, {"bytes", 400}, {"alpha", 0}});
  refuses("sketch", {{"threshold", 4}, {"bytes", 400}, {"depth", 0}});
}

}  // namespace
}  // namespace rec_sdk

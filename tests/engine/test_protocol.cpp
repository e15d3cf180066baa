// Every interleaving of the threads and streams in small runs, and planted mistakes that must be found; see
// docs/protocol.md. Full tests explore more runs, which takes minutes.
#include <sys/prctl.h>

#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <unordered_set>

#include "tests/engine/protocol.h"

namespace rec_sdk {
namespace {

struct Found {
  int64_t states = 0, steps = 0, ends = 0, runs = 0, late_rows = 0;
  std::string problem, trace;
  void add(const Found& other) {
    states += other.states;
    steps += other.steps;
    ends += other.ends;
    runs += other.runs;
    late_rows += other.late_rows;
    if (problem.empty()) {
      problem = other.problem;
      trace = other.trace;
    }
  }
};

struct StateHash {
  size_t operator()(const Hash::Value& value) const { return value.first; }
};

// Explores all interleavings of a scenario, depth first. An engine cannot be copied, so the path to a state
// is repeated from the start. A state that was reached before is not explored again.
class Explorer {
 public:
  explicit Explorer(const Scenario& scenario) : scenario_(scenario) {}

  Found explore() {
    do {
      run();
    } while (found_.problem.empty() && advance());
    return found_;
  }

 private:
  struct Choice {
    std::vector<int> actors;
    size_t taken;
  };

  static std::vector<int> actors_of(const Protocol& protocol) {
    std::vector<int> actors;
    for (int actor = 0; actor < Protocol::kActors; ++actor) {
      if (protocol.ready(actor)) actors.push_back(actor);
    }
    return actors;
  }

  void run() {
    ++found_.runs;
    Protocol protocol(scenario_);
    for (const Choice& choice : path_) protocol.step(choice.actors[choice.taken]);
    while (check(protocol) && seen_.insert(protocol.state()).second) {
      ++found_.states;
      std::vector<int> actors = actors_of(protocol);
      if (actors.empty()) {
        end(protocol);
        break;
      }
      path_.push_back({std::move(actors), 0});
      protocol.step(path_.back().actors[0]);
      ++found_.steps;
    }
    found_.late_rows = std::max(found_.late_rows, protocol.late_rows());
  }

  bool check(const Protocol& protocol) {
    if (protocol.problem().empty()) return true;
    found_.problem = protocol.problem();
    found_.trace = trace();
    return false;
  }

  void end(Protocol& protocol) {
    ++found_.ends;
    if (protocol.finished()) {
      protocol.check_end();
      check(protocol);
      return;
    }
    found_.problem = "nobody can go on";
    found_.trace = trace();
  }

  bool advance() {
    while (!path_.empty() && path_.back().taken + 1 == path_.back().actors.size()) path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().taken;
    ++found_.steps;
    return true;
  }

  std::string trace() const {
    Protocol protocol(scenario_);
    std::string text;
    for (const Choice& choice : path_) {
      text += "  " + protocol.name(choice.actors[choice.taken]) + "\n";
      protocol.step(choice.actors[choice.taken]);
    }
    return text;
  }

  Scenario scenario_;
  std::vector<Choice> path_;
  std::unordered_set<Hash::Value, StateHash> seen_;
  Found found_;
};

// Adds all sequences of batches whose ids are numbered in the order of their first use. All other sequences
// equal one of these up to renaming of ids.
void sequences(size_t batches, size_t most_ids, int64_t ids, std::vector<Scenario>* all,
               std::vector<Scenario::Step> begun = {}, int64_t known = 0) {
  if (begun.size() == batches) {
    Scenario scenario;
    scenario.batches = std::move(begun);
    all->push_back(scenario);
    return;
  }
  const auto go_on = [&](const std::vector<int64_t>& batch) {
    std::vector<Scenario::Step> next = begun;
    next.push_back({batch});
    sequences(batches, most_ids, ids, all, next, std::max(known, batch.back() + 1));
  };
  for (int64_t a = 0; a <= std::min(known, ids - 1); ++a) {
    go_on({a});
    for (int64_t b = a + 1; most_ids > 1 && b <= std::min(std::max(known, a + 1), ids - 1); ++b)
      go_on({a, b});
  }
}

// Parses a scenario such as "0 12A 1s 0d2". Batches are separated by spaces, and digits are their ids. A: the
// forward raises before the plan is started; S: the batch is never looked up; F: it has no backward; s: whole
// tables are saved before it; d2: its backward runs after the backward of two later batches.
Scenario scenario_of(const std::string& text) {
  Scenario scenario;
  scenario.batches.emplace_back();
  for (size_t i = 0; i < text.size(); ++i) {
    Scenario::Step& batch = scenario.batches.back();
    if (text[i] == ' ') scenario.batches.emplace_back();
    if (std::isdigit(text[i])) batch.ids.push_back(text[i] - '0');
    if (text[i] == 'A') batch.kind = Kind::kAbandon;
    if (text[i] == 'S') batch.kind = Kind::kSkip;
    if (text[i] == 'F') batch.kind = Kind::kForward;
    if (text[i] == 's') batch.save = true;
    if (text[i] == 'd') batch.delay = static_cast<size_t>(text[++i] - '0');
  }
  return scenario;
}

enum Variant { kPlain, kSaver, kTwoStreams, kDirect, kInOrder, kSnapshot, kSnapshotOfIds, kSnapshotStreams };

Scenario variant_of(Scenario scenario, bool by_clocks, Variant variant) {
  scenario.by_clocks = by_clocks;
  if (variant == kSaver) scenario.saver = Saver::kWhole;
  if (variant == kSnapshot || variant == kSnapshotStreams) scenario.saver = Saver::kAll;
  if (variant == kSnapshotOfIds) scenario.saver = Saver::kIds;
  scenario.two_streams = variant == kTwoStreams || variant == kSnapshotStreams;
  scenario.direct = variant == kDirect;
  scenario.in_order = variant == kInOrder;
  return scenario;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

class Report {
 public:
  // Checks that the results of all interleavings equal the results of a run on one thread.
  void clean(const char* what, const std::vector<Scenario>& scenarios) {
    const auto begin = std::chrono::steady_clock::now();
    Found total;
    for (const Scenario& scenario : scenarios) total.add(Explorer(scenario).explore());
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    std::printf("%-44s %4zu runs: %8ld states, %8ld steps, %7ld executions, %6ld ends, %5.1f s\n", what,
                scenarios.size(), total.states, total.steps, total.runs, total.ends, seconds.count());
    CHECK(total.ends > 0);
    CHECK(total.problem.empty());
    if (!total.problem.empty()) std::printf("%s\n%s", total.problem.c_str(), total.trace.c_str());
    late_rows += total.late_rows;
  }
  void clean(const char* what, const std::vector<const char*>& texts, bool by_clocks,
             Variant variant = kPlain) {
    std::vector<Scenario> scenarios;
    for (const char* text : texts) scenarios.push_back(variant_of(scenario_of(text), by_clocks, variant));
    clean(what, scenarios);
  }
  void clean(const char* what, size_t batches, size_t most_ids, bool by_clocks, Variant variant = kPlain) {
    std::vector<Scenario> scenarios;
    sequences(batches, most_ids, 4, &scenarios);
    for (Scenario& scenario : scenarios) scenario = variant_of(scenario, by_clocks, variant);
    clean(what, scenarios);
  }
  // Checks that the mistake is found with both models of the device, and that nothing is found without it.
  void found(const char* what, Bug bug, const char* text, Variant variant = kPlain) {
    for (const bool by_clocks : {true, false}) {
      Scenario scenario = variant_of(scenario_of(text), by_clocks, variant);
      scenario.bug = bug;
      const Found found = Explorer(scenario).explore();
      std::printf("%-44s %s after %ld executions: %s\n", what, by_clocks ? "by clocks" : "by steps ",
                  found.runs, found.problem.empty() ? "NOT FOUND" : found.problem.c_str());
      CHECK(!found.problem.empty());
    }
    CHECK(Explorer(variant_of(scenario_of(text), true, variant)).explore().problem.empty());
  }
  int64_t late_rows = 0;
};

void mistakes(Report* report) {
  report->found("a row is read before its write-back arrived", Bug::kLandsEarly, "01 2 0");
  report->found("a late row is forgotten", Bug::kForgetsLate, "01 2 0");
  report->found("the same, the order of calls told apart", Bug::kForgetsLate, "01 2 0", kInOrder);
  report->found("a victim of a batch in flight", Bug::kEndsPinsAtLookup, "0d2 1 2");
  report->found("a pin ends at launch, streams apart", Bug::kDoesNotFollow, "0 12", kTwoStreams);
  report->found("staging is reused early", Bug::kReusesStaging, "01 23");
  report->found("staging is reused early, by kernels", Bug::kReusesStaging, "01 23", kDirect);
  report->found("memory of the device is reused early", Bug::kReusesMemory, "01 23");
  report->found("rows are used before they have come", Bug::kScattersEarly, "01 23");
  report->found("rows leave before they are taken out", Bug::kFetchesEarly, "01 23 0");
  report->found("rows come before others are read", Bug::kWritesFirst, "01 23 0");
  report->found("a save does not wait for updates", Bug::kReadsUnsettled, "01", kSaver);
  report->found("a row changes that a snapshot lacks", Bug::kUpdatesUntaken, "0", kSnapshot);
  report->found("the same, a snapshot of ids", Bug::kUpdatesUntaken, "0 0", kSnapshotOfIds);
  report->found("a row is put aside after its update", Bug::kUpdatesFirst, "0", kSnapshot);
  report->found("rows are taken, and read later", Bug::kTakesUnlocked, "0", kSnapshot);
  report->found("a snapshot does not wait for updates", Bug::kTakesUnordered, "01", kSnapshot);
  report->found("a batch keeps its slots", Bug::kKeepsPins, "0");
  report->found("a lock is kept", Bug::kKeepsLock, "01 23 01 23");
}

constexpr bool kByClocks = true, kStepped = false;

void explore_few(Report* report) {
  report->clean("stepped: two batches", {"0 1", "01 23"}, kStepped);
  report->clean("three batches of 1 id", 3, 1, kByClocks);
  report->clean("rows that come back late", {"01 2 0", "01 23 0"}, kByClocks);
  report->clean("batches that are dropped", {"0 1A 0", "0 1S 2", "0 1F 2"}, kByClocks);
  report->clean("a backward behind others", {"0d2 1 2"}, kByClocks);
  report->clean("a save between", {"0 1s 0"}, kByClocks);
  report->clean("a thread that saves", {"0 0"}, kByClocks, kSaver);
  report->clean("a snapshot", {"0 0"}, kByClocks, kSnapshot);
  report->clean("two streams", {"0 1 0"}, kByClocks, kTwoStreams);
  report->clean("kernels that use staging", {"0 1"}, kByClocks, kDirect);
}

void explore(Report* report) {
  report->clean("stepped: two batches of 1 or 2 ids", 2, 2, kStepped);
  report->clean("three batches of 1 id", 3, 1, kByClocks);
  report->clean("rows that come back", {"01 2 0", "01 23 0", "0 12 0", "01 02 1", "01 23 01", "0 1 2 0"},
                kByClocks);
  report->clean("batches that are dropped", {"0 1A 0", "0 1A 2 0", "0S 1 2 0", "0 1S 2", "0 1F 2"},
                kByClocks);
  report->clean("a backward behind others", {"0d2 1 2", "0d1 1 0", "0d1 1d1 2"}, kByClocks);
  report->clean("a save between", {"0 1s 0", "01 2s 0", "01 2A 3s"}, kByClocks);
  report->clean("a thread that saves", {"01 2", "0 0"}, kByClocks, kSaver);
  report->clean("a snapshot of all rows", {"0 0", "01 2"}, kByClocks, kSnapshot);
  report->clean("a snapshot of ids", {"01 2"}, kByClocks, kSnapshotOfIds);
  report->clean("two streams", {"0 1 0", "0 1 2", "01 2 0"}, kByClocks, kTwoStreams);
  report->clean("the order of all calls told apart", {"0 1 2", "01 2 0"}, kByClocks, kInOrder);
  report->clean("kernels that use staging", {"0 1", "01 2"}, kByClocks, kDirect);
}

void explore_all(Report* report) {
  report->clean("three batches of 1 or 2 ids", 3, 2, kByClocks);
  report->clean("four batches of 1 id", 4, 1, kByClocks);
  report->clean("four batches, a save between", {"0 1 2s 0"}, kByClocks);
  report->clean("three batches, a thread that saves", {"0 1 2", "01 2 0"}, kByClocks, kSaver);
  report->clean("a snapshot, two streams", {"0 0"}, kByClocks, kSnapshotStreams);
  report->clean("three batches, kernels that use staging", {"0 1 0", "01 23 0"}, kByClocks, kDirect);
  report->clean("stepped: three batches", {"01 2 0"}, kStepped);
  report->clean("stepped: two batches, a thread that saves", {"0 1"}, kStepped, kSaver);
}

TEST(interleavings) {
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);  // otherwise each new engine would have to clear huge pages
  Report report;
  mistakes(&report);
  explore_few(&report);
  if (full_tests() && !kSlow) {
    explore(&report);
    explore_all(&report);
  }
  CHECK(report.late_rows > 0);
}

}  // namespace
}  // namespace rec_sdk

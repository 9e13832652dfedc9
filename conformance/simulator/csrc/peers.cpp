// Reports of ranks to each other while they wait.
//
// A rank that can only wait for its peers reports this in the store of the default group, once a second. Each report
// contains the number of every rank's current wait, as this rank sees them. No rank can ever go on if all ranks have reported the same waits several times:
// then each rank has looked again for what it waits for, after all ranks had begun to wait. No message is on its way then,
// because a message is in a store when its send ends. A rank with a collective in flight does not report a wait.
#include "device.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <sstream>

namespace sim {
namespace {
constexpr int kSureAfter = 3;  // reports of the same waits of all ranks
const std::string kEnded = "ended", kWorking = "0";

struct Report {  // of a rank that waits
  int count = 0;      // reports of the same waits
  int64_t wait = 0;   // number of the wait
  std::string waits;  // the numbers of the waits of all ranks, empty if a rank does not wait
  std::string what;   // what the rank waits in
};

struct Peers {  // the ranks of the default group
  c10::intrusive_ptr<c10d::Store> store = nullptr;
  int rank = 0, size = 1;
  Report report;
};
Peers& peers() { return only<Peers>(); }

std::string wait_key(int rank) { return "sim.waits." + std::to_string(rank); }

std::string text_of(const Report& report) {
  return std::to_string(report.count) + " " + std::to_string(report.wait) + " [" + report.waits + "] " + report.what;
}

Report report_of(const std::string& text) {
  Report report;
  std::istringstream words(text);
  words >> report.count >> report.wait >> report.waits;
  report.waits = report.waits.size() < 2 ? "" : report.waits.substr(1, report.waits.size() - 2);
  std::getline(words >> std::ws, report.what);
  return report;
}

// The texts in the store by rank, without this rank's.
std::vector<std::string> texts_of_others() {
  auto& p = peers();
  std::vector<std::string> texts(p.size);
  for (int rank = 0; rank < p.size; rank++) {
    if (rank == p.rank) continue;
    texts[rank] = p.store->check({wait_key(rank)}) ? p.store->get_to_str(wait_key(rank)) : kWorking;
  }
  return texts;
}

std::string numbers_of_waits(const std::vector<std::string>& texts) {
  auto& p = peers();
  std::string waits;
  for (int rank = 0; rank < p.size; rank++) {
    if (rank != p.rank && texts[rank] == kWorking) return "";
    auto wait = rank == p.rank ? p.report.wait : texts[rank] == kEnded ? -1 : report_of(texts[rank]).wait;
    waits += std::to_string(wait) + ",";
  }
  return waits;
}
}  // namespace

void meet_peers(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  Lock lock;
  peers() = {store, rank, size, {}};
}

void note_progress() {
  auto& p = peers();
  if (std::exchange(p.report.count, 0) != 0) p.store->set(wait_key(p.rank), kWorking);
}

bool report_wait(const std::string& what, bool may_give_up) {
  auto& p = peers();
  if (!p.store) return false;
  if (p.report.count == 0) p.report.wait++;
  auto texts = texts_of_others();
  auto waits = numbers_of_waits(texts);
  bool is_same = !may_give_up && !waits.empty() && waits == p.report.waits;
  p.report = {is_same ? p.report.count + 1 : 1, p.report.wait, waits, what};
  texts[p.rank] = text_of(p.report);
  p.store->set(wait_key(p.rank), texts[p.rank]);
  if (waits.empty() || may_give_up) return !waits.empty();
  std::string all;
  for (int rank = 0; rank < p.size; rank++) {
    auto report = report_of(texts[rank]);
    bool has_ended = texts[rank] == kEnded;
    if (!has_ended && (report.count < kSureAfter || report.waits != waits)) return false;
    all += "\n  rank " + std::to_string(rank) + (has_ended ? " has ended" : " waits in " + report.what);
  }
  TORCH_CHECK(false, "sim: no rank can go on:", all);
}

void report_end() {
  auto& p = peers();
  // Keep the last report of a blocked rank, because the errors of its peers show it.
  if (p.store && p.report.count < kSureAfter) p.store->set(wait_key(p.rank), kEnded);
}
}  // namespace sim

// Reports of ranks to each other while they wait.
//
// A rank that can only wait for its peers reports this in the store of the default group, once a second. If every rank
// has ended or has reported its wait several times, no message is on its way, and no rank can ever go on.
#include "device.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace sim {
namespace {
constexpr int kSureAfter = 3;  // reports of one wait, until it counts as blocked
const std::string kEnded = "ended";

struct Peers {  // the ranks of the default group
  c10::intrusive_ptr<c10d::Store> store = nullptr;
  int rank = 0, size = 1;
  int reports = 0;
};
Peers& peers() { return only<Peers>(); }

std::string wait_key(int rank) { return "sim.waits." + std::to_string(rank); }
}  // namespace

void meet_peers(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  Lock lock;
  peers() = {store, rank, size};
}

void note_progress() {
  auto& p = peers();
  if (std::exchange(p.reports, 0) != 0) p.store->set(wait_key(p.rank), "0");
}

bool report_wait(const std::string& what, bool may_give_up) {
  auto& p = peers();
  if (!p.store) return false;
  p.reports = may_give_up ? 1 : p.reports + 1;
  p.store->set(wait_key(p.rank), std::to_string(p.reports) + " " + what);
  std::string all;
  for (int rank = 0; rank < p.size; rank++) {
    if (may_give_up && rank == p.rank) continue;
    if (!p.store->check({wait_key(rank)})) return false;
    auto said = p.store->get_to_str(wait_key(rank));
    if (said != kEnded && std::stoi(said) < (may_give_up ? 1 : kSureAfter)) return false;
    all += "\n  rank " + std::to_string(rank) + (said == kEnded ? " has ended" : " waits in" + said.substr(said.find(' ')));
  }
  TORCH_CHECK(may_give_up, "sim: no rank can go on:", all);
  return true;
}

void report_end() {
  auto& p = peers();
  // Keep the last report of a blocked rank, because the errors of its peers show it.
  if (p.store && p.reports < kSureAfter) p.store->set(wait_key(p.rank), kEnded);
}
}  // namespace sim

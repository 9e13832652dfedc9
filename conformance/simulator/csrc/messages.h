// Messages between two ranks, carried by the store of their group.
#pragma once
#include "tensors.h"

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace sim {
using StoreP = c10::intrusive_ptr<c10d::Store>;

struct Message {
  std::string key;   // in the store of the group: "sender>receiver/", and the number of the message once it is issued
  std::string name;  // "send to rank 1"
  int tag;
  PlaceP place;
};
using Messages = std::vector<Message>;

void send_messages(const StoreP& store, const Messages& messages, const Tensors& tensors);
// Return work that is complete when all messages are in the store. Its `wait` copies them into `tensors`.
c10::intrusive_ptr<c10d::Work> receive_messages(const StoreP& store, const Messages& messages, const Tensors& tensors);
void leave_peers(bool checks_sends);  // this rank ends
}  // namespace sim

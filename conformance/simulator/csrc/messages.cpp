// Messages between two ranks.
//
// A message is in the store of its group from the send until the receive ends. So a send waits for no rank, like a send
// of NCCL that fits into NCCL's buffers. Messages between two ranks match in the order of the calls, and tags must agree.
#include "messages.h"

#include <algorithm>
#include <cstring>

namespace sim {
namespace {
constexpr size_t kPiece = size_t{4} << 20;  // bytes; a store refuses values of 8 MiB

struct Header {
  int64_t tag, size;
};

std::string piece_of(const std::string& key, size_t index) { return key + "." + std::to_string(index); }

struct SentMessage {
  StoreP store;
  Message message;
  bool is_received() const { return !store->check({piece_of(message.key, 0)}); }
};
struct Sent {
  std::vector<SentMessage> messages;  // some of them received
  size_t most = 64;  // number of messages at which the received ones are dropped
};

void note_sent(const StoreP& store, const Message& message) {
  auto& sent = only<Sent>();
  if (sent.messages.size() >= sent.most) {
    std::erase_if(sent.messages, [](auto& item) { return item.is_received(); });
    sent.most = std::max(size_t{64}, 2 * sent.messages.size());
  }
  sent.messages.push_back({store, message});
}

class Arrival final : public c10d::Work {
 public:
  Arrival(StoreP store, Messages messages, Tensors tensors)
      : store_(std::move(store)), messages_(std::move(messages)), tensors_(std::move(tensors)) {}
  bool isCompleted() override {
    std::vector<std::string> keys;
    for (auto& message : messages_) keys.push_back(piece_of(message.key, 0));
    try {
      return store_->check(keys);
    } catch (const std::exception&) {
      return true;  // `wait` raises it
    }
  }
  bool wait(std::chrono::milliseconds) override {
    for (size_t i = 0; i < messages_.size(); i++) receive(messages_[i], tensors_[i]);
    return true;
  }

 private:
  void receive(const Message& message, const at::Tensor& to) {
    auto take = [&](size_t piece) {
      auto key = piece_of(message.key, piece);
      auto bytes = store_->get(key);
      store_->deleteKey(key);
      return bytes;
    };
    auto bytes = take(0);
    Header header;
    std::memcpy(&header, bytes.data(), sizeof header);
    auto whole = sizeof header + static_cast<size_t>(header.size);
    for (size_t piece = 1; bytes.size() < whole; piece++) {
      auto more = take(piece);
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    TORCH_CHECK(header.tag == message.tag && header.size == static_cast<int64_t>(to.nbytes()), "expected ", to.nbytes(),
        " bytes with tag ", message.tag, ", but the sender's next message has ", header.size, " bytes and tag ", header.tag,
        ". Messages between two ranks match in the order of the calls");
    std::memcpy(to.data_ptr(), bytes.data() + sizeof header, bytes.size() - sizeof header);
  }

  StoreP store_;
  Messages messages_;
  Tensors tensors_;
};
}  // namespace

void send_messages(const StoreP& store, const Messages& messages, const Tensors& tensors) {
  note_progress();
  for (size_t i = 0; i < messages.size(); i++) {
    Header header{messages[i].tag, static_cast<int64_t>(tensors[i].nbytes())};
    std::vector<uint8_t> bytes(sizeof header + tensors[i].nbytes());
    std::memcpy(bytes.data(), &header, sizeof header);
    std::memcpy(bytes.data() + sizeof header, tensors[i].data_ptr(), tensors[i].nbytes());
    for (auto piece = (bytes.size() - 1) / kPiece + 1; piece-- > 0;) {  // the first piece last, as it marks all as complete
      auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(piece * kPiece);
      auto end = bytes.begin() + static_cast<std::ptrdiff_t>(std::min(bytes.size(), (piece + 1) * kPiece));
      store->set(piece_of(messages[i].key, piece), std::vector<uint8_t>(begin, end));
    }
    note_sent(store, messages[i]);
  }
}

c10::intrusive_ptr<c10d::Work> receive_messages(const StoreP& store, const Messages& messages, const Tensors& tensors) {
  return c10::make_intrusive<Arrival>(store, messages, tensors);
}

void leave_peers(bool checks_sends) {
  auto messages = take_all(only<Sent>().messages);  // other threads go on during the waits
  for (auto& sent : messages)
    if (checks_sends)
      wait_for_peers(sent.message.name + ", which is not received, called at " + line_of_program(sent.message.place),
          [&] { return sent.is_received(); });
  Lock lock;
  report_end();
}
}  // namespace sim

// Memory as CUDA's caching allocator gives it: segments that are split and merged, a pool for each stream, memory given
// out again at once to the stream that it came from, and to nobody before the streams it was recorded on are through.
//
// What is given out is poison (every byte 0xFF: NaN, -1, true). Freed memory stays as it is until it is given out
// again, because programs rely on that: the stream whose memory it is may be made to wait between the two. Given out
// while tasks of its former life are pending, it is poisoned by a task in front of the first new one that touches it.
#include "device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sim {
namespace {
constexpr size_t kAlign = 512, kPage = 4096, kMega = size_t{1} << 20;
constexpr size_t kSmall = kMega;  // requests up to here share segments of two megabytes

struct Block {
  char* begin;
  size_t size;
  StreamKey home;
  Block *before = nullptr, *after = nullptr;  // its neighbours in the segment
  bool free = false;
  bool small = false;
  uint64_t freed_at = 0;
};
struct FitFirst {  // the smallest that fits; of equal ones that which was freed last, whose former users are the nearest
  bool operator()(const Block* a, const Block* b) const {
    if (a->size != b->size) return a->size < b->size;
    return a->freed_at != b->freed_at ? a->freed_at > b->freed_at : a->begin < b->begin;
  }
};

struct Handle {  // what a DataPtr owns
  AllocationP allocation;
  Block* block;
};
struct Retired {  // freed, but in use by streams that it was recorded on
  AllocationP allocation;
  Block* block;
  std::vector<RecordingP> recordings;
};

struct Memory {
  std::map<std::pair<StreamKey, bool>, std::set<Block*, FitFirst>> pools;
  std::multimap<size_t, char*> pinned_pool;
  std::map<const char*, AllocationP> living;    // by address
  std::map<const char*, AllocationP> pinned;    // every block that was ever made, with its latest life
  std::vector<AllocationP> finishing;           // freed, with tasks pending
  std::vector<Retired> retired, retired_pinned;
  std::map<int, c10::CachingDeviceAllocator::DeviceStats> stats;
  uint64_t frees = 0;
  int64_t until_failure = 0;
};
Memory& memory() {
  static auto* one = new Memory;
  return *one;
}

size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

void tally(c10::CachingAllocator::StatArray& array, bool small, int64_t amount) {
  for (auto index : {size_t{0}, size_t{small ? 1u : 2u}}) {
    if (amount > 0) array[index].increase(amount);
    else array[index].decrease(-amount);
  }
}

void put_in_pool(Block* block) {
  auto& m = memory();
  block->free = true;
  block->freed_at = ++m.frees;
  auto& pool = m.pools[{block->home, block->small}];
  for (auto* next : {block->before, block->after}) {
    if (next == nullptr || !next->free) continue;
    pool.erase(next);
    auto *low = std::min(block, next, [](auto* a, auto* b) { return a->begin < b->begin; }), *high = low == block ? next : block;
    low->size += high->size;
    low->after = high->after;
    if (low->after != nullptr) low->after->before = low;
    low->freed_at = block->freed_at;
    low->free = true;
    delete high;
    block = low;
  }
  pool.insert(block);
}

Block* new_segment(size_t size, StreamKey home, bool small) {
  size_t whole = small ? 2 * kMega : size < 10 * kMega ? 20 * kMega : rounded(size, 2 * kMega);
  void* begin = nullptr;
  TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&begin, kPage, whole) == 0, "sim out of memory. Tried to allocate ", whole, " bytes.");
  auto& stats = memory().stats[home.first];
  tally(stats.segment, small, 1);
  tally(stats.reserved_bytes, small, static_cast<int64_t>(whole));
  stats.num_device_alloc++;
  auto* block = new Block{static_cast<char*>(begin), whole, home};
  block->small = small;
  return block;
}

Block* take_block(size_t size, StreamKey home) {
  auto& m = memory();
  bool small = size <= kSmall;
  auto& pool = m.pools[{home, small}];
  Block least{nullptr, size, home};
  least.freed_at = UINT64_MAX;
  auto found = pool.lower_bound(&least);
  Block* block;
  if (found == pool.end()) {
    block = new_segment(size, home, small);
  } else {
    block = *found;
    pool.erase(found);
  }
  block->free = false;
  auto rest = block->size - size;
  if (small ? rest >= kAlign : rest > kMega) {
    auto* other = new Block{block->begin + size, rest, home, block, block->after};
    other->small = small;
    other->free = true;
    other->freed_at = block->freed_at;
    if (block->after != nullptr) block->after->before = other;
    block->after = other;
    block->size = size;
    pool.insert(other);
  }
  return block;
}

bool all_done(const std::vector<RecordingP>& recordings) {
  return std::all_of(recordings.begin(), recordings.end(), [](auto& r) { return r->done; });
}

template <class F>
void give_back_finished(std::vector<Retired>& retired, F&& give) {
  for (size_t i = 0; i < retired.size();) {
    if (!all_done(retired[i].recordings)) {
      ++i;
      continue;
    }
    auto entry = std::move(retired[i]);
    retired.erase(retired.begin() + static_cast<int64_t>(i));
    for (auto& recording : entry.recordings) query(recording);  // the allocator asked, so the host knows
    give(entry);
  }
}

// The device's memory that is given out has a former life whose tasks may be pending.
void begin_life(const AllocationP& life) {
  auto& m = memory();
  auto overlaps = [&](auto& former) { return former->begin < life->begin + life->size && life->begin < former->begin + former->size; };
  life->stale = std::any_of(m.finishing.begin(), m.finishing.end(), overlaps);
  if (!life->stale) poison(life->begin, life->size);
  m.living[life->begin] = life;
}

void free_device(void* context) {
  auto* handle = static_cast<Handle*>(context);
  Lock lock;
  auto& m = memory();
  auto& life = handle->allocation;
  life->freed = true;
  note_course(3 * life->size);
  m.living.erase(life->begin);
  if (life->pending()) m.finishing.push_back(life);
  auto& stats = m.stats[life->home.first];
  tally(stats.allocation, handle->block->small, -1);
  tally(stats.allocated_bytes, handle->block->small, -static_cast<int64_t>(life->size));
  note({"free", life->home, reinterpret_cast<int64_t>(life->begin)});
  life->users.erase(life->home);
  if (life->users.empty()) {
    put_in_pool(handle->block);
  } else {
    std::vector<RecordingP> recordings;
    for (auto& user : life->users) recordings.push_back(record(user));
    m.retired.push_back({life, handle->block, std::move(recordings)});
  }
  delete handle;
}

void free_pinned(void* context) {
  auto* handle = static_cast<Handle*>(context);
  Lock lock;
  auto& life = handle->allocation;
  life->freed = true;
  std::vector<RecordingP> recordings;
  for (auto& user : life->users) recordings.push_back(record(user));
  memory().retired_pinned.push_back({life, nullptr, std::move(recordings)});
  delete handle;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device();
    c10::Device on(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (size == 0) return {nullptr, nullptr, &free_device, on};
    Lock lock;
    auto& m = memory();
    auto& stats = m.stats[device];
    if (m.until_failure > 0 && --m.until_failure == 0) {
      stats.num_ooms++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", size, " bytes. The allocation was asked to fail.");
    }
    give_back_finished(m.retired, [](Retired& entry) { put_in_pool(entry.block); });
    auto life = std::make_shared<Allocation>();
    life->home = {device, current_stream(device)};
    auto* block = take_block(rounded(size, kAlign), life->home);
    life->begin = block->begin;
    life->size = block->size;
    begin_life(life);
    note({"allocate", life->home, reinterpret_cast<int64_t>(life->begin), 0, static_cast<int64_t>(life->size)});
    note_course(2 * life->size + life->stale);
    tally(stats.allocation, block->small, 1);
    tally(stats.allocated_bytes, block->small, static_cast<int64_t>(life->size));
    return {life->begin, new Handle{life, block}, &free_device, on};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < device_count(); device++) empty_cache(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_use(data.get(), {stream.device_index(), stream.id()}); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    return memory().stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { each(device, [](auto& stat) { stat.reset_accumulated(); }); }
  void resetPeakStats(c10::DeviceIndex device) override { each(device, [](auto& stat) { stat.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    constexpr size_t whole = size_t{80} << 30;
    return {whole - static_cast<size_t>(getDeviceStats(device).reserved_bytes[0].current), whole};
  }

 private:
  template <class F>
  void each(int device, F&& f) {
    Lock lock;
    auto& s = memory().stats[device];
    for (auto* array : {&s.allocation, &s.segment, &s.allocated_bytes, &s.reserved_bytes})
      for (auto& stat : *array) f(stat);
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device on(c10::kCPU);
    if (size == 0) return {nullptr, nullptr, &free_pinned, on};
    Lock lock;
    auto& m = memory();
    give_back_finished(m.retired_pinned, [&](Retired& entry) { m.pinned_pool.emplace(entry.allocation->size, entry.allocation->begin); });
    size_t whole = kPage;  // pages of its own, which can be protected from the host
    while (whole < size) whole *= 2;
    auto life = std::make_shared<Allocation>();
    life->home = {-1, 0};
    life->size = whole;
    auto [first, last] = m.pinned_pool.equal_range(whole);
    if (first != last) {
      auto latest = std::prev(last);
      life->begin = latest->second;
      m.pinned_pool.erase(latest);
      note_reuse(m.pinned[life->begin]);
    } else {
      void* begin = nullptr;
      TORCH_CHECK(posix_memalign(&begin, kPage, whole) == 0, "sim: no host memory for ", whole, " pinned bytes");
      life->begin = static_cast<char*>(begin);
    }
    m.pinned[life->begin] = life;
    poison(life->begin, whole);
    return {life->begin, new Handle{life, nullptr}, &free_pinned, on};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

AllocationP find(std::map<const char*, AllocationP>& all, const void* address) {
  auto found = all.upper_bound(static_cast<const char*>(address));
  if (found == all.begin()) return nullptr;
  auto& life = (--found)->second;
  return address < life->begin + life->size ? life : nullptr;
}
}  // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* one = new DeviceMemory;
  return one;
}
c10::Allocator* pinned_allocator() {
  static auto* one = new PinnedMemory;
  return one;
}

void poison(void* begin, size_t size) {
  if (!by_shapes_alone()) std::memset(begin, 0xFF, size);
}

AllocationP allocation_at(const void* address) {
  auto life = find(memory().living, address);
  return life ? life : find(memory().pinned, address);
}
bool is_pinned(const void* address) {
  Lock lock;
  return find(memory().pinned, address) != nullptr;
}
void record_use(const void* address, StreamKey stream) {
  Lock lock;
  auto life = allocation_at(address);
  if (!life) return;
  life->users.insert(stream);
  note({"use", stream, reinterpret_cast<int64_t>(life->begin)});
}
void forget_finished(const AllocationP& life) {
  auto& finishing = memory().finishing;
  if (life->freed) finishing.erase(std::remove(finishing.begin(), finishing.end(), life), finishing.end());
}
void fail_allocation(int64_t nth) {
  Lock lock;
  memory().until_failure = nth;
}

void empty_cache(int device) {
  synchronize_device(device, nullptr);
  Lock lock;
  auto& m = memory();
  give_back_finished(m.retired, [](Retired& entry) { put_in_pool(entry.block); });
  for (auto& [key, pool] : m.pools) {
    if (key.first.first != device) continue;
    for (auto at = pool.begin(); at != pool.end();) {
      auto* block = *at;
      if (block->before != nullptr || block->after != nullptr) {
        ++at;
        continue;
      }
      at = pool.erase(at);
      forget_accesses(block->begin, block->begin + block->size);
      auto& stats = m.stats[device];
      tally(stats.segment, block->small, -1);
      tally(stats.reserved_bytes, block->small, -static_cast<int64_t>(block->size));
      stats.num_device_free++;
      std::free(block->begin);
      delete block;
    }
  }
}
}  // namespace sim

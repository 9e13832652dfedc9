// Memory, like that of CUDA's caching allocator: segments are split and merged, and each stream has a pool. Freed memory is
// available at once to the stream that it came from, and to others when the streams that it was recorded on have ended.
//
// New memory is poisoned (every byte is 0xFF: NaN, -1, true). Freed memory keeps its contents until it is allocated again,
// because programs rely on that: its stream may be made to wait between the two. If tasks of the former allocation are
// pending, a task poisons the memory before the first new task that touches it.
#include "device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sim {
struct Kind {  // of segments; an allocation uses segments of its kind
  StreamKey home;
  c10::MempoolId_t graph;
  bool small;
  int64_t schedule;  // number of the schedule: memory of an earlier one would change the addresses of a later one
  auto operator<=>(const Kind&) const = default;
};
struct Block {
  char* begin;
  size_t size;
  Kind kind;
  Block *before = nullptr, *after = nullptr;  // neighbours in the segment
  bool free = false;
  uint64_t freed_at = 0;
};

namespace {
constexpr size_t kAlign = 512, kPage = 4096, kMega = size_t{1} << 20;
constexpr size_t kSmall = kMega;  // requests up to here share segments of two megabytes

struct FitFirst {  // the smallest that fits; among equal blocks the one freed last, because its users are the most recent
  bool operator()(const Block* a, const Block* b) const {
    if (a->size != b->size) return a->size < b->size;
    return a->freed_at != b->freed_at ? a->freed_at > b->freed_at : a->begin < b->begin;
  }
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;
struct Memory {
  std::map<Kind, std::set<Block*, FitFirst>> pools;
  int64_t schedule = 0;
  std::map<c10::MempoolId_t, int> held;  // pools of graphs, which are not emptied
  std::multimap<size_t, char*> pinned_pool;
  std::map<const char*, AllocationP> living;    // by address
  std::map<const char*, AllocationP> pinned;    // every block ever allocated, with its latest life
  std::vector<AllocationP> finishing;           // freed while tasks were pending
  std::vector<AllocationP> retired, retired_pinned;  // freed, but in use by recorded streams
  std::map<int, Stats> stats;
  uint64_t frees = 0;
};
Memory& memory() { return only<Memory>(); }

size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

// Add a block to, or subtract it from, a statistic of its device.
void tally(c10::CachingAllocator::StatArray Stats::*what, const Block& block, bool more) {
  auto& array = memory().stats[block.kind.home.first].*what;
  for (auto index : {size_t{0}, size_t{block.kind.small ? 1u : 2u}}) {
    if (more) array[index].increase(block.size);
    else array[index].decrease(block.size);
  }
}

void put_in_pool(Block* block) {
  auto& m = memory();
  block->free = true;
  block->freed_at = ++m.frees;
  auto& pool = m.pools[block->kind];
  for (auto* next : {block->before, block->after}) {
    if (next == nullptr || !next->free) continue;
    pool.erase(next);
    auto* low = next->begin < block->begin ? next : block;
    auto* high = low == block ? next : block;
    low->size += high->size;
    low->after = high->after;
    if (low->after != nullptr) low->after->before = low;
    low->freed_at = block->freed_at;
    delete high;
    block = low;
  }
  pool.insert(block);
}

Block* new_segment(size_t size, const Kind& kind) {
  size_t whole = kind.small ? 2 * kMega : size < 10 * kMega ? 20 * kMega : rounded(size, 2 * kMega);
  auto* begin = static_cast<char*>(std::aligned_alloc(kPage, whole));
  TORCH_CHECK_WITH(OutOfMemoryError, begin != nullptr, "sim out of memory. Tried to allocate ", whole, " bytes.");
  if (kind.graph != kNoPool) poison(begin, whole);
  auto* block = new Block{begin, whole, kind};
  tally(&Stats::reserved_bytes, *block, true);
  return block;
}

Block* take_block(size_t size, const Kind& kind) {
  auto& pool = memory().pools[kind];
  Block least{nullptr, size, kind, nullptr, nullptr, /*free=*/true, /*freed_at=*/UINT64_MAX};
  auto found = pool.lower_bound(&least);
  auto* block = found == pool.end() ? new_segment(size, kind) : *found;
  if (found != pool.end()) pool.erase(found);
  block->free = false;
  auto rest = block->size - size;
  if (kind.small ? rest >= kAlign : rest > kMega) {
    auto* other = new Block{block->begin + size, rest, kind, block, block->after, /*free=*/true, block->freed_at};
    if (block->after != nullptr) block->after->before = other;
    block->after = other;
    block->size = size;
    pool.insert(other);
  }
  return block;
}

void give_back_finished(std::vector<AllocationP>& retired) {
  if (anybody_captures()) return;  // CUDA's allocator queries no event then
  std::erase_if(retired, [](auto& life) {
    for (auto& recording : life->recordings)
      if (!recording->done) return false;
    for (auto& recording : life->recordings) query(recording);  // by this query the host knows that they are done
    if (life->pinned()) memory().pinned_pool.emplace(life->size, life->begin);
    else put_in_pool(life->block);
    return true;
  });
}

// Free the allocation that a DataPtr owns.
void end_life(void* context) {
  std::unique_ptr<AllocationP> owned(static_cast<AllocationP*>(context));
  Lock lock;
  auto& m = memory();
  auto& life = *owned;
  life->freed = true;
  if (!life->pinned()) {
    note_course(3 * life->size);
    m.living.erase(life->begin);
    if (life->pending) m.finishing.push_back(life);
    tally(&Stats::allocated_bytes, *life->block, false);
    trace({"free", life->home, life->begin});
  }
  life->users.erase(life->home);
  for (auto& user : life->users) life->recordings.push_back(record(user));
  if (!life->pinned() && life->users.empty()) put_in_pool(life->block);
  else (life->pinned() ? m.retired_pinned : m.retired).push_back(life);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    auto device = current_device();
    c10::Device on(c10::DeviceType::PrivateUse1, device);
    if (size == 0) return {nullptr, nullptr, &end_life, on};
    Lock lock;
    auto& m = memory();
    give_back_finished(m.retired);
    auto life = std::make_shared<Allocation>();
    life->home = {device, current_stream(device)};
    if (auto* capture = capture_of(life->home)) life->pool = capture->pool();
    size = rounded(size, kAlign);
    life->block = take_block(size, {life->home, life->pool, size <= kSmall, m.schedule});
    life->begin = life->block->begin;
    life->size = life->block->size;
    // Tasks of a former allocation of this memory may be pending.
    std::erase_if(m.finishing, [](auto& former) { return former->pending == 0; });
    auto overlaps = [&](auto& former) { return former->begin < life->end() && life->begin < former->end(); };
    life->stale = life->pool != kNoPool || std::any_of(m.finishing.begin(), m.finishing.end(), overlaps);
    if (!life->stale) poison(life->begin, life->size);
    m.living[life->begin] = life;
    trace({"allocate", life->home, life->begin, 0, static_cast<int64_t>(life->size)});
    note_course(2 * life->size + life->stale);
    tally(&Stats::allocated_bytes, *life->block, true);
    return {life->begin, new AllocationP(life), &end_life, on};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    drain();
    Lock lock;
    auto& m = memory();
    give_back_finished(m.retired);
    for (auto& [kind, pool] : m.pools) {
      if (m.held.count(kind.graph)) continue;
      std::erase_if(pool, [](auto* block) {
        if (block->before != nullptr || block->after != nullptr) return false;
        forget_accesses(block->begin, block->begin + block->size);
        tally(&Stats::reserved_bytes, *block, false);
        std::free(block->begin);
        delete block;
        return true;
      });
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_use(data.get(), key_of(stream)); }
  Stats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    return memory().stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock;
    auto& stats = memory().stats[device];
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes})
      for (auto& stat : *array) stat.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    constexpr size_t whole = size_t{80} << 30;
    return {whole - static_cast<size_t>(getDeviceStats(device).reserved_bytes[0].current), whole};
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device on(c10::kCPU);
    if (size == 0) return {nullptr, nullptr, &end_life, on};
    Lock lock;
    auto& m = memory();
    give_back_finished(m.retired_pinned);
    size_t whole = kPage;  // separate pages, which can be protected from the host
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
      life->begin = static_cast<char*>(std::aligned_alloc(kPage, whole));
      TORCH_CHECK(life->begin != nullptr, "sim: no host memory for ", whole, " pinned bytes");
    }
    m.pinned[life->begin] = life;
    poison(life->begin, whole);
    return {life->begin, new AllocationP(life), &end_life, on};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

AllocationP find(std::map<const char*, AllocationP>& all, const void* address) {
  auto found = all.upper_bound(static_cast<const char*>(address));
  if (found == all.begin()) return nullptr;
  auto& life = (--found)->second;
  return address < life->end() ? life : nullptr;
}
}  // namespace

c10::DeviceAllocator* device_allocator() { return &only<DeviceMemory>(); }
c10::Allocator* pinned_allocator() { return &only<PinnedMemory>(); }

void poison(const char* begin, size_t size) {
  if (!by_shapes_alone()) std::memset(const_cast<char*>(begin), 0xFF, size);
}

Work first_use(const AllocationP& stale, const std::string& by) {
  Task poisoning{[stale] { poison(stale->begin, stale->size); }};
  return {"the first use of memory given out again, by " + by, poisoning, {{stale->begin, stale->end(), true, stale}}};
}
void hold_pool(c10::MempoolId_t pool, int by) {
  auto& held = memory().held;
  if ((held[pool] += by) == 0) held.erase(pool);
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
  trace({"use", stream, life->begin});
}

void begin_fresh_memory() {
  forget_raised_error();
  device_allocator()->emptyCache();  // waits for all work
  Lock lock;
  memory().schedule++;
  std::erase_if(memory().pools, [](auto& entry) { return entry.second.empty(); });
}
}  // namespace sim

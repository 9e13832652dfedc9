// Launches: a capture keeps the work. Otherwise the allocations that it touches are looked up, and it enters the queue.
#include "device.h"

namespace sim {
void enqueue(StreamKey stream, std::string name, Task task, std::vector<Range> ranges, const Sizes& sizes) {
  if (by_shapes_alone()) {
    TraceEntry entry{"run", stream, nullptr, 0, 0, std::move(name), sizes};
    for (auto& range : ranges) (range.write ? entry.writes : entry.reads) += range.end - range.begin;
    return trace(std::move(entry));
  }
  auto place = here();
  Lock lock;
  Work work{std::move(name), std::move(task), std::move(ranges)};
  if (auto* capture = capture_of(stream)) capture->keep_work(stream, std::move(work));
  else issue(stream, std::move(work), place);
}

void issue(StreamKey stream, Work work, const PlaceP& place) {
  for (auto& range : work.ranges) {
    if (!range.life) range.life = allocation_at(range.begin);
    if (range.life && std::exchange(range.life->stale, false)) append(stream, first_use(range.life, work.name), place);
  }
  append(stream, std::move(work), place);
}
}  // namespace sim

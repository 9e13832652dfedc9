// The allocators of the device and of pinned host memory.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

namespace sim {
c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
}  // namespace sim

#include "standin.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <pthread.h>

#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace standin {

int64_t number(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != 0 ? std::atoll(text) : otherwise;
}

namespace {

const int64_t BREAKS = number("STANDIN_BREAKS", 0);  // at which wait of the host a kernel is found to have failed
std::atomic<bool> is_used{false}, is_bad_fork{false}, is_broken{false};
std::atomic<int64_t> number_of_waits{0};

// -- forks ----------------------------------------------------------------------------------------------------------------------

std::recursive_mutex& state_mutex() {  // guards all that follows; for ever, since tensors are freed at the very end too
  static auto* it = new std::recursive_mutex();
  return *it;
}
using Locked = std::lock_guard<std::recursive_mutex>;

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(
        [] { state_mutex().lock(); }, [] { state_mutex().unlock(); },
        [] {
          new (&state_mutex()) std::recursive_mutex();  // its owner has another id here
          is_bad_fork = is_used.load();
        });
  });
}

}  // namespace

bool bad_fork() { return is_bad_fork; }
bool used() { return is_used; }
int64_t waits() { return number_of_waits; }

void touch() {
  if (is_broken) {
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "CUDA error: device-side assert triggered (stand-in)");
  }
  TORCH_CHECK(
      !is_bad_fork,
      "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method");
  if (!is_used.exchange(true)) watch_forks();
}

// -- devices and streams --------------------------------------------------------------------------------------------------------

namespace {

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<int, int64_t> current_streams;

struct Used {  // a storage, by streams that have not been waited for
  int64_t made_on, writer, written;
  std::map<int64_t, int64_t> readers;
  std::set<int64_t> recorded;
};

struct Streams {
  Clock host;                                // what the host has waited for
  std::unordered_map<int64_t, Clock> known;  // what each stream has waited for, and how far it has come itself
  std::unordered_map<const void*, Used> storages;
  std::vector<int64_t> next = std::vector<int64_t>(DEVICES, 1);
  bool several = false;
  std::string freed_too_early;
};
Streams& streams() {
  static auto* it = new Streams();
  return *it;
}

int64_t seen(const Clock& clock, int64_t stream) {
  auto found = clock.find(stream);
  return found == clock.end() ? 0 : found->second;
}

void join(Clock& clock, const Clock& other) {
  for (auto& [stream, time] : other) {
    auto& mine = clock[stream];
    mine = std::max(mine, time);
  }
}

std::string name_of(int64_t stream) { return c10::str("stream ", stream & 0xffffffff, " of device ", stream >> 32); }

}  // namespace

c10::DeviceIndex current() { return current_device; }

void set_current(int index) {
  TORCH_CHECK(index < DEVICES, "CUDA error: invalid device ordinal");
  if (index >= 0) current_device = static_cast<c10::DeviceIndex>(index);
}

int64_t stream_of(int device) {
  if (device < 0) device = current_device;
  auto found = current_streams.find(device);
  return found == current_streams.end() ? int64_t(device) << 32 : found->second;
}

c10::Stream as_torch(int64_t stream) {
  return c10::Stream(c10::Stream::UNSAFE, {TYPE, static_cast<c10::DeviceIndex>(stream >> 32)}, stream & 0xffffffff);
}

int64_t as_ours(const c10::Stream& stream) { return (int64_t(stream.device_index()) << 32) + stream.id(); }

int64_t new_stream(int device) {
  touch();
  Locked lock(state_mutex());
  if (device < 0) device = current_device;
  auto& s = streams();
  s.several = true;  // what ran before is not looked at
  return (int64_t(device) << 32) + s.next.at(device)++;
}

int64_t exchange_stream(int64_t stream) {
  const int device = static_cast<int>(stream >> 32);
  auto before = stream_of(device);
  current_streams[device] = stream;
  return before;
}

Clock recorded(int64_t stream) {
  Locked lock(state_mutex());
  return streams().known[stream];
}

void wait_on_device(int64_t stream, const Clock& event) {
  Locked lock(state_mutex());
  join(streams().known[stream], event);
}

void operation(int device, const std::vector<const void*>& reads, const std::vector<const void*>& writes) {
  Locked lock(state_mutex());
  auto& s = streams();
  const auto stream = stream_of(device);
  auto& known = s.known[stream];
  const auto now = ++known[stream];
  if (!s.several) return;
  join(known, s.host);
  auto ended = [&](int64_t other, int64_t time) { return other == stream || seen(known, other) >= time; };
  auto at = [&](const void* storage) -> Used& { return s.storages.try_emplace(storage, Used{stream, stream, 0, {}, {}}).first->second; };
  for (const auto* storage : reads) {
    if (storage == nullptr) continue;
    auto& use = at(storage);
    TORCH_CHECK(
        ended(use.writer, use.written), "stand-in: ", name_of(stream), " reads memory that ", name_of(use.writer),
        " may still be writing: it has to wait for that stream, or for an event of it");
    use.readers[stream] = now;
  }
  for (const auto* storage : writes) {
    if (storage == nullptr) continue;
    auto& use = at(storage);
    TORCH_CHECK(
        ended(use.writer, use.written), "stand-in: ", name_of(stream), " writes memory that ", name_of(use.writer),
        " may still be writing: it has to wait for that stream, or for an event of it");
    for (auto& [reader, time] : use.readers) {
      TORCH_CHECK(
          ended(reader, time), "stand-in: ", name_of(stream), " writes memory that ", name_of(reader),
          " may still be reading: it has to wait for that stream, or for an event of it");
    }
    use.readers.clear();
    use.writer = stream;
    use.written = now;
  }
}

void in_use_by(const void* storage, int64_t stream) {
  Locked lock(state_mutex());
  auto found = streams().storages.find(storage);
  if (found != streams().storages.end()) found->second.recorded.insert(stream);
}

namespace {

// PyTorch gives freed memory to the next tensor of the stream that made it: others must have ended, or be recorded.
void forget(const void* storage) {
  auto& s = streams();
  auto found = s.storages.find(storage);
  if (found == s.storages.end()) return;
  auto& use = found->second;
  auto readers = use.readers;
  readers[use.writer] = std::max(readers[use.writer], use.written);
  auto& known = s.known[use.made_on];
  for (auto& [stream, time] : readers) {
    const bool ended = stream == use.made_on || seen(known, stream) >= time || seen(s.host, stream) >= time;
    if (!ended && use.recorded.count(stream) == 0) s.freed_too_early = name_of(stream);
  }
  s.storages.erase(found);
}

}  // namespace

// -- the host waits -------------------------------------------------------------------------------------------------------------

std::function<void(const std::string&)> on_wait;

namespace {

struct Copy {
  at::Tensor host;    // keeps the memory
  std::string bytes;  // for it, or as they were
  bool arriving;
  int64_t stream, time;
};
std::vector<Copy>& copies() {
  static auto* it = new std::vector<Copy>();
  return *it;
}

// Lets the host know that all of `clock` has ended. True if it did know; raises if pinned memory was changed meanwhile.
bool reached(const Clock& clock) {
  bool known = true, raced = false;
  std::vector<Copy> ended, left;  // freed without the lock: that may want Python's
  {
    Locked lock(state_mutex());
    auto& host = streams().host;
    for (auto& [stream, time] : clock) known &= seen(host, stream) >= time;
    join(host, clock);
    for (auto& copy : copies()) (seen(host, copy.stream) < copy.time ? left : ended).push_back(std::move(copy));
    copies() = std::move(left);
    for (auto& copy : ended) {
      if (copy.arriving) {
        std::memcpy(copy.host.data_ptr(), copy.bytes.data(), copy.bytes.size());
      } else {
        raced |= std::memcmp(copy.host.data_ptr(), copy.bytes.data(), copy.bytes.size()) != 0;
      }
    }
  }
  TORCH_CHECK(!raced, "stand-in: pinned memory was changed while a non-blocking copy to the device may still read it");
  return known;
}

void wait_for(const Clock& clock, const std::string& why) {
  if (++number_of_waits == BREAKS) is_broken = true;
  touch();
  if (on_wait) on_wait(why);
  reached(clock);
  std::string early;
  {
    Locked lock(state_mutex());
    early = std::exchange(streams().freed_too_early, {});
  }
  TORCH_CHECK(early.empty(), "stand-in: memory was freed that ", early, " may still be using: Tensor.record_stream keeps it");
}

}  // namespace

void wait_for_stream(int64_t stream, const std::string& why) { wait_for(recorded(stream), why); }
void wait_for_event(const Clock& event, const std::string& why) { wait_for(event, why); }

void wait_for_device(int device, const std::string& why) {
  if (device < 0) device = current_device;
  Clock all;
  {
    Locked lock(state_mutex());
    for (auto& [stream, known] : streams().known) {
      if (stream >> 32 == device) join(all, known);
    }
  }
  wait_for(all, why);
}

bool has_ended(const Clock& event) {
  touch();
  return reached(event);
}

void goes_on(at::Tensor host, std::string bytes, bool arriving, int device) {
  Locked lock(state_mutex());
  const auto stream = stream_of(device);
  copies().push_back({std::move(host), std::move(bytes), arriving, stream, streams().known[stream][stream]});
}

int64_t copies_going_on() {
  Locked lock(state_mutex());
  return static_cast<int64_t>(copies().size());
}

// -- memory of the device -------------------------------------------------------------------------------------------------------

namespace {

struct Blocks {
  std::unordered_map<const void*, std::pair<size_t, int>> sizes;  // bytes, device
  std::vector<Peak> devices = std::vector<Peak>(DEVICES);
};
Blocks& blocks() {
  static auto* it = new Blocks();
  return *it;
}

void* fresh(size_t bytes) {
  void* at = nullptr;
  TORCH_CHECK(posix_memalign(&at, 64, bytes) == 0, "the host has no memory for the stand-in");
  return std::memset(at, 0xFF, bytes);  // what is read before it is written is NaN
}

void release(void* at) {
  discharge(at);
  std::free(at);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    touch();
    const c10::Device device(TYPE, current_device);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    auto* at = fresh(bytes);
    try {
      charge(at, bytes, current_device);
    } catch (...) {
      std::free(at);
      throw;
    }
    return {at, at, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return is_used; }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is kept
  void recordStream(const c10::DataPtr& at, c10::Stream stream) override { in_use_by(at.get(), as_ours(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    const auto it = memory(device);
    for (auto* stat : {&found.allocated_bytes, &found.reserved_bytes, &found.active_bytes, &found.requested_bytes}) {
      (*stat)[0].current = it.now;
      (*stat)[0].peak = it.peak;
    }
    found.num_device_alloc = it.allocations;
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Locked lock(state_mutex());
    blocks().devices.at(device).allocations = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Locked lock(state_mutex());
    auto& it = blocks().devices.at(device);
    it.peak = it.now;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return {LIMIT - memory(device).now, LIMIT}; }
};

}  // namespace

void charge(const void* storage, size_t bytes, int device) {
  Locked lock(state_mutex());
  auto& it = blocks().devices.at(device);
  TORCH_CHECK_WITH(
      OutOfMemoryError, it.now + static_cast<int64_t>(bytes) <= LIMIT, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ",
      device, " has a total capacity of ", LIMIT, " bytes of which ", LIMIT - it.now, " bytes are free (stand-in).");
  blocks().sizes[storage] = {bytes, device};
  it.now += static_cast<int64_t>(bytes);
  it.peak = std::max(it.peak, it.now);
  it.allocations++;
}

void discharge(const void* storage) {
  Locked lock(state_mutex());
  auto found = blocks().sizes.find(storage);
  if (found == blocks().sizes.end()) return;
  blocks().devices.at(found->second.second).now -= static_cast<int64_t>(found->second.first);
  blocks().sizes.erase(found);
  forget(storage);
}

Peak memory(int device) {
  Locked lock(state_mutex());
  return blocks().devices.at(device < 0 ? current_device : device);
}

// -- pinned memory of the host --------------------------------------------------------------------------------------------------

namespace {

struct Pinned {
  std::map<uintptr_t, size_t> sizes;     // bytes that were asked for
  std::multiset<size_t> kept;            // bytes of blocks that torch keeps for later
  int64_t bytes = 0;                     // of all blocks
  static size_t rounded(size_t bytes) { return std::bit_ceil(bytes); }  // as torch does
};
Pinned& pinned() {
  static auto* it = new Pinned();
  return *it;
}

void unpin(void* at) {
  Locked lock(state_mutex());
  auto found = pinned().sizes.find(reinterpret_cast<uintptr_t>(at));
  if (found == pinned().sizes.end()) return;
  pinned().kept.insert(Pinned::rounded(found->second));
  pinned().sizes.erase(found);
  std::free(at);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    touch();
    const c10::Device device(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &unpin, device};
    auto* at = fresh(bytes);
    Locked lock(state_mutex());
    auto& it = pinned();
    it.sizes[reinterpret_cast<uintptr_t>(at)] = bytes;
    auto again = it.kept.find(Pinned::rounded(bytes));
    if (again != it.kept.end()) {
      it.kept.erase(again);
    } else {
      it.bytes += static_cast<int64_t>(Pinned::rounded(bytes));
    }
    return {at, at, &unpin, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {
    Locked lock(state_mutex());
    for (auto bytes : pinned().kept) pinned().bytes -= static_cast<int64_t>(bytes);
    pinned().kept.clear();
  }
  at::HostStats get_stats() override {
    at::HostStats found;
    found.allocated_bytes.current = pinned_bytes();
    return found;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

int64_t pinned_bytes() {
  Locked lock(state_mutex());
  return pinned().bytes;
}

bool is_pinned(const void* data) {
  Locked lock(state_mutex());
  const auto at = reinterpret_cast<uintptr_t>(data);
  auto after = pinned().sizes.upper_bound(at);
  if (after == pinned().sizes.begin()) return false;
  auto found = std::prev(after);
  return at < found->first + found->second;
}

c10::Allocator* device_memory() {
  static auto* it = new DeviceMemory();
  return it;
}

c10::Allocator* pinned_memory() {
  static auto* it = new PinnedMemory();
  return it;
}

void register_memory() {
  c10::SetAllocator(TYPE, device_memory());
  at::setHostAllocator(TYPE, static_cast<at::HostAllocator*>(pinned_memory()));
}

}  // namespace standin
